"""Faults that users of neighbouring software reported about adapters; each test is named after its report."""

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.adapters import assert_unchanged, change_weights, snapshot
from tests.convert.pretrained import small_model, small_tape_model, tokens

import tape_pe
from tape_pe.convert.adapter import WEIGHTS_FILE


@pytest.mark.parametrize("also_train", [(), ("norm",)])
def test_peft_1678_missing_or_unexpected_weights_raise(also_train, tmp_path):
    model = small_tape_model("llama")
    tape_pe.freeze_base(model, also_train)
    tape_pe.save_adapter(model, tmp_path)
    base = small_model("llama")
    before = snapshot(base)
    name = "model.norm.weight" if also_train else "model.layers.2.tape.mix"
    kept = load_file(tmp_path / WEIGHTS_FILE)[name]
    change_weights(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing weights \\['{name}'\\]"):
        tape_pe.load_adapter(base, tmp_path)
    assert_unchanged(base, before)
    change_weights(tmp_path, lambda tensors: tensors.update({name: kept, "model.layers.3.tape.mix": kept.clone()}))
    with pytest.raises(ValueError, match=r"unexpected weights \['model.layers.3.tape.mix'\]"):
        tape_pe.load_adapter(base, tmp_path)
    assert_unchanged(base, before)


@pytest.mark.parametrize("tied", [True, False])
def test_longlora_53_axolotl_973_trained_embeddings_and_norms_are_in_the_adapter(tied, tmp_path):
    model = small_tape_model("llama", tie_word_embeddings=tied)
    tape_pe.freeze_base(model, also_train=("embed", "norm"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tape_pe.save_adapter(model, tmp_path)
    names = load_file(tmp_path / WEIGHTS_FILE).keys()
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ("lm_head.weight" in names) != tied
    loaded = tape_pe.load_adapter(small_model("llama", tie_word_embeddings=tied), tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
