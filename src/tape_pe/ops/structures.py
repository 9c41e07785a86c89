"""State updates whose weights act elsewhere than on the head axis: the structural ablations of arXiv 2501.00712.

All of them start as RoPE and read and write one state per token and key/value head, but break what makes TAPE
equivariant, in one way each (literal twins in `tape_pe.ops.reference`):

* *components*: cosines and sines have weights of their own. A common rotation of all states, which mixes the two, is
  then no longer followed.
* *channels*: the weights act along the D channels of a head, the same for every head. The two channels of a pair then
  no longer have the same cosine and sine, so the state is `[C | S]` with D numbers each.
* *unstructured*: the heads' channels are flattened to Hkv * D numbers per token, on which the weights act. The state is
  `[C | S]` too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.ops.contextualize import contextualize, full_mix, normalize
from tape_pe.ops.rotary import per_state_head


def widen(state: Tensor) -> Tensor:
    """A packed state `[c | s]` as `[C | S] = [c c | s s]`, for weights that tell the two channels of a pair apart.

    Args:
        state: `[..., D]`.

    Returns:
        `[..., 2 * D]`.
    """
    c, s = state.chunk(2, dim=-1)
    return torch.cat([c, c, s, s], dim=-1)


def rotate_wide(u: Tensor, state: Tensor) -> Tensor:
    """u * C + half(u) * S with half((a, b)) = (-b, a): `tape_pe.ops.rotate` where all D channels have a C and an S.

    Args:
        u: queries or keys, `[B, H, N, D]`.
        state: `[C | S]`, `[B | 1, Hs, N, 2D]`, Hs dividing H; head h uses head `h // (H / Hs)` of the state.

    Returns:
        `[B, H, N, D]` in the dtype of `u`.
    """

    def product(u: Tensor, state: Tensor) -> Tensor:
        a, b = u.chunk(2, dim=-1)
        c_a, c_b, s_a, s_b = state.chunk(4, dim=-1)
        return torch.cat([a * c_a - b * s_a, a * s_b + b * c_b], dim=-1)

    return per_state_head(u, state, product)


def contextualize_components(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None = None,
    up: Tensor | None = None,
    down: Tensor | None = None,
    norm: str = "none",
) -> Tensor:
    """`contextualize` of the cosines and of the sines, each with weights of its own and one gate for both.

    Args:
        state: packed `[c | s]`, `[B | 1, Hkv | 1, N, D]`.
        averaged_state: `[B, H, N, D]`; read with `mix` alone.
        gate: `[B, N, I]`, or `None`.
        mix: `[2, Hkv, H]` or `[2, Hkv, H / Hkv]`, for c and for s.
        up: `[2, I, Hkv]`.
        down: `[2, Hkv, I]`.
        norm: as for `contextualize`, over both.

    Returns:
        `[B, Hkv, N, D]` in the dtype of `state`.
    """
    averages = (None, None) if averaged_state is None else averaged_state.chunk(2, dim=-1)
    parts = [
        contextualize(
            part,
            average,
            gate,
            mix=None if mix is None else mix[index],
            up=None if up is None else up[index],
            down=None if down is None else down[index],
        )
        for index, (part, average) in enumerate(zip(state.chunk(2, dim=-1), averages, strict=True))
    ]
    return normalize(torch.cat(parts, dim=-1), norm)


def contextualize_channels(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None = None,
    up: Tensor | None = None,
    down: Tensor | None = None,
    norm: str = "none",
) -> Tensor:
    """The update along channels. For E = C and for E = S, of each head k, with the same weights:

        E1[n] = E[n] + W_mix Eb[n],     Eb the mean of the averages of the H / Hkv query heads that share head k
        E2[n] = E1[n] + W_down diag(gate[n]) W_up E1[n]

    Args:
        state: `[C | S]`, `[B | 1, Hkv, N, 2D]`; a table that all heads share has to be expanded.
        averaged_state: `[B, H, N, 2D]`; read with `mix` alone.
        gate: `[B, N, I]`, or `None`.
        mix: `[D, D]`, or `[D]` for one scale per channel.
        up: `[I, D]`.
        down: `[D, I]`.
        norm: as for `contextualize`, over the D pairs (C, S).

    Returns:
        `[B, Hkv, N, 2D]` in the dtype of `state`.
    """
    e = _split(state)
    if mix is not None:
        assert averaged_state is not None
        average = _split(averaged_state)
        if average.shape[1] != e.shape[1]:
            average = average.unflatten(1, (e.shape[1], -1)).mean(dim=2)
        e = e + (average * mix if mix.ndim == 1 else average @ mix.t())
    if gate is not None:
        assert up is not None
        assert down is not None
        e = e + ((e @ up.t()) * gate[:, None, :, None]) @ down.t()
    return normalize(e.flatten(-2), norm).to(state.dtype)


def contextualize_unstructured(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None = None,
    up: Tensor | None = None,
    down: Tensor | None = None,
    norm: str = "none",
) -> Tensor:
    """The update of all heads and channels at once. For E = C and for E = S, with the same weights:

        E1[n] = E[n] + W_mix Eb[n]                          over the heads, as in `contextualize`
        E2[n] = E1[n] + W_down diag(gate[n]) W_up E1[n]     over the Hkv * D numbers of a token, head by head

    Args:
        state: `[C | S]`, `[B | 1, Hkv | 1, N, 2D]`.
        averaged_state: `[B, H, N, 2D]`; read with `mix` alone.
        gate: `[B, N, I]`, or `None`.
        mix: `[Hkv, H]`, or `[Hkv, H / Hkv]` for one scale per query head.
        up: `[I, Hkv * D]`.
        down: `[Hkv * D, I]`.
        norm: as for `contextualize`, of each head over its D pairs (C, S).

    Returns:
        `[B, Hkv, N, 2D]` in the dtype of `state`.
    """
    e = state.transpose(1, 2)  # [B, N, Hkv | 1, 2D]
    if mix is not None:
        assert averaged_state is not None
        e = e + torch.matmul(full_mix(mix, averaged_state.shape[1]), averaged_state.transpose(1, 2))
    if gate is not None:
        assert up is not None
        assert down is not None
        heads = 2 * up.shape[1] // e.shape[-1]
        e = e.expand(*e.shape[:2], heads, -1)
        flat = torch.stack([part.flatten(2) for part in e.chunk(2, dim=-1)], dim=2)  # [B, N, 2, Hkv * D]
        change = ((flat @ up.t()) * gate[:, :, None]) @ down.t()
        e = e + change.unflatten(-1, (heads, -1)).transpose(2, 3).flatten(-2)
    return normalize(e.transpose(1, 2), norm).to(state.dtype)


def _split(state: Tensor) -> Tensor:
    """`[C | S]` of `[..., 2D]` as `[..., 2, D]`."""
    return state.unflatten(-1, (2, -1))
