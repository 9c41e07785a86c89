"""Models are loaded from what a path or name turns out to be."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tape_pe.language.pretrained import FINETUNE_FILE, load_base, load_causal_lm, short_name


def test_plain_folder(base_folder):
    model, tokenizer = load_causal_lm(base_folder, dtype=torch.float64, attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation, model.training) == (torch.float64, "eager", False)
    tokens = tokenizer("def f1(x):", return_tensors="pt")["input_ids"]
    assert model(tokens).logits.shape == (1, tokens.shape[1], len(tokenizer))


def test_peft_adapter_with_a_changed_config(base_folder, tmp_path):
    rule = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    changes = {"rope_parameters": rule, "max_position_embeddings": 128}
    model = get_peft_model(load_base(str(base_folder), config_changes=changes), LoraConfig(target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(1, 60)[None]
    expected = model.eval()(tokens).logits
    model.save_pretrained(tmp_path)
    without = load_causal_lm(tmp_path)[0](tokens).logits
    (tmp_path / FINETUNE_FILE).write_text(json.dumps({"config": changes}))
    loaded, tokenizer = load_causal_lm(tmp_path)
    assert torch.equal(loaded(tokens).logits, expected)
    assert not torch.equal(without, expected)
    assert (loaded.config.rope_parameters["factor"], loaded.config.max_position_embeddings) == (4.0, 128)
    assert tokenizer.eos_token == "<eos>"


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, FileNotFoundError, "is a folder without a model: it has no config.json"),
        ({"finetune.json": "{}"}, FileNotFoundError, "whose fine-tuning has not finished"),
        ({"config.json": "{"}, ValueError, "cannot be loaded"),
        ({"adapter_config.json": "{"}, ValueError, "adapter_config.json cannot be read"),
        ({"adapter_config.json": "[]"}, ValueError, "adapter_config.json holds no JSON object"),
        ({"tape_adapter.json": "{}"}, ValueError, "tape_adapter.json names no base model"),
        ({"tape_adapter.json": '{"base_model_name_or_path": "/gone"}'}, FileNotFoundError, "'/gone' is not a model"),
    ],
)
def test_unusable_folders_are_refused(tmp_path, files, error, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        load_causal_lm(tmp_path)


def test_names_in_results(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert short_name("~/mine") == short_name(tmp_path / "mine") == "mine"
    (tmp_path / "s3/tape/seed-0").mkdir(parents=True)
    assert short_name(tmp_path / "s3/tape/seed-0") == "s3/tape/seed-0"
    assert short_name("owner/model") == "owner/model"


def test_missing_folders_are_refused(tmp_path):
    for name in (tmp_path / "none", "./none", "a/b/c", ""):
        with pytest.raises(FileNotFoundError, match="model"):
            load_causal_lm(name)
