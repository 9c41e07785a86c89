"""The ways to extend a pretrained model: what each puts in, what it trains, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tape_pe.finetune_options import PEFT_METHODS, TAPE_METHODS, FinetuneOptions
from tape_pe.longlora import SHIFTED_SPARSE, register
from tape_pe.pretrained import load_base, without_peft_warnings

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linear layers of attention that LoRA changes, as published."""


class TrainedGroup(NamedTuple):
    """Parameters of one kind.

    Attributes:
        name: what they are.
        tensors: how many tensors of them are trained.
        parameters: how many numbers of them are trained.
        share: those in units of all numbers of the model.
    """

    name: str
    tensors: int
    parameters: int
    share: float


def config_changes(options: FinetuneOptions, config: Any) -> dict[str, Any]:
    """The fields of a model's config that change: frequency rule and length.

    Raises:
        ValueError: the model has no rotary positions, or a rule already, or the rule cannot be.
    """
    from tape_pe.convert.rules import new_rope_parameters

    config = config.get_text_config()
    longest, parameters = config.max_position_embeddings, getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"model is {options.model!r}, a {config.model_type} without rope_parameters")
    factor = max(1.0, options.length / longest) if options.factor is None else float(options.factor)
    rule = options.rope or ("linear" if options.method != "theta" and factor > 1 else "none")
    changes: dict[str, Any] = {}
    if options.method == "theta":
        changes["rope_parameters"] = _with_theta(parameters, options.rope_theta)
        config = type(config).from_dict({**config.to_dict(), **changes})
    if rule != "none":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        own = parameters.get("full_attention", parameters)
        rotary_dim = int(head_dim * own.get("partial_rotary_factor", 1.0))
        asked = {"rope_type": rule, "factor": factor}
        try:
            changes["rope_parameters"] = new_rope_parameters(asked, rotary_dim, config)
        except ValueError as error:
            raise ValueError(f"{error}; --rope none keeps what the model has") from error
    changes["max_position_embeddings"] = max(longest, options.length)
    return changes


def _with_theta(parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    if "full_attention" in parameters:
        return {**parameters, "full_attention": {**parameters["full_attention"], "rope_theta": theta}}
    return {**parameters, "rope_theta": theta}


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
    if options.method != "full":
        _check_names(model, options.also_train)
    if options.method == "full":
        return model.requires_grad_(True)
    if options.method in TAPE_METHODS:
        from tape_pe.convert import TapeConfig, convert, freeze_base

        model = convert(model, TapeConfig.from_dict(options.tape))
        if options.method == "tape":
            freeze_base(model, also_train=options.also_train)
            return model
    return _with_lora(model, options)


def save_model(model: Any, options: FinetuneOptions, folder: Path) -> None:
    """Writes what has been trained, or the whole model where all of it has."""
    model.config.use_cache = True
    if options.method == "tape":
        from tape_pe.convert import save_adapter

        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)


def trained_groups(model: nn.Module) -> list[TrainedGroup]:
    """What requires a gradient, by kind, and the sum."""
    total = sum(parameter.numel() for parameter in model.parameters())
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            count = counts.setdefault(_kind(name), [0, 0])
            count[0] += 1
            count[1] += parameter.numel()
    counts["together"] = [sum(count[column] for count in counts.values()) for column in range(2)]
    return [TrainedGroup(name, tensors, numbers, numbers / total) for name, (tensors, numbers) in counts.items()]


def trained_table(model: nn.Module) -> str:
    """`trained_groups` as text."""
    rows = [("trained", "tensors", "parameters", "share")]
    rows += [(g.name, f"{g.tensors:,}", f"{g.parameters:,}", f"{g.share:.2%}") for g in trained_groups(model)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def _kind(name: str) -> str:
    parts = name.split(".")
    kinds = {"lora_": "LoRA", "tape": "TAPE", "embed": "embeddings", "norm": "norms", "lm_head": "output layer"}
    for word, kind in kinds.items():
        if any(part.startswith(word) or (word == "norm" and word in part) for part in parts):
            return kind
    return "attention" if any("attn" in part for part in parts) else "mlp" if "mlp" in parts else "others"


def _named(model: nn.Module, word: str) -> list[str]:
    """Last parts of the names of modules with weights of their own that have `word` in it."""
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if word in name.rpartition(".")[2] and next(module.parameters(recurse=False), None) is not None
    }
    return sorted(names)


def _check_names(model: nn.Module, words: tuple[str, ...]) -> None:
    for word in words:
        if not _named(model, word):
            raise ValueError(f"also_train is {word!r}, which is in the name of no module with weights")


def _with_lora(model: Any, options: FinetuneOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    assert options.method in PEFT_METHODS
    targets = [name for name in PROJECTIONS if _named(model, name)]
    if not targets:
        raise ValueError(f"model is {options.model!r}, which has none of the layers {', '.join(PROJECTIONS)}")
    trained = sorted({name for word in options.also_train for name in _named(model, word)})
    if options.method in TAPE_METHODS:
        trained.append("tape")
    embeddings = model.get_input_embeddings()
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embeddings.weight
    own = next(name for name, module in model.named_modules() if module is embeddings).rpartition(".")[2]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules=targets,
        modules_to_save=trained or None,
        ensure_weight_tying=tied and own in trained,
    )
    with without_peft_warnings():
        return get_peft_model(model, config)
