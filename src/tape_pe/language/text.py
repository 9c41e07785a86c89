"""Text for language models: documents from files, folders, this Python or a data set, cut into blocks of tokens."""

from __future__ import annotations

import importlib.util
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

STDLIB = "python-stdlib"
"""The `data` that every machine has: the sources of the running Python's standard library."""

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIXES = (".jsonl", ".ndjson")
DOCUMENT_MODES = ("packed", "separate")
_PIECE = 1 << 20
_TEST_SHARE = 20  # one file of so many of the standard library is in the test split


Reader = Callable[[Any], Iterator[tuple[str, Any]]]
"""Takes a place in a collection, `None` being its beginning, and gives the texts from there on, each with the place
behind it. Places are plain JSON values."""


@dataclass(frozen=True)
class Texts:
    """Documents that are read anew, one after the other, each time they are iterated over.

    Attributes:
        read: reads from a place on; empty documents are among them, with empty text.
        split: the share of one of several processes, as texts, for collections that know a better way than reading
            everything and leaving out what is another's; takes the process's number and how many there are.
    """

    read: Reader
    split: Callable[[int, int], Texts] | None = None

    def __iter__(self) -> Iterator[str]:
        return (text for text, _ in self.read(None) if text)


def read_texts(
    data: str, *, split: str = "train", text_field: str = "text", streaming: bool = True, pieces: bool = False
) -> Texts:
    """The documents of a text collection, in the same order every time.

    They are read while they are iterated over, which can be done more than once; empty ones are left out.

    Args:
        data: one of

            * a `.txt`, `.md` or `.py` file, which is one document;
            * a `.jsonl` file, one document per line;
            * a folder: all such files in it, by path, those with hidden names left out;
            * `"python-stdlib"`, the sources of the running Python's standard library, by path;
            * the name of a data set on the Hugging Face hub, `NAME` or `NAME:CONFIGURATION`.
        split: split of a data set. The standard library has `"train"` and `"test"`, about one file in twenty; files
            and folders have no splits and are read whole.
        text_field: field of a line or a data set's row that holds the text.
        streaming: whether a data set is read while it is downloaded, instead of being stored first.
        pieces: whether a text file is read in pieces of about a megabyte, cut at line ends, each of which is then a
            document.

    Raises:
        FileNotFoundError: `data` is the path of something that does not exist.
        ValueError: there is no text, or no such split or field, or the data set cannot be read.
    """
    if not data:
        raise ValueError("data='': it must be a file, a folder or a data set")
    path = Path(data).expanduser()
    if data == STDLIB:
        texts = Texts(_stdlib_reader(split))
    elif path.is_dir():
        texts = Texts(_folder_reader(path, text_field, pieces))
    elif path.is_file():
        texts = Texts(_file_reader(path, text_field, pieces))
    elif is_path(data):
        raise FileNotFoundError(f"data={data!r}: does not exist; it must be a file, a folder or a data set")
    else:
        texts = _hub_texts(data, split, text_field, streaming)
    if next(iter(texts), None) is None:
        raise ValueError(f"data={data!r}: holds no text")
    return texts


def has_splits(data: str) -> bool:
    """Whether `split` makes a difference to `read_texts`: it does not for files and folders."""
    return data == STDLIB or not Path(data).expanduser().exists()


def token_blocks(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, *, documents: str = "packed"
) -> Iterator[list[int]]:
    """Blocks of exactly `length` tokens, made while they are iterated over.

    A document's tokens are what the tokenizer makes of its text, and EOS behind them. Empty documents are left out.

    Args:
        texts: the documents.
        tokenizer: must have an EOS token.
        length: tokens of a block.
        documents: `"packed"`: documents follow each other, and no token is lost but the last block's, where it is not
            full; `"separate"`: no block holds more than one document, and the end of each that fills no block is lost.

    Raises:
        ValueError: an argument is out of range.
    """
    if length < 1:
        raise ValueError(f"length={length}: it must be at least 1")
    if documents not in DOCUMENT_MODES:
        raise ValueError(f"documents={documents!r}: it must be one of {', '.join(DOCUMENT_MODES)}")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer has no EOS token; it must have one, to tell documents apart")
    return _blocks(texts, tokenizer, length, documents == "packed")


def _blocks(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, packed: bool) -> Iterator[list[int]]:
    waiting: list[int] = []
    for text in filter(None, texts):
        waiting = (waiting if packed else []) + document_tokens(text, tokenizer)
        full = len(waiting) // length * length
        for start in range(0, full, length):
            yield waiting[start : start + length]
        waiting = waiting[full:]


def document_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A document's tokens, with EOS behind them."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])  # verbose would warn of the length, which is cut later
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def is_path(data: str) -> bool:
    """Whether a name that does not exist here was meant as a path, not as the name of a data set."""
    name = data.partition(":")[0]
    return (
        data.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
        or Path(data).suffix in TEXT_SUFFIXES + RECORD_SUFFIXES
    )  # fmt: skip


def _file_reader(path: Path, text_field: str, pieces: bool) -> Reader:
    """The place in a file is an offset in bytes, and in a file of records also the number of lines before it."""
    if path.suffix in RECORD_SUFFIXES:
        return lambda place: _records(path, text_field, *(place or (0, 0)))
    if path.suffix in TEXT_SUFFIXES:
        size = _PIECE if pieces else -1
        return lambda place: _documents(path, place or 0, size)
    raise ValueError(f"data={str(path)!r}: a file must end in one of {', '.join(TEXT_SUFFIXES + RECORD_SUFFIXES)}")


def _folder_reader(folder: Path, text_field: str, pieces: bool) -> Reader:
    """The place in a folder is the number of a file, and the place in that file."""

    def visible(path: Path) -> bool:
        return not any(part.startswith(".") for part in path.relative_to(folder).parts)

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and visible(path))
    paths = [path for path in paths if path.suffix in TEXT_SUFFIXES + RECORD_SUFFIXES]
    readers = [_file_reader(path, text_field, pieces) for path in paths]

    def read(place: Any) -> Iterator[tuple[str, Any]]:
        first, inner = place or (0, None)
        for number, reader in enumerate(readers[first:], start=first):
            for text, behind in reader(inner if number == first else None):
                yield text, [number, behind]

    return read


def _documents(path: Path, offset: int, size: int) -> Iterator[tuple[str, int]]:
    """A text file from an offset on, in pieces of whole lines of at least `size` bytes; -1: in one piece."""
    with path.open("rb") as file:
        file.seek(offset)
        while lines := file.readlines(size):
            raw = b"".join(lines)
            offset += len(raw)
            text = _decode(raw, path)
            yield text.replace("\r\n", "\n").replace("\r", "\n"), offset


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def json_lines(lines: Iterable[str], name: object, first: int = 1) -> Iterator[tuple[str, Any]]:
    """The records of a JSONL file, each with the place where it stands; empty lines are left out.

    Args:
        lines: the file's lines.
        name: what messages call the file.
        first: number of the first of these lines.

    Raises:
        ValueError: a line is not JSON.
    """
    for number, line in enumerate(lines, start=first):
        if not line.strip():
            continue
        try:
            yield f"{name}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: not JSON ({error})") from error


def _records(path: Path, text_field: str, offset: int, number: int) -> Iterator[tuple[str, list[int]]]:
    with path.open("rb") as file:
        file.seek(offset)

        def lines() -> Iterator[str]:
            nonlocal offset, number
            for line in file:
                offset, number = offset + len(line), number + 1
                yield _decode(line, path)

        for where, record in json_lines(lines(), path, number + 1):
            yield _field(record, text_field, where), [offset, number]


def _field(record: Any, text_field: str, where: str) -> str:
    """The text of one record.

    Raises:
        ValueError: the record has no such field, or there is no text in it.
    """
    value = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        there = f"the fields are {', '.join(map(repr, record))}" if isinstance(record, dict) else "it has no fields"
        raise ValueError(f"text_field={text_field!r}: no text in {where}; {there}")
    return value


def _stdlib_reader(split: str) -> Reader:
    """The library's modules without installed packages, and without files in other encodings, which are test cases.

    The place is a number of files."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: {STDLIB} has train and test")
    folder = Path(sysconfig.get_paths()["stdlib"])

    def read(place: Any) -> Iterator[tuple[str, Any]]:
        for number, path in enumerate(sorted(folder.rglob("*.py"))):
            name = path.relative_to(folder)
            if number < (place or 0) or {"site-packages", "dist-packages"} & set(name.parts):
                continue
            if (zlib.crc32(name.as_posix().encode()) % _TEST_SHARE == 0) != (split == "test"):
                continue
            try:
                yield path.read_text(encoding="utf-8"), number + 1
            except UnicodeDecodeError:
                continue

    return read


def _hub_texts(data: str, split: str, text_field: str, streaming: bool) -> Texts:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"data={data!r}: is no file or folder; for data sets of the hub: pip install 'tape-pe[lm]'")
    import datasets

    name, _, configuration = data.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split=split, streaming=streaming)
    except Exception as error:  # the library raises all kinds: network, names, splits, formats
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"data={data!r}: is no file or folder; as a data set, split {split!r} cannot be read: {reason}"
        ) from error
    if not streaming:
        rows = rows.to_iterable_dataset()

    def texts(rows: Any) -> Texts:
        beginning = rows.state_dict()

        def read(place: Any) -> Iterator[tuple[str, Any]]:
            rows.load_state_dict(place or beginning)
            return ((_field(row, text_field, data), rows.state_dict()) for row in rows)

        def share(number: int, count: int) -> Texts:
            from datasets.distributed import split_dataset_by_node

            return texts(split_dataset_by_node(rows, number, count))

        return Texts(read, share)

    return texts(rows)
