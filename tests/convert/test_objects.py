"""Converted models as Python objects: pickled, and with a config that other models have as well."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.convert.pretrained import KINDS, small_model, small_tape_model, tokens, trained
from transformers import AutoModelForCausalLM

import tape_pe


def two_models():
    """Two models with one config object."""
    first = small_model("llama")
    second = type(first)(first.config).eval()
    assert second.config is first.config
    return first, second


@torch.no_grad()
@pytest.mark.parametrize("model_type", KINDS)
def test_pickled_models_are_the_same(model_type):
    model, ids = small_tape_model(model_type), tokens(2, 12)
    expected = model(ids).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert type(other) is type(model)
        assert torch.equal(other(ids).logits, expected)
        other.set_attn_implementation("sdpa")
        torch.testing.assert_close(other(ids).logits, expected)
        assert not tape_pe.is_converted(tape_pe.unconvert(other))
    assert torch.equal(model(ids).logits, expected)


def test_a_model_with_the_same_config_is_left_alone(tmp_path):
    first, second = two_models()
    before = second.config.to_dict()
    rope = {"rope_type": "linear", "factor": 2.0}
    tape_pe.convert(first, tape_pe.TapeConfig(rope=rope))
    assert type(second.config).model_type == "llama"
    assert second.config.to_dict() == before
    tape_pe.convert(second, tape_pe.TapeConfig(position_size=3))
    tape_pe.unconvert(first)
    trained(second).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(again(tokens(1, 9)).logits, second(tokens(1, 9)).logits)
    assert type(first.config).model_type == "llama"


def test_loading_an_adapter_leaves_a_model_with_the_same_config_alone(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0}
    tape_pe.save_adapter(small_tape_model("llama", tape_pe.TapeConfig(rope=rope)), tmp_path)
    first, second = two_models()
    tape_pe.load_adapter(first, tmp_path)
    assert first.config.rope_parameters["factor"] == 2.0
    assert second.config.rope_parameters["rope_type"] == "default"


def test_a_loaded_adapter_follows_the_attention_of_its_model(tmp_path):
    model = small_tape_model("llama")
    tape_pe.save_adapter(model, tmp_path)
    tape_pe.load_adapter(model, tmp_path)
    model.set_attn_implementation("sdpa")
    assert {layer.self_attn.config.base._attn_implementation for layer in model.model.layers} == {"sdpa"}


def test_a_model_whose_inner_part_was_converted_back_is_saved_as_converted(tmp_path):
    model = tape_pe.convert(small_model("llama"))
    tape_pe.unconvert(model.model)
    trained(tape_pe.convert(model)).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_wrappers_are_not_converted_back():
    with pytest.raises(TypeError, match="without wrappers"):
        tape_pe.unconvert(torch.nn.Sequential(small_tape_model("llama")))
