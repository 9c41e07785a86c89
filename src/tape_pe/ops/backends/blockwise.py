"""Attention on CPU in chunks of rows: memory linear in N, values and states averaged with the same weights.

A chunk of query rows sees whole rows of scores, so its softmax needs no running maximum. Only the causal prefix is
computed. Forward saves its inputs alone; backward computes the weights again. Scores of one chunk fill a buffer of
about a megabyte: for long sequences that is some rows of one key/value head, for short ones many heads and batch rows
at once.

The two operators are opaque to `torch.compile`, which therefore neither unrolls the loops nor recompiles for a length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from tape_pe.ops.inputs import AttentionInputs

# Scores of one chunk: 1 MiB in fp32, which stays in the L2 cache.
CHUNK_ELEMENTS = 1 << 18
# Fewer rows than this make thin matrix products, however long the rows are.
MIN_ROWS = 16
MAX_ROWS = 128


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`. Half-precision inputs are computed in fp32."""
    query, key, value, state, segment_ids, _, causal, scale = inputs
    if any(fwAD.unpack_dual(tensor).tangent is not None for tensor in (query, key, value, state) if tensor is not None):
        raise NotImplementedError("blockwise has no forward-mode derivatives, which backend='reference' has")
    bias = inputs.materialized_bias()
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output, averaged = torch.ops.tape_pe.blockwise_attention(query, key, value, state, segment_ids, bias, causal, scale)
    return output, None if state is None else averaged


class _Block(NamedTuple):
    """Some batch rows, key/value heads and query rows, which see keys up to `keys`."""

    batch: slice
    heads: slice
    rows: slice
    keys: int


class _Problem:
    """The tensors of one call, and the pieces of them that a block needs. H = Hkv * G query heads."""

    def __init__(
        self, query: Tensor, key: Tensor, segment_ids: Tensor | None, bias: Tensor | None, causal: bool, scale: float
    ) -> None:
        self.batch, self.heads, self.num_queries, _ = query.shape
        self.kv_heads, self.num_keys = key.shape[1:3]
        self.groups = self.heads // self.kv_heads
        self.query = self.group(query)
        self.key = key
        self.causal = causal
        self.scale = scale
        self.bias = None if bias is None else self.group(bias)
        # One document without padding needs no mask; looking costs less than masking every chunk.
        self.segment_ids = None
        if segment_ids is not None and not bool(((segment_ids == segment_ids[:, :1]) & (segment_ids >= 0)).all()):
            self.segment_ids = segment_ids
        self.dtype = torch.promote_types(query.dtype, torch.float32)

    def group(self, tensor: Tensor) -> Tensor:
        """`[B, H, ...]` -> `[B, Hkv, G, ...]`."""
        return tensor.unflatten(1, (self.kv_heads, self.groups))

    def rectangles(self) -> Iterator[tuple[slice, slice]]:
        """Batch rows and key/value heads to take together: as many as fit the buffer, if possible without a copy."""
        fit = max(1, CHUNK_ELEMENTS // max(1, self.groups * self.num_queries * self.num_keys))
        if fit >= self.batch * self.kv_heads or self.key.stride(0) == self.kv_heads * self.key.stride(1):
            heads, rows = min(fit, self.kv_heads), max(1, min(fit // self.kv_heads, self.batch))
        elif self.batch < self.kv_heads:  # token-major: one axis alone is a view
            heads, rows = min(fit, self.kv_heads), 1
        else:
            heads, rows = 1, min(fit, self.batch)
        for b in range(0, self.batch, rows):
            for h in range(0, self.kv_heads, heads):
                yield slice(b, b + rows), slice(h, h + heads)

    def blocks(self, batch: slice, heads: slice) -> Iterator[_Block]:
        """Chunks of query rows of a rectangle, the last one, which sees all keys, first."""
        rows = CHUNK_ELEMENTS // max(1, self.groups * self.num_keys)
        rows = min(max(rows, MIN_ROWS // self.groups, 1), MAX_ROWS)
        if rows * 2 > self.num_queries and self.groups * self.num_queries * self.num_keys <= CHUNK_ELEMENTS:
            rows = self.num_queries
        offset = self.num_keys - self.num_queries
        for start in reversed(range(0, self.num_queries, rows)):
            stop = min(start + rows, self.num_queries)
            yield _Block(batch, heads, slice(start, stop), offset + stop if self.causal else self.num_keys)

    def rows_of(self, grouped: Tensor, block: _Block) -> Tensor:
        """Query rows of a block from `[B, Hkv, G, Nq, C]`, as one matrix per key/value head: `[P, G * rows, C]`."""
        piece = grouped[block.batch, block.heads, :, block.rows].to(self.dtype)
        return piece.reshape(-1, self.groups * piece.shape[3], piece.shape[4])

    def keys_of(self, tensor: Tensor, batch: slice, heads: slice) -> Tensor:
        """Keys, values or states of a rectangle from `[B, Hkv, Nk, C]`: `[P, Nk, C]`."""
        piece = tensor[batch, heads].to(self.dtype)
        return piece.reshape(-1, *piece.shape[2:])

    def weights(self, block: _Block, query: Tensor, key: Tensor) -> Tensor:
        """Attention weights of a block, `[P, G * rows, keys]`; rows that see no key are zero."""
        scores = torch.baddbmm(
            query.new_empty(()), query, key[:, : block.keys].transpose(1, 2), beta=0, alpha=self.scale
        )
        rows = block.rows.stop - block.rows.start
        grouped = scores.unflatten(1, (self.groups, rows))  # [P, G, rows, keys]
        if self.bias is not None:
            bias = self.bias[block.batch, block.heads, :, block.rows, : block.keys]
            grouped += bias.reshape(-1, *bias.shape[2:])
        # Later keys stand in the last columns alone, other segments anywhere.
        hidden = dead = None
        if self.causal and rows > 1:
            hidden = torch.ones(1, rows, rows, dtype=torch.bool).triu_(1)
        if self.segment_ids is not None:
            offset = self.num_keys - self.num_queries
            queries = self.segment_ids[block.batch, offset + block.rows.start : offset + block.rows.stop, None]
            keys = self.segment_ids[block.batch, None, : block.keys]
            others = (queries != keys).logical_or_(keys < 0)  # [batch rows, rows, keys]
            if hidden is not None:
                others[..., block.keys - rows :] |= hidden
            hidden = others
            dead = queries < 0  # the others see themselves
        if hidden is not None:
            visible = grouped[..., block.keys - hidden.shape[2] :].unflatten(0, (hidden.shape[0], -1))
            visible.masked_fill_(hidden[:, None, None], -torch.inf)
        if self.bias is not None:  # which may be -inf anywhere
            dead = grouped.flatten(0, 1).amax(dim=-1, keepdim=True) == -torch.inf
        weights = torch._softmax(scores, -1, False, out=scores)
        if dead is not None and bool(dead.any()):
            weights.view(dead.shape[0], -1, rows, block.keys).masked_fill_(dead[:, None], 0.0)
        return weights

    def scatter(self, target: Tensor, block: _Block, values: Tensor) -> None:
        """Writes `[P, G * rows, C]` into the query rows of a grouped `[B, Hkv, G, Nq, C]`."""
        piece = target[block.batch, block.heads, :, block.rows]
        piece.copy_(values.view(piece.shape))


def _token_major(like: Tensor, batch: int, heads: int, tokens: int, channels: int) -> Tensor:
    """An empty `[B, heads, N, C]` whose memory is `[B, N, heads, C]`: projections read it without a copy."""
    return like.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def _outputs(query: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = query.shape
    output = _token_major(query, batch, heads, num_queries, value.shape[3])
    if state is None:
        return output, query.new_empty(0)
    return output, _token_major(query, batch, heads, num_queries, state.shape[3])


@torch.library.custom_op("tape_pe::blockwise_attention", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    output, averaged = _outputs(query, value, state)
    with torch.autocast("cpu", enabled=False):
        problem = _Problem(query, key, segment_ids, bias, causal, scale)
        for batch, heads in problem.rectangles():
            k, v = (problem.keys_of(tensor, batch, heads) for tensor in (key, value))
            z = None if state is None else problem.keys_of(state, batch, heads)
            for block in problem.blocks(batch, heads):
                weights = problem.weights(block, problem.rows_of(problem.query, block), k)
                problem.scatter(problem.group(output), block, torch.bmm(weights, v[:, : block.keys]))
                if z is not None:
                    problem.scatter(problem.group(averaged), block, torch.bmm(weights, z[:, : block.keys]))
    return output, averaged


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _outputs(query, value, state)


@torch.library.custom_op("tape_pe::blockwise_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_output: Tensor,
    grad_averaged: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    with_state_grad: bool,
    with_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = _gradients(query, key, value, state, bias, with_state_grad, with_bias_grad)
    grad_query, grad_key, grad_value, grad_state, grad_bias = grads
    with torch.autocast("cpu", enabled=False):
        problem = _Problem(query, key, segment_ids, bias, causal, scale)
        grad_output = problem.group(grad_output)
        grad_averaged = grad_averaged if state is None else problem.group(grad_averaged)
        if with_bias_grad:
            grad_bias.zero_()
        for batch, heads in problem.rectangles():
            k, v = (problem.keys_of(tensor, batch, heads) for tensor in (key, value))
            z = None if state is None else problem.keys_of(state, batch, heads)
            dk = dv = dz = None
            for block in problem.blocks(batch, heads):
                seen = slice(0, block.keys)
                q = problem.rows_of(problem.query, block)
                weights = problem.weights(block, q, k)
                d_output = problem.rows_of(grad_output, block)
                dv = _accumulate(dv, weights, d_output)
                d_weights = torch.bmm(d_output, v[:, seen].transpose(1, 2))
                if z is not None:
                    d_averaged = problem.rows_of(grad_averaged, block)
                    d_weights.baddbmm_(d_averaged, z[:, seen].transpose(1, 2))
                    if with_state_grad:
                        dz = _accumulate(dz, weights, d_averaged)
                d_scores = torch.ops.aten._softmax_backward_data.out(
                    d_weights, weights, -1, weights.dtype, grad_input=d_weights
                )
                if with_bias_grad:
                    piece = problem.group(grad_bias)[batch, heads, :, block.rows, seen]
                    piece.copy_(d_scores.view(piece.shape))
                dq = torch.baddbmm(q, d_scores, k[:, seen], beta=0, alpha=scale)
                problem.scatter(problem.group(grad_query), block, dq)
                dk = _accumulate(dk, d_scores, q, scale)
            for target, values in ((grad_key, dk), (grad_value, dv), (grad_state, dz)):
                if values is not None:
                    piece = target[batch, heads]
                    piece.copy_(values.view(piece.shape))
    return grads


def _accumulate(total: Tensor | None, weights: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """Adds `scale * weights^T rows` to the keys that a block sees; its first block sees them all."""
    if total is None:
        return torch.baddbmm(rows.new_empty(()), weights.transpose(1, 2), rows, beta=0, alpha=scale)
    total[:, : weights.shape[2]].baddbmm_(weights.transpose(1, 2), rows, alpha=scale)
    return total


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    bias: Tensor | None,
    with_state_grad: bool,
    with_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return query.new_empty(0)
        batch, heads, tokens, channels = tensor.shape
        return _token_major(tensor, batch, heads, tokens, channels)

    return (
        like(query),
        like(key),
        like(value),
        like(state if with_state_grad else None),
        bias.new_empty(bias.shape) if bias is not None and with_bias_grad else query.new_empty(0),
    )


@_backward.register_fake
def _(
    grad_output: Tensor,
    grad_averaged: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    with_state_grad: bool,
    with_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(query, key, value, state, bias, with_state_grad, with_bias_grad)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.causal, ctx.scale = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors)


def _autograd(ctx: torch.autograd.function.FunctionCtx, grad_output: Tensor, grad_averaged: Tensor) -> tuple:
    query, key, value, state, segment_ids, bias = ctx.saved_tensors  # type: ignore[attr-defined]
    with_state_grad, with_bias_grad = ctx.needs_input_grad[3], ctx.needs_input_grad[5]  # type: ignore[attr-defined]
    grads = torch.ops.tape_pe.blockwise_attention_backward(
        grad_output,
        grad_averaged,
        query,
        key,
        value,
        state,
        segment_ids,
        bias,
        ctx.causal,  # type: ignore[attr-defined]
        ctx.scale,  # type: ignore[attr-defined]
        with_state_grad,
        with_bias_grad,
    )
    grad_state, grad_bias = grads[3] if with_state_grad else None, grads[4] if with_bias_grad else None
    return *grads[:3], grad_state, None, grad_bias, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
