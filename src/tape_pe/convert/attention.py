"""Attention of converted layers: the model's own, on rotated queries and keys, that averages states as well."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from tape_pe.convert.form import RotaryForm
from tape_pe.ops import positional_attention

# What converted attention layers call; the model's own choice stays in its config.
IMPLEMENTATION = "tape"


class Attending(Protocol):
    """What a converted layer hands to its attention as `cache` and as `tape`."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]: ...


class LayerStates:
    """The states of one layer during one forward pass.

    It stands where the attention expects its cache: keys are rotated where they enter it, and cached values are
    widened by the states, `[v | z]`, so that every cache of transformers keeps, crops and reorders them together.

    Attributes:
        averaged: after attention, its average of the states per query head, `[B, H, N, Dr]`; `None` unless asked for.
    """

    def __init__(self, state: Tensor, form: RotaryForm, averages: bool, cache: Any) -> None:
        self.state = state
        self.form = form
        self.averages = averages
        self.cache = cache
        self.averaged: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotated keys `[B, Hkv, Nk, D]` and values `[B, Hkv, Nk, Dv]` or, with a cache, wide ones, of all tokens."""
        key = self.form.rotate(key, self.state)
        if self.cache is None:
            return key, value
        if self.averages:
            value = torch.cat([value, self._expanded(value)], dim=-1)
        return self.cache.update(key, value, layer_idx)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, N, H, Dv]` and, from implementations that have them, the attention weights."""
        query = self.form.rotate(query, self.state)
        if not self.averages:
            return _implementation_of(module)(module, query, key, value, attention_mask, **kwargs)
        if self.cache is None:
            state = self._expanded(value)
        else:
            value, state = value.split([value.shape[-1] - self.form.rotary_dim, self.form.rotary_dim], dim=-1)
        output, self.averaged, weights = _attend(module, query, key, value, state, attention_mask, kwargs)
        return output, weights

    def _expanded(self, value: Tensor) -> Tensor:
        """The states of the new tokens as values, `[B, Hkv, N, Dr]`."""
        return self.state.to(value.dtype).expand(*value.shape[:2], -1, -1)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, state: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, N, H, Dv]`, averaged state `[B, H, N, Dr]` and weights."""
    attention, implementation = _implementation_of(module), module.config.base._attn_implementation
    if implementation == "eager":
        # The output is the model's own to the last bit: a wider product could be rounded in another way.
        output, weights = attention(module, query, key, value, mask, **kwargs)
        assert weights is not None
        grouped = weights.unflatten(1, (state.shape[1], -1))
        return output, torch.matmul(grouped, state[:, :, None]).flatten(1, 2), weights
    if implementation == "flex_attention" or kwargs.get("dropout"):
        # One call, with one set of weights; dropout must drop the same ones for values and states.
        wide, weights = attention(module, query, key, torch.cat([value, state], dim=-1), mask, **kwargs)
        output, averaged = wide.split([value.shape[-1], state.shape[-1]], dim=-1)
        return output, averaged.transpose(1, 2), weights
    if implementation == "sdpa" and mask is None and _is_plain(module, query, kwargs):
        # Without a mask, of several new tokens the first keys are theirs (transformers' convention for static caches).
        length = query.shape[2] if query.shape[2] > 1 else key.shape[2]
        # Under autocast, rotated queries and keys are wider than values; sdpa would round them in the same way.
        query, key = query.to(value.dtype), key.to(value.dtype)
        result = positional_attention(
            query, key[:, :, :length], value[:, :, :length], state[:, :, :length], scale=kwargs.get("scaling")
        )
        assert result.averaged_state is not None
        return result.output.transpose(1, 2), result.averaged_state, None
    # sdpa on CPU and flash kernels want values as wide as keys, or narrower: wider ones would be slow, or cut off.
    output, weights = attention(module, query, key, value, mask, **kwargs)
    averaged, _ = attention(module, query, key, state, mask, **kwargs)
    return output, averaged.transpose(1, 2), weights


def _is_plain(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this is causal attention with nothing but a scale, on a device where this package's own is faster."""
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    extras = ("softcap", "position_bias", "s_aux")
    return query.device.type == "cpu" and bool(is_causal) and all(kwargs.get(name) is None for name in extras)


def _implementation_of(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that the model's config asks for."""
    modeling = sys.modules[type(module).__module__]
    eager = getattr(modeling, "eager_attention_forward", eager_attention_forward)
    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config.base._attn_implementation, eager)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    tape: Attending,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers' attention layers call, see `LayerStates.attend`."""
    return tape.attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
