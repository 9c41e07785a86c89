"""Who may see whom: segments (padding and documents), and the positions that follow from them."""

from __future__ import annotations

import torch
from torch import Tensor


def make_segment_ids(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Joins a padding mask and document ids into one tensor: equal ids attend to each other, -1 is padding.

    Args:
        attention_mask: `[B, N]`, non-zero where a token is real; `None` where all are.
        document_ids: `[B, N]` or `[1, N]`, integers >= 0; tokens of the same document have the same id.

    Returns:
        `[B, N]` int64, or `None` if neither is given.
    """
    if document_ids is None:
        return None if attention_mask is None else (attention_mask != 0).long() - 1
    document_ids = document_ids.long()
    return document_ids if attention_mask is None else document_ids.where(attention_mask != 0, -1)


def segment_positions(segment_ids: Tensor) -> Tensor:
    """Positions that count the real tokens of each segment from 0; padding gets 0 and does not count.

    Args:
        segment_ids: `[B, N]`, -1 for padding; the tokens of a segment follow each other, padding aside.

    Returns:
        `[B, N]` int64.
    """
    real = segment_ids >= 0
    rank = real.long().cumsum(dim=1) - 1  # index among the row's real tokens
    first_rank = rank.where(segment_starts(segment_ids), 0).cummax(dim=1).values
    return (rank - first_rank).where(real, 0)


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Where a segment begins, `[B, N]` booleans: real tokens whose last real token before them has another id."""
    real = segment_ids >= 0
    columns = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    last_real = columns.where(real, -1).cummax(dim=1).values
    previous = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)  # last real column before this one
    return real & ((previous < 0) | (segment_ids != segment_ids.gather(1, previous.clamp(min=0))))


def dense_mask(
    num_queries: int,
    num_keys: int,
    *,
    segment_ids: Tensor | None = None,
    causal: bool = True,
    device: torch.device | None = None,
) -> Tensor:
    """Boolean mask, true where a query may see a key. The queries are the last `num_queries` of the keys.

    Args:
        num_queries: Nq.
        num_keys: Nk >= Nq.
        segment_ids: `[B, Nk]`, -1 for padding.
        causal: whether a query sees no later key.
        device: device of the result; that of `segment_ids` where they are given.

    Returns:
        `[B, 1, Nq, Nk]`, or `[1, 1, Nq, Nk]` without segments.
    """
    device = device if segment_ids is None else segment_ids.device
    mask = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(num_keys - num_queries)
    if segment_ids is not None:
        queries = segment_ids[:, num_keys - num_queries :]
        same = (queries[:, :, None] == segment_ids[:, None, :]) & (segment_ids >= 0)[:, None, :]
        mask = mask & same[:, None]
    return mask
