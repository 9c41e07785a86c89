"""LoRA of PEFT on top of TAPE."""

import pytest
import torch
from tests.convert.pretrained import small_model, tokens

import tape_pe
from tape_pe import TapeConfig
from tape_pe.convert.peft import attention_projections, load_lora, lora_config

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens(2, 12)).logits


def trained_model(kind="llama", checkpointing=None, **options):
    """A PEFT model after three steps, and its parameters before and the gradients of the first."""
    model = tape_pe.convert(small_model(kind))
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora_config(model, r=4, **options))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    gradients = {}
    for step in range(3):
        model(input_ids=tokens(2, 12), labels=tokens(2, 12)).loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), before, gradients


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma3_text"])
def test_both_train_and_come_back(kind, tmp_path):
    model, before, _ = trained_model(kind)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name or ".tape.modules_to_save." in name}
    assert [group.name for group in tape_pe.trainable_parameters(model).groups] == ["tape", "lora"]
    model.save_pretrained(tmp_path)
    loaded = load_lora(tape_pe.convert(small_model(kind)), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    own = peft.PeftModel.from_pretrained(tape_pe.convert(small_model(kind)), tmp_path).eval()
    assert torch.equal(logits(own), logits(model))
    with loaded.disable_adapter():
        torch.testing.assert_close(logits(loaded), logits(small_model(kind)), rtol=0, atol=1e-5)


def test_merging_leaves_a_converted_model(tmp_path):
    model, _, _ = trained_model()
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant):
    _, _, expected = trained_model()
    _, _, gradients = trained_model(checkpointing=reentrant)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_options():
    model = tape_pe.convert(small_model("llama"))
    config = lora_config(model, target_modules=["q_proj", "gate_proj"], modules_to_save=["norm"], lora_alpha=3)
    assert config.modules_to_save == ["norm", "tape"]
    assert (config.target_modules, config.lora_alpha, config.task_type) == ({"q_proj", "gate_proj"}, 3, "CAUSAL_LM")
    lora = [name for name, _ in peft.get_peft_model(model, config).named_parameters() if "lora_" in name]
    assert lora
    assert not any(".tape." in name for name in lora)  # its own gate_proj is trained as it is


@pytest.mark.parametrize("converted", [False, True])
def test_projections_are_found_in_the_model(converted):
    models = {kind: small_model(kind) for kind in ("llama", "phi3", "phi")}
    found = {kind: attention_projections(tape_pe.convert(m) if converted else m) for kind, m in models.items()}
    assert found == {
        "llama": ["k_proj", "o_proj", "q_proj", "v_proj"],
        "phi3": ["o_proj", "qkv_proj"],
        "phi": ["dense", "k_proj", "q_proj", "v_proj"],
    }


def test_bases_without_a_place_for_the_weights_are_refused(tmp_path):
    model, _, _ = trained_model()
    with pytest.raises(FileNotFoundError, match="holds no adapter of PEFT"):
        load_lora(model, tmp_path)
    model.save_pretrained(tmp_path)
    bases = {
        r"down is \(2, 8\) there and nothing in the model": small_model("llama"),
        r"mix is \(2, 4\) there and nothing": tape_pe.convert(small_model("llama"), TapeConfig(update_attention=False)),
        r"down is \(2, 8\) there and \(2, 3\) in": tape_pe.convert(small_model("llama"), TapeConfig(position_size=3)),
    }
    for message, base in bases.items():
        names = [name for name, _ in base.named_parameters()]
        with pytest.raises(ValueError, match=message):
            load_lora(base, tmp_path)
        assert [name for name, _ in base.named_parameters()] == names


def test_wrong_input(tmp_path):
    with pytest.raises(ValueError, match="model=Linear: no layer has a self_attn"):
        attention_projections(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model=LlamaForCausalLM: not converted"):
        lora_config(small_model("llama"))
    nothing = TapeConfig(update_attention=False, update_mlp=False)
    with pytest.raises(ValueError, match="no layer has weights of TAPE"):
        lora_config(tape_pe.convert(small_model("llama"), nothing))
    model = tape_pe.convert(small_model("llama"))
    wrapped = peft.get_peft_model(model, lora_config(model))
    with pytest.raises(TypeError, match="without wrappers"):
        tape_pe.save_adapter(wrapped, tmp_path)
    with pytest.raises(ValueError, match="layers of PEFT"):
        tape_pe.save_adapter(model, tmp_path)
