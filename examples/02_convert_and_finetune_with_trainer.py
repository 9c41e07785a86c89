"""Puts TAPE into a pretrained model, trains it with transformers' Trainer, saves the adapter, loads it onto the base.

python examples/02_convert_and_finetune_with_trainer.py                   # a small random model, seconds on a CPU
python examples/02_convert_and_finetune_with_trainer.py --model FOLDER    # one of yours, from disk or the hub
"""

import argparse
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import tape_pe


def load_base(name):
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model folder or hub name; default: a small random model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default=tempfile.mkdtemp(), help="folder of the adapter")
    options = parser.parse_args()

    model = tape_pe.convert(load_base(options.model))
    # Norms and embeddings cost little and help a model to get used to new positions; leave them out for TAPE alone.
    print(tape_pe.freeze_base(model, also_train=("embed", "norm")))

    rows = torch.arange(48).remainder(6).add(3).repeat(64, 1)  # 3 4 5 6 7 8 3 4 5 ...: your tokenised text here
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=f"{options.output}/checkpoints",
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=2e-3 if options.model is None else 2e-4,
        warmup_steps=options.steps // 10,
        logging_steps=max(options.steps // 4, 1),
        save_strategy="no",
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=data).train()

    tape_pe.save_adapter(model, options.output)
    again = tape_pe.load_adapter(load_base(options.model), options.output)
    tokens, model = rows[:1].to(model.device), model.eval()
    difference = (again.to(model.device).eval()(tokens).logits - model(tokens).logits).abs().max()
    print(f"saved {options.output}; logits of the reloaded model differ by {difference.item()}")


if __name__ == "__main__":
    main()
