"""Launches the kernels: allocates what they write, chooses tiles, and passes strides."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from tape_pe.ops.backends.triton.backward import key_gradient_kernel, query_gradient_kernel
from tape_pe.ops.backends.triton.decode import decode_kernel, merge_kernel
from tape_pe.ops.backends.triton.kernels import forward_kernel, segment_ranges_kernel
from tape_pe.ops.backends.triton.operators import gradients, outputs
from tape_pe.ops.backends.triton.tiles import DECODE_QUERIES, DECODE_ROWS, MAX_CHUNKS, Tile, precision, tile
from tape_pe.ops.layout import dense_channels

LOG2_E = 1.0 / math.log(2.0)
RANGES_CHUNK = 1024


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Averages of values and states with the same weights.

    Args:
        query: `[B, H, Nq, D]`.
        key: `[B, Hkv, Nk, D]`.
        value: likewise.
        state: likewise, or `None`.
        segment_ids: `[B, Nk]` integers, or `None`.
        causal: whether a query sees no later key.
        scale: factor of the scores.

    Returns:
        The output `[B, H, Nq, D]`, the averaged state (empty without a state), and the log2 of the sums of exponentials
        `[B, H, Nq]` fp32, which the backward pass needs.
    """
    output, averaged, log_sum = outputs(query, state)
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    if query.shape[2] <= DECODE_QUERIES and rows <= DECODE_ROWS[-1]:
        _decode(query, key, value, state, segment_ids, causal, scale, output, averaged, log_sum)
        return output, averaged, log_sum
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    tile = _tile("forward", query)
    ids, ranges = _segments(segment_ids, num_queries, num_keys, tile.queries, own_queries=True)
    launch(
        forward_kernel,
        (triton.cdiv(num_queries, tile.queries), batch * heads),
        query, key, value, _or(state, value), _or(ids, query), _or(ranges, query),
        output, averaged, log_sum,
        *_strides(query, key, value, _or(state, value), output),
        heads, heads // kv_heads, num_queries, num_keys, scale * LOG2_E,
        HAS_STATE=state is not None, HAS_SEGMENTS=ids is not None, CAUSAL=causal,
        **_meta(tile, query),
    )  # fmt: skip
    return output, averaged, log_sum


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    causal: bool,
    scale: float,
    output: Tensor,
    averaged: Tensor,
    log_sum: Tensor,
) -> None:
    """`forward` for few queries."""
    batch, heads, num_queries, width = query.shape
    kv_heads, num_keys = key.shape[1:3]
    groups = heads // kv_heads
    tile = _tile("decode", query)
    rows = next(rows for rows in DECODE_ROWS if rows >= groups * num_queries)
    tile = tile._replace(queries=rows, warps=tile.warps * (1 if rows == DECODE_ROWS[0] else 2))
    # Two programs for each multiprocessor, unless the keys are fewer than two blocks for each.
    wanted = math.ceil(2 * _multiprocessors(query.device) / (batch * kv_heads))
    wanted = max(1, min(wanted, MAX_CHUNKS, num_keys // (2 * tile.keys)))
    chunk = math.ceil(num_keys / wanted / tile.keys) * tile.keys
    chunks = math.ceil(num_keys / chunk)
    rows = batch * heads * num_queries
    partial_v = query.new_empty(chunks, rows, width, dtype=torch.float32)
    partial_z = partial_v if state is None else torch.empty_like(partial_v)
    partial_sums = query.new_empty(chunks, rows, dtype=torch.float32)
    ids = _plain_ids(segment_ids)
    meta = _meta(tile, query)
    meta["BLOCK_ROWS"] = meta.pop("BLOCK_QUERIES")
    launch(
        decode_kernel,
        (chunks, batch * kv_heads),
        query, key, value, _or(state, value), _or(ids, query), partial_v, partial_z, partial_sums,
        *_strides(query, key, value, _or(state, value)),
        kv_heads, groups, num_queries, num_keys, chunk, scale * LOG2_E,
        HAS_STATE=state is not None, HAS_SEGMENTS=ids is not None, CAUSAL=causal,
        **meta,
    )  # fmt: skip
    launch(
        merge_kernel,
        (rows,),
        partial_v, partial_z, partial_sums, output, averaged, log_sum,
        *_strides(output), heads, num_queries, chunks,
        MAX_CHUNKS=MAX_CHUNKS, WIDTH=width, HAS_STATE=state is not None,
    )  # fmt: skip


def backward(
    grad_output: Tensor,
    grad_averaged: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    output: Tensor,
    averaged: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
    with_state_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and state.

    Args:
        grad_output: `[B, H, Nq, D]`.
        grad_averaged: likewise; not read without a state.
        query ... segment_ids: as in `forward`.
        output, averaged, log_sum: what `forward` returned.
        causal: as in `forward`.
        scale: likewise.
        with_state_grad: whether the gradient of the state is wanted; without, it is empty.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    grads = gradients(query, key, value, state, with_state_grad)
    dq, dk, dv, dz = grads
    grad_output = dense_channels(grad_output)
    grad_averaged = grad_output if state is None else dense_channels(grad_averaged)
    delta = torch.empty_like(log_sum)
    some_state = _or(state, value)
    flags = {"HAS_STATE": state is not None, "HAS_SEGMENTS": segment_ids is not None, "CAUSAL": causal}

    tile = _tile("query_gradient", query)
    ids, ranges = _segments(segment_ids, num_queries, num_keys, tile.queries, own_queries=True)
    launch(
        query_gradient_kernel,
        (triton.cdiv(num_queries, tile.queries), batch * heads),
        query, key, value, some_state, _or(ids, query), _or(ranges, query), output, averaged, log_sum,
        grad_output, grad_averaged, dq, delta,
        *_strides(query, key, value, some_state, output, grad_output, grad_averaged),
        heads, heads // kv_heads, num_queries, num_keys, scale * LOG2_E, scale,
        **flags, **_meta(tile, query),
    )  # fmt: skip
    tile = _tile("key_gradient", query)
    ids, ranges = _segments(segment_ids, num_queries, num_keys, tile.keys, own_queries=False)
    launch(
        key_gradient_kernel,
        (triton.cdiv(num_keys, tile.keys), batch * kv_heads),
        query, key, value, some_state, _or(ids, query), _or(ranges, query), log_sum, delta,
        grad_output, grad_averaged, dk, dv, dz,
        *_strides(query, key, value, some_state, grad_output, grad_averaged, dk),
        kv_heads, heads // kv_heads, num_queries, num_keys, scale * LOG2_E, scale,
        STATE_GRADIENT=with_state_grad, **flags, **_meta(tile, query),
    )  # fmt: skip
    return grads


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Every launch goes through here."""
    kernel[grid](*arguments, **options)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device; of the interpreter, the least one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _tile(kernel: str, query: Tensor) -> Tile:
    return tile(kernel, capability(query.device), query.shape[3], precision(query.dtype))


def _meta(tile: Tile, query: Tensor) -> dict[str, Any]:
    return {
        "BLOCK_QUERIES": tile.queries,
        "BLOCK_KEYS": tile.keys,
        "WIDTH": query.shape[3],
        "PRECISION": "ieee" if precision(query.dtype) == "ieee" else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Kernels take a pointer also where they do not read it."""
    return placeholder if tensor is None else tensor


def _plain_ids(segment_ids: Tensor | None) -> Tensor | None:
    """With 32 bits, since kernels run out of registers otherwise."""
    return None if segment_ids is None else segment_ids.to(torch.int32).contiguous()


def _segments(
    segment_ids: Tensor | None, num_queries: int, num_keys: int, block: int, *, own_queries: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Segment ids, and for each block of queries (or of keys) the range of keys (or of queries) to look at."""
    ids = _plain_ids(segment_ids)
    if ids is None:
        return None, None
    queries, keys = (num_keys - num_queries, num_queries), (0, num_keys)
    own, other = (queries, keys) if own_queries else (keys, queries)
    blocks = triton.cdiv(own[1], block)
    ranges = ids.new_empty(ids.shape[0], blocks, 2, dtype=torch.int32)
    launch(
        segment_ranges_kernel,
        (blocks, ids.shape[0]),
        ids, ranges, *own, *other, num_keys,
        BLOCK=block, CHUNK=RANGES_CHUNK,
    )  # fmt: skip
    return ids, ranges
