"""What a suite planned and what became of it, read from three files in its folder and never from run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tape_pe.report.parts import Run
from tape_pe.results import RESULTS_FILE, Result, read_lines, whole_lines
from tape_pe.suite.plan import FAILURES_FILE, SUITE_FILE, load_suite


@dataclass(frozen=True)
class TaskRuns:
    """One task of a suite.

    Attributes:
        label: its label in the suite.
        task: registered name of the task; several labels may share one.
        encodings: labels of the encodings that it runs with.
        seeds: the planned seeds.
        finished: by encoding and seed, the runs that have a result line.
        failed: by encoding and seed, why a run failed that has none.
    """

    label: str
    task: str
    encodings: Sequence[str]
    seeds: Sequence[int]
    finished: Mapping[tuple[str, int], Run]
    failed: Mapping[tuple[str, int], str]

    @property
    def planned(self) -> int:
        """Number of planned runs."""
        return len(self.encodings) * len(self.seeds)

    @property
    def runs(self) -> list[Run]:
        """All finished runs, in the order of encodings, then of seeds."""
        return [run for encoding in self.encodings for run in self.runs_of(encoding)]

    def runs_of(self, encoding: str) -> list[Run]:
        """The finished runs of one encoding, in the order of seeds."""
        return [self.finished[encoding, seed] for seed in self.seeds if (encoding, seed) in self.finished]

    def failed_of(self, encoding: str) -> int:
        """Number of failed runs of one encoding."""
        return sum((encoding, seed) in self.failed for seed in self.seeds)

    def run_name(self, encoding: str, seed: int) -> str:
        """The name of a planned run."""
        return f"{self.label}/{encoding}/seed-{seed}"


@dataclass(frozen=True)
class SuiteResults:
    """A whole suite.

    Attributes:
        name: its name.
        encodings: labels of all encodings.
        tasks: its tasks, in order.
        unplanned: names of result lines that the plan does not have.
    """

    name: str
    encodings: Sequence[str]
    tasks: Sequence[TaskRuns]
    unplanned: Sequence[str]

    @property
    def baseline(self) -> str:
        """The encoding that others are compared to: `rope`, or the first one."""
        return "rope" if "rope" in self.encodings else self.encodings[0]


def read_suite(folder: Path) -> SuiteResults:
    """Reads a suite's folder, finished or not; of several result lines of a run the latest counts.

    Raises:
        FileNotFoundError: `folder` has no `suite.yaml`.
        ValueError: a file does not hold what it should; the message names it.
    """
    if not (folder / SUITE_FILE).is_file():
        raise FileNotFoundError(f"{folder} is not a suite's folder: it has no {SUITE_FILE}")
    suite = load_suite(folder)
    seeds = suite.seeds
    registered = {label: str(entry.task.get("name", label)) for label, entry in suite.tasks.items()}
    chosen = {label: list(entry.encodings or suite.encodings) for label, entry in suite.tasks.items()}
    path = folder / RESULTS_FILE
    results = read_lines(path, Result, torn_end=True) if path.is_file() else []
    latest = {result.name: result for result in results}
    lines = {name: sum(result.name == name for result in results) for name in latest}
    failures = _read_failures(folder / FAILURES_FILE)
    found = []
    for label in registered:
        finished, failed = {}, {}
        for encoding in chosen[label]:
            for seed in seeds:
                run = f"{label}/{encoding}/seed-{seed}"
                if run in latest:
                    finished[encoding, seed] = Run(run, latest.pop(run), lines[run])
                elif run in failures:
                    failed[encoding, seed] = failures[run]
        found.append(TaskRuns(label, registered[label], chosen[label], seeds, finished, failed))
    return SuiteResults(suite.name, list(suite.encodings), found, list(latest))


def _read_failures(path: Path) -> dict[str, str]:
    """Why runs failed, by name."""
    found = {}
    for number, line in enumerate(whole_lines(path).splitlines(), start=1):
        try:
            values = json.loads(line)
            message = str(values.get("message") or "no message")
            found[str(values["name"])] = f"{message} (exit code {values.get('exit_code')})"
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a failure line ({error!r})") from error
    return found
