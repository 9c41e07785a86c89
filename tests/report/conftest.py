"""Synthetic result lines and a small reader of the pages made from them."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tape_pe.results import Result, append_result

VOID = {"meta", "img", "source", "br", "hr", "link", "input"}


class _Page(HTMLParser):
    """Checks that tags nest; keeps tables as rows of texts, attributes by tag, and the text of all elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"th", "td"}:
            self.tables[-1][-1].append("")
        elif tag == "caption":
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script"} & set(self.open):
            return
        self.text += data
        if {"th", "td"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif "caption" in self.open:
            self.captions[-1] += data

    def table(self, caption: str) -> list[dict[str, str]]:
        """Rows of the table with this caption, by header."""
        header, *rows = self.tables[self.captions.index(caption)]
        return [dict(zip(header, row, strict=True)) for row in rows]

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def _result(name: str = "run", encoding: str = "tape", seed: int = 0, **changes: Any) -> Result:
    """A result of the addition task: trained to 2 digits, tested to 4."""
    grid = [[1.0 if n < 2 and m < 2 else 0.25 if n < 3 and m < 3 else 0.0 for m in range(4)] for n in range(4)]
    values: dict[str, Any] = {
        "name": name,
        "task": "addition",
        "config": {
            "model": {"encoding": encoding, "hidden_size": 32},
            "task": {"name": "addition", "digits": 2},
            "training": {"steps": 100, "seed": seed},
        },
        "seed": seed,
        "git_revision": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"python": "3.11.7", "torch": "2.9.0"},
        "parameters": 790528,
        "steps": 100,
        "tokens": 1234567,
        "train_seconds": 1120.4,
        "eval_seconds": 9.34,
        "loss_curve": [[step, 2.0 / step] for step in range(1, 101)],
        "metrics": {
            "exact_match": 0.328125,
            "exact_match_in_range": 1.0,
            "exact_match_out_of_range": 0.1041,
            "grid": grid,
            "trained_digits": 2,
            "pairs_per_cell": 100,
        },
    }
    return Result(**{**values, **changes})


@pytest.fixture
def result() -> Callable[..., Result]:
    """Makes a result of the addition task; keywords replace its fields."""
    return _result


@pytest.fixture
def parse() -> Callable[[str], _Page]:
    """Parses a page and fails where its tags do not nest."""
    return _Page


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder with one or more result lines."""

    def make(name: str = "run", *results: Result, folder: str = "runs", **changes: Any) -> Path:
        run = tmp_path / folder / name.replace("/", "_")
        run.mkdir(parents=True)
        for line in results or [_result(name, **changes)]:
            append_result(run, line)
        return run

    return make
