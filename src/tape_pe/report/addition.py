"""The addition task in a report: three accuracies and the grid of operand lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tape_pe.report import figures
from tape_pe.report.parts import Cell, Column, Panel, Picture, Run, Table, TaskReport, metric, percent

COLUMNS = (
    Column("In range", metric("exact_match_in_range")),
    Column("Out of range", metric("exact_match_out_of_range")),
    Column("Whole grid", metric("exact_match")),
)


def lead(runs: Sequence[Run]) -> str:
    """What the models had to do, with the sizes that the result lines state."""
    trained = _sizes(run.result.metrics.get("trained_digits") for run in runs)
    tested = _sizes(len(run.result.metrics.get("grid") or []) or None for run in runs)
    sentence = "Adding two numbers, digit by digit; an answer counts only if it is right as a whole."
    if trained and tested:
        sentence += f" Operands have up to {trained} digits in training and up to {tested} in the test."
    return sentence


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The heat maps of all runs whose result lines hold a grid."""
    shown = [(run, _grid(run)) for run in runs if run.result.metrics.get("grid")]
    if not shown:
        return []
    largest = max(max(len(grid), len(grid[0])) for _, grid in shown)
    key = Picture(
        figures.colour_scale("exact match, one scale for all runs"),
        "Colour scale from 0 % (dark violet) to 100 % (yellow)",
        caption="",
    )
    return [
        Panel(
            title="Exact match by operand length",
            paragraphs=_how_to_read(runs, largest),
            pictures=[_picture(run, grid) for run, grid in shown],
            key=key,
            min_width=20 if largest <= 10 else 27,
        )
    ]


def _how_to_read(runs: Sequence[Run], largest: int) -> list[str]:
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
    caution += ". A map shows one trained model: another seed of the same encoding can look quite different."
    return [reading, caution]


def _picture(run: Run, grid: list[list[float]]) -> Picture:
    metrics = run.result.metrics
    trained = metrics.get("trained_digits")
    if not isinstance(trained, int):
        raise ValueError(f"run {run.label}: metrics['trained_digits'] must be an integer, not {trained!r}")
    scores = {column.title: column.value(run.result) for column in COLUMNS}
    text = ", ".join(f"{title.lower()} {percent(value)}" for title, value in scores.items() if value is not None)
    rows = [
        [Cell(f"n={n}", n), *(Cell(f"{100 * value:.1f}", value) for value in row)]
        for n, row in enumerate(grid, start=1)
    ]
    columns = len(grid[0])
    return Picture(
        svg=figures.heat_map(grid, trained),
        alt=(
            f"Heat map of run {run.label}: exact match for operands of 1 to {len(grid)} by 1 to {columns} digits, "
            f"trained up to {trained} by {trained}; {text}"
        ),
        title=run.label,
        caption=text,
        table=Table(
            caption=f"{run.label}: exact match in %, by operand lengths n and m",
            headers=["Digits", *(f"m={m}" for m in range(1, columns + 1))],
            rows=rows,
            numeric=[False] + [True] * columns,
            sortable=False,
        ),
    )


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


REPORT = TaskReport(title="Addition", columns=lambda runs: COLUMNS, lead=lead, panels=panels)
