"""Kernels for few queries and many keys, as in cached decoding: the keys are split among programs, whose partial
averages a second kernel merges. The query heads of a group are rows of one product, so keys are read once for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tape_pe.ops.backends.triton.kernels import LENGTHS, average, head_of, own_ids


@triton.jit(do_not_specialize=[*LENGTHS, "chunk"])
def decode_kernel(
    query, key, value, state, segment_ids, partial_v, partial_z, partial_sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, z_batch, z_head, z_token,
    kv_heads, groups, num_queries, num_keys, chunk, log2_scale,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """`chunk` keys of one key/value head, for all its queries. Grid: chunks, B * Hkv.

    Args:
        query ... segment_ids: as in `kernels.forward_kernel`.
        partial_v, partial_z: outputs, `[chunks, B * H * Nq, WIDTH]` fp32: averages over the chunk's keys.
        partial_sums: output, `[chunks, B * H * Nq]` fp32: log2 of their sum of exponentials; -inf where no key is seen.
        chunk: keys of a program, a multiple of BLOCK_KEYS.
        BLOCK_ROWS: at least `groups * Nq`.
    """
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    rows = tl.arange(0, BLOCK_ROWS)  # of the groups' heads, each with all queries
    heads, queries = kv_head * groups + rows // num_queries, rows % num_queries
    exists = rows < groups * num_queries
    channels = tl.arange(0, WIDTH)[None, :]
    query += batch.to(tl.int64) * q_batch
    q = tl.load(query + (heads * q_head + queries * q_token)[:, None] + channels, mask=exists[:, None], other=0.0)
    key = head_of(key, batch, kv_head, k_batch, k_head)
    value = head_of(value, batch, kv_head, v_batch, v_head)
    state = head_of(state, batch, kv_head, z_batch, z_head)
    query_ids = queries
    if HAS_SEGMENTS:
        segment_ids += batch.to(tl.int64) * num_keys
        query_ids = own_ids(segment_ids, (num_keys - num_queries) + queries, num_keys)
    start = tl.program_id(0) * chunk
    stop = tl.minimum(start + chunk, num_keys)
    # Few queries near the end see all but the last keys.
    whole = start
    if not HAS_SEGMENTS:
        common = num_keys - num_queries + 1 if CAUSAL else num_keys
        whole = tl.maximum(start, tl.minimum(stop, common) // BLOCK_KEYS * BLOCK_KEYS)
    sum_v = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    sum_z = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    if not HAS_SEGMENTS:
        sum_v, sum_z, total, peak = average(
            sum_v, sum_z, total, peak, q, queries, query_ids, key, value, state, segment_ids,
            k_token, v_token, z_token, start, whole, num_queries, num_keys, log2_scale,
            BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, False, False,
        )  # fmt: skip
    sum_v, sum_z, total, peak = average(
        sum_v, sum_z, total, peak, q, queries, query_ids, key, value, state, segment_ids,
        k_token, v_token, z_token, whole, stop, num_queries, num_keys, log2_scale,
        BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, True, True,
    )  # fmt: skip
    alive = total > 0
    inverse = 1.0 / tl.where(alive, total, 1.0)
    sums = tl.where(alive, peak + tl.log2(tl.where(alive, total, 1.0)), float("-inf"))
    row = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * groups * num_queries + rows
    tl.store(partial_sums + row, sums, mask=exists)
    tl.store(partial_v + row[:, None] * WIDTH + channels, sum_v * inverse[:, None], mask=exists[:, None])
    if HAS_STATE:
        tl.store(partial_z + row[:, None] * WIDTH + channels, sum_z * inverse[:, None], mask=exists[:, None])


@triton.jit(do_not_specialize=["num_queries", "chunks"])
def merge_kernel(
    partial_v, partial_z, partial_sums, output, averaged, log_sum,
    o_batch, o_head, o_token, heads, num_queries, chunks,
    MAX_CHUNKS: tl.constexpr, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Averages of all keys from those of the chunks, weighted by their sums of exponentials. Grid: B * H * Nq.

    Args:
        partial_v, partial_z, partial_sums: from `decode_kernel`.
        output, averaged: outputs, `[B, H, Nq, WIDTH]`, both with the strides `o_*`.
        log_sum: output, `[B, H, Nq]` fp32, as in `kernels.forward_kernel`.
    """
    row = tl.program_id(0)
    batch, head, token = row // num_queries // heads, row // num_queries % heads, row % num_queries
    which = tl.arange(0, MAX_CHUNKS)
    entry = which.to(tl.int64) * tl.num_programs(0) + row
    sums = tl.load(partial_sums + entry, mask=which < chunks, other=float("-inf"))
    peak = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total > 0, total, 1.0)
    tl.store(log_sum + row, tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("inf")))
    channels = tl.arange(0, WIDTH)
    places = entry[:, None] * WIDTH + channels[None, :]
    exists = (which < chunks)[:, None]
    values = tl.load(partial_v + places, mask=exists, other=0.0)
    out = head_of(output, batch, head, o_batch, o_head) + token * o_token + channels
    tl.store(out, tl.sum(values * weights[:, None], 0).to(output.dtype.element_ty))
    if HAS_STATE:
        values = tl.load(partial_z + places, mask=exists, other=0.0)
        out = head_of(averaged, batch, head, o_batch, o_head) + token * o_token + channels
        tl.store(out, tl.sum(values * weights[:, None], 0).to(averaged.dtype.element_ty))
