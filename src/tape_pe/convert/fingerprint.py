"""What identifies a base model: its sizes, the shapes of its parameters, and a sample of the numbers in each.

The sample is `SAMPLES` numbers at fixed, evenly spaced places of each tensor, kept as fp32. Two samples are compared in
the coarser of the two dtypes that the tensors had, bit for bit: a base that was fp32 when the adapter was saved is
recognised when it is loaded in bf16 or fp16, and the other way round, because loading rounds in the same way. Only
bf16 against fp16, where both may have been rounded, has a tolerance: one unit in the last place of bf16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tape_pe.convert.classes import TYPE_PREFIX
from tape_pe.convert.layers import PositionUpdate

SAMPLES = 16
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "layer_norm_eps", "hidden_act"),
    *("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
)
"""Fields of a config that change what the same weights compute; a model has some of them."""
_NAMED = 3  # how many of many differences a message names


def tape_names(model: nn.Module) -> set[str]:
    """Names of TAPE's own parameters in a converted model."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, PositionUpdate)
        for name, _ in module.named_parameters()
    }


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a model has without TAPE, tied ones once."""
    own = tape_names(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in own}


def fingerprint(model: PreTrainedModel, trained: Collection[str]) -> dict[str, Any]:
    """Identifies the base of a model, for JSON.

    Args:
        model: a model, converted or not.
        trained: names of base parameters that were trained: the base has other values there, so only their shapes
            count. Parameters on the meta device (offloaded) are not sampled either.
    """
    config: Any = model.config
    parameters = {
        name: {
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "sample": None if name in trained or parameter.is_meta else _sample(parameter),
        }
        for name, parameter in base_parameters(model).items()
    }
    return {
        "model_type": type(config).model_type.removeprefix(TYPE_PREFIX),
        "name_or_path": config._name_or_path,
        "config": {name: json.loads(json.dumps(getattr(config, name, None))) for name in SIZES},
        "parameters": parameters,
    }


def check_sizes(model: PreTrainedModel, recorded: Mapping[str, Any]) -> None:
    """Refuses a base of another architecture or of other sizes.

    Args:
        model: a model, converted or not.
        recorded: `fingerprint` of the base that is expected.

    Raises:
        ValueError: they differ; the message says in what.
    """
    found = fingerprint(model, trained=list(recorded["parameters"]))  # without samples
    if found["model_type"] != recorded["model_type"]:
        raise ValueError(
            f"base_model has the model_type {found['model_type']!r}: the adapter belongs to {_described(recorded)}"
        )
    pairs = {name: (found["config"].get(name), value) for name, value in recorded["config"].items()}
    differing = [f"{name}={ours!r} instead of {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    ours, theirs = found["parameters"], recorded["parameters"]
    differing += [f"no parameter {name}" for name in theirs if name not in ours]
    differing += [f"a parameter {name}" for name in ours if name not in theirs]
    differing += [
        f"{name} of the shape {ours[name]['shape']} instead of {values['shape']}"
        for name, values in theirs.items()
        if name in ours and ours[name]["shape"] != values["shape"]
    ]
    if differing:
        raise ValueError(f"base_model has {_list(differing)}: the adapter belongs to {_described(recorded)}")


def check_values(model: PreTrainedModel, recorded: Mapping[str, Any]) -> None:
    """Refuses a base with other weights; `check_sizes` comes first.

    Raises:
        ValueError: weights that were not trained are not those that the adapter was trained on.
    """
    parameters = base_parameters(model)
    differing = [
        name
        for name, values in recorded["parameters"].items()
        if values["sample"] is not None
        and not parameters[name].is_meta
        and not _same(values["sample"], values["dtype"], parameters[name])
    ]
    if differing:
        raise ValueError(
            f"base_model has other weights in {_list(differing)}: the adapter belongs to {_described(recorded)}; "
            "check=False loads it anyway"
        )


def _sample(parameter: Tensor) -> str:
    """The sample of a tensor as hexadecimal digits of little-endian fp32 numbers."""
    count = min(SAMPLES, parameter.numel())
    places = [(2 * k + 1) * parameter.numel() // (2 * count) for k in range(count)]
    index = torch.tensor(places, dtype=torch.long, device=parameter.device)
    values = parameter.detach().reshape(-1)[index].float().cpu().tolist()
    return struct.pack(f"<{count}f", *values).hex()


def _same(recorded: str, dtype_name: str, parameter: Tensor) -> bool:
    dtype = getattr(torch, dtype_name, None)
    samples = [bytes.fromhex(text) for text in (recorded, _sample(parameter))]
    if not isinstance(dtype, torch.dtype) or len(samples[0]) != len(samples[1]):
        return False
    a, b = (torch.tensor(struct.unpack(f"<{len(data) // 4}f", data)) for data in samples)
    if not (dtype.is_floating_point and parameter.dtype.is_floating_point):
        return dtype == parameter.dtype and torch.equal(a, b)
    if {dtype, parameter.dtype} == {torch.float16, torch.bfloat16}:
        return torch.allclose(a, b, rtol=torch.finfo(torch.bfloat16).eps, atol=torch.finfo(torch.float16).tiny)
    coarser = max(dtype, parameter.dtype, key=lambda d: torch.finfo(d).eps)
    return torch.equal(a.to(coarser), b.to(coarser))


def _described(recorded: Mapping[str, Any]) -> str:
    name = recorded.get("name_or_path")
    return f"a {recorded['model_type']} model" + (f" ({name})" if name else "")


def _list(names: Collection[str]) -> str:
    shown = list(names)[:_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
