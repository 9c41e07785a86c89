"""What trains after `freeze_base`, and the table of it."""

import pytest
import torch
from tests.convert.pretrained import KINDS, small_model
from torch import nn

import tape_pe
from tape_pe import freeze_base, trainable_parameters
from tape_pe.convert import TrainableGroup


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def converted(model_type="llama", **changes):
    return tape_pe.convert(small_model(model_type, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_only_position_weights_train(kind):
    model = converted(kind)
    freeze_base(model)
    assert trained(model) == {name for name, _ in model.named_parameters() if ".tape." in name}


@pytest.mark.parametrize("tied", [True, False])
def test_exactly_the_named_groups_train_too(tied):
    model = converted("qwen3", tie_word_embeddings=tied)
    freeze_base(model, also_train=("embed", "norm"))
    layer = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    tape = ("mix", "up", "down", "gate_proj.weight")
    assert trained(model) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"model.layers.{i}.{name}.weight" for i in range(4) for name in layer),
        *(f"model.layers.{i}.tape.{name}" for i in range(3) for name in tape),  # nobody reads the last layer's state
        *(() if tied else ("lm_head.weight",)),
    }


def test_norms_with_biases_and_heads_with_biases():
    model = converted("phi")
    freeze_base(model, also_train=["norm", "embed"])
    names = trained(model)
    assert {"model.final_layernorm.bias", "model.layers.0.self_attn.q_layernorm.bias", "lm_head.bias"} <= names
    assert "model.layers.0.self_attn.q_proj.bias" not in names


def test_freezing_again_forgets_the_first_choice():
    model = converted()
    freeze_base(model, also_train=("embed",))
    freeze_base(model)
    assert all(".tape." in name for name in trained(model))


def test_wrong_input_freezes_nothing():
    plain = small_model("llama")
    with pytest.raises(ValueError, match=r"model=LlamaForCausalLM: not converted"):
        freeze_base(plain)
    model = converted()
    with pytest.raises(ValueError, match=r"also_train has 'mlp': known groups are embed, norm"):
        freeze_base(model, also_train=("norm", "mlp"))
    with pytest.raises(ValueError, match=r"also_train='norm': a collection"):
        freeze_base(model, also_train="norm")
    assert all(parameter.requires_grad for m in (plain, model) for parameter in m.parameters())


def test_table():
    model = converted(tie_word_embeddings=True)
    table = freeze_base(model, also_train=("embed",))
    tape = sum(p.numel() for name, p in model.named_parameters() if ".tape." in name)
    total = sum(p.numel() for p in model.parameters())
    assert table.groups == (
        TrainableGroup("tape", 12, tape, tape / total),
        TrainableGroup("embed", 1, 99 * 64, 99 * 64 / total),
    )
    assert (table.trained, table.total) == (tape + 99 * 64, total)
    assert table == trainable_parameters(model)
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines] == ["Group", "-----------", "tape", "embed", "trained", "whole"]
    assert len({len(line) for line in lines[:5]}) == 1  # aligned
    assert f"{total:,}" in lines[-1]


def test_any_model_has_a_table():
    model = small_model("llama")
    assert [group.name for group in trainable_parameters(model).groups] == ["embed", "norm", "other"]
    model.requires_grad_(False)
    assert "trained" in str(trainable_parameters(model))
    assert trainable_parameters(nn.Linear(3, 2)).groups == (TrainableGroup("other", 2, 8, 1.0),)
    assert str(trainable_parameters(nn.ReLU()))
    with torch.device("meta"):
        assert trainable_parameters(nn.LayerNorm(4)).groups == (TrainableGroup("norm", 2, 8, 1.0),)
