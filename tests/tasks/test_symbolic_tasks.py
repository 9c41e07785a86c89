"""What each task with labelled tokens asks, by cases worked out by hand or in another way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tape_pe import TapeLMConfig, TapeLMForCausalLM
from tape_pe.tasks import make_task
from tape_pe.tasks.copying import Copy, Reverse
from tape_pe.tasks.flip_flop import FlipFlop
from tape_pe.tasks.modular_arithmetic import ModularArithmetic
from tape_pe.tasks.recall import AssociativeRecall
from tape_pe.tasks.state_tracking import StateTracking, group


def drawn(task, size, rows=200):
    """Words and answers (`None` where nothing is asked) of some samples."""
    words = [*task.words(), None]
    bits = np.random.default_rng(0).integers(0, 2**64, (rows, task.random_numbers(size)), dtype=np.uint64)
    tokens, answers = task.draw(size, bits)
    return [([words[t] for t in row], [words[a] for a in right]) for row, right in zip(tokens, answers, strict=True)]


@pytest.mark.parametrize(("name", "order"), [("S3", 6), ("S5", 120), ("A5", 60), ("Z60", 60)])
def test_groups_are_groups(name, order):
    names, products = group(name)
    assert len(names) == len(set(names)) == order
    assert all(
        sorted(row) == sorted(column) == list(range(order)) for row, column in zip(products, products.T, strict=True)
    )
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(order, size=(3, 500))
    assert (products[products[a, b], c] == products[a, products[b, c]]).all()
    assert (products == products.T).all() == (name == "Z60")


def test_products_apply_the_first_permutation_first():
    names, products = group("S3")
    # 102 exchanges 0 and 1; 021 exchanges 1 and 2; first one, then the other: 0 -> 1 -> 2, 1 -> 0 -> 0, 2 -> 2 -> 1.
    assert names[products[names.index("102"), names.index("021")]] == "201"
    assert set(group("A5").names) < set(group("S5").names)


def test_state_tracking_answers_the_running_product():
    task = StateTracking(group="A5")
    names, products = group("A5")
    for tokens, answers in drawn(task, (7,), rows=20):
        numbers = [names.index(token) for token in tokens]
        assert [names.index(answer) for answer in answers] == list(
            itertools.accumulate(numbers, lambda a, b: products[a, b])
        )
    tokens, answers = drawn(StateTracking(group="Z60"), (5,), rows=1)[0]
    assert [int(answer) for answer in answers] == [n % 60 for n in itertools.accumulate(map(int, tokens))]


def test_state_tracking_predicts_each_product_from_its_own_element():
    task = StateTracking(group="Z60")
    ids, labels = task.encode(np.array([[3, 59, 1]]), np.array([[3, 2, 3]]))
    assert ids.tolist() == [[5, 61, 3, 1]]
    assert labels.tolist() == [[-100, 5, 4, 5]], "a label is predicted from the token before it"


@pytest.mark.parametrize("percent", [10, 80, 98])
def test_flip_flop_reads_what_was_written_last(percent):
    ignored = 0
    for tokens, answers in drawn(FlipFlop(length=20), (20, percent)):
        instructions, bits = tokens[::2], tokens[1::2]
        assert instructions[0] == "w"
        assert instructions[-1] == "r"
        memory = None
        for instruction, bit, before, answer in zip(instructions, bits, answers[::2], answers[1::2], strict=True):
            assert before is None
            memory = bit if instruction == "w" else memory
            assert answer == (memory if instruction == "r" else None)
            if instruction == "r":
                assert bit == memory, "later reads see what was answered"
        ignored += instructions.count("i")
    expected = 200 * 18 * percent / 100
    assert abs(ignored - expected) < 5 * (200 * 18 * percent / 100 * (1 - percent / 100)) ** 0.5


def test_recall_asks_every_key_once_behind_the_pairs():
    task = AssociativeRecall(vocab_size=64, train_cases=((64, 4),), eval_cases=((64, 8),))
    places = []
    for tokens, answers in drawn(task, (40, 6)):
        pairs = dict(zip(tokens[:12:2], tokens[1:12:2], strict=True))
        assert len(pairs) == 6
        assert all(key.startswith("k") and value.startswith("v") for key, value in pairs.items())
        assert answers[:12] == [None] * 12
        asked = [(token, answer) for token, answer in zip(tokens[12:], answers[12:], strict=True) if answer is not None]
        assert dict(asked) == pairs
        assert len(asked) == 6
        assert tokens[12:].count("_") == 40 - 12 - 6
        places += [place for place, answer in enumerate(answers) if answer is not None]
    counts = np.bincount(places, minlength=40)[12:]
    assert np.abs(counts - 1200 / 28).max() < 5 * (1200 / 28) ** 0.5, "anywhere, with equal probability"


def test_copy_and_reverse_write_the_string_and_end():
    for tokens, answers in drawn(Copy(symbols=9), (6,), rows=20):
        assert tokens[6] == ">"
        assert tokens[7:] == tokens[:6] == answers[7:]
        assert answers[:7] == [None] * 7
    for tokens, answers in drawn(Reverse(symbols=9), (6,), rows=20):
        assert tokens[7:] == tokens[5::-1] == answers[7:]
    _, labels = Copy().encode(*Copy().draw((2,), np.array([[3, 4]], dtype=np.uint64)))
    assert labels.tolist() == [[-100, -100, -100, 6, 7, 1]]


@pytest.mark.parametrize("modulus", [5, 7])
def test_modular_arithmetic_is_that_of_python(modulus):
    seen = set()
    for numbers in (2, 3, 9):
        for tokens, answers in drawn(ModularArithmetic(modulus=modulus), (numbers,)):
            assert tokens[-2] == "="
            assert answers == [None] * (2 * numbers) + [tokens[-1]]
            assert eval("".join(tokens[:-2])) % modulus == int(tokens[-1])
            seen |= set(tokens)
    assert seen == set(ModularArithmetic(modulus=modulus).words())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("state_tracking", {"group": "S4"}, "task.group='S4'"),
        ("state_tracking", {"max_length": 1}, "task.max_length=1"),
        ("flip_flop", {"ignore_percent": 100}, "task.ignore_percent=100"),
        ("flip_flop", {"eval_lengths": [2]}, "task.eval_lengths"),
        ("associative_recall", {"vocab_size": 9}, "task.vocab_size=9"),
        ("associative_recall", {"train_cases": [[64, 22]]}, "22 pairs"),
        ("associative_recall", {"train_cases": []}, "task.train_cases"),
        ("associative_recall", {"eval_cases": [[64]]}, "task.eval_cases"),
        ("copy", {"symbols": 1}, "task.symbols=1"),
        ("reverse", {"eval_max_length": 0}, "task.eval_max_length=0"),
        ("modular_arithmetic", {"modulus": 1}, "task.modulus=1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


def small_model(task):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = TapeLMConfig(vocab_size=len(task.tokenizer()), eos_token_id=1, pad_token_id=0, **sizes)
    return TapeLMForCausalLM(config).eval()


def test_answers_are_words_of_the_task():
    aligned, written = StateTracking(), Reverse()
    answer = aligned.answer(small_model(aligned), aligned.tokenizer(), "102 021 201")
    assert len(answer.split()) <= 3
    assert set(answer.split()) <= set(aligned.words())
    assert set(written.answer(small_model(written), written.tokenizer(), "s1 s2 >").split()) <= set(written.words())
    for prompt in ("102 666", ""):
        with pytest.raises(ValueError, match="prompt="):
            aligned.answer(small_model(aligned), aligned.tokenizer(), prompt)


@pytest.mark.parametrize("name", ["state_tracking", "flip_flop", "copy", "modular_arithmetic"])
def test_scores_of_a_real_model_are_those_of_its_own_predictions(name):
    task = make_task(name, rows_per_size=5)
    model = small_model(task)
    metrics = task.score(model, task.tokenizer())
    size = task.evaluation_sizes()[-1]
    ids, labels = task.encode(*task.evaluation_rows(size))
    said = model(input_ids=torch.from_numpy(ids)).logits.argmax(dim=-1).numpy()
    right = [int(said[row, t - 1] == labels[row, t]) for row, t in zip(*np.nonzero(labels != -100), strict=True)]
    assert metrics["token_accuracy"][-1] == pytest.approx(np.mean(right))


def test_flip_flop_labels_are_the_reads_and_nothing_else():
    task = FlipFlop(length=12, rows_per_size=20)
    for size in task.evaluation_sizes():
        ids, labels = task.encode(*task.evaluation_rows(size))
        read = 2 + task.words().index("r")
        behind = np.hstack([np.zeros((len(ids), 1), bool), ids[:, :-1] == read])
        assert ((labels != -100) == behind).all()
    assert task.answer(small_model(task), task.tokenizer(), "w 1 i 0 r") in task.words()


def test_recall_samples_are_counted_as_they_are():
    task = AssociativeRecall(vocab_size=4, train_cases=[[6, 2]], eval_cases=[[6, 2]], rows_per_size=3)
    bits = np.random.default_rng(0).integers(2**63, size=(2000, task.random_numbers((6, 2))), dtype=np.uint64)
    assert len(np.unique(task.draw((6, 2), bits)[0], axis=0)) == task.number_of_samples((6, 2)) == 2 * 4 * 2


@pytest.mark.parametrize("name", ["state_tracking", "flip_flop", "associative_recall", "copy", "modular_arithmetic"])
def test_the_longest_scored_text_is_known_before(name):
    task = make_task(name, rows_per_size=2)
    longest = max(task.encode(*task.evaluation_rows(size))[0].shape[1] for size in task.evaluation_sizes())
    assert task.longest_scored == longest
