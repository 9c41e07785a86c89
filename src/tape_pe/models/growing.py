"""Tensors that tokens are appended to, one by one, without copying what is there each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class _Buffer:
    """Memory of several growing tensors, each of which is the front of it; `filled` of it is anybody's."""

    __slots__ = ("filled", "tensor")

    def __init__(self, tensor: Tensor, filled: int) -> None:
        self.tensor = tensor
        self.filled = filled


class GrowingTensor:
    """A tensor that grows along one axis. It never changes: `append` returns another one.

    Appended tokens are written behind the present ones, into memory that both tensors share, as long as there is room
    and nothing else was written there; else everything is copied once, into twice the memory that it takes. So n
    tokens, one at a time, cost log2(n) allocations and 2n copied tokens, and memory is never more than twice what is
    held (three times while it is copied). The first tokens are held as they are given, without a copy or room to spare.

    No tensor that was handed out ever changes. Several continuations of the same tokens, also after some were cut off,
    never see each other: the first one is written in place, the others start with a copy.

    With gradients on, and in compiled graphs, `append` concatenates: autograd may need the tensors as they were.

    Attributes:
        tensor: what it holds. An axis of size 1 stands for any size: tokens of larger size there expand what is held.
        dim: the axis that it grows along.
    """

    __slots__ = ("_buffer", "dim", "tensor")

    def __init__(self, tensor: Tensor, dim: int) -> None:
        self.tensor = tensor
        self.dim = dim % tensor.ndim
        self._buffer: _Buffer | None = None

    def append(self, new: Tensor) -> GrowingTensor:
        """What it holds, followed by `new`, which has the same shape in all other axes or can be expanded to it."""
        if not self.tensor.shape[self.dim]:
            return GrowingTensor(new, self.dim)
        held, new = self._alike(new)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return GrowingTensor(torch.cat([held, new], dim=self.dim), self.dim)
        start = held.shape[self.dim]
        length = start + new.shape[self.dim]
        buffer = self._buffer if held is self.tensor and self._fits(new, length) else None
        if buffer is None:
            shape = list(held.shape)
            shape[self.dim] = 2 * length
            dtype = torch.promote_types(held.dtype, new.dtype)
            buffer = _Buffer(held.new_empty(shape, dtype=dtype), start)
            buffer.tensor.narrow(self.dim, 0, start).copy_(held)
        buffer.tensor.narrow(self.dim, start, length - start).copy_(new)
        buffer.filled = length
        grown = GrowingTensor(buffer.tensor.narrow(self.dim, 0, length), self.dim)
        grown._buffer = buffer
        return grown

    def _alike(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """What is held and `new`, expanded to each other's shape but for the growing axis."""
        held = self.tensor
        if held.shape[: self.dim] == new.shape[: self.dim] and held.shape[self.dim + 1 :] == new.shape[self.dim + 1 :]:
            return held, new
        shape = [max(a, b) for a, b in zip(held.shape, new.shape, strict=True)]
        shape[self.dim] = -1
        return held.expand(shape), new.expand(shape)

    def _fits(self, new: Tensor, length: int) -> bool:
        """Whether `new` can be written behind the present tokens, up to `length`."""
        buffer = self._buffer
        if buffer is None or buffer.filled != self.tensor.shape[self.dim] or length > buffer.tensor.shape[self.dim]:
            return False
        # Tensors of inference mode cannot be written to outside of it.
        writable = torch.is_inference_mode_enabled() or not buffer.tensor.is_inference()
        return writable and torch.promote_types(new.dtype, buffer.tensor.dtype) == buffer.tensor.dtype


class GrowingTokens:
    """Mixin of transformers' caches and their layers: attributes that grow, and some that the base class knows not of.

    All of them are plain attributes, which hold a tensor or `None` and which anybody may replace.

    Attributes:
        own_names: the attributes that this class has to cut, reorder and forget itself. A single row in them is shared
            by all rows of the cache.
        growing_dim: the axis that attributes grow along.
    """

    own_names: ClassVar[tuple[str, ...]]
    growing_dim: ClassVar[int]
    _growing: dict[str, GrowingTensor]

    def grown(self, name: str, new: Tensor) -> GrowingTensor:
        """The attribute `name` followed by `new`, for `hold`; the attribute itself stays as it is."""
        held, growing = getattr(self, name), self._growing.get(name)
        if growing is None or growing.tensor is not held:  # it was cut, or put there by somebody else
            growing = GrowingTensor(new if held is None else held, self.growing_dim)
        return growing if held is None else growing.append(new)

    def hold(self, name: str, growing: GrowingTensor) -> Tensor:
        """Makes what `grown` returned the attribute `name`; returns all of its tokens."""
        self._growing[name] = growing
        setattr(self, name, growing.tensor)
        return growing.tensor

    def __copy__(self) -> Any:
        """A cache of its own with the same tokens, which shares memory until it goes on."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__, _growing=dict(self._growing))
        return twin

    def reset(self) -> None:
        """Empties the cache."""
        super().reset()  # type: ignore[misc]
        self._growing.clear()
        for name in self.own_names:
            setattr(self, name, None)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (a number <= 0, as transformers counts)."""
        super().crop(tokens_to_remove)  # type: ignore[misc]
        for name in self.own_names:
            if tokens_to_remove < 0 and (tensor := getattr(self, name)) is not None:
                dim = self.growing_dim
                setattr(self, name, tensor.narrow(dim, 0, max(0, tensor.shape[dim] + tokens_to_remove)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows `beam_idx` in the place of the present ones, for beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._change_rows(lambda tensor: tensor[indices, ...])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._growing.clear()  # frees the rows of before
        for name in self.own_names:
            if (tensor := getattr(self, name)) is not None and tensor.shape[0] > 1:
                setattr(self, name, change(tensor))
