"""Small random models of transformers, converted, with TAPE weights that are not zero."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tape_pe
from tape_pe.convert.layers import PositionUpdate

# Every architecture that converts exactly, and what its small config needs beyond the sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm": {},
    "glm4": {},
    "granite": {},
    "helium": {},
    "llama": {},
    "ministral": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 8},
}

# One of each kind: plain, interleaved pairs, two rotary tables with sliding windows, partial rotary, experts.
KINDS = ("llama", "cohere", "gemma3_text", "phi", "mixtral")


def small_model(model_type: str, *, seed: int = 0, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """A random model in evaluation mode: 4 layers, 4 heads on 2 key/value heads, norms that are not all ones."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
        **ARCHITECTURES.get(model_type, {}),
        **changes,
    }
    if model_type == "phi":
        del values["head_dim"]
    config = AutoConfig.for_model(model_type, **values)
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def trained(model: PreTrainedModel, scale: float = 0.3) -> PreTrainedModel:
    """The converted model with position weights as training might leave them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionUpdate):
                for parameter in module.parameters():
                    parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def small_tape_model(model_type: str, config: tape_pe.TapeConfig | None = None, **changes: Any) -> PreTrainedModel:
    """A converted `small_model` with trained position weights."""
    return trained(tape_pe.convert(small_model(model_type, **changes), config))


def tokens(*shape: int, seed: int = 2) -> torch.Tensor:
    """Random token ids without special ones."""
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(seed))
