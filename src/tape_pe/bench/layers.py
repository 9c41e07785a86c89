"""The level `layer`: one decoder layer, in the middle of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tape_pe.bench.ops import Calls
from tape_pe.bench.options import Shape
from tape_pe.bench.variants import Variant, on_backend, randomize, with_gradients, without_gradients
from tape_pe.encodings import Tokens
from tape_pe.models import TapeLMModel
from tape_pe.models.cache import TapeCache
from tape_pe.models.decoder import DecoderLayer
from tape_pe.ops import Bias, prepare_bias

_LAYERS = 3  # of the model whose middle one is measured: the first reads a table, the last updates nothing
_MIDDLE = 1


class LayerInputs(NamedTuple):
    """A layer and what it reads.

    Attributes:
        layer: the layer.
        hidden: `[B, N, hidden_size]`.
        state: as the layer before leaves it, `[B | 1, Hkv | 1, N, Ds]`, or `None`.
        bias: what the encoding adds to the scores of all layers, or `None`.
        tokens: all tokens.
    """

    layer: DecoderLayer
    hidden: Tensor
    state: Tensor | None
    bias: Bias | None
    tokens: Tokens

    def leaves(self) -> list[Tensor]:
        """Everything that may need a gradient."""
        states = [] if self.state is None else [self.state]
        return [self.hidden, *states, *self.layer.parameters()]


def layer_inputs(shape: Shape, encoding: str, device: torch.device) -> LayerInputs:
    """A middle layer with random weights, and what the layer before it hands on for random tokens."""
    model = _model(shape, encoding, device)
    tokens = _tokens(shape.length, shape.length, device)
    state, bias = _start(model, tokens, shape)
    hidden = torch.randn(shape.batch_size, shape.length, model.config.hidden_size, device=device)
    hidden = hidden.to(shape.torch_dtype).requires_grad_()
    first = model.layers[0](hidden, state, bias, tokens=tokens)
    if (state := first.state) is not None:
        state = state.detach().requires_grad_(state.requires_grad)
    return LayerInputs(_middle(model), first.hidden_states.detach().requires_grad_(), state, bias, tokens)


def layer(shape: Shape, phase: str, device: torch.device, chosen: Sequence[Variant]) -> Calls:
    """A layer of each variant."""
    made = dict.fromkeys({variant.encoding for variant in chosen}, _decode if phase == "decode" else _pass)
    calls = {}
    for name, make in made.items():
        build = make(shape, name, phase, device)
        for variant in chosen:
            if variant.encoding == name:
                calls[str(variant)] = on_backend(variant.backend, build(variant))
    return {str(variant): calls[str(variant)] for variant in chosen}


def _pass(shape: Shape, encoding: str, phase: str, device: torch.device) -> Callable[[Variant], Callable[[], Any]]:
    inputs = layer_inputs(shape, encoding, device)

    def forward(cache: TapeCache | None = None) -> tuple[Tensor, Tensor | None]:
        result = inputs.layer(inputs.hidden, inputs.state, inputs.bias, tokens=inputs.tokens, cache=cache)
        return result.hidden_states, result.state

    def build(variant: Variant) -> Callable[[], Any]:
        if phase == "forward+backward":
            return with_gradients(forward, inputs.leaves())
        return without_gradients((lambda: forward(TapeCache())) if phase == "prefill" else forward)

    return build


def _decode(shape: Shape, encoding: str, phase: str, device: torch.device) -> Callable[[Variant], Callable[[], Any]]:
    """One new token after `length` cached ones, which are random; the cache is as long before every call."""
    model = _model(shape, encoding, device)
    tokens = _tokens(shape.length + 1, 1, device)
    start, bias = _start(model, tokens, shape)
    layer = _middle(model)

    def random(heads: int, count: int, channels: int) -> Tensor:
        values = torch.randn(shape.batch_size, heads, count, channels, device=device)
        return values.to(shape.torch_dtype)

    hidden = random(1, 1, model.config.hidden_size)[:, 0]
    averages = layer.encoding.averages_state
    state = random(shape.kv_heads, 1, start.shape[-1]) if averages and start is not None else start

    def build(variant: Variant) -> Callable[[], Any]:
        cache = TapeCache()
        key, value = (random(shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
        cached = random(shape.kv_heads, shape.length, state.shape[-1]) if averages and state is not None else None
        cache.append(key, value, cached, _MIDDLE)

        def call() -> Any:
            result = layer(hidden, state, bias, tokens=tokens, cache=cache)
            cache.layers[_MIDDLE].crop(-1)
            return result

        return without_gradients(call)

    return build


def _model(shape: Shape, encoding: str, device: torch.device) -> TapeLMModel:
    config = shape.config(encoding)
    config.num_hidden_layers = _LAYERS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TapeLMModel(config)
    randomize(model)
    return model.to(device, shape.torch_dtype)


def _middle(model: TapeLMModel) -> DecoderLayer:
    layer = model.layers[_MIDDLE]
    assert isinstance(layer, DecoderLayer)
    return layer


def _tokens(count: int, new: int, device: torch.device) -> Tokens:
    row = torch.arange(count, device=device)[None]
    return Tokens(row, new, None, torch.ones_like(row))


def _start(model: TapeLMModel, tokens: Tokens, shape: Shape) -> tuple[Tensor | None, Bias | None]:
    """What the first layer reads, as in `TapeLMModel`."""
    wide = torch.promote_types(shape.torch_dtype, torch.float32)
    state = model.encoding.start(tokens, wide)
    bias = prepare_bias(model.encoding.bias(tokens, wide), tokens.position_ids.device)
    return None if state is None else state.to(shape.torch_dtype), bias
