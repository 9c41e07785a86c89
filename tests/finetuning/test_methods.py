"""What each method changes, trains and saves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.convert.pretrained import small_model
from transformers import AutoConfig

from tape_pe.convert import trainable_parameters
from tape_pe.finetuning.finetune import prepare_folder
from tape_pe.finetuning.methods import build_model, config_changes, save_model
from tape_pe.finetuning.options import METHODS
from tape_pe.language.pretrained import load_causal_lm, load_tokenizer

TOKENS = torch.arange(1, 65)[None]
ORIGINAL = "original_max_position_embeddings"
OWN = {
    "tape": [".tape."],
    "lora": ["lora_"],
    "longlora": ["lora_"],
    "theta": ["lora_"],
    "tape_lora": [".tape.modules_to_save", "lora_"],
}
GROUPS = {
    "tape": ["tape"], "lora": ["lora"], "longlora": ["lora"], "theta": ["lora"], "full": ["other"],
    "tape_lora": ["tape", "lora"],
}  # fmt: skip


def build(options):
    """The model, its new weights at random values."""
    changes = config_changes(options, AutoConfig.from_pretrained(options.model))
    torch.manual_seed(1)
    model = build_model(options, changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model, changes


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_trained_weights_and_a_reload(make_finetune, tied_folder, method, tied):
    options = make_finetune(method, **({"model": str(tied_folder)} if tied else {}))
    model, changes = build(options)
    model.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    also = {}
    for name, parameter in model.named_parameters():
        own = method != "full" and any(part in name for part in OWN[method])
        base = ("embed" in name or "lm_head" in name or "norm" in name) and ".original_module" not in name
        assert parameter.requires_grad == (method == "full" or own or base), name
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if base:
            also[name] = parameter.numel()
    assert len(also) == 1 + 7 + (not tied)
    groups = {group.name: group.parameters for group in trainable_parameters(model).groups}
    assert groups["embed"] + groups["norm"] == sum(also.values())
    assert set(groups) == {"embed", "norm", *GROUPS[method]}

    expected = model.eval()(TOKENS).logits
    prepare_folder(options, changes)
    save_model(model, options, options.folder)
    load_tokenizer(options.model).save_pretrained(options.folder)
    loaded, _ = load_causal_lm(options.folder)
    assert torch.equal(loaded(TOKENS).logits, expected)
    base, _ = load_causal_lm(options.model)
    assert not torch.allclose(base(TOKENS).logits, expected)
    assert loaded.config.rope_parameters == {**base.config.rope_parameters, **changes["rope_parameters"]}
    assert loaded.config.max_position_embeddings == 64
    assert loaded.config._attn_implementation == "sdpa"
    how = {"min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    assert loaded.generate(TOKENS[:, :8], **how).shape == (1, 10)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "full"])
def test_nothing_else_can_be_trained(make_finetune, method):
    model, _ = build(make_finetune(method, also_train=()))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == any(part in name for part in OWN[method]), name
    assert [group.name for group in trainable_parameters(model).groups] == GROUPS[method]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ({"factor": 3.0}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}),
        ({"rope": "ntk"}, {"rope_type": "default", "rope_theta": 1e4 * 2 ** (16 / 14)}),
        ({"rope": "yarn"}, {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, ORIGINAL: 32}),
        ({"rope": "none"}, None),
        ({"length": 32}, None),
        ({"method": "theta"}, {"rope_type": "default", "rope_theta": 1e6}),
        ({"method": "theta", "rope": "linear"}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_frequency_rules(make_finetune, base_folder, changes, rule):
    options = replace(make_finetune("lora"), **changes)
    found = config_changes(options, AutoConfig.from_pretrained(base_folder))
    assert found.get("rope_parameters") == rule
    assert found["max_position_embeddings"] == max(32, options.length)


def test_models_with_a_rule_keep_it_or_are_refused(make_finetune, base_folder):
    config = AutoConfig.from_pretrained(base_folder)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"the model has the rule 'linear' already; --rope none keeps"):
        config_changes(make_finetune("lora"), config)
    assert config_changes(make_finetune("lora", rope="none"), config) == {"max_position_embeddings": 64}


@pytest.mark.parametrize("method", ["lora", "tape_lora"])
def test_lora_reaches_projections_of_other_names(make_finetune, tmp_path, method):
    small_model("phi3").save_pretrained(tmp_path / "phi3")
    model = build_model(make_finetune(method, model=str(tmp_path / "phi3")), {})
    changed = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    assert changed == {"o_proj", "qkv_proj"}


def test_weights_of_the_base_are_left_alone(make_finetune, base_folder):
    before = (Path(base_folder) / "model.safetensors").read_bytes()
    model, _ = build(make_finetune("full"))
    save_model(model, make_finetune("full"), make_finetune("full").folder)
    assert (Path(base_folder) / "model.safetensors").read_bytes() == before
