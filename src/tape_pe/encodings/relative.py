"""What encodings that add a bias to the attention scores share: the distances between tokens."""

from __future__ import annotations

from torch import Tensor

from tape_pe.encodings.base import Tokens


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


def relative_positions(positions: Tensor, num_new: int) -> Tensor:
    """i - j for queries at i and keys at j, in the dtype of the positions: exact for integers of any size.

    Positions are those the tokens carry, not their columns, so that padding, documents, offsets and gaps need no care.

    Args:
        positions: `[B | 1, Nk]`, cached tokens first.
        num_new: N, the queries are the last N tokens.

    Returns:
        `[B | 1, N, Nk]`; negative where a key has the later position.
    """
    queries = positions[:, positions.shape[1] - num_new :]
    return queries[:, :, None] - positions[:, None, :]
