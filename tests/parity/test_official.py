"""Agreement with the outputs of the released code, recorded in `tests/data/parity` (see the README there)."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tape_pe.encodings import Tokens
from tape_pe.models.official import import_official, load_official

DATA = Path(__file__).parents[1] / "data" / "parity"
READ = ("adape", "adape_mid", "adamlp", "rope", "rope_linear", "nope", "sincos", "alibi", "fire")
WITH_STATE = ("adape", "adape_mid", "adamlp")


def released(name: str) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """Config, weights and everything recorded of a released model."""
    config = json.loads((DATA / f"{name}.config.json").read_text())
    recorded = load_file(DATA / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in recorded.items() if key.startswith("weights/")}
    return config, weights, recorded


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", READ)
def test_logits_and_hidden_states(name):
    config, weights, recorded = released(name)
    with torch.no_grad():
        outputs = load_official(config, weights)(recorded["input_ids"], output_hidden_states=True)
    assert relative_error(outputs.logits, recorded["logits"]) < 1e-5
    assert relative_error(outputs.hidden_states[0], recorded["input/hidden"]) < 1e-5
    for layer in range(config["num_hidden_layers"] - 1):  # the last one is recorded before the final norm
        assert relative_error(outputs.hidden_states[layer + 1], recorded[f"layer{layer}/hidden"]) < 1e-5


@pytest.mark.parametrize("name", WITH_STATE)
def test_states(name):
    config, weights, recorded = released(name)
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    with torch.no_grad():
        states = load_official(config, weights)(recorded["input_ids"], output_position_states=True).position_states
    places = ["input", *(f"layer{layer}" for layer in range(config["num_hidden_layers"] - 1))]
    assert len(states) == len(places)
    for state, place in zip(states, places, strict=True):
        for part, component in zip(state.chunk(2, dim=-1), ("cos", "sin"), strict=True):
            expected = recorded[f"{place}/position_{component}"]
            assert torch.equal(expected[..., :half], expected[..., half:])  # both halves are the same in this form
            assert relative_error(part, expected[..., :half]) < 1e-5, (place, component)


@pytest.mark.parametrize("name", READ)
def test_gradients(name):
    config, weights, recorded = released(name)
    model = load_official(config, weights)
    loss = model(recorded["input_ids"]).logits.square().mean()
    assert loss.item() == pytest.approx(recorded["loss"].item(), rel=1e-5)
    loss.backward()
    last = config["num_hidden_layers"] - 1
    names = {
        "gate_proj.weight": "pe.x_proj.weight",
        "up": "pe.up_proj.weight",
        "down": "pe.down_proj.weight",
        "c": "self_attn.rotary_emb.c",
        "length_factor": "self_attn.rotary_emb.L_multiplier",
        "hidden_weight": "self_attn.rotary_emb.mlp.0.weight",
        "hidden_bias": "self_attn.rotary_emb.mlp.0.bias",
        "out_weight": "self_attn.rotary_emb.mlp.2.weight",
        "out_bias": "self_attn.rotary_emb.mlp.2.bias",
    }
    compared = set()
    for parameter_name, parameter in model.named_parameters():
        released_name = parameter_name
        prefix, _, inner = parameter_name.partition(".encoding.")
        if inner in names:
            released_name = f"{prefix}.{names[inner]}"
        elif inner == "mix":
            released_name = f"{prefix}.post_attention_linear.weight"
        expected = recorded[f"grads/{released_name}"]
        if inner == "mix":
            # The released layer reads the sum of each row: all entries of a row have the gradient of the sum.
            expected = expected[:, :1]
        compared.add(released_name)
        if inner == "out_bias":  # it shifts whole rows of scores: its gradient is rounding alone, there and here
            assert parameter.grad.abs().max() < 1e-7
            continue
        assert relative_error(parameter.grad, expected) < 1e-4, parameter_name
    recorded_names = {key.removeprefix("grads/") for key in recorded if key.startswith("grads/")}
    unread = {key for key in recorded_names - compared if "inv_freq" not in key}
    assert all(f".{last}." in key and name in WITH_STATE for key in unread), unread


def layer_bias(model, layer: int, length: int) -> Tensor:
    """What layer `layer` adds to its scores, `[1, H, N, N]`."""
    tokens = Tokens(torch.arange(length)[None], length)
    shared = model.model.encoding.bias(tokens)
    own = model.model.layers[layer].encoding.bias(torch.zeros(1, 4, length, 8), torch.zeros(1, 4, length, 8), tokens)
    return shared if own is None else own


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


def test_adattention_is_adape_without_the_position_mlp():
    config, weights, recorded = released("adape_mid")
    full = load_official(config, weights)
    attention_only = load_official(
        config | {"rpe_type": "adattention"}, {key: value for key, value in weights.items() if ".pe." not in key}
    )
    for layer in full.model.layers[:-1]:
        torch.nn.init.zeros_(layer.encoding.up)
    with torch.no_grad():
        difference = full(recorded["input_ids"]).logits - attention_only(recorded["input_ids"]).logits
        change = attention_only(recorded["input_ids"]).logits - recorded["logits"]
    assert difference.abs().max() < 1e-6
    assert change.abs().max() > 1e-3


def test_dynamic_raises_the_base_beyond_the_trained_length():
    config, weights, _ = released("rope")
    factor, trained = 4.0, 8
    config |= {"rope_scaling": {"type": "dynamic", "factor": factor}, "max_position_embeddings": trained}
    model = load_official(config, weights)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    for length in (6, 24, 6):  # short, long, short: what came before changes nothing
        ids = torch.arange(length)[None] % config["vocab_size"]
        state = model(ids, output_position_states=True).position_states[0][0, 0]
        base = 10000.0
        if length > trained:
            base *= (factor * length / trained - (factor - 1)) ** (head_dim / (head_dim - 2))
        for pair in range(head_dim // 2):
            phase = (length - 1) * base ** (-2 * pair / head_dim)
            assert state[-1, pair].item() == pytest.approx(math.cos(phase), abs=1e-6)
            assert state[-1, pair + head_dim // 2].item() == pytest.approx(math.sin(phase), abs=1e-6)


def test_log_scale_multiplies_queries():
    config, weights, _ = released("rope")
    config |= {"log_scale": True, "train_scale": 128}
    model = load_official(config, weights)
    layer = model.model.layers[0]
    positions = Tokens(torch.arange(24)[None], 24)
    query, key = torch.randn(1, 4, 24, 8), torch.randn(1, 4, 24, 8)
    state = model.model.encoding.start(positions)
    plain = load_official(config | {"log_scale": False}, weights)
    plain_query, plain_key = plain.model.layers[0].encoding.rotate(query, key, plain.model.encoding.start(positions))
    scaled_query, scaled_key = layer.encoding.rotate(query, key, state)
    factor = torch.log(torch.arange(24) + 1.0) / math.log(128)
    torch.testing.assert_close(scaled_query, plain_query * factor[:, None])
    torch.testing.assert_close(scaled_key, plain_key)


def test_import_writes_a_model_that_auto_classes_load(tmp_path):
    config, weights, recorded = released("adape")
    source = tmp_path / "released"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(weights, source / "model.safetensors")
    import_official(source, tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert type(model).__name__ == "TapeLMForCausalLM"
    assert relative_error(model(recorded["input_ids"]).logits, recorded["logits"]) < 1e-5


def test_import_reads_torch_files_without_unpickling_code(tmp_path):
    config, weights, recorded = released("adape")
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    model = import_official(tmp_path, tmp_path / "converted")
    assert relative_error(model(recorded["input_ids"]).logits, recorded["logits"]) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rpe_type": "adalibi"}, "rpe_type='adalibi'"),
        ({"rpe_type": None}, "rpe_type=None"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_scaling.type='spiral'"),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing"),
        ({"num_hidden_layers": 4}, "missing weights"),
        ({"num_hidden_layers": 2}, "unexpected weights"),
        ({"vocab_size": 32}, "misshapen weights"),
    ],
)
def test_bad_checkpoints_are_refused(change, message):
    config, weights, _ = released("adape")
    with pytest.raises(ValueError, match=message):
        load_official(config | change, weights)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files_are_refused(tmp_path, name):
    config, _, _ = released("adape")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_bytes(b"not weights")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        import_official(tmp_path, tmp_path / "out")


def test_missing_keys_and_nan_are_refused(tmp_path):
    config, weights, _ = released("adape")
    without = {key: value for key, value in config.items() if key != "hidden_size"}
    with pytest.raises(ValueError, match="hidden_size: missing"):
        load_official(without, weights)
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"not finite.*model\.norm\.weight"):
        load_official(config, weights)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        import_official(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="weights"):
        import_official(tmp_path, tmp_path / "out")
