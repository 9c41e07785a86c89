"""Shifted sparse attention (S2-Attn) of LongLoRA (Chen et al., arXiv 2309.12307), for training; section 3.2 and fig. 3.

The N tokens are cut into groups of G = N / 4, and attention stays inside a group. The second half of the heads uses
groups that are shifted by G / 2, so that information crosses the borders of the others. Evaluation, and what goes on
from a cache, has ordinary attention: the shift is only a way to train at a fraction of the cost.

The paper's code shifts by rolling the tokens, so that its last shifted group holds the last half group of the sequence
followed by the first one, and masks by place in that group: the first tokens see the last ones, which is a leak from
the future. Here the two halves of the wrapped group do not see each other; each is a group of its own with the causal
mask. (The first tokens can see nothing earlier than themselves. The last ones would be allowed to see the first, but do
not in the paper's code either, where those come behind them.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHIFTED_SPARSE = "shifted_sparse"
"""Name of the attention implementation, for `attn_implementation` or `set_attn_implementation`."""

GROUPS = 4


def shifted_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    groups: int = GROUPS,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside groups, those of the second half of the heads shifted by half a group.

    Args:
        query: `[B, H, N, D]`
        key: `[B, Hkv, N, D]`
        value: `[B, Hkv, N, D]`
        groups: number of groups, a divisor of N. With one there is nothing to shift: attention is ordinary.
        scaling: factor of the scores; default: 1 / sqrt(D).
        dropout: probability that an attention weight is dropped.

    Returns:
        `[B, H, N, D]`

    Raises:
        ValueError: N is not a multiple of `groups`.
    """
    heads, length = query.shape[1:3]
    if groups < 1 or length % groups:
        raise ValueError(f"groups={groups}: it must divide the sequence length, {length}")
    size = length // groups
    repeats = heads // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

    def attend(first: int, last: int, start: int, end: int, width: int) -> Tensor:
        """Heads first..last-1 of tokens start..end-1, in groups of `width`."""
        if start == end:
            return query[:, first:last, start:end]
        q, k, v = (
            states[:, first:last, start:end].unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)
            for states in (query, key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout)
        return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)

    half, shift = heads // 2, size // 2 if groups > 1 else 0
    plain = attend(0, half, 0, length, size)
    last = length - (size - shift) if shift else length
    shifted = [
        attend(half, heads, 0, shift, shift),  # the two halves of the group that the shift wraps around
        attend(half, heads, shift, last, size),
        attend(half, heads, last, length, size - shift),
    ]
    return torch.cat((plain, torch.cat(shifted, dim=2)), dim=1)


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function in transformers' form: sparse in training, ordinary otherwise; returns `[B, N, H, D]`.

    Raises:
        ValueError: what is trained on has padding or packed documents, or the model has sliding windows or a soft cap.
    """
    if not module.training or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    for name in ("sliding_window", "softcap", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{name}={options[name]!r}: shifted sparse attention has no such thing")
    if attention_mask is not None:
        raise ValueError("attention_mask is given; shifted sparse attention trains on full rows of one length only")
    out = shifted_sparse_attention(query, key, value, scaling=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes `SHIFTED_SPARSE` known to transformers; it can be called any number of times."""
    AttentionInterface.register(SHIFTED_SPARSE, _attention_function)
    AttentionMaskInterface.register(SHIFTED_SPARSE, sdpa_mask)
