"""Released models that add a bias to their scores: what each layer adds, and the tables of `t5rb`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tape_pe.encodings import Tokens
from tape_pe.models.official import load_official
from tape_pe.ops import add_biases, materialized

DATA = Path(__file__).parents[1] / "data" / "parity"


def released(name: str) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """Config, weights and everything recorded of a released model."""
    recorded = load_file(DATA / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in recorded.items() if key.startswith("weights/")}
    return json.loads((DATA / f"{name}.config.json").read_text()), weights, recorded


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def layer_bias(model, layer: int, length: int) -> Tensor:
    """What layer `layer` adds to its scores, `[1, H, N, N]`."""
    tokens = Tokens(torch.arange(length)[None], length)
    shared = model.model.encoding.bias(tokens)
    own = model.model.layers[layer].encoding.bias(torch.zeros(1, 4, length, 8), torch.zeros(1, 4, length, 8), tokens)
    return materialized(add_biases(shared, own))


def test_fire_bias():
    config, weights, recorded = released("fire")
    model = load_official(config, weights)
    for layer in range(config["num_hidden_layers"]):
        expected = recorded[f"layer{layer}/bias"]
        assert expected.shape == (1, 4, 24, 24)
        actual = layer_bias(model, layer, 24)
        assert relative_error(actual, expected) < 1e-5
        assert (actual - expected).abs().max() < 1e-5


def test_alibi_bias_up_to_a_constant_per_row():
    """The released code adds slope * j, this one -slope * (i - j): softmax does not see the difference, slope * i."""
    config, weights, recorded = released("alibi")
    model = load_official(config, weights)
    for layer in range(config["num_hidden_layers"]):
        row = recorded[f"layer{layer}/bias_row"]
        assert row.shape == (1, 4, 1, 24)
        actual = layer_bias(model, layer, 24)
        for query in range(24):
            seen = slice(0, query + 1)
            shifted = row[:, :, 0, seen] - row[:, :, 0, query : query + 1]
            assert torch.equal(actual[:, :, query, seen], shifted)


@pytest.fixture
def t5rb():
    """A `t5rb` checkpoint made of that of `nope`, with random tables under a name of its own."""
    config, weights, recorded = released("nope")
    generator = torch.Generator().manual_seed(0)
    tables = {
        f"model.layers.{layer}.self_attn.rotary_emb.relative_attention_bias.weight": torch.randn(
            32, 4, generator=generator
        )
        for layer in range(config["num_hidden_layers"])
    }
    return config | {"rpe_type": "t5rb"}, weights | tables, recorded


def test_t5rb_reads_one_table_per_layer(t5rb):
    config, weights, recorded = t5rb
    model = load_official(config, weights)
    with torch.no_grad():
        change = model(recorded["input_ids"]).logits - recorded["logits"]
    assert change.abs().max() > 1e-2
    for layer in range(config["num_hidden_layers"]):
        table = weights[f"model.layers.{layer}.self_attn.rotary_emb.relative_attention_bias.weight"]
        actual = layer_bias(model, layer, 150)
        for i, j in ((0, 0), (15, 0), (16, 0), (18, 0), (19, 0), (40, 3), (112, 0), (113, 0), (149, 0), (3, 9)):
            n = max(i - j, 0)
            bucket = n if n < 16 else min(16 + math.floor(math.log(n / 16) / math.log(128 / 16) * 16), 31)
            assert torch.equal(actual[0, :, i, j], table[bucket])


def test_t5rb_refuses_what_is_not_one_table_per_layer(t5rb):
    config, weights, _ = t5rb
    table = "model.layers.1.self_attn.rotary_emb.relative_attention_bias.weight"
    with pytest.raises(ValueError, match=r"missing weights.*layers\.1\.encoding\.buckets\.table"):
        load_official(config, {name: weight for name, weight in weights.items() if name != table})
    with pytest.raises(ValueError, match="second table of buckets"):
        load_official(config, weights | {"model.layers.1.self_attn.other.weight": weights[table]})
    with pytest.raises(ValueError, match=r"misshapen weights.*layers\.1\.encoding\.buckets\.table"):
        load_official(config, weights | {table: torch.randn(16, 4)})


def test_fire_needs_one_length_for_all_layers():
    config, weights, _ = released("fire")
    length = "model.layers.2.self_attn.rotary_emb.init_L"
    with pytest.raises(ValueError, match=r"init_L has the values \[8\.0, 9\.0\]"):
        load_official(config, weights | {length: torch.tensor(9.0)})
    without = {name: weight for name, weight in weights.items() if not name.endswith("mlp.2.bias")}
    with pytest.raises(ValueError, match=r"missing weights.*encoding\.out_bias"):
        load_official(config, without)
