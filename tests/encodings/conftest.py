"""Shared by tests of encodings that add a bias: positions to try, and the attention weights of a decoder's first
layer, as its equations have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tape_pe.encodings import Tokens
from tape_pe.models import TapeLMForCausalLM

TOKENS = {
    "one row": Tokens(torch.arange(7)[None], 7),
    "offset and gaps": Tokens(torch.tensor([[5, 6, 9, 30, 31, 200]]), 6),
    "rows of their own": Tokens(torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]), 5),
    "packed": Tokens(torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), 7, torch.tensor([[0, 0, 0, 1, 1, 1, 1]])),
    "one new token": Tokens(torch.tensor([[3, 4, 5, 6, 40]]), 1),
    "three new tokens": Tokens(torch.arange(20, 27).repeat(2, 1), 3),
    "out of order": Tokens(torch.tensor([[3, 0, 4, 1, 5]]), 5),
    "real numbers": Tokens(torch.tensor([[0.0, 0.5, 1.5, 17.25]]), 4),
}


@pytest.fixture(params=list(TOKENS))
def tokens(request: pytest.FixtureRequest) -> Tokens:
    """Positions of every kind."""
    return TOKENS[request.param]


class FirstLayer(NamedTuple):
    """Queries and keys `[B, H, N, D]`, keys repeated for their query heads, and the weights `[B, H, N, N]`."""

    query: Tensor
    key: Tensor
    weights: Tensor


@pytest.fixture
def first_layer() -> Callable[..., FirstLayer]:
    """Runs a decoder and returns what its first layer computes."""

    def run(model: TapeLMForCausalLM, input_ids: Tensor, **kwargs: Any) -> FirstLayer:
        attention = model.model.layers[0].self_attn
        seen: dict[str, Tensor] = {}
        handles = [
            getattr(attention, name).register_forward_hook(lambda m, a, output, name=name: seen.update({name: output}))
            for name in ("q_proj", "k_proj")
        ]
        with torch.no_grad():
            weights = model(input_ids, output_attentions=True, **kwargs).attentions[0]
        for handle in handles:
            handle.remove()
        query, key = (
            seen[name].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).double() for name in ("q_proj", "k_proj")
        )
        return FirstLayer(query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1), weights)

    return run


@pytest.fixture
def literal_weights() -> Callable[..., Tensor]:
    """Attention weights `[B, H, N, N]` by loops in fp64, of queries, keys, a bias and positions of segments."""

    def compute(query: Tensor, key: Tensor, bias: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        batch, heads, length, head_dim = query.shape
        bias = bias.expand(batch, heads, length, length)
        weights = torch.zeros(batch, heads, length, length, dtype=torch.float64)
        for b in range(batch):
            for i in range(length):
                seen = [
                    j
                    for j in range(i + 1)
                    if segment_ids is None or (segment_ids[b, i] == segment_ids[b, j] and segment_ids[b, j] >= 0)
                ]
                for h in range(heads):
                    scores = [query[b, h, i] @ key[b, h, j] / head_dim**0.5 + bias[b, h, i, j] for j in seen]
                    if scores:
                        weights[b, h, i, seen] = torch.stack(scores).softmax(dim=0)
        return weights

    return compute
