"""Suites: every task with every encoding and every seed, on equal terms, each run in a process of its own.

A suite's folder holds `suite.yaml`, `results.jsonl` with one line per finished run, `failures.jsonl` where the last
attempt had any, and `TASK/ENCODING/seed-N`, the run folders, each with its configuration and its log beside it.
"""

from tape_pe.suite.plan import PlannedRun, Suite, SuiteTask, finished_results, load_suite, plan
from tape_pe.suite.run import Failure, SuiteInterruptedError, run_suite

__all__ = [
    "Failure",
    "PlannedRun",
    "Suite",
    "SuiteInterruptedError",
    "SuiteTask",
    "finished_results",
    "load_suite",
    "plan",
    "run_suite",
]
