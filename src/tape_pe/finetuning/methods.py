"""The ways to extend a pretrained model: what each puts in, what it trains, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from tape_pe.convert import TapeConfig, convert, freeze_base, save_adapter
from tape_pe.convert.freeze import grouped_parameters, has_tied_embeddings
from tape_pe.convert.peft import attention_projections, lora_config
from tape_pe.convert.rules import changed_rope_parameters, new_rope_parameters, rope_of_full_attention
from tape_pe.finetuning.longlora import SHIFTED_SPARSE, register
from tape_pe.finetuning.options import PEFT_METHODS, TAPE_METHODS, FinetuneOptions
from tape_pe.language.pretrained import load_base, without_peft_warnings


def config_changes(options: FinetuneOptions, config: Any) -> dict[str, Any]:
    """The fields of a model's config that change: frequency rule and length.

    Raises:
        ValueError: the model has no rotary positions, or a rule already, or the rule cannot be.
    """
    config = config.get_text_config()
    longest, parameters = config.max_position_embeddings, getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"model={options.model!r}: a {config.model_type} without rope_parameters")
    factor = max(1.0, options.length / longest) if options.factor is None else float(options.factor)
    rule = options.rope or ("linear" if options.method != "theta" and factor > 1 else "none")
    changes: dict[str, Any] = {}
    if options.method == "theta":
        changes["rope_parameters"] = changed_rope_parameters(parameters, {"rope_theta": options.rope_theta})
        config = type(config).from_dict({**config.to_dict(), **changes})
    if rule != "none":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary_dim = int(head_dim * rope_of_full_attention(parameters).get("partial_rotary_factor", 1.0))
        asked = {"rope_type": rule, "factor": factor}
        try:
            changes["rope_parameters"] = new_rope_parameters(asked, rotary_dim, config)
        except ValueError as error:
            raise ValueError(f"{error}; --rope none keeps what the model has") from error
    changes["max_position_embeddings"] = max(longest, options.length)
    return changes


def build_model(options: FinetuneOptions, changes: dict[str, Any]) -> Any:
    """The pretrained model with the method put in; exactly what is to be trained requires a gradient.

    Raises:
        ValueError: the model cannot be loaded, or is not one that the method works on.
    """
    implementation = None
    if options.method == "longlora":
        register()
        implementation = SHIFTED_SPARSE
    model = load_base(options.model, config_changes=changes, attn_implementation=implementation)
    model.config.use_cache = False
    if options.method in TAPE_METHODS:
        convert(model, TapeConfig.from_dict(options.tape))
    if options.method in PEFT_METHODS:
        return _with_lora(model, options)
    if options.method == "tape":
        if not freeze_base(model, also_train=options.also_train).trained:
            raise ValueError(f"tape is {dict(options.tape)} and also_train is empty; there is nothing to train")
        return model
    return model.requires_grad_(True)


def save_model(model: Any, options: FinetuneOptions, folder: Path) -> None:
    """Writes what has been trained, or the whole model where all of it has."""
    model.config.use_cache = True
    if options.method == "tape":
        save_adapter(model, folder)
    elif options.method == "full":
        _save_whole(model, folder)
    else:
        model.save_pretrained(folder)


def _save_whole(model: Any, folder: Path) -> None:
    """`save_pretrained`, also of a model whose generation defaults transformers reads, but refuses to write.

    Many published models have such, a temperature without `do_sample` for instance. They are kept as they are.
    """
    generation = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = generation
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")


def _modules_of(model: Any, groups: tuple[str, ...]) -> list[str]:
    """Last parts of the names of the modules that hold these groups' parameters, as PEFT wants them."""
    wanted = {id(parameter) for group, parameter in grouped_parameters(model) if group in groups}
    hidden = model.get_output_embeddings() if has_tied_embeddings(model) else None  # PEFT ties it by itself
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module is not hidden and any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    }
    return sorted(names)


def _with_lora(model: Any, options: FinetuneOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    common: dict[str, Any] = {
        "r": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "modules_to_save": _modules_of(model, options.also_train) or None,
        "ensure_weight_tying": has_tied_embeddings(model) and "embed" in options.also_train,
    }
    if options.method in TAPE_METHODS:
        config = lora_config(model, **common)
    else:
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=attention_projections(model), **common)
    with without_peft_warnings():
        return get_peft_model(model, config)
