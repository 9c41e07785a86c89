"""SCROLLS data sets are read as the benchmark publishes them; bad ones are refused by name."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from tape_pe.tasks.scrolls_data import has_split, read_examples, split_input
from tape_pe.tasks.scrolls_metrics import DATASETS

DATA = Path(__file__).parents[1] / "data" / "scrolls"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def archive(tmp_path) -> Path:
    path = tmp_path / "quality.zip"
    with zipfile.ZipFile(path, "w") as file:
        for split in ("train", "validation"):
            file.write(DATA / "quality" / f"{split}.jsonl", f"quality/{split}.jsonl")
    return path


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_lines_of_one_id_are_one_example(dataset, split):
    written = lines(DATA / dataset / f"{split}.jsonl")
    examples = read_examples(str(DATA), dataset, split)
    assert [example.id for example in examples] == list(dict.fromkeys(line["id"] for line in written))
    for example in examples:
        own = [line for line in written if line["id"] == example.id]
        assert example.outputs == tuple(line["output"] for line in own)
        assert {line["input"] for line in own} == {example.input}
        assert bool(example.query) == (dataset not in ("gov_report", "summ_screen_fd"))
        assert example.query == "" or example.query.endswith("\n\n")
        assert len(example.options) == (4 if dataset == "quality" else 0)
        assert set(example.outputs) <= set(example.options) or dataset != "quality"


def test_every_layout_is_the_same_data(archive, tmp_path, monkeypatch):
    expected = read_examples(str(DATA), "quality", "validation")
    assert read_examples(str(DATA / "quality"), "quality", "validation") == expected
    assert read_examples(str(archive), "quality", "validation") == expected
    assert read_examples(str(tmp_path), "quality", "validation") == expected
    asked = []

    def download(*arguments, **options):
        asked.append((arguments, options))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert read_examples("tau/scrolls", "quality", "validation") == expected
    assert asked == [(("tau/scrolls", "quality.zip"), {"repo_type": "dataset"})]


def test_splits_that_are_there(archive):
    assert has_split(str(archive), "quality", "train")
    assert not has_split(str(archive), "quality", "test")
    assert has_split(str(DATA), "qasper", "train")
    assert not has_split(str(DATA), "qasper", "test")


def test_documents_are_kept_once():
    examples = read_examples(str(DATA), "qmsum", "validation")
    assert len(examples) == 2
    assert examples[0].document is examples[1].document


QUESTION = "Who?\nReally?\n\n"
OPTIONS = " (A) one\n (B) two\n   and a half\n (C) (B) is wrong\n (D) four  (D)\n\n\n"


@pytest.mark.parametrize(
    ("dataset", "text", "query", "options"),
    [
        ("qasper", "Who?\n\nText\n\nmore", "Who?\n\n", ()),
        ("qasper", "No empty line", "", ()),
        ("qasper", "Who?\n\n", "Who?\n\n", ()),
        ("gov_report", "Part\n\nPart", "", ()),
        ("quality", QUESTION + OPTIONS + "Text\n\n(A) no", QUESTION + OPTIONS,
         ("one", "two and a half", "(B) is wrong", "four (D)")),
        ("quality", QUESTION + " (A) one\n (B) two\n\n\nText\n (C) x\n\n", QUESTION, ()),
        ("quality", QUESTION + "Text, then\n" + OPTIONS, QUESTION, ()),
        ("quality", QUESTION + " (A) 1\n (B) 2\n (C) 3\n (D) 4", QUESTION + " (A) 1\n (B) 2\n (C) 3\n (D) 4",
         ("1", "2", "3", "4")),
    ],
)  # fmt: skip
def test_queries_and_options(dataset, text, query, options):
    assert split_input(dataset, text) == (query, text.removeprefix(query), options)


def test_held_back_outputs_are_none(tmp_path):
    line = {"id": "x", "pid": "x_0", "input": "Who?\n\nText", "output": None}
    (tmp_path / "test.jsonl").write_text(json.dumps(line) + "\n")
    assert read_examples(str(tmp_path), "qasper", "test")[0].outputs == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the train split of qasper is empty"),
        ("{", "qasper train, line 1: not JSON"),
        ("[1]", "line 1: texts for id and input"),
        ('{"id": "1", "input": "x"}\n\n{"id": 1, "input": "x", "output": "y"}', "line 3: texts for id and input"),
        ('{"id": "1", "pid": "1_0", "output": "y"}', "line 1: texts for id and input"),
        ('{"id": "1", "input": "x", "output": ["y"]}', "a text or null for output"),
    ],
)
def test_lines_that_are_no_examples(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_examples(str(tmp_path), "qasper", "train")


def test_places_that_hold_nothing(tmp_path, archive, monkeypatch):
    with pytest.raises(ValueError, match=r"one of these is needed there: qasper.train.jsonl, train.jsonl, qasper.zip"):
        read_examples(str(tmp_path), "qasper", "train")
    with pytest.raises(ValueError, match=r"does not hold qasper/train.jsonl"):
        read_examples(str(archive), "qasper", "train")
    with pytest.raises(FileNotFoundError, match=r"task.data='\./nowhere': does not exist"):
        read_examples("./nowhere", "qasper", "train")
    text = tmp_path / "text.txt"
    shutil.copy(__file__, text)
    with pytest.raises(ValueError, match="not a zip file"):
        read_examples(str(text), "qasper", "train")

    def fail(*arguments, **options):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"task.data='tau/scrolls': .* qasper.zip cannot be read: no network$"):
        read_examples("tau/scrolls", "qasper", "train")
