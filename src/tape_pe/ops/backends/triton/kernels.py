"""The forward kernel, and what all kernels share.

Scores are in units of log2: with `scale * log2(e)` as their factor, every exponential is an `exp2`. Tensors are
addressed by the strides of their first three axes (batch, head, token); channels follow each other in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

LENGTHS = ("num_queries", "num_keys")
"""Arguments that change from call to call, for which no kernel is compiled anew."""


@triton.jit
def head_of(pointer, batch, head, batch_stride, head_stride):
    """The first number of a head; tensors may have more numbers than 32 bits count."""
    return pointer + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def load_tokens(head, first, stride, limit, BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """`[BLOCK, WIDTH]` from token `first` on. Tokens from `limit` on are zero; without CHECKED there must be none."""
    tokens = first + tl.arange(0, BLOCK)
    places = (tl.arange(0, BLOCK) * stride)[:, None] + tl.arange(0, WIDTH)[None, :]
    pointers = head + tl.cast(first, tl.int64) * stride + places
    if CHECKED:
        return tl.load(pointers, mask=(tokens < limit)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tokens(head, values, first, stride, limit, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Writes `[BLOCK, WIDTH]`, tokens from `limit` on excepted."""
    tokens = first + tl.arange(0, BLOCK)
    places = (tl.arange(0, BLOCK) * stride)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(
        head + tl.cast(first, tl.int64) * stride + places,
        values.to(head.dtype.element_ty),
        mask=(tokens < limit)[:, None],
    )


@triton.jit
def own_ids(ids, columns, num_keys):
    """Segment ids of a program's own tokens. Padding is -2 and so differs from the -1 of all others' padding."""
    own = tl.load(ids + columns, mask=columns < num_keys, other=-1)
    return tl.where(own < 0, -2, own)


@triton.jit
def is_seen(queries, keys, query_ids, key_ids, num_queries, num_keys, CAUSAL: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """Whether queries see keys; one is a column, the other a row, and so are their ids, one of them `own_ids`.

    Keys that do not exist are seen by no query that does: they are later than all, and have the id of padding.
    """
    if HAS_SEGMENTS:
        seen = query_ids == key_ids
        if CAUSAL:
            seen = seen & (keys <= queries + (num_keys - num_queries))
    elif CAUSAL:
        seen = keys <= queries + (num_keys - num_queries)
    else:
        seen = keys < num_keys
    return seen


@triton.jit(do_not_specialize=["own_first", "own_count", "other_first", "other_count", "num_keys"])
def segment_ranges_kernel(
    segment_ids,
    ranges,
    own_first,
    own_count,
    other_first,
    other_count,
    num_keys,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each block of own tokens, the first and the last other token that its segments can reach.

    These are the tokens whose id lies between the smallest and the largest id of the block's real tokens: in documents
    one after the other exactly those that are seen, otherwise more.

    Args:
        segment_ids: `[B, num_keys]` int32, contiguous.
        ranges: output, `[B, blocks, 2]` int32: first, last + 1; equal where there are none.
        own_first: column of the first own token.
        own_count: own tokens.
        other_first: column of the first other token.
        other_count: other tokens.
        num_keys: columns.
        BLOCK: own tokens of a block.
        CHUNK: other tokens looked at together.
    """
    block, batch = tl.program_id(0), tl.program_id(1)
    row = segment_ids + batch.to(tl.int64) * num_keys
    own = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(row + own_first + own, mask=own < own_count, other=-1)
    most = tl.max(ids, 0)
    least = tl.min(tl.where(ids >= 0, ids, most), 0)  # of padding alone, -1
    first, stop = other_count, 0
    for start in range(0, other_count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_ids = tl.load(row + other_first + other, mask=other < other_count, other=-1)
        reached = (other_ids >= least) & (other_ids <= most) & (other_ids >= 0)
        first = tl.minimum(first, tl.min(tl.where(reached, other, other_count), 0))
        stop = tl.maximum(stop, tl.max(tl.where(reached, other + 1, 0), 0))
    out = ranges + 2 * (batch * tl.num_programs(0) + block)
    tl.store(out, tl.minimum(first, stop))
    tl.store(out + 1, stop)


@triton.jit
def average(
    sum_v, sum_z, total, peak, q, queries, query_ids,
    key, value, state, ids,
    k_token, v_token, z_token,
    start, stop, num_queries, num_keys, log2_scale,
    BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    MAY_SEE_NONE: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `stop` into the running sums of a block of queries.

    Args:
        sum_v: `[queries, WIDTH]` weighted sum of the values.
        sum_z: likewise of the states.
        total: `[queries]` sum of the weights.
        peak: `[queries]` largest score so far, to which weights are relative.
        q: `[queries, WIDTH]`.
        queries: `[queries]` which they are.
        query_ids: `[queries]` their `own_ids`.
        key, value, state: pointers to a head's first token; `k_token`, `v_token`, `z_token` are their strides.
        ids: pointer to the batch row's segment ids.
        log2_scale: factor of the scores.
        MASKED: whether some query does not see some key here, or there are fewer keys than `stop`.
        MAY_SEE_NONE: whether a query may have seen no key by the end of a block.
    """
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
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = new_peak
        if MAY_SEE_NONE:  # -inf - -inf would be NaN
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        v = load_tokens(value, first, v_token, num_keys, BLOCK_KEYS, WIDTH, MASKED)
        weights = weights.to(v.dtype)
        sum_v = tl.dot(weights, v, sum_v * shrink[:, None], input_precision=PRECISION)
        if HAS_STATE:
            z = load_tokens(state, first, z_token, num_keys, BLOCK_KEYS, WIDTH, MASKED)
            sum_z = tl.dot(weights, z, sum_z * shrink[:, None], input_precision=PRECISION)
    return sum_v, sum_z, total, peak


@triton.jit
def key_bounds(
    ranges, first, num_queries, num_keys,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys of a block of queries: from `start` to `whole` all queries see all keys, then some, to `stop`."""
    start, stop, whole = 0, num_keys, num_keys // BLOCK_KEYS * BLOCK_KEYS
    if CAUSAL:
        seen_by_first = first + (num_keys - num_queries) + 1
        whole = seen_by_first // BLOCK_KEYS * BLOCK_KEYS
        stop = tl.minimum(num_keys, seen_by_first + BLOCK_QUERIES - 1)
    if HAS_SEGMENTS:
        start = tl.load(ranges) // BLOCK_KEYS * BLOCK_KEYS
        stop = tl.minimum(stop, tl.load(ranges + 1))
        whole = start
    return start, whole, stop


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, state, segment_ids, ranges, output, averaged, log_sum,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, z_batch, z_head, z_token,
    o_batch, o_head, o_token,
    heads, groups, num_queries, num_keys, log2_scale,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. Grid: blocks of queries, B * H.

    Args:
        query: `[B, H, Nq, WIDTH]`.
        key, value, state: `[B, H / groups, Nk, WIDTH]`.
        segment_ids: `[B, Nk]` int32, contiguous.
        ranges: from `segment_ranges_kernel`, for blocks of queries.
        output, averaged: `[B, H, Nq, WIDTH]`, both with the strides `o_*`.
        log_sum: output, `[B, H, Nq]` fp32: log2 of the sum of exponentials; inf for queries that see no key.
        log2_scale: factor of the scores, log2(e) included.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most keys start first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first = block * BLOCK_QUERIES
    queries = first + tl.arange(0, BLOCK_QUERIES)
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
    sum_v = tl.zeros([BLOCK_QUERIES, WIDTH], tl.float32)
    sum_z = tl.zeros([BLOCK_QUERIES, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    if not HAS_SEGMENTS:
        sum_v, sum_z, total, peak = average(
            sum_v, sum_z, total, peak, q, queries, query_ids, key, value, state, segment_ids,
            k_token, v_token, z_token, start, whole, num_queries, num_keys, log2_scale,
            BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, False, False,
        )  # fmt: skip
    sum_v, sum_z, total, peak = average(
        sum_v, sum_z, total, peak, q, queries, query_ids, key, value, state, segment_ids,
        k_token, v_token, z_token, whole, stop, num_queries, num_keys, log2_scale,
        BLOCK_KEYS, WIDTH, PRECISION, HAS_STATE, HAS_SEGMENTS, CAUSAL, True, HAS_SEGMENTS,
    )  # fmt: skip
    alive = total > 0
    inverse = 1.0 / tl.where(alive, total, 1.0)
    sums = tl.where(alive, peak + tl.log2(tl.where(alive, total, 1.0)), float("inf"))
    tl.store(log_sum + tl.program_id(1).to(tl.int64) * num_queries + queries, sums, mask=queries < num_queries)
    output = head_of(output, batch, head, o_batch, o_head)
    store_tokens(output, sum_v * inverse[:, None], first, o_token, num_queries, BLOCK_QUERIES, WIDTH)
    if HAS_STATE:
        averaged = head_of(averaged, batch, head, o_batch, o_head)
        store_tokens(averaged, sum_z * inverse[:, None], first, o_token, num_queries, BLOCK_QUERIES, WIDTH)
