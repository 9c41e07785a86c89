"""TAPE: contextualized equivariant positional encoding (Zhu et al., ICML 2025, arXiv 2501.00712), rotary form.

The state starts as RoPE's and every layer but the last updates it from what its token attended to and from the token's
content (`tape_pe.ops.contextualize`). W_mix and W_up start at zero: a fresh TAPE model is a RoPE model, bit for bit.
The literal equations are in `tape_pe.ops.reference`.

The option `structure` has the paper's ablations of the form of the weights, see `tape_pe.ops.structures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.rope import RopeLayer, Rotary, RotaryOptions
from tape_pe.ops import (
    contextualize,
    contextualize_channels,
    contextualize_components,
    contextualize_unstructured,
    rotate_wide,
    widen,
)

Structure = Literal["rotary", "components", "channels", "unstructured"]
HeadMixing = Literal["full", "diagonal"]
StateNorm = Literal["none", "rms"]
GateInput = Literal["mlp_output", "mlp_input"]


@dataclass(frozen=True)
class StateUpdateOptions:
    """Options of the update of states, in this package's decoder and in converted models.

    Attributes:
        position_size: I, width of the position MLP; `None` is 4 * Hkv.
        update_attention: whether states take in the attention average of states.
        update_mlp: whether states pass through the position MLP.
        head_mixing: `"full"` mixes the averages of all heads, W_mix `[Hkv, H]`; `"diagonal"` has one scale per head.
        state_norm: `"rms"` divides each head's state by its root mean square over channel pairs, which is 1 at the
            start; `"none"` is as published.
        gate_input: what psi reads: `"mlp_output"`, the output of the layer's MLP before its residual (and before a norm
            that may follow it), or `"mlp_input"`, what the MLP reads: the normalised tokens.
    """

    prefix: ClassVar[str] = ""  # before the names of options in messages

    position_size: int | None = None
    update_attention: bool = True
    update_mlp: bool = True
    head_mixing: HeadMixing = "full"
    state_norm: StateNorm = "none"
    gate_input: GateInput = "mlp_output"

    def __post_init__(self) -> None:
        if self.position_size is not None and self.position_size < 1:
            raise ValueError(f"{self.prefix}position_size={self.position_size}: at least 1 is needed")
        for name, choices in (("head_mixing", HeadMixing), ("state_norm", StateNorm), ("gate_input", GateInput)):
            self.check_choice(name, choices)

    def check_choice(self, name: str, choices: Any) -> None:
        """Raises a ValueError unless an option has one of the values of a `Literal`."""
        if getattr(self, name) not in get_args(choices):
            allowed = ", ".join(get_args(choices))
            raise ValueError(f"{self.prefix}{name}={getattr(self, name)!r}: allowed values are {allowed}")


@dataclass(frozen=True)
class TapeOptions(StateUpdateOptions, RotaryOptions):
    """Options of TAPE.

    Attributes:
        structure: what the weights act on. `"rotary"`, the method itself: on the heads, alike for cosines and sines,
            and so equivariant. Its ablations: `"components"`, on the heads, with weights of their own for cosines and
            sines; `"channels"`, along the D channels of each head, which `head_mixing` then mixes, W_mix `[D, D]`, or
            scales, `[D]`; `"unstructured"`, on all heads and channels at once. In the last two a state has 2D numbers
            per head, `[C | S]`.
    """

    prefix: ClassVar[str] = "encoding_options."

    structure: Structure = "rotary"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("structure", Structure)


class WeightShapes(NamedTuple):
    """Shapes of W_mix, W_up and W_down."""

    mix: tuple[int, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]


class TapeLayer(RopeLayer):
    """Rotates by the state, then updates it.

    Parameters: `mix` `[Hkv, H]` (or `[Hkv, H / Hkv]`), `gate_proj` `[I, hidden_size]`, `up` `[I, Hkv]` and `down`
    `[Hkv, I]`; each is absent where its update is switched off.
    """

    contextualize = staticmethod(contextualize)

    def __init__(self, sizes: EncodingSizes, options: StateUpdateOptions) -> None:
        super().__init__()
        self.gate_input = options.gate_input
        self.state_norm = options.state_norm
        self.averages_state = options.update_attention
        self.initializer_range = sizes.initializer_range
        self.kv_heads = sizes.num_key_value_heads
        self.mix: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        size = options.position_size or 4 * self.kv_heads
        shapes = self.weight_shapes(sizes, size, options.head_mixing)
        if options.update_attention:
            self.mix = nn.Parameter(torch.empty(shapes.mix))
        if options.update_mlp:
            self.gate_proj = nn.Linear(sizes.hidden_size, size, bias=False)
            self.up = nn.Parameter(torch.empty(shapes.up))
            self.down = nn.Parameter(torch.empty(shapes.down))
        self.init_own_weights()

    @classmethod
    def weight_shapes(cls, sizes: EncodingSizes, position_size: int, head_mixing: HeadMixing) -> WeightShapes:
        """The shapes of the layer's own parameters, I being `position_size`."""
        heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        columns = heads if head_mixing == "full" else heads // kv_heads
        return WeightShapes((kv_heads, columns), (position_size, kv_heads), (kv_heads, position_size))

    def init_own_weights(self) -> None:
        """W_mix and W_up are zero, so that the layer changes nothing; W_down is random, so that W_up can learn."""
        if self.mix is not None:
            init.zeros_(self.mix)
        if self.up is not None and self.down is not None:
            init.zeros_(self.up)
            init.normal_(self.down, std=self.initializer_range)

    def forward(
        self, state: Tensor | None, averaged_state: Tensor | None, mlp_input: Tensor, mlp_output: Tensor
    ) -> Tensor:
        assert state is not None
        gate = None
        if self.up is not None:
            gate = F.silu(self.gate_proj(mlp_output if self.gate_input == "mlp_output" else mlp_input))
        return self.contextualize(
            state, averaged_state, gate, mix=self.mix, up=self.up, down=self.down, norm=self.state_norm
        )


class ComponentsLayer(TapeLayer):
    """Cosines and sines have weights of their own: `mix`, `up` and `down` of a `TapeLayer`, twice, on axis 0."""

    contextualize = staticmethod(contextualize_components)

    @classmethod
    def weight_shapes(cls, sizes: EncodingSizes, position_size: int, head_mixing: HeadMixing) -> WeightShapes:
        """See `TapeLayer.weight_shapes`."""
        return WeightShapes(*((2, *shape) for shape in super().weight_shapes(sizes, position_size, head_mixing)))


class WideRopeLayer(RopeLayer):
    """Rotates by a state `[C | S]`, `[B | 1, Hkv | 1, N, 2D]`, which never changes."""

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        return rotate_wide(query, state), rotate_wide(key, state)


class ChannelsLayer(WideRopeLayer, TapeLayer):
    """Weights act along channels: `mix` `[D, D]` (or `[D]`), `up` `[I, D]`, `down` `[D, I]`."""

    contextualize = staticmethod(contextualize_channels)

    @classmethod
    def weight_shapes(cls, sizes: EncodingSizes, position_size: int, head_mixing: HeadMixing) -> WeightShapes:
        """See `TapeLayer.weight_shapes`."""
        channels = sizes.head_dim
        mix = (channels, channels) if head_mixing == "full" else (channels,)
        return WeightShapes(mix, (position_size, channels), (channels, position_size))

    def forward(
        self, state: Tensor | None, averaged_state: Tensor | None, mlp_input: Tensor, mlp_output: Tensor
    ) -> Tensor:
        assert state is not None
        return super().forward(state.expand(-1, self.kv_heads, -1, -1), averaged_state, mlp_input, mlp_output)


class UnstructuredLayer(WideRopeLayer, TapeLayer):
    """Weights act on all heads and channels at once: `mix` of a `TapeLayer`, `up` `[I, Hkv D]`, `down` `[Hkv D, I]`."""

    contextualize = staticmethod(contextualize_unstructured)

    @classmethod
    def weight_shapes(cls, sizes: EncodingSizes, position_size: int, head_mixing: HeadMixing) -> WeightShapes:
        """See `TapeLayer.weight_shapes`."""
        mix = super().weight_shapes(sizes, position_size, head_mixing).mix
        width = sizes.num_key_value_heads * sizes.head_dim
        return WeightShapes(mix, (position_size, width), (width, position_size))


LAYERS: dict[Structure, type[TapeLayer]] = {
    "rotary": TapeLayer,
    "components": ComponentsLayer,
    "channels": ChannelsLayer,
    "unstructured": UnstructuredLayer,
}


class Tape(Rotary):
    """The start state of RoPE, updated by every layer but the last: nobody reads that one's new state."""

    summary = "RoPE whose states every layer updates from what their tokens attended to and from the tokens' content."
    paper = "Zhu et al., ICML 2025, arXiv 2501.00712"
    extrapolates = "runs at any length; how well beyond the trained one depends on task and seed"
    cost = "RoPE's rotation; in each layer a second attention average, its mixing over heads, and a small MLP"
    options_class = TapeOptions

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A layer of the structure, or one that only rotates where nothing is updated."""
        assert isinstance(options, TapeOptions)
        layer_class = LAYERS[options.structure]
        is_last = layer_idx == sizes.num_hidden_layers - 1
        if is_last or not (options.update_attention or options.update_mlp):
            return WideRopeLayer() if issubclass(layer_class, WideRopeLayer) else RopeLayer()
        return layer_class(sizes, options)

    def start(self, tokens: Tokens, dtype: torch.dtype = torch.float32) -> Tensor:
        """Packed `[cos | sin]`, `[B | 1, 1, N, D]`; for the structures that need it `[C | S]`, `[B | 1, 1, N, 2D]`."""
        state = super().start(tokens, dtype)
        assert isinstance(self.options, TapeOptions)
        return widen(state) if issubclass(LAYERS[self.options.structure], WideRopeLayer) else state
