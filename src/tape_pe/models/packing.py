"""Positions and segments of a batch, from what the caller gives: masks, positions, documents, flattened batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tape_pe.encodings import Tokens
from tape_pe.models.cache import TapeCache
from tape_pe.models.checks import check_cache, check_layout
from tape_pe.ops import make_segment_ids, segment_positions


def resolve_tokens(
    shape: torch.Size,
    device: torch.device,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    cache: TapeCache | None,
    flattened: Mapping[str, Any],
) -> Tokens:
    """Works out positions and segments of the new tokens, and puts those of the cached tokens before them.

    Args:
        shape: `(B, N)` of the new tokens.
        device: where they are.
        input_ids: `[B, N]`, or `None` where embeddings are given.
        attention_mask: `[B, N]` or `[B, past + N]`.
        position_ids: `[B, N]` or `[1, N]`.
        document_ids: `[B, N]` or `[1, N]`.
        cache: tokens seen before.
        flattened: may hold `seq_idx` or `cu_seq_lens_q` of a flattening collator, see `find_documents`.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    batch_size, num_tokens = shape
    past = 0 if cache is None else cache.get_seq_length()
    check_cache(cache, batch_size)
    check_layout((batch_size, num_tokens), past, attention_mask, position_ids, document_ids, flattened.get("seq_idx"))
    if attention_mask is not None:
        attention_mask = attention_mask[:, -num_tokens:]
    document_ids = find_documents(num_tokens, attention_mask, position_ids, document_ids, past, flattened)
    if document_ids is None and cache is not None:
        document_ids = cache.last_segment()

    segment_ids = make_segment_ids(attention_mask, document_ids)
    if segment_ids is not None:
        segment_ids = segment_ids.expand(batch_size, num_tokens)
    if position_ids is None:
        position_ids = _default_positions(segment_ids, num_tokens, past, cache, device)
    tokens = Tokens(position_ids, num_tokens, segment_ids, input_ids)
    return tokens if cache is None else cache.join_tokens(tokens)


def _default_positions(
    segment_ids: Tensor | None, num_tokens: int, past: int, cache: TapeCache | None, device: torch.device
) -> Tensor:
    """Positions of new tokens, `[B | 1, N]`: real tokens count from 0 in each segment, cached ones included."""
    if segment_ids is None:
        return torch.arange(past, past + num_tokens, device=device)[None]
    if cache is not None:
        segment_ids = cache.join_segments(segment_ids)
    return segment_positions(segment_ids)[:, past:]


def find_documents(
    num_tokens: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    past: int,
    flattened: Mapping[str, Any],
) -> Tensor | None:
    """The documents of a batch, `[1 | B, N]`, or `None` where each row is one, or goes on with the cached tokens'.

    They are `document_ids`, else what transformers' `DataCollatorWithFlattening` gives: `seq_idx`, `cu_seq_lens_q`, or
    positions. A row of positions is packed if it has no padding mask, no cached tokens before it, and consists of
    nothing but runs 0, 1, 2, ...; ids with gaps, an offset or another order are one document.

    Args:
        num_tokens: N.
        attention_mask: a padding mask, or `None`.
        position_ids: `[B | 1, N]`, or `None`.
        document_ids: `[B | 1, N]`, or `None`.
        past: number of cached tokens.
        flattened: may hold `seq_idx` `[B | 1, N]` or `cu_seq_lens_q` `[documents + 1]`, the documents' bounds.
    """
    if document_ids is not None:
        return document_ids
    if (seq_idx := flattened.get("seq_idx")) is not None:
        return seq_idx
    if (bounds := flattened.get("cu_seq_lens_q")) is not None:
        columns = torch.arange(num_tokens, device=bounds.device)
        return torch.searchsorted(bounds, columns.to(bounds.dtype), right=True)[None]
    if position_ids is None or attention_mask is not None or past:
        return None
    starts = position_ids == 0
    previous = torch.nn.functional.pad(position_ids[:, :-1], (1, 0), value=-1)
    runs = starts | (position_ids == previous + 1)
    is_packed = runs.all(dim=1, keepdim=True) & (position_ids > 0).any(
        dim=1, keepdim=True
    )  # all zeros are one document
    return starts.long().cumsum(dim=1) * is_packed


def predictable_labels(
    labels: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    past: int,
    flattened: Mapping[str, Any],
) -> Tensor:
    """`labels` `[B, N]` with -100 for tokens that the token before them cannot predict: padding, tokens that follow
    padding, and the first token of a document. The other arguments are those of `find_documents`."""
    num_tokens = labels.shape[1]
    documents = find_documents(num_tokens, attention_mask, position_ids, document_ids, past, flattened)
    segments = make_segment_ids(None if attention_mask is None else attention_mask[:, -num_tokens:], documents)
    if segments is None:
        return labels
    kept = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return torch.cat([labels[:, :1], labels[:, 1:].masked_fill(~kept, -100)], dim=1)
