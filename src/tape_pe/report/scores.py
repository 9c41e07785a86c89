"""The scores of one task of a suite: over seeds, as tables and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tape_pe.report.parts import MISSING, Cell, Column, Strip, Table
from tape_pe.report.spread import Spread, clearly_best, difference, places, spread
from tape_pe.report.suite_results import SuiteResults, TaskRuns
from tape_pe.report.tables import plain_text, task_report

BEST = "clearly best"
MOST_NAMED = 3


@dataclass(frozen=True)
class Scores:
    """One score of all runs of a task.

    Attributes:
        task: the task and its runs.
        column: which score.
    """

    task: TaskRuns
    column: Column

    @cached_property
    def by_seed(self) -> dict[str, dict[int, float]]:
        """Scores by encoding and seed, of the runs that have one."""
        found: dict[str, dict[int, float]] = {encoding: {} for encoding in self.task.encodings}
        for (encoding, seed), run in self.task.finished.items():
            value = self.column.value(run.result)
            if value is not None:
                found[encoding][seed] = value
        return found

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """By encoding, of those that have scores."""
        found = {encoding: spread(list(values.values()), self.column) for encoding, values in self.by_seed.items()}
        return {encoding: one for encoding, one in found.items() if one is not None}

    @cached_property
    def best(self) -> str | None:
        """The clearly best encoding, where there is one."""
        return clearly_best(self.spreads, self.column)

    @property
    def ranking(self) -> list[str]:
        """The encodings that have scores, the best median first."""
        sign = -1 if self.column.higher_is_better else 1
        return sorted(self.spreads, key=lambda encoding: sign * self.spreads[encoding].median)

    def interval(self, one: Spread) -> str:
        """The confidence interval as text."""
        if one.low is None or one.high is None:
            return MISSING
        low, high = self.column.text(one.low), self.column.text(one.high)
        return f"{low.removesuffix(' %')} to {high}"

    def strip(self, one: Spread) -> Strip:
        """The seeds on the scale of this task's scores."""
        low, high = places(list(self.spreads.values()), self.column)

        def place(value: float) -> float:
            return round(min(1.0, max(0.0, (value - low) / (high - low))), 4)

        interval = None if one.low is None or one.high is None else (place(one.low), place(one.high))
        return Strip([place(value) for value in one.values], place(one.median), *(interval or (None, None)))

    def overview_cell(self, encoding: str) -> Cell:
        """Median, interval and worst seed in one cell."""
        if encoding not in self.task.encodings:
            return Cell(MISSING, note="not planned")
        done, planned, failed = len(self.task.runs_of(encoding)), len(self.task.seeds), self.task.failed_of(encoding)
        count = ([f"{done} of {planned} seeds"] if done < planned else []) + ([f"{failed} failed"] if failed else [])
        one = self.spreads.get(encoding)
        if one is None:
            return Cell(MISSING, note="\n".join(count) or "no such score")
        notes = ["one seed" if one.low is None else self.interval(one), f"worst {self.column.text(one.worst)}", *count]
        strip = self.strip(one)
        return Cell(
            self.column.text(one.median),
            one.median,
            note="\n".join(notes),
            badge=BEST if encoding == self.best else "",
            strip=strip,
            shade=strip.median if self.column.higher_is_better else 1 - strip.median,
        )

    def table(self, baseline: str) -> Table:
        """One row per encoding, the best median first."""
        is_share = self.column.bounds == (0.0, 1.0)
        rows = []
        for encoding in [*self.ranking, *(label for label in self.task.encodings if label not in self.spreads)]:
            one, planned = self.spreads.get(encoding), len(self.task.seeds)
            name = Cell(encoding, badge=BEST if encoding == self.best else "")
            if one is None:
                rows.append([name, Cell(f"0 of {planned}", 0), *[Cell(MISSING)] * 6])
                continue
            count = Cell(f"{len(one.values)} of {planned}", len(one.values))
            values = Cell(", ".join(self.column.text(value) for value in one.values), one.median, strip=self.strip(one))
            middle = [self.column.cell(value) for value in (one.median, one.worst, one.mean)]
            interval = Cell(self.interval(one), one.low)
            rows.append([name, count, *middle, interval, self._difference(encoding, baseline, is_share), values])
        unit = " (points)" if is_share else ""
        better = "more" if self.column.higher_is_better else "less"
        headers = [
            "Encoding", "Seeds", "Median", "Worst", "Mean", "95 % interval of the mean",
            f"Difference to {baseline}{unit}, same seeds", "All seeds",
        ]  # fmt: skip
        return Table(f"{self.column.title}: {better} is better", headers, rows, [False] + [True] * 6 + [False])

    def _difference(self, encoding: str, baseline: str, is_share: bool) -> Cell:
        found = difference(self.by_seed[encoding], self.by_seed.get(baseline, {}))
        if found is None or encoding == baseline:
            return Cell("0" if encoding == baseline else MISSING, 0.0 if encoding == baseline else None)

        def signed(value: float) -> str:
            text = f"{100 * value:+.1f}" if is_share else f"{value:+.4g}"
            return text.replace("-", "\N{MINUS SIGN}")

        text = signed(found.mean)
        if found.low is None or found.high is None:
            return Cell(text, found.mean, note="one pair")
        note = f"{signed(found.low)} to {signed(found.high)}"
        return Cell(text, found.mean, note=note, badge="clear" if found.is_clear else "")

    def verdict(self) -> str:
        """What the intervals allow to say."""
        ranking = self.ranking
        if not ranking:
            return "no scores yet."
        first = self.spreads[ranking[0]]
        leaders = [encoding for encoding in ranking if self.spreads[encoding].median == first.median]
        has = "has" if len(leaders) == 1 else "share"
        leader = f"{_listed(leaders)} {has} the best median, {self.column.text(first.median)}"
        if len(ranking) == 1:
            return f"{ranking[0]} alone has scores, a median of {self.column.text(first.median)}."
        if self.best is not None:
            best = self.spreads[self.best]
            others = [encoding for encoding in ranking if encoding != self.best]
            return (
                f"{self.best} is clearly best: its interval, {self.interval(best)}, lies apart from all others; next "
                f"{others[0]}, {self.interval(self.spreads[others[0]])}."
            )
        if any(one.low is None for one in self.spreads.values()):
            return f"{leader}, but one seed proves nothing."
        if len(leaders) > 1:
            return f"none is clearly best. {leader}."
        return f"none is clearly best. {leader}, but its interval overlaps {_listed(self._overlapping(ranking[0]))}."

    def _overlapping(self, encoding: str) -> list[str]:
        """The other encodings whose intervals have a value in common with this one's."""
        ends = {label: (one.low, one.high) for label, one in self.spreads.items()}
        low, high = ends[encoding]
        found = []
        for other in self.ranking:
            other_low, other_high = ends[other]
            if other == encoding or low is None or high is None or other_low is None or other_high is None:
                continue
            if other_low <= high and low <= other_high:
                found.append(other)
        return found


def headlines(task: TaskRuns) -> tuple[Column | None, Column | None]:
    """The overview's scores, out of range and in range; for a task without either, its first score as the latter."""
    report = task_report(task.task)
    if report.in_range is None and report.out_of_range is None:
        return None, next(iter(report.columns(task.runs)), None)
    return report.out_of_range, report.in_range


def overview_tables(suite: SuiteResults) -> list[Table]:
    """Encodings by tasks: the scores out of range, then those in range; tables without a score are left out."""
    tables = []
    for index, caption in enumerate(("Out of range: longer or harder than trained", "In range: as trained")):
        shown = [Scores(task, column) for task in suite.tasks if (column := headlines(task)[index]) is not None]
        if not any(scores.spreads for scores in shown):
            continue
        rows = [[Cell(encoding), *(scores.overview_cell(encoding) for scores in shown)] for encoding in suite.encodings]
        headers = ["Encoding", *(_header(scores) for scores in shown)]
        tables.append(Table(caption, headers, rows, [False] + [True] * len(shown)))
    return tables


def overview_text(suite: SuiteResults) -> str:
    """The overview for a terminal: a row per task, score and encoding, the best median first."""
    rows = []
    for task in suite.tasks:
        for column in headlines(task):
            if column is None:
                continue
            scores = Scores(task, column)
            for encoding in scores.ranking:
                one = scores.spreads[encoding]
                cells = [task.label, column.title, encoding, f"{len(one.values)} of {len(task.seeds)}"]
                cells += [column.text(one.median), scores.interval(one), column.text(one.worst)]
                rows.append([Cell(text) for text in [*cells, BEST if encoding == scores.best else ""]])
    headers = ["Task", "Score", "Encoding", "Seeds", "Median", "95 % of the mean", "Worst", ""]
    table = Table("Overview", headers, rows, [False, False, False, True, True, True, True, False])
    done, planned = sum(len(task.finished) for task in suite.tasks), sum(task.planned for task in suite.tasks)
    failed = [f"{name} failed: {why}" for name, why in failures(suite).items()]
    return "\n".join([*([plain_text(table), ""] if rows else []), f"{done} of {planned} runs have finished", *failed])


def failures(suite: SuiteResults) -> dict[str, str]:
    """Why runs failed, by name."""
    return {task.run_name(*run): why for task in suite.tasks for run, why in task.failed.items()}


def _header(scores: Scores) -> str:
    if scores.column.higher_is_better:
        return scores.task.label
    return f"{scores.task.label}: {scores.column.title.lower()} (less is better)"


def _listed(labels: Sequence[str]) -> str:
    """The labels, or the first of many."""
    if len(labels) > MOST_NAMED + 1:
        return f"{', '.join(labels[:MOST_NAMED])} and {len(labels) - MOST_NAMED} more"
    return f"{', '.join(labels[:-1])} and {labels[-1]}" if len(labels) > 1 else "".join(labels) or "others"
