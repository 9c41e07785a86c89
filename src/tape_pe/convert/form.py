"""How a model's attention rotates, found by trying it: half-split or interleaved pairs, on how many channels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tape_pe.ops import rotate


@dataclass(frozen=True)
class RotaryForm:
    """The rotation of one attention layer.

    Attributes:
        heads: H, of the queries.
        kv_heads: Hkv, of keys and values.
        rotary_dim: Dr, how many channels of each head are rotated, the first ones.
        interleaved: pairs are channels (2j, 2j + 1), as in Cohere, instead of (j, j + Dr / 2), as in Llama.
        interleaved_tables: the model's cos and sin tables repeat each number twice, instead of the whole row twice.
    """

    heads: int
    kv_heads: int
    rotary_dim: int
    interleaved: bool
    interleaved_tables: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def start(self, cos: Tensor, sin: Tensor) -> Tensor:
        """The model's tables, `[B | 1, N, Dr]`, as a packed state `[cos | sin]`, `[B | 1, 1, N, Dr]`."""
        pairs = self.rotary_dim // 2
        if self.interleaved_tables:
            cos, sin = cos[..., 0 : 2 * pairs : 2], sin[..., 0 : 2 * pairs : 2]
        return torch.cat([cos[..., :pairs], sin[..., :pairs]], dim=-1)[:, None]

    def rotate(self, u: Tensor, state: Tensor) -> Tensor:
        """Rotates the first Dr channels of `u`, `[B, H | Hkv, N, D]`, by a state `[B | 1, Hkv | 1, N, Dr]`."""
        if u.shape[-1] == self.rotary_dim:
            return rotate(u, state, interleaved=self.interleaved)
        rotated = rotate(u[..., : self.rotary_dim], state, interleaved=self.interleaved)
        return torch.cat([rotated, u[..., self.rotary_dim :]], dim=-1)
