"""What a report is made of, and what a task contributes to it."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tape_pe.results import Result

MISSING = "\u2013"  # what a table shows where a run has no such value


def percent(share: float) -> str:
    """A share in 0..1 as a percentage with one decimal: `0.0251` is `"2.5 %"`."""
    return f"{100 * share:.1f} %"


def significant(value: float) -> str:
    """A number with four significant digits: `"9.300"`, `"1234"`, `"1.230e+06"`."""
    return f"{value:#.4g}".removesuffix(".")


def duration(seconds: float) -> str:
    """Wall time for people: `"9.3 s"`, `"18 min 40 s"`, `"2 h 05 min"`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True)
class Run:
    """One run of the report.

    Attributes:
        label: what the page calls the run: its name, or its path where two runs have the same name.
        result: the latest result line of the run.
        lines: number of result lines that the run's file holds.
    """

    label: str
    result: Result
    lines: int = 1


class Series(NamedTuple):
    """What one line of a picture, or one map of several, stands for: a run, or the seeds of one encoding.

    Attributes:
        label: its name.
        runs: of several runs, the medians are drawn.
        look: colour and dash of its line.
    """

    label: str
    runs: Sequence[Run]
    look: tuple[str, Any]

    @property
    def what(self) -> str:
        """Its name with what it is, for text alternatives."""
        return f"run {self.label}" if len(self.runs) == 1 else f"{self.label}, median of {len(self.runs)} seeds"


class Strip(NamedTuple):
    """The seeds of one encoding as dots on a scale, with their median and an interval; all in 0..1 of the width."""

    points: Sequence[float]
    median: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Attributes:
        text: what to read.
        value: the number to sort by; `None`: sort by the text.
        code: whether the text is code.
        link: relative address that the text leads to.
        note: said below the text, small; may have several lines.
        badge: a distinction, said behind the text.
        strip: drawn below the text.
        shade: how strongly the cell is coloured, in 0..1.
    """

    text: str
    value: float | None = None
    code: bool = False
    link: str = ""
    note: str = ""
    badge: str = ""
    strip: Strip | None = None
    shade: float = 0.0


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row.

    Attributes:
        caption: says what the table holds.
        headers: one title per column.
        rows: cells, one per header.
        numeric: which columns hold numbers (set flush right).
        sortable: whether readers may sort it.
    """

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool]
    sortable: bool = True


@dataclass(frozen=True)
class Column:
    """A score in the summary table.

    Attributes:
        title: header of the column.
        value: reads the score from a result; `None` where the run has none.
        text: writes the score.
        higher_is_better: tells which of several seeds is the worst.
        bounds: the least and the greatest value that there can be.
    """

    title: str
    value: Callable[[Result], float | None]
    text: Callable[[float], str] = percent
    higher_is_better: bool = True
    bounds: tuple[float, float] = (0.0, 1.0)

    def cell(self, value: float | None) -> Cell:
        """The table cell of a score."""
        return Cell(MISSING) if value is None else Cell(self.text(value), value)


@dataclass(frozen=True)
class Picture:
    """A picture with its texts.

    Attributes:
        svg: the picture, an SVG file.
        alt: the text alternative.
        caption: shown below the picture; may be empty.
        title: set in front of the caption, for example the name of the run.
        narrow: the same picture laid out for a phone, where a scaled one would be too small to read.
        table: the numbers of the picture, shown on demand.
    """

    svg: bytes
    alt: str
    caption: str
    title: str = ""
    narrow: bytes | None = None
    table: Table | None = None

    @property
    def uri(self) -> str:
        """The picture as a `data:` address."""
        return _data_uri(self.svg)

    @property
    def narrow_uri(self) -> str | None:
        """The phone layout as a `data:` address."""
        return None if self.narrow is None else _data_uri(self.narrow)


@dataclass(frozen=True)
class Panel:
    """A titled part of a task's section: sentences, then pictures side by side.

    Attributes:
        title: heading.
        paragraphs: what the reader needs to know to read the pictures.
        pictures: pictures of equal rank, laid out side by side where there is room.
        key: a picture that all of them share, for example their colour scale.
        min_width: smallest readable width of one picture, in rem.
    """

    title: str
    paragraphs: Sequence[str]
    pictures: Sequence[Picture]
    key: Picture | None = None
    min_width: int = 20


@dataclass(frozen=True)
class TaskReport:
    """What a task adds to its section of a report.

    Attributes:
        title: heading of the section.
        columns: the task's columns of the summary table, for the runs given.
        in_range: the score for problems no harder than trained.
        out_of_range: the score for harder ones, such as longer ones.
        lead: opening sentence of the section.
        panels: the task's own figures.
    """

    title: str
    columns: Callable[[Sequence[Run]], Sequence[Column]]
    in_range: Column | None = None
    out_of_range: Column | None = None
    lead: Callable[[Sequence[Run]], str] = field(default=lambda runs: "")
    panels: Callable[[Sequence[Series]], Sequence[Panel]] = field(default=lambda series: ())


def metric(name: str) -> Callable[[Result], float | None]:
    """A reader for `Column.value`: the number `metrics[name]`, `None` where it is missing or no finite number."""

    def read(result: Result) -> float | None:
        value = result.metrics.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value)

    return read


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
