"""The level `model`: a whole decoder, its training step, and generation with its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tape_pe.bench.ops import Calls
from tape_pe.bench.options import Shape
from tape_pe.bench.variants import Variant, forced_backend, on_backend, randomize, without_gradients
from tape_pe.models import TapeLMForCausalLM
from tape_pe.models.cache import TapeCache


def make_model(shape: Shape, encoding: str, device: torch.device) -> TapeLMForCausalLM:
    """A decoder with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TapeLMForCausalLM(shape.config(encoding))
    randomize(model)
    return model.to(device, shape.torch_dtype).eval()


def make_tokens(shape: Shape, device: torch.device) -> Tensor:
    """Random tokens, `[B, N]`."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.length)
    return torch.randint(0, shape.vocab_size, size, generator=generator).to(device)


def decoder(shape: Shape, phase: str, device: torch.device, chosen: Sequence[Variant]) -> Calls:
    """A decoder of each variant; those of one encoding share their weights."""
    models = {name: make_model(shape, name, device) for name in {variant.encoding for variant in chosen}}
    tokens = make_tokens(shape, device)
    calls = {}
    for variant in chosen:
        with forced_backend(variant.backend):  # a cache may have to be filled
            call = _call(models[variant.encoding], tokens, phase, shape)
        calls[str(variant)] = on_backend(variant.backend, call)
    return calls


def _call(model: TapeLMForCausalLM, tokens: Tensor, phase: str, shape: Shape) -> Callable[[], Any]:
    if phase in ("forward+backward", "step"):
        return _training(model, tokens, with_optimizer=phase == "step")
    if phase == "decode":
        return without_gradients(_decode(model, tokens))
    if phase == "generate":
        return lambda: _generate(model, tokens, shape.new_tokens)
    cached = phase == "prefill"
    return without_gradients(lambda: model(tokens, use_cache=cached, logits_to_keep=1 if cached else 0))


def _training(model: TapeLMForCausalLM, tokens: Tensor, with_optimizer: bool) -> Callable[[], Any]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6) if with_optimizer else None

    def call() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()
        if optimizer is not None:
            optimizer.step()

    return call


def _decode(model: TapeLMForCausalLM, tokens: Tensor) -> Callable[[], Any]:
    cache = TapeCache()
    with torch.no_grad():
        model(tokens, cache=cache, use_cache=True, logits_to_keep=1)

    def call() -> Any:
        output = model(tokens[:, -1:], cache=cache, use_cache=True)
        cache.crop(-1)
        return output

    return call


class Generation:
    """Greedy decoding, by calls of the model alone: what transformers' `generate` adds is the same for all encodings.

    Args:
        model: the decoder.
        prompt: `[B, N]`, which the first step reads.
    """

    def __init__(self, model: TapeLMForCausalLM, prompt: Tensor) -> None:
        self.model, self.tokens, self.cache = model, prompt, TapeCache()

    @torch.no_grad()
    def step(self) -> None:
        """Adds one token."""
        logits = self.model(self.tokens, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        self.tokens = logits[:, -1].argmax(dim=-1, keepdim=True)


def _generate(model: TapeLMForCausalLM, tokens: Tensor, new_tokens: int) -> None:
    generation = Generation(model, tokens)
    for _ in range(new_tokens):
        generation.step()
