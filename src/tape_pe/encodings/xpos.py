"""xPos: RoPE with an exponential decay of far keys (Sun et al., arXiv 2212.10554).

q'[n, j] = q[n, j] exp(i n w_j) zeta_j^((n - c)/s),  k'[m, j] = k[m, j] exp(i m w_j) zeta_j^(-(m - c)/s),
zeta_j = (2j + 0.4 D)/(1.4 D), j < D/2, so that scores see zeta_j^((n - m)/s).

The centre c = max_position_embeddings // 2 cancels; it keeps both factors near 1 where positions are near it. They grow
exponentially away from it: with the default s, key factors reach 2e4 at 16K positions from it, and pass the
range of fp16 at 18K and that of fp32 and bf16 at 145K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tape_pe.encodings.base import Tokens
from tape_pe.encodings.rope import Rotary, RotaryOptions, pair_of_tables
from tape_pe.ops.rotary import state_of


@dataclass(frozen=True)
class XposOptions(RotaryOptions):
    """Options of xPos.

    Attributes:
        scale_base: s, the distance at which scores have decayed by zeta_j. The paper's code has 512, the released TAPE
            code 2048.
    """

    scale_base: float = 2048.0

    def __post_init__(self) -> None:
        if not 0 < self.scale_base < float("inf"):
            raise ValueError(f"encoding_options.scale_base={self.scale_base}: a positive number is needed")


class Xpos(Rotary):
    """A table for queries and one for keys: RoPE's, times factors that are inverse to each other."""

    summary = "RoPE with an exponential decay of far keys."
    paper = "Sun et al., arXiv 2212.10554"
    extrapolates = "runs at any length; the decay helps nearby context"
    cost = "the rotation of queries and keys"
    options_class = XposOptions

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
        """Packed `[cos | sin]` of queries, then of keys, `[B | 1, 1, N, 2D]`."""
        assert isinstance(self.options, XposOptions)
        positions, head_dim = tokens.new_position_ids, self.sizes.head_dim
        frequencies = self.frequencies(tokens)
        wide = frequencies.inverse.dtype
        state = state_of(positions, frequencies, wide)
        zeta = (torch.arange(0, head_dim, 2, dtype=wide, device=positions.device) / head_dim + 0.4) / 1.4
        centre = self.sizes.max_position_embeddings // 2
        exponents = (positions[..., None].to(wide) - centre) / self.options.scale_base  # [B | 1, N, 1]
        scale = (exponents * zeta.log()).exp().repeat(1, 1, 2)  # both channels of a pair
        return pair_of_tables(state, scale, 1 / scale).to(dtype)
