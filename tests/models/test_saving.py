"""Saving and loading: bit exact, complete, or an error; and never a half-written folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tape_pe.models import TapeLMConfig, TapeLMForCausalLM, TapeLMModel

WEIGHTS = "model.safetensors"


def assert_same_weights(actual, expected):
    a, b = actual.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert a[name].dtype == tensor.dtype
        assert torch.equal(a[name], tensor), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", [None, "10KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("loader", [TapeLMForCausalLM, AutoModelForCausalLM], ids=["class", "auto"])
def test_round_trip(any_model, make_model, make_tokens, tmp_path, loader, shard, tied):
    config = any_model.config
    model = make_model(
        config.encoding,
        config.num_key_value_heads,
        encoding_options=config.encoding_options,
        tie_word_embeddings=tied,
    )
    model.save_pretrained(tmp_path, **({} if shard is None else {"max_shard_size": shard}))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shard is None else len(list(tmp_path.glob("*-of-*"))) > 2
    loaded = loader.from_pretrained(tmp_path)
    assert type(loaded) is TapeLMForCausalLM
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert_same_weights(loaded, model)
    input_ids = make_tokens(2, 9)
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_base_model(model, make_tokens, tmp_path):
    """AutoModel takes the decoder without its head, from a checkpoint with and from one without it."""
    input_ids = make_tokens(2, 9)
    expected = model.model(input_ids).last_hidden_state
    model.save_pretrained(tmp_path / "with")
    model.model.save_pretrained(tmp_path / "without")
    for path in (tmp_path / "with", tmp_path / "without"):
        loaded = AutoModel.from_pretrained(path)
        assert type(loaded) is TapeLMModel
        assert torch.equal(loaded(input_ids).last_hidden_state, expected)
    with pytest.raises(ValueError, match=r"missing keys.*lm_head"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "without")


def test_dtype(make_model, tmp_path):
    model = make_model("tape")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same_weights(loaded, model.to(torch.bfloat16))
    loaded.save_pretrained(tmp_path / "low")
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "low"), loaded)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "low").dtype == torch.bfloat16


CONFIG = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "hidden_act": "gelu",
    "max_position_embeddings": 77,
    "initializer_range": 0.03,
    "rms_norm_eps": 1e-5,
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 4],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0},
    "encoding": "tape",
    "encoding_options": {
        "position_size": 7,
        "update_attention": True,
        "update_mlp": True,
        "head_mixing": "diagonal",
        "state_norm": "rms",
        "gate_input": "mlp_input",
    },
}


def test_config_round_trip(tmp_path):
    """Every field, each with a value that is not its default."""
    config = TapeLMConfig(**CONFIG)
    defaults = TapeLMConfig()
    config.save_pretrained(tmp_path)
    for loaded in (TapeLMConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is TapeLMConfig
        for name, value in CONFIG.items():
            if name != "encoding":
                assert getattr(defaults, name) != value, f"{name} is tested with its default"
            assert getattr(loaded, name) == value
    fields = {
        name for name in TapeLMConfig.__annotations__ if name not in ("model_type", "keys_to_ignore_at_inference")
    }
    assert fields == set(CONFIG), "a field without a test"
    assert "model_type" in json.loads((tmp_path / "config.json").read_text())


def test_config_leaves_the_callers_dictionaries_alone():
    options, rope = {"position_size": 7}, {"rope_type": "default", "rope_theta": 500.0}
    config = TapeLMConfig(encoding_options=options, rope_parameters=rope)
    config.encoding_options["position_size"] = 9
    config.rope_parameters["rope_theta"] = 1.0
    assert options == {"position_size": 7}
    assert rope == {"rope_type": "default", "rope_theta": 500.0}


@pytest.fixture
def saved(make_model, tmp_path):
    """A saved TAPE model, and a function that changes its weights file."""
    make_model("tape").save_pretrained(tmp_path)

    def edit(change):
        tensors = load_file(tmp_path / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
        return tmp_path

    return edit


@pytest.mark.parametrize(
    "name", ["model.layers.1.encoding.mix", "model.layers.0.encoding.gate_proj.weight", "lm_head.weight"]
)
def test_missing_weights(saved, name):
    path = saved(lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing keys.*{name}"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("name", ["model.layers.2.encoding.mix", "extra.weight"])
def test_unexpected_weights(saved, name):
    path = saved(lambda tensors: tensors.update({name: torch.zeros(2, 4)}))
    with pytest.raises(ValueError, match=f"unexpected keys.*{name}"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("ignore", [False, True])
def test_misshapen_weights(saved, ignore):
    path = saved(lambda tensors: tensors.update({"model.layers.0.encoding.mix": torch.zeros(3, 5)}))
    with pytest.raises(ValueError, match=r"mismatched keys.*model\.layers\.0\.encoding\.mix"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=ignore)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(saved, bad):
    path = saved(lambda tensors: tensors["model.layers.1.encoding.up"].view(-1)[3:4].fill_(bad))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.encoding\.up holds NaN or infinity"):
        AutoModelForCausalLM.from_pretrained(path)


def test_weights_of_another_encoding(make_model, tmp_path):
    """A TAPE checkpoint loaded as RoPE would be a different model, in silence."""
    make_model("tape").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.encoding = "rope"
    with pytest.raises(ValueError, match=r"unexpected keys.*encoding"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_loading_info(saved):
    _, info = AutoModelForCausalLM.from_pretrained(saved(lambda tensors: None), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_interrupted_save(make_model, randomize, tmp_path, monkeypatch):
    """A crash while writing leaves the old files as they were, and nothing else."""
    model = make_model("tape")
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    randomize(model, seed=1)
    model.config.initializer_range = 0.5

    def crash(tensors, filename, **kwargs):
        with open(filename, "wb") as file:
            file.write(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", crash)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("order", [(None, "10KB"), ("10KB", None), ("10KB", "20KB")], ids=str)
def test_saving_over_another_layout(make_model, randomize, tmp_path, order):
    """No file of the first save may be read again: a single file is found before the index of shards."""
    model = make_model("tape")
    for seed, shard in enumerate(order):
        randomize(model, seed=seed)
        (tmp_path / "notes.txt").write_text("mine")
        model.save_pretrained(tmp_path, **({} if shard is None else {"max_shard_size": shard}))
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    index = tmp_path / "model.safetensors.index.json"
    files = {WEIGHTS} if order[1] is None else set(json.loads(index.read_text())["weight_map"].values())
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files
    assert index.exists() == (order[1] is not None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_resize_token_embeddings(make_model, make_tokens, tmp_path, tied):
    """Trained position weights stay, and logits of old tokens with them."""
    model, input_ids = make_model("tape", tie_word_embeddings=tied), make_tokens(2, 9)
    expected = model(input_ids).logits
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed" not in name}
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == model.vocab_size == 70
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name][: len(tensor)], tensor), name
    out = model(input_ids, labels=input_ids + 9)
    torch.testing.assert_close(out.logits[..., :61], expected)
    assert torch.isfinite(out.loss)
    model.save_pretrained(tmp_path)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_start_weights_are_those_of_the_published_model(make_config):
    """A fresh model: W_mix and W_up zero, the rest random; and TAPE is RoPE to the last bit."""
    torch.manual_seed(0)
    tape = TapeLMForCausalLM(make_config("tape", 2)).eval()
    for layer in tape.model.layers[:-1]:
        assert not layer.encoding.mix.any()
        assert not layer.encoding.up.any()
        assert 0.01 < layer.encoding.down.std() < 0.03
        assert 0.01 < layer.encoding.gate_proj.weight.std() < 0.03
    rope = TapeLMForCausalLM(make_config("rope", 2)).eval()
    weights = {name: tensor for name, tensor in tape.state_dict().items() if ".encoding." not in name}
    rope.load_state_dict(weights)
    input_ids = torch.arange(20)[None]
    assert torch.equal(tape(input_ids).logits, rope(input_ids).logits)


def test_from_config(make_config, make_tokens):
    model = AutoModelForCausalLM.from_config(make_config("tape"))
    assert type(model) is TapeLMForCausalLM
    assert not model.model.layers[0].encoding.mix.any()
