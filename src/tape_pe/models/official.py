"""Reads checkpoints of the released research code (VITA-Group/TAPE) into this library's decoder.

Only shapes, names and equations of that code are used here; they are recorded with its outputs in `tests/data/parity`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tape_pe.models.configuration import TapeLMConfig
from tape_pe.models.decoder import TapeLMForCausalLM
from tape_pe.ops import rotary_frequencies

# rpe_type of the released configs -> encoding and its fixed options.
_TAPE = {"head_mixing": "diagonal", "gate_input": "mlp_output"}
ENCODING_OF_RPE_TYPE: dict[str, tuple[str, dict[str, Any]]] = {
    "adape": ("tape", _TAPE),
    "adamlp": ("tape", {**_TAPE, "update_attention": False}),
    "adattention": ("tape", {**_TAPE, "update_mlp": False}),
    "adatensor": ("tape", {**_TAPE, "structure": "components"}),
    "adavector": ("tape", {**_TAPE, "structure": "channels"}),
    "adawoeq": ("tape", {**_TAPE, "structure": "unstructured"}),
    "adayarn": ("tape", {**_TAPE, "trainable_frequencies": True}),
    "rope": ("rope", {}),
    "yarn": ("rope", {}),
    "nope": ("nope", {}),
    "sincos": ("sinusoidal", {}),
    "xpos": ("xpos", {}),
    "randrope": ("randomized", {}),
    "alibi": ("alibi", {}),
    "fire": ("fire", {}),
    "t5rb": ("t5", {"shared": False}),
}
_FREQUENCY_RULES = ("linear", "dynamic")
# These two have YaRN as their frequency rule, whatever `rope_scaling.factor` says.
_YARN = {"yarn": "yarn", "adayarn": "dynamic_yarn"}
# Released names of the position parameters -> ours, within a layer.
_LAYER_NAMES = {
    "pe.x_proj.weight": "encoding.gate_proj.weight",
    "pe.up_proj.weight": "encoding.up",
    "pe.down_proj.weight": "encoding.down",
    "post_attention_linear.weight": "encoding.mix",
}
# The same where cosines (0) and sines (1) have weights of their own, which are one parameter here.
_COMPONENT_NAMES = {
    f"{stem}.{component}.weight": (inner, component)
    for stem, inner in (
        ("pe.up_projs", "encoding.up"),
        ("pe.down_projs", "encoding.down"),
        ("post_attention_linears", "encoding.mix"),
    )
    for component in (0, 1)
}
_FREQUENCIES = "model.rotary_emb.inv_freq"
_FIRE_NAMES = {
    "self_attn.rotary_emb.c": "encoding.c",
    "self_attn.rotary_emb.L_multiplier": "encoding.length_factor",
    "self_attn.rotary_emb.mlp.0.weight": "encoding.hidden_weight",
    "self_attn.rotary_emb.mlp.0.bias": "encoding.hidden_bias",
    "self_attn.rotary_emb.mlp.2.weight": "encoding.out_weight",
    "self_attn.rotary_emb.mlp.2.bias": "encoding.out_bias",
}
# Constants that the released code stores, and that are options here or follow from the sizes.
_FIRE_LENGTH = "self_attn.rotary_emb.init_L"
_CONSTANTS = ("inv_freq", "self_attn.alibi", _FIRE_LENGTH)


def load_official(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TapeLMForCausalLM:
    """Builds a decoder that computes what the released code computes.

    Args:
        config: the released model's `config.json`, with its `rpe_type`.
        state_dict: its weights.

    Returns:
        The model, in evaluation mode, in the dtype of the weights.

    Raises:
        ValueError: an `rpe_type` or frequency rule that is not read, a missing key of the config, or weights that are
            missing, unexpected, misshapen or not finite. The message names them.
    """
    converted_config = _convert_config(config, state_dict)
    model = TapeLMForCausalLM(converted_config).to(state_dict["model.norm.weight"].dtype)
    weights = _convert_weights(state_dict, converted_config)
    expected = dict(model.named_parameters())
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for problem, names in (
        ("missing", expected.keys() - weights.keys()),
        ("unexpected", weights.keys() - expected.keys()),
        ("misshapen", {name for name in expected.keys() & weights if expected[name].shape != weights[name].shape}),
        ("not finite", {name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())}),
    ):
        if names:
            raise ValueError(f"state_dict: {problem} weights (under their new names): {sorted(names)}")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.eval()


def _convert_config(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TapeLMConfig:
    rpe_type = config.get("rpe_type")
    if rpe_type not in ENCODING_OF_RPE_TYPE:
        raise ValueError(f"rpe_type={rpe_type!r}: those that are read are {', '.join(ENCODING_OF_RPE_TYPE)}")
    encoding, options = ENCODING_OF_RPE_TYPE[rpe_type]
    options = dict(options)
    if encoding == "tape" and options.get("update_mlp", True):
        options["position_size"] = _required(config, "position_size")
    if encoding == "rope" and config.get("log_scale"):
        options["log_scale"] = _required(config, "train_scale")
    if encoding == "fire":
        options |= _fire_options(state_dict)
    if encoding == "t5":
        options |= _t5_options(state_dict, _required(config, "num_attention_heads"))
    optional = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "initializer_range")
    return TapeLMConfig(
        encoding=encoding,
        encoding_options=options,
        rope_parameters=_convert_frequency_rule(config),
        **{
            name: _required(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "hidden_act",
                "max_position_embeddings",
                "rms_norm_eps",
            )
        },
        **{name: config[name] for name in optional if name in config},
    )


def _convert_frequency_rule(config: Mapping[str, Any]) -> dict[str, Any]:
    rpe_type, scaling = config["rpe_type"], config.get("rope_scaling")
    rule: dict[str, Any] = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    name = scaling.get("type") if scaling else None
    if rpe_type in _YARN:
        if scaling and name != "yarn":
            raise ValueError(f"rope_scaling.type={name!r}: rpe_type={rpe_type!r} has its own rule, yarn")
        original = _required(config, "original_max_position_embeddings")
        factor = _required(config, "max_position_embeddings") / original
        rule |= {
            "rope_type": _YARN[rpe_type],
            "factor": float(math.ceil(factor)) if rpe_type == "yarn" else factor,
            "original_max_position_embeddings": original,
        }
    elif scaling:
        if name not in _FREQUENCY_RULES:
            raise ValueError(f"rope_scaling.type={name!r}: those that are read are {', '.join(_FREQUENCY_RULES)}")
        rule |= {"rope_type": name, "factor": _required(scaling, "factor")}
    return rule


def _fire_options(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """L0 and the width of the MLP, which the released config does not hold."""
    lengths = {weight.item() for name, weight in state_dict.items() if name.endswith(_FIRE_LENGTH)}
    if len(lengths) != 1:
        raise ValueError(f"state_dict: {_FIRE_LENGTH} has the values {sorted(lengths)}: one for all layers is needed")
    widths = [weight.shape[0] for name, weight in state_dict.items() if name.endswith("rotary_emb.mlp.0.weight")]
    return {"initial_length": lengths.pop(), **({"hidden_width": widths[0]} if widths else {})}


def _t5_options(state_dict: Mapping[str, Tensor], heads: int) -> dict[str, Any]:
    """The number of buckets, which the released config does not hold; the largest distance is T5's, 128."""
    tables = [weight for name, weight in state_dict.items() if _is_bucket_table(name, weight, heads)]
    return {"num_buckets": tables[0].shape[0]} if tables else {}


def _is_bucket_table(name: str, weight: Tensor, heads: int) -> bool:
    """Whether a weight of a `t5rb` checkpoint is a table of buckets, `[num_buckets, H]`.

    No checkpoint of this kind was at hand, so the table's name is not known: it is the one matrix of this shape in a
    layer's attention that is not a projection.
    """
    _, inner = _split_layer(name)
    return inner.startswith("self_attn.") and "_proj." not in inner and weight.ndim == 2 and weight.shape[1] == heads


def _required(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise ValueError(f"{name}: missing in the released config")
    return config[name]


def _convert_weights(state_dict: Mapping[str, Tensor], config: TapeLMConfig) -> dict[str, Tensor]:
    """Renames weights; drops stored constants (frequencies unless they are trained ones), and the last layer's position
    weights, whose result nobody reads."""
    last_layer = f"model.layers.{config.num_hidden_layers - 1}."
    options = config.encoding_options or {}
    weights: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, weight in state_dict.items():
        if name == _FREQUENCIES and options.get("trainable_frequencies"):
            weights["model.encoding.frequency_shift"] = _frequency_shift(weight, config)
        if name.endswith(_CONSTANTS):
            continue
        layer, inner = _split_layer(name)
        component = None
        if inner in _LAYER_NAMES or inner in _COMPONENT_NAMES:
            if layer == last_layer:
                continue
            inner, component = _COMPONENT_NAMES.get(inner) or (_LAYER_NAMES[inner], None)
        elif config.encoding == "fire" and inner in _FIRE_NAMES:
            inner = _FIRE_NAMES[inner]
            weight = weight.reshape(weight.shape or (1,))
        elif config.encoding == "t5" and _is_bucket_table(name, weight, config.num_attention_heads):
            inner = "encoding.buckets.table"
            if layer + inner in weights:
                raise ValueError(f"state_dict: {name} is a second table of buckets in its layer: one is needed")
        if inner == "encoding.mix":
            # The released layer multiplies head h (or channel d) by sum_e P[h, e]: one scale each.
            weight = weight.sum(dim=1, keepdim=options.get("structure") != "channels")
        if component is None:
            weights[layer + inner] = weight.detach().clone()
        else:
            parts.setdefault(layer + inner, {})[component] = weight.detach()
    for name, found in parts.items():
        if len(shapes := {tuple(weight.shape) for weight in found.values()}) > 1:
            raise ValueError(f"state_dict: the parts of {name} have the shapes {sorted(shapes)}: equal ones are needed")
        weights[name] = torch.stack([found[component] for component in sorted(found)])
    return weights


def _frequency_shift(frequencies: Tensor, config: TapeLMConfig) -> Tensor:
    """ln(w / base frequency) of trained frequencies w `[D / 2]`, which must be positive."""
    sizes = config.encoding_sizes()
    base = rotary_frequencies(sizes.head_dim, theta=sizes.rope_parameters["rope_theta"]).inverse
    if frequencies.shape != base.shape or not bool((frequencies > 0).all()):
        raise ValueError(
            f"state_dict[{_FREQUENCIES!r}]={frequencies.tolist()}: {len(base)} positive frequencies are needed"
        )
    return (frequencies.double() / base.to(frequencies.device)).log()


def _split_layer(name: str) -> tuple[str, str]:
    """`"model.layers.3.mlp.up_proj.weight"` -> `("model.layers.3.", "mlp.up_proj.weight")`."""
    if not name.startswith("model.layers."):
        return "", name
    index = name.split(".", 3)[2]
    prefix = f"model.layers.{index}."
    return prefix, name.removeprefix(prefix)


def import_official(checkpoint_dir: str | Path, out_dir: str | Path) -> TapeLMForCausalLM:
    """Converts a checkpoint folder of the released code into one that `AutoModelForCausalLM` loads.

    Args:
        checkpoint_dir: holds `config.json`, and `*.safetensors` or `pytorch_model*.bin` (read with
            `weights_only=True`).
        out_dir: where the converted model goes.

    Raises:
        FileNotFoundError: no config or no weights in `checkpoint_dir`.
        ValueError: see `load_official`.
    """
    checkpoint_dir = Path(checkpoint_dir)
    config_file = checkpoint_dir / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"checkpoint_dir={str(checkpoint_dir)!r}: holds no config.json")
    state_dict: dict[str, Tensor] = {}
    files = sorted(checkpoint_dir.glob("*.safetensors")) or sorted(checkpoint_dir.glob("pytorch_model*.bin"))
    for path in files:
        try:
            state_dict |= (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(path, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"checkpoint_dir: {path} is damaged, or not a file of weights ({error})") from error
    if not state_dict:
        raise FileNotFoundError(
            f"checkpoint_dir={str(checkpoint_dir)!r}: holds neither *.safetensors nor *.bin weights"
        )
    model = load_official(json.loads(config_file.read_text(encoding="utf-8")), state_dict)
    model.save_pretrained(out_dir)
    return model
