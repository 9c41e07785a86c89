"""Positions of encodings that have a row for each: integers, below a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from tape_pe.encodings.base import Tokens


def row_indices(tokens: Tokens, bound: int, rule: str) -> Tensor:
    """The positions of the new tokens as indices of rows; those of padding are 0.

    Compiled graphs do not look at values. There the number of tokens is checked where it is that of the positions: in
    rows without padding and documents. For the rest, the look-up itself refuses rows that do not exist.

    Args:
        tokens: all tokens.
        bound: number of rows.
        rule: names the encoding and the bound in messages, for example `"encoding='learned' has
            max_position_embeddings=512"`.

    Returns:
        `[B | 1, N]` int64, at least 0 and below `bound`.

    Raises:
        ValueError: positions that are not integers, or that have no row.
    """
    positions = tokens.new_position_ids
    if positions.is_floating_point():
        raise ValueError(f"position_ids has the dtype {positions.dtype}: {rule} rows, which need integers")
    num_all = tokens.position_ids.shape[1]
    if tokens.segment_ids is not None:
        positions = positions.where(tokens.segment_ids[:, num_all - tokens.num_new :] >= 0, 0)
    if not can_look_at_values(positions):
        if tokens.segment_ids is None and num_all > bound:
            raise ValueError(f"{num_all} tokens: {rule} positions")
    elif positions.numel():
        first, last = (int(position) for position in torch.aminmax(positions))
        if first < 0 or last >= bound:
            raise ValueError(f"position_ids hold {last if first >= 0 else first}: {rule} positions, from 0 on")
    return positions.long()


def can_look_at_values(tensor: Tensor) -> bool:
    """Whether values may decide what Python does: not while a graph is traced, nor for tensors without storage."""
    return not torch.compiler.is_compiling() and tensor.device.type != "meta"


def refuse_cache(tokens: Tokens, encoding: str, what: str) -> None:
    """Raises a ValueError if there are cached tokens, for encodings that draw `what` anew in every forward of training:
    cached tokens have positions of an earlier draw."""
    if tokens.position_ids.shape[1] > tokens.num_new:
        raise ValueError(
            f"cache: encoding={encoding!r} draws {what} anew in every forward of training; call eval() to go on with "
            "cached tokens"
        )
