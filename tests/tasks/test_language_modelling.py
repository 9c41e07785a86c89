"""Language modelling as a task: samples, tokenizers, perplexity by length."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tape_pe import TapeLMConfig, TapeLMForCausalLM
from tape_pe.tasks import make_task
from tape_pe.tasks.language_modelling import LanguageModelling

TEXT = "".join(f"{n} times {n} is {n * n}, größer als {n}.\n" for n in range(600))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(TEXT, encoding="utf-8")
    (folder / "test.txt").write_text(TEXT[5000:9000], encoding="utf-8")
    return {"data": str(folder / "train.txt"), "eval_data": str(folder / "test.txt")}


def test_bytes_are_tokens(files):
    task = LanguageModelling(**files, length=32)
    tokenizer = task.tokenizer()
    assert len(tokenizer) == 258
    assert len(tokenizer("größer")["input_ids"]) == len("größer".encode()) == 8
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert len(task.training_tokens) == len(TEXT.encode()) // 64 * 64, "whole blocks are read"


def test_byte_pairs_are_learned_from_the_text(files):
    task = LanguageModelling(**files, tokens="bpe", vocab_size=512, length=32)
    tokenizer = task.tokenizer()
    assert 258 < len(tokenizer) <= 512
    assert tokenizer.get_vocab() == task.tokenizer().get_vocab()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert len(tokenizer(" times")["input_ids"]) == 1


def test_samples_are_pieces_of_the_text_given_by_seed_and_index(files):
    task = LanguageModelling(**files, length=32)
    data, tokenizer = task.training_dataset(3, 10**9), task.tokenizer()
    pieces = [tokenizer.decode(data[index]["input_ids"]) for index in range(200)]
    assert all(piece.strip("�") in TEXT for piece in pieces)
    assert len(set(pieces)) > 190
    assert (data[5]["input_ids"] == task.training_dataset(3, 10)[5]["input_ids"]).all()
    assert (data[5]["input_ids"] == data[5]["labels"]).all()
    assert pieces[:20] != [tokenizer.decode(task.training_dataset(4, 20)[i]["input_ids"]) for i in range(20)]
    limited = LanguageModelling(**files, length=32, train_tokens=40)
    starts = {bytes(limited.training_dataset(0, 100)[i]["input_ids"]) for i in range(100)}
    assert len(limited.training_tokens) == 40
    assert len(starts) == 9, "every place is a start, the last one included"


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(files):
    task = LanguageModelling(**files, length=32, eval_tokens=1000)
    config = TapeLMConfig(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = TapeLMForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    metrics = task.score(model, task.tokenizer())
    assert metrics["lengths"] == [4, 8, 16, 32, 64, 128]
    assert metrics["perplexity_by_length"] == pytest.approx([258.0] * 6, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(258, rel=1e-5)
    assert metrics["tokens"] == metrics["bytes"] == 999
    assert metrics["bits_per_byte"] == pytest.approx(math.log2(258), rel=1e-5)
    assert metrics["trained_length"] == 32


def test_every_token_is_scored_once_at_every_length(files):
    task = LanguageModelling(**files, length=32, eval_tokens=600, eval_factors=(0.5, 1, 2))
    scored = []

    class Recorder(torch.nn.Module):
        config = SimpleNamespace(vocab_size=258)

        def get_input_embeddings(self):
            return torch.nn.Embedding(258, 1)

        @property
        def device(self):
            return torch.device("cpu")

        def forward(self, input_ids, use_cache=False, logits_to_keep=0):
            scored.append(input_ids.shape[0] * (logits_to_keep - 1))
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 258)[:, -logits_to_keep:])

    metrics = task.score(Recorder(), task.tokenizer())
    assert sum(scored) == 3 * 599 == 3 * metrics["tokens"]


def test_the_standard_library_has_a_test_split_of_its_own():
    task = make_task("language_modelling", train_tokens=50_000)
    assert task.data == "python-stdlib"
    assert len(task.training_tokens) == 50_000
    assert np.bincount(task.training_tokens.astype(int)).argmax() == task.tokenizer().convert_tokens_to_ids("Ġ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 7}, "task.length=7"),
        ({"tokens": "words"}, "task.tokens='words'"),
        ({"vocab_size": 100}, "task.vocab_size=100"),
        ({"train_tokens": 100}, "task.train_tokens=100"),
        ({"eval_tokens": 1000}, "task.eval_tokens=1000: at least the longest length, 1024"),
        ({"eval_factors": (0.001,)}, "task.eval_factors"),
        ({"eval_factors": ()}, "task.eval_factors"),
        ({"data": "README.md"}, "task.eval_data=None"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("language_modelling", **options)


def test_texts_that_are_not_there_are_refused_before_training(files):
    with pytest.raises(ValueError, match="split='validation': python-stdlib has train and test"):
        LanguageModelling(eval_split="validation").check()
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        LanguageModelling(**{**files, "eval_data": "none.txt"}).check()
    LanguageModelling(**files, eval_split="any").check()  # files have no splits


def test_too_short_texts_are_refused(files, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    short = str(tmp_path / "short.txt")
    with pytest.raises(ValueError, match=r"task.data=.*has 0 tokens"):
        _ = LanguageModelling(data=short, eval_data=short, length=64).training_tokens
