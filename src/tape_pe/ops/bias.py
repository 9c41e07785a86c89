"""Additive biases of attention scores: tensors, or rules that give the bias of one pair of tokens.

A rule is a few small tensors and a formula. A backend that needs the whole `[B, H, Nq, Nk]` in memory materializes it;
one that computes scores in blocks evaluates the formula there and never holds more than a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor


class PairBias(ABC):
    """A bias that is computed for each (batch row, head, query, key).

    Attributes:
        gathers_gradients: whether `at` reads every tensor that may need a gradient by one indexing operation, and by
            no other. Fused kernels can add up gradients of such tensors alone; other rules are materialized where
            gradients are recorded.
    """

    gathers_gradients: ClassVar[bool] = True

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """What `materialize` returns, `(B | 1, H | 1, Nq | 1, Nk | 1)`."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @abstractmethod
    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias of pairs of tokens, by indexing and elementwise operations only: kernels fuse it.

        Args:
            batch: batch rows, integers; scalars, or of shapes that broadcast with those of the other arguments.
            head: query heads, likewise.
            query: 0 ... Nq - 1, likewise; the queries are the last Nq of the Nk keys.
            key: 0 ... Nk - 1, likewise.

        Returns:
            The bias, of the broadcast shape, floating point.
        """

    def pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of `at` for all pairs: `[B, 1, 1, 1]`, `[1, H, 1, 1]`, `[1, 1, Nq, 1]` and `[1, 1, 1, Nk]`."""
        batch, head, query, key = (torch.arange(size, device=self.device) for size in self.shape)
        return batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1), query.view(1, 1, -1, 1), key.view(1, 1, 1, -1)

    def materialize(self) -> Tensor:
        """The bias of all pairs, broadcastable to `[B, H, Nq, Nk]`."""
        return self.at(*self.pairs())


class TensorBias(PairBias):
    """A bias that is in memory already.

    Args:
        tensor: broadcastable to `[B, H, Nq, Nk]`, floating point.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor[(None,) * (4 - tensor.ndim)]
        self.varying = [axis for axis, size in enumerate(self.tensor.shape) if size > 1]
        self.entries = self.tensor.squeeze()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, head, query, key = self.tensor.shape
        return batch, head, query, key

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Its entry; axes of size 1 are not indexed."""
        indices = (batch, head, query, key)
        return self.entries[tuple(indices[axis] for axis in self.varying)]

    def materialize(self) -> Tensor:
        """The tensor, with four axes."""
        return self.tensor


Bias: TypeAlias = Tensor | PairBias
"""What encodings return and `positional_attention` takes."""


def materialized(bias: Bias | None) -> Tensor | None:
    """The bias as a tensor, broadcastable to `[B, H, Nq, Nk]`; tensors and `None` are returned as they are."""
    return bias.materialize() if isinstance(bias, PairBias) else bias


def add_biases(first: Bias | None, second: Bias | None) -> Bias | None:
    """The sum of two biases. One alone stays what it is; two are materialized."""
    if first is None or second is None:
        return second if first is None else first
    tensors = [bias.materialize() if isinstance(bias, PairBias) else bias for bias in (first, second)]
    return tensors[0] + tensors[1]
