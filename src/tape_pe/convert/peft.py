"""LoRA of PEFT on top of a converted model; needs the extra `peft` (`pip install "tape-pe[peft]"`).

    tape_pe.convert(model)
    peft_model = get_peft_model(model, lora_config(model, r=8))     # trains LoRA and TAPE's weights
    peft_model.save_pretrained("out")                               # both are in it
    PeftModel.from_pretrained(tape_pe.convert(base), "out")         # with the options of the first line

PEFT knows nothing of TAPE, and what is no adapter of its own it freezes and does not save, unless `modules_to_save`
names it. Each layer's `tape` is named there: PEFT puts a wrapper in its place, which holds the frozen original and the
copy that is trained, and hands calls and attributes on to whichever is active; `disable_adapter()` gives the base's
logits, `merge_and_unload()` puts the trained copy into the model. It also keeps LoRA out of `tape.gate_proj`, whose
name many lists of target modules contain.

PEFT's files do not say that the base was converted: convert it first, with the same options. For TAPE without LoRA,
`tape_pe.save_adapter` is smaller, stricter and needs no PEFT.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tape_pe.convert.classes import is_converted
from tape_pe.convert.layers import TapeDecoderLayer

MODULE = "tape"  # the attribute of `TapeDecoderLayer` that holds its weights


def attention_projections(model: nn.Module) -> list[str]:
    """Names of the linear layers in the attention of a converted model, such as `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    Found in the model, because PEFT's own table does not know types such as `tape_llama`.
    """
    attentions: list[Any] = [layer.self_attn for layer in model.modules() if isinstance(layer, TapeDecoderLayer)]
    children = [child for attention in attentions for child in attention.named_children()]
    return sorted({name for name, module in children if isinstance(module, nn.Linear)})


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
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError('lora_config needs PEFT: pip install "tape-pe[peft]"') from error
    if not is_converted(model):
        raise ValueError(f"model={type(model).__name__}: not converted by tape_pe.convert")
    if not any(isinstance(layer, TapeDecoderLayer) and layer.tape is not None for layer in model.modules()):
        raise ValueError(f"model={type(model).__name__}: no layer has weights of TAPE; PEFT's own LoraConfig will do")
    modules = [*(options.pop("modules_to_save", None) or ()), MODULE]
    defaults = {"task_type": "CAUSAL_LM", "target_modules": attention_projections(model)}
    return LoraConfig(**{**defaults, **options}, modules_to_save=list(dict.fromkeys(modules)))
