"""What is compared: encodings on attention backends, with weights that let every path count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tape_pe.ops.backends import ENVIRONMENT_VARIABLE, select_backend

BASELINE = "rope"
WEIGHT_SCALE = 0.05


class Variant(NamedTuple):
    """An encoding on an attention backend; an empty backend is one that does not matter."""

    encoding: str
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.encoding} ({self.backend})" if self.backend else self.encoding


def variants(encodings: Sequence[str], device: torch.device, backends: Sequence[str] = ()) -> list[Variant]:
    """Every encoding on the backend chosen for `device` and on `backends`; RoPE, always the first, on `sdpa` too.

    So no ratio is flattered by a slow RoPE: the faster of its backends is what the others are compared with.
    """
    names = dict.fromkeys([BASELINE, *encodings])
    chosen = [select_backend(device).name, *backends]
    return [
        Variant(name, backend)
        for name in names
        for backend in dict.fromkeys([*chosen, "sdpa"] if name == BASELINE else chosen)
    ]


@contextmanager
def forced_backend(name: str) -> Iterator[None]:
    """Makes `positional_attention` use a backend, also where a model calls it."""
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT_VARIABLE]
        else:
            os.environ[ENVIRONMENT_VARIABLE] = before


def on_backend(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` with that backend."""

    def run() -> Any:
        with forced_backend(name):
            return call()

    return run


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Gives position weights that start at zero random values: a fresh TAPE model would compute what RoPE does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not bool(parameter.any()):
                noise = torch.randn(parameter.shape, generator=generator) * WEIGHT_SCALE
                parameter.copy_(noise.to(parameter.dtype))


def without_gradients(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function` as in inference."""

    def run() -> Any:
        with torch.no_grad():
            return function()

    return run


def with_gradients(function: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """`function`, then the gradients of all `inputs` that need one, from fixed gradients of all of its outputs."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]

    def outputs() -> list[Tensor]:
        return [output for output in function() if output is not None and output.requires_grad]

    gradients = [torch.randn_like(output) for output in outputs()]

    def run() -> Any:
        return torch.autograd.grad(outputs(), wanted, gradients)

    return run
