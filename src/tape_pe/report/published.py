"""Figures that papers published, as tables that say so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tape_pe.report.parts import MISSING, Cell, Table

CAPTION = "Published (other sizes, other budgets; not measured here)"


@dataclass(frozen=True)
class Published:
    """A published table.

    Attributes:
        title: what it holds.
        source: where it was published.
        setting: the sizes and budgets that its figures belong to.
        ours: the metric of our result lines that comes nearest.
        table: the figures.
    """

    title: str
    source: str
    setting: str
    ours: str
    table: Table


def published(task: str) -> list[Published]:
    """The published tables that belong to a registered task."""
    return [entry for name, entry in _all() if name == task]


@cache
def _all() -> list[tuple[str, Published]]:
    entries = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    found = []
    for entry in entries:
        decimals = max(len(str(value).partition(".")[2]) for _, *values in entry["rows"] for value in values if value)
        rows = [
            [
                Cell(name),
                *(Cell(MISSING) if value is None else Cell(f"{value:.{decimals}f}", value) for value in values),
            ]
            for name, *values in entry["rows"]
        ]
        table = Table(CAPTION, entry["columns"], rows, [False] + [True] * (len(entry["columns"]) - 1))
        texts = {key: entry[key].strip() for key in ("title", "source", "setting", "ours")}
        found.append((entry["task"], Published(table=table, **texts)))
    return found
