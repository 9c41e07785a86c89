"""What is put into a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tape_pe.encodings.base import EncodingSizes, check_option_types
from tape_pe.encodings.tape import StateUpdateOptions


@dataclass(frozen=True)
class TapeConfig(StateUpdateOptions):
    """Options of TAPE in a converted model (Zhu et al., arXiv 2501.00712): those of the update, and the rule of RoPE.

    `TapeConfig()` is the published method. `TapeConfig(position_size=32, state_norm="rms")` changes the update; all of
    its options are described in `tape_pe.encodings.tape.StateUpdateOptions`, which this class adds `rope` to.

    Attributes:
        rope: a new frequency rule for texts longer than the model was trained on, such as `{"rope_type": "linear",
            "factor": 2.0}` for twice the length; see `tape_pe.convert.rules`. `None` keeps the model's own.

    Raises:
        ValueError: a value that is not allowed.
    """

    rope: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_option_types(type(self), self.to_dict(), self.prefix)
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """For JSON. `rope` is left out: it is in the model's own `rope_parameters`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rope"}

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
