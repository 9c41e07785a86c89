"""The published state update in its general form, by plain einsums: what `contextualize` is measured against."""

from __future__ import annotations

import torch
from torch import Tensor


def einsum_update(
    state: Tensor, averaged_state: Tensor, gate: Tensor, *, mix: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """e -> e2 of arXiv 2501.00712, section 3, with its `[N, I, M, L, R]` intermediates. Weights act on the heads alone.

    For blocks of two channels, L = R = 2, that is the work of the released code, whose cosines and sines are two
    tables as wide as a head. In its rotary form (`tape_pe.ops.contextualize`) a state has half of these numbers.

    Args:
        state: e, `[B, N, Hkv, M, L, R]`.
        averaged_state: its attention average per query head, `[B, N, H, M, L, R]`.
        gate: psi of the tokens, `[B, N, I]`.
        mix: W_mix `[Hkv, H]`.
        up: W_up `[I, Hkv]`.
        down: W_down `[Hkv, I]`.

    Returns:
        e2, as `state`.
    """
    state = state + torch.einsum("kh,bnhmlr->bnkmlr", mix, averaged_state)
    inner = torch.einsum("ik,bnkmlr->bnimlr", up, state) * gate[..., None, None, None]
    return state + torch.einsum("ki,bnimlr->bnkmlr", down, inner)


def as_blocks(state: Tensor) -> Tensor:
    """A packed state `[c | s]`, `[B, H, N, D]`, as `[[c, s], [-s, c]]` per pair: `[B, N, H, D / 2, 2, 2]`."""
    c, s = state.transpose(1, 2).chunk(2, dim=-1)
    return torch.stack([torch.stack([c, s], dim=-1), torch.stack([-s, c], dim=-1)], dim=-2)
