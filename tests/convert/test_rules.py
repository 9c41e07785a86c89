"""Options of a conversion: new frequency rules, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.convert.pretrained import small_model, small_tape_model, tokens, trained
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tape_pe
from tape_pe.convert import tape_config


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        ({"rope_type": "ntk", "factor": 4.0}, {"rope_type": "default", "rope_theta": 10000.0 * 4.0 ** (16 / 14)}),
        (
            {"rope_type": "yarn", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128},
        ),
    ],
)
@torch.no_grad()
def test_a_new_rule_gives_the_model_with_that_rule(rule, expected, tmp_path):
    model, ids = small_model("llama"), tokens(1, 100)
    config = copy.deepcopy(model.config)
    config.rope_parameters = dict(expected)
    with_rule = LlamaForCausalLM(config).eval()
    with_rule.load_state_dict(model.state_dict())
    before = model(ids).logits
    tape_pe.convert(model, tape_pe.TapeConfig(rope=rule))
    assert model.config.rope_parameters == expected
    assert model.config.max_position_embeddings == 128 * rule["factor"]
    assert torch.equal(model(ids).logits, with_rule(ids).logits)
    assert not torch.equal(model(ids).logits, before)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(reloaded(ids).logits, with_rule(ids).logits)


@torch.no_grad()
def test_the_rule_is_for_full_attention_where_there_are_two_tables():
    model = tape_pe.convert(small_model("gemma3_text"), tape_pe.TapeConfig(rope={"rope_type": "linear", "factor": 8.0}))
    assert model.config.rope_parameters["full_attention"]["factor"] == 8.0
    assert model.config.rope_parameters["sliding_attention"]["rope_type"] == "default"


@torch.no_grad()
def test_unsloth_7028_llama3_scaling_of_the_base_is_kept():
    """unsloth#7028: theta 500000 with llama3 scaling was replaced by the default table."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = small_model("llama", rope_parameters=rope)
    ids = tokens(1, 100)
    positions = torch.arange(100)[None]
    before, tables = model(ids).logits, model.model.rotary_emb(torch.zeros(1), positions)
    tape_pe.convert(model)
    assert torch.equal(model(ids).logits, before)
    layer = model.model.layers[0]
    start = layer.tape_form.start(*model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions))
    torch.testing.assert_close(start[0, 0], torch.cat([t[0, :, :8] for t in tables], dim=-1), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="llama3"):
        tape_pe.convert(
            small_model("llama", rope_parameters=rope), tape_pe.TapeConfig(rope={"rope_type": "linear", "factor": 2.0})
        )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rope_type": "cubic", "factor": 2.0}, "cubic"),
        ({"rope_type": "linear"}, "factor=None"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast='x': a positive number"),
        ("linear", "rope='linear': a mapping is needed"),
    ],
)
def test_rules_that_do_not_exist_are_refused_and_the_model_left_alone(rule, message):
    model = small_model("llama")
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ValueError, match=message):
        tape_pe.convert(model, tape_pe.TapeConfig(rope=rule))
    assert not tape_pe.is_converted(model)
    assert model.config.to_dict() == before


def test_bad_options_and_models_are_refused():
    with pytest.raises(ValueError, match="position_size=0"):
        tape_pe.TapeConfig(position_size=0)
    with pytest.raises(ValueError, match="head_mixing='some'"):
        tape_pe.TapeConfig(head_mixing="some")
    with pytest.raises(TypeError, match="Linear"):
        tape_pe.convert(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="TapeConfig"):
        tape_pe.convert(small_model("llama"), {"position_size": 3})
    with pytest.raises(ValueError, match="converted already"):
        tape_pe.convert(small_tape_model("llama"))
    with pytest.raises(ValueError, match="not converted"):
        tape_pe.unconvert(small_model("llama"))
    with torch.device("meta"):
        meta = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    with pytest.raises(tape_pe.UnsupportedModelError, match="meta"):
        tape_pe.convert(meta)


@pytest.mark.parametrize(
    "config",
    [
        tape_pe.TapeConfig(position_size=5, head_mixing="diagonal"),
        tape_pe.TapeConfig(update_attention=False),
        tape_pe.TapeConfig(update_mlp=False),
        tape_pe.TapeConfig(gate_input="mlp_input"),
        tape_pe.TapeConfig(state_norm="rms"),
        tape_pe.TapeConfig(update_attention=False, update_mlp=False),
    ],
)
@torch.no_grad()
def test_options_are_kept_and_work_with_a_cache(config, tmp_path):
    model, ids = small_tape_model("llama", config), tokens(2, 14)
    assert tape_config(model) == config
    full = model(ids).logits
    first = model(ids[:, :9], use_cache=True)
    step = model(ids[:, 9:], cache=first.cache).logits
    torch.testing.assert_close(step, full[:, 9:], rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert tape_config(reloaded) == config
    assert torch.equal(reloaded(ids).logits, full)


def test_a_fresh_registered_class_starts_as_its_base():
    """Start values must survive transformers' own initialisation of missing weights."""
    from tape_pe.convert.classes import TapeLlamaForCausalLM

    config = tape_pe.convert(small_model("llama")).config
    model = TapeLlamaForCausalLM(config).eval()
    named = {n: p for n, p in model.named_parameters() if ".tape." in n}
    assert all(p.abs().max() == 0 for n, p in named.items() if n.endswith((".mix", ".up")))
    assert all(p.abs().max() > 0 for n, p in named.items() if n.endswith((".down", "gate_proj.weight")))
    assert len(named) == 3 * 4


def test_missing_position_weights_are_reported_and_start_at_their_start(tmp_path):
    from safetensors.torch import load_file, save_file

    model = small_tape_model("llama")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: w for n, w in weights.items() if ".tape." not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    reloaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert any("tape" in name for name in info["missing_keys"])
    ids = tokens(2, 14)
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, tape_pe.unconvert(model)(ids).logits)


@torch.no_grad()
def test_loaded_in_half_precision_position_weights_stay_fp32(tmp_path):
    model, ids = small_tape_model("llama"), tokens(2, 14)
    model.to(torch.bfloat16)
    for layer in model.model.layers[:-1]:
        layer.tape.float()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    dtypes = {".tape." in name: p.dtype for name, p in reloaded.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_damaged_weights_are_called_that():
    model = small_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(tape_pe.UnsupportedModelError, match="layer 1 computes queries or keys that are not finite"):
        tape_pe.convert(model)


def test_classifiers_reload_too(tmp_path):
    from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = small_model("llama").config
    model = trained(tape_pe.convert(LlamaForSequenceClassification(config).eval()))
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(reloaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
