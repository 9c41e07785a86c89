"""LoRA and TAPE trained together with PEFT, saved and loaded by PEFT, and merged into one model.

pip install "tape-pe[peft]"
python examples/04_lora_on_top.py [--model FOLDER]
"""

import argparse
import tempfile

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import tape_pe
from tape_pe.convert.peft import load_lora, lora_config


def load_base(name):
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model folder or hub name; default: a small random model")
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args()

    model = tape_pe.convert(load_base(options.model))  # first TAPE, then PEFT
    model = get_peft_model(model, lora_config(model, r=8, lora_alpha=16))
    print(tape_pe.trainable_parameters(model))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if options.model is None else 2e-4)
    tokens = torch.arange(48).remainder(6).add(3).repeat(4, 1)  # your tokenised text here
    model.train()
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = load_lora(tape_pe.convert(load_base(options.model)), folder)
    difference = (again.eval()(input_ids=tokens).logits - model.eval()(input_ids=tokens).logits).abs().max()
    print(f"logits of the reloaded model differ by {difference.item()}")
    print(type(again.merge_and_unload()).__name__, "has both, and needs no PEFT")


if __name__ == "__main__":
    main()
