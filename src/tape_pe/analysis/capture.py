"""Records what every layer of a model attends to, and the position states that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tape_pe.convert.attention import LayerStates
from tape_pe.convert.layers import TapeDecoderLayer
from tape_pe.encodings.tape import WideRopeLayer
from tape_pe.models.decoder import DecoderLayer


@dataclass(frozen=True)
class LayerView:
    """One layer during one forward pass, in fp32 or wider.

    Attributes:
        attention: attention weights, `[B, H, N, N]` (query, key).
        state: the state that the layer reads, `[B, Hkv, N, Ds]`: `[cos | sin]`, Ds being the number of rotated channels
            D, or `[C | S]` with Ds = 2 D for the structures of TAPE whose two channels of a pair differ. `None` for
            layers without one, and for encodings whose queries and keys have tables of their own (xPos).
        start: the state that the first layer reads, in the same shape: what a RoPE would have in every layer.
        rope_attention: attention weights of this layer, the same input and weights given, if it read `start` instead,
            `[B, H, N, N]`; `None` where there is no state, or where it was not asked for.
    """

    attention: Tensor
    state: Tensor | None = None
    start: Tensor | None = None
    rope_attention: Tensor | None = None

    @property
    def moved(self) -> bool:
        """Whether the layer reads another state than the first one."""
        return self.state is not None and self.start is not None and not torch.equal(self.state, self.start)


@torch.no_grad()
def capture(
    model: Any, input_ids: Tensor, position_ids: Tensor | None = None, *, rope_attention: bool = False
) -> list[LayerView]:
    """Runs a causal language model once, in the mode that it is in, and records every layer.

    Args:
        model: this package's decoder, a converted model, or any other of transformers, whose attention alone is
            recorded then. A wrapper of PEFT around one of them is fine.
        input_ids: `[B, N]`, without padding.
        position_ids: `[B, N]` or `[1, N]`; default 0, 1, ..., N - 1.
        rope_attention: whether to record `LayerView.rope_attention`, which takes a second attention per layer.

    Raises:
        ValueError: `input_ids` has another shape, or the model does not hand out attention weights.
    """
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: [B, N] with at least one token is needed")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
    recorded: dict[int, dict[str, Any]] = {}
    positions = {} if position_ids is None else {"position_ids": position_ids.expand_as(input_ids)}
    with ExitStack() as hooks:
        hooks.enter_context(_eager(inner))
        for module in inner.modules():
            watch = next((hook for kind, hook in _WATCHED.items() if isinstance(module, kind)), None)
            if watch is not None:
                watch(module, recorded, rope_attention, lambda handle: hooks.callback(handle.remove))
        outputs = model(input_ids=input_ids, use_cache=False, output_attentions=True, **positions)
    attentions = getattr(outputs, "attentions", None)
    if not attentions or any(weights is None for weights in attentions):
        raise ValueError(f"model={type(inner).__name__}: it does not hand out attention weights")
    views = []
    for layer_idx, weights in enumerate(attentions):
        record = recorded.get(layer_idx, {})
        kv_shape = record.pop("kv_shape", None)
        for name in {"state", "start"} & set(record):
            record[name] = record[name].expand(*kv_shape, -1, -1)
        views.append(LayerView(_wide(weights), **{name: _wide(value) for name, value in record.items()}))
    return views


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32)).cpu()


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Attention that has its weights to show, for the time of one forward pass."""
    config, implementation = model.config, getattr(model.config, "_attn_implementation", None)
    config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        config._attn_implementation_internal = implementation


Keep = Callable[[Any], Any]
Records = dict[int, dict[str, Any]]


def _watch_decoder(layer: DecoderLayer, recorded: Records, rope_attention: bool, keep: Keep) -> None:
    """Of this package's decoder: its attention is given the state as an argument."""

    def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        hidden_states, state, bias, encoding, tokens, _, _ = arguments
        one_table = isinstance(encoding, WideRopeLayer) or (
            state is not None and state.shape[-1] == layer.self_attn.head_dim
        )
        if not one_table:
            return
        start = recorded[0]["state"] if recorded else state
        heads = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
        record = {"state": state, "start": start, "kv_shape": (hidden_states.shape[0], heads)}
        if rope_attention:
            record["rope_attention"] = (
                output[2]
                if start is state
                else module.forward(hidden_states, start, bias, encoding, tokens, None, True)[2]
            )
        recorded[layer.self_attn.layer_idx] = record

    keep(layer.self_attn.register_forward_hook(after))


def _watch_converted(layer: TapeDecoderLayer, recorded: Records, rope_attention: bool, keep: Keep) -> None:
    """Of a converted model: its attention is given the state within `tape`, in the place of its cache."""
    form, attention = layer.tape_form, cast(Any, layer.self_attn)
    if form is None:
        return
    starts: list[Tensor] = []

    def before(module: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        starts[:] = [form.start(*kwargs["position_embeddings"])]

    def after(module: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states, start = kwargs["tape"], starts[0]
        shape = (output[0].shape[0], form.kv_heads)
        record = {"state": states.state, "start": start, "kv_shape": shape}
        if rope_attention:
            at_start = LayerStates(start, form, states.averages, None)
            record["rope_attention"] = module.forward(*arguments, **{**kwargs, "cache": at_start, "tape": at_start})[1]
        recorded[attention.layer_idx] = record

    keep(layer.register_forward_pre_hook(before, with_kwargs=True))
    keep(attention.register_forward_hook(after, with_kwargs=True))


_WATCHED: dict[type, Callable[..., None]] = {DecoderLayer: _watch_decoder, TapeDecoderLayer: _watch_converted}
