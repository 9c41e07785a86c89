"""Cache of rotated keys, values and the position states that layers average."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tape_pe.encodings import Tokens


class CachedTokens(NamedTuple):
    """All tokens that a layer attends to, cached ones first.

    Attributes:
        key: rotated, `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        state: the states that the layer read, `[B, Hkv | 1, N, Ds]`, or `None` where it averages none.
    """

    key: Tensor
    value: Tensor
    state: Tensor | None


class TapeCacheLayer(DynamicLayer):
    """One layer of a `TapeCache`: what `DynamicLayer` holds, and the layer's input states."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, state: Tensor | None) -> CachedTokens:
        """Adds new tokens and returns all of them."""
        is_first = self.get_seq_length() == 0
        keys, values = self.update(key, value)
        if state is not None:
            state = state.expand(key.shape[0], -1, -1, -1)  # the table of layer 0 may be one for the whole batch
            self.states = state if is_first or self.states is None else torch.cat([self.states, state], dim=-2)
        return CachedTokens(keys, values, self.states if state is not None else None)

    def reset(self) -> None:
        super().reset()
        self.states = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0 and self.states is not None:
            self.states = self.states[..., :tokens_to_remove, :]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.states is not None:
            self.states = self.states.index_select(0, beam_idx.to(self.states.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.states is not None:
            self.states = self.states.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.states is not None:
            self.states = self.states[indices, ...]


class TapeCache(Cache):
    """Cache of a `TapeLMForCausalLM`, for `generate` and for loops of your own.

    Besides what every layer keeps, it remembers of each cached token its position, its id, and the document it belongs
    to (or that it is padding), so later calls need neither a mask for the past nor document ids.

    Attributes:
        position_ids: `[B, N]`.
        segment_ids: `[B, N]`, -1 for padding, or `None` where all tokens of a row see each other.
        input_ids: `[B, N]`, or `None` where embeddings were given.
    """

    _FACTS = ("position_ids", "segment_ids", "input_ids")

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TapeCacheLayer)
        self.position_ids: Tensor | None = None
        self.segment_ids: Tensor | None = None
        self.input_ids: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, state: Tensor | None, layer_idx: int) -> CachedTokens:
        """Adds the new tokens of layer `layer_idx`, and returns all tokens that it attends to."""
        while len(self.layers) <= layer_idx:
            self.layers.append(TapeCacheLayer())
        return self.layers[layer_idx].append(key, value, state)

    def join_tokens(self, new: Tokens, batch_size: int) -> Tokens:
        """The cached tokens followed by new ones, whose positions and ids may be one row for all `batch_size` rows.

        The cache stays as it is until `remember`: what an encoding refuses must leave no trace.
        """
        past = self.get_seq_length()

        def joined(cached: Tensor | None, added: Tensor) -> Tensor:
            added = added.expand(batch_size, -1)
            return added if not past or cached is None else torch.cat([cached, added], dim=1)

        position_ids = joined(self.position_ids, new.position_ids)
        segment_ids = None if new.segment_ids is None else self.join_segments(new.segment_ids)
        input_ids = None
        if new.input_ids is not None and (not past or self.input_ids is not None):
            input_ids = joined(self.input_ids, new.input_ids)
        assert position_ids.shape[1] == past + new.num_new
        return Tokens(position_ids, new.num_new, segment_ids, input_ids)

    def join_segments(self, segment_ids: Tensor) -> Tensor:
        """Segments of the cached tokens, 0 where they had none, followed by those of new ones, `[B, N]`."""
        past = self.get_seq_length()
        if not past:
            return segment_ids
        cached = segment_ids.new_zeros(segment_ids.shape[0], past) if self.segment_ids is None else self.segment_ids
        return torch.cat([cached, segment_ids], dim=1)

    def remember(self, tokens: Tokens) -> None:
        """Keeps what `join_tokens` returned, before any layer adds its part of the new tokens."""
        self.position_ids, _, self.segment_ids, self.input_ids = tokens

    def last_segment(self) -> Tensor | None:
        """The segment of each row's last real token, `[B, 1]`, which new tokens go on with; `None` without segments."""
        if self.segment_ids is None or self.get_seq_length() == 0:
            return None
        last_real = (self.segment_ids >= 0).long().cumsum(dim=1).argmax(dim=1, keepdim=True)
        return self.segment_ids.gather(1, last_real).clamp(min=0)

    def _change_facts(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self._FACTS:
            if (fact := getattr(self, name)) is not None:
                setattr(self, name, change(fact))

    def reset(self) -> None:
        """Empties the cache."""
        super().reset()
        for name in self._FACTS:
            setattr(self, name, None)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (a number <= 0, as transformers counts)."""
        super().crop(tokens_to_remove)
        if tokens_to_remove < 0:
            self._change_facts(lambda fact: fact[:, :tokens_to_remove])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows `beam_idx` in the place of the present ones, for beam search."""
        super().reorder_cache(beam_idx)
        self._change_facts(lambda fact: fact.index_select(0, beam_idx.to(fact.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._change_facts(lambda fact: fact.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`."""
        super().batch_select_indices(indices)
        self._change_facts(lambda fact: fact[indices, ...])
