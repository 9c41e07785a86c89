"""Positions and segments of a batch, from what the caller gives: masks, positions, documents, flattened batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tape_pe.models.cache import TapeCache
from tape_pe.ops import make_segment_ids, segment_positions


class Layout(NamedTuple):
    """Where tokens stand and whom they see.

    Attributes:
        position_ids: of the new tokens, `[B | 1, N]`.
        segment_ids: of all tokens, cached ones first, `[B, past + N]`; `None` where all see each other.
    """

    position_ids: Tensor
    segment_ids: Tensor | None


def resolve_layout(
    shape: torch.Size,
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    cache: TapeCache | None,
    flattened: Mapping[str, Any],
) -> Layout:
    """Works out positions and segments, and adds the new segments to the cache.

    Args:
        shape: `(B, N)` of the new tokens.
        device: where they are.
        attention_mask: `[B, N]` or `[B, past + N]`.
        position_ids: `[B, N]` or `[1, N]`.
        document_ids: `[B, N]` or `[1, N]`.
        cache: tokens seen before.
        flattened: may hold `seq_idx` or `cu_seq_lens_q` of a flattening collator, see `flattened_documents`.

    Raises:
        ValueError: a shape that does not fit.
    """
    batch_size, num_tokens = shape
    past = 0 if cache is None else cache.get_seq_length()
    for name, tensor in (("position_ids", position_ids), ("document_ids", document_ids)):
        if tensor is not None and tensor.shape not in ((batch_size, num_tokens), (1, num_tokens)):
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: {(batch_size, num_tokens)} is needed")
    if attention_mask is not None:
        if attention_mask.shape not in ((batch_size, num_tokens), (batch_size, past + num_tokens)):
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}: a padding mask of the shape "
                f"{(batch_size, num_tokens)}, or with the cached tokens {(batch_size, past + num_tokens)}, is needed"
            )
        attention_mask = attention_mask[:, -num_tokens:]
    if document_ids is None:
        if cache is not None and past:
            document_ids = cache.last_segment()
        elif attention_mask is None:
            document_ids = flattened_documents(position_ids, num_tokens, flattened)

    segment_ids = make_segment_ids(attention_mask, document_ids)
    if segment_ids is not None:
        segment_ids = segment_ids.expand(batch_size, num_tokens)
    if cache is not None:
        segment_ids = cache.append_segments(segment_ids)
    if position_ids is None:
        if segment_ids is None:
            position_ids = torch.arange(past, past + num_tokens, device=device)[None]
        else:
            position_ids = segment_positions(segment_ids)[:, past:]
    return Layout(position_ids, segment_ids)


def flattened_documents(position_ids: Tensor | None, num_tokens: int, flattened: Mapping[str, Any]) -> Tensor | None:
    """The documents of a batch that transformers' `DataCollatorWithFlattening` made, `[1 | B, N]`, or `None`.

    They are read from `seq_idx`, from `cu_seq_lens_q`, or from positions that start again: in a row without a padding
    mask, a position id of exactly 0 begins a document. Nothing else does; ids with gaps or an offset are one document.

    Args:
        position_ids: `[B | 1, N]`, or `None`.
        num_tokens: N.
        flattened: may hold `seq_idx` `[B, N]` or `cu_seq_lens_q` `[documents + 1]`, the documents' bounds.
    """
    if (seq_idx := flattened.get("seq_idx")) is not None:
        return seq_idx
    if (bounds := flattened.get("cu_seq_lens_q")) is not None:
        columns = torch.arange(num_tokens, device=bounds.device)
        return torch.searchsorted(bounds, columns.to(bounds.dtype), right=True)[None]
    return None if position_ids is None else (position_ids == 0).long().cumsum(dim=1)
