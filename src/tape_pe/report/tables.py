"""Tables of a report: summary, medians over seeds, differences between configurations, origin of the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tape_pe.report import addition, sizes
from tape_pe.report.parts import MISSING, Cell, Column, Run, Table, TaskReport, duration, metric
from tape_pe.results import Result

_SCROLLS = Column("SCROLLS score", metric("scrolls_score"), "{:.2f}".format, bounds=(0.0, 100.0))
TASK_REPORTS: dict[str, TaskReport] = {  # a further task adds its line
    "addition": addition.REPORT,
    **sizes.REPORTS,
    "scrolls": TaskReport(title="SCROLLS", columns=lambda runs: _scrolls_columns(runs), in_range=_SCROLLS),
}
NOT_SET = "not set"
# Keys that do not make two configurations different; how many samples were drawn again follows from the seed.
NOT_A_VARIANT = {"seed", "name", "run", "output", "output_dir", "redrawn"}


def task_report(task: str) -> TaskReport:
    """What `task` adds to a report; for tasks without figures of their own, a column per number among the metrics."""
    return TASK_REPORTS.get(task) or TaskReport(title=task.replace("_", " ").capitalize(), columns=_any_metrics)


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by task, in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.result.task, []).append(run)
    return groups


def summary(runs: Sequence[Run], columns: Sequence[Column]) -> Table:
    """One row per run: what it is, what it cost, what it scored."""
    rows = []
    for run in runs:
        result = run.result
        facts = [Cell(run.label), Cell(result.encoding), Cell(str(result.seed), result.seed)]
        costs = [Cell(f"{count:,}", count) for count in (result.parameters, result.steps, result.tokens)]
        time = Cell(duration(result.train_seconds), result.train_seconds)
        rows.append([*facts, *costs, time, *(column.cell(column.value(result)) for column in columns)])
    headers = ["Run", "Encoding", "Seed", "Parameters", "Steps", "Tokens", "Train time"]
    numeric = [False, False, True, True, True, True, True] + [True] * len(columns)
    return Table("Runs", headers + [column.title for column in columns], rows, numeric)


def over_seeds(runs: Sequence[Run], columns: Sequence[Column]) -> Table | None:
    """Median and worst run per encoding; `None` where no encoding has more than one run.

    Runs count as seeds of one encoding only if nothing but the seed differs in their configurations. Where an encoding
    occurs in several configurations, each has its own row, named after the values that differ.
    """
    groups = variants(runs)
    if all(len(group) < 2 for group in groups.values()):
        return None
    rows = []
    for label, group in groups.items():
        seeds = sorted(run.result.seed for run in group)
        row = [Cell(label), Cell(str(len(group)), len(group)), Cell(", ".join(map(str, seeds)))]
        for column in columns:
            values = [value for run in group if (value := column.value(run.result)) is not None]
            worst = min if column.higher_is_better else max
            row += [column.cell(median(values) if values else None), column.cell(worst(values) if values else None)]
        rows.append(row)
    titles = [f"{column.title}, {part}" for column in columns for part in ("median", "worst")]
    return Table(
        "Median and worst seed per encoding",
        ["Encoding", "Runs", "Seeds", *titles],
        rows,
        [False, True, False] + [True] * len(titles),
    )


def variants(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs grouped by what was trained: encoding and configuration without the seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = without_seed(run.result.config)
        groups.setdefault(json.dumps([run.result.encoding, config], sort_keys=True), []).append(run)
    named: dict[str, list[Run]] = {}
    for group in groups.values():
        encoding = group[0].result.encoding
        siblings = [other[0].result.config for other in groups.values() if other[0].result.encoding == encoding]
        keys = [key for key in differing_keys(siblings) if _last(key) not in NOT_A_VARIANT]
        config = flat(group[0].result.config)
        parts = [f"{_last(key)}={_plain(config.get(key, NOT_SET))}" for key in keys]
        label = ", ".join([encoding, *parts])
        while label in named:  # values that differ but read the same, such as 1 and "1"
            label += " (other)"
        named[label] = group
    return named


def differences(runs: Sequence[Run]) -> Table | None:
    """The configuration keys whose values differ between the runs, a column per run; `None` where none do."""
    keys = differing_keys([run.result.config for run in runs])
    if not keys:
        return None
    configs = [flat(run.result.config) for run in runs]
    rows = [
        [Cell(key, code=True), *(Cell(_plain(config.get(key, NOT_SET)), code=True) for config in configs)]
        for key in keys
    ]
    headers = ["Key", *(run.label for run in runs)]
    return Table("Configuration keys that differ", headers, rows, [False] * len(headers), sortable=False)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys whose values are not the same in all `configs`, in order of appearance."""
    flattened = [flat(config) for config in configs]
    keys = dict.fromkeys(key for config in flattened for key in config)
    return [key for key in keys if len({json.dumps(config.get(key, NOT_SET)) for config in flattened}) > 1]


def origin(runs: Sequence[Run]) -> Table:
    """Where each run's numbers come from: seed, revision, versions, time of the evaluation, result lines."""
    libraries = list(dict.fromkeys(library for run in runs for library in run.result.versions))
    rows = []
    for run in runs:
        result = run.result
        revision, _, dirty = (result.git_revision or MISSING).partition("+")
        row = [Cell(run.label), Cell(str(result.seed), result.seed)]
        row.append(Cell(revision[:12] + ("+" + dirty if dirty else ""), code=True))
        row += [Cell(result.versions.get(library, MISSING), code=True) for library in libraries]
        row.append(Cell(duration(result.eval_seconds), result.eval_seconds))
        row.append(Cell("1" if run.lines == 1 else f"latest of {run.lines}", run.lines))
        rows.append(row)
    headers = ["Run", "Seed", "Git revision", *libraries, "Evaluation time", "Result lines"]
    numeric = [False, True, False] + [False] * len(libraries) + [True, True]
    return Table("Revision, versions and evaluation of each run", headers, rows, numeric)


def summary_table(results: Sequence[Result]) -> str:
    """The summary as plain text for a terminal; per task, and with medians where an encoding has several seeds.

    Raises:
        ValueError: `results` is empty.
    """
    if not results:
        raise ValueError("results is empty: a summary needs at least one result")
    blocks = []
    groups = by_task([Run(result.name, result) for result in results])
    for task, runs in groups.items():
        report = task_report(task)
        columns = report.columns(runs)
        if len(groups) > 1:
            blocks.append(report.title)
        blocks.append(plain_text(summary(runs, columns)))
        seeds = over_seeds(runs, columns)
        if seeds is not None:
            blocks.append(plain_text(seeds))
    return "\n\n".join(blocks)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists are values, empty mappings count as not set."""
    return dict(_items(config, prefix))


def without_seed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, flat, without what does not make two configurations different."""
    return {key: value for key, value in flat(config).items() if _last(key) not in NOT_A_VARIANT}


def _items(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _scrolls_columns(runs: Sequence[Run]) -> list[Column]:
    """The score, and those of its parts that runs have; for QuALITY also the accuracy as multiple choice."""
    parts = {"f1": "F1", "exact_match": "Exact match", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    columns = [replace(_SCROLLS, title=title, value=metric(name)) for name, title in parts.items()]
    columns.append(Column("Multiple choice", metric("choice_accuracy")))
    return [_SCROLLS, *(column for column in columns if any(column.value(run.result) is not None for run in runs))]


def _any_metrics(runs: Sequence[Run]) -> list[Column]:
    names = dict.fromkeys(name for run in runs for name in run.result.metrics)
    readers = {name: metric(name) for name in names}
    return [
        Column(name.replace("_", " ").capitalize(), read, text="{:.4g}".format, bounds=(-math.inf, math.inf))
        for name, read in readers.items()
        if any(read(run.result) is not None for run in runs)
    ]


def plain_text(table: Table) -> str:
    """The table for a terminal: columns in line, under their headers."""
    lines = [list(table.headers), *([cell.text for cell in row] for row in table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, table.numeric, strict=True)
        ).rstrip()
        for line in lines
    )
