"""One task's page of a suite's site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from tape_pe.report import curve_figures, figures, tables
from tape_pe.report.parts import MISSING, Cell, Column, Panel, Picture, Run, Series, Table, duration
from tape_pe.report.published import Published, published
from tape_pe.report.scores import Scores, headlines
from tape_pe.report.suite_results import SuiteResults, TaskRuns

MOST_POINTS = 300  # of a learning curve: more would only make the picture larger


@dataclass(frozen=True)
class Beside:
    """Published tables, and the one of ours that comes nearest to all of them."""

    published: Sequence[Published]
    ours: Table | None


@dataclass(frozen=True)
class TaskPage:
    """Everything about one task; see the template `suite_task.html.j2`."""

    title: str
    task_title: str
    lead: str
    verdicts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    scores: Sequence[Table]
    panels: Sequence[Panel]
    beside: Sequence[Beside]
    costs: Table | None
    differences: Table | None
    runs: Table
    origin: Table | None


def task_page(suite: SuiteResults, task: TaskRuns, links: Mapping[str, tuple[str, str]]) -> TaskPage:
    """Arranges what there is of a task.

    Args:
        suite: the suite.
        task: one of its tasks.
        links: by name of a finished run, the addresses of its result line and of its configuration.
    """
    report = tables.task_report(task.task)
    runs = task.runs
    columns = report.columns(runs)
    baseline = suite.baseline if suite.baseline in task.encodings else task.encodings[0]
    series = _series(suite, task)
    main = [column for column in headlines(task) if column is not None]
    ordered = [*main, *(column for column in columns if all(column.title != one.title for one in main))]
    scores = [one for column in ordered if (one := Scores(task, column)).spreads]
    return TaskPage(
        title=task.label,
        task_title=report.title,
        lead=report.lead(runs) or f"Task: {task.task}.",
        verdicts=[(one.column.title, one.verdict()) for one in scores[: max(1, len(main))]],
        notes=_notes(task),
        scores=[one.table(baseline) for one in scores],
        panels=[*_learning_panel(series), *report.panels(series)],
        beside=_beside(task, columns),
        costs=_costs(task) if runs else None,
        differences=_differences(task),
        runs=_runs(task, columns, links),
        origin=tables.origin(runs) if runs else None,
    )


def _series(suite: SuiteResults, task: TaskRuns) -> list[Series]:
    """One per encoding with finished runs; an encoding has the same look on all pages."""
    looks = dict(zip(suite.encodings, figures.line_looks(suite.encodings), strict=True))
    return [Series(label, runs, looks[label]) for label in task.encodings if (runs := task.runs_of(label))]


def _notes(task: TaskRuns) -> list[str]:
    """What keeps these numbers from proving more than they do."""
    runs = task.runs
    if not runs:
        return ["No run of this task has finished yet."]
    notes = []
    missing = task.planned - len(runs)
    if missing:
        text = f"{len(runs)} of {task.planned} runs have finished"
        failed = f"; the failed ones, {len(task.failed)}, count in no figure on this page" if task.failed else ""
        notes.append(f"{text}{failed}. Encodings are compared on the seeds that they have.")
    if len(task.seeds) == 1:
        notes.append("One seed proves nothing: two seeds of the same encoding can differ more than two encodings do.")
    if len({run.result.steps for run in runs}) > 1:
        notes.append("The runs did not take the same number of steps, so they are not compared on an equal budget.")
    mixed = [label for label in task.encodings if len(tables.variants(task.runs_of(label))) > 1]
    if mixed:
        notes.append(f"The seeds of {', '.join(mixed)} differ in more than the seed; see the configurations.")
    revisions = {run.result.git_revision for run in runs}
    if len(revisions) > 1:
        notes.append(f"The runs come from {len(revisions)} revisions of the code; see the origin of the numbers.")
    dirty = sum((run.result.git_revision or "").endswith("+dirty") for run in runs)
    if dirty:
        notes.append(f"{dirty} of {len(runs)} runs come from a working tree with uncommitted changes (+dirty).")
    return notes


def _learning_panel(series: Sequence[Series]) -> list[Panel]:
    bands = []
    for one in series:
        curves = [np.asarray(run.result.loss_curve, dtype=float) for run in one.runs if run.result.loss_curve]
        if not curves:
            continue
        smooth = [figures.smoothed(curve[:, 1], figures.smoothing_window(len(curve))) for curve in curves]
        by_step = [dict(zip(curve[:, 0], losses, strict=True)) for curve, losses in zip(curves, smooth, strict=True)]
        steps = sorted(set(by_step[0]).intersection(*by_step))
        if not steps:
            continue
        shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).round().astype(int))
        steps = [steps[index] for index in shown]
        values = [[losses[step] for step in steps] for losses in by_step]
        bands.append(curve_figures.median_band(one.label, one.look, steps, values))
    if not bands:
        return []
    draw = partial(curve_figures.learning_curves, bands)
    ends = "; ".join(f"{band.label} ends at {band.middle[-1]:.3g}" for band in bands)
    several = any(len(one.runs) > 1 for one in series)
    picture = Picture(
        svg=draw(),
        narrow=draw(narrow=True),
        alt=f"Training loss against optimizer steps, median over seeds: {ends}",
        caption="Running means of the logged loss."
        + (" Line: median over seeds. Band: from the lowest to the highest." if several else ""),
    )
    return [Panel("Learning curves", [], [picture])]


def _beside(task: TaskRuns, columns: Sequence[Column]) -> list[Beside]:
    """Published tables by the metric of ours that comes nearest, with its medians."""
    groups: dict[str, list[Published]] = {}
    for entry in published(task.task):
        groups.setdefault(entry.ours, []).append(entry)
    return [Beside(entries, _ours(task, columns, name)) for name, entries in groups.items()]


def _ours(task: TaskRuns, columns: Sequence[Column], name: str) -> Table | None:
    column = next((column for column in columns if _reads(column, name, task.runs)), None)
    if column is None:
        return None
    scores, rows = Scores(task, column), []
    for label in scores.ranking:
        one = scores.spreads[label]
        interval, count = Cell(scores.interval(one), one.low), Cell(str(len(one.values)), len(one.values))
        rows.append([Cell(label), column.cell(one.median), interval, count])
    headers = ["Encoding", "Median", "95 % interval of the mean", "Seeds"]
    return Table(f"Measured here: {column.title.lower()}", headers, rows, [False, True, True, True])


def _reads(column: Column, name: str, runs: Sequence[Run]) -> bool:
    """Whether a column shows this metric."""
    found = [(column.value(run.result), run.result.metrics.get(name)) for run in runs]
    return bool(found) and all(shown == stored for shown, stored in found) and found[0][0] is not None


def _costs(task: TaskRuns) -> Table:
    rows = []
    for label in task.encodings:
        results = [run.result for run in task.runs_of(label)]
        if not results:
            continue
        cells = [Cell(label)]
        for name in ("parameters", "steps", "tokens"):
            values = sorted({getattr(result, name) for result in results})
            text = f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
            cells.append(Cell(text, float(median(values))))
        for name in ("train_seconds", "eval_seconds"):
            seconds = median(getattr(result, name) for result in results)
            cells.append(Cell(duration(seconds), seconds))
        rows.append(cells)
    headers = ["Encoding", "Parameters", "Steps", "Tokens read", "Training time, median", "Evaluation time, median"]
    return Table("What the runs took", headers, rows, [False] + [True] * 5)


def _differences(task: TaskRuns) -> Table | None:
    """The configuration keys in which encodings differ, beside the seed: a column per encoding."""
    first = [Run(label, runs[0].result) for label in task.encodings if (runs := task.runs_of(label))]
    if len(first) < 2:
        return None
    plain = [Run(run.label, replace(run.result, config=tables.without_seed(run.result.config))) for run in first]
    table = tables.differences(plain)
    return None if table is None else replace(table, caption="Options in which the encodings differ")


def _runs(task: TaskRuns, columns: Sequence[Column], links: Mapping[str, tuple[str, str]]) -> Table:
    rows = []
    for encoding in task.encodings:
        for seed in task.seeds:
            name = task.run_name(encoding, seed)
            facts = [Cell(encoding), Cell(str(seed), seed)]
            run = task.finished.get((encoding, seed))
            if run is None:
                why = task.failed.get((encoding, seed))
                state = Cell("not finished" if why is None else "failed", note=why or "")
                rows.append([*facts, state, *[Cell(MISSING)] * (len(columns) + 3)])
                continue
            line, config = links[name]
            scores = [column.cell(column.value(run.result)) for column in columns]
            time = Cell(duration(run.result.train_seconds), run.result.train_seconds)
            files = [Cell("JSON", link=line), Cell("YAML", link=config)]
            rows.append([*facts, Cell("finished"), *scores, time, *files])
    headers = ["Encoding", "Seed", "State", *(column.title for column in columns), "Training time"]
    numeric = [False, True, False] + [True] * (len(columns) + 1) + [False, False]
    return Table("Every run", [*headers, "Result line", "Configuration"], rows, numeric)
