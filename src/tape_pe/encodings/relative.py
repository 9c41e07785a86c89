"""What encodings that add a bias to the attention scores share: the positions of pairs of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.encodings.base import Tokens
from tape_pe.ops.bias import PairBias


def distinct_positions(tokens: Tokens) -> Tensor:
    """Positions of all tokens, one row where all rows are the same memory.

    A cache expands one row of positions to the batch; a bias built from it must not become B times as large.

    Args:
        tokens: all tokens.

    Returns:
        `[B | 1, Nk]`.
    """
    positions = tokens.position_ids
    return positions[:1] if positions.shape[0] > 1 and positions.stride(0) == 0 else positions


class RelativeBias(PairBias):
    """A bias that depends on the head and on the positions of query and key.

    Positions are those the tokens carry, not their columns, so that padding, documents, offsets and gaps need no care.

    Args:
        tokens: all tokens.
        num_heads: H.
    """

    def __init__(self, tokens: Tokens, num_heads: int) -> None:
        positions = distinct_positions(tokens)
        self.shape_of_all = (positions.shape[0], num_heads, tokens.num_new, positions.shape[1])
        if positions.shape[0] == 1:
            positions = positions[0]
        self.query_positions = positions[..., positions.shape[-1] - tokens.num_new :]
        self.key_positions = positions

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.shape_of_all

    @property
    def device(self) -> torch.device:
        return self.key_positions.device

    def positions_of(self, batch: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Positions i of queries and j of keys; arguments as in `at`. Their difference is exact for integers."""
        if self.key_positions.ndim == 1:
            return self.query_positions[query], self.key_positions[key]
        return self.query_positions[batch, query], self.key_positions[batch, key]
