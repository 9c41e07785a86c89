"""The addition task: samples, held-out pairs, scores."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tape_pe.tasks import Addition, make_task
from tape_pe.tasks.base import RightPaddingCollator
from tape_pe.tasks.tokenizers import character_tokenizer

SMALL = Addition(max_digits=2, eval_max_digits=3, pairs_per_cell=12)


def texts(task: Addition, seed: int = 0, size: int = 500) -> list[str]:
    tokenizer = task.tokenizer()
    dataset = task.training_dataset(seed, size)
    return [tokenizer.decode(sample["input_ids"]) for sample in dataset.__getitems__(range(size))]


def operands(text: str) -> tuple[str, str, str]:
    """Both operands and the sum of `rev(a)+rev(b)=rev(a+b)<eos>`, in everyday notation."""
    assert text.endswith("<eos>")
    a, b, c = text.removesuffix("<eos>").replace("=", "+").split("+")
    return a[::-1], b[::-1], c[::-1]


class Scripted:
    """Stands in for a model: answers every prompt by a function of the right sum in reversed digits."""

    device = torch.device("cpu")

    def __init__(self, task: Addition, reply) -> None:
        self.tokenizer, self.reply, self.prompts = task.tokenizer(), reply, []

    def generate(self, input_ids, attention_mask, max_new_tokens, **options):
        assert options["do_sample"] is False
        assert options["use_cache"] is True
        assert torch.equal(attention_mask, (input_ids != self.tokenizer.pad_token_id).long())
        rows = []
        for prompt in self.tokenizer.batch_decode(input_ids, skip_special_tokens=True):
            self.prompts.append(prompt)
            a, b = (int(x[::-1]) for x in prompt.removesuffix("=").split("+"))
            rows.append(self.tokenizer(self.reply(str(a + b)[::-1]))["input_ids"][:max_new_tokens])
        width = max(map(len, rows))
        new = torch.tensor([row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        return torch.cat([input_ids, new], dim=1)


def test_samples_are_reversed_additions_of_exact_lengths():
    for text in texts(Addition(max_digits=20)):
        a, b, c = operands(text)
        assert int(a) + int(b) == int(c)
        assert all(x == str(int(x)) for x in (a, b, c)), "no leading zeros"
        assert 1 <= len(a) <= 20


def test_operand_lengths_and_digits_are_uniform():
    task = Addition(max_digits=4, pairs_per_cell=1)
    a, b, n, m = task.training_dataset(0, 40000).operands(np.arange(40000))
    cells = np.histogram2d(n, m, bins=(np.arange(1, 6), np.arange(1, 6)))[0]
    assert np.abs(cells - 2500).max() < 5 * 50, "each of the 16 pairs of lengths has its share, to five sigma"
    for digits, lengths in ((a, n), (b, m)):
        last = digits[lengths == 3, 2]
        assert set(last) == set(range(1, 10))
        assert set(digits[lengths == 1, 0]) == set(range(10))
        counts = np.bincount(digits[lengths == 3, 0], minlength=10)
        assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())
        assert (digits[lengths == 3, 3] == 0).all()


def test_sample_depends_on_seed_and_index_alone():
    dataset = Addition().training_dataset(7, 1000)
    alone, batch = dataset[412], dataset.__getitems__([3, 999, 412])[2]
    assert (alone["input_ids"] == batch["input_ids"]).all()
    assert (Addition().training_dataset(7, 10**9)[412]["input_ids"] == alone["input_ids"]).all()
    assert texts(Addition(), seed=7) == texts(Addition(), seed=7)
    assert texts(Addition(), seed=7) != texts(Addition(), seed=8)
    with pytest.raises(IndexError, match="1000"):
        dataset[1000]


def test_loss_is_on_the_sum_and_the_end_of_sequence_only():
    tokenizer = SMALL.tokenizer()
    for sample in SMALL.training_dataset(0, 50):
        answer = sample["labels"][sample["labels"] != -100]
        text = tokenizer.decode(sample["input_ids"])
        assert tokenizer.decode(answer) == text.split("=")[1]
        assert (sample["labels"][: text.index("=") + 1] == -100).all()


def test_collator_pads_on_the_right():
    rows = [np.array([5, 6, 7]), np.array([8])]
    batch = RightPaddingCollator(0)([{"input_ids": row, "labels": row} for row in rows])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert set(batch) == {"input_ids", "labels"}


def test_evaluation_pairs_are_distinct_and_a_prefix_of_more_of_them():
    a, b = Addition(pairs_per_cell=100).evaluation_pairs(2, 3)
    assert len({(*x, *y) for x, y in zip(a, b, strict=True)}) == 100
    assert (a[:, 1] > 0).all()
    assert (b[:, 2] > 0).all()
    fewer = Addition(pairs_per_cell=30).evaluation_pairs(2, 3)
    assert (fewer[0] == a[:30]).all()
    assert (fewer[1] == b[:30]).all()
    assert len(Addition(pairs_per_cell=1000).evaluation_pairs(1, 1)[0]) == 100, "there are no more"


def test_evaluation_pairs_of_large_cells_are_never_trained_on():
    task = Addition(max_digits=2, pairs_per_cell=200)  # a quarter of the 900 pairs of 1 and 2 digits, and 200 of 8100
    evaluation = {prompt for n in (1, 2) for m in (1, 2) for prompt, _ in task._texts(n, m)}
    trained = {text.split("=")[0] + "=" for text in texts(task, size=20000)}
    shared = trained & evaluation
    assert {len(prompt) for prompt in shared} == {4}, "only the cell of one digit each is too small"
    assert len(shared) == 100
    summary = task.training_summary(0, 20000)
    # Shares of held-out pairs in the four cells: 0, 2/9, 2/9 and 2/81.
    assert summary["redrawn"] == pytest.approx(20000 * (2 / 9 + 2 / 9 + 2 / 81) / 4, rel=0.1)
    assert summary["samples"] == 20000


def test_oracle_scores_one_and_overlap_is_counted():
    model = Scripted(SMALL, lambda right: right + "<eos>")
    metrics = SMALL.score(model, SMALL.tokenizer(), batch_size=7)
    assert metrics == {
        "exact_match": 1.0,
        "exact_match_in_range": 1.0,
        "exact_match_out_of_range": 1.0,
        "grid": [[1.0] * 3] * 3,
        "trained_digits": 2,
        "pairs_per_cell": 12,
        "overlap_pairs": 0,
        "held_out_pairs": 48,
    }
    assert len(model.prompts) == len(set(model.prompts)) == 9 * 12
    more = dataclasses.replace(SMALL, pairs_per_cell=40).score(model, SMALL.tokenizer(), trained=SMALL)
    assert (more["held_out_pairs"], more["overlap_pairs"]) == (48, 4 * 28)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (lambda right: right, 0.0),  # forgets the end of sequence
        (lambda right: right + "0<eos>", 0.0),  # one digit too many
        (lambda right: right[:-1] + "<eos>", 0.0),  # one too few
        (lambda right: "<eos>" + right, 0.0),
        (lambda right: "+" + right[1:] + "<eos>", 0.0),
        (lambda right: right + "<eos>1+2=", 1.0),  # what comes after the end does not count
    ],
)
def test_scorer_wants_the_whole_sum_and_its_end(reply, score):
    metrics = SMALL.score(Scripted(SMALL, reply), SMALL.tokenizer())
    assert metrics["exact_match"] == score


def test_grid_cells_are_row_n_column_m():
    def reply(right):
        a, b = model.prompts[-1].removesuffix("=").split("+")
        return right + ("<eos>" if (len(a), len(b)) == (1, 3) else "")

    model = Scripted(SMALL, reply)
    metrics = SMALL.score(model, SMALL.tokenizer())
    assert metrics["grid"] == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert metrics["exact_match"] == pytest.approx(1 / 9)
    assert metrics["exact_match_in_range"] == 0
    assert metrics["exact_match_out_of_range"] == pytest.approx(1 / 5)


def test_no_cells_out_of_range():
    task = Addition(max_digits=2, eval_max_digits=2, pairs_per_cell=3)
    metrics = task.score(Scripted(task, lambda right: right + "<eos>"), task.tokenizer())
    assert metrics["exact_match_out_of_range"] is None


def test_answer_in_everyday_notation():
    model = Scripted(SMALL, lambda right: right + "<eos>9")
    assert SMALL.answer(model, SMALL.tokenizer(), "123+45=") == "168"
    assert SMALL.answer(model, SMALL.tokenizer(), " 999 + 1 ") == "1000"
    assert model.prompts == ["321+54=", "999+1="]
    for prompt in ("12", "007+1=", "1-2=", "1+2=3", ""):
        with pytest.raises(ValueError, match=r"prompt is .* two numbers"):
            SMALL.answer(model, SMALL.tokenizer(), prompt)


def test_tokenizer_round_trip(tmp_path):
    tokenizer = SMALL.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "321+54=861"
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + "0123456789+=".index(character) for character in text]
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded), loaded.padding_side) == (0, 1, 14, "left")
    assert loaded("1<eos>")["input_ids"] == [3, 1]
    with pytest.raises(Exception, match="UNK"):
        tokenizer("1-2")


def test_character_tokenizer_refuses_repeated_characters():
    with pytest.raises(ValueError, match="'aba'"):
        character_tokenizer("aba")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_digits": 0}, "task.max_digits is 0"),
        ({"max_digits": 2.5}, "task.max_digits is 2.5"),
        ({"eval_max_digits": 0}, "task.eval_max_digits is 0"),
        ({"pairs_per_cell": -1}, "task.pairs_per_cell is -1"),
        ({"digits": 3}, r"task.digits is not an option of Addition; .*max_digits"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("addition", **options)


def test_registry():
    assert make_task("addition", max_digits=3) == Addition(max_digits=3)
    assert Addition(max_digits=3).grid_digits == 6
    with pytest.raises(ValueError, match=r"'subtraction'; it must be one of \['addition', '"):
        make_task("subtraction")
    with pytest.raises(ValueError, match=r"task.max_digits cannot be changed"):
        SMALL.with_evaluation_options({"max_digits": 3})


def test_the_longest_scored_text_is_a_sum_of_the_largest_numbers():
    task = Addition(max_digits=3)
    text = "999999+999999=8999991"  # reversed digits of 1999998
    assert task.longest_scored == len(task.tokenizer()(text)["input_ids"]) + 1  # and the end of sequence
