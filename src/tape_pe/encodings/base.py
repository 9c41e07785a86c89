"""What a positional encoding is to the decoder: a module per model, and a module per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from tape_pe.ops.bias import Bias
from tape_pe.ops.masks import segment_starts


@dataclass(frozen=True)
class EncodingSizes:
    """The sizes of a decoder that encodings depend on.

    Attributes:
        hidden_size: width of the token stream.
        num_attention_heads: H, heads of the queries.
        num_key_value_heads: Hkv, heads of keys, values and states.
        head_dim: D, channels per head.
        num_hidden_layers: number of layers.
        max_position_embeddings: the length that the model is made for.
        rope_parameters: base and frequency rule, in the form of Hugging Face's `rope_parameters`.
        initializer_range: standard deviation of random start weights.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    initializer_range: float


class Tokens(NamedTuple):
    """What an encoding may know of the tokens that attention sees: Nk - N cached ones first, then N new ones.

    Attributes:
        position_ids: `[B | 1, Nk]`.
        num_new: N.
        segment_ids: `[B, Nk]`, -1 for padding; `None` where all tokens of a row see each other.
        input_ids: `[B, Nk]`; `None` where embeddings were given instead.
    """

    position_ids: Tensor
    num_new: int
    segment_ids: Tensor | None = None
    input_ids: Tensor | None = None

    @property
    def new_position_ids(self) -> Tensor:
        """Positions of the new tokens, `[B | 1, N]`."""
        return self.position_ids[:, self.position_ids.shape[1] - self.num_new :]

    def new_lengths(self) -> Tensor:
        """For each new token, the length of its segment so far: the largest position of its real tokens plus one.

        Padding counts to the segment before it.

        Returns:
            `[B | 1, N | 1]`.
        """
        if self.segment_ids is None:
            return self.position_ids.amax(dim=1, keepdim=True) + 1
        runs = segment_starts(self.segment_ids).long().cumsum(dim=1)  # [B, Nk], 0 for padding before all segments
        positions = self.position_ids.expand_as(runs).masked_fill(self.segment_ids < 0, 0)
        longest = torch.zeros_like(torch.nn.functional.pad(positions, (0, 1)))
        longest = longest.scatter_reduce(1, runs, positions, "amax")
        return longest.gather(1, runs[:, runs.shape[1] - self.num_new :]) + 1


@dataclass(frozen=True)
class EncodingOptions:
    """Options of an encoding; subclasses add fields and check them in `__post_init__`."""

    @classmethod
    def from_dict(cls, encoding: str, values: Mapping[str, Any]) -> EncodingOptions:
        """Builds options from a mapping such as `encoding_options` of a config.

        Raises:
            ValueError: a key that the encoding does not have, or a value that it refuses.
        """
        allowed = [f.name for f in fields(cls)]
        for key in values:
            if key not in allowed:
                has = ", ".join(allowed) if allowed else "no options"
                raise ValueError(f"encoding_options.{key}={values[key]!r}: encoding={encoding!r} has {has}")
        check_option_types(cls, values, "encoding_options.")
        return cls(**values)


def check_option_types(options_class: type, values: Mapping[str, Any], prefix: str) -> None:
    """Raises a ValueError for a value that does not fit its field's annotation; `prefix` goes before its name."""
    hints = get_type_hints(options_class)
    for key, value in values.items():
        if not _is_of_type(value, hints[key]):
            needed = hints[key].__name__ if isinstance(hints[key], type) else str(hints[key]).replace("typing.", "")
            raise ValueError(f"{prefix}{key}={value!r}: {needed} is needed")


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether `value`, as from YAML or JSON, fits the annotation of an option. Literals name their choices themselves,
    in the options' own checks."""
    if get_origin(hint) in (Union, UnionType):
        return any(_is_of_type(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal or not isinstance(hint, type):
        return True
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


class LayerEncoding(nn.Module):
    """The part of an encoding that belongs to one layer. This class does nothing: NoPE.

    Attributes:
        averages_state: whether the layer's attention shall average the states of the keys, for `forward`. Keys' states
            are then cached as well.
    """

    averages_state: bool = False

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Applies the state to queries `[B, H, N, D]` and keys `[B, Hkv, N, D]`."""
        return query, key

    def bias(self, query: Tensor, key: Tensor, tokens: Tokens) -> Bias | None:
        """What this layer adds to its attention scores, broadcastable to `[B, H, N, Nk]`, or `None`.

        A tensor, or a `tape_pe.ops.PairBias`: a rule for pairs of tokens, which some backends compute in place.

        Args:
            query: rotated queries of the new tokens, `[B, H, N, D]`.
            key: rotated keys of all tokens, `[B, Hkv, Nk, D]`.
            tokens: all tokens.
        """
        return None

    def forward(
        self, state: Tensor | None, averaged_state: Tensor | None, mlp_input: Tensor, mlp_output: Tensor
    ) -> Tensor | None:
        """The state that the next layer reads.

        Args:
            state: what this layer read, `[B | 1, Hkv | 1, N, Ds]`, or `None` for encodings without one.
            averaged_state: its attention average per query head, `[B, H, N, Ds]`; `None` unless `averages_state`.
            mlp_input: normalised tokens that the MLP reads, `[B, N, hidden_size]`.
            mlp_output: the MLP's output before its residual, `[B, N, hidden_size]`.
        """
        return state

    def init_own_weights(self) -> None:
        """Sets the layer's own parameters (not those of its submodules) to their start values."""


class Encoding(nn.Module):
    """The part of an encoding that belongs to the whole model. This class does nothing: NoPE.

    Attributes:
        summary: what it does, in one sentence; if empty, the first paragraph of the class's docstring is shown.
        paper: authors and address, as in "Su et al., arXiv 2104.09864"; empty if there is none.
        extrapolates: whether it serves texts longer than those trained on, in a short phrase; empty if not known.
        cost: the work that it adds, in a short phrase; how many states it caches and which biases it builds is
            measured (`tape_pe.catalogue`) and need not be said.
        example_options: options to measure it with, where it cannot be built without any.
        options_class: dataclass of the options; its docstring describes each of them under `Attributes:`.
        layer_class: what `layer` builds.
    """

    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    extrapolates: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    example_options: ClassVar[Mapping[str, Any]] = {}
    options_class: ClassVar[type[EncodingOptions]] = EncodingOptions
    layer_class: ClassVar[type[LayerEncoding]] = LayerEncoding

    def __init__(self, sizes: EncodingSizes, options: EncodingOptions) -> None:
        super().__init__()
        self.sizes = sizes
        self.options = options

    @classmethod
    def check(cls, sizes: EncodingSizes, options: EncodingOptions) -> None:
        """Raises a ValueError if a decoder of these sizes cannot have this encoding."""

    @classmethod
    def longest_text(cls, sizes: EncodingSizes, options: EncodingOptions) -> int | None:
        """Most tokens of a text in evaluation; `None` where the encoding sets no bound."""
        return None

    @classmethod
    def options_for(cls, tokenizer: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` of `encoding_options`, with what follows from a transformers tokenizer filled in."""
        return dict(values)

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """The encoding's part in layer `layer_idx`."""
        return cls.layer_class()

    def embed(self, tokens: Tokens) -> Tensor | None:
        """What is added to the embeddings of the new tokens, `[B | 1, N, hidden_size]`, or `None`."""
        return None

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """The state of the new tokens that layer 0 reads, `[B | 1, 1, N, Ds]`, computed in fp32 or wider; or `None`.

        Positions are consumed here, once; afterwards the state travels with its token.

        Args:
            tokens: all tokens.
            dtype: dtype of the result.
        """
        return None

    def bias(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Bias | None:
        """What every layer adds to its attention scores, built once: broadcastable to `[B, H, N, Nk]`, or `None`.

        A tensor or a `tape_pe.ops.PairBias`, as in `LayerEncoding.bias`. The rule's tensors that need gradients should
        be parameters, or casts of them: every layer that computes the rule in place runs backward through them.
        """
        return None

    def init_own_weights(self) -> None:
        """Sets the encoding's own parameters (not those of its submodules) to their start values."""
