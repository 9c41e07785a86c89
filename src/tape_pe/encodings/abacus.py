"""Abacus embeddings (McLeish et al., arXiv 2405.17399): digits know their place within their number.

A digit gets p = 1, 2, ... from the first token of its number, every other token 0, and W[p] is added to its token
embedding. With numbers written from the least significant digit on, digits of the same significance have the same p.

In training each row adds one random offset from {0, ..., `max_offset`} to all of its digits, so that places beyond the
longest number trained on are trained as well; in evaluation it is 0. It can be combined with RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.bounds import can_look_at_values, refuse_cache
from tape_pe.encodings.rope import RopeLayer, Rotary, RotaryOptions
from tape_pe.ops import segment_positions

Base = Literal["nope", "rope"]
DIGITS = "0123456789"


@dataclass(frozen=True)
class AbacusOptions(EncodingOptions):
    """Options of Abacus.

    Attributes:
        digit_token_ids: ids of the tokens that are digits. It has to be given; training runs fill it in with the ids of
            "0" ... "9" of their tokenizer.
        max_digits: the longest number.
        max_offset: the largest random offset in training, 100 as in the paper; 0 switches it off.
        base: what else tells positions: `"nope"`, nothing, or `"rope"`.
    """

    digit_token_ids: list | None = None
    max_digits: int = 128
    max_offset: int = 100
    base: Base = "nope"

    def __post_init__(self) -> None:
        ids = self.digit_token_ids
        if ids is not None and (
            not ids
            or any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids)
            or len(set(ids)) < len(ids)
        ):
            raise ValueError(f"encoding_options.digit_token_ids={ids}: distinct token ids are needed")
        for name, least in (("max_digits", 1), ("max_offset", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"encoding_options.{name}={getattr(self, name)}: at least {least} is needed")
        if self.base not in get_args(Base):
            raise ValueError(f"encoding_options.base={self.base!r}: allowed values are {', '.join(get_args(Base))}")


class Abacus(Encoding):
    """Adds a trained row per place in a number.

    Parameters: `digit_embeddings.weight` `[1 + max_digits + max_offset, hidden_size]`; row 0 is that of all other
    tokens.
    """

    summary = "Tells each digit its place within its number."
    paper = "McLeish et al., arXiv 2405.17399"
    extrapolates = "yes, numbers up to max_digits"
    cost = "one addition to the embeddings"
    example_options: ClassVar[Mapping[str, Any]] = {"digit_token_ids": list(range(10))}
    options_class = AbacusOptions

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__(sizes, options)
        assert isinstance(options, AbacusOptions)
        self.digit_embeddings = nn.Embedding(1 + options.max_digits + options.max_offset, sizes.hidden_size)
        self.rope = Rotary(sizes, RotaryOptions()) if options.base == "rope" else None

    @classmethod
    def check(cls, sizes: EncodingSizes, options: EncodingOptions) -> None:
        """Raises a ValueError if it is not said which tokens are digits, or if RoPE does not fit."""
        assert isinstance(options, AbacusOptions)
        if options.digit_token_ids is None:
            raise ValueError(
                "encoding_options.digit_token_ids=None: encoding='abacus' needs the ids of the tokens that are digits"
            )
        if options.base == "rope":
            Rotary.check(sizes, RotaryOptions())

    @classmethod
    def options_for(cls, tokenizer: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values`, with the tokenizer's ids of "0" ... "9" where no `digit_token_ids` are given.

        Raises:
            ValueError: the tokenizer has no token for one of them.
        """
        if values.get("digit_token_ids") is not None:
            return dict(values)
        vocabulary = tokenizer.get_vocab()
        for digit in DIGITS:
            if digit not in vocabulary:
                raise ValueError(
                    f"encoding_options.digit_token_ids=None: the tokenizer has no token for {digit!r}, so the ids of "
                    "the tokens that are digits have to be given"
                )
        return {**values, "digit_token_ids": [vocabulary[digit] for digit in DIGITS]}

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `RopeLayer`, or one that does nothing."""
        assert isinstance(options, AbacusOptions)
        return RopeLayer() if options.base == "rope" else LayerEncoding()

    def embed(self, tokens: Tokens) -> Tensor:
        """The rows of the new tokens, `[B, N, hidden_size]`.

        Raises:
            ValueError: no token ids, a number of more than `max_digits` digits, or cached tokens with offsets.
        """
        options = self.options
        assert isinstance(options, AbacusOptions)
        if tokens.input_ids is None:
            raise ValueError(
                "inputs_embeds: encoding='abacus' reads the numbers in input_ids, those of cached tokens included"
            )
        draws = self.training and options.max_offset > 0
        if draws:
            refuse_cache(tokens, "abacus", "an offset")
        is_digit = torch.isin(tokens.input_ids, tokens.input_ids.new_tensor(options.digit_token_ids))
        places = places_in_numbers(is_digit, tokens.segment_ids)[:, is_digit.shape[1] - tokens.num_new :]
        if not can_look_at_values(places):  # the look-up refuses rows that do not exist
            places = places.masked_fill(places > options.max_digits, self.digit_embeddings.num_embeddings)
        elif places.numel() and (most := int(places.max())) > options.max_digits:
            raise ValueError(f"a number of {most} digits: encoding='abacus' has max_digits={options.max_digits}")
        if draws:
            offsets = torch.randint(options.max_offset + 1, (len(places), 1), device=places.device)
            places = torch.where(places > 0, places + offsets, 0)
        return self.digit_embeddings(places)

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """RoPE's start state, `[B | 1, 1, N, D]`, or `None` for `base="nope"`."""
        return None if self.rope is None else self.rope.start(tokens, dtype)


def places_in_numbers(is_digit: Tensor, segment_ids: Tensor | None = None) -> Tensor:
    """Where digits stand in their numbers.

    Args:
        is_digit: `[B, N]` bool.
        segment_ids: `[B, N]`, -1 for padding, which is skipped over; numbers do not go on from one segment to the next.

    Returns:
        `[B, N]` int64: 1, 2, ... from the first digit of each number, 0 for other tokens and padding.
    """
    if segment_ids is None:
        segment_ids = torch.zeros_like(is_digit, dtype=torch.long)
    real = segment_ids >= 0
    rank = real.long().cumsum(dim=1)  # 1, 2, ... among the row's real tokens
    is_first = real & (segment_positions(segment_ids) == 0)
    # The rank of the last token before the number: the latest one that is no digit, or precedes the segment.
    before = torch.where(is_first, rank - 1, 0).where(is_digit, rank.where(real, 0)).cummax(dim=1).values
    return (rank - before).where(is_digit & real, 0)
