"""Attention on CPU in chunks of rows: memory linear in N, values and states averaged with the same weights.

A chunk of query rows sees whole rows of scores, so its softmax needs no running maximum. Only keys that some query of
the chunk may see are computed: the causal prefix, without the padding and the documents before and after. Forward saves
its inputs alone; backward computes the weights again. Scores of one chunk fill a buffer of about half a megabyte: for
long sequences that is some rows of one key/value head, for short ones many heads and batch rows at once.

The two operators are opaque to `torch.compile`, which therefore neither unrolls the loops nor recompiles for a length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.ops.backends import one_query
from tape_pe.ops.backends.blocks import Problem, add_product, join, product, room
from tape_pe.ops.derivatives import refuse_tangents
from tape_pe.ops.inputs import AttentionInputs
from tape_pe.ops.layout import empty_token_major


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`. Half-precision inputs are computed in fp32."""
    query, key, value, state, segment_ids, _, causal, scale = inputs
    refuse_tangents("blockwise", query, key, value, state)
    bias = inputs.materialized_bias()
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    arguments = (query, key, value, state, segment_ids, bias, causal, scale)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        output, averaged = torch.ops.tape_pe.blockwise_attention(*arguments)
    elif one_query.can_attend(inputs):
        return one_query.attend(inputs)
    else:
        output, averaged = _forward_eager(*arguments)
    return output, None if state is None else averaged


def _outputs(query: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = query.shape
    output = empty_token_major(query, batch, heads, num_queries, value.shape[3])
    if state is None:
        return output, query.new_empty(0)
    return output, empty_token_major(query, batch, heads, num_queries, state.shape[3])


def _forward_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    results = _outputs(query, value, state)
    with torch.autocast("cpu", enabled=False):
        problem = Problem(query, key, value, state, segment_ids, bias, causal, scale)
        buffer = problem.buffer()
        targets = [problem.group(result) for result in results[: len(problem.keys) - 1]]
        for batch, heads in problem.rectangles():
            k, *values = (problem.keys_of(tensor, batch, heads) for tensor in problem.keys)
            for block in problem.blocks(batch, heads):
                if block.keys.start == block.keys.stop:
                    for target in targets:
                        target[block.batch, block.heads, :, block.rows] = 0
                    continue
                weights = problem.weights(block, problem.queries_of(block), k, buffer)
                for target, v in zip(targets, values, strict=True):
                    problem.write(target, block, weights, v[:, block.keys])
    return results


_forward = torch.library.custom_op("tape_pe::blockwise_attention", _forward_eager, mutates_args=(), device_types="cpu")


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
    with torch.autocast("cpu", enabled=False):
        problem = Problem(query, key, value, state, segment_ids, bias, causal, scale)
        weights_buffer, scores_buffer = problem.buffer(), problem.buffer()
        directions = [problem.group(grad) for grad in (grad_output, grad_averaged)[: len(problem.keys) - 1]]
        grad_query = problem.group(grads[0])
        grad_bias: Tensor | None = None
        if bias is not None and with_bias_grad:
            grad_bias = problem.group(bias.new_zeros(bias.shape, dtype=problem.dtype))
        targets = [grads[1], grads[2], *grads[3:4] * with_state_grad]
        widths = [target.shape[3] for target in targets]
        for batch, heads in problem.rectangles():
            k, *values = (problem.keys_of(tensor, batch, heads) for tensor in problem.keys)
            wide = join(*values)
            dk = torch.zeros_like(k, memory_format=torch.contiguous_format)
            d_wide = wide.new_zeros(*wide.shape[:2], sum(widths[1:]))
            for block in problem.blocks(batch, heads):
                if block.keys.start == block.keys.stop:
                    grad_query[block.batch, block.heads, :, block.rows] = 0
                    continue
                query_rows = problem.queries_of(block)
                weights = problem.weights(block, query_rows, k, weights_buffer)
                direction = join(*(problem.rows_of(grad, block) for grad in directions))
                add_product(d_wide[:, block.keys], weights.transpose(1, 2), direction[..., : d_wide.shape[2]])
                d_scores = room(scores_buffer, query_rows, k[:, block.keys])
                product(direction, wide[:, block.keys].transpose(1, 2), d_scores)
                torch.ops.aten._softmax_backward_data.out(d_scores, weights, -1, problem.dtype, grad_input=d_scores)
                if grad_bias is not None:
                    piece = problem.piece_of(grad_bias, block)
                    batch_rows, rows = block.batch.stop - block.batch.start, block.rows.stop - block.rows.start
                    piece += d_scores.view(batch_rows, -1, problem.groups, rows, d_scores.shape[2]).sum_to_size(
                        piece.shape
                    )
                problem.write(grad_query, block, d_scores, k[:, block.keys], scale)
                add_product(dk[:, block.keys], d_scores.transpose(1, 2), query_rows)
            for target, grad in zip(targets, (dk, *d_wide.split(widths[1:], dim=-1)), strict=True):
                target[batch, heads] = grad.view(target[batch, heads].shape)
    if grad_bias is not None:
        grads[4].copy_(grad_bias.view(grads[4].shape))
    return grads


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
        return empty_token_major(tensor, *tensor.shape)

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
