"""TAPE in pretrained models of transformers: convert, train little, save an adapter, generate."""

from tape_pe.convert.adapter import load_adapter, save_adapter
from tape_pe.convert.classes import is_converted, register_architecture
from tape_pe.convert.config import TapeConfig
from tape_pe.convert.engine import convert, tape_config, unconvert
from tape_pe.convert.freeze import TrainableGroup, TrainableParameters, freeze_base, trainable_parameters
from tape_pe.convert.structure import UnsupportedModelError

__all__ = [
    "TapeConfig",
    "TrainableGroup",
    "TrainableParameters",
    "UnsupportedModelError",
    "convert",
    "freeze_base",
    "is_converted",
    "load_adapter",
    "register_architecture",
    "save_adapter",
    "tape_config",
    "trainable_parameters",
    "unconvert",
]
