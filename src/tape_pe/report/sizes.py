"""Tasks whose scores come by the size of the problem, such as its length: their columns, curves and maps in a report.

One run is drawn as it is; of several seeds, the median is drawn, in a band from the worst seed to the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from tape_pe.report import curve_figures, figures
from tape_pe.report.parts import (
    MISSING,
    Cell,
    Column,
    Panel,
    Picture,
    Run,
    Series,
    Table,
    TaskReport,
    metric,
    percent,
    significant,
)

Size = tuple[int, ...]
_GROUP_SIZES = {"S3": 6, "S5": 120, "A5": 60, "Z60": 60}


@dataclass(frozen=True)
class BySize:
    """How a task's result lines say what was scored at which size.

    Attributes:
        unit: what a size counts; for sizes of several numbers, what each is, with a slash between.
        scores: by metric, one value for each size, what it is: the one that counts first.
        sizes: the metric that holds the sizes, numbers or lists of numbers.
        trained: the metric that holds the longest trained length.
        shares: scores are in 0..1; otherwise they are positive.
        powers: sizes grow by factors.
        in_range: for sizes of several numbers, which of them are no harder than trained, given the task's options.
        guess: what guessing scores in the first of `scores`, given the task's options.
    """

    unit: str
    scores: Mapping[str, str]
    sizes: str = "sizes"
    trained: str = "trained_size"
    shares: bool = True
    powers: bool = False
    in_range: Callable[[Mapping[str, Any], Size], bool] | None = None
    guess: Callable[[Mapping[str, Any]], float | None] = lambda options: None

    def values(self, run: Run, score: str) -> dict[Size, float]:
        """The scores of a run by size; empty where its result line has none.

        Raises:
            ValueError: sizes and scores do not match.
        """
        metrics = run.result.metrics
        sizes, values = metrics.get(self.sizes), metrics.get(score)
        if sizes is None or values is None:
            return {}
        if len(sizes) != len(values) or not all(isinstance(value, (int, float)) for value in values):
            raise ValueError(f"run {run.label}: metrics[{score!r}] must hold a number for each of {self.sizes}")
        return {
            tuple(size) if isinstance(size, list) else (size,): float(value)
            for size, value in zip(sizes, values, strict=True)
        }

    def text(self, value: float) -> str:
        """A score as people read it."""
        return f"{100 * value:.1f}" if self.shares else significant(value)


@dataclass(frozen=True)
class _Medians:
    """The scores of a series at the sizes that all of its runs have."""

    series: Series
    values: dict[Size, list[float]]

    def median(self, size: Size) -> float | None:
        return median(self.values[size]) if size in self.values else None


def panels(by_size: BySize, series: Sequence[Series]) -> list[Panel]:
    """One panel with a picture per score: curves, or one map where a size is more than a length."""
    pictures: list[Picture] = []
    drawn: list[list[dict[Size, list[float]]]] = []
    key = None
    for score, title in by_size.scores.items():
        found = [medians for one in series if (medians := _medians(by_size, one, score)).values]
        values = [medians.values for medians in found]
        if not found or values in drawn:  # the same picture twice says nothing
            continue
        drawn.append(values)
        if max(len(size) for one in values for size in one) == 1:
            pictures.append(_curves(by_size, found, score, title))
        else:
            pictures.append(_map(by_size, found, title))
            key = figures.colour_key("one scale for all maps")
    if not pictures:
        return []
    name = "Scores by length" if key is None else "Scores by size"
    return [Panel(name, [_how_to_read(by_size, series, key is not None)], pictures, key=key, min_width=34)]


def _how_to_read(by_size: BySize, series: Sequence[Series], is_map: bool) -> str:
    several = any(len(one.runs) > 1 for one in series)
    if is_map:
        return f"Across: {by_size.unit}. * marks what is no harder than in training." + (
            " Of several seeds, each cell shows the median." if several else ""
        )
    text = f"Across: {by_size.unit}. The shaded lengths occur in training."
    return text + (" Line: median over seeds. Band: from the worst seed to the best." if several else "")


def _medians(by_size: BySize, series: Series, score: str) -> _Medians:
    runs = [values for run in series.runs if (values := by_size.values(run, score))]
    common = [size for size in runs[0] if all(size in values for values in runs)] if runs else []
    return _Medians(series, {size: [values[size] for values in runs] for size in common})


def _curves(by_size: BySize, found: Sequence[_Medians], score: str, title: str) -> Picture:
    bands = []
    for one in found:
        sizes = sorted(one.values)
        by_run = list(zip(*(one.values[size] for size in sizes), strict=True))
        bands.append(curve_figures.median_band(one.series.label, one.series.look, [s[0] for s in sizes], by_run))
    guesses = {by_size.guess(_options(run)) for one in found for run in one.series.runs}
    counts = score == next(iter(by_size.scores))
    draw = partial(
        curve_figures.size_curves,
        bands,
        (by_size.unit, title + ("" if by_size.shares else " (log scale)")),
        trained=_trained(by_size, found),
        guess=guesses.pop() if counts and len(guesses) == 1 else None,
        shares=by_size.shares,
        powers=by_size.powers,
    )
    ends = [
        f"{one.series.what}: {_said(by_size, band.middle[0])} at {band.x[0]}, "
        f"{_said(by_size, band.middle[-1])} at {band.x[-1]}"
        for one, band in zip(found, bands, strict=True)
    ]
    return Picture(
        svg=draw(),
        narrow=draw(narrow=True),
        alt=f"{title.capitalize()} by {by_size.unit}. {'; '.join(ends)}",
        title=title.capitalize() + ".",
        caption="",
        table=_numbers(by_size, found, title),
    )


def _map(by_size: BySize, found: Sequence[_Medians], title: str) -> Picture:
    sizes = list(dict.fromkeys(size for one in found for size in one.values))
    grid = [[float("nan") if (value := one.median(size)) is None else value for size in sizes] for one in found]
    ends = [
        f"{one.series.what}: {', '.join(f'{_said(by_size, one.median(size))} at {_name(size)}' for size in one.values)}"
        for one in found
    ]
    columns = [_name(size) + ("*" if _is_in_range(by_size, found, size) else "") for size in sizes]
    labels = [one.series.label for one in found]
    return Picture(
        svg=figures.share_map(grid, [figures.shortened(label, 24) for label in labels], columns, ("", by_size.unit)),
        alt=f"Heat map of the {title} by {by_size.unit}. {'; '.join(ends)}",
        title=title.capitalize() + ".",
        caption="",
        table=_numbers(by_size, found, title),
    )


def _numbers(by_size: BySize, found: Sequence[_Medians], title: str) -> Table:
    sizes = sorted({size for one in found for size in one.values})
    rows = []
    for one in found:
        medians = [one.median(size) for size in sizes]
        cells = [Cell(MISSING) if value is None else Cell(by_size.text(value), value) for value in medians]
        rows.append([Cell(one.series.label), *cells])
    caption = title.capitalize() + (" in %" if by_size.shares else "") + f", by {by_size.unit}"
    return Table(caption, ["", *map(_name, sizes)], rows, [False] + [True] * len(sizes), sortable=False)


def _said(by_size: BySize, value: float | None) -> str:
    return MISSING if value is None else percent(value) if by_size.shares else by_size.text(value)


def _name(size: Size) -> str:
    return " / ".join(f"{number:,}" for number in size)


def _options(run: Run) -> Mapping[str, Any]:
    options: Mapping[str, Any] = run.result.config.get("task") or {}
    return options


def _trained(by_size: BySize, found: Sequence[_Medians]) -> float | None:
    lengths = {run.result.metrics.get(by_size.trained) for one in found for run in one.series.runs}
    return lengths.pop() if len(lengths) == 1 else None


def _is_in_range(by_size: BySize, found: Sequence[_Medians], size: Size) -> bool:
    runs = [run for one in found for run in one.series.runs]
    return by_size.in_range is not None and all(by_size.in_range(_options(run), size) for run in runs)


# --- the tasks -----------------------------------------------------------------------------------------------------


def _report(title: str, lead: str, columns: Sequence[Column], by_size: BySize) -> TaskReport:
    """The first two columns are the scores in and out of range."""

    def whole_lead(runs: Sequence[Run]) -> str:
        trained = {run.result.metrics.get(by_size.trained) for run in runs}
        length = trained.pop() if len(trained) == 1 else None
        return lead if length is None else f"{lead} Trained up to a length of {length:,}."

    return TaskReport(title, lambda runs: columns, columns[0], columns[1], whole_lead, partial(panels, by_size))


def _shares(prefix: str) -> tuple[Column, ...]:
    return (
        Column("In range", metric(f"{prefix}_in_range")),
        Column("Out of range", metric(f"{prefix}_out_of_range")),
        Column("All sizes", metric(prefix)),
    )


def _positive(title: str, name: str, least: float) -> Column:
    return Column(title, metric(name), significant, higher_is_better=False, bounds=(least, float("inf")))


_TOKENS = {"token_accuracy": "share of tokens right", "sequence_accuracy": "share of whole samples right"}
_SAMPLES = {name: _TOKENS[name] for name in ("sequence_accuracy", "token_accuracy")}
_SEQUENCES: dict[str, tuple[str, str, BySize]] = {
    "state_tracking": (
        "State tracking",
        "The running product of elements of a finite group, asked at every element; what counts is the share of "
        "elements answered rightly.",
        BySize(
            "elements of the sequence",
            _TOKENS,
            guess=lambda options: 1 / _GROUP_SIZES[options["group"]] if options.get("group") in _GROUP_SIZES else None,
        ),
    ),
    "flip_flop": (
        "Flip-flop",
        "The bit that was last written, asked at every read, among bits to be ignored; what counts is the share of "
        "reads answered rightly, of which guessing gets half.",
        BySize(
            "instructions / % of them ignored",
            _TOKENS,
            in_range=lambda options, size: (
                size[0] <= options.get("length", 0) and size[1] == options.get("ignore_percent")
            ),
        ),
    ),
    "associative_recall": (
        "Associative recall",
        "Keys with values, then the keys again in another order; what counts is the share of keys that are answered "
        "by their values.",
        BySize(
            "tokens / pairs",
            _TOKENS,
            in_range=lambda options, size: any(
                size[0] <= length and size[1] <= pairs for length, pairs in options.get("train_cases") or ()
            ),
        ),
    ),
    "copy": (
        "Copy",
        "Writing a string once more; what counts is the share of strings that are entirely right, with their end.",
        BySize("symbols of the string", _SAMPLES),
    ),
    "reverse": (
        "Reverse",
        "Writing a string backwards; what counts is the share of strings that are entirely right, with their end.",
        BySize("symbols of the string", _SAMPLES),
    ),
    "modular_arithmetic": (
        "Modular arithmetic",
        "Sums and products of small numbers, modulo one of them; what counts is the share of right results.",
        BySize(
            "numbers in the expression",
            _SAMPLES,
            guess=lambda options: 1 / options["modulus"] if options.get("modulus") else None,
        ),
    ),
}

REPORTS: dict[str, TaskReport] = {
    **{name: _report(title, lead, _shares("accuracy"), by) for name, (title, lead, by) in _SEQUENCES.items()},
    "passkey": _report(
        "Passkey",
        "A number hidden in filler text, which the end of the prompt asks for; what counts is the share of prompts "
        "answered with exactly its tokens.",
        (*_shares("exact_match")[:2], Column("All lengths", metric("exact_match"))),
        BySize(
            "tokens of the prompt",
            {
                "exact_match_by_length": "share of prompts with an exact match",
                "first_number_by_length": "share of prompts whose first number is right",
            },
            sizes="lengths",
            trained="trained_length",
            powers=True,
        ),
    ),
    "language_modelling": _report(
        "Language modelling",
        "Text, a token at a time; less perplexity is better. Every token is scored once, in sliding windows of each "
        "length.",
        (
            _positive("Perplexity, trained length", "perplexity", 1.0),
            _positive("Perplexity, longest", "perplexity_longest", 1.0),
            _positive("Bits per byte, trained length", "bits_per_byte", 0.0),
        ),
        BySize(
            "tokens of a window",
            {"perplexity_by_length": "perplexity"},
            sizes="lengths",
            trained="trained_length",
            shares=False,
            powers=True,
        ),
    ),
}
