"""The method, written as literally as its equations: slow, readable, and what every faster path is tested against.

Two forms stand here, of Zhu et al., "Rethinking Addressing in Language Models via Contextualized Equivariant Positional
Encoding", ICML 2025 (arXiv 2501.00712).

*General form.* The channels of the heads are cut into M blocks of L channels each, and token n carries an encoding
e[n] of shape [M, L, R]. With `i`, `j` tokens, `m` the blocks of one head, and A the attention weights:

    score[i, j] = sum_m q[i, m]^T e[i, m] e[j, m]^T k[j, m] / sqrt(D)        A = softmax(score + mask)
    output[i]   = sum_j A[i, j] v[j]
    e1[i]       = e[i] + W_mix sum_j A[i, j] e[j]
    e2[i]       = e1[i] + W_down diag(gate[i]) W_up e1[i]

Every W acts on the (head, block, row) axes and never on R, so e -> e Q with an orthogonal Q leaves the tokens as they
are and turns e2 into e2 Q.

*Rotary form.* L = R = 2, e = [[cos, sin], [-sin, cos]] and weights on the head axis alone. The two rows of e then stay
a rotated copy of each other, and one complex number z = c + is per (head, channel pair) is enough. It is packed as
`[c | s]`, D real numbers, and e^T u becomes the complex product of (a, b) with z on half-split pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tape_pe.ops.bias import Bias, materialized
from tape_pe.ops.inputs import AttentionInputs
from tape_pe.ops.masks import dense_mask


def general_encoding(state: Tensor) -> Tensor:
    """Writes a packed rotary state in the general form, e = [[c, s], [-s, c]].

    Args:
        state: `[B, Hkv, N, D]`, packed `[c | s]`.

    Returns:
        `[B, N, M, 2, 2]` with M = Hkv * D / 2; block `h * D / 2 + p` is channel pair p of head h.
    """
    c, s = state.chunk(2, dim=-1)  # [B, Hkv, N, D/2] each
    encoding = torch.stack([torch.stack([c, s], dim=-1), torch.stack([-s, c], dim=-1)], dim=-2)
    return encoding.permute(0, 2, 1, 3, 4, 5).flatten(2, 3)


def blocks(u: Tensor, rows: int) -> Tensor:
    """Cuts the channels of queries or keys into blocks of `rows`; row r of block p is channel `r * D / rows + p`.

    For `rows` = 2 these are the half-split pairs of RoPE in the Llama convention.

    Args:
        u: `[B, H, N, D]`.
        rows: channels per block, L.

    Returns:
        `[B, H, N, D / L, L]`.
    """
    return u.unflatten(-1, (rows, u.shape[-1] // rows)).transpose(-1, -2)


def general_attention(
    query: Tensor, key: Tensor, value: Tensor, encoding: Tensor, *, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention of the general form.

    Args:
        query: `[B, H, N, D]`, before any positional encoding.
        key: `[B, Hkv, N, D]`, likewise.
        value: `[B, Hkv, N, Dv]`.
        encoding: `[B, N, M, L, R]` with M = Hkv * D / L; query head h reads the blocks of head `h // (H / Hkv)`.
        causal: whether token i sees only j <= i.

    Returns:
        The output `[B, H, N, Dv]`, and the attention average of the encodings `[B, N, H * D / L, L, R]`, in which query
        head h has averaged the blocks of its key/value head.
    """
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[-1]
    rows = encoding.shape[3]
    groups = heads // kv_heads
    e = encoding.unflatten(2, (kv_heads, head_dim // rows)).transpose(1, 2)  # [B, Hkv, N, D/L, L, R]
    e = e.repeat_interleave(groups, dim=1)
    q = torch.einsum("bhnml,bhnmlr->bhnmr", blocks(query, rows), e)
    k = torch.einsum("bhnml,bhnmlr->bhnmr", blocks(key.repeat_interleave(groups, dim=1), rows), e)
    scores = torch.einsum("bhimr,bhjmr->bhij", q, k) / math.sqrt(head_dim)
    if causal:
        scores = scores.masked_fill(~dense_mask(query.shape[2], key.shape[2], device=query.device), -torch.inf)
    weights = scores.softmax(dim=-1)
    output = weights @ value.repeat_interleave(groups, dim=1)
    averaged = torch.einsum("bhij,bhjmlr->bihmlr", weights, e).flatten(2, 3)
    return output, averaged


def general_update(
    encoding: Tensor, averaged: Tensor, gate: Tensor, *, mix: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """State update of the general form, e -> e2.

    Args:
        encoding: `[B, N, M, L, R]`.
        averaged: `[B, N, M', L, R]`, the attention average (M' = M * H / Hkv).
        gate: `[B, N, I]`, psi of the tokens.
        mix: `[M * L, M' * L]`, W_mix.
        up: `[I, M * L]`, W_up.
        down: `[M * L, I]`, W_down.

    Returns:
        `[B, N, M, L, R]`.
    """
    shape = encoding.shape
    e1 = encoding.flatten(2, 3) + torch.einsum("xy,bnyr->bnxr", mix, averaged.flatten(2, 3))
    inner = torch.einsum("ix,bnxr->bnir", up, e1) * gate[..., None]
    return (e1 + torch.einsum("xi,bnir->bnxr", down, inner)).reshape(shape)


def rotate(u: Tensor, state: Tensor) -> Tensor:
    """Complex product of half-split channel pairs with a state: (a, b), (c, s) -> (ac - bs, as + bc).

    Args:
        u: queries or keys, `[B, H, N, D]`.
        state: packed `[c | s]`, `[B, Hs, N, D]`, Hs dividing H; head h of `u` uses head `h // (H / Hs)` of the state.

    Returns:
        `[B, H, N, D]`.
    """
    state = state.repeat_interleave(u.shape[1] // state.shape[1], dim=1)
    a, b = u.chunk(2, dim=-1)
    c, s = state.chunk(2, dim=-1)
    return torch.cat([a * c - b * s, a * s + b * c], dim=-1)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    segment_ids: Tensor | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The attention matrix, softmax in fp32 or wider. Rows that may see no key are zero.

    Arguments are those of `tape_pe.ops.positional_attention`.

    Returns:
        `[B, H, Nq, Nk]` in the dtype of `query`.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    bias = materialized(bias)
    if bias is not None:
        scores = scores + bias
    mask = dense_mask(query.shape[2], key.shape[2], segment_ids=segment_ids, causal=causal, device=query.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    dead = scores.detach().amax(dim=-1, keepdim=True) == -torch.inf
    # A row of -inf has the gradient NaN even where it is overwritten afterwards: softmax must never see one.
    weights = scores.masked_fill(dead, 0.0).softmax(dim=-1)
    return weights.masked_fill(dead, 0.0).to(query.dtype)


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The `reference` backend: builds the whole attention matrix. See `tape_pe.ops.positional_attention`."""
    query, key, value, state, segment_ids, bias, causal, scale = inputs
    weights = attention_weights(query, key, segment_ids=segment_ids, bias=bias, causal=causal, scale=scale)
    output = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    if state is None:
        return output, None
    return output, weights @ state.repeat_interleave(query.shape[1] // state.shape[1], dim=1)


def contextualize(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    norm: str = "none",
) -> Tensor:
    """State update of the rotary form with its `[N, I, D]` intermediates. See `tape_pe.ops.contextualize`."""
    if mix is not None:
        assert averaged_state is not None
        heads = averaged_state.shape[1]
        if mix.shape[1] != heads:  # one scale per query head, summed over the heads that share a state
            kv_heads = mix.shape[0]
            owner = torch.arange(heads, device=mix.device) // (heads // kv_heads)
            mix = torch.nn.functional.one_hot(owner, kv_heads).t().to(mix.dtype) * mix.flatten()
        state = state + torch.einsum("kh,bhnd->bknd", mix, averaged_state)
    if gate is not None:
        assert up is not None
        assert down is not None
        if state.shape[1] == 1:
            state = state.expand(-1, up.shape[1], -1, -1)
        inner = torch.einsum("ih,bhnd->bnid", up, state) * gate[..., None]
        state = state + torch.einsum("hi,bnid->bhnd", down, inner)
    return _normalized(state, norm)


def rotate_wide(u: Tensor, state: Tensor) -> Tensor:
    """u * C + half(u) * S with half((a, b)) = (-b, a). See `tape_pe.ops.rotate_wide`."""
    state = state.repeat_interleave(u.shape[1] // state.shape[1], dim=1)
    a, b = u.chunk(2, dim=-1)
    C, S = state.chunk(2, dim=-1)
    return u * C + torch.cat([-b, a], dim=-1) * S


def contextualize_components(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    norm: str = "none",
) -> Tensor:
    """The update with weights of their own for cosines and sines. See `tape_pe.ops.contextualize_components`."""
    parts = []
    for component, part in enumerate(state.chunk(2, dim=-1)):
        average = None if averaged_state is None else averaged_state.chunk(2, dim=-1)[component]
        own_mix, own_up, own_down = (None if w is None else w[component] for w in (mix, up, down))
        parts.append(contextualize(part, average, gate, mix=own_mix, up=own_up, down=own_down))
    return _normalized(torch.cat(parts, dim=-1), norm)


def contextualize_channels(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    norm: str = "none",
) -> Tensor:
    """The update along channels. See `tape_pe.ops.contextualize_channels`."""
    parts = []
    for component, E in enumerate(state.chunk(2, dim=-1)):
        if mix is not None:
            assert averaged_state is not None
            average = averaged_state.chunk(2, dim=-1)[component]
            groups = average.shape[1] // E.shape[1]
            average = torch.stack([average[:, g::groups] for g in range(groups)]).mean(dim=0)
            E = E + torch.einsum("cd,bknd->bknc", mix.diag() if mix.ndim == 1 else mix, average)
        if gate is not None:
            assert up is not None
            assert down is not None
            inner = torch.einsum("id,bknd->bkni", up, E) * gate[:, None]
            E = E + torch.einsum("di,bkni->bknd", down, inner)
        parts.append(E)
    return _normalized(torch.cat(parts, dim=-1), norm)


def contextualize_unstructured(
    state: Tensor,
    averaged_state: Tensor | None,
    gate: Tensor | None,
    *,
    mix: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    norm: str = "none",
) -> Tensor:
    """The update of all heads and channels at once. See `tape_pe.ops.contextualize_unstructured`."""
    state = contextualize(state, averaged_state, None, mix=mix, up=None, down=None)
    if gate is not None:
        assert up is not None
        assert down is not None
        heads = 2 * up.shape[1] // state.shape[-1]
        state = state.expand(-1, heads, -1, -1)
        parts = []
        for E in state.chunk(2, dim=-1):
            flat = E.transpose(1, 2).flatten(2)  # [B, N, Hkv * D]
            flat = flat + torch.einsum("xi,bni->bnx", down, torch.einsum("ix,bnx->bni", up, flat) * gate)
            parts.append(flat.unflatten(-1, (heads, -1)).transpose(1, 2))
        state = torch.cat(parts, dim=-1)
    return _normalized(state, norm)


def _normalized(state: Tensor, norm: str) -> Tensor:
    if norm == "none":
        return state
    c, s = state.chunk(2, dim=-1)
    return state / (c * c + s * s).mean(dim=-1, keepdim=True).sqrt()
