"""The page: collects result lines, arranges them into sections and writes one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tape_pe.report import figures, tables
from tape_pe.report.html import check_output, template, write_page
from tape_pe.report.parts import Panel, Picture, Run, Series, Table
from tape_pe.results import read_results


@dataclass(frozen=True)
class Section:
    """All that the page shows of one task."""

    title: str
    lead: str
    summary: Table
    seeds: Table | None
    notes: Sequence[str]
    panels: Sequence[Panel]
    configs: Sequence[tuple[str, str]]
    differences: Table | None
    origin: Table


def write_report(runs: Sequence[Path], output: Path, title: str | None = None) -> Path:
    """Writes one HTML page about one or several runs, with everything it needs inside, and returns its path.

    The page appears under its name only once it is complete. Parent folders are created.

    Args:
        runs: run folders that hold a results file; of several result lines in one, the latest counts.
        output: the HTML file to write.
        title: title of the page; named after the tasks and encodings if left out.

    Raises:
        ValueError: no runs, a run given twice, a results file without lines, or a line that cannot be read.
        FileNotFoundError: a run that does not exist or was never evaluated.
    """
    output = Path(output)
    check_output(output)
    return write_page(output, render(collect(runs), title))


def collect(runs: Sequence[Path]) -> list[Run]:
    """Reads the latest result line of every run folder; see `write_report` for what is refused."""
    paths = [Path(run) for run in runs]
    if not paths:
        raise ValueError("runs is empty: a report needs at least one run folder")
    repeated = [path for index, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:index]}]
    if repeated:
        raise ValueError(f"runs names {repeated[0]} twice")
    lines = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run folder {path}")
        results = read_results(path)
        if not results:
            raise ValueError(f"run {path} has no result lines: evaluate it first, with `tape evaluate {path}`")
        lines.append(results)
    names = [results[-1].name for results in lines]
    return [
        Run(name if names.count(name) == 1 else str(path), results[-1], len(results))
        for name, path, results in zip(names, paths, lines, strict=True)
    ]


def render(runs: Sequence[Run], title: str | None = None) -> str:
    """The HTML page about `runs`."""
    sections = [section(group) for group in tables.by_task(runs).values()]
    if title is None:
        encodings = ", ".join(dict.fromkeys(run.result.encoding for run in runs))
        title = f"{sections[0].title}: {encodings}" if len(sections) == 1 else f"Results of {len(runs)} runs"
    return template("report.html.j2").render(
        title=title, sections=sections, runs=runs, several_lines=any(run.lines > 1 for run in runs)
    )


def section(runs: Sequence[Run]) -> Section:
    """Everything about the runs of one task."""
    report = tables.task_report(runs[0].result.task)
    columns = report.columns(runs)
    return Section(
        title=report.title,
        lead=report.lead(runs) or f"Task: {runs[0].result.task}.",
        summary=tables.summary(runs, columns),
        seeds=tables.over_seeds(runs, columns),
        notes=_notes(runs),
        panels=[*_loss_panel(runs), *report.panels(_each_run(runs))],
        configs=[(run.label, json.dumps(run.result.config, indent=2, ensure_ascii=False)) for run in runs],
        differences=tables.differences(runs) if len(runs) > 1 else None,
        origin=tables.origin(runs),
    )


def _notes(runs: Sequence[Run]) -> list[str]:
    """What keeps these numbers from proving more than they do."""
    groups = tables.variants(runs)
    single = [label for label, group in groups.items() if len({run.result.seed for run in group}) == 1]
    notes = []
    if len(single) == len(groups):
        notes.append(
            "One seed proves nothing: two seeds of the same encoding can differ more than two encodings do. "
            "Train several seeds before you conclude anything from this table."
        )
    elif single:
        notes.append(f"Only one seed of {'; '.join(single)}: one seed proves nothing. Compare medians and worst seeds.")
    else:
        fewest = min(len({run.result.seed for run in group}) for group in groups.values())
        notes.append(
            f"Compare medians and worst seeds, never the best one. With {fewest} seeds per encoding the spread is only "
            "roughly known."
        )
    if len({run.result.steps for run in runs}) > 1:
        notes.append("The runs did not take the same number of steps, so they are not compared on an equal budget.")
    dirty = [run.label for run in runs if (run.result.git_revision or "").endswith("+dirty")]
    if dirty:
        notes.append(f"Made from a working tree with uncommitted changes (+dirty): {', '.join(dirty)}.")
    return notes


def _each_run(runs: Sequence[Run]) -> list[Series]:
    looks = figures.line_looks(_variant_names(runs))
    return [Series(run.label, [run], look) for run, look in zip(runs, looks, strict=True)]


def _variant_names(runs: Sequence[Run]) -> list[str]:
    names = {run.label: name for name, group in tables.variants(runs).items() for run in group}
    return [names[run.label] for run in runs]


def _loss_panel(runs: Sequence[Run]) -> list[Panel]:
    variants = zip(runs, _variant_names(runs), strict=True)
    curves = [figures.Curve(run.label, variant, run.result.loss_curve) for run, variant in variants]
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return []
    windows = sorted({figures.smoothing_window(len(curve.points)) for curve in shown})
    caption = "Faint: the loss as logged. Full colour: its running mean"
    caption += (
        f" over {' or '.join(map(str, windows))} logged points." if windows != [1] else " (too few points to smooth)."
    )
    left_out = [curve.label for curve in curves if not curve.points]
    if left_out:
        caption += f" Without a loss curve: {', '.join(left_out)}."
    ends = "; ".join(f"{curve.label} ends at {curve.points[-1][1]:.3g}" for curve in shown)
    picture = Picture(
        svg=figures.loss_curves(shown),
        narrow=figures.loss_curves(shown, narrow=True),
        alt=f"Training loss against optimizer steps on a log scale: {ends}",
        caption=caption,
    )
    return [Panel("Training loss", [], [picture])]
