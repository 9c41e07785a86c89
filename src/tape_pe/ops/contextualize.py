"""The state update e -> e2 of the rotary form, through one H x H map per token."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from tape_pe.ops.derivatives import has_tangents

STATE_NORMS = ("none", "rms")


def contextualize(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None = None,
    up: Tensor | None = None,
    down: Tensor | None = None,
    norm: str = "none",
) -> Tensor:
    """Updates every token's state from what it attended to and from its own content (arXiv 2501.00712, section 3).

        z1[n] = z[n] + W_mix zb[n]
        z2[n] = T[n] z1[n],     T[n] = I + W_down diag(gate[n]) W_up = I + sum_i gate[n, i] d_i u_i^T

    T[n] is one Hkv x Hkv matrix per token: all of them are one `[N, I] x [I, Hkv * Hkv]` product, and no `[N, I, D]`
    intermediate exists. For backward the inputs alone are kept; z1 and the maps are cheaper to compute again. Literal
    twin: `tape_pe.ops.reference.contextualize`.

    Args:
        state: z, packed `[c | s]`, `[B | 1, Hkv | 1, N, D]`.
        averaged_state: zb, the attention average of the states per query head, `[B, H, N, D]`; read with `mix` alone.
        gate: `[B, N, I]`, psi of the tokens' content, in the decoder `silu(W_x mlp_output)`, the same for all heads;
            `None` leaves out the second update.
        mix: W_mix `[Hkv, H]`, or `[Hkv, H / Hkv]` for one scale per query head (summed over the heads that share a
            state); `None` leaves out the first update.
        up: W_up `[I, Hkv]`.
        down: W_down `[Hkv, I]`.
        norm: `"none"`, or `"rms"` to divide each head's new state by its root mean square over the D/2 pairs.

    Returns:
        z2, `[B, Hkv, N, D]` in the dtype of `state`.

    Raises:
        ValueError: an argument that another one needs is missing, shapes disagree, or `norm` is unknown.
    """
    check_norm(norm)
    if mix is not None:
        if averaged_state is None:
            raise ValueError("averaged_state=None: mix needs the attention average of the states")
        mix = full_mix(mix, averaged_state.shape[1])
    if gate is not None:
        if up is None or down is None:
            raise ValueError("up=None or down=None: gate needs both")
        _check_widths(gate, up, down)
    if mix is None and gate is None:
        return normalize(state, norm)
    # Token-major, [B, N, heads, D]: the layout in which projections leave queries and attention leaves its averages.
    averaged = averaged_state.transpose(1, 2) if mix is not None and averaged_state is not None else None
    inputs = (state.transpose(1, 2), averaged, gate, mix, up, down)
    z = _Update.forward(*inputs) if has_tangents(*inputs) else _Update.apply(*inputs)
    return normalize(z, norm).to(state.dtype).transpose(1, 2)


def check_norm(norm: str) -> None:
    """Raises a ValueError for an unknown state norm."""
    if norm not in STATE_NORMS:
        raise ValueError(f"norm={norm!r}: known state norms are {', '.join(STATE_NORMS)}")


def normalize(state: Tensor, norm: str) -> Tensor:
    """A state `[..., 2P]` of P numbers (c, s), divided for the norm `"rms"` by the root mean square of their sizes."""
    check_norm(norm)
    return state * (2 * state.square().mean(dim=-1, keepdim=True)).rsqrt() if norm == "rms" else state


def full_mix(mix: Tensor, heads: int) -> Tensor:
    """W_mix `[Hkv, H]`, of which `[Hkv, H / Hkv]` has the entries of the query heads that share a state."""
    kv_heads, columns = mix.shape
    if columns == heads:
        return mix
    if kv_heads * columns != heads:
        raise ValueError(
            f"mix has the shape {tuple(mix.shape)}: averaged_state with {heads} heads needs "
            f"{(kv_heads, heads)}, or one scale per head"
        )
    owners = torch.eye(kv_heads, dtype=mix.dtype, device=mix.device)
    return (owners[:, :, None] * mix[:, None, :]).flatten(1)


def _check_widths(gate: Tensor, up: Tensor, down: Tensor) -> None:
    size, heads = up.shape
    if down.shape != (heads, size):
        raise ValueError(f"down has the shape {tuple(down.shape)}: up {tuple(up.shape)} needs {(heads, size)}")
    if gate.shape[-1] != size:
        raise ValueError(f"gate has {gate.shape[-1]} channels: up has {size} rows")


class _Update(torch.autograd.Function):
    """z2 = z + M z + (W_mix + M W_mix) zb with M = T - I, one matrix product per token and term.

    z is `[B | 1, N, Hkv | 1, D]`, zb `[B, N, H, D]`, W_mix `[Hkv, H]`. Computed in the widest dtype of all inputs,
    autocast or not: phases want to be exact.
    """

    @staticmethod
    def forward(
        z: Tensor,
        averaged: Tensor | None,
        gate: Tensor | None,
        mix: Tensor | None,
        up: Tensor | None,
        down: Tensor | None,
    ) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):
            tokens = _Tokens(z, averaged, gate, mix, up, down)
            new = tokens.z.clone() if tokens.maps is None else torch.baddbmm(tokens.z, tokens.maps, tokens.z)
            if tokens.averaged is not None:
                new.baddbmm_(tokens.mixes(), tokens.averaged)
            return new.view(tokens.shape)

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor | None, ...], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # type: ignore[attr-defined]
        z, averaged, gate, mix, up, down = inputs
        d_averaged = d_gate = d_mix = d_up = d_down = None
        with torch.autocast(grad.device.type, enabled=False):
            tokens = _Tokens(*inputs)
            grad = grad.reshape(tokens.z.shape)
            maps = tokens.maps
            d_z = grad if maps is None else torch.baddbmm(grad, maps.transpose(1, 2), grad)
            d_maps = None if maps is None else torch.bmm(grad, tokens.z.transpose(1, 2))
            if tokens.averaged is not None:
                d_averaged = torch.bmm(tokens.mixes().transpose(1, 2), grad).view(averaged.shape)
                d_mixes = torch.bmm(grad, tokens.averaged.transpose(1, 2))
                d_mix = d_mixes.sum(dim=0)
                if maps is not None and d_maps is not None:
                    d_mix += maps.flatten(0, 1).t() @ d_mixes.flatten(0, 1)
                    d_maps.flatten(0, 1).addmm_(d_mixes.flatten(0, 1), mix.to(grad.dtype).t())
            if maps is not None and d_maps is not None:
                d_maps = d_maps.flatten(1)
                d_gate = (d_maps @ tokens.products.t()).view(gate.shape)
                d_products = (tokens.gate.t() @ d_maps).unflatten(1, maps.shape[1:])  # [I, Hkv, Hkv]
                d_up = (d_products * down.t()[:, :, None]).sum(dim=1)
                d_down = (d_products * up[:, None, :]).sum(dim=2).t()
            d_z = d_z.view(tokens.shape).sum_to_size(z.shape)
        grads = (d_z, d_averaged, d_gate, d_mix, d_up, d_down)
        return tuple(None if d is None else d.to(x.dtype) for d, x in zip(grads, inputs, strict=True))


class _Tokens:
    """The inputs of `_Update` as one matrix per token, T = B * N of them.

    Attributes:
        shape: of z2, `(B, N, Hkv, D)`.
        z: `[T, Hkv, D]`.
        averaged: `[T, H, D]`, or `None` without W_mix.
        gate: `[T, I]`.
        products: all d_i u_i^T, `[I, Hkv * Hkv]`.
        maps: M, `[T, Hkv, Hkv]`, or `None` without a gate.
    """

    def __init__(
        self,
        z: Tensor,
        averaged: Tensor | None,
        gate: Tensor | None,
        mix: Tensor | None,
        up: Tensor | None,
        down: Tensor | None,
    ) -> None:
        given = [x for x in (z, averaged, gate, mix, up, down) if x is not None]
        dtype = reduce(torch.promote_types, (x.dtype for x in given))
        batch = max(x.shape[0] for x in (z, averaged, gate) if x is not None)
        heads = z.shape[2]
        self.mix = self.averaged = self.maps = None
        if averaged is not None and mix is not None:
            heads = mix.shape[0]
            self.mix, self.averaged = mix.to(dtype), averaged.to(dtype).flatten(0, 1)
        if gate is not None and up is not None and down is not None:
            heads = up.shape[1]
            self.gate = gate.to(dtype).flatten(0, 1)
            self.products = (down.t()[:, :, None] * up[:, None, :]).to(dtype).flatten(1)
            self.maps = (self.gate @ self.products).view(-1, heads, heads)
        self.shape = batch, z.shape[1], heads, z.shape[3]
        self.z = z.to(dtype).expand(self.shape).flatten(0, 1)

    def mixes(self) -> Tensor:
        """W_mix + M W_mix, `[T, Hkv, H]`."""
        assert self.mix is not None
        if self.maps is None:
            return self.mix.expand(self.z.shape[0], -1, -1)
        return (self.maps.flatten(0, 1) @ self.mix).view(*self.maps.shape[:2], -1).add_(self.mix)
