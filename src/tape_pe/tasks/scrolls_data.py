"""Reads the data sets of the SCROLLS benchmark, from local JSONL files or from the Hugging Face hub.

A data set is published as one zip file with a JSONL file for each split. A line has `id`, `pid`, `input` and `output`;
lines with the same `id` are one example with several gold outputs (`pid` tells them apart). An input that asks
something begins with the query, an empty line behind it, and then the document; QuALITY's query ends with four options.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tape_pe.language.text import is_path, json_lines

HUB_NAME = "tau/scrolls"
Split = Literal["train", "validation", "test"]
SPLITS: tuple[str, ...] = get_args(Split)

_WITHOUT_QUERY = ("summ_screen_fd", "gov_report")
_OPTIONS = re.compile(
    r"\s*\(A\)(?P<A>.*?)\n\s*\(B\)(?P<B>.*?)\n\s*\(C\)(?P<C>.*?)\n\s*\(D\)(?P<D>.*?)(?:\n\s*\n|\s*\Z)", re.DOTALL
)


@dataclass(frozen=True)
class Example:
    """One example with all of its gold outputs.

    Attributes:
        id: the benchmark's id, the same for all gold outputs.
        query: what is asked, with QuALITY's options and the empty line behind it; empty where nothing is.
        document: the rest of the input.
        outputs: the gold outputs in their order; none where they are held back.
        options: the four answers to choose from, for QuALITY; empty elsewhere, and where they cannot be found.
    """

    id: str
    query: str
    document: str
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def input(self) -> str:
        """The benchmark's input."""
        return self.query + self.document


def split_input(dataset: str, text: str) -> tuple[str, str, tuple[str, ...]]:
    """Query, document and options of an input, see `Example`; query and document joined are the input.

    A text without an empty line is all document.
    """
    blank = text.find("\n\n")
    if dataset in _WITHOUT_QUERY or blank < 0:
        return "", text, ()
    end = blank + 2
    match = _OPTIONS.match(text, end) if dataset == "quality" else None
    if match is None:
        return text[:end], text[end:], ()
    options = tuple(" ".join(option.split()) for option in match.groups())
    return text[: match.end()], text[match.end() :], options


def read_examples(data: str, dataset: str, split: str) -> list[Example]:
    """The examples of a split, in their order.

    Args:
        data: a folder with `DATASET/SPLIT.jsonl`, `SPLIT.jsonl` or `DATASET.zip` in it, a zip file as published, or the
            name of a data set on the hub that has such zip files. (Its loading script is not used: `datasets` runs none
            since version 4.)
        dataset: the benchmark's name of the data set.
        split: `"train"`, `"validation"` or `"test"`.

    Raises:
        FileNotFoundError: `data` is the path of something that does not exist.
        ValueError: there is no such split or data set, a line is not an example, or the split is empty.
    """
    found: dict[str, Example] = {}
    documents: dict[str, str] = {}  # many questions are asked about a document, which is kept once
    with _open(data, dataset, split) as lines:
        for where, record in json_lines(lines, f"{data}: {dataset} {split}"):
            example_id, text, output = _fields(record, where)
            if example_id not in found:
                query, document, options = split_input(dataset, text)
                found[example_id] = Example(example_id, query, documents.setdefault(document, document), (), options)
            if output is not None:
                example = found[example_id]
                outputs = (*example.outputs, output)
                found[example_id] = Example(example_id, example.query, example.document, outputs, example.options)
    if not found:
        raise ValueError(f"task.data={data!r}: the {split} split of {dataset} is empty")
    return list(found.values())


def has_split(data: str, dataset: str, split: str) -> bool:
    """Whether there is such a split; other trouble with `data` is raised as by `read_examples`."""
    try:
        with _open(data, dataset, split):
            return True
    except _NoSplitError:
        return False


class _NoSplitError(ValueError):
    pass


def _fields(record: Any, where: str) -> tuple[str, str, str | None]:
    values = [record.get(name) for name in ("id", "input", "output")] if isinstance(record, dict) else [None] * 3
    example_id, text, output = values
    if not isinstance(example_id, str) or not isinstance(text, str) or not (output is None or isinstance(output, str)):
        raise ValueError(f"{where}: texts for id and input, and a text or null for output, are needed")
    return example_id, text, output


@contextmanager
def _open(data: str, dataset: str, split: str) -> Iterator[io.TextIOBase]:
    """The lines of a split.

    Raises:
        _NoSplitError: there is no such split.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        files = [path / dataset / f"{split}.jsonl", path / f"{split}.jsonl", path / f"{dataset}.zip"]
        path = next((file for file in files if file.is_file()), path)
        if path.is_dir():
            wanted = ", ".join(str(file.relative_to(path)) for file in files)
            raise _NoSplitError(f"task.data={data!r}: one of these is needed there: {wanted}")
    elif is_path(data) and not path.exists():
        raise FileNotFoundError(f"task.data={data!r}: does not exist; a folder, a zip file or a hub name is needed")
    elif not path.exists():
        path = _download(data, dataset)
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield lines
        return
    if not zipfile.is_zipfile(path):
        raise ValueError(f"task.data={data!r}: {path} is not a zip file; a folder or a zip file is needed")
    with zipfile.ZipFile(path) as archive:
        member = f"{dataset}/{split}.jsonl"
        if member not in archive.namelist():
            raise _NoSplitError(f"task.data={data!r}: {path} does not hold {member}")
        with io.TextIOWrapper(archive.open(member), encoding="utf-8") as lines:
            yield lines


def _download(name: str, dataset: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, f"{dataset}.zip", repo_type="dataset"))
    except Exception as error:  # the library raises all kinds: network, names, rights
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"task.data={name!r}: is no folder or file; as a data set, {dataset}.zip cannot be read: {reason}"
        ) from error
