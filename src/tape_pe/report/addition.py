"""The addition task in a report: three accuracies and the grid of operand lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from tape_pe.report import figures
from tape_pe.report.parts import Cell, Column, Panel, Picture, Run, Series, Table, TaskReport, metric, percent

IN_RANGE = Column("In range", metric("exact_match_in_range"))
OUT_OF_RANGE = Column("Out of range", metric("exact_match_out_of_range"))
COLUMNS = (IN_RANGE, OUT_OF_RANGE, Column("Whole grid", metric("exact_match")))


def lead(runs: Sequence[Run]) -> str:
    """What the models had to do, with the sizes that the result lines state."""
    trained = _sizes(run.result.metrics.get("trained_digits") for run in runs)
    tested = _sizes(len(run.result.metrics.get("grid") or []) or None for run in runs)
    sentence = "Adding two numbers, digit by digit; an answer counts only if it is right as a whole."
    if trained and tested:
        sentence += f" Operands have up to {trained} digits in training and up to {tested} in the test."
    return sentence


def panels(series: Sequence[Series]) -> list[Panel]:
    """The heat maps of all runs whose result lines hold a grid; of several seeds, the medians of each cell."""
    with_grid = [one._replace(runs=[run for run in one.runs if run.result.metrics.get("grid")]) for one in series]
    shown = [(one, _median_grid(one.runs)) for one in with_grid if one.runs]
    if not shown:
        return []
    largest = max(max(len(grid), len(grid[0])) for _, grid in shown)
    return [
        Panel(
            title="Exact match by operand length",
            paragraphs=_how_to_read([one for one, _ in shown], largest),
            pictures=[_picture(one, grid) for one, grid in shown],
            key=figures.colour_key("exact match, one scale for all maps"),
            min_width=20 if largest <= 10 else 27,
        )
    ]


def _how_to_read(series: Sequence[Series], largest: int) -> list[str]:
    runs = [run for one in series for run in one.runs]
    pairs = {run.result.metrics.get("pairs_per_cell") for run in runs}
    reading = (
        "Each cell is the share of additions answered exactly, for a first operand of n digits (down) and a second "
        "of m digits (across). The outlined square holds the lengths that occur in training: inside it is "
        "in range, all other cells are out of range, where at least one operand is longer than any seen in training. "
        "Whole grid is the mean over all cells."
    )
    if largest > figures.LARGEST_WITH_VALUES:
        reading += " The grids are too large to print a number in every cell; the numbers are in the tables below them."
    caution = "Read single cells with care"
    count = next(iter(pairs)) if len(pairs) == 1 else None
    if isinstance(count, int) and count > 0:
        margin = 100 * 1.96 * math.sqrt(0.25 / count)
        caution += f": each rests on {count} pairs, so that a cell near 50 % is uncertain by about {margin:.0f} points"
    if all(len(one.runs) == 1 for one in series):
        caution += ". A map shows one trained model: another seed of the same encoding can look quite different."
    else:
        caution += ". Of several seeds, each cell shows the median, so that a map is none of the trained models."
    return [reading, caution]


def _picture(one: Series, grid: list[list[float]]) -> Picture:
    trained = {run.result.metrics.get("trained_digits") for run in one.runs}
    digits = next(iter(trained))
    if len(trained) > 1 or not isinstance(digits, int):
        raise ValueError(f"{one.what}: metrics['trained_digits'] must be one integer, not {list(trained)!r}")
    scores = {}
    for column in COLUMNS:
        values = [value for run in one.runs if (value := column.value(run.result)) is not None]
        if values:
            scores[column.title] = median(values)
    text = ", ".join(f"{title.lower()} {percent(value)}" for title, value in scores.items())
    rows = [
        [Cell(f"n={n}", n), *(Cell(f"{100 * value:.1f}", value) for value in row)]
        for n, row in enumerate(grid, start=1)
    ]
    columns = len(grid[0])
    return Picture(
        svg=figures.heat_map(grid, digits),
        alt=(
            f"Heat map of {one.what}: exact match for operands of 1 to {len(grid)} by 1 to {columns} digits, "
            f"trained up to {digits} by {digits}; {text}"
        ),
        title=one.label,
        caption=text if len(one.runs) == 1 else f"median of {len(one.runs)} seeds: {text}",
        table=Table(
            caption=f"{one.label}: exact match in %, by operand lengths n and m",
            headers=["Digits", *(f"m={m}" for m in range(1, columns + 1))],
            rows=rows,
            numeric=[False] + [True] * columns,
            sortable=False,
        ),
    )


def _median_grid(runs: Sequence[Run]) -> list[list[float]]:
    grids = [np.array(_grid(run)) for run in runs]
    if len({grid.shape for grid in grids}) > 1:
        raise ValueError(f"run {runs[0].label}: metrics['grid'] must have one size in all seeds")
    medians: list[list[float]] = np.median(grids, axis=0).tolist()
    return medians


def _grid(run: Run) -> list[list[float]]:
    grid = run.result.metrics["grid"]
    numbers = (
        isinstance(grid, list)
        and all(isinstance(row, list) and row and len(row) == len(grid[0]) for row in grid)
        and all(isinstance(value, (int, float)) and 0 <= value <= 1 for row in grid for value in row)
    )
    if not numbers:
        raise ValueError(f"run {run.label}: metrics['grid'] must be rows of equal length with shares in 0..1")
    return grid


def _sizes(values: Iterable[int | None]) -> str:
    """The distinct sizes as text: `"4"`, `"4 or 8"`; empty where one is missing."""
    sizes = set(values)
    known = sorted(size for size in sizes if size is not None)
    return " or ".join(str(size) for size in known) if len(known) == len(sizes) else ""


REPORT = TaskReport(
    title="Addition",
    columns=lambda runs: COLUMNS,
    in_range=IN_RANGE,
    out_of_range=OUT_OF_RANGE,
    lead=lead,
    panels=panels,
)
