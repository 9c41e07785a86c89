"""The state update e -> e2 of the rotary form, through one H x H map per token."""

from __future__ import annotations

import torch
from torch import Tensor

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
    intermediate exists. Literal twin: `tape_pe.ops.reference.contextualize`.

    Args:
        state: z, packed `[c | s]`, `[B | 1, Hkv | 1, N, D]`.
        averaged_state: zb, the attention average of the states per query head, `[B, H, N, D]`; read with `mix` alone.
        gate: `[B, N, I]`, psi of the tokens; `None` leaves out the second update.
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
    # Token-major, [B, N, heads, D]: the layout in which projections leave queries and attention leaves its averages.
    z = state.transpose(1, 2)
    if mix is not None:
        if averaged_state is None:
            raise ValueError("averaged_state=None: mix needs the attention average of the states")
        z = mix_heads(z, averaged_state.transpose(1, 2), mix)
    if gate is not None:
        if up is None or down is None:
            raise ValueError("up=None or down=None: gate needs both")
        z = _map_heads(z, gate, up, down)
    return normalize(z, norm).to(state.dtype).transpose(1, 2)


def check_norm(norm: str) -> None:
    """Raises a ValueError for an unknown state norm."""
    if norm not in STATE_NORMS:
        raise ValueError(f"norm={norm!r}: known state norms are {', '.join(STATE_NORMS)}")


def normalize(state: Tensor, norm: str) -> Tensor:
    """A state `[..., 2P]` of P numbers (c, s), divided for the norm `"rms"` by the root mean square of their sizes."""
    check_norm(norm)
    return state * (2 * state.square().mean(dim=-1, keepdim=True)).rsqrt() if norm == "rms" else state


def mix_heads(z: Tensor, averaged: Tensor, mix: Tensor) -> Tensor:
    """z + W_mix zb with z `[B, N, Hkv | 1, D]` and zb `[B, N, H, D]`."""
    heads = averaged.shape[2]
    kv_heads, columns = mix.shape
    if columns == heads:
        return z + torch.matmul(mix, averaged)
    if kv_heads * columns != heads:
        raise ValueError(
            f"mix has the shape {tuple(mix.shape)}: averaged_state with {heads} heads needs "
            f"{(kv_heads, heads)}, or one scale per head"
        )
    if columns == 1:
        return z + averaged * mix
    return z + (averaged.unflatten(2, (kv_heads, columns)) * mix[..., None]).sum(dim=3)


def _map_heads(z: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """z + (T - I) z with z `[B, N, Hkv | 1, D]` and gate `[B, N, I]`."""
    size, heads = up.shape
    if down.shape != (heads, size):
        raise ValueError(f"down has the shape {tuple(down.shape)}: up {tuple(up.shape)} needs {(heads, size)}")
    if gate.shape[-1] != size:
        raise ValueError(f"gate has {gate.shape[-1]} channels: up has {size} rows")
    z = z.expand(*z.shape[:2], heads, -1)
    products = (down.t()[:, :, None] * up[:, None, :]).reshape(size, heads * heads)
    maps = (gate @ products).unflatten(-1, (heads, heads))  # T - I, [B, N, Hkv, Hkv]
    return z + torch.matmul(maps, z.to(maps.dtype))
