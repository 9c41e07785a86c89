"""Conversion of a transformers model in place, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tape_pe.convert.classes import check_converted, install, is_converted, uninstall
from tape_pe.convert.config import TapeConfig
from tape_pe.convert.layers import set_config
from tape_pe.convert.rules import new_rope_parameters, rebuild_rotary
from tape_pe.convert.structure import Structure, UnsupportedModelError, find_structure

Model = TypeVar("Model", bound=PreTrainedModel)

CHECK_TOKENS = 12


def tape_config(model: nn.Module) -> TapeConfig:
    """The options that a model was converted with.

    Raises:
        ValueError: it was not converted.
    """
    check_converted(model)
    values = getattr(getattr(model, "config", None), "tape", None)
    if values is None:
        raise ValueError(f"model={type(model).__name__}: a wrapper without the config of the converted model in it")
    return TapeConfig.from_dict(values)


def convert(model: Model, config: TapeConfig | None = None, *, check: bool = True) -> Model:
    """Puts TAPE into a pretrained model, in place; until it is trained, the model computes what it did before.

    The model keeps its class's behaviour (`generate`, caches, masks, attention implementations, checkpointing) and
    becomes a subclass that saves and loads its new weights, see `tape_pe.convert.classes`. All weights train
    afterwards; `tape_pe.freeze_base` leaves only the new ones.

    Args:
        model: a decoder-only language model of transformers with rotary positions.
        config: options, default `TapeConfig()`. Its `rope` is put in first, and `max_position_embeddings` multiplied by
            its factor; what stays the same is then the model with that rule.
        check: run a few tokens before and after, with eager attention, and refuse if logits moved (at all in fp32 and
            fp64, more than rounding below that and with `state_norm`).

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a model of transformers, or `config` no `TapeConfig`.
        ValueError: it was converted already, or a rule that it cannot have is asked for.
        UnsupportedModelError: its positions work in a way that TAPE cannot take over; the model is as it was.
    """
    config = TapeConfig() if config is None else config
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model={type(model).__name__}: a transformers.PreTrainedModel is needed (convert before PEFT)")
    if not isinstance(config, TapeConfig):
        raise TypeError(f"config={config!r}: a TapeConfig is needed")
    if is_converted(model):
        raise ValueError(f"model={type(model).__name__}: converted already; tape_pe.unconvert it first")
    structure = find_structure(model)
    with own_config(model):
        if config.rope is not None:
            _set_rope(structure, config.rope)
        before = _logits(model) if check else None
        install(model, structure, config)
        if before is not None:
            try:
                after = _logits(model)
            except Exception as error:  # other people's code, run in a way that it may not know
                raise UnsupportedModelError(
                    f"model={type(model).__name__}: its layers do not work like those of the decoders of "
                    f"transformers 5 ({type(error).__name__}: {error})"
                ) from error
            _check_equal(model, before, after, config)
    return model


def unconvert(model: Model) -> Model:
    """Takes TAPE out of a converted model, in place: what it was before, with its own weights as they are now.

    A rule that `convert` put in stays.

    Raises:
        TypeError: `model` is not a model of transformers itself, but a wrapper.
        ValueError: it was not converted.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model={type(model).__name__}: a transformers.PreTrainedModel is needed, without wrappers")
    check_converted(model)
    with own_config(model):
        uninstall(model)
    return model


@contextmanager
def own_config(model: PreTrainedModel) -> Iterator[None]:
    """For changes of a model's config, which another model may have as well: gives it a copy of its own.

    A decoder without a head keeps its config, because it may be the part of a model that has to know of the changes.
    After an error the model has its config and rotary table back, and TAPE is in it only if it was before.
    """
    decoder: Any = model.base_model
    config: Any = model.config
    was_converted, rotary = is_converted(model), decoder.rotary_emb
    kept = config.rope_parameters, config.max_position_embeddings
    if decoder is not model:
        set_config(model, copy.copy(config))
    try:
        yield
    except BaseException:
        if is_converted(model) and not was_converted:
            uninstall(model)
        decoder.rotary_emb = rotary
        set_config(model, config)
        config.rope_parameters, config.max_position_embeddings = kept
        raise


def _set_rope(structure: Structure, rule: Any) -> None:
    decoder: Any = structure.decoder
    form = next(plan.form for plan in structure.layers if plan.form is not None)
    decoder.config.rope_parameters = new_rope_parameters(rule, form.rotary_dim, decoder.config)
    decoder.config.max_position_embeddings = int(decoder.config.max_position_embeddings * rule["factor"])
    rebuild_rotary(decoder)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Output for a few tokens, with eager attention, in evaluation mode."""
    config = model.config
    device = model.get_input_embeddings().weight.device
    device = model.device if device.type == "meta" else device
    tokens = torch.arange(3, 3 + CHECK_TOKENS, device=device)[None] % config.vocab_size
    training, implementation = [m for m in model.modules() if m.training], config._attn_implementation
    model.eval()
    config._attn_implementation_internal = "eager"
    try:
        return model(input_ids=tokens, use_cache=False)[0].detach().cpu()
    finally:
        config._attn_implementation_internal = implementation
        for module in training:
            module.training = True


def _check_equal(model: PreTrainedModel, before: Tensor, after: Tensor, config: TapeConfig) -> None:
    difference = (after.double() - before.double()).abs().max().item()
    largest = before.double().abs().max().item()
    exact = before.dtype in (torch.float32, torch.float64) and config.state_norm == "none"
    eps = torch.finfo(before.dtype).eps
    allowed = 0.0 if exact else 64 * eps * largest
    if not difference <= allowed:  # NaN too
        raise UnsupportedModelError(
            f"model={type(model).__name__}: its outputs moved by {difference:.3g} (of {largest:.3g}, allowed "
            f"{allowed:.3g}) with TAPE at its start: it uses positions in a way that is not understood"
        )
