"""transformers' 4-D masks as what `tape_pe.ops.positional_attention` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tape_pe.ops.masks import dense_mask


class Visibility(NamedTuple):
    """Arguments of `positional_attention` that say who sees whom."""

    segment_ids: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = True


def visibility(mask: Tensor, dtype: torch.dtype) -> Visibility:
    """What a mask says: exactly, whatever it is; as segments where that is possible, because those cost no memory.

    All layers of a forward pass get the same mask, which is read once.

    Args:
        mask: `[B, 1 | H, Nq, Nk]`, booleans that are true where a query sees a key, or a bias.
        dtype: dtype of the bias.
    """
    if torch.compiler.is_compiling():  # where looking at values is not possible
        return Visibility(bias=_as_bias(mask, dtype), causal=False)
    if mask.is_inference():  # which may change without a trace
        return _read(mask, dtype)
    key = (mask._version, dtype)
    kept = _SEEN.get(mask)
    if kept is None or kept[0] != key:
        kept = _SEEN[mask] = key, _read(mask, dtype)
    return kept[1]


# Entries vanish with their mask.
_SEEN = WeakTensorKeyDictionary()


def _read(mask: Tensor, dtype: torch.dtype) -> Visibility:
    num_queries, num_keys = mask.shape[2:]
    if mask.dtype == torch.bool and mask.shape[1] == 1 and num_queries == num_keys:
        sees_itself = mask[:, 0].diagonal(dim1=1, dim2=2)
        first_seen = mask[:, 0].to(torch.uint8).argmax(dim=-1)
        segment_ids = first_seen.where(sees_itself, -1)
        if torch.equal(dense_mask(num_queries, num_keys, segment_ids=segment_ids), mask):
            return Visibility(segment_ids)
    bias = _as_bias(mask, dtype)
    # Rows can be cut off behind their own token if none sees a later one.
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device).triu(1 + num_keys - num_queries)
    return Visibility(bias=bias, causal=bool((bias.masked_select(later) == -torch.inf).all()))


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
