"""Runs a suite: some processes at a time, a line for each run that finishes, and the rest goes on when one fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tape_pe.files import sole_user, write_text
from tape_pe.results import RESULTS_FILE, Result, append_line, append_values
from tape_pe.signals import on_first_signal
from tape_pe.suite.plan import FAILURES_FILE, SUITE_FILE, PlannedRun, Suite, finished_results, run_result, suite_lines

_ERROR = re.compile(r"^tape: error: |\w(Error|Exception)\b")


@dataclass(frozen=True)
class Failure:
    """A run that failed.

    Attributes:
        name: `TASK/ENCODING/seed-N`.
        exit_code: of its process; negative where a signal ended it.
        message: the last line of its log that names an error.
    """

    name: str
    exit_code: int
    message: str


class SuiteInterruptedError(Exception):
    """The suite was asked to stop; its runs have saved their state, and the same command goes on."""


def run_suite(
    suite: Suite,
    runs: Sequence[PlannedRun],
    *,
    on_end: Callable[[Result | Failure], None] = lambda _: None,
) -> tuple[list[Result], list[Failure]]:
    """Trains and scores all runs that have not finished yet.

    SIGINT and SIGTERM stop it: runs in progress save a checkpoint, from which the next call goes on.

    Args:
        suite: the suite.
        runs: its runs, from `plan`.
        on_end: called in this thread with what came of each run, as they end.

    Returns:
        The results of all finished runs, in the order of `runs`, and the failures of this call.

    Raises:
        ValueError: the suite's folder has results of other options, or the launcher is no program; nothing has been
            started then.
        FileExistsError: another process runs a suite in that folder.
        SuiteInterruptedError: a signal stopped it.
    """
    launcher = next(iter(suite.launcher_words), sys.executable)
    if shutil.which(launcher) is None:
        raise ValueError(f"launcher={suite.launcher!r}: {launcher!r} is not a program that can be found")
    with sole_user(suite.folder):
        return _run_suite(suite, runs, on_end)


def _run_suite(
    suite: Suite, runs: Sequence[PlannedRun], on_end: Callable[[Result | Failure], None]
) -> tuple[list[Result], list[Failure]]:
    results = finished_results(suite, runs)
    write_text(suite.folder / SUITE_FILE, suite.to_yaml())
    lines = suite.folder / RESULTS_FILE
    written = suite_lines(suite)
    for name in (run.name for run in runs if run.name in results and run.name not in written):
        append_line(lines, results[name])
    (suite.folder / FAILURES_FILE).unlink(missing_ok=True)
    failures = []
    processes = _Processes(suite)
    with on_first_signal(processes.request_stop), ThreadPoolExecutor(suite.processes) as pool:
        waiting = [pool.submit(processes.run, run) for run in runs if run.name not in results]
        for future in as_completed(waiting):
            outcome = future.result()
            if isinstance(outcome, Result):
                results[outcome.name] = outcome
                append_line(lines, outcome)
            elif isinstance(outcome, Failure):
                failures.append(outcome)
                append_values(suite.folder / FAILURES_FILE, asdict(outcome))
            else:
                continue
            on_end(outcome)
    if processes.stopped:
        raise SuiteInterruptedError(f"stopped with {len(results)} of {len(runs)} runs finished")
    return [results[run.name] for run in runs if run.name in results], failures


class _Processes:
    """The processes of runs; `stop` lets those that run save their state, and starts no more."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.stopped = False
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def request_stop(self) -> None:
        """Stops, from a signal handler: its thread may hold the lock."""
        threading.Thread(target=self.stop).start()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.terminate()

    def run(self, run: PlannedRun) -> Result | Failure | None:
        """Trains and scores a run; `None` where it was stopped."""
        with self._lock:
            if self.stopped:
                return None
        config, log = (run.folder.with_name(run.folder.name + ending) for ending in (".yaml", ".log"))
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, run.options.to_yaml())
        start = self.suite.launcher_words or [sys.executable]
        command = [*start, "-m", "tape_pe.cli", "train", str(config), "--resume", "--evaluate"]
        threads = str(self.suite.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as output:
            with self._lock:
                if self.stopped:
                    return None
                # In a session of its own, so that Ctrl-C in a terminal reaches it once: through `stop`.
                process = subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, start_new_session=True
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        if code == 0 and (result := run_result(run)):
            return result
        reason = f"ended by signal {-code}; its log is {log}" if code < 0 else _reason(log)
        return None if self.stopped else Failure(run.name, code, reason)


def _reason(log: Path) -> str:
    """The last line that names an error, but for a launcher's that a process has failed; without one, the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and "ChildFailedError" not in line]
    return (errors or lines or [""])[-1]
