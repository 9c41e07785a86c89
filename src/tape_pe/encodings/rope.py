"""RoPE: rotary position embedding (Su et al., arXiv 2104.09864).

q'[n, j] = q[n, j] exp(i n theta^(-2j/D)), likewise for keys, on half-split channel pairs j, j + D/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding
from tape_pe.ops import inverse_frequencies, rotary_state, rotate


@dataclass(frozen=True)
class RopeOptions(EncodingOptions):
    """Options of RoPE.

    Attributes:
        log_scale: a length L > 1: queries at position n are scaled by ln(n + 1) / ln(L) (as in arXiv 2202.12172), which
            keeps the entropy of attention steady as lengths grow. `None`: no scaling.
    """

    log_scale: int | None = None

    def __post_init__(self) -> None:
        if self.log_scale is not None and self.log_scale <= 1:
            raise ValueError(f"encoding_options.log_scale={self.log_scale}: a length above 1 is needed")


class RopeLayer(LayerEncoding):
    """Rotates queries and keys by the start state; the state never changes."""

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        if state.shape[-1] == 2 * key.shape[-1]:  # a table of its own for the scaled queries, see `Rope.start`
            query_state, key_state = state.chunk(2, dim=-1)
            return rotate(query, query_state), rotate(key, key_state)
        return rotate(query, state), rotate(key, state)


class Rope(Encoding):
    """RoPE with the frequency rules of `tape_pe.ops.inverse_frequencies`."""

    options_class: ClassVar[type[EncodingOptions]] = RopeOptions
    layer_class: ClassVar[type[LayerEncoding]] = RopeLayer

    @classmethod
    def check(cls, sizes: EncodingSizes, options: EncodingOptions) -> None:
        """Raises a ValueError for an odd head_dim or a bad frequency rule."""
        inverse_frequencies(
            sizes.head_dim,
            theta=sizes.rope_parameters["rope_theta"],
            scaling=sizes.rope_parameters,
            position_ids=torch.zeros(1, 1),
        )

    def start(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Packed `[cos | sin]`, `[B | 1, 1, N, D]`; with `log_scale` `[B | 1, 1, N, 2D]`, for queries and for keys."""
        parameters = self.sizes.rope_parameters
        state = rotary_state(
            position_ids, self.sizes.head_dim, theta=parameters["rope_theta"], scaling=parameters, dtype=dtype
        )
        log_scale = getattr(self.options, "log_scale", None)
        if log_scale is None:
            return state
        scale = (position_ids + 1).to(dtype).log() / math.log(log_scale)
        return torch.cat([state * scale[:, None, :, None], state], dim=-1)
