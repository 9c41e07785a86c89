"""CoPE: gates, counts and interpolation against the formulas, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.cope import Cope, CopeLayer, CopeOptions
from tape_pe.models import TapeLMForCausalLM

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)
SEGMENTS = {
    "one document": None,
    "left padding": torch.tensor([[-1, -1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]),
    "packed, padded": torch.tensor([[0, 0, 0, 1, 1, 1, -1], [2, 2, -1, 2, 2, 3, 3]]),
}


def sees(segment_ids: torch.Tensor | None, b: int, i: int, j: int) -> bool:
    return j <= i and (segment_ids is None or bool(segment_ids[b, i] == segment_ids[b, j] >= 0))


def literal_bias(query, key, embeddings, segment_ids=None) -> torch.Tensor:
    """The formulas by loops, `[B, H, N, Nk]`, 0 where a query sees nothing; `key` has H heads."""
    batch, heads, num_new, head_dim = query.shape
    num_all, last = key.shape[2], embeddings.shape[0] - 1
    entries = []
    for b in range(batch):
        for h in range(heads):
            for row in range(num_new):
                i = num_all - num_new + row
                q = query[b, h, row]
                for j in range(num_all):
                    if not sees(segment_ids, b, i, j):
                        entries.append(q.new_zeros(()))
                        continue
                    gates = [
                        torch.sigmoid(q @ key[b, h, k] / math.sqrt(head_dim))
                        for k in range(j, i + 1)
                        if sees(segment_ids, b, i, k)
                    ]
                    p = torch.stack(gates).sum().clamp(max=last)
                    low, high = math.floor(p.item()), math.ceil(p.item())
                    w = p - low
                    entries.append(w * (q @ embeddings[high]) + (1 - w) * (q @ embeddings[low]))
    return torch.stack(entries).view(batch, heads, num_new, num_all)


def draw(num_new: int, num_all: int, kv_heads: int, max_positions: int):
    """Queries, keys, and a layer with random embeddings, in fp64."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, num_new, 8, generator=generator, dtype=torch.float64).requires_grad_()
    key = torch.randn(2, kv_heads, num_all, 8, generator=generator, dtype=torch.float64).requires_grad_()
    layer = CopeLayer(SIZES, CopeOptions(max_positions)).double()
    with torch.no_grad():
        layer.embeddings.copy_(torch.randn(max_positions, 8, generator=generator, dtype=torch.float64))
    return query, key, layer


@pytest.mark.parametrize("segments", list(SEGMENTS))
@pytest.mark.parametrize("max_positions", [2, 3, 64])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("num_new", [7, 2, 1])
def test_values_and_gradients(num_new: int, kv_heads: int, max_positions: int, segments: str) -> None:
    segment_ids = SEGMENTS[segments]
    query, key, layer = draw(num_new, 7, kv_heads, max_positions)
    actual = layer.bias(query, key, Tokens(torch.arange(7)[None], num_new, segment_ids))
    expected = literal_bias(query, key.repeat_interleave(4 // kv_heads, dim=1), layer.embeddings, segment_ids)
    visible = torch.tensor(
        [[[[sees(segment_ids, b, 7 - num_new + i, j) for j in range(7)] for i in range(num_new)]] for b in range(2)]
    )
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual * visible, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * visible
    leaves = (query, key, layer.embeddings)
    actual_grads = torch.autograd.grad((actual * weight).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if e is None else e, rtol=1e-8, atol=1e-10)


def test_gates_of_one_count_tokens() -> None:
    """Keys that every query likes: positions are distances plus one, up to the last row of the embeddings."""
    layer = CopeLayer(SIZES, CopeOptions(4))
    query, key = torch.full((1, 4, 6, 8), 10.0), torch.full((1, 2, 6, 8), 10.0)
    positions = layer.positions(query, key, Tokens(torch.arange(6)[None], 6))
    expected = (torch.arange(6)[:, None] - torch.arange(6) + 1).clamp(min=0, max=3).float()
    torch.testing.assert_close(positions, expected.expand(1, 4, 6, 6))


def test_given_positions_play_no_role() -> None:
    query, key, layer = draw(7, 7, 2, 5)
    expected = layer.bias(query, key, Tokens(torch.arange(7)[None], 7))
    assert torch.equal(layer.bias(query, key, Tokens(torch.arange(7)[None] * 3 + 9, 7)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_counts_in_fp32(dtype: torch.dtype) -> None:
    """bf16 cannot add a half to 300."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 600, 8, generator=generator).to(dtype) for heads in (4, 2))
    layer = CopeLayer(SIZES, CopeOptions(500))
    with torch.no_grad():
        layer.embeddings.normal_()
    tokens = Tokens(torch.arange(600)[None], 600)
    layer = layer.to(dtype)
    actual = layer.bias(query, key, tokens)
    assert actual.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.bias(query, key, tokens), actual)
    expected = layer.double().bias(query.double(), key.double(), tokens)
    assert (actual - expected).abs().max() < 1e-2  # counts near 300, in fp32


def test_fresh_models_are_nope(make_config, make_tokens, monkeypatch) -> None:
    """To the last bit where one kernel computes both; torch's own picks another kernel where there is a bias."""
    torch.manual_seed(0)
    cope = TapeLMForCausalLM(make_config("cope")).eval()
    nope = TapeLMForCausalLM(make_config("nope")).eval()
    weights = {name: tensor for name, tensor in cope.state_dict().items() if ".encoding." not in name}
    nope.load_state_dict(weights)
    input_ids = make_tokens(2, 9)
    torch.testing.assert_close(cope(input_ids).logits, nope(input_ids).logits)
    monkeypatch.setenv("TAPE_BACKEND", "blockwise")
    assert torch.equal(cope(input_ids).logits, nope(input_ids).logits)
    cope.train()(input_ids, labels=input_ids).loss.backward()
    assert all(layer.encoding.embeddings.grad.any() for layer in cope.model.layers), "they must be able to learn"


def test_every_layer_has_its_own_embeddings() -> None:
    layers = [Cope.layer(SIZES, CopeOptions(9), idx) for idx in range(3)]
    assert all([p.shape for p in layer.parameters()] == [(9, 8)] for layer in layers)
    assert not list(Cope(SIZES, CopeOptions()).parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_positions": 1}, r"encoding_options\.max_positions=1: at least 2"),
        ({"max_positions": 2.5}, r"encoding_options\.max_positions=2\.5: int"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CopeOptions.from_dict("cope", options)


def test_attention_weights(make_model, make_tokens, kv_heads, first_layer, literal_weights) -> None:
    """Packed documents in the whole decoder."""
    model = make_model("cope", kv_heads, encoding_options={"max_positions": 3}).double()
    documents = torch.tensor([[0] * 5 + [1] * 4])
    query, key, weights = first_layer(model, make_tokens(1, 9), document_ids=documents)
    bias = literal_bias(query, key, model.model.layers[0].encoding.embeddings.detach(), documents)
    torch.testing.assert_close(weights, literal_weights(query, key, bias, documents))
