"""Backward kernels. With A the weights, S the scores, G the gradients of the averages and P = G [v | z]^T:

    dv, dz = A^T G           dS = A (P - delta) elementwise, delta = rowsum(G [out | zb])
    dq, dk = scale dS k, scale dS^T q

One kernel has blocks of queries and computes dq and, for the other, delta; the other one has blocks of keys and
computes dk, dv and dz, summed over the query heads that share them, without atomic additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tape_pe.ops.backends.triton.kernels import (
    LENGTHS,
    head_of,
    is_seen,
    key_bounds,
    load_tokens,
    own_ids,
    store_tokens,
)


@triton.jit
def accumulate_query(
    dq, q, d_output, d_averaged, log_sum, delta, queries, query_ids,
    key, value, state, ids,
    k_token, v_token, z_token,
    start, stop, num_queries, num_keys, log2_scale,
    BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `stop` into the gradient of a block of queries; see `kernels.average`."""
    for first in range(start, stop, BLOCK_KEYS):
        k = load_tokens(key, first, k_token, num_keys, BLOCK_KEYS, WIDTH, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        if MASKED:
            keys = first + tl.arange(0, BLOCK_KEYS)
            key_ids = keys
            if HAS_SEGMENTS:
                key_ids = tl.load(ids + keys, mask=keys < num_keys, other=-1)
            seen = is_seen(
                queries[:, None], keys[None, :], query_ids[:, None], key_ids[None, :], num_queries, num_keys,
                CAUSAL, HAS_SEGMENTS,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - log_sum[:, None])
        v = load_tokens(value, first, v_token, num_keys, BLOCK_KEYS, WIDTH, MASKED)
        d_weights = tl.dot(d_output, tl.trans(v), input_precision=PRECISION)
        if HAS_STATE:
            z = load_tokens(state, first, z_token, num_keys, BLOCK_KEYS, WIDTH, MASKED)
            d_weights = tl.dot(d_averaged, tl.trans(z), d_weights, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None])
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient_kernel(
    query, key, value, state, segment_ids, ranges, output, averaged, log_sum, d_output, d_averaged, dq, delta,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, z_batch, z_head, z_token,
    o_batch, o_head, o_token, do_batch, do_head, do_token, da_batch, da_head, da_token,
    heads, groups, num_queries, num_keys, log2_scale, scale,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. Grid: blocks of queries, B * H.

    Args:
        query ... log_sum: as in `kernels.forward_kernel`, the last three now inputs.
        d_output, d_averaged: gradients, `[B, H, Nq, WIDTH]`.
        dq: output, `[B, H, Nq, WIDTH]`, with the strides `o_*`.
        delta: output, `[B, H, Nq]` fp32.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first = block * BLOCK_QUERIES
    queries = first + tl.arange(0, BLOCK_QUERIES)
    row = tl.program_id(1).to(tl.int64) * num_queries + queries
    d_output = head_of(d_output, batch, head, do_batch, do_head)
    d_o = load_tokens(d_output, first, do_token, num_queries, BLOCK_QUERIES, WIDTH, True)
    output = head_of(output, batch, head, o_batch, o_head)
    out = load_tokens(output, first, o_token, num_queries, BLOCK_QUERIES, WIDTH, True)
    deltas = tl.sum(out.to(tl.float32) * d_o.to(tl.float32), 1)
    d_a = d_o
    if HAS_STATE:
        d_averaged = head_of(d_averaged, batch, head, da_batch, da_head)
        d_a = load_tokens(d_averaged, first, da_token, num_queries, BLOCK_QUERIES, WIDTH, True)
        averaged = head_of(averaged, batch, head, o_batch, o_head)
        mean = load_tokens(averaged, first, o_token, num_queries, BLOCK_QUERIES, WIDTH, True)
        deltas += tl.sum(mean.to(tl.float32) * d_a.to(tl.float32), 1)
    tl.store(delta + row, deltas, mask=queries < num_queries)
    sums = tl.load(log_sum + row, mask=queries < num_queries, other=float("inf"))
    q = load_tokens(
        head_of(query, batch, head, q_batch, q_head), first, q_token, num_queries, BLOCK_QUERIES, WIDTH, True
    )
    key = head_of(key, batch, head // groups, k_batch, k_head)
    value = head_of(value, batch, head // groups, v_batch, v_head)
    state = head_of(state, batch, head // groups, z_batch, z_head)
    query_ids = queries
    if HAS_SEGMENTS:
        segment_ids += batch.to(tl.int64) * num_keys
        query_ids = own_ids(segment_ids, (num_keys - num_queries) + queries, num_keys)
        ranges += 2 * (batch * tl.num_programs(0) + block)
    start, whole, stop = key_bounds(
        ranges, first, num_queries, num_keys, BLOCK_QUERIES, BLOCK_KEYS, HAS_SEGMENTS, CAUSAL
    )
    total = tl.zeros([BLOCK_QUERIES, WIDTH], tl.float32)
    if not HAS_SEGMENTS:
        total = accumulate_query(
            total, q, d_o, d_a, sums, deltas, queries, query_ids, key, value, state, segment_ids,
            k_token, v_token, z_token, start, whole, num_queries, num_keys, log2_scale,
            BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, False,
        )  # fmt: skip
    total = accumulate_query(
        total, q, d_o, d_a, sums, deltas, queries, query_ids, key, value, state, segment_ids,
        k_token, v_token, z_token, whole, stop, num_queries, num_keys, log2_scale,
        BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, True,
    )  # fmt: skip
    store_tokens(
        head_of(dq, batch, head, o_batch, o_head), total * scale, first, o_token, num_queries, BLOCK_QUERIES, WIDTH
    )


@triton.jit
def accumulate_keys(
    dk, dv, dz, k, v, z, keys, key_ids,
    query, d_output, d_averaged, log_sum, delta, ids,
    q_head, q_token, do_head, do_token, da_head, da_token,
    start, stop, groups, num_queries, num_keys, log2_scale,
    BLOCK_QUERIES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, HAS_STATE: tl.constexpr,
    STATE_GRADIENT: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the queries from `start` to `stop` of each head of the group into the gradients of a block of keys.

    One loop for heads and blocks, so that loads run ahead from head to head. Everything is transposed,
    `[keys, queries]`: no product then has a transposed left factor that was just computed.
    """
    blocks = tl.cdiv(stop - start, BLOCK_QUERIES)
    for index in range(groups * blocks):
        group = tl.cast(index // blocks, tl.int64)
        first = start + index % blocks * BLOCK_QUERIES
        queries = first + tl.arange(0, BLOCK_QUERIES)
        row = group * num_queries + queries
        q = load_tokens(query + group * q_head, first, q_token, num_queries, BLOCK_QUERIES, WIDTH, True)
        # Weights of queries that do not exist, or see nothing, are exp2(-inf) = 0.
        sums = tl.load(log_sum + row, mask=queries < num_queries, other=float("inf"))
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * log2_scale
        if MASKED:
            query_ids = queries
            if HAS_SEGMENTS:
                columns = (num_keys - num_queries) + queries
                query_ids = tl.load(ids + columns, mask=columns < num_keys, other=-1)
            seen = is_seen(
                queries[None, :], keys[:, None], query_ids[None, :], key_ids[:, None], num_queries, num_keys,
                CAUSAL, HAS_SEGMENTS,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores - sums[None, :])
        d_o = load_tokens(d_output + group * do_head, first, do_token, num_queries, BLOCK_QUERIES, WIDTH, True)
        rounded = weights.to(d_o.dtype)
        dv = tl.dot(rounded, d_o, dv, input_precision=PRECISION)
        d_weights = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
        if HAS_STATE:
            d_a = load_tokens(d_averaged + group * da_head, first, da_token, num_queries, BLOCK_QUERIES, WIDTH, True)
            if STATE_GRADIENT:
                dz = tl.dot(rounded, d_a, dz, input_precision=PRECISION)
            d_weights = tl.dot(z, tl.trans(d_a), d_weights, input_precision=PRECISION)
        deltas = tl.load(delta + row, mask=queries < num_queries, other=0.0)
        d_scores = weights * (d_weights - deltas[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, dz


@triton.jit(do_not_specialize=LENGTHS)
def key_gradient_kernel(
    query, key, value, state, segment_ids, ranges, log_sum, delta, d_output, d_averaged, dk, dv, dz,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, z_batch, z_head, z_token,
    do_batch, do_head, do_token, da_batch, da_head, da_token, dk_batch, dk_head, dk_token,
    kv_heads, groups, num_queries, num_keys, log2_scale, scale,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, STATE_GRADIENT: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head, with all its query heads. Grid: blocks of keys, B * Hkv.

    Args:
        query ... d_averaged: as in `query_gradient_kernel`; `ranges` are those of blocks of keys.
        dk, dv, dz: outputs, `[B, Hkv, Nk, WIDTH]`, all with the strides `dk_*`.
    """
    block = tl.program_id(0)  # the first keys are seen by most queries
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    first = block * BLOCK_KEYS
    keys = first + tl.arange(0, BLOCK_KEYS)
    k = load_tokens(head_of(key, batch, kv_head, k_batch, k_head), first, k_token, num_keys, BLOCK_KEYS, WIDTH, True)
    v = load_tokens(head_of(value, batch, kv_head, v_batch, v_head), first, v_token, num_keys, BLOCK_KEYS, WIDTH, True)
    z = v
    if HAS_STATE:
        z = load_tokens(
            head_of(state, batch, kv_head, z_batch, z_head), first, z_token, num_keys, BLOCK_KEYS, WIDTH, True
        )
    # Queries from `start` on see some of the keys, from `whole` on all of them.
    start, whole, stop = 0, 0, num_queries
    if CAUSAL:
        offset = num_keys - num_queries
        start = tl.maximum(first - offset, 0) // BLOCK_QUERIES * BLOCK_QUERIES
        whole = tl.cdiv(tl.maximum(first + BLOCK_KEYS - 1 - offset, 0), BLOCK_QUERIES) * BLOCK_QUERIES
        whole = tl.minimum(whole, num_queries)
    key_ids = keys
    if HAS_SEGMENTS:
        segment_ids += batch.to(tl.int64) * num_keys
        key_ids = own_ids(segment_ids, keys, num_keys)
        ranges += 2 * (batch * tl.num_programs(0) + block)
        start = tl.maximum(start, tl.load(ranges) // BLOCK_QUERIES * BLOCK_QUERIES)
        stop = tl.load(ranges + 1)
        whole = stop
    total_k = tl.zeros([BLOCK_KEYS, WIDTH], tl.float32)
    total_v = tl.zeros([BLOCK_KEYS, WIDTH], tl.float32)
    total_z = tl.zeros([BLOCK_KEYS, WIDTH], tl.float32)
    query = head_of(query, batch, kv_head * groups, q_batch, q_head)
    d_output = head_of(d_output, batch, kv_head * groups, do_batch, do_head)
    d_averaged = head_of(d_averaged, batch, kv_head * groups, da_batch, da_head)
    row = tl.program_id(1).to(tl.int64) * groups * num_queries
    if CAUSAL or HAS_SEGMENTS:
        total_k, total_v, total_z = accumulate_keys(
            total_k, total_v, total_z, k, v, z, keys, key_ids,
            query, d_output, d_averaged, log_sum + row, delta + row, segment_ids,
            q_head, q_token, do_head, do_token, da_head, da_token,
            start, whole, groups, num_queries, num_keys, log2_scale,
            BLOCK_QUERIES, WIDTH, PRECISION, HAS_STATE, STATE_GRADIENT, HAS_SEGMENTS, CAUSAL, True,
        )  # fmt: skip
    if not HAS_SEGMENTS:
        total_k, total_v, total_z = accumulate_keys(
            total_k, total_v, total_z, k, v, z, keys, key_ids,
            query, d_output, d_averaged, log_sum + row, delta + row, segment_ids,
            q_head, q_token, do_head, do_token, da_head, da_token,
            whole, stop, groups, num_queries, num_keys, log2_scale,
            BLOCK_QUERIES, WIDTH, PRECISION, HAS_STATE, STATE_GRADIENT, HAS_SEGMENTS, CAUSAL, False,
        )  # fmt: skip
    dk, dv = head_of(dk, batch, kv_head, dk_batch, dk_head), head_of(dv, batch, kv_head, dk_batch, dk_head)
    store_tokens(dk, total_k * scale, first, dk_token, num_keys, BLOCK_KEYS, WIDTH)
    store_tokens(dv, total_v, first, dk_token, num_keys, BLOCK_KEYS, WIDTH)
    if STATE_GRADIENT:
        dz = head_of(dz, batch, kv_head, dk_batch, dk_head)
        store_tokens(dz, total_z, first, dk_token, num_keys, BLOCK_KEYS, WIDTH)
