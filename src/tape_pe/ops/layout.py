"""How tensors of attention lie in memory."""

from __future__ import annotations

from torch import Tensor


def empty_token_major(like: Tensor, batch: int, heads: int, tokens: int, channels: int) -> Tensor:
    """An empty `[B, heads, N, C]` whose memory is `[B, N, heads, C]`: projections read it without a copy."""
    return like.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def dense_channels(tensor: Tensor) -> Tensor:
    """With channels that follow each other in memory; other axes may have any strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
