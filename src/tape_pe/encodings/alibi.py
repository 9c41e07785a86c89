"""ALiBi: attention with linear biases (Press et al., arXiv 2108.12409).

    score[h, i, j] = q_i k_j / sqrt(D) - slope_h |i - j|

with slopes 2^(-8h/H), h = 1 ... H, for H a power of two. For other H they are the slopes of the power of two below,
followed by every other slope of the power of two above. Nothing is trained, and nothing is stored: neither a cast nor
an empty device can spoil the slopes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.encodings.base import Encoding, Tokens
from tape_pe.encodings.relative import RelativeBias


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head, positive.

    Args:
        num_heads: H, at least 1.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * head / lower) for head in range(1, lower + 1)]
    # The odd slopes of 2 * lower heads; its even ones are those above.
    return slopes + [2.0 ** (-4.0 * head / lower) for head in range(1, 2 * (num_heads - lower), 2)]


class AlibiBias(RelativeBias):
    """-slope_h |i - j|; distances are exact before they are converted to `dtype`."""

    def __init__(self, tokens: Tokens, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__(tokens, num_heads)
        self.slopes = torch.tensor(alibi_slopes(num_heads), dtype=dtype, device=self.device)

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i, j = self.positions_of(batch, query, key)
        return (i - j).abs().to(self.slopes.dtype) * -self.slopes[head]


class Alibi(Encoding):
    """One bias for all layers, the slopes times the distances."""

    summary = "Subtracts from each score a slope per head times the distance."
    paper = "Press et al., arXiv 2108.12409"
    extrapolates = "yes; attention fades with distance"
    cost = "one addition per score"

    def bias(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> AlibiBias:
        """`[B | 1, H, N, Nk]` in `dtype`."""
        return AlibiBias(tokens, self.sizes.num_attention_heads, dtype)
