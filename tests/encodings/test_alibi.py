"""ALiBi: slopes, the bias against its formula, and how often it is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.alibi import Alibi, alibi_slopes

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def literal_bias(tokens: Tokens, slopes: list[float]) -> torch.Tensor:
    """The formula by loops, `[B | 1, H, N, Nk]` in fp64."""
    rows, num_all = tokens.position_ids.shape
    bias = torch.zeros(rows, len(slopes), tokens.num_new, num_all, dtype=torch.float64)
    for b in range(rows):
        positions = tokens.position_ids[b].tolist()
        for h, slope in enumerate(slopes):
            for i in range(tokens.num_new):
                for j in range(num_all):
                    bias[b, h, i, j] = -slope * abs(positions[num_all - tokens.num_new + i] - positions[j])
    return bias


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_slopes_of_powers_of_two(heads: int) -> None:
    assert alibi_slopes(heads) == [2 ** (-8 * h / heads) for h in range(1, heads + 1)]


@pytest.mark.parametrize("heads", [3, 5, 6, 7, 12, 20, 25])
def test_slopes_of_other_numbers(heads: int) -> None:
    lower = max(power for power in (1, 2, 4, 8, 16) if power < heads)
    expected = alibi_slopes(lower) + alibi_slopes(2 * lower)[::2][: heads - lower]
    assert alibi_slopes(heads) == expected
    assert len(set(expected)) == heads


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias(tokens: Tokens, heads: int, dtype: torch.dtype) -> None:
    actual = Alibi(replace(SIZES, num_attention_heads=heads), Alibi.options_class()).bias(tokens, dtype).materialize()
    assert actual.dtype == dtype
    expected = literal_bias(tokens, alibi_slopes(heads))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-7 if dtype == torch.float32 else 1e-15, atol=0)


@pytest.mark.parametrize("first", [0, 16_777_216, 2**40])
def test_distances_are_exact_wherever_the_text_stands(first: int) -> None:
    positions = torch.tensor([[first, first + 1, first + 50_001, first + 99_999, first + 100_000]])
    actual = Alibi(SIZES, Alibi.options_class()).bias(Tokens(positions, 5)).materialize()
    distances = -actual[0] / torch.tensor(alibi_slopes(4))[:, None, None]  # slopes of 4 heads are powers of two
    assert torch.equal(distances[3].long(), (positions[0, :, None] - positions[0]).abs())


def test_one_row_for_the_batch_where_a_cache_has_expanded_it() -> None:
    encoding = Alibi(SIZES, Alibi.options_class())
    row = torch.arange(5)[None]
    assert encoding.bias(Tokens(row.expand(8, -1), 5)).shape == (1, 4, 5, 5)
    assert encoding.bias(Tokens(row.repeat(8, 1), 5)).shape == (8, 4, 5, 5)
    expanded, alone = (encoding.bias(Tokens(rows, 5)).materialize() for rows in (row.expand(8, -1), row))
    assert torch.equal(expanded, alone)


def test_nothing_is_stored() -> None:
    encoding = Alibi(SIZES, Alibi.options_class())
    assert not encoding.state_dict()
    assert not list(encoding.buffers())


def test_built_once_for_all_layers(make_model, make_tokens, monkeypatch) -> None:
    model = make_model("alibi")
    calls = []
    bias = model.model.encoding.bias
    monkeypatch.setattr(model.model.encoding, "bias", lambda *args: calls.append(1) or bias(*args))
    model(make_tokens(2, 6))
    assert len(calls) == 1


def test_attention_weights(make_model, make_tokens, first_layer, literal_weights) -> None:
    """Rows with padding on the left, in the whole decoder."""
    model = make_model("alibi").double()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    query, key, weights = first_layer(model, make_tokens(2, 8), attention_mask=mask)
    tokens = Tokens(torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], list(range(8))]), 8)
    torch.testing.assert_close(weights, literal_weights(query, key, literal_bias(tokens, alibi_slopes(4)), mask - 1))


@pytest.mark.parametrize("num_heads", [1, 4, 6, 8, 12, 16, 20])
def test_bias_is_that_of_transformers(num_heads: int) -> None:
    """Bloom adds slope * j where the paper has -slope * (i - j): rows differ by a constant, which softmax ignores."""
    length = 33
    theirs = build_alibi_tensor(torch.ones(1, length), num_heads, torch.float64).reshape(num_heads, 1, length)
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)
    torch.testing.assert_close(slopes, theirs[:, 0, 1], rtol=1e-6, atol=0)
    sizes = EncodingSizes(8 * num_heads, num_heads, num_heads, 8, 2, length, {"rope_theta": 10000.0}, 0.02)
    ours = (
        Alibi(sizes, Alibi.options_class())
        .bias(Tokens(torch.arange(length)[None], length), torch.float64)
        .materialize()[0]
    )
    theirs = (theirs - theirs.transpose(1, 2)).tril()
    assert (ours.tril() - theirs).abs().max() <= 1e-6 * theirs.abs().max()
