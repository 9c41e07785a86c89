"""Randomized positions (Ruoss et al., arXiv 2305.16843): a short text is trained with the positions of a long one.

In training, each row of each forward draws a random subset of {0, ..., bound - 1}, as many numbers as the row has
positions, and position p becomes the p-th smallest of them. What follows is RoPE, or a learned embedding per number.

In evaluation the subset is fixed, so that decoding with a cache gives what the whole text gives: `eval_size` of the
`bound` numbers, drawn once from `eval_seed`. A text in evaluation takes the first of these: their mean distance is
`bound / eval_size`. In training it is `bound` over the row's own length, so `eval_size` is best set to the length that
will be tested.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.bounds import can_look_at_values, refuse_cache, row_indices
from tape_pe.encodings.rope import RopeLayer, Rotary, RotaryOptions

Base = Literal["rope", "learned"]


@dataclass(frozen=True)
class RandomizedOptions(EncodingOptions):
    """Options of randomized positions.

    Attributes:
        base: what reads the drawn positions: `"rope"`, or `"learned"` embeddings added to those of the tokens.
        bound: how many numbers there are to draw from; `None` is 2 * `max_position_embeddings`.
        eval_size: size of the fixed subset, the longest text in evaluation; `None` is `max_position_embeddings`.
        eval_seed: seed of the fixed subset, at least 0.
    """

    base: Base = "rope"
    bound: int | None = None
    eval_size: int | None = None
    eval_seed: int = 0

    def __post_init__(self) -> None:
        if self.base not in get_args(Base):
            raise ValueError(f"encoding_options.base={self.base!r}: allowed values are {', '.join(get_args(Base))}")
        for name, least in (("bound", 1), ("eval_size", 1), ("eval_seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"encoding_options.{name}={value}: at least {least} is needed")


class Randomized(Encoding):
    """Draws positions, and hands them to RoPE or looks up their embeddings.

    Parameters, for `base="learned"`: `position_embeddings.weight` `[bound, hidden_size]`.
    """

    summary = "Trains short texts with random positions of long ones, for RoPE or learned positions."
    paper = "Ruoss et al., arXiv 2305.16843"
    extrapolates = "yes, up to eval_size tokens"
    cost = "a random draw per training step"
    options_class = RandomizedOptions

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__(sizes, options)
        assert isinstance(options, RandomizedOptions)
        self.bound, self.eval_size = _sizes(sizes, options)
        self.rope: Rotary | None = None
        self.position_embeddings: nn.Embedding | None = None
        if options.base == "rope":
            self.rope = Rotary(sizes, RotaryOptions())
        else:
            self.position_embeddings = nn.Embedding(self.bound, sizes.hidden_size)
        # Not a buffer: those can be cast, left empty or stored. This one is always that of the config.
        self._eval_subset = fixed_subset(self.bound, self.eval_size, options.eval_seed)

    @classmethod
    def check(cls, sizes: EncodingSizes, options: EncodingOptions) -> None:
        """Raises a ValueError if the fixed subset has no room below the bound, or if RoPE does not fit."""
        assert isinstance(options, RandomizedOptions)
        bound, eval_size = _sizes(sizes, options)
        if eval_size > bound:
            name = "max_position_embeddings" if options.eval_size is None else "encoding_options.eval_size"
            raise ValueError(f"encoding_options.bound={bound}: at least {name}={eval_size} is needed")
        if options.base == "rope":
            Rotary.check(sizes, RotaryOptions())

    @classmethod
    def longest_text(cls, sizes: EncodingSizes, options: EncodingOptions) -> int:
        """`eval_size`."""
        assert isinstance(options, RandomizedOptions)
        return _sizes(sizes, options)[1]

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `RopeLayer`, or one that does nothing."""
        assert isinstance(options, RandomizedOptions)
        return RopeLayer() if options.base == "rope" else LayerEncoding()

    def positions(self, tokens: Tokens) -> Tensor:
        """The numbers that stand for the positions of the new tokens, sorted and distinct within each document.

        Training draws them with torch's generator, so `torch.manual_seed` repeats them. They are drawn before the first
        layer: checkpointed layers get the same ones when they are run again.

        Returns:
            `[B, N]` int64 in training (`[1, N]` if nothing but `position_ids` of one row is known, as with
            `inputs_embeds`: then all rows share a draw), `[B | 1, N]` in evaluation.

        Raises:
            ValueError: a position that the encoding has no number for, or cached tokens in training.
        """
        assert isinstance(self.options, RandomizedOptions)
        if not self.training:
            given = "max_position_embeddings" if self.options.eval_size is None else "eval_size"
            rule = f"in evaluation, encoding='randomized' has {given}={self.eval_size}"
            indices = row_indices(tokens, self.eval_size, rule)
            return self._eval_subset.to(indices.device)[indices]
        refuse_cache(tokens, "randomized", "positions")
        indices = row_indices(tokens, self.bound, f"encoding='randomized' has bound={self.bound}")
        known = (tokens.position_ids, tokens.segment_ids, tokens.input_ids)
        indices = indices.expand(max(len(tensor) for tensor in known if tensor is not None), -1)
        return random_subsets(indices.amax(dim=1) + 1, self.bound).gather(1, indices)

    def embed(self, tokens: Tokens) -> Tensor | None:
        """Embeddings of the drawn positions, `[B | 1, N, hidden_size]`, or `None` for `base="rope"`."""
        return None if self.position_embeddings is None else self.position_embeddings(self.positions(tokens))

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """RoPE's start state of the drawn positions, `[B | 1, 1, N, D]`, or `None` for `base="learned"`."""
        if self.rope is None:
            return None
        return self.rope.start(tokens._replace(position_ids=self.positions(tokens)), dtype)


def _sizes(sizes: EncodingSizes, options: RandomizedOptions) -> tuple[int, int]:
    """`bound` and `eval_size`, with their defaults filled in."""
    length = sizes.max_position_embeddings
    return options.bound or 2 * length, options.eval_size or length


def fixed_subset(bound: int, size: int, seed: int) -> Tensor:
    """A sorted random subset of {0, ..., bound - 1}, `[size]` int64 on the CPU; the same on every machine."""
    # `random.Random.random` is documented never to change; torch's generators may between versions.
    uniform = random.Random(seed)
    keys = [uniform.random() for _ in range(bound)]
    chosen = sorted(range(bound), key=keys.__getitem__)[:size]
    return torch.tensor(sorted(chosen), dtype=torch.long, device="cpu")


def random_subsets(sizes: Tensor, bound: int) -> Tensor:
    """Random subsets of {0, ..., bound - 1}, one per row, sorted; drawn with torch's generator of the device.

    Args:
        sizes: `[B]`, integers from 1 to `bound`.
        bound: size of the whole.

    Returns:
        `[B, M]` int64, M at least the largest size; the first `sizes[b]` numbers of row `b` are its subset.
    """
    width = int(sizes.max()) if can_look_at_values(sizes) else bound
    # The largest keys of a row, in their order, are a random choice in random order; its beginnings are smaller ones.
    order = torch.rand(len(sizes), bound, device=sizes.device).topk(width, dim=1).indices
    beyond = torch.arange(width, device=sizes.device) >= sizes[:, None]
    return order.masked_fill(beyond, bound).sort(dim=1).values
