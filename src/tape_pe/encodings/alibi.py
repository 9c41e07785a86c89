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
from tape_pe.encodings.relative import distinct_positions, relative_positions


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head, positive.

    Args:
        num_heads: H, at least 1.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * head / lower) for head in range(1, lower + 1)]
    # The odd slopes of 2 * lower heads; its even ones are those above.
    return slopes + [2.0 ** (-4.0 * head / lower) for head in range(1, 2 * (num_heads - lower), 2)]


class Alibi(Encoding):
    """One bias for all layers, the slopes times the distances."""

    summary = "Subtracts from each score a slope per head times the distance."
    paper = "Press et al., arXiv 2108.12409"
    extrapolates = "yes; attention fades with distance"
    cost = "one addition per score"

    def bias(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
        """-slope_h |i - j|, `[B | 1, H, N, Nk]`; distances are exact before they are converted to `dtype`."""
        distances = relative_positions(distinct_positions(tokens), tokens.num_new).abs().to(dtype)
        slopes = torch.tensor(alibi_slopes(self.sizes.num_attention_heads), dtype=dtype, device=distances.device)
        return distances[:, None] * -slopes[:, None, None]
