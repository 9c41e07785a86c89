"""Every architecture: nothing moves at the start, and afterwards the same things hold as for the decoder."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.convert.pretrained import ARCHITECTURES, small_model, small_tape_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM

import tape_pe
from tape_pe.convert.classes import MODEL_TYPES

# What is refused, with a word of the reason.
REFUSED = {
    "hunyuan_v1_dense": "after RoPE",
    "gpt2": "no rotary positions",
    "bloom": "no rotary positions",
    "gpt_neox": "self_attn",
    "stablelm": "do not work like",
    "deepseek_v3": "layer 0",
    "t5": "encoder-decoder",
    "modernbert-decoder": "self_attn",
}


def test_the_table_of_architectures_is_what_the_auto_classes_load():
    assert set(MODEL_TYPES) == set(ARCHITECTURES)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_do_not_move(model_type):
    model = small_model(model_type)
    ids = tokens(2, 20)
    with torch.no_grad():
        before = model(ids).logits
        tape_pe.convert(model)
        difference = (model(ids).logits - before).abs().max().item()
    assert difference == 0.0
    assert tape_pe.is_converted(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (3, 1, 8), (9, 3, 64), (2, 2, 20), (1, 1, 6)])
def test_logits_do_not_move_at_any_size(heads, kv_heads, head_dim, attention):
    """A product of a wider matrix can be rounded in another way, at some sizes."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = small_model("llama", hidden_size=heads * 16, attention=attention, **sizes)
    ids = tokens(3, 13)
    with torch.no_grad():
        model.config._attn_implementation_internal = "eager"
        before = model(ids).logits
        model.config._attn_implementation_internal = attention
        tape_pe.convert(model)
        assert model.config._attn_implementation == attention
        model.config._attn_implementation_internal = "eager"
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_cached_steps_equal_the_full_forward(model_type):
    model = small_tape_model(model_type)
    ids = tokens(2, 20)
    with torch.no_grad():
        full = model(ids).logits
        assert (full - tape_pe.unconvert(copy.deepcopy(model))(ids).logits).abs().max() > 1e-2
        cache, steps = None, []
        for chunk in ids.split([7, 1, 1, 3, 1, 7], dim=1):
            outputs = model(chunk, cache=cache, use_cache=True)
            cache = outputs.cache
            steps.append(outputs.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-4, atol=1e-5 * full.abs().max().item())


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_saved_models_reload_through_auto_classes(model_type, tmp_path):
    model = small_tape_model(model_type)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == f"tape_{model_type}"
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(reloaded) is type(model)
    assert tape_pe.is_converted(reloaded)
    ids = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_unconverted_is_the_model_before(model_type):
    model = small_model(model_type)
    classes = {name: type(module) for name, module in model.named_modules()}
    config, ids = copy.deepcopy(model.config.to_dict()), tokens(2, 20)
    with torch.no_grad():
        before = model(ids).logits
        assert tape_pe.unconvert(tape_pe.convert(model)) is model
        assert torch.equal(model(ids).logits, before)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.config.to_dict() == config
    assert not tape_pe.is_converted(model)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_exact_is_refused_and_left_alone(model_type):
    if model_type == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        model = T5ForConditionalGeneration(T5Config(vocab_size=99, d_model=32, d_ff=32, num_layers=1, num_heads=2))
    else:
        model = small_model(model_type)
    before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(tape_pe.UnsupportedModelError, match=REFUSED[model_type]):
        tape_pe.convert(model)
    assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
