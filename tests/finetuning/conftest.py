"""A pretrained model small enough to train in a second: a Llama with a byte-pair tokenizer, saved in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tape_pe.finetuning.options import FinetuneOptions

TEXT = "".join(f"def f{n}(x):\n    return x * {n} + {n * n % 97}\n\n" for n in range(400))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder. Trained lengths up to 32; 4 query heads on 2 key/value heads; embeddings not tied."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings."""
    return make_base(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some 5000 tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def make_finetune(base_folder: Path, text_file: Path, tmp_path: Path) -> Callable[..., FinetuneOptions]:
    """Options of a run that takes a second: three steps at twice the base's length."""

    def make(method: str, name: str = "run", **changes: Any) -> FinetuneOptions:
        values = {
            "model": str(base_folder),
            "data": str(text_file),
            "output_dir": str(tmp_path / name),
            "length": 64,
            "max_steps": 3,
            "batch_size": 2,
            "accumulation": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "eval_blocks": 4,
            "logging_steps": 1,
            "progress": False,
        }
        return FinetuneOptions(method=method, **{**values, **changes})

    return make


def make_base(folder: Path, **changes: object) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
