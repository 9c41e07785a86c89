"""RoPE: rotary position embedding (Su et al., arXiv 2104.09864).

q'[n, j] = q[n, j] exp(i n w_j), likewise for keys, on half-split channel pairs j, j + D/2, with w_j = theta^(-2j/D) and
the frequency rules of `tape_pe.ops.rotary_frequencies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.ops import Frequencies, rotary_frequencies, rotate
from tape_pe.ops.frequencies import apply_rule, reads_length
from tape_pe.ops.rotary import state_of


@dataclass(frozen=True)
class RotaryOptions(EncodingOptions):
    """Options of all encodings that start from RoPE's phases.

    Attributes:
        trainable_frequencies: whether the frequencies w_j are trained: w_j exp(s_j), s starting at zero. As shifts of
            fixed frequencies they stay exact in half precision.
    """

    trainable_frequencies: bool = False


@dataclass(frozen=True)
class RopeOptions(RotaryOptions):
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
        if state.shape[-1] == 2 * key.shape[-1]:  # queries and keys have tables of their own, see `pair_of_tables`
            query_state, key_state = state.chunk(2, dim=-1)
            return rotate(query, query_state), rotate(key, key_state)
        return rotate(query, state), rotate(key, state)


class Rotary(Encoding):
    """What all encodings that start from RoPE's phases share."""

    layer_class: ClassVar[type[LayerEncoding]] = RopeLayer

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__(sizes, options)
        assert isinstance(options, RotaryOptions)
        self.frequency_shift = nn.Parameter(torch.zeros(sizes.head_dim // 2)) if options.trainable_frequencies else None

    def init_own_weights(self) -> None:
        """Trained frequencies start as the given ones."""
        if self.frequency_shift is not None:
            init.zeros_(self.frequency_shift)

    @classmethod
    def check(cls, sizes: EncodingSizes, options: EncodingOptions) -> None:
        """Raises a ValueError for an odd head_dim or a bad frequency rule."""
        parameters = sizes.rope_parameters
        rotary_frequencies(sizes.head_dim, theta=parameters["rope_theta"], scaling=parameters, lengths=torch.ones(1))

    def frequencies(self, tokens: Tokens) -> Frequencies:
        """The frequencies of the new tokens, never from a stored table: it would follow the model's dtype."""
        parameters = self.sizes.rope_parameters
        theta, device = parameters["rope_theta"], tokens.position_ids.device
        base = rotary_frequencies(self.sizes.head_dim, theta=theta, device=device).inverse
        if self.frequency_shift is not None:
            base = base * self.frequency_shift.to(base.dtype).exp()
        lengths = tokens.new_lengths() if reads_length(parameters) else None
        return apply_rule(base, parameters, lengths, theta=theta)

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
        """Packed `[cos | sin]`, `[B | 1, 1, N, D]`."""
        return state_of(tokens.new_position_ids, self.frequencies(tokens), dtype)


class Rope(Rotary):
    """RoPE."""

    summary = "Rotates queries and keys by angles proportional to their positions."
    paper = "Su et al., arXiv 2104.09864"
    extrapolates = "runs at any length; gets worse soon beyond the trained one, later with a frequency rule"
    cost = "a rotation of queries and keys in each layer"
    options_class = RopeOptions

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
        """Packed `[cos | sin]`, `[B | 1, 1, N, D]`; with `log_scale` `[B | 1, 1, N, 2D]`, for queries and for keys."""
        state = super().start(tokens, dtype)
        assert isinstance(self.options, RopeOptions)
        if self.options.log_scale is None:
            return state
        return pair_of_tables(state, (tokens.new_position_ids + 1).to(dtype).log() / math.log(self.options.log_scale))


def pair_of_tables(state: Tensor, query_scale: Tensor, key_scale: Tensor | None = None) -> Tensor:
    """Two tables side by side: scaling a table scales what it rotates.

    Args:
        state: `[B | 1, 1, N, D]`.
        query_scale: `[B | 1, N]`, or `[B | 1, N, D]` for one scale per channel.
        key_scale: likewise; `None` is 1.

    Returns:
        `[B | 1, 1, N, 2D]`, the table of queries and that of keys.
    """

    def scaled(scale: Tensor) -> Tensor:
        return state * (scale[:, None, :, None] if scale.ndim == 2 else scale[:, None])

    return torch.cat([scaled(query_scale), state if key_scale is None else scaled(key_scale)], dim=-1)
