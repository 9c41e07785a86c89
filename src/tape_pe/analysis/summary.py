"""One line of numbers per layer, averaged over heads and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tape_pe.analysis.capture import LayerView
from tape_pe.analysis.positions import (
    attention_difference,
    inner_products,
    movement,
    relative_difference,
    state_norms,
)


@dataclass(frozen=True)
class LayerSummary:
    """What a layer does with positions; `None` where it has no state.

    Attributes:
        attention_distance: mean distance in tokens from a query to what it attends to, weighted by attention.
        first_token: share of attention that queries behind the first token give to it.
        norm: root mean square of states over that of the start state: how far they grew.
        states_to_rope: relative difference of inner products of states to those of the start state.
        attention_to_rope: mean over queries of the sum of absolute differences to the attention that the layer would
            have with the start state, 0 to 2.
        phase: how far states turned from their start values, mean of absolute angles in degrees.
        magnitude: root mean square of |z / z0|.
    """

    attention_distance: float
    first_token: float
    norm: float | None = None
    states_to_rope: float | None = None
    attention_to_rope: float | None = None
    phase: float | None = None
    magnitude: float | None = None


def summarize(view: LayerView) -> LayerSummary:
    """The numbers of one layer."""
    length = view.attention.shape[-1]
    index = torch.arange(length, dtype=view.attention.dtype)
    distance = (view.attention * (index[:, None] - index)).sum(dim=-1).mean()
    first = view.attention[..., 1:, 0].mean() if length > 1 else torch.ones(())
    if view.state is None or view.start is None:
        return LayerSummary(float(distance), float(first))
    moved = movement(view.state, view.start)
    to_rope = None
    if view.rope_attention is not None:
        to_rope = float(attention_difference(view.attention, view.rope_attention).mean())
    return LayerSummary(
        attention_distance=float(distance),
        first_token=float(first),
        norm=float((state_norms(view.state) / state_norms(view.start)).mean()),
        states_to_rope=float(relative_difference(*map(inner_products, (view.state, view.start))).mean()),
        attention_to_rope=to_rope,
        phase=float(moved.phase.mean()),
        magnitude=float(moved.magnitude.mean()),
    )
