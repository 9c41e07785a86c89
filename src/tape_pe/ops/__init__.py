"""Tensors in, tensors out: the operations of TAPE, without modules or configs."""

from tape_pe.ops.attention import AttentionResult, positional_attention
from tape_pe.ops.contextualize import contextualize
from tape_pe.ops.masks import make_segment_ids, segment_positions
from tape_pe.ops.rotary import inverse_frequencies, rotary_state, rotate

__all__ = [
    "AttentionResult",
    "contextualize",
    "inverse_frequencies",
    "make_segment_ids",
    "positional_attention",
    "rotary_state",
    "rotate",
    "segment_positions",
]
