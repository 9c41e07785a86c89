"""TAPE: contextualized equivariant positional encoding (Zhu et al., ICML 2025, arXiv 2501.00712), rotary form.

The state starts as RoPE's and every layer but the last updates it from what its token attended to and from the token's
content (`tape_pe.ops.contextualize`). W_mix and W_up start at zero: a fresh TAPE model is a RoPE model, bit for bit.
The literal equations are in `tape_pe.ops.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from tape_pe.encodings.base import EncodingOptions, EncodingSizes, LayerEncoding
from tape_pe.encodings.rope import RopeLayer, Rotary, RotaryOptions
from tape_pe.ops import contextualize

HeadMixing = Literal["full", "diagonal"]
StateNorm = Literal["none", "rms"]
GateInput = Literal["mlp_output", "mlp_input"]


@dataclass(frozen=True)
class TapeOptions(RotaryOptions):
    """Options of TAPE.

    Attributes:
        position_size: I, width of the position MLP; `None` is 4 * Hkv.
        update_attention: whether states take in the attention average of states.
        update_mlp: whether states pass through the position MLP.
        head_mixing: `"full"` mixes the averages of all heads, W_mix `[Hkv, H]`; `"diagonal"` has one scale per head.
        state_norm: `"rms"` divides each head's state by its root mean square over channel pairs, which is 1 at the
            start; `"none"` is as published.
        gate_input: what psi reads: `"mlp_output"`, the output of the layer's MLP before its residual, or
            `"mlp_input"`, the normalised tokens that the MLP reads.
    """

    position_size: int | None = None
    update_attention: bool = True
    update_mlp: bool = True
    head_mixing: HeadMixing = "full"
    state_norm: StateNorm = "none"
    gate_input: GateInput = "mlp_output"

    def __post_init__(self) -> None:
        if self.position_size is not None and self.position_size < 1:
            raise ValueError(f"encoding_options.position_size={self.position_size}: at least 1 is needed")
        for name, choices in (("head_mixing", HeadMixing), ("state_norm", StateNorm), ("gate_input", GateInput)):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ValueError(f"encoding_options.{name}={getattr(self, name)!r}: allowed values are {allowed}")


class TapeLayer(RopeLayer):
    """Rotates by the state, then updates it.

    Parameters: `mix` `[Hkv, H]` (or `[Hkv, H / Hkv]`), `gate_proj` `[I, hidden_size]`, `up` `[I, Hkv]` and `down`
    `[Hkv, I]`; each is absent where its update is switched off.
    """

    def __init__(self, sizes: EncodingSizes, options: TapeOptions) -> None:
        super().__init__()
        self.gate_input = options.gate_input
        self.state_norm = options.state_norm
        self.averages_state = options.update_attention
        self.initializer_range = sizes.initializer_range
        heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self.mix: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        self.down: nn.Parameter | None = None
        if options.update_attention:
            self.mix = nn.Parameter(
                torch.empty(kv_heads, heads if options.head_mixing == "full" else heads // kv_heads)
            )
        if options.update_mlp:
            size = options.position_size or 4 * kv_heads
            self.gate_proj = nn.Linear(sizes.hidden_size, size, bias=False)
            self.up = nn.Parameter(torch.empty(size, kv_heads))
            self.down = nn.Parameter(torch.empty(kv_heads, size))
        self.init_own_weights()

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
        return contextualize(
            state, averaged_state, gate, mix=self.mix, up=self.up, down=self.down, norm=self.state_norm
        )


class Tape(Rotary):
    """The start state of RoPE, updated by every layer but the last: nobody reads that one's new state."""

    summary = "RoPE whose states every layer updates from what their tokens attended to and from the tokens' content."
    paper = "Zhu et al., ICML 2025, arXiv 2501.00712"
    extrapolates = "runs at any length; how well beyond the trained one depends on task and seed"
    cost = "RoPE's rotation; in each layer a second attention average, its mixing over heads, and a small MLP"
    options_class = TapeOptions

    @classmethod
    def layer(cls, sizes: EncodingSizes, options: EncodingOptions, layer_idx: int) -> LayerEncoding:
        """A `TapeLayer`, or a plain `RopeLayer` where nothing is updated."""
        assert isinstance(options, TapeOptions)
        is_last = layer_idx == sizes.num_hidden_layers - 1
        if is_last or not (options.update_attention or options.update_mlp):
            return RopeLayer()
        return TapeLayer(sizes, options)
