"""Saving what was trained, and putting it back onto its base."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.adapters import assert_unchanged, change_config, change_weights, logits, seal, snapshot
from tests.convert.pretrained import KINDS, small_model, trained
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tape_pe
from tape_pe import TapeConfig, freeze_base, load_adapter, save_adapter
from tape_pe.convert import adapter, tape_config
from tape_pe.convert.fingerprint import tape_names


def adapted(model_type="llama", config=None, also_train=(), **changes):
    """A converted model whose trainable weights all differ from those of its base."""
    model = trained(tape_pe.convert(small_model(model_type, **changes), config))
    freeze_base(model, also_train)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_exact(kind, tmp_path):
    model = adapted(kind)
    expected = logits(model)
    assert save_adapter(model, tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    base = small_model(kind)
    loaded = load_adapter(base, str(tmp_path / "new" / "folder"))
    assert loaded is base
    assert torch.equal(logits(loaded), expected)
    assert not torch.equal(expected, logits(small_model(kind)))


@pytest.mark.parametrize("options", [{"update_mlp": False}, {"head_mixing": "diagonal", "state_norm": "rms"}])
def test_options_come_from_the_file(options, tmp_path):
    model = adapted(config=TapeConfig(**options))
    save_adapter(model, tmp_path)
    loaded = load_adapter(small_model("llama"), tmp_path)
    assert tape_config(loaded) == TapeConfig(**options)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_frequency_rule_comes_from_the_file(rope, kind, tmp_path):
    model = adapted(kind, TapeConfig(rope=rope))
    model.config.max_position_embeddings = 512
    save_adapter(model, tmp_path)
    loaded = load_adapter(small_model(kind), tmp_path)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert loaded.config.max_position_embeddings == 512
    assert torch.equal(logits(loaded), logits(model))


def test_a_base_that_is_converted_already(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    base = tape_pe.convert(small_model("llama"))
    assert torch.equal(logits(load_adapter(base, tmp_path)), logits(model))
    assert torch.equal(logits(load_adapter(base, tmp_path)), logits(model))  # and one that holds an adapter
    other = tape_pe.convert(small_model("llama"), TapeConfig(position_size=3))
    before = snapshot(other)
    with pytest.raises(ValueError, match="converted with position_size=3: the adapter has None"):
        load_adapter(other, tmp_path)
    assert_unchanged(other, before)
    rope = tape_pe.convert(small_model("llama"), TapeConfig(rope={"rope_type": "linear", "factor": 2.0}))
    with pytest.raises(ValueError, match="base_model has rope_parameters="):
        load_adapter(rope, tmp_path)


def test_what_trains_after_loading_is_what_was_saved(tmp_path):
    model = adapted(also_train=("norm",))
    save_adapter(model, tmp_path / "a")
    loaded = load_adapter(small_model("llama"), tmp_path / "a")
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in model.parameters()]
    save_adapter(loaded, tmp_path / "b")
    a, b = (json.loads((tmp_path / name / adapter.CONFIG_FILE).read_text()) for name in "ab")
    assert a == b


def test_unconvert_gives_back_the_base(tmp_path):
    save_adapter(adapted(), tmp_path)
    base = small_model("llama")
    before = logits(base)
    assert torch.equal(logits(tape_pe.unconvert(load_adapter(base, tmp_path))), before)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_same_base_in_half_precision(half, tmp_path):
    model = adapted(also_train=("norm",))
    save_adapter(model, tmp_path / "single")
    loaded = load_adapter(small_model("llama").to(half), tmp_path / "single")
    own = tape_names(loaded)
    tensors = load_file(tmp_path / "single" / adapter.WEIGHTS_FILE)
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if name in own else half)
        if name in tensors:
            assert torch.equal(parameter, tensors[name].to(parameter.dtype))
    # and the other way round: a half-precision base is recognised in fp32, and in the other half precision
    base = trained(tape_pe.convert(small_model("llama").to(half)))
    freeze_base(base)
    save_adapter(base, tmp_path / "half")
    assert torch.equal(logits(load_adapter(small_model("llama").to(half), tmp_path / "half")), logits(base))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        load_adapter(small_model("llama").to(dtype), tmp_path / "half")
        with pytest.raises(ValueError, match="other weights"):
            load_adapter(small_model("llama", seed=1).to(dtype), tmp_path / "half")


def test_size_for_a_small_llama(tmp_path):
    """The sizes of a 135M Llama; vocabulary and MLP do not matter to TAPE."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=576,
        intermediate_size=8,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    model = tape_pe.convert(LlamaForCausalLM(config), check=False)
    # 29 layers (the last has none) with I = 4 * 3: mix 3 x 9, gate_proj 12 x 576, up 12 x 3, down 3 x 12.
    count = 29 * (3 * 9 + 12 * 576 + 12 * 3 + 3 * 12)
    assert freeze_base(model).trained == count == 203_319 <= 250_000
    save_adapter(model, tmp_path)
    # 4 bytes each, a header, and a fingerprint of 272 tensors with 16 fp32 numbers each in hexadecimal digits.
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1_000_000


def other_bases():
    yield {"model_type": "mistral"}, "model_type 'mistral': the adapter belongs to a llama model"
    yield {"hidden_size": 32}, "hidden_size=32 instead of 64"
    yield {"num_hidden_layers": 5}, "num_hidden_layers=5 instead of 4"
    yield {"num_key_value_heads": 4}, "num_key_value_heads=4 instead of 2"
    yield {"num_attention_heads": 8, "head_dim": 8}, "num_attention_heads=8 instead of 4"
    yield {"vocab_size": 100}, r"vocab_size=100 instead of 99, model.embed_tokens.weight of the shape \[100, 64\]"
    yield {"tie_word_embeddings": True}, "tie_word_embeddings=True instead of False, no parameter lm_head.weight"
    yield {"rms_norm_eps": 0.5}, "rms_norm_eps=0.5 instead of 1e-06"
    yield {"attention_bias": True}, "a parameter model.layers.0.self_attn.q_proj.bias"
    yield {"seed": 1}, r"other weights in model.embed_tokens.weight, .* and \d+ more: the adapter belongs to a llama"


@pytest.mark.parametrize(("changes", "message"), list(other_bases()), ids=lambda value: str(value)[:30])
def test_other_bases_are_refused(changes, message, tmp_path):
    save_adapter(adapted(), tmp_path)
    base = small_model(**{"model_type": "llama", **changes})
    before = snapshot(base)
    with pytest.raises(ValueError, match=message):
        load_adapter(base, tmp_path)
    assert_unchanged(base, before)


def test_weights_of_another_base_load_when_asked_to(tmp_path):
    save_adapter(adapted(), tmp_path)
    loaded = load_adapter(small_model("llama", seed=1), tmp_path, check=False)
    assert torch.equal(
        loaded.model.layers[0].tape.mix, load_file(tmp_path / adapter.WEIGHTS_FILE)["model.layers.0.tape.mix"]
    )


def damages():
    name = "model.layers.1.tape.up"
    yield lambda t: t[name].fill_(float("nan")), f"{name} holds NaN or infinity"
    yield lambda t: t[name][0].fill_(float("inf")), f"{name} holds NaN or infinity"
    yield lambda t: t.update({name: t[name].T.contiguous()}), r"up has the shape \(2, 8\), the model's \(8, 2\)"


@pytest.mark.parametrize(("damage", "message"), list(damages()))
@pytest.mark.parametrize("convert_first", [False, True])
def test_broken_weights_change_nothing(damage, message, convert_first, tmp_path):
    save_adapter(
        adapted(also_train=("embed",), config=TapeConfig(rope={"rope_type": "linear", "factor": 2.0})), tmp_path
    )
    change_weights(tmp_path, damage)
    base = small_model("llama")
    if convert_first:
        tape_pe.convert(base, TapeConfig(rope={"rope_type": "linear", "factor": 2.0}))
    before = snapshot(base)
    with pytest.raises(ValueError, match=message):
        load_adapter(base, tmp_path)
    assert_unchanged(base, before)


def test_an_interruption_while_loading_changes_nothing(tmp_path, monkeypatch):
    save_adapter(adapted(also_train=("norm",)), tmp_path)
    base = small_model("llama")
    before = snapshot(base)
    monkeypatch.setattr(adapter, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load_adapter(base, tmp_path)
    assert_unchanged(base, before)


def test_missing_files(tmp_path):
    base = small_model("llama")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_adapter(base, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"tape_adapter\.json does not exist"):
        load_adapter(base, tmp_path)
    save_adapter(adapted(), tmp_path)
    os.remove(tmp_path / adapter.WEIGHTS_FILE)
    with pytest.raises(FileNotFoundError, match=r"tape_adapter\.safetensors does not exist"):
        load_adapter(base, tmp_path)


def test_damaged_files(tmp_path):
    base = small_model("llama")
    save_adapter(adapted(), tmp_path)
    path = tmp_path / adapter.WEIGHTS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="does not belong to"):
        load_adapter(base, tmp_path)
    seal(tmp_path)
    with pytest.raises(ValueError, match="is damaged"):
        load_adapter(base, tmp_path)
    change_config(tmp_path, lambda values: values.update(rope_parameters=None))
    with pytest.raises(ValueError, match="rope_parameters=None: not what an adapter has there"):
        load_adapter(base, tmp_path)
    change_config(tmp_path, lambda values: values.pop("tape"))
    with pytest.raises(ValueError, match="no tape"):
        load_adapter(base, tmp_path)
    change_config(tmp_path, lambda values: values.update(format=2))
    with pytest.raises(ValueError, match=r"format=2; this version of tape-pe reads format 1"):
        load_adapter(base, tmp_path)
    (tmp_path / adapter.CONFIG_FILE).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_adapter(base, tmp_path)


def test_models_that_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="not converted"):
        save_adapter(small_model("llama"), tmp_path)
    with pytest.raises(TypeError, match="model=Sequential"):
        save_adapter(nn.Sequential(adapted()), tmp_path)
    model = adapted()
    model.model.layers[1].tape.mix.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.tape\.mix holds NaN"):
        save_adapter(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writes", range(4))
def test_an_interrupted_save_leaves_a_whole_adapter(writes, tmp_path, monkeypatch):
    """The process ends before the rename that follows `writes` others; then it saves a third adapter, also in part."""
    models = [adapted(config=TapeConfig(position_size=size)) for size in (5, 6, 7)]
    save_adapter(models[0], tmp_path)
    replace = os.replace

    def interrupted_save(model, renames):
        left = iter(range(renames))

        def stop(source, target):
            if next(left, None) is None:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", stop)
        try:
            save_adapter(model, tmp_path)
        except KeyboardInterrupt:
            assert renames < 3
        monkeypatch.setattr(os, "replace", replace)

    def found():
        return tape_config(load_adapter(small_model("llama"), tmp_path)).position_size

    interrupted_save(models[1], writes)
    assert found() == (5 if writes < 2 else 6)
    interrupted_save(models[2], 1)
    assert found() == (5 if writes < 2 else 6)
    save_adapter(models[2], tmp_path)
    assert found() == 7
    assert {path.name for path in tmp_path.iterdir()} == {adapter.CONFIG_FILE, adapter.WEIGHTS_FILE}
