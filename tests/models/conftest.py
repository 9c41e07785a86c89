"""Decoders of each kind of encoding, and of the options that take a path of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tape_pe.models import TapeLMForCausalLM

# One encoding of each kind: a changing state, a fixed one, none, a bias, and embeddings. The decoder knows no encoding
# by name, and every encoding passes the battery of `tape_pe.testing`.
KINDS = ("tape", "rope", "nope", "alibi", "learned")
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("tape", {"state_norm": "rms"}),
    ("tape", {"head_mixing": "diagonal", "gate_input": "mlp_input"}),
    ("tape", {"update_attention": False}),
    ("tape", {"update_mlp": False}),
    ("tape", {"structure": "components"}),
    ("tape", {"structure": "channels"}),
    ("tape", {"structure": "unstructured", "head_mixing": "diagonal", "state_norm": "rms"}),
    ("rope", {"log_scale": 16}),
]


@pytest.fixture(params=KINDS)
def encoding(request: pytest.FixtureRequest) -> str:
    """The name of one encoding of each kind, in turn."""
    return request.param


@pytest.fixture
def model(make_model: Callable[..., TapeLMForCausalLM], encoding: str, kv_heads: int) -> TapeLMForCausalLM:
    """A decoder of each kind of encoding, with as many and with fewer key/value heads."""
    return make_model(encoding, kv_heads)


@pytest.fixture(
    params=[(name, kv_heads, {}) for name in KINDS for kv_heads in (4, 2)] + [(name, 2, o) for name, o in OPTIONS],
    ids=lambda param: "-".join([param[0], f"kv{param[1]}", *(f"{key}={value}" for key, value in param[2].items())]),
)
def any_model(request: pytest.FixtureRequest, make_model: Callable[..., TapeLMForCausalLM]) -> TapeLMForCausalLM:
    """As `model`, and with every option that changes what is computed."""
    name, kv_heads, options = request.param
    return make_model(name, kv_heads, encoding_options=options)


class Streams(NamedTuple):
    """What a row computes: `[N, vocab]`, and `[N, hidden_size]` and `[Hkv, N, Ds]` of each layer."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    states: tuple[Tensor, ...]


@pytest.fixture
def run_row() -> Callable[..., Streams]:
    """Runs a model and returns the streams of one row, of the columns `select`."""

    @torch.no_grad()
    def run(
        model: TapeLMForCausalLM, input_ids: Tensor, row: int = 0, select: Any = slice(None), **kwargs: Any
    ) -> Streams:
        out = model(input_ids, output_hidden_states=True, output_position_states=True, **kwargs)
        return Streams(
            out.logits[row, select],
            tuple(hidden[row, select] for hidden in out.hidden_states),
            tuple(state[row, :, select] for state in out.position_states),
        )

    return run


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Compares two `Streams`, by default to 1e-5 of the largest number; `exactly` to the last bit."""

    def compare(actual: Streams, expected: Streams, *, tolerance: float = 1e-5, exactly: bool = False) -> None:
        assert len(actual.hidden_states) == len(expected.hidden_states)
        assert len(actual.states) == len(expected.states)
        flat = zip(
            (actual.logits, *actual.hidden_states, *actual.states),
            (expected.logits, *expected.hidden_states, *expected.states),
            strict=True,
        )
        for a, b in flat:
            assert a.shape == b.shape
            if exactly:
                assert torch.equal(a, b), (a - b).abs().max()
            elif b.numel():
                assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())), (a - b).abs().max()

    return compare
