"""Passkey retrieval as a task to train: prompts, held-out keys, both protocols."""

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tape_pe.tasks import make_task
from tape_pe.tasks.base import IGNORED_LABEL
from tape_pe.tasks.passkey_training import Passkey

TASK = Passkey(length=96, eval_lengths=[48, 96, 192], seeds=8)


def question_and_answer(sample) -> tuple[str, str]:
    tokenizer = TASK.tokenizer()
    asked = sample["labels"] != IGNORED_LABEL
    assert (sample["labels"][asked] == sample["input_ids"][asked]).all()
    first = int(np.argmax(asked))
    assert asked[first:].all()
    return tokenizer.decode(sample["input_ids"][:first]), tokenizer.decode(sample["input_ids"][first:])


def test_samples_hide_a_key_and_ask_for_it():
    depths = []
    for index in range(300):
        prompt, answer = question_and_answer(TASK.training_dataset(0, 300)[index])
        keys = re.findall(r"key ([0-9]+)\.", prompt)
        assert len(keys) == 1
        assert answer == f" {keys[0]}<eos>"
        assert prompt.endswith(" key?")
        assert TASK.prompts.shortest() <= len(prompt) <= 96
        depths.append(prompt.index(keys[0]) / len(prompt))
    assert min(depths) < 0.15
    assert max(depths) > 0.8


def test_a_sample_depends_on_seed_and_index_alone():
    first, again = TASK.training_dataset(0, 10)[3], TASK.training_dataset(0, 10**9)[3]
    assert (first["input_ids"] == again["input_ids"]).all()
    other = TASK.training_dataset(1, 10)[3]
    assert first["input_ids"].tolist() != other["input_ids"].tolist()


def test_evaluation_keys_are_never_trained_on():
    many = Passkey(length=40, seeds=20_000)
    keys = {int(re.search(r"key ([0-9]+)\.", many.tokenizer().decode(s["input_ids"]))[1]) for s in _samples(many, 200)}
    assert len(many.held_out) > 15_000
    assert not keys & many.held_out
    assert many.training_summary(0, 5) == {"samples": 5, "held_out_keys": len(many.held_out)}


def _samples(task, count):
    data = task.training_dataset(0, count)
    return [data[index] for index in range(count)]


class Reader:
    """Answers by reading the key from the prompt, and then says `more`."""

    device = torch.device("cpu")

    def __init__(self, more: str, longest: int = 10**9) -> None:
        self.tokenizer, self.more, self.longest = TASK.tokenizer(), more, longest

    def generate(self, input_ids, max_new_tokens, **options):
        rows = []
        for ids in input_ids:
            key = re.search(r"key ([0-9]+)\.", self.tokenizer.decode(ids))[1]
            text = f" {key}{self.more}" if len(ids) <= self.longest else " 0" + self.more
            row = self.tokenizer(text)["input_ids"][:max_new_tokens]
            rows.append(row + [self.tokenizer.eos_token_id] * (max_new_tokens - len(row)))
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)


@pytest.mark.parametrize(
    ("more", "exact", "first"), [("", 1.0, 1.0), (". the", 1.0, 1.0), ("1", 0.0, 0.0), (" 9", 1.0, 1.0)]
)
def test_scores_follow_both_protocols(more, exact, first):
    metrics = TASK.score(Reader(more), TASK.tokenizer())
    assert metrics["exact_match_by_length"] == [exact] * 3
    assert metrics["first_number_by_length"] == [first] * 3


def test_lengths_beyond_the_trained_one_are_out_of_range():
    metrics = TASK.score(Reader("", longest=96), TASK.tokenizer())
    assert metrics["exact_match_in_range"] == 1.0
    assert metrics["exact_match_out_of_range"] == 0.0
    assert metrics["exact_match"] == pytest.approx(2 / 3)


def test_the_longest_scored_text_is_a_prompt_with_its_answer():
    assert TASK.longest_scored == 192 + 10
    assert Passkey(length=96, seeds=8).longest_scored == 4 * 96 + 10
    told = Passkey(length=96, seeds=8, texts={**asdict(TASK.texts), "answer": " it is {key}"})
    assert told.longest_scored == 4 * 96 + len(" it is 50000") + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 5}, "task.length=5: integers of at least 16"),
        ({"eval_lengths": [8]}, r"task.eval_lengths=\[8\]: integers"),
        ({"seeds": 0}, "task.seeds=0"),
        ({"length": "long"}, "task.length='long'"),
        ({"texts": {"filler": " "}}, "texts.filler"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("passkey", **options)


def test_a_prompt_of_other_characters_is_refused():
    with pytest.raises(ValueError, match="prompt='KEY'"):
        TASK.answer(None, TASK.tokenizer(), "KEY")
