"""TAPE in pretrained models of transformers: convert, train little, save an adapter, generate."""

from tape_pe.convert.classes import is_converted, register_architecture
from tape_pe.convert.config import TapeConfig
from tape_pe.convert.engine import convert, tape_config, unconvert
from tape_pe.convert.structure import UnsupportedModelError

__all__ = [
    "TapeConfig",
    "UnsupportedModelError",
    "convert",
    "is_converted",
    "register_architecture",
    "tape_config",
    "unconvert",
]
