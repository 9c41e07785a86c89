"""`tape suite`: encodings x tasks x seeds from one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import Command, UsageError, comma_separated, refusing

if TYPE_CHECKING:
    from tape_pe.results import Result
    from tape_pe.suite import Failure, PlannedRun, Suite


def _arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("suite", type=str, help="The suite's YAML file, or the folder of a suite to go on with.")
    parser.add_argument("--output_dir", type=str, help="The suite's folder; default: the file's, or runs/NAME.")
    parser.add_argument("--seeds", type=comma_separated(int), help="Run these of its seeds only, such as 0,1.")
    parser.add_argument("--processes", type=int, help="Runs at a time; default: the file's.")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="Show the plan and the estimated time.")


def _suite(namespace: Namespace) -> int:
    from tape_pe.report import write_site
    from tape_pe.suite import SuiteInterruptedError, finished_results, load_suite, plan, run_suite

    path = Path(namespace.suite)
    folder = namespace.output_dir or (str(path) if path.is_dir() else None)
    suite = refusing(load_suite, path, output_dir=folder, processes=namespace.processes)
    runs = _chosen(refusing(plan, suite), suite, namespace.seeds)
    finished = refusing(finished_results, suite, runs)
    if namespace.dry_run:
        _show_plan(suite, runs, finished)
        return 0
    print(f"{len(runs)} runs, {len(finished)} of them finished; {suite.processes} at a time, in {suite.folder}")
    try:
        _, failures = refusing(run_suite, suite, runs, on_end=_Progress(len(runs) - len(finished)))
    except SuiteInterruptedError as interruption:
        print(
            f"\nInterrupted: {interruption}\nGo on with: tape suite {namespace.suite}\n"
            f"See what has finished: tape report {suite.folder}",
            file=sys.stderr,
        )
        return 130
    site = refusing(write_site, suite.folder)
    print(f"Results: {suite.folder / 'results.jsonl'}\nSite: {site}")
    return 1 if failures else 0


def _chosen(runs: Sequence[PlannedRun], suite: Suite, seeds: list[int] | None) -> list[PlannedRun]:
    for seed in seeds or ():
        if seed not in suite.seeds:
            raise UsageError(f"seeds={seed}: the suite has {', '.join(map(str, suite.seeds))}")
    return [run for run in runs if seeds is None or run.options.training["seed"] in seeds]


class _Progress:
    """Prints a line for each run that ends."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, outcome: Result | Failure) -> None:
        from tape_pe.results import Result

        self.done += 1
        if isinstance(outcome, Result):
            name, value = next((key, value) for key, value in outcome.metrics.items() if isinstance(value, float))
            seconds = outcome.train_seconds + outcome.eval_seconds
            text = f"{outcome.name}: {name} {value:.4g} ({seconds:.0f} s)"
        else:
            text = f"{outcome.name}: FAILED with exit code {outcome.exit_code}: {outcome.message}"
        print(f"[{self.done}/{self.total}] {text}", flush=True)


def _show_plan(suite: Suite, runs: Sequence[PlannedRun], finished: dict[str, Result]) -> None:
    from tape_pe.report.parts import Cell, Table, duration
    from tape_pe.report.tables import plain_text
    from tape_pe.suite.estimate import estimate_seconds

    seconds = refusing(estimate_seconds, suite, runs, finished)
    rows = []
    for run in runs:
        steps = run.options.training["max_steps"]
        time = "finished" if run.name in finished else duration(seconds[run.name])
        rows.append([Cell(run.name), Cell(f"{run.parameters:,}"), Cell(f"{steps:,}"), Cell(time)])
    print(plain_text(Table("Plan", ["Run", "Parameters", "Steps", "Time"], rows, [False, True, True, True])))
    total = max(sum(seconds.values()) / suite.processes, max(seconds.values(), default=0.0))
    print(
        f"\n{len(runs)} runs, {len(finished)} finished; about {duration(total)} with {suite.processes} at a time "
        f"({'from FLOPs' if suite.flops_per_second else 'measured'}; without the start of each process and scoring, "
        "which are known where a like run has finished)"
    )


COMMANDS = {"suite": Command("Run encodings x tasks x seeds: tape suite SUITE.yaml [options].", _arguments, _suite)}
