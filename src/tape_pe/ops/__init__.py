"""Tensors in, tensors out: the operations of TAPE, without modules or configs."""

from tape_pe.ops.attention import AttentionResult, positional_attention
from tape_pe.ops.contextualize import contextualize
from tape_pe.ops.frequencies import Frequencies, rotary_frequencies
from tape_pe.ops.masks import make_segment_ids, segment_positions
from tape_pe.ops.rotary import rotary_state, rotate

__all__ = [
    "AttentionResult",
    "Frequencies",
    "contextualize",
    "make_segment_ids",
    "positional_attention",
    "rotary_frequencies",
    "rotary_state",
    "rotate",
    "segment_positions",
]
