"""The same as example 02 in a training loop of your own, with a model made twice as long by a frequency rule.

python examples/03_convert_plain_loop.py [--model FOLDER]
"""

import argparse
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tape_pe


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

    # `rope` is for longer texts than the model was trained on; without it the start is the model itself, bit for bit.
    config = tape_pe.TapeConfig(rope={"rope_type": "linear", "factor": 2.0})
    model = tape_pe.convert(load_base(options.model), config)
    print(tape_pe.freeze_base(model, also_train=("embed", "norm")))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3 if options.model is None else 2e-4, weight_decay=0.0)
    tokens = torch.arange(48).remainder(6).add(3).repeat(4, 1)  # your tokenised text here
    model.train()
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as folder:
        tape_pe.save_adapter(model, folder)
        model = tape_pe.load_adapter(load_base(options.model), folder).eval()  # the rule is in the adapter
    prompt = tokens[:1, :12]
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    print("continued:", output[0, 12:].tolist())


if __name__ == "__main__":
    main()
