"""xPos against its formula, and far out."""

from __future__ import annotations

import cmath

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.xpos import Xpos, XposOptions

SIZES = EncodingSizes(32, 4, 2, 8, 3, 512, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def literal(u: list[float], position: int, sign: int, scale_base: float, centre: int) -> list[float]:
    """One query (sign 1) or key (sign -1) of D channels, rotated and scaled pair by pair."""
    half = len(u) // 2
    turned = []
    for j in range(half):
        zeta = (2 * j + 0.4 * 2 * half) / (1.4 * 2 * half)
        pair = complex(u[j], u[j + half]) * cmath.exp(1j * position * 10000.0 ** (-2 * j / (2 * half)))
        turned.append(pair * zeta ** (sign * (position - centre) / scale_base))
    return [z.real for z in turned] + [z.imag for z in turned]


@pytest.mark.parametrize("scale_base", [2048.0, 512.0, 7])
def test_queries_and_keys(scale_base: float) -> None:
    options = XposOptions(scale_base=scale_base)
    positions = [0, 1, 5, 100, 511]
    state = Xpos(SIZES, options).start(Tokens(torch.tensor([positions]), 5), torch.float64)
    assert state.shape == (1, 1, 5, 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 5, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64)
    turned = Xpos.layer(SIZES, options, 0).rotate(query, key, state)
    for given, actual, sign in zip((query, key), turned, (1, -1), strict=True):
        for head in range(given.shape[1]):
            for column, n in enumerate(positions):
                expected = literal(given[0, head, column].tolist(), n, sign, scale_base, 256)
                assert actual[0, head, column].tolist() == pytest.approx(expected, rel=1e-9)


def test_16k_positions_in_fp32() -> None:
    """Tables are finite and right to 1e-5 each, and so are scores, at any place and distance."""
    encoding = Xpos(SIZES, XposOptions())
    positions = torch.arange(16384)[None]
    state = encoding.start(Tokens(positions, 16384))
    exact = encoding.start(Tokens(positions, 16384), torch.float64)
    assert state.dtype == torch.float32
    assert torch.isfinite(state).all()
    for table, exact_table in zip(state.chunk(2, dim=-1), exact.chunk(2, dim=-1), strict=True):
        numbers, exact_numbers = (torch.complex(*part.double().chunk(2, dim=-1)) for part in (table, exact_table))
        assert ((numbers - exact_numbers).abs() <= 1e-5 * exact_numbers.abs()).all()
    first = torch.complex(exact[..., 0], exact[..., 4])[0, 0]  # of queries, channel pair 0
    for n in (0, 16383):
        assert first[n].abs().item() == pytest.approx((0.4 / 1.4) ** ((n - 256) / 2048), rel=1e-12)
    ones = torch.ones(1, 4, 16384, 8)
    query, key = Xpos.layer(SIZES, XposOptions(), 0).rotate(ones, ones[:, :2], state)
    for n, m in ((16383, 16383), (16383, 16000), (16383, 0), (9000, 8999), (0, 0)):
        terms = [
            2 * ((2 * j + 3.2) / 11.2) ** ((n - m) / 2048) * cmath.exp(1j * (n - m) * 10000.0 ** (-j / 4)).real
            for j in range(4)
        ]
        size = sum(2 * ((2 * j + 3.2) / 11.2) ** ((n - m) / 2048) for j in range(4))
        assert abs(float(query[0, 0, n] @ key[0, 0, m]) - sum(terms)) <= 1e-5 * size


def test_a_shift_of_all_positions_changes_nothing(make_model, make_tokens) -> None:
    model, input_ids = make_model("xpos"), make_tokens(2, 40)
    positions = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(input_ids, position_ids=positions).logits
        shifted = model(input_ids, position_ids=positions + 1000).logits
    assert (shifted - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("scale_base", [0.0, -512.0, float("inf"), float("nan")])
def test_scale_base_must_be_positive(scale_base: float) -> None:
    with pytest.raises(ValueError, match=f"encoding_options.scale_base={scale_base}: a positive number"):
        XposOptions(scale_base=scale_base)
