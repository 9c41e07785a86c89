"""What is put into a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tape_pe.encodings.base import EncodingSizes
from tape_pe.encodings.tape import GateInput, HeadMixing, StateNorm, TapeOptions


@dataclass(frozen=True)
class TapeConfig:
    """Options of TAPE in a converted model (Zhu et al., arXiv 2501.00712).

    Attributes:
        position_size: I, width of the position MLP; `None` is 4 * Hkv.
        update_attention: whether states take in the attention average of states.
        update_mlp: whether states pass through the position MLP.
        head_mixing: `"full"` mixes the averages of all heads, W_mix `[Hkv, H]`; `"diagonal"` has one scale per head.
        state_norm: `"rms"` divides each head's state by its root mean square over channel pairs; `"none"` is as
            published.
        gate_input: what psi reads: `"mlp_output"`, the output of the layer's MLP before its residual (before a norm
            that may follow it), or `"mlp_input"`, what the MLP reads.
        rope: a new frequency rule for the model, such as `{"rope_type": "linear", "factor": 2.0}`; see
            `tape_pe.convert.rules`. `None` keeps the model's own.

    Raises:
        ValueError: a value that is not allowed.
    """

    position_size: int | None = None
    update_attention: bool = True
    update_mlp: bool = True
    head_mixing: HeadMixing = "full"
    state_norm: StateNorm = "none"
    gate_input: GateInput = "mlp_output"
    rope: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        try:
            TapeOptions.from_dict("tape", self._own_options())
        except ValueError as error:
            raise ValueError(str(error).replace("encoding_options.", "")) from None

    def _own_options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rope"}

    def options(self) -> TapeOptions:
        """The same as options of the encoding `tape`."""
        return TapeOptions(**self._own_options())

    def to_dict(self) -> dict[str, Any]:
        """For JSON. `rope` is left out: it is in the model's own `rope_parameters`."""
        values = asdict(self)
        del values["rope"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TapeConfig:
        """Reads `to_dict`'s result.

        Raises:
            ValueError: an unknown key, or a value that is not allowed.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"tape.{key}={values[key]!r}: known options are {', '.join(known)}")
        return cls(**values)


def layer_sizes(config: Any, heads: int, kv_heads: int, rotary_dim: int) -> EncodingSizes:
    """The sizes of one layer, of which `rotary_dim` channels per head are rotated."""
    return EncodingSizes(
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=rotary_dim,
        num_hidden_layers=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={},
        initializer_range=getattr(config, "initializer_range", None) or 0.02,
    )
