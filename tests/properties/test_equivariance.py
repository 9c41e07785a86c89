"""The symmetries of the method, under random weights, states and transformations."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tape_pe.ops import contextualize, positional_attention, reference, rotary_state, rotate
from tape_pe.ops.reference import attention_weights, general_attention, general_encoding, general_update

quick = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
grouped_heads = st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (3, 1)])


class Random:
    """Normal fp64 tensors from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


class General(NamedTuple):
    """Arguments of a layer in the general form."""

    query: Tensor
    key: Tensor
    value: Tensor
    encoding: Tensor
    gate: Tensor

    @classmethod
    def draw(cls, random: Random, heads: int, kv_heads: int, tokens: int, rows: int, columns: int) -> General:
        width = 2 * rows
        return cls(
            random(2, heads, tokens, width),
            random(2, kv_heads, tokens, width),
            random(2, kv_heads, tokens, 3),
            random(2, tokens, kv_heads * 2, rows, columns),
            random(2, tokens, 5),
        )

    def reorder(self, order: Tensor) -> General:
        tokens_second = (self.encoding[:, order], self.gate[:, order])
        return General(*(x[:, :, order] for x in self[:3]), *tokens_second)

    def run(self, weights: dict[str, Tensor], causal: bool) -> tuple[Tensor, Tensor]:
        output, averaged = general_attention(self.query, self.key, self.value, self.encoding, causal=causal)
        return output, general_update(self.encoding, averaged, self.gate, **weights)


def general_weights(random: Random, heads: int, kv_heads: int, rows: int) -> dict[str, Tensor]:
    size, wide = kv_heads * 2 * rows, heads * 2 * rows
    return {"mix": random(size, wide) / wide, "up": random(5, size) / size, "down": random(size, 5) / 5}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@quick
@given(seeds, grouped_heads, st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_orthogonal_equivariance(seed, heads, tokens, rows, columns, causal) -> None:
    """e -> e Q leaves tokens as they are and turns the new state into e2 Q."""
    random = Random(seed)
    layer, weights = General.draw(random, *heads, tokens, rows, columns), general_weights(random, *heads, rows)
    turn = torch.linalg.qr(random(columns, columns)).Q
    if seed % 2:  # both halves of O(R): rotations and reflections
        turn[:, 0] *= -1
    output, state = layer.run(weights, causal)
    turned_output, turned_state = layer._replace(encoding=layer.encoding @ turn).run(weights, causal)
    close(turned_output, output)
    close(turned_state, state @ turn)


@quick
@given(seeds, grouped_heads, st.integers(2, 7), st.integers(1, 3), st.integers(1, 3))
def test_permutation_equivariance(seed, heads, tokens, rows, columns) -> None:
    """Reordering tokens together with their states reorders the outputs."""
    random = Random(seed)
    layer, weights = General.draw(random, *heads, tokens, rows, columns), general_weights(random, *heads, rows)
    order = torch.randperm(tokens, generator=random.generator)
    output, state = layer.run(weights, causal=False)
    reordered_output, reordered_state = layer.reorder(order).run(weights, causal=False)
    close(reordered_output, output[:, :, order])
    close(reordered_state, state[:, order])


def test_other_maps_are_no_symmetries() -> None:
    """The tests above can tell: a shear of R, and reordering the tokens alone, change the outputs."""
    random = Random(0)
    layer, weights = General.draw(random, 4, 2, 5, 2, 2), general_weights(random, 4, 2, 2)
    output, _ = layer.run(weights, causal=False)
    shear = torch.tensor([[1.0, 0.3], [0.0, 1.0]], dtype=torch.float64)
    assert not torch.allclose(layer._replace(encoding=layer.encoding @ shear).run(weights, causal=False)[0], output)
    reordered = layer.reorder(torch.tensor([1, 0, 2, 3, 4]))._replace(encoding=layer.encoding)
    assert not torch.allclose(reordered.run(weights, causal=False)[0][:, :, 2:], output[:, :, 2:])


class Rotary(NamedTuple):
    """A layer's arguments in the rotary form, D = 6, Dv = 4, I = 5."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    mix: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def draw(cls, random: Random, heads: int, kv_heads: int, tokens: int, batch: int = 2) -> Rotary:
        return cls(
            random(batch, heads, tokens, 6),
            random(batch, kv_heads, tokens, 6),
            random(batch, kv_heads, tokens, 4),
            random(batch, tokens, 5),
            random(kv_heads, heads),
            random(5, kv_heads),
            random(kv_heads, 5),
        )

    def weights(self) -> dict[str, Tensor]:
        return {"mix": self.mix, "up": self.up, "down": self.down}

    def run(self, state: Tensor, *, causal: bool = True, norm: str = "none") -> tuple[Tensor, Tensor]:
        """Output and new state, through the default backend."""
        query, key = rotate(self.query, state), rotate(self.key, state)
        output, averaged = positional_attention(query, key, self.value, state, causal=causal)
        return output, contextualize(state, averaged, self.gate, **self.weights(), norm=norm)


@quick
@given(seeds, grouped_heads, st.integers(1, 9), st.booleans())
def test_rotary_form_is_the_general_form_with_weights_on_the_head_axis(seed, heads, tokens, causal) -> None:
    """W of the general form = W of the rotary form x identity over a head's blocks and rows (Kronecker product)."""
    random = Random(seed)
    layer, state = Rotary.draw(random, *heads, tokens), random(2, heads[1], tokens, 6)
    encoding, eye = general_encoding(state), torch.eye(6, dtype=torch.float64)
    output, averaged = general_attention(layer.query, layer.key, layer.value, encoding, causal=causal)
    weights = {name: torch.kron(weight, eye) for name, weight in layer.weights().items()}
    gate = layer.gate.repeat_interleave(6, dim=-1)
    updated = general_update(encoding, averaged, gate, **weights)
    rotary_output, rotary_updated = layer.run(state, causal=causal)
    close(rotary_output, output)
    scale = updated.abs().max().clamp(min=1.0)
    close(general_encoding(rotary_updated) / scale, updated / scale)


@quick
@given(seeds, grouped_heads, st.integers(1, 9), st.integers(-500, 100_000), st.sampled_from(["none", "rms"]))
def test_a_common_shift_of_positions_changes_phases_alone(seed, heads, tokens, shift, norm) -> None:
    """Attention weights and outputs stay; all states of a layer turn by the same phases."""
    random = Random(seed)
    layer = Rotary.draw(random, *heads, tokens)
    positions = torch.arange(tokens)[None]
    state, shifted = (rotary_state(p, 6, dtype=torch.float64) for p in (positions, positions + shift))
    phase = rotary_state(torch.tensor([[shift]]), 6, dtype=torch.float64)
    for _ in range(3):  # layers
        weights, weights_shifted = (
            attention_weights(rotate(layer.query, z), rotate(layer.key, z)) for z in (state, shifted)
        )
        torch.testing.assert_close(weights_shifted, weights, rtol=0, atol=1e-8)
        (output, state), (output_shifted, shifted) = layer.run(state, norm=norm), layer.run(shifted, norm=norm)
        torch.testing.assert_close(output_shifted, output, rtol=0, atol=1e-8)
        scale = state.abs().max().clamp(min=1.0)
        torch.testing.assert_close(shifted / scale, rotate(state, phase) / scale, rtol=0, atol=1e-8)
        if norm == "none":  # keep the growth of random weights out of the softmax
            state, shifted = state / scale, shifted / scale


@quick
@given(seeds, grouped_heads, st.integers(2, 40), st.data(), st.sampled_from(["blockwise", "sdpa", "reference"]))
def test_causality(seed, heads, tokens, data, backend) -> None:
    """A token changes no earlier output or state, by not a single bit."""
    random = Random(seed)
    layer, state = Rotary.draw(random, *heads, tokens), random(2, heads[1], tokens, 6)
    changed = data.draw(st.integers(1, tokens - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPE_BACKEND", backend)
        before = layer.run(state)
        noise = [random(*x.shape) for x in (layer.query, layer.key, layer.value)]
        for x, new in zip((layer.query, layer.key, layer.value), noise, strict=True):
            x[:, :, changed:] = new[:, :, changed:]
        layer.gate[:, changed:] = 7.0
        state[:, :, changed:] *= -2.0
        after = layer.run(state)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :, :changed], new[:, :, :changed])
        assert not torch.equal(old[:, :, changed:], new[:, :, changed:])


@quick
@given(seeds, grouped_heads, st.integers(1, 40), st.sampled_from(["blockwise", "sdpa", "reference"]))
def test_batch_rows_are_independent(seed, heads, tokens, backend) -> None:
    random = Random(seed)
    layer, state = Rotary.draw(random, *heads, tokens, batch=3), random(3, heads[1], tokens, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPE_BACKEND", backend)
        before = layer.run(state)
        for x in (layer.query, layer.key, layer.value, layer.gate, state):
            x[1] = random(*x.shape[1:])
        after = layer.run(state)
        alone = [x[2:] for x in (layer.query, layer.key, layer.value, layer.gate)]
        single = Rotary(*alone, layer.mix, layer.up, layer.down).run(state[2:])
    for old, new, one in zip(before, after, single, strict=True):
        assert torch.equal(old[[0, 2]], new[[0, 2]])
        assert not torch.equal(old[1], new[1])
        torch.testing.assert_close(one, new[2:], rtol=1e-12, atol=1e-10)


@quick
@given(seeds, grouped_heads, st.integers(1, 9))
def test_fast_update_equals_its_literal_twin(seed, heads, tokens) -> None:
    random = Random(seed)
    layer, state = Rotary.draw(random, *heads, tokens), random(2, heads[1], tokens, 6)
    arguments = (state, random(2, heads[0], tokens, 6), layer.gate)
    actual, expected = (f(*arguments, **layer.weights()) for f in (contextualize, reference.contextualize))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
