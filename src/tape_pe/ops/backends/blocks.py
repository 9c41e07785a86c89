"""How attention on CPU is cut into blocks, and the matrix products of one block. See `blockwise`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Heads and batch rows are taken together as long as their scores are so few: 512 KiB in fp32, and backward has two such
# buffers, which stay in the L2 cache.
CHUNK_ELEMENTS = 1 << 17
# Query rows of a chunk. More rows make better matrix products, and worse triangles below the diagonal. With more than
# `LONG` keys the rows do not stay in the cache anyway, so the products decide, up to `MAX_ELEMENTS` scores.
ROWS, LONG_ROWS = 64, 128
# The rows of all query heads that share a key/value head make one matrix, of at most so many.
GROUPED_ROWS = 192
LONG = 1024
MAX_ELEMENTS = 1 << 20
# With so few queries and more keys than this, a copy of keys and values costs more than it can save.
FEW_QUERIES, FEW_KEYS = 16, 64


class Block(NamedTuple):
    """Some batch rows, key/value heads and query rows, and the keys that they may see.

    Attributes:
        hides: whether other segments or padding stand among these keys.
        dead: whether padding stands among the query rows.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    hides: bool
    dead: bool


class Problem:
    """The tensors of one call, and the pieces of them that a block needs. H = Hkv * G query heads."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Tensor | None,
        segment_ids: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> None:
        self.batch, heads, self.num_queries, _ = query.shape
        self.kv_heads, self.num_keys = key.shape[1:3]
        self.groups = heads // self.kv_heads
        self.query = self.group(query)
        self.keys = [tensor for tensor in (key, value, state) if tensor is not None]
        self.causal = causal
        self.scale = scale
        self.offset = self.num_keys - self.num_queries
        # One document without padding needs no mask; looking costs less than masking every chunk.
        self.segment_ids = None
        if segment_ids is not None and not bool(((segment_ids == segment_ids[:, :1]) & (segment_ids >= 0)).all()):
            self.segment_ids = segment_ids
        self.bias = None if bias is None else self.group(bias)
        self.bias_hides = bias is not None and bool(bias.amin() == -torch.inf)
        self.dtype = torch.promote_types(query.dtype, torch.float32)

        rows = ROWS if self.num_keys <= LONG else max(ROWS, min(LONG_ROWS, MAX_ELEMENTS // self.num_keys))
        rows = max(min(rows, GROUPED_ROWS // self.groups), 1)
        self.rows = -(-self.num_queries // max(1, round(self.num_queries / rows)))  # chunks of about equal size
        self.triangle = None
        if causal and self.num_queries > 1:
            self.triangle = query.new_full((self.rows, self.rows), -torch.inf, dtype=self.dtype).triu_(1)
        self.fit = max(1, CHUNK_ELEMENTS // (self.groups * self.rows * self.num_keys))
        self._visible: dict[tuple[int, int], tuple[slice, bool, bool]] = {}

    def group(self, tensor: Tensor) -> Tensor:
        """`[B, H, ...]` -> `[B, Hkv, G, ...]`, and one head for all, `[B, 1, ...]`, -> `[B, 1, 1, ...]`."""
        return tensor.unsqueeze(2) if tensor.shape[1] == 1 else tensor.unflatten(1, (-1, self.groups))

    def buffer(self) -> Tensor:
        """Room for the scores of any block."""
        pairs = min(self.fit, self.batch * self.kv_heads)
        return self.query.new_empty(pairs * self.groups * self.rows * self.num_keys, dtype=self.dtype)

    def rectangles(self) -> Iterator[tuple[slice, slice]]:
        """Batch rows and key/value heads to take together: as many as fit, of about equal number."""
        batch, heads = 1, min(self.fit, self.kv_heads)
        copies_pay = self.num_queries >= FEW_QUERIES or self.num_keys <= FEW_KEYS
        one_view = copies_pay or is_one_view(*self.keys)
        # Chunks of one row skip what this row does not see; rows of another one see other keys.
        if one_view and (self.segment_ids is None or self.rows == self.num_queries):
            batch = min(max(1, self.fit // self.kv_heads), self.batch)
        for rows in _slices(self.batch, batch):
            for pairs in _slices(self.kv_heads, heads):
                yield rows, pairs

    def blocks(self, batch: slice, heads: slice) -> Iterator[Block]:
        """Chunks of query rows of a rectangle."""
        for start in range(0, self.num_queries, self.rows):
            rows = slice(start, min(start + self.rows, self.num_queries))
            yield Block(batch, heads, rows, *self.visible(batch, rows))

    def visible(self, batch: slice, rows: slice) -> tuple[slice, bool, bool]:
        """The last three fields of a block."""
        stop = self.offset + rows.stop if self.causal else self.num_keys
        if self.segment_ids is None:
            return slice(0, stop), False, False
        place = batch.start, rows.start
        if place not in self._visible:  # the same for all heads
            keys = self.segment_ids[batch, :stop]
            queries = self.segment_ids[batch, self.offset + rows.start : self.offset + rows.stop]
            first = torch.where(queries < 0, torch.iinfo(queries.dtype).max, queries).amin(dim=1, keepdim=True)
            last = queries.amax(dim=1, keepdim=True)
            seen = ((keys >= first) & (keys <= last)).any(dim=0).nonzero()  # first > last where all is padding
            span = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
            hides = bool((first != last).any() or (keys[:, span] != last).any())
            self._visible[place] = span, hides, bool((queries < 0).any())
        return self._visible[place]

    def rows_of(self, grouped: Tensor, block: Block) -> Tensor:
        """Query rows of a block from `[B, Hkv, G, Nq, C]`, as one matrix per key/value head: `[P, G * rows, C]`."""
        piece = grouped[block.batch, block.heads, :, block.rows].to(self.dtype)
        return piece.reshape(-1, self.groups * piece.shape[3], piece.shape[4])

    def queries_of(self, block: Block) -> Tensor:
        """The queries of a block, scaled, as `rows_of` has them."""
        return self.rows_of(self.query, block) * self.scale

    def keys_of(self, tensor: Tensor, batch: slice, heads: slice) -> Tensor:
        """Keys, values or states of a rectangle from `[B, Hkv, Nk, C]`: `[P, Nk, C]`."""
        piece = tensor[batch, heads].to(self.dtype)
        return piece.reshape(-1, *piece.shape[2:])

    def piece_of(self, grouped: Tensor, block: Block) -> Tensor:
        """A block of a bias `[B | 1, Hkv | 1, G | 1, Nq | 1, Nk | 1]`."""
        slices = (block.batch, block.heads, slice(None), block.rows, block.keys)
        return grouped[
            tuple(slice(None) if size == 1 else piece for size, piece in zip(grouped.shape, slices, strict=True))
        ]

    def weights(self, block: Block, query: Tensor, key: Tensor, buffer: Tensor) -> Tensor:
        """Attention weights of a block, `[P, G * rows, keys]`, in the buffer; rows that see no key are zero."""
        keys, rows = block.keys, block.rows.stop - block.rows.start
        scores = room(buffer, query, key[:, keys])
        product(query, key[:, keys].transpose(1, 2), scores)
        batch = block.batch.stop - block.batch.start
        grouped = scores.view(batch, -1, self.groups, rows, scores.shape[2])
        if self.bias is not None:
            grouped += self.piece_of(self.bias, block)
        # The last of the block's keys are its queries, unless they are hidden from all of them.
        diagonal = max(keys.start, self.offset + block.rows.start)
        if self.triangle is not None and diagonal < keys.stop:
            columns = slice(diagonal - self.offset - block.rows.start, keys.stop - self.offset - block.rows.start)
            scores.unflatten(1, (self.groups, rows))[..., diagonal - keys.start :].add_(self.triangle[:rows, columns])
        dead: Tensor | None = None
        if self.segment_ids is not None and (block.hides or block.dead):
            queries = self.segment_ids[block.batch, self.offset + block.rows.start : self.offset + block.rows.stop]
            if block.hides:
                same = queries[:, :, None] == self.segment_ids[block.batch, None, keys]  # [batch rows, rows, keys]
                grouped += torch.where(same, 0.0, -torch.inf).to(self.dtype)[:, None, None]
            if block.dead:  # padding may see padding here, or nothing: taken out below
                dead = (queries < 0)[:, None, None, :, None]
        if self.bias_hides:
            hidden = grouped.amax(dim=-1, keepdim=True) == -torch.inf
            dead = hidden if dead is None else dead | hidden
        torch._softmax(scores, -1, False, out=scores)
        if dead is not None:
            grouped.masked_fill_(dead, 0.0)
        return scores

    def write(self, target: Tensor, block: Block, weights: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Writes `scale * weights @ values`, `[P, G * rows, C]`, into the rows of a grouped `[B, Hkv, G, Nq, C]`."""
        piece = target[block.batch, block.heads, :, block.rows]
        if piece.dtype == weights.dtype and self.groups == piece.shape[0] == 1:
            product(weights, values, piece[0, :, 0])
        else:
            piece.copy_(torch.bmm(weights, values).view(piece.shape))
        if scale != 1.0:
            piece *= scale


def _slices(total: int, size: int) -> Iterator[slice]:
    """Cuts `total` into as few slices of at most `size` as possible, of about equal size."""
    size = -(-total // -(-total // size))
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def room(buffer: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The part of a buffer for the products of all rows with all keys."""
    shape = rows.shape[0], rows.shape[1], keys.shape[1]
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`out = left @ right`. Of a single long matrix, `mm` is faster than a batch of one."""
    if out.shape[0] == 1:
        torch.mm(left[0], right[0], out=out[0])
    else:
        torch.bmm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`."""
    if total.shape[0] == 1:
        total[0].addmm_(left[0], right[0])
    else:
        total.baddbmm_(left, right)


def join(*parts: Tensor | None) -> Tensor:
    """Values and states side by side: one wide matrix product is faster than two."""
    given = [part for part in parts if part is not None]
    return given[0] if len(given) == 1 else torch.cat(given, dim=-1)


def is_one_view(*tensors: Tensor | None) -> bool:
    """Whether batch rows and heads of all tensors can be taken as one axis without a copy."""
    return all(x is None or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in tensors)
