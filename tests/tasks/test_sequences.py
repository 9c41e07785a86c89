"""What all tasks with labelled tokens share: samples, held-out ones, scores."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tape_pe.tasks import TASKS
from tape_pe.tasks.base import IGNORED_LABEL, RightPaddingCollator
from tape_pe.tasks.copying import Copy, Reverse
from tape_pe.tasks.flip_flop import FlipFlop
from tape_pe.tasks.modular_arithmetic import ModularArithmetic
from tape_pe.tasks.recall import AssociativeRecall
from tape_pe.tasks.sequences import SequenceTask, spread_lengths
from tape_pe.tasks.state_tracking import StateTracking

SMALL = {
    "state_tracking": StateTracking(group="S3", max_length=6, rows_per_size=9),
    "flip_flop": FlipFlop(length=12, rows_per_size=9),
    "associative_recall": AssociativeRecall(
        vocab_size=32, train_cases=((12, 2), (24, 4)), eval_cases=((12, 2), (24, 8)), rows_per_size=9
    ),
    "copy": Copy(symbols=5, max_length=5, rows_per_size=9),
    "reverse": Reverse(symbols=5, max_length=5, rows_per_size=9),
    "modular_arithmetic": ModularArithmetic(max_numbers=5, rows_per_size=9),
}


class Scripted:
    """Stands in for a model: the right answers, but for those that `spoil` changes, from ids and labels alone."""

    device = torch.device("cpu")

    def __init__(self, task: SequenceTask, spoil=lambda labels: labels) -> None:
        self.config = SimpleNamespace(vocab_size=len(task.words()) + 2)
        self.labels = {}
        for size in task.evaluation_sizes():
            for ids, labels in zip(*task.encode(*task.evaluation_rows(size)), strict=True):
                self.labels[tuple(ids)] = spoil(labels.copy())

    def __call__(self, input_ids, use_cache=True):
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            for place, label in enumerate(self.labels[tuple(ids)][1:]):
                logits[row, place, max(label, 0)] = 1.0
        return SimpleNamespace(logits=logits)


def test_every_such_task_is_tested_here():
    assert set(SMALL) == {name for name, task in TASKS.items() if issubclass(task, SequenceTask)}


@pytest.fixture(params=SMALL)
def task(request) -> SequenceTask:
    return SMALL[request.param]


def test_a_sample_depends_on_seed_and_index_alone(task):
    dataset = task.training_dataset(7, 1000)
    alone, batch = dataset[412], dataset.__getitems__([3, 999, 412])[2]
    for name in ("input_ids", "labels"):
        assert (alone[name] == batch[name]).all()
        assert (task.training_dataset(7, 10**9)[412][name] == alone[name]).all()
    others = [sample["input_ids"].tolist() for sample in task.training_dataset(8, 50).__getitems__(range(50))]
    assert [sample["input_ids"].tolist() for sample in dataset.__getitems__(range(50))] != others


def test_samples_have_all_training_sizes_and_labels_within_the_vocabulary(task):
    samples = task.training_dataset(0, 4000).__getitems__(range(4000))
    known = len(task.tokenizer())
    assert known == len(task.words()) + 2
    for sample in samples[:300]:
        assert sample["input_ids"].dtype == sample["labels"].dtype == np.int64
        assert ((sample["input_ids"] >= 1) & (sample["input_ids"] < known)).all()
        asked = sample["labels"] != IGNORED_LABEL
        assert asked.any()
        assert not asked[0], "nothing stands before the first token to predict it from"
        assert (sample["labels"][asked] < known).all()
        if not task.aligned:
            assert (sample["labels"][asked] == sample["input_ids"][asked]).all()
    lengths = {len(sample["input_ids"]) for sample in samples}
    encoded = {task.encode(*task.evaluation_rows(size))[0].shape[1] for size in task.training_sizes()}
    assert lengths == encoded
    collated = RightPaddingCollator(0)(samples[:20])
    assert collated["input_ids"].shape == collated["labels"].shape


def test_evaluation_samples_are_different_and_kept_out_of_training(task):
    trained = {tuple(sample["input_ids"]) for sample in task.training_dataset(0, 20000).__getitems__(range(20000))}
    for size in task.evaluation_sizes():
        ids, _ = task.encode(*task.evaluation_rows(size))
        rows = {tuple(row) for row in ids}
        assert len(rows) == len(ids) == min(9, task.number_of_samples(size))
        if task.number_of_samples(size) >= 4 * 9 or not task.is_trainable(size):
            assert not rows & trained
        more = dataclasses.replace(task, rows_per_size=12).evaluation_rows(size)[0]
        assert (more[: len(ids)] == task.evaluation_rows(size)[0]).all()


def test_redrawn_samples_are_counted():
    task = StateTracking(group="S3", max_length=3, rows_per_size=9)
    assert len(task.held_out) == 9 + 9, "9 of 36 and of 216 are at most a quarter"
    redrawn = task.training_summary(0, 4000)["redrawn"]
    expected = 2000 * 9 / 36 + 2000 * 9 / 216
    assert abs(redrawn - expected) < 5 * expected**0.5
    assert len(StateTracking(group="S3", max_length=2, rows_per_size=10).held_out) == 0
    assert StateTracking(group="S3", max_length=2, rows_per_size=10).training_summary(0, 100)["redrawn"] == 0


def test_a_model_that_is_always_right_scores_one(task):
    metrics = task.score(Scripted(task), task.tokenizer(), batch_size=4)
    assert metrics["accuracy"] == metrics["accuracy_in_range"] == metrics["accuracy_out_of_range"] == 1.0
    assert metrics["token_accuracy"] == metrics["sequence_accuracy"] == [1.0] * len(task.evaluation_sizes())
    assert metrics["rows"] == [min(9, task.number_of_samples(size)) for size in task.evaluation_sizes()]
    assert len(metrics["size_names"]) == len(set(metrics["size_names"])) == len(metrics["sizes"])


def test_one_wrong_token_makes_a_sequence_wrong(task):
    def last_is_wrong(labels):
        place = np.flatnonzero(labels != IGNORED_LABEL)[-1]
        labels[place] = 0
        return labels

    metrics = task.score(Scripted(task, last_is_wrong), task.tokenizer())
    assert metrics["sequence_accuracy"] == [0.0] * len(task.evaluation_sizes())
    for size, accuracy in zip(task.evaluation_sizes(), metrics["token_accuracy"], strict=True):
        _, labels = task.encode(*task.evaluation_rows(size))
        asked = (labels != IGNORED_LABEL).sum()
        assert accuracy == pytest.approx(1 - len(labels) / asked)


def test_samples_that_training_could_draw_are_counted():
    task = StateTracking(group="S3", max_length=3, eval_max_length=4, rows_per_size=9)
    more = StateTracking(group="S3", max_length=3, eval_max_length=4, rows_per_size=20)
    assert task.score(Scripted(task), task.tokenizer())["overlap_rows"] == 0
    assert more.score(Scripted(more), more.tokenizer(), trained=task)["overlap_rows"] == 11 + 11


def test_evaluation_options_alone_can_change_later(task):
    assert task.with_evaluation_options({"rows_per_size": 3}).rows_per_size == 3
    fixed = next(name for name in vars(task) if name not in task.evaluation_options and name != "held_out")
    with pytest.raises(ValueError, match=f"task.{fixed}"):
        task.with_evaluation_options({fixed: getattr(task, fixed)})


@pytest.mark.parametrize(("name", "value"), [("rows_per_size", 0), ("eval_seed", -1), ("rows_per_size", True)])
def test_options_out_of_range_are_named(task, name, value):
    with pytest.raises(ValueError, match=f"task.{name}={value}"):
        type(task)(**{name: value})


def test_lengths_are_spread_inside_and_beyond_what_was_trained():
    assert spread_lengths(2, 16, 64) == [
        (2,),
        (7,),
        (11,),
        (16,),
        (22,),
        (28,),
        (34,),
        (40,),
        (46,),
        (52,),
        (58,),
        (64,),
    ]
    assert spread_lengths(1, 4, 4) == [(1,), (2,), (3,), (4,)]
    assert spread_lengths(1, 20, 5) == [(1,), (2,), (4,), (5,)]
    assert spread_lengths(1, 4, 6) == [(1,), (2,), (3,), (4,), (5,), (6,)]
