"""What every attention backend computes with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tape_pe.ops.bias import Bias, materialized


class AttentionInputs(NamedTuple):
    """Arguments of `tape_pe.ops.positional_attention`, checked and with every default filled in.

    Attributes:
        query: `[B, H, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        state: `[B, Hkv, Nk, Ds]` in the dtype of `value`, or `None`.
        segment_ids: `[B, Nk]` integers, -1 for padding, or `None`.
        bias: a tensor or a rule, broadcastable to `[B, H, Nq, Nk]`, or `None`.
        causal: whether a query sees no later key.
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    state: Tensor | None
    segment_ids: Tensor | None
    bias: Bias | None
    causal: bool
    scale: float

    def materialized_bias(self) -> Tensor | None:
        """The bias as a tensor."""
        return materialized(self.bias)
