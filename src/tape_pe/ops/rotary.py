"""Start state and rotation: RoPE (Su et al., arXiv 2104.09864) in the half-split convention of Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tape_pe.ops.derivatives import has_tangents
from tape_pe.ops.frequencies import Frequencies, reads_length, rotary_frequencies


def rotary_state(
    position_ids: Tensor,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The start state of RoPE and TAPE: packed `[cos | sin]` of the phases position * frequency, in radians.

    Phases are computed in fp64 (fp32 on devices without it) whatever `dtype`: in bf16, positions 256 and 257 would be
    the same number.

    Args:
        position_ids: `[B, N]`, integers (or reals).
        head_dim: D, even.
        theta: base of the frequencies.
        scaling: frequency rule, see `rotary_frequencies`.
        lengths: for rules that read the length: that of each token's sequence, `[B, N]` or broadcastable to it; by
            default each row's largest position plus one.
        dtype: dtype of the result.

    Returns:
        `[B, 1, N, D]`: one table for all heads.

    Raises:
        ValueError: see `rotary_frequencies`.
    """
    if lengths is None and reads_length(scaling):
        lengths = position_ids.amax(dim=-1, keepdim=True) + 1
    frequencies = rotary_frequencies(
        head_dim, theta=theta, scaling=scaling, lengths=lengths, device=position_ids.device
    )
    return state_of(position_ids, frequencies, dtype)


def state_of(position_ids: Tensor, frequencies: Frequencies, dtype: torch.dtype = torch.float32) -> Tensor:
    """The start state of positions `[B, N]` with frequencies `[D / 2]` or `[B, N | 1, D / 2]`: `[B, 1, N, D]`."""
    phases = position_ids[..., None].to(frequencies.inverse.dtype) * frequencies.inverse
    state = torch.cat([phases.cos(), phases.sin()], dim=-1) * frequencies.attention_factor
    return state.to(dtype)[:, None]


def rotate(u: Tensor, state: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotates (and scales) channel pairs by a state: the complex product (a, b), (c, s) -> (ac - bs, as + bc).

    Args:
        u: queries or keys, `[B, H, N, D]`; pair j is channels (j, j + D/2).
        state: packed `[c | s]`, `[B | 1, Hs, N, D]`, Hs dividing H; head h uses head `h // (H / Hs)` of the state.
        interleaved: pair j of `u` is channels (2j, 2j + 1) instead.

    Returns:
        `[B, H, N, D]` in the dtype of `u`.
    """

    def product(u: Tensor, state: Tensor) -> Tensor:
        if interleaved:
            c, s = state.chunk(2, dim=-1)
            a, b = u[..., 0::2], u[..., 1::2]
            return torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
        if torch.compiler.is_compiling() or has_tangents(u, state):
            return _product(u, state)  # which compilers fuse better than steps in place
        return _Rotation.apply(u, state)

    return per_state_head(u, state, product)


class _Rotation(torch.autograd.Function):
    """The product of u and a state that broadcasts to it, in place; of the two, only what backward needs is kept."""

    @staticmethod
    def forward(u: Tensor, state: Tensor) -> Tensor:
        return _times(u, state)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        u, state = inputs
        with_state_grad = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        ctx.save_for_backward(u if with_state_grad else None, state)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        u, state = ctx.saved_tensors  # type: ignore[attr-defined]
        with_u_grad = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        grad_u = _times(grad, state, conjugate=True) if with_u_grad else None
        return grad_u, None if u is None else _times(grad, u, conjugate=True).sum_to_size(state.shape)


def _product(u: Tensor, z: Tensor, sign: int = 1) -> Tensor:
    """The complex product of half-split pairs u z, or with the sign -1 u conj(z)."""
    a, b = u.chunk(2, dim=-1)
    c, s = z.chunk(2, dim=-1)
    return torch.cat([a * c - sign * (b * s), sign * (a * s) + b * c], dim=-1)


def _times(u: Tensor, z: Tensor, conjugate: bool = False) -> Tensor:
    """u z, or u conj(z), in place, in the shape of `u`, to which z broadcasts."""
    sign = -1 if conjugate else 1
    if torch.is_grad_enabled():  # second derivatives are wanted, which steps in place do not have
        return _product(u, z, sign)
    a, b = u.chunk(2, dim=-1)
    c, s = z.chunk(2, dim=-1)
    result = torch.empty_like(u)
    real, imaginary = result.chunk(2, dim=-1)
    # Not `addcmul_`, which may round once instead of twice: a converted model would not be the same to the last bit.
    torch.mul(a, c, out=real).sub_(b * s, alpha=sign)
    torch.mul(b, c, out=imaginary).add_(a * s, alpha=sign)
    return result


def per_state_head(u: Tensor, state: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`product` of `u` `[B, H, N, D]` with a state `[B | 1, Hs, N, Ds]`, whose heads serve H / Hs heads of `u` each."""
    state = state.to(u.dtype)
    heads, state_heads = u.shape[1], state.shape[1]
    if not 1 < state_heads < heads:
        return product(u, state)
    return product(u.unflatten(1, (state_heads, heads // state_heads)), state.unsqueeze(2)).flatten(1, 2)
