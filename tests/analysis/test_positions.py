"""Measures of states against their formulas, written out number by number."""

import cmath
import math

import pytest
import torch

from tape_pe.analysis.positions import (
    attention_difference,
    complex_state,
    inner_products,
    movement,
    relative_difference,
    state_norms,
)
from tape_pe.ops import widen
from tape_pe.ops.reference import general_encoding

BATCH, HEADS, TOKENS, PAIRS = 2, 3, 5, 4


@pytest.fixture
def state():
    return torch.randn(BATCH, HEADS, TOKENS, 2 * PAIRS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def start():
    angles = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(PAIRS, dtype=torch.float64) / PAIRS)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).expand(BATCH, HEADS, -1, -1)


def number(state, *place):
    *where, pair = place
    values = state[tuple(where)]
    return complex(values[pair], values[pair + len(values) // 2])


def test_inner_products_are_those_of_the_general_form(state):
    found = inner_products(state)
    encodings = general_encoding(state).unflatten(2, (HEADS, PAIRS))  # [B, N, H, P, 2, 2]
    for b, h, i, j in ((0, 0, 0, 0), (0, 2, 4, 1), (1, 1, 2, 3)):
        expected = sum((number(state, b, h, i, p) * number(state, b, h, j, p).conjugate()).real for p in range(PAIRS))
        assert found[b, h, i, j] == pytest.approx(expected / PAIRS)
        general = (encodings[b, i, h] * encodings[b, j, h]).sum() / (2 * PAIRS)
        assert found[b, h, i, j] == pytest.approx(float(general))


def test_a_packed_state_and_its_wide_form_measure_the_same(state, start):
    torch.testing.assert_close(inner_products(widen(state)), inner_products(state))
    torch.testing.assert_close(state_norms(widen(state)), state_norms(state))
    for wide, packed in zip(movement(widen(state), widen(start))[:3], movement(state, start)[:3], strict=True):
        torch.testing.assert_close(wide, packed)


def test_start_states_have_norm_one_and_have_not_moved(start):
    torch.testing.assert_close(inner_products(start).diagonal(dim1=-2, dim2=-1), torch.ones_like(start[..., 0]))
    torch.testing.assert_close(state_norms(start), torch.ones_like(start[..., 0]))
    moved = movement(start, start)
    assert float(moved.phase.max()) == float(moved.drift.abs().max()) == 0.0
    torch.testing.assert_close(moved.magnitude, torch.ones_like(start[..., 0]))


def test_norms(state):
    expected = math.sqrt(sum(abs(number(state, 1, 2, 3, p)) ** 2 for p in range(PAIRS)) / PAIRS)
    assert float(state_norms(state)[1, 2, 3]) == pytest.approx(expected)
    torch.testing.assert_close(complex_state(state).abs().square().mean(-1).sqrt(), state_norms(state))


def test_movement(state, start):
    moved = movement(state, start)
    ratios = [number(state, 1, 2, 3, p) / number(start, 1, 2, 3, p) for p in range(PAIRS)]
    assert float(moved.phase[1, 2, 3]) == pytest.approx(sum(math.degrees(abs(cmath.phase(r))) for r in ratios) / PAIRS)
    assert float(moved.drift[1, 2, 3]) == pytest.approx(math.degrees(cmath.phase(sum(ratios))))
    assert float(moved.magnitude[1, 2, 3]) == pytest.approx(math.sqrt(sum(abs(r) ** 2 for r in ratios) / PAIRS))
    angles = [abs(cmath.phase(number(state, 0, 1, n, 2) / number(start, 0, 1, n, 2))) for n in range(TOKENS)]
    assert float(moved.pair_phase[0, 1, 2]) == pytest.approx(math.degrees(sum(angles) / TOKENS))


def test_a_turn_of_all_pairs_is_a_drift(start):
    turned = complex_state(start) * 1.5 * cmath.exp(0.25j)
    moved = movement(torch.cat([turned.real, turned.imag], dim=-1), start)
    assert moved.drift.flatten().tolist() == pytest.approx([math.degrees(0.25)] * moved.drift.numel())
    assert moved.phase.flatten().tolist() == pytest.approx([math.degrees(0.25)] * moved.phase.numel())
    assert moved.magnitude.flatten().tolist() == pytest.approx([1.5] * moved.magnitude.numel())


def test_relative_difference_reads_pairs_that_attention_sees(state):
    plain, changed = inner_products(state), inner_products(state.roll(1, dims=2))
    above = sum(float(changed[1, 0, i, j] - plain[1, 0, i, j]) ** 2 for i in range(TOKENS) for j in range(i + 1))
    below = sum(float(plain[1, 0, i, j]) ** 2 for i in range(TOKENS) for j in range(i + 1))
    assert float(relative_difference(changed, plain)[1, 0]) == pytest.approx(math.sqrt(above / below))
    assert float(relative_difference(changed.triu(1) + plain.tril(), plain).max()) == 0.0


def test_attention_difference():
    plain = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    changed = torch.tensor([[0.9, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.3, 0.2]])
    assert float(attention_difference(changed, plain)) == pytest.approx((0.1 + 0.0 + 0.6) / 3)
