"""Biases given by a rule: all pairs at once, one pair at a time, and how often they are built."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tape_pe.encodings.alibi import AlibiBias
from tape_pe.encodings.fire import FireBias
from tape_pe.encodings.t5 import BucketBias
from tape_pe.ops import PairBias, add_biases, materialized, positional_attention, prepare_bias
from tape_pe.ops.backends import describe_backends
from tape_pe.ops.bias import TensorBias

CPU = torch.device("cpu")


class Distance(PairBias):
    """-(i - j)^2, for two heads and a square of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.positions = torch.arange(num_tokens, dtype=torch.float64)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, 2, len(self.positions), len(self.positions)

    @property
    def device(self) -> torch.device:
        return CPU

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return -(head + 1) * (self.positions[query] - self.positions[key]) ** 2


@pytest.mark.parametrize("shape", [(5,), (5, 5), (2, 1, 1), (1, 2, 5, 5), (3, 1, 5, 5), (3, 2, 1, 5), (1, 1, 1, 1)])
def test_tensors_have_entries(shape) -> None:
    tensor = torch.randn(shape)
    bias = TensorBias(tensor)
    expected = tensor.expand(3, 2, 5, 5)
    pairs = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate((3, 2, 5, 5)))
    assert torch.equal(bias.at(*pairs).expand(3, 2, 5, 5), expected)
    scalars = (torch.tensor(n) for n in (2, 1, 4, 3))
    assert bias.at(*scalars) == expected[2, 1, 4, 3]
    assert bias.materialize().expand(3, 2, 5, 5).equal(expected)
    assert bias.shape == (1,) * (4 - len(shape)) + shape


def test_all_pairs_are_those_of_the_rule() -> None:
    distance = torch.arange(4)[:, None] - torch.arange(4)
    expected = -torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None, None] * distance**2
    assert torch.equal(Distance(4).materialize(), expected[None])


def test_sums() -> None:
    rule, tensor = Distance(4), torch.randn(4, 4, dtype=torch.float64)
    assert add_biases(None, None) is None
    assert add_biases(rule, None) is add_biases(None, rule) is rule
    assert add_biases(tensor, None) is tensor
    expected = materialized(rule) + tensor
    assert torch.equal(materialized(add_biases(rule, tensor)), expected)
    assert torch.equal(materialized(add_biases(tensor, rule)), expected)


@pytest.mark.parametrize("backend", [report.name for report in describe_backends(CPU) if report.available])
def test_rules_are_as_good_as_their_tensors(backend) -> None:
    x = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    rule = Distance(6)
    actual, expected = (positional_attention(x, x, x, bias=b, backend=backend) for b in (rule, rule.materialize()))
    assert torch.equal(actual.output, expected.output)


def test_rules_of_another_shape_are_refused() -> None:
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"bias has the shape \(1, 2, 6, 6\): not broadcastable to \(1, 2, 5, 5\)"):
        positional_attention(x, x, x, bias=Distance(6))


def test_a_shared_rule_is_materialized_once_where_the_backend_needs_it(monkeypatch) -> None:
    monkeypatch.delenv("TAPE_BACKEND", raising=False)
    rule, tensor = Distance(4), torch.zeros(4, 4)
    assert torch.equal(prepare_bias(rule, CPU), rule.materialize())
    assert prepare_bias(tensor, CPU) is tensor
    assert prepare_bias(None, CPU) is None
    monkeypatch.setenv("TAPE_BACKEND", "flex")
    assert prepare_bias(rule, torch.device("cuda")) is rule


@pytest.mark.parametrize(("rule", "built"), [(AlibiBias, 1), (BucketBias, 1), (FireBias, 3)])
def test_decoders_build_shared_biases_once_per_forward(make_model, make_tokens, monkeypatch, rule, built) -> None:
    model = make_model({AlibiBias: "alibi", BucketBias: "t5", FireBias: "fire"}[rule])
    calls = []
    materialize = rule.materialize
    monkeypatch.setattr(rule, "materialize", lambda self: calls.append(1) or materialize(self))
    for _ in range(2):
        model(make_tokens(2, 6))
    assert len(calls) == 2 * built
