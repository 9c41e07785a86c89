"""T5's relative position bias (Raffel et al., arXiv 1910.10683), for causal attention.

    score[h, i, j] = q_i k_j / sqrt(D) + table[bucket(max(i - j, 0)), h]

Half of the n buckets hold one distance each, the others grow logarithmically up to `max_distance`, from where on all
distances share the last one:

    bucket(d) = d                                                           d < e = n // 2
              = min(e + floor(ln(d / e) / ln(max_distance / e) (n - e)), n - 1)   otherwise

As published, all layers share one table. T5 itself does not divide scores by sqrt(D), which it makes up for at the
start of training; this decoder does so for every encoding.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.relative import RelativeBias


@dataclass(frozen=True)
class T5Options(EncodingOptions):
    """Options of T5's bias.

    Attributes:
        num_buckets: rows of the table.
        max_distance: from here on, all distances share the last bucket.
        shared: whether all layers share one table, as published; otherwise each layer has its own.
    """

    num_buckets: int = 32
    max_distance: int = 128
    shared: bool = True

    def __post_init__(self) -> None:
        if self.num_buckets < 2:
            raise ValueError(f"encoding_options.num_buckets={self.num_buckets}: at least 2 are needed")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"encoding_options.max_distance={self.max_distance}: more than num_buckets // 2 = "
                f"{self.num_buckets // 2} is needed, the distances that have a bucket of their own"
            )


@lru_cache
def bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of every bucket but the first.

    Boundaries that are whole numbers are a matter of rounding; they are computed in fp32 with the operations of T5's
    public implementations, once, on the CPU, so that they are the same in every dtype, on every device and compiled.

    Args:
        num_buckets: n.
        max_distance: as in `T5Options`.

    Returns:
        n - 1 numbers, ascending; bucket numbers that no distance has are skipped over.
    """
    exact = num_buckets // 2
    distances = torch.arange(exact, max_distance + 1, dtype=torch.float32, device="cpu")
    logarithms = torch.log(distances / exact) / math.log(max_distance / exact)
    buckets = [min(exact + int(step), num_buckets - 1) for step in (logarithms * (num_buckets - exact)).tolist()]
    large = (exact + bisect_left(buckets, bucket) for bucket in range(exact, num_buckets))
    return (*range(1, exact), *large)


def buckets_of(distances: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Bucket numbers of distances i - j, negative ones included, which are taken as 0.

    Args:
        distances: any shape, integers, or fp32 or wider.
        starts: from `bucket_starts`.

    Returns:
        int64, shaped like `distances`.
    """
    boundaries = torch.tensor(starts, dtype=distances.dtype, device=distances.device)
    return torch.bucketize(distances, boundaries, right=True)


class BucketBias(RelativeBias):
    """The table's entries, looked up by distance: first the bucket of each distance that has one of its own, then the
    table.

    Args:
        tokens: all tokens.
        table: `[num_buckets, H]`, in the dtype of the result.
        starts: from `bucket_starts`.
    """

    def __init__(self, tokens: Tokens, table: Tensor, starts: tuple[int, ...]) -> None:
        super().__init__(tokens, table.shape[1])
        self.table = table
        self.last_start = starts[-1]
        self.buckets = buckets_of(torch.arange(self.last_start + 1, device=self.device), starts)

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i, j = self.positions_of(batch, query, key)
        distance = (i - j).clamp(0, self.last_start).long()  # starts are whole numbers: rounding down changes no bucket
        return self.table[self.buckets[distance], head]


class BucketTable(nn.Module):
    """A bias for each bucket and head.

    Parameters: `table` `[num_buckets, H]`.
    """

    def __init__(self, sizes: EncodingSizes, options: T5Options) -> None:
        super().__init__()
        self.initializer_range = sizes.initializer_range
        self.starts = bucket_starts(options.num_buckets, options.max_distance)
        self.table = nn.Parameter(torch.empty(options.num_buckets, sizes.num_attention_heads))

    def init_table(self) -> None:
        """Random, as other weights."""
        init.normal_(self.table, std=self.initializer_range)

    def forward(self, tokens: Tokens, dtype: torch.dtype) -> BucketBias:
        """The table's entries of all pairs of tokens, `[B | 1, H, N, Nk]` in `dtype`."""
        return BucketBias(tokens, self.table.to(dtype), self.starts)


class T5Layer(LayerEncoding):
    """A layer with a table of its own."""

    def __init__(self, sizes: EncodingSizes, options: T5Options) -> None:
        super().__init__()
        self.buckets = BucketTable(sizes, options)
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Random, as other weights."""
        self.buckets.init_table()

    def bias(self, query: Tensor, key: Tensor, tokens: Tokens) -> BucketBias:
        """`[B | 1, H, N, Nk]` in fp32, or in wider queries' dtype."""
        return self.buckets(tokens, torch.promote_types(query.dtype, torch.float32))


class T5(Encoding):
    """T5's bias, with one table for all layers or one in each."""

    summary = "Adds to each score a trained number per head and bucket of distances."
    paper = "Raffel et al., arXiv 1910.10683"
    extrapolates = "runs at any length; all far distances share one bucket"
    cost = "one look-up per score"
    options_class = T5Options

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__(sizes, options)
        assert isinstance(options, T5Options)
        self.buckets = BucketTable(sizes, options) if options.shared else None
        self.init_own_weights()

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `T5Layer`, or one that adds nothing where the table is shared."""
        assert isinstance(options, T5Options)
        return LayerEncoding() if options.shared else T5Layer(sizes, options)

    def bias(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> BucketBias | None:
        """`[B | 1, H, N, Nk]`; `None` where layers have their own."""
        return None if self.buckets is None else self.buckets(tokens, dtype)

    def init_own_weights(self) -> None:
        """Random, as other weights."""
        if self.buckets is not None:
            self.buckets.init_table()
