"""The kernels as two operators that autograd knows and `torch.compile` does not look into."""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.ops.layout import empty_token_major


@torch.library.custom_op("tape_pe::triton_attention", mutates_args=(), device_types=("cuda", "cpu"))
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from tape_pe.ops.backends.triton import launch

    with torch.cuda.device_of(query):  # Triton launches on the current device
        return launch.forward(query, key, value, state, segment_ids, causal, scale)


@torch.library.custom_op("tape_pe::triton_attention_backward", mutates_args=(), device_types=("cuda", "cpu"))
def _backward(
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
    from tape_pe.ops.backends.triton import launch

    with torch.cuda.device_of(query):
        return launch.backward(
            grad_output, grad_averaged, query, key, value, state, segment_ids, output, averaged, log_sum,
            causal, scale, with_state_grad,
        )  # fmt: skip


def outputs(query: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward operator returns, not yet written."""
    averaged = query.new_empty(0) if state is None else _empty_like(query)
    return _empty_like(query), averaged, query.new_empty(query.shape[:3], dtype=torch.float32)


def gradients(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, with_state_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the backward operator returns, not yet written."""
    dz = _empty_like(key) if state is not None and with_state_grad else query.new_empty(0)
    return _empty_like(query), _empty_like(key), _empty_like(value), dz


def _empty_like(tensor: Tensor) -> Tensor:
    return empty_token_major(tensor, *tensor.shape)


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return outputs(query, state)


@_backward.register_fake
def _(
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
    return gradients(query, key, value, state, with_state_grad)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.causal, ctx.scale = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors, *output)


def _autograd(
    ctx: torch.autograd.function.FunctionCtx, grad_output: Tensor, grad_averaged: Tensor, grad_log_sum: Tensor
) -> tuple:
    with_state_grad = ctx.needs_input_grad[3]  # type: ignore[attr-defined]
    *grads, grad_state = torch.ops.tape_pe.triton_attention_backward(
        grad_output,
        grad_averaged,
        *ctx.saved_tensors,  # type: ignore[attr-defined]
        ctx.causal,  # type: ignore[attr-defined]
        ctx.scale,  # type: ignore[attr-defined]
        with_state_grad,
    )
    return *grads, grad_state if with_state_grad else None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
