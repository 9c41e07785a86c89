"""Finds the parts of a transformers model that TAPE goes into, and says why a model cannot have it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tape_pe.convert.form import RotaryForm
from tape_pe.convert.layers import private_config

PROBE_TOKENS = 5


class UnsupportedModelError(ValueError):
    """A model that cannot have TAPE without changing what it computes; the message names the reason."""


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer.

    Attributes:
        layer: the module.
        form: how it rotates; `None` for a layer without rotary positions (NoPE).
        table: name of its rotary table, for models with several (Gemma 3); `None` if there is one.
        updates: whether it updates states: a later layer reads them.
    """

    layer: nn.Module
    form: RotaryForm | None
    table: str | None
    updates: bool


@dataclass(frozen=True)
class Structure:
    """A decoder that can be converted.

    Attributes:
        decoder: the module with embeddings, `layers` and `rotary_emb`.
        layers: its layers, in order.
        tables: names of its rotary tables that layers use.
    """

    decoder: nn.Module
    layers: tuple[LayerPlan, ...]
    tables: tuple[str | None, ...]

    def read_after(self, index: int) -> tuple[bool, ...]:
        """For each table, whether a layer after `index` rotates by it."""
        later = {plan.table for plan in self.layers[index + 1 :] if plan.form is not None}
        return tuple(table in later for table in self.tables)


def find_decoder(model: PreTrainedModel) -> Any:
    """The part of a model that has layers and a rotary table.

    Raises:
        UnsupportedModelError: there is none, or the model is not a decoder-only text model.
    """
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model={name}: an encoder-decoder; TAPE is for decoder-only models")
    if config.get_text_config() is not config:
        raise UnsupportedModelError(f"model={name}: it has several parts; convert its text model alone")
    decoder = model.base_model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(decoder, "rotary_emb", None), nn.Module):
        raise UnsupportedModelError(f"model={name}: its decoder has no `layers` and `rotary_emb`: no rotary positions")
    if decoder.config is not config:
        raise UnsupportedModelError(f"model={name}: its decoder has a config of its own")
    for index, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        if not isinstance(attention, nn.Module) or not isinstance(getattr(layer, "mlp", None), nn.Module):
            raise UnsupportedModelError(
                f"model={name}: layer {index} ({type(layer).__name__}) has no `self_attn` and `mlp`"
            )
        if not getattr(attention, "is_causal", True):
            raise UnsupportedModelError(f"model={name}: layer {index} attends in both directions (an encoder)")
        parameters = inspect.signature(type(layer).forward).parameters
        for argument in ("position_embeddings", "cache"):
            if argument not in parameters:
                raise UnsupportedModelError(
                    f"model={name}: layer {index} ({type(layer).__name__}) takes no {argument}: "
                    "not built like the decoders of transformers 5"
                )
    return decoder


def find_structure(model: PreTrainedModel) -> Structure:
    """Everything that conversion needs to know, found without changing the model.

    Raises:
        UnsupportedModelError: see `find_decoder` and `probe_form`.
    """
    decoder = find_decoder(model)
    forms = []
    for index, table in enumerate(_tables(decoder)):
        try:
            forms.append(probe_form(decoder, decoder.layers[index], table))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"model={type(model).__name__}: layer {index} {error}") from None
        except Exception as error:  # other people's code, called in a way that it may not know
            raise UnsupportedModelError(
                f"model={type(model).__name__}: layer {index} has attention that does not work like that of the "
                f"decoders of transformers 5 ({type(error).__name__}: {error})"
            ) from error
    if not any(forms):
        raise UnsupportedModelError(f"model={type(model).__name__}: no layer rotates queries and keys")
    return build_structure(decoder, forms)


def build_structure(decoder: Any, forms: Sequence[RotaryForm | None]) -> Structure:
    """The structure of a decoder whose layers rotate in these forms."""
    tables = _tables(decoder)
    last = {table: i for i, (table, form) in enumerate(zip(tables, forms, strict=True)) if form is not None}
    plans = tuple(
        LayerPlan(decoder.layers[i], form, tables[i], form is not None and i < last[tables[i]])
        for i, form in enumerate(forms)
    )
    return Structure(decoder, plans, tuple(last))


def _tables(decoder: Any) -> list[str | None]:
    """For each layer, the name of its rotary table."""
    config = decoder.config
    if "layer_type" in inspect.signature(type(decoder.rotary_emb).forward).parameters:
        return list(config.layer_types[: config.num_hidden_layers])
    return [None] * config.num_hidden_layers


class _Probe:
    """Stands in for `LayerStates` and records queries and keys as they come to attention."""

    def __init__(self) -> None:
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.entered: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.entered = key
        return key, value

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.query, self.key = query, key
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@contextmanager
def _private_attention(attention: nn.Module) -> Iterator[None]:
    config = attention.config
    attention.config = private_config(config)
    try:
        yield
    finally:
        attention.config = config


def _record(attention: nn.Module, hidden_states: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    probe = _Probe()
    with _private_attention(attention):
        attention(
            hidden_states=hidden_states,
            position_embeddings=tables,
            attention_mask=None,
            cache=probe,
            position_ids=torch.arange(hidden_states.shape[1], device=hidden_states.device)[None],
            tape=probe,
        )
    if probe.query is None or probe.entered is None:
        raise UnsupportedModelError("does not send its queries and keys through transformers' attention and cache")
    if probe.key is not probe.entered:
        raise UnsupportedModelError("changes its keys after they enter the cache")
    return probe.query, probe.key


@torch.no_grad()
def probe_form(decoder: Any, layer: Any, table: str | None) -> RotaryForm | None:
    """How a layer rotates, found by comparing what it does with the model's tables to what it does without rotation.

    Returns:
        The form, or `None` for a layer that ignores positions.

    Raises:
        UnsupportedModelError: its queries and keys with positions are no rotation of those without (a norm stands
            after RoPE, pairs are formed in an unknown way, ...).
    """
    attention = layer.self_attn
    weight = next(attention.parameters())
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    device = weight.device if device is None else torch.device(device)
    if device.type == "meta":
        raise UnsupportedModelError("has its weights on the meta device: load them first")
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, PROBE_TOKENS, decoder.config.hidden_size, generator=generator).to(device, dtype)
    positions = torch.arange(1, PROBE_TOKENS + 1, device=device)[None]
    arguments = () if table is None else (table,)
    cos, sin = decoder.rotary_emb(hidden_states, positions, *arguments)
    cos, sin = cos.to(device), sin.to(device)
    rotated = _record(attention, hidden_states, (cos, sin))
    plain = _record(attention, hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)))
    query, key = plain
    if not (query.isfinite().all() and key.isfinite().all()):
        raise UnsupportedModelError("computes queries or keys that are not finite: its weights are damaged")
    if all(torch.equal(a, b) for a, b in zip(rotated, plain, strict=True)):
        return None
    width = cos.shape[-1]
    if width % 2 or width > query.shape[-1] or query.shape[1] % key.shape[1]:
        raise UnsupportedModelError(
            f"has rotary tables of {width} channels for heads of {query.shape[-1]}, {query.shape[1]} query heads "
            f"and {key.shape[1]} key heads: not understood"
        )
    for interleaved, interleaved_tables in itertools.product((False, True), repeat=2):
        form = RotaryForm(query.shape[1], key.shape[1], width, interleaved, interleaved_tables)
        state = form.start(cos, sin)
        if all(_agree(form.rotate(u, state), r) for u, r in zip(plain, rotated, strict=True)):
            return form
    raise UnsupportedModelError(
        "does something to queries and keys after RoPE (such as a norm), or rotates them in a way that is neither of "
        "half-split nor of interleaved pairs"
    )


def _agree(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, or in half precision, where models round in different places, up to rounding."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.equal(a, b)
    return torch.allclose(a.float(), b.float(), rtol=0.0, atol=4 * torch.finfo(a.dtype).eps * float(b.abs().max()))
