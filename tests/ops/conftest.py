"""Inputs of attention problems, and what a backend makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tape_pe.ops import positional_attention

LEAVES = ("query", "key", "value", "state", "bias")


@dataclass(frozen=True)
class Problem:
    """Arguments of `positional_attention`, and the directions in which its outputs are differentiated."""

    query: Tensor
    key: Tensor
    value: Tensor
    state: Tensor | None
    segment_ids: Tensor | None
    bias: Tensor | None
    causal: bool
    grad_output: Tensor
    grad_averaged: Tensor | None

    def to(self, dtype: torch.dtype) -> Problem:
        """With every floating tensor in `dtype`."""
        names = (*LEAVES, "grad_output", "grad_averaged")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if x is None else x.to(dtype) for name, x in tensors.items()})

    def solve(self, backend: str | None) -> dict[str, Tensor]:
        """Outputs and the gradients of all inputs, by name. Inputs are differentiated where they stand: views stay."""
        leaves = {name: x.detach().requires_grad_() for name in LEAVES if (x := getattr(self, name)) is not None}
        result = positional_attention(
            **{"state": None, "bias": None, **leaves},
            segment_ids=self.segment_ids,
            causal=self.causal,
            backend=backend,
        )
        results = {name: x for name, x in result._asdict().items() if x is not None}
        directions = [x for x in (self.grad_output, self.grad_averaged) if x is not None]
        grads = torch.autograd.grad(list(results.values()), list(leaves.values()), directions)
        gradients = {f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}
        return {name: x.detach() for name, x in (results | gradients).items()}


def _segments(mask: str, batch: int, tokens: int, generator: torch.Generator) -> Tensor | None:
    if mask in ("causal", "full", "bias"):
        return None
    columns = torch.arange(tokens).expand(batch, tokens)
    padding = torch.randint(0, tokens // 2 + 1, (batch, 1), generator=generator)
    padding[0] = tokens // 3
    documents = torch.rand(batch, tokens, generator=generator).lt(0.2).long().cumsum(dim=1)
    if mask == "dead rows":  # padding anywhere
        return torch.rand(batch, tokens, generator=generator).gt(0.4).long() - 1
    if mask.endswith("left"):
        return (columns >= padding).long() - 1
    if mask == "right":
        return (columns < tokens - padding).long() - 1
    return documents.where(columns < tokens - padding, -1) if mask == "padded documents" else documents


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    """Builds a random fp64 problem; widths of keys, values and states differ."""

    def make(
        mask: str = "causal",
        *,
        batch: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        queries: int = 9,
        keys: int | None = None,
        state_shape: tuple[int, int] | None = (2, 2),
        widths: tuple[int, int, int] = (8, 6, 10),
        seed: int = 0,
    ) -> Problem:
        keys = queries if keys is None else keys
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        if state_shape == (2, 2):
            state_shape = (batch, kv_heads)
        return Problem(
            query=random(batch, heads, queries, widths[0]),
            key=random(batch, kv_heads, keys, widths[0]),
            value=random(batch, kv_heads, keys, widths[1]),
            state=None if state_shape is None else random(*state_shape, keys, widths[2]),
            segment_ids=_segments(mask, batch, keys, generator),
            bias=random(1, heads, queries, keys) if mask.startswith("bias") else None,
            causal=mask != "full",
            grad_output=random(batch, heads, queries, widths[1]),
            grad_averaged=None if state_shape is None else random(batch, heads, queries, widths[2]),
        )

    return make


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Compares what two backends made of a problem; errors are relative to the largest entry, or to 1."""

    def check(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
        assert actual.keys() == expected.keys()
        for name, reference in expected.items():
            assert actual[name].shape == reference.shape, name
            assert actual[name].isfinite().all(), name
            error = (actual[name].double() - reference.double()).abs().max().item()
            scale = max(1.0, reference.abs().max().item())
            assert error <= tolerance * scale, f"{name}: error {error:.2e} of {scale:.2e}"

    return check
