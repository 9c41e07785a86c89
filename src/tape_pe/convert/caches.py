"""How the states of converted layers get into the caches of transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tape_pe.models.cache import TapeCacheLayer


class Seen(NamedTuple):
    """What a layer attends to: all tokens, cached ones first.

    Attributes:
        key: `[B, Hkv, Nk, D]`.
        value: `[B, Hkv, Nk, Dv]`.
        state: `[B | 1, Hkv | 1, Nk, Dr]`; `None` where none is averaged.
        wide: value and state side by side, `[B, Hkv, Nk, Dv + Dr]`, where a cache holds them so.
    """

    key: Tensor
    value: Tensor
    state: Tensor | None
    wide: Tensor | None = None


def update_cache(cache: Any, key: Tensor, value: Tensor, state: Tensor | None, layer_idx: int) -> Seen:
    """Adds new tokens to a layer of a cache.

    A layer of transformers' usual kind, `DynamicLayer`, is replaced by one that keeps states as well, while it is
    empty. Every other kind (static, sliding, quantized, ...) gets values widened by the states, `[v | z]`, which it
    keeps, crops and reorders together.

    Args:
        cache: a cache of transformers.
        key: rotated, `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        state: what is to be averaged, `[B | 1, Hkv | 1, N, Dr]`, or `None`.
        layer_idx: which layer.
    """
    layer = _layer_with_states(cache, layer_idx)
    if state is None or layer is not None:
        key, value = cache.update(key, value, layer_idx)
        return Seen(key, value, None if state is None or layer is None else layer.append_state(state))
    width = value.shape[-1]
    value = torch.cat([value, state.expand(*value.shape[:2], -1, -1)], dim=-1)
    key, wide = cache.update(key, value, layer_idx)
    return Seen(key, wide[..., :width], wide[..., width:], wide)


def _layer_with_states(cache: Any, layer_idx: int) -> TapeCacheLayer | None:
    if not isinstance(cache, Cache) or cache.offloading:  # offloading moves layers before they get their states
        return None
    layers, lazily = cache.layers, cache.layer_class_to_replicate
    while lazily in (DynamicLayer, TapeCacheLayer) and len(layers) <= layer_idx:
        layers.append(TapeCacheLayer())
    if layer_idx >= len(layers):
        return None
    layer = layers[layer_idx]
    if type(layer) is DynamicLayer and layer.get_seq_length() == 0:
        layers[layer_idx] = layer = TapeCacheLayer()
    return layer if isinstance(layer, TapeCacheLayer) else None
