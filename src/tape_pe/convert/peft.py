"""LoRA of PEFT on top of a converted model; needs the extra `peft` (`pip install "tape-pe[peft]"`).

    tape_pe.convert(model)
    peft_model = get_peft_model(model, lora_config(model, r=8))     # trains LoRA and TAPE's weights
    peft_model.save_pretrained("out")                               # both are in it
    load_lora(tape_pe.convert(base), "out")                         # with the options of the first line

PEFT knows nothing of TAPE, and what is no adapter of its own it freezes and does not save, unless `modules_to_save`
names it. Each layer's `tape` is named there: PEFT puts a wrapper in its place, which holds the frozen original and the
copy that is trained, and hands calls and attributes on to whichever is active; `disable_adapter()` gives the base's
logits up to rounding, `merge_and_unload()` puts the trained copy into the model. It also keeps LoRA out of
`tape.gate_proj`, whose name many lists of target modules contain.

PEFT's files do not say that the base was converted, nor how, and `PeftModel.from_pretrained` drops TAPE's weights in
silence where the base has no place for them. `load_lora` is the same call with that check. For TAPE without LoRA,
`tape_pe.save_adapter` is stricter still and needs no PEFT.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from tape_pe.convert.classes import check_converted
from tape_pe.convert.fingerprint import tape_names
from tape_pe.convert.layers import TapeDecoderLayer

MODULE = "tape"  # the attribute of `TapeDecoderLayer` that holds its weights


def attention_projections(model: nn.Module) -> list[str]:
    """Names of the linear layers in a decoder's attention, such as `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    Found in the model, because PEFT's own table does not know types such as `tape_llama`.

    Args:
        model: a model, converted or not.

    Raises:
        ValueError: no layer has a `self_attn` with linear layers.
    """
    attentions = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "self_attn"]
    found = {name for attention in attentions for name, m in attention.named_children() if isinstance(m, nn.Linear)}
    if not found:
        raise ValueError(f"model={type(model).__name__}: no layer has a self_attn with linear layers for LoRA")
    return sorted(found)


def lora_config(model: nn.Module, **options: Any) -> Any:
    """A `peft.LoraConfig` with which `get_peft_model` trains and saves LoRA and TAPE's weights.

    Args:
        model: a converted model, without PEFT's layers.
        options: those of `peft.LoraConfig`. Defaults: `task_type="CAUSAL_LM"`, and as `target_modules` the model's
            `attention_projections`. `modules_to_save` is extended by TAPE's modules.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: `model` is not converted, or has no TAPE weights (both updates are off).
    """
    peft = _peft()
    check_converted(model)
    if not any(isinstance(layer, TapeDecoderLayer) and layer.tape is not None for layer in model.modules()):
        raise ValueError(f"model={type(model).__name__}: no layer has weights of TAPE; PEFT's own LoraConfig will do")
    modules = [*(options.pop("modules_to_save", None) or ()), MODULE]
    defaults = {"task_type": "CAUSAL_LM", "target_modules": attention_projections(model)}
    return peft.LoraConfig(**{**defaults, **options}, modules_to_save=list(dict.fromkeys(modules)))


def load_lora(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> Any:
    """`PeftModel.from_pretrained`, which first checks that the model has a place for every weight of TAPE in the file.

    Args:
        model: the base, converted with the options of the one that was trained; it is wrapped in place.
        folder: what the `save_pretrained` of a PEFT model wrote.
        options: those of `PeftModel.from_pretrained`, such as `is_trainable=True`.

    Returns:
        The `peft.PeftModel`.

    Raises:
        ImportError: PEFT is not installed.
        FileNotFoundError: `folder` has no `adapter_model.safetensors`.
        ValueError: the file is damaged, or TAPE's weights in it and in the model differ in names or shapes; the model
            is as it was.
    """
    peft = _peft()
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no adapter of PEFT")
    prefix = "base_model.model."
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if f".{MODULE}." in name]  # noqa: SIM118  (not a dict)
            saved = {name.removeprefix(prefix): tuple(file.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    parameters = dict(model.named_parameters())
    own = {name: tuple(parameters[name].shape) for name in tape_names(model)}
    if saved != own:
        name = sorted(name for name in {*saved, *own} if saved.get(name) != own.get(name))[0]
        places = (f"{shapes[name]}" if name in shapes else "nothing" for shapes in (saved, own))
        raise ValueError(
            "{}: {} is {} there and {} in the model; convert the base with the options of the trained one".format(
                path, name, *places
            )
        )
    return peft.PeftModel.from_pretrained(model, folder, **options)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError('PEFT is needed: pip install "tape-pe[peft]"') from error
    return peft
