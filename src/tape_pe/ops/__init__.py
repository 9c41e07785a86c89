"""Tensors in, tensors out: the operations of TAPE, without modules or configs."""

from tape_pe.ops.attention import AttentionResult, positional_attention, prepare_bias
from tape_pe.ops.bias import Bias, PairBias, add_biases, materialized
from tape_pe.ops.contextualize import contextualize
from tape_pe.ops.frequencies import Frequencies, rotary_frequencies
from tape_pe.ops.masks import make_segment_ids, segment_positions
from tape_pe.ops.rotary import rotary_state, rotate
from tape_pe.ops.structures import (
    contextualize_channels,
    contextualize_components,
    contextualize_unstructured,
    rotate_wide,
    widen,
)

__all__ = [
    "AttentionResult",
    "Bias",
    "Frequencies",
    "PairBias",
    "add_biases",
    "contextualize",
    "contextualize_channels",
    "contextualize_components",
    "contextualize_unstructured",
    "make_segment_ids",
    "materialized",
    "positional_attention",
    "prepare_bias",
    "rotary_frequencies",
    "rotary_state",
    "rotate",
    "rotate_wide",
    "segment_positions",
    "widen",
]
