"""Cache of rotated keys, values and the position states that layers average."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tape_pe.encodings import Tokens
from tape_pe.models.growing import GrowingTensor, GrowingTokens


class CachedTokens(NamedTuple):
    """All tokens that a layer attends to, cached ones first.

    Attributes:
        key: rotated, `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        state: the states that the layer read, `[B | 1, Hkv | 1, N, Ds]`, or `None` where it averages none.
    """

    key: Tensor
    value: Tensor
    state: Tensor | None


class TapeCacheLayer(GrowingTokens, DynamicLayer):
    """One layer of a `TapeCache`: what `DynamicLayer` holds, and the layer's input states.

    Attributes:
        states: as in `CachedTokens`. The table of layer 0 has one head, and one row where all rows share positions.
    """

    own_names = ("states",)
    growing_dim = -2

    def __init__(self) -> None:
        super().__init__()
        self._growing = {}
        self.states: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds new keys and values and returns all of them."""
        self.device, self.is_initialized = key_states.device, True
        keys, values = self.grown("keys", key_states), self.grown("values", value_states)
        return self.hold("keys", keys), self.hold("values", values)

    def append_state(self, state: Tensor) -> Tensor:
        """Adds the states of new tokens and returns those of all tokens."""
        return self.hold("states", self.grown("states", state))


class TapeCache(GrowingTokens, Cache):
    """Cache of a `TapeLMForCausalLM`, for `generate` and for loops of your own.

    Besides what every layer keeps, it remembers of each cached token its position, its id, and the document it belongs
    to (or that it is padding), so later calls need neither a mask for the past nor document ids.

    Tokens are written into memory that doubles when it is full (`tape_pe.models.growing`). No tensor that a cache
    handed out ever changes; `copy.copy` and `copy.deepcopy` make caches that go on independently, the former without
    copying what is there before one of them needs to.

    Attributes:
        position_ids: `[B | 1, N]`.
        segment_ids: `[B | 1, N]`, -1 for padding, or `None` where all tokens of a row see each other.
        input_ids: `[B | 1, N]`, or `None` where embeddings were given.
    """

    own_names = ("position_ids", "segment_ids", "input_ids")
    growing_dim = 1

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TapeCacheLayer)
        self._growing = {}
        self._joined: dict[str, GrowingTensor] = {}
        self.position_ids: Tensor | None = None
        self.segment_ids: Tensor | None = None
        self.input_ids: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, state: Tensor | None, layer_idx: int) -> CachedTokens:
        """Adds the new tokens of layer `layer_idx`, and returns all tokens that it attends to."""
        while len(self.layers) <= layer_idx:
            self.layers.append(TapeCacheLayer())
        layer = self.layers[layer_idx]
        keys, values = layer.update(key, value)
        return CachedTokens(keys, values, None if state is None else layer.append_state(state))

    def join_tokens(self, new: Tokens) -> Tokens:
        """The cached tokens followed by new ones, whose positions and ids may be one row for all rows.

        The cache stays as it is until `remember`: what an encoding refuses must leave no trace.
        """
        past = self.get_seq_length()
        joined = {"position_ids": self.grown("position_ids", new.position_ids)}
        if new.segment_ids is not None and past and self.segment_ids is None:
            one_document = GrowingTensor(new.segment_ids.new_zeros(1, past), self.growing_dim)
            joined["segment_ids"] = one_document.append(new.segment_ids)
        elif new.segment_ids is not None:
            joined["segment_ids"] = self.grown("segment_ids", new.segment_ids)
        if new.input_ids is not None and (not past or self.input_ids is not None):
            joined["input_ids"] = self.grown("input_ids", new.input_ids)
        self._joined = joined
        tensors = {name: growing.tensor for name, growing in joined.items()}
        assert tensors["position_ids"].shape[1] == past + new.num_new
        return Tokens(num_new=new.num_new, **tensors)

    def join_segments(self, segment_ids: Tensor) -> Tensor:
        """Segments of the cached tokens, 0 where they had none, followed by those of new ones, `[B, N]`."""
        past = self.get_seq_length()
        cached = segment_ids.new_zeros(1, past) if self.segment_ids is None else self.segment_ids
        return torch.cat([cached.expand(segment_ids.shape[0], -1), segment_ids], dim=1)

    def remember(self) -> None:
        """Keeps what `join_tokens` returned, before any layer adds its part of the new tokens."""
        for name in self.own_names:
            if name in self._joined:
                self.hold(name, self._joined[name])
            else:
                setattr(self, name, None)
        self._joined = {}

    def last_segment(self) -> Tensor | None:
        """The segment of each row's last real token, `[B, 1]`, which new tokens go on with; `None` without segments."""
        if self.segment_ids is None or self.get_seq_length() == 0:
            return None
        last_real = (self.segment_ids >= 0).long().cumsum(dim=1).argmax(dim=1, keepdim=True)
        return self.segment_ids.gather(1, last_real).clamp(min=0)

    def __copy__(self) -> TapeCache:
        twin = super().__copy__()
        twin.layers = [copy.copy(layer) for layer in self.layers]
        return twin
