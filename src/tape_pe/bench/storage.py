"""Bytes: tensors that a layer saves for its backward pass, and what a cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tape_pe.bench.layers import layer_inputs
from tape_pe.bench.options import Shape
from tape_pe.bench.variants import Variant, forced_backend, randomize
from tape_pe.models import TapeLMForCausalLM
from tape_pe.models.cache import CachedTokens, TapeCache


def saved_bytes(function: Callable[[], Any], excluded: Iterable[Tensor] = ()) -> int:
    """Bytes of the memory that a call keeps for its backward pass, each piece once.

    Args:
        function: the call.
        excluded: tensors, such as parameters, whose memory does not count.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    found: dict[int, tuple[int, Tensor]] = {}  # tensors are kept: another one must not get the same address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(size for size, _ in found.values())


def saved_by_layer(shape: Shape, variant: Variant, device: torch.device) -> int:
    """Bytes that a middle layer saves, its parameters not counted."""
    inputs = layer_inputs(shape, variant.encoding, device)
    with forced_backend(variant.backend):
        return saved_bytes(
            lambda: inputs.layer(inputs.hidden, inputs.state, inputs.bias, tokens=inputs.tokens),
            excluded=inputs.layer.parameters(),
        )


class _WatchedCache(TapeCache):
    """Keeps what it hands out to each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_out: dict[int, CachedTokens] = {}

    def append(self, key: Tensor, value: Tensor, state: Tensor | None, layer_idx: int) -> CachedTokens:
        self.handed_out[layer_idx] = super().append(key, value, state, layer_idx)
        return self.handed_out[layer_idx]


@torch.no_grad()
def cached_bytes(shape: Shape, encoding: str) -> list[float]:
    """Bytes per token and row that a cache holds, for each layer of a decoder.

    They are those of the tensors that attention reads; memory that a cache has set aside for later tokens does not
    count, nor does what several heads, rows or layers share count twice.
    """
    with torch.random.fork_rng(devices=[]):
        model = TapeLMForCausalLM(_narrow(shape, encoding)).to(shape.torch_dtype).eval()
    randomize(model)
    cache = _WatchedCache()
    model(torch.zeros(shape.batch_size, shape.length, dtype=torch.long), cache=cache, use_cache=True)
    seen: set[tuple[int, int]] = set()
    found = []
    for layer in sorted(cache.handed_out):
        total = 0
        for tensor in cache.handed_out[layer]:
            if tensor is None or (place := (tensor.data_ptr(), int(tensor.storage_offset()))) in seen:
                continue
            seen.add(place)
            total += distinct_bytes(tensor)
        found.append(total / (shape.batch_size * shape.length))
    return found


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; an axis that is expanded holds one."""
    sizes = (1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.Size(sizes).numel() * tensor.element_size()


def _narrow(shape: Shape, encoding: str) -> Any:
    """The same heads, which a cache depends on, in a model that is quickly run."""
    config = shape.config(encoding)
    config.hidden_size, config.intermediate_size, config.vocab_size = 32, 8, max(16, config.vocab_size)
    return config
