"""Extends the context of a small model end to end: a base for short texts, tuned to four times its length, measured.

python examples/05_extend_the_context.py                  # half a minute on a CPU; a base trained here, for a show
python examples/05_extend_the_context.py --model FOLDER --length 4096 --steps 1000     # one of yours

The same as `tape finetune` and `tape perplexity`, in Python.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from tape_pe.finetuning.finetune import finetune
from tape_pe.finetuning.options import FinetuneOptions
from tape_pe.language.perplexity import perplexity
from tape_pe.language.pretrained import load_causal_lm
from tape_pe.language.text import read_texts, token_blocks


def small_base(folder):
    """A byte-level Llama made for 32 tokens, trained on Python's standard library for a few seconds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(["<eos>", *alphabet])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    set_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=0)).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    train(folder / "start", folder / "base", "full", length=32, steps=150)
    return folder / "base"


def train(model, output, method, length, steps):
    options = {"max_steps": steps, "batch_size": 8, "accumulation": 1, "warmup_steps": steps // 10, "eval_blocks": 8}
    return finetune(
        FinetuneOptions(str(model), length, method, str(output), learning_rate=1e-3, progress=False, **options)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model folder or hub name; default: a small one that is trained first")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=None, help="folder to write to")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp())

    base = options.model or small_base(folder)
    result = train(base, folder / "tape", "tape", options.length, options.steps)
    print(
        f"held-out loss: {result['metrics']['held_out_loss_before']:.3f}, then {result['metrics']['held_out_loss']:.3f}"
    )

    texts = read_texts("python-stdlib", split="test")
    for place in (base, folder / "tape"):
        model, tokenizer = load_causal_lm(place)
        ids = torch.tensor(next(token_blocks(texts, tokenizer, 8 * options.length)))
        for length in (options.length // 4, options.length):
            found = perplexity(model, ids, length=length, stride=length // 2)
            print(f"{Path(place).name}: perplexity {found.perplexity:.2f} in windows of {length} tokens")


if __name__ == "__main__":
    main()
