"""Wrong input gets an error that names the argument, its value and the rule."""

from __future__ import annotations

import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DynamicCache

from tape_pe.models import TapeCache, TapeLMConfig, TapeLMForCausalLM

CONFIGS = {
    "odd head_dim": ({"head_dim": 7}, "head_dim=7: .*even"),
    "heads and kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
    "hidden size": ({"head_dim": None, "hidden_size": 30}, "hidden_size=30: not a multiple of num_attention_heads=4"),
    "unknown encoding": ({"encoding": "tapee"}, "encoding='tapee': known encodings are .*tape"),
    "option of tape": ({"encoding_options": {"size": 3}}, "encoding_options.size=3: encoding='tape' has trainable_"),
    "option of nope": ({"encoding": "nope", "encoding_options": {"size": 3}}, "size=3: encoding='nope' has no options"),
    "option out of range": ({"encoding_options": {"position_size": 0}}, "position_size=0: at least 1"),
    "option choice": ({"encoding_options": {"head_mixing": "half"}}, "head_mixing='half': allowed values are full"),
    "state norm": ({"encoding_options": {"state_norm": "l2"}}, "state_norm='l2': allowed values are none, rms"),
    "gate input": ({"encoding_options": {"gate_input": "x"}}, "gate_input='x': allowed values are mlp_output"),
    "option type": ({"encoding_options": {"position_size": "many"}}, "position_size='many': int"),
    "option real number": ({"encoding_options": {"position_size": 2.5}}, "position_size=2.5: int"),
    "option flag": ({"encoding_options": {"update_mlp": "no"}}, "update_mlp='no': bool"),
    "log scale": ({"encoding": "rope", "encoding_options": {"log_scale": 1}}, "log_scale=1: .*above 1"),
    "unknown key": ({"num_layers": 3}, "num_layers=3: not a key of TapeLMConfig, which has .*num_hidden_layers"),
    "misspelt key": ({"hidden_sizes": 3}, "hidden_sizes=3: not a key"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0: at least 1"),
    "negative width": ({"intermediate_size": -4}, "intermediate_size=-4: at least 1"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0: at least 1"),
    "activation": ({"hidden_act": "sulu"}, "hidden_act='sulu': known activations are .*silu"),
    "rope type": ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral': known"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor=None: .*positive"),
    "rope theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "theta=-1.0: .*positive"),
    "padding id": ({"pad_token_id": 61}, "pad_token_id=61: .*vocab_size=61"),
}


@pytest.mark.parametrize("case", list(CONFIGS))
def test_config(make_config, case):
    changes, message = CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": "wide"}, {"num_hidden_layers": 2.5}, {"encoding": None}, {"encoding_options": ["position_size"]}],
    ids=str,
)
def test_config_types(make_config, changes):
    """Checked by huggingface_hub's strict dataclasses, also where a value is set later."""
    ((name, value),) = changes.items()
    message = f"Field '{name}' expected .* \\(value: {re.escape(repr(value))}\\)"
    with pytest.raises(StrictDataclassFieldValidationError, match=message):
        make_config(**changes)
    with pytest.raises(StrictDataclassFieldValidationError, match=message):
        setattr(make_config(), name, value)


IDS = torch.ones(2, 6, dtype=torch.long)
MASK = torch.ones(2, 6, dtype=torch.long)
CALLS = {
    "no input": ({}, "input_ids and inputs_embeds: exactly one"),
    "both inputs": ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 6, 32)}, "input_ids and inputs_embeds: exactly"),
    "one axis": ({"input_ids": IDS[0]}, r"input_ids has the shape \(6,\): .*\[B, N\]"),
    "float tokens": ({"input_ids": IDS.float()}, r"input_ids has the dtype torch.float32: integers"),
    "embeds of two axes": ({"inputs_embeds": torch.zeros(6, 32)}, r"inputs_embeds has the shape \(6, 32\)"),
    "embeds of another width": ({"inputs_embeds": torch.zeros(2, 6, 31)}, r"inputs_embeds has the shape \(2, 6, 31\)"),
    "mask of four axes": (
        {"attention_mask": MASK[:, None, None].expand(2, 1, 6, 6)},
        r"attention_mask .*\(2, 1, 6, 6\)",
    ),
    "short mask": ({"attention_mask": MASK[:, :5]}, r"attention_mask has the shape \(2, 5\): .*\(2, 6\)"),
    "long mask": ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has the shape \(2, 7\): .*\(2, 6\)"),
    "mask of one row": ({"attention_mask": MASK[:1]}, r"attention_mask has the shape \(1, 6\)"),
    "additive mask": ({"attention_mask": torch.tensor([[0.0, -1e9]]).expand(2, 2).repeat(1, 3)}, "attention_mask"),
    "positions of another length": ({"position_ids": torch.arange(5)[None]}, r"position_ids has the shape \(1, 5\)"),
    "positions of one axis": ({"position_ids": torch.arange(6)}, r"position_ids has the shape \(6,\)"),
    "positions of other rows": ({"position_ids": torch.zeros(3, 6)}, r"position_ids has the shape \(3, 6\)"),
    "positions in bfloat16": (
        {"position_ids": torch.arange(6)[None].to(torch.bfloat16)},
        "position_ids has the dtype torch.bfloat16",
    ),
    "documents of another length": ({"document_ids": MASK[:, :3]}, r"document_ids has the shape \(2, 3\)"),
    "documents in float": ({"document_ids": MASK.float()}, "document_ids has the dtype torch.float32: integers"),
    "seq_idx of another length": ({"seq_idx": MASK[:, :3]}, r"seq_idx has the shape \(2, 3\)"),
    "another cache": ({"cache": DynamicCache()}, "cache=DynamicCache: a TapeCache is needed"),
    "tuple as cache": ({"cache": ((None, None),)}, "cache=tuple: a TapeCache is needed"),
    "old name of the cache": ({"past_key_values": TapeCache()}, "past_key_values: .*cache"),
    "labels of another length": ({"labels": IDS[:, :4]}, r"labels has the shape \(2, 4\): .*\(2, 6\)"),
    "labels and logits_to_keep": ({"labels": IDS, "logits_to_keep": 2}, "logits_to_keep=2: labels need all logits"),
}


@pytest.mark.parametrize("case", list(CALLS))
def test_forward(make_model, case):
    changes, message = CALLS[case]
    given = changes if "input" in case or "embeds" in case or "input_ids" in changes else {"input_ids": IDS, **changes}
    with pytest.raises(ValueError, match=message):
        make_model("tape")(**given)


def test_tokens_out_of_vocabulary(make_model):
    for token in (61, -1):
        with pytest.raises(IndexError):
            make_model("tape")(torch.tensor([[1, token]]))


def test_batch_of_another_size_than_the_cache(make_model):
    model = make_model("tape")
    cache = model(IDS).cache
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"cache holds 2 rows: .*{rows}"):
            model(torch.ones(rows, 1, dtype=torch.long), cache=cache)
    assert cache.get_seq_length() == 6
    assert cache.segment_ids is None


def test_a_refused_call_leaves_the_cache_alone(make_model):
    model = make_model("tape")
    cache = model(IDS, attention_mask=MASK).cache
    before = model(IDS[:, :1], cache=cache).logits
    cache.crop(-1)
    for wrong in ({"attention_mask": torch.ones(2, 3)}, {"position_ids": torch.zeros(2, 3)}):
        with pytest.raises(ValueError, match="shape"):
            model(IDS[:, :1], cache=cache, **wrong)
    assert torch.equal(model(IDS[:, :1], cache=cache).logits, before)


def test_cache_and_checkpointing(make_model):
    model = make_model("tape").train()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="cache: activation checkpointing"):
        model(IDS, cache=TapeCache())


def test_messages_name_files(make_model, tmp_path):
    """A checkpoint that does not fit is named by its path."""
    make_model("tape").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        re.sub('"encoding": "tape"', '"encoding": "nope"', (tmp_path / "config.json").read_text())
    )
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        TapeLMForCausalLM.from_pretrained(tmp_path)


def test_empty_config_is_valid():
    assert TapeLMConfig().encoding == "tape"
