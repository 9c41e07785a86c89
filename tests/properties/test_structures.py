"""Which structures follow a common rotation of all states, and which do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tape_pe.encodings import EncodingSizes
from tape_pe.encodings.tape import ChannelsLayer, Tape, TapeLayer, TapeOptions, UnstructuredLayer
from tape_pe.ops import positional_attention

quick = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
angles = st.floats(-3.0, 3.0)
STRUCTURES = ("rotary", "components", "channels", "unstructured")
WIDE = ("channels", "unstructured")
TOKENS = 6


class Setting:
    """A layer with random weights everywhere, queries, keys, values, gates and states, all in fp64."""

    def __init__(self, structure: str, seed: int, kv_heads: int = 2, states: str = "random") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        sizes = EncodingSizes(16, 4, kv_heads, 8, 2, 64, {"rope_theta": 10000.0}, 0.02)
        layer = Tape.layer(sizes, TapeOptions(structure=structure), 0)
        assert isinstance(layer, TapeLayer)
        self.layer = layer.double()
        self.is_wide = isinstance(layer, (ChannelsLayer, UnstructuredLayer))
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(0.5 * self.draw(*weight.shape))
        self.query, self.key, self.value = (self.draw(1, heads, TOKENS, 8) for heads in (4, kv_heads, kv_heads))
        self.hidden = self.draw(1, TOKENS, 16)
        halves = self.draw(2, 1, kv_heads, TOKENS, 8)  # C and S
        if not self.is_wide:
            self.state = torch.cat([halves[0, ..., :4], halves[1, ..., :4]], dim=-1)
        elif states == "equal halves":
            self.state = torch.cat([halves[0, ..., :4]] * 2 + [halves[1, ..., :4]] * 2, dim=-1)
        else:
            self.state = torch.cat([halves[0], halves[1]], dim=-1)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    @torch.no_grad()
    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The attention output and the new state."""
        query, key = self.layer.rotate(self.query, self.key, state)
        output, averaged = positional_attention(query, key, self.value, state)
        return output, self.layer(state, averaged, self.hidden, self.hidden)

    @torch.no_grad()
    def update(self, state: Tensor) -> Tensor:
        """The new state, with the averages of fixed attention weights."""
        weights = torch.ones(TOKENS, TOKENS, dtype=torch.float64).tril()
        averaged = (weights / weights.sum(dim=1, keepdim=True)) @ state
        groups = 4 // state.shape[1]
        return self.layer(state, averaged.repeat_interleave(groups, dim=1), self.hidden, self.hidden)


def turn(state: Tensor, angle: float) -> Tensor:
    """Adds a phase to all pairs (c, s): c + is times exp(i angle)."""
    c, s = state.chunk(2, dim=-1)
    cos, sin = torch.tensor(angle, dtype=torch.float64).cos(), torch.tensor(angle, dtype=torch.float64).sin()
    return torch.cat([c * cos - s * sin, s * cos + c * sin], dim=-1)


def turn_rows(state: Tensor, angle: float) -> Tensor:
    """e -> e Q for a wide state, whose blocks are e = [[C_1, S_2], [-S_1, C_2]] with 1 and 2 the channels of a pair.
    Scores, which read e^T u, cannot see it, whatever the state."""
    c_1, c_2, s_1, s_2 = state.chunk(4, dim=-1)
    cos, sin = torch.tensor(angle, dtype=torch.float64).cos(), torch.tensor(angle, dtype=torch.float64).sin()
    return torch.cat(
        [c_1 * cos - s_2 * sin, c_2 * cos - s_1 * sin, s_1 * cos + c_2 * sin, s_2 * cos + c_1 * sin], dim=-1
    )


def is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * max(1.0, float(b.abs().max())))


@quick
@given(seeds, angles, st.sampled_from([4, 2, 1]))
def test_rotary_follows_a_common_phase(seed: int, angle: float, kv_heads: int) -> None:
    """Tokens do not notice it, and the new state has it too."""
    drawn = Setting("rotary", seed, kv_heads)
    output, new = drawn.run(drawn.state)
    turned_output, turned_new = drawn.run(turn(drawn.state, angle))
    assert is_close(turned_output, output)
    assert is_close(turned_new, turn(new, angle))


@pytest.mark.parametrize("seed", range(5))
def test_components_do_not_follow_it(seed: int) -> None:
    """Tokens do not notice the phase of this layer's state, but the new state does not have it."""
    drawn = Setting("components", seed)
    output, new = drawn.run(drawn.state)
    turned_output, turned_new = drawn.run(turn(drawn.state, 1.0))
    assert is_close(turned_output, output)
    assert not is_close(turned_new, turn(new, 1.0))


@quick
@given(seeds, angles, st.sampled_from(WIDE))
def test_wide_updates_follow_a_phase_that_tokens_then_notice(seed: int, angle: float, structure: str) -> None:
    """Cosines and sines have the same weights, so the update itself commutes with the phase. The scores do not see it
    as long as both channels of a pair agree, as at the start."""
    drawn = Setting(structure, seed, states="equal halves")
    assert is_close(drawn.update(turn(drawn.state, angle)), turn(drawn.update(drawn.state), angle))
    assert is_close(drawn.run(turn(drawn.state, angle))[0], drawn.run(drawn.state)[0])


@pytest.mark.parametrize("structure", WIDE)
@pytest.mark.parametrize("seed", range(5))
def test_wide_structures_break_the_symmetry_from_the_second_layer_on(structure: str, seed: int) -> None:
    """After one update the channels of a pair disagree: then tokens notice a common phase. Turning the rows of e
    instead, which tokens never notice, is what the update does not follow."""
    drawn = Setting(structure, seed, states="equal halves")
    later = drawn.run(drawn.state)[1]
    c_1, c_2, _, _ = later.chunk(4, dim=-1)
    assert not is_close(c_1, c_2)
    output, new = drawn.run(later)
    assert not is_close(drawn.run(turn(later, 1.0))[0], output)
    turned_output, turned_new = drawn.run(turn_rows(later, 1.0))
    assert is_close(turned_output, output)
    assert not is_close(turned_new, turn_rows(new, 1.0))


@quick
@given(seeds, st.sampled_from(STRUCTURES))
def test_all_structures_follow_a_reordering_of_tokens(seed: int, structure: str) -> None:
    """Permutation equivariance holds for all of them: no weight acts along tokens."""
    drawn = Setting(structure, seed)
    order = torch.randperm(TOKENS, generator=drawn.generator)

    @torch.no_grad()
    def run(state: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        query, key = drawn.layer.rotate(drawn.query[:, :, order], drawn.key[:, :, order], state)
        output, averaged = positional_attention(query, key, drawn.value[:, :, order], state, causal=False)
        return output, drawn.layer(state, averaged, drawn.hidden[:, order], drawn.hidden[:, order])

    output, new = run(drawn.state, torch.arange(TOKENS))
    reordered_output, reordered_new = run(drawn.state[:, :, order], order)
    assert is_close(reordered_output, output[:, :, order])
    assert is_close(reordered_new, new[:, :, order])
