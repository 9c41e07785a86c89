"""A step of decoding on CPU: one query, whose time is that of reading the cache, without anything else that takes time.

Nothing is copied: keys, values and states are usually the front of larger buffers, and a state may be one table that
heads and batch rows share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tape_pe.ops.backends.blocks import is_one_view
from tape_pe.ops.inputs import AttentionInputs

# From so many keys on, `embedding_bag` reads them faster than a matrix product does: twice as fast where they are not
# in the processor's cache, since it fetches rows ahead.
MANY_KEYS = 512


def can_attend(inputs: AttentionInputs) -> bool:
    """Whether `attend` can do it: one query that sees all keys, in a dtype that products need not widen."""
    query = inputs.query
    plain = query.shape[2] == 1 and inputs.segment_ids is None and inputs.bias is None
    return plain and query.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`; without gradients."""
    query, key, value, state = inputs[:4]
    batch, kv_heads, num_keys, _ = key.shape
    rows = (query * inputs.scale).reshape(batch, kv_heads, -1, query.shape[3])  # [B, Hkv, G, D]
    parts = [slice(None)] if is_one_view(key) else [slice(row, row + 1) for row in range(batch)]
    scores = _join([_scores(rows[part].flatten(0, 1), key[part].flatten(0, 1)) for part in parts])
    weights = torch._softmax(scores, -1, False).view(batch, kv_heads, -1, num_keys)
    averages = [_average(weights, x).view(*query.shape[:3], -1) for x in (value, state) if x is not None]
    return averages[0], None if state is None else averages[1]


def _scores(rows: Tensor, keys: Tensor) -> Tensor:
    """`[P, G, Nk]` from `[P, G, D]` and `[P, Nk, D]`."""
    if rows.shape[1] == 1:  # a matrix times a column reads keys faster than a row times a matrix
        return torch.bmm(keys, rows.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(rows, keys.transpose(1, 2))


def _average(weights: Tensor, values: Tensor) -> Tensor:
    """`[B, Hkv, G, C]` from weights `[B, Hkv, G, Nk]` and values `[B, Hkv, Nk, C]`."""
    batch, _, groups, num_keys = weights.shape
    if groups == 1 and num_keys >= MANY_KEYS and values.dtype == torch.float32 and _is_table(values):
        return _average_of_rows(weights, values)
    parts = [slice(None)] if is_one_view(values) else [slice(row, row + 1) for row in range(batch)]
    averages = [torch.bmm(weights[part].flatten(0, 1), values[part].flatten(0, 1)) for part in parts]
    return _join(averages).view(*weights.shape[:3], -1)


def _is_table(values: Tensor) -> bool:
    """Whether all rows of `[B, Hkv, Nk, C]` are rows of one table `[R, C]` in memory."""
    *outer, rows, channels = values.stride()
    width = values.shape[3]
    return channels == 1 and rows == width and all(stride % width == 0 for stride in outer)


def _average_of_rows(weights: Tensor, values: Tensor) -> Tensor:
    """`_average` of one row of weights for each head: a weighted sum of a table's rows."""
    batch, heads, num_keys, width = values.shape
    batch_step, head_step = (stride // width for stride in values.stride()[:2])
    size = 1 + (batch - 1) * batch_step + (heads - 1) * head_step + num_keys - 1
    numbers = torch.arange(size, dtype=torch.int32).as_strided((batch, heads, num_keys), (batch_step, head_step, 1))
    averages = F.embedding_bag(
        numbers.reshape(-1, num_keys),
        values.as_strided((size, width), (width, 1)),
        mode="sum",
        per_sample_weights=weights.reshape(-1, num_keys),
    )
    return averages.view(batch, heads, 1, width)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
