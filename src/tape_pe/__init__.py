"""TAPE: contextualized equivariant positional encoding for transformers (Zhu et al., ICML 2025, arXiv 2501.00712)."""

__version__ = "0.1.0"

from tape_pe.convert import (
    TapeConfig,
    UnsupportedModelError,
    convert,
    freeze_base,
    is_converted,
    load_adapter,
    save_adapter,
    trainable_parameters,
    unconvert,
)
from tape_pe.models import TapeCache, TapeCausalLMOutput, TapeLMConfig, TapeLMForCausalLM

__all__ = [
    "TapeCache",
    "TapeCausalLMOutput",
    "TapeConfig",
    "TapeLMConfig",
    "TapeLMForCausalLM",
    "UnsupportedModelError",
    "__version__",
    "convert",
    "freeze_base",
    "is_converted",
    "load_adapter",
    "save_adapter",
    "trainable_parameters",
    "unconvert",
]
