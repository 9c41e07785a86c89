"""Sinusoidal absolute positions (Vaswani et al., arXiv 1706.03762, section 3.5), added to the token embeddings.

p[n, 2i] = sin(n 10000^(-2i/d)), p[n, 2i+1] = cos(n 10000^(-2i/d)), with d = hidden_size. Embeddings are not scaled by
sqrt(d) first, unlike in that paper: most decoders since do not, and the released TAPE code does not either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.encodings.base import Encoding, Tokens

THETA = 10000.0


class Sinusoidal(Encoding):
    """Adds a fixed table, computed where it is used: there is no longest length, and no dtype that it could take on."""

    summary = "Adds fixed sines and cosines of the position to the token embeddings."
    paper = "Vaswani et al., arXiv 1706.03762"
    extrapolates = "runs at any length; gets worse beyond the trained one"
    cost = "one addition to the embeddings"

    def embed(self, tokens: Tokens) -> Tensor:
        """The rows of the new tokens, `[B | 1, N, hidden_size]` in fp64 (fp32 on devices without it)."""
        positions, size = tokens.new_position_ids, self.sizes.hidden_size
        dtype = torch.float32 if positions.device.type == "mps" else torch.float64
        exponents = torch.arange(0, size, 2, dtype=dtype, device=positions.device) / size
        phases = positions[..., None].to(dtype) * THETA**-exponents
        return torch.stack([phases.sin(), phases.cos()], dim=-1).flatten(-2)[..., :size]
