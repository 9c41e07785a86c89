"""SCROLLS as a task: training samples, scores and choices, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tape_pe.cli import main
from tape_pe.options import load_options
from tape_pe.results import read_results
from tape_pe.tasks import make_task
from tape_pe.tasks.base import IGNORED_LABEL
from tape_pe.tasks.scrolls import Scrolls
from tape_pe.tasks.scrolls_data import read_examples
from tape_pe.tasks.scrolls_metrics import DATASETS
from tape_pe.tasks.tokenizers import byte_tokenizer

DATA = Path(__file__).parents[1] / "data" / "scrolls"
PREDICTIONS = json.loads((DATA / "predictions.json").read_text(encoding="utf-8"))
TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def scrolls(dataset: str = "qasper", **options) -> Scrolls:
    return Scrolls(dataset, str(DATA), **{"max_new_tokens": 200, "length": 2000, **options})


def copy_of(folder: Path, dataset: str, **splits: list[dict]) -> str:
    """A copy of a miniature data set with lines added to its splits."""
    shutil.copytree(DATA / dataset, folder / dataset)
    for split, added in splits.items():
        with (folder / dataset / f"{split}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in added)
    return str(folder)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", DATASETS)
def test_samples_are_prompts_with_gold_outputs_and_loss_on_these_alone(dataset):
    task = scrolls(dataset)
    rows = [(e, output) for e in read_examples(str(DATA), dataset, "train") for output in e.outputs]
    data = task.training_dataset(0, 3 * len(rows))
    wanted = {f"{e.input}\n\nAnswer:| {output}<eos>" for e, output in rows}
    for epoch in range(3):
        seen = []
        for index in range(epoch * len(rows), (epoch + 1) * len(rows)):
            ids, labels = data[index]["input_ids"], data[index]["labels"]
            first = int(np.argmax(labels != IGNORED_LABEL))
            assert (labels[:first] == IGNORED_LABEL).all()
            assert (labels[first:] == ids[first:]).all()
            seen.append(f"{TOKENIZER.decode(ids[:first])}|{TOKENIZER.decode(ids[first:])}")
        assert sorted(seen) == sorted(wanted), "every gold output once in an epoch"
    assert task.training_summary(0, 2) == {
        "samples": 2, "gold_outputs": 2, "outputs_cut": 0, "overlap_dropped": 0
    }  # fmt: skip


def test_a_sample_depends_on_seed_and_index_alone():
    task = scrolls()
    many, few = task.training_dataset(3, 10**9), task.training_dataset(3, 12)
    backwards = [few[index]["input_ids"].tolist() for index in range(11, -1, -1)][::-1]
    assert [many[index]["input_ids"].tolist() for index in range(12)] == backwards
    orders = {
        tuple(tuple(task.training_dataset(seed, 4)[index]["input_ids"][-6:]) for index in range(4)) for seed in range(8)
    }
    assert len(orders) > 3
    with pytest.raises(IndexError):
        few[12]


def test_long_samples_are_cut_to_the_length():
    task = scrolls(length=120, max_new_tokens=40)
    for index in range(4):
        sample = task.training_dataset(0, 4)[index]
        text = TOKENIZER.decode(sample["input_ids"])
        assert len(sample["input_ids"]) == 120
        assert text.endswith("<eos>")
        assert text.split("\n\n")[0].endswith("?")
        assert "\n\nAnswer: " in text
    short = scrolls(length=120, max_new_tokens=8)
    assert short.training_summary(0, 4)["outputs_cut"] == 2  # "Unanswerable" and "120 speakers who read out prices"
    ends = {
        TOKENIZER.decode(short.training_dataset(0, 4)[index]["input_ids"]).split("Answer:")[1] for index in range(4)
    }
    assert ends == {" 120<eos>", " 120 spe", " Unanswe", " No<eos>"}


def test_training_examples_of_other_splits_are_dropped_and_counted(tmp_path):
    valid = [json.loads(line) for line in (DATA / "qasper/validation.jsonl").read_text(encoding="utf-8").splitlines()]
    same_input = {**valid[1], "id": "other", "input": valid[1]["input"] + "\n"}
    same_id = {**valid[3], "input": "Something else?\n\nText"}
    held_back = {"id": "t", "pid": "t_0", "input": "In test?\n\nText", "output": None}
    (tmp_path / "qasper").mkdir()
    (tmp_path / "qasper" / "test.jsonl").write_text(json.dumps(held_back) + "\n")
    for name in ("train", "validation"):
        shutil.copy(DATA / "qasper" / f"{name}.jsonl", tmp_path / "qasper")
    with (tmp_path / "qasper" / "train.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (same_input, same_id, {**held_back, "output": "Yes"}))
    task = Scrolls("qasper", str(tmp_path), max_new_tokens=100)
    assert [example.id for example in task.training_split[0]] == ["p2q1", "p2q2", "p2q3"]
    assert task.training_summary(0, 9)["overlap_dropped"] == 3
    with (tmp_path / "qasper" / "validation.jsonl").open("a") as file:
        file.write((tmp_path / "qasper" / "train.jsonl").read_text())
    with pytest.raises(ValueError, match=r"task.data=.*: of 6 training examples none is in no other split"):
        Scrolls("qasper", str(tmp_path)).check()


def test_tokenizers(tmp_path):
    assert len(scrolls().tokenizer()) == 258
    bpe = scrolls(tokens="bpe", vocab_size=512).tokenizer()
    assert 258 < len(bpe) <= 512
    bpe.save_pretrained(tmp_path)
    loaded = scrolls(tokens=str(tmp_path)).tokenizer()
    assert loaded.get_vocab() == bpe.get_vocab()
    assert (loaded.padding_side, loaded.pad_token_id, loaded.eos_token_id) == ("left", 0, 1)
    loaded.pad_token = None
    loaded.save_pretrained(tmp_path)
    assert scrolls(tokens=str(tmp_path)).tokenizer().pad_token_id == 1, "EOS where there is no padding"


# --- scores ----------------------------------------------------------------------------------------------------------


# From the counts in test_scrolls_metrics.py.
BY_HAND = {
    "qasper": 500 / 9,
    "narrative_qa": 40,
    "contract_nli": 200 / 3,
    "quality": 100 / 3,
    "qmsum": 100 * (11 / 12 * 4 / 5 * 11 / 12) ** (1 / 3),
    "summ_screen_fd": 50 * (14 / 15 * 8 / 13 * 8 / 15) ** (1 / 3),
    "gov_report": 100 * (17 / 18 * 3 / 7 * 11 / 18) ** (1 / 3),
}


class Scripted:
    """A model that answers by `reply(prompt)`; it reads rows of several lengths, and notes them."""

    device = torch.device("cpu")

    def __init__(self, reply, ends: bool = True) -> None:
        self.reply, self.ends, self.prompts, self.batches = reply, ends, [], []

    def generate(self, input_ids, attention_mask, max_new_tokens, **options):
        assert options["do_sample"] is False
        assert options["use_cache"] is True
        assert torch.equal(attention_mask.sum(-1).diff().clamp(max=0), torch.zeros(len(input_ids) - 1).long())
        self.batches.append(len(input_ids))
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.tolist() == sorted(mask.tolist()), "padding is on the left"
            self.prompts.append(TOKENIZER.decode(ids[mask.bool()]))
            row = TOKENIZER(self.reply(self.prompts[-1]))["input_ids"] + [EOS] * self.ends
            rows.append(row[:max_new_tokens] + [0] * (max_new_tokens - len(row)))
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    def __call__(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(TOKENIZER))[:, -logits_to_keep:])


def teller(dataset: str, say) -> Scripted:
    """A model that knows each validation example and answers `say(example)`."""
    examples = read_examples(str(DATA), dataset, "validation")

    def reply(prompt: str) -> str:
        return say(next(example for example in examples if prompt == f"{example.input}\n\nAnswer:"))

    return Scripted(reply)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_gold_outputs_score_100_and_the_scripted_predictions_what_they_should(dataset, batch_size):
    task = scrolls(dataset)
    examples = read_examples(str(DATA), dataset, "validation")
    model = teller(dataset, lambda example: f" {example.outputs[-1]}")
    found = task.score(model, TOKENIZER, batch_size=batch_size)
    assert found["scrolls_score"] == pytest.approx(100)
    assert (found["examples"], found["references"]) == (len(examples), sum(len(e.outputs) for e in examples))
    assert (found["inputs_cut"], found["unfinished"]) == (0, 0)
    assert (found["scored_length"], found["trained_length"]) == (2000, 2000)
    assert sorted(model.prompts) == sorted(f"{example.input}\n\nAnswer:" for example in examples)
    assert max(model.batches) <= batch_size
    assert ("choice_accuracy" in found) == (dataset == "quality")
    model = teller(dataset, lambda example: PREDICTIONS[dataset][example.id])
    assert task.score(model, TOKENIZER, batch_size=batch_size)["scrolls_score"] == pytest.approx(BY_HAND[dataset])


def test_cut_inputs_and_unfinished_answers_are_counted():
    task = scrolls(eval_length=300, max_new_tokens=20, length=400)
    model = Scripted(lambda prompt: "Yes " * 50, ends=False)
    found = task.score(model, TOKENIZER, trained=scrolls(length=500))
    assert found["inputs_cut"] == found["unfinished"] == found["examples"] == 3
    assert all(len(prompt) == 280 for prompt in model.prompts)
    assert all(prompt.endswith("\n\nAnswer:") and "?\n\n" in prompt for prompt in model.prompts)
    assert (found["scored_length"], found["trained_length"]) == (300, 500)
    assert task.longest_scored == 300
    assert found["f1"] == pytest.approx(100 * (2 / 6) / 3), "`Yes` five times, for one `Yes`"


def test_evenly_spaced_examples():
    assert [e.id for e in scrolls("contract_nli", eval_examples=2).evaluation_examples] == ["c1h1", "c1h3"]
    assert len(scrolls("contract_nli", eval_examples=99).evaluation_examples) == 3
    found = scrolls("contract_nli", eval_examples=2).score(Scripted(lambda prompt: "Contradiction"), TOKENIZER)
    assert (found["examples"], found["exact_match"]) == (2, 50)


# --- multiple choice -------------------------------------------------------------------------------------------------


class Chooser(Scripted):
    """A model for which the tokens of `liked` are likelier than all others wherever they are asked for."""

    def __init__(self, liked: str) -> None:
        super().__init__(lambda prompt: "")
        self.liked = TOKENIZER(liked)["input_ids"]

    def __call__(self, input_ids, use_cache, logits_to_keep):
        logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
        logits[..., self.liked] = 9.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_the_likeliest_option_is_chosen_by_sum_and_per_token(tmp_path):
    options = ["zz", "zzzzzzzz", "a", "aaaaaaaaaaaaaaa"]
    letters = "".join(f" ({letter}) {option}\n" for letter, option in zip("ABCD", options, strict=True))
    line = {"id": "x", "pid": "x_0", "input": f"Which?\n\n{letters}\n\nText", "output": "a"}
    no_options = {**line, "id": "y", "input": "Which?\n\nText"}
    not_there = {**line, "id": "z", "output": "none of them"}
    (tmp_path / "train.jsonl").write_text(json.dumps({**line, "id": "t", "input": "What?\n\nText"}))

    def score(model, *written):
        (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        return Scrolls("quality", str(tmp_path), max_new_tokens=30, length=200).score(model, TOKENIZER)

    def accuracies(found):
        return found["choice_accuracy"], found["choice_accuracy_per_token"], found["choice_examples"]

    indifferent = Scripted(lambda prompt: "")  # then the shortest option is likeliest, and all are the same per token
    assert accuracies(score(indifferent, line, no_options, not_there)) == (100, 0, 1)
    assert accuracies(score(Chooser("a"), line)) == (100, 0, 1), "the long one is likelier per token"
    assert accuracies(score(Chooser("a"), {**line, "output": "aaaaaaaaaaaaaaa"})) == (0, 100, 1)
    assert accuracies(score(Chooser("z"), {**line, "output": "zz"})) == (100, 0, 1)
    found = score(indifferent, no_options)
    assert (found["examples"], *accuracies(found)) == (1, None, None, 0)
    assert accuracies(score(indifferent, {**line, "output": " a\n"})) == (100, 0, 1), "white space does not count"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "squad"}, "task.dataset='squad': one of qasper"),
        ({"truncation": "start"}, "task.truncation='start'"),
        ({"eval_split": "train"}, "task.eval_split='train'"),
        ({"tokens": ""}, "task.tokens=''"),
        ({"vocab_size": 100}, "task.vocab_size=100"),
        ({"vocab_size": None}, "task.vocab_size=None"),
        ({"length": 100}, "task.length=100: more than the 128 tokens"),
        ({"length": 50, "max_new_tokens": 50}, "task.length=50: more than the 50 tokens"),
        ({"eval_length": 64}, "task.eval_length=64: more than the 128 tokens"),
        ({"max_new_tokens": 1}, "task.max_new_tokens=1"),
        ({"eval_examples": 0}, "task.eval_examples=0"),
        ({"eval_examples": True}, "task.eval_examples=True"),
        ({"metric": "f1"}, "task.metric is not an option"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("scrolls", **options)


def test_an_example_that_cannot_fit_is_refused_before_any_work():
    least = len("How many speakers were recorded?\n\n") + len("\n\nAnswer:") + 1 + 20  # the longest query
    scrolls(length=least, max_new_tokens=20).check()
    with pytest.raises(ValueError, match=rf"length={least - 1}: example 'p2q[13]' asks .* at least {least} are needed"):
        scrolls(length=least - 1, max_new_tokens=20).check()
    with pytest.raises(ValueError, match=r"length=50: example 'p2q1' asks with \d+ tokens.*an output of 20"):
        scrolls(length=50, max_new_tokens=20).training_dataset(0, 10)

    class NeverAsked:
        pass

    with pytest.raises(ValueError, match=r"length=50: example 'p1q1' asks"):
        scrolls(eval_length=50, max_new_tokens=20).score(NeverAsked(), TOKENIZER)
    with pytest.raises(ValueError, match=r"length=30: example 'prompt' asks"):
        scrolls(length=30, max_new_tokens=5).answer(NeverAsked(), TOKENIZER, f"{'Why?' * 9}\n\nText")
    with pytest.raises(ValueError, match=r"prompt=' '"):
        scrolls().answer(NeverAsked(), TOKENIZER, " ")


def test_splits_without_outputs_or_missing_splits_are_refused(tmp_path):
    held_back = {"id": "t", "pid": "t_0", "input": "In test?\n\nText", "output": None}
    data = copy_of(tmp_path, "qasper")
    with pytest.raises(ValueError, match=r"one of these is needed there: qasper/test\.jsonl"):
        Scrolls("qasper", data, eval_split="test").check()
    (tmp_path / "qasper" / "test.jsonl").write_text(json.dumps(held_back))
    with pytest.raises(ValueError, match=r"task.eval_split='test': example 't' has no output"):
        Scrolls("qasper", data, eval_split="test").check()


# --- from end to end -------------------------------------------------------------------------------------------------


def test_train_evaluate_and_generate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--model.hidden_size", "16", "--model.intermediate_size", "32", "--model.num_hidden_layers", "2"]
    sizes += ["--model.num_attention_heads", "2", "--model.encoding_options", '{"position_size": 8}']
    steps = ["--training.max_steps", "3", "--training.per_device_train_batch_size", "2", "--training.disable_tqdm"]
    sizes += [*steps, "true", "--training.save_strategy", "no"]
    task = ["--task.name", "scrolls", "--task.dataset", "quality", "--task.data", str(DATA), "--task.length", "300"]
    short = [*task, "--task.max_new_tokens", "40"]
    assert main(["train", "--output_dir", "refused", *short, "--task.length", "60", *sizes]) == 2
    assert "length=60: example 'm_1' asks with" in capsys.readouterr().err
    assert not Path("refused").exists()
    assert main(["train", "--output_dir", "run", *short, *sizes]) == 0
    assert main(["evaluate", "run", "--batch_size", "2", "--task.eval_examples", "2"]) == 0
    printed = capsys.readouterr().out
    assert "scrolls_score: " in printed
    assert "choice_accuracy: " in printed
    line = read_results(Path("run"))[-1]
    assert (line.task, line.metrics["examples"], line.metrics["scored_length"]) == ("scrolls", 2, 300)
    assert line.config["data"] == {"samples": 6, "gold_outputs": 2, "outputs_cut": 0, "overlap_dropped": 0}
    assert main(["generate", "run", "What went wrong?\n\nThe ferry was late."]) == 0

    config = str(DATA.parents[1].parent / "configs" / "scrolls.yaml")
    again = ["--model.init_from", "run", "--task.tokens", "run", "--training.bf16", "false", *short[2:]]
    assert main(["train", config, "--output_dir", "second", *again, *sizes]) == 0
    options = load_options(Path("second"))
    assert (options.model.init_from, options.task.tokens, options.training["learning_rate"]) == ("run", "run", 1e-5)
    assert main(["train", config, "--output_dir", "third", *again, *sizes, "--model.num_attention_heads", "4"]) == 2
    assert "model.num_attention_heads=4: must be as in model.init_from='run', 2" in capsys.readouterr().err
