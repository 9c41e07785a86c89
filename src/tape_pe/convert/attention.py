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

from tape_pe.convert.caches import Seen, update_cache
from tape_pe.convert.form import RotaryForm
from tape_pe.convert.masks import Visibility, visibility
from tape_pe.ops import positional_attention
from tape_pe.ops.backends import select_backend

# What converted attention layers call; the model's own choice stays in its config.
IMPLEMENTATION = "tape"
# What transformers' attention functions can be asked for and this package's cannot do.
EXTRAS = ("softcap", "position_bias", "s_aux")


class Attending(Protocol):
    """What a converted layer hands to its attention as `cache` and as `tape`."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]: ...


class LayerStates:
    """The states of one layer during one forward pass.

    It stands where the attention expects its cache, because keys are rotated where they enter it.

    Attributes:
        averaged: after attention, its average of the states per query head, `[B, H, N, Dr]`; `None` unless asked for.
    """

    def __init__(self, state: Tensor, form: RotaryForm, averages: bool, cache: Any) -> None:
        self.state = state
        self.form = form
        self.averages = averages
        self.cache = cache
        self.averaged: Tensor | None = None
        self.seen: Seen | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotated keys `[B, Hkv, Nk, D]` and values `[B, Hkv, Nk, Dv]` of all tokens."""
        key = self.form.rotate(key, self.state)
        state = self.state.to(value.dtype) if self.averages else None
        if self.cache is None:
            self.seen = Seen(key, value, state)
        else:
            self.seen = update_cache(self.cache, key, value, state, layer_idx)
        return self.seen.key, self.seen.value

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, N, H, Dv]` and, from implementations that have them, the attention weights."""
        query = self.form.rotate(query, self.state)
        if not self.averages:
            return _implementation_of(module)(module, query, key, value, attention_mask, **kwargs)
        assert self.seen is not None
        output, self.averaged, weights = _attend(
            module, query, self.seen._replace(key=key, value=value), attention_mask, kwargs
        )
        return output, weights


def _attend(
    module: Any, query: Tensor, seen: Seen, mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, N, H, Dv]`, averaged state `[B, H, N, Dr]` and weights."""
    key, value, state, wide = seen
    assert state is not None
    implementation, backend = module.config.base._attn_implementation, select_backend(query.device).name
    plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in EXTRAS)
    if implementation == "sdpa" and plain and backend != "sdpa":
        output, averaged = _as_sdpa(module, query, seen, mask, kwargs, joined=backend == "blockwise")
        return output.transpose(1, 2), averaged, None
    attention = _implementation_of(module)
    state = state.expand(*value.shape[:2], -1, -1)
    if implementation == "eager":
        # The output is the model's own to the last bit: a wider product could be rounded in another way.
        output, weights = attention(module, query, key, value, mask, **kwargs)
        assert weights is not None
        grouped = weights.unflatten(1, (state.shape[1], -1))
        return output, torch.matmul(grouped, state[:, :, None]).flatten(1, 2), weights
    if implementation == "flex_attention" or kwargs.get("dropout"):
        # One call, with one set of weights; dropout must drop the same ones for values and states.
        wide = torch.cat([value, state], dim=-1) if wide is None else wide
        output, weights = attention(module, query, key, wide, mask, **kwargs)
        output, averaged = output.split([value.shape[-1], state.shape[-1]], dim=-1)
        return output, averaged.transpose(1, 2), weights
    # sdpa on CPU and flash kernels want values as wide as keys, or narrower: wider ones would be slow, or cut off.
    output, weights = attention(module, query, key, value, mask, **kwargs)
    averaged, _ = attention(module, query, key, state, mask, **kwargs)
    return output, averaged.transpose(1, 2), weights


def _as_sdpa(
    module: Any, query: Tensor, seen: Seen, mask: Any, kwargs: dict[str, Any], *, joined: bool
) -> tuple[Tensor, Tensor]:
    """What transformers' sdpa attention would compute, by this package's: `[B, H, N, Dv]` and `[B, H, N, Dr]`."""
    key, value, state, wide = seen
    assert state is not None
    sizes = [value.shape[-1], state.shape[-1]]
    if wide is not None and joined:
        # One product with whole rows takes half the time of two with their halves.
        value, state = wide, None
    # Under autocast, rotated queries and keys are wider than values; sdpa would round them in the same way.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if mask is not None:
        visible = visibility(mask, query.dtype)
    else:
        causal = kwargs.get("is_causal")
        visible = Visibility(causal=bool(getattr(module, "is_causal", True) if causal is None else causal))
        if visible.causal and 1 < query.shape[2] < key.shape[2]:
            # The first keys are those of the new tokens: the static cache was empty.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            state = None if state is None else state[:, :, : query.shape[2]]
    result = positional_attention(query, key, value, state, scale=kwargs.get("scaling"), **visible._asdict())
    if result.averaged_state is not None:
        return result.output, result.averaged_state
    output, averaged = result.output.split(sizes, dim=-1)
    return output, averaged


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
