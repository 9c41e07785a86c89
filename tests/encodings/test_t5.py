"""T5's relative bias: its buckets, its tables, and the gradients of both."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from tape_pe.encodings import EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.t5 import T5, T5Layer, T5Options, bucket_starts, buckets_of
from tape_pe.models import TapeLMForCausalLM

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def literal_bucket(distance: float, num_buckets: int = 32, max_distance: int = 128) -> int:
    """The formula, for distances that are not on a boundary above `num_buckets // 2`."""
    n = max(distance, 0)
    exact = num_buckets // 2
    if n < exact:
        return math.floor(n)
    steps = math.floor(math.log(n / exact) / math.log(max_distance / exact) * (num_buckets - exact))
    return min(exact + steps, num_buckets - 1)


def literal_bias(tokens: Tokens, table: torch.Tensor) -> torch.Tensor:
    """The formula by loops, `[B | 1, H, N, Nk]`."""
    rows, num_all = tokens.position_ids.shape
    entries = []
    for b in range(rows):
        positions = tokens.position_ids[b].tolist()
        for h in range(table.shape[1]):
            for i in positions[num_all - tokens.num_new :]:
                entries += [table[literal_bucket(i - j), h] for j in positions]
    return torch.stack(entries).view(rows, table.shape[1], tokens.num_new, num_all)


@pytest.mark.parametrize("max_distance", [17, 20, 33, 64, 128, 256, 1000, 4096])
@pytest.mark.parametrize("num_buckets", [2, 3, 8, 31, 32])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int) -> None:
    """To the integer, also where a boundary is a whole number and rounding decides (256 with 32 buckets: 32, 64)."""
    distances = torch.arange(-5, 2 * max_distance + 1)
    expected = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    actual = buckets_of(distances, bucket_starts(num_buckets, max_distance))
    assert torch.equal(actual, expected)
    assert torch.equal(buckets_of(distances.double(), bucket_starts(num_buckets, max_distance)), expected)


def test_buckets_are_those_of_the_formula() -> None:
    distances = torch.arange(300)
    actual = buckets_of(distances, bucket_starts(32, 128))
    assert actual.tolist() == [literal_bucket(n) for n in range(300)]
    assert actual[:16].tolist() == list(range(16))
    assert actual[-1] == 31
    far = torch.tensor([100_000, 2**40])
    assert buckets_of(far, bucket_starts(32, 128)).tolist() == [31, 31]


@pytest.mark.parametrize("shared", [True, False])
def test_values_and_gradients(tokens: Tokens, shared: bool) -> None:
    options = T5Options(shared=shared)
    encoding, layer = T5(SIZES, options).double(), T5.layer(SIZES, options, 1).double()
    query, key = torch.zeros(1, 4, tokens.num_new, 8).double(), torch.zeros(1, 2, 1, 8).double()
    own, common = layer.bias(query, key, tokens), encoding.bias(tokens, torch.float64)
    assert (own is None) == shared
    assert (common is None) == (not shared)
    (parameter,) = (encoding if shared else layer).parameters()
    torch.nn.init.normal_(parameter)
    actual = (encoding.bias(tokens, torch.float64) if shared else layer.bias(query, key, tokens)).materialize()
    table = parameter.detach().clone().requires_grad_()
    expected = literal_bias(tokens, table)
    assert torch.equal(actual, expected)
    weight = torch.randn_like(actual)
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(parameter.grad, table.grad)


def test_tables() -> None:
    shared, apart = T5Options(num_buckets=10), T5Options(num_buckets=10, shared=False)
    assert [p.shape for p in T5(SIZES, shared).parameters()] == [(10, 4)]
    assert type(T5.layer(SIZES, shared, 0)) is LayerEncoding
    assert not list(T5(SIZES, apart).parameters())
    assert isinstance(T5.layer(SIZES, apart, 0), T5Layer)
    assert [p.shape for p in T5.layer(SIZES, apart, 0).parameters()] == [(10, 4)]


@pytest.mark.parametrize("shared", [True, False])
def test_start_weights(make_config, shared: bool) -> None:
    model = TapeLMForCausalLM(make_config("t5", encoding_options={"shared": shared, "num_buckets": 250}))
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith("table")]
    assert len(tables) == (1 if shared else 3)
    for table in tables:
        assert 0.018 < table.std() < 0.022


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 1}, r"encoding_options\.num_buckets=1: at least 2"),
        ({"max_distance": 16}, r"encoding_options\.max_distance=16: more than num_buckets // 2 = 16"),
        ({"shared": 1}, r"encoding_options\.shared=1: bool"),
        ({"num_buckets": 8.0}, r"encoding_options\.num_buckets=8\.0: int"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Options.from_dict("t5", options)


@pytest.mark.parametrize("shared", [True, False])
def test_attention_weights(make_model, make_tokens, first_layer, literal_weights, shared: bool) -> None:
    """Packed documents in the whole decoder."""
    model = make_model("t5", encoding_options={"shared": shared}).double()
    documents = torch.tensor([[0] * 30 + [1] * 10])
    query, key, weights = first_layer(model, make_tokens(1, 40), document_ids=documents)
    table = (model.model.encoding if shared else model.model.layers[0].encoding).buckets.table.detach()
    tokens = Tokens(torch.cat([torch.arange(30), torch.arange(10)])[None], 40)
    torch.testing.assert_close(weights, literal_weights(query, key, literal_bias(tokens, table), documents))
