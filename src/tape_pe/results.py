"""Result lines: one JSON object per finished evaluation. Tables and pictures are made from these alone."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tape_pe.files import write_text

RESULTS_FILE = "results.jsonl"

RecordType = TypeVar("RecordType", "Result", "Measurement", "Cost")


@dataclass(frozen=True)
class Result:
    """What one run did and scored.

    Attributes:
        name: name of the run (its folder's name).
        task: registered name of the task, for example `"addition"`.
        config: the whole resolved configuration (`model`, `task`, `training`, ...), as plain JSON values.
        seed: seed of the initial weights and of the training data.
        git_revision: revision of the working tree, `+dirty` appended where files differ from it; `None` outside git.
        versions: versions of Python, torch, transformers and tape-pe.
        parameters: number of trainable parameters.
        steps: optimizer steps taken.
        tokens: non-padding tokens read in training.
        train_seconds: wall time of training, in seconds, resumed parts added up.
        eval_seconds: wall time of the evaluation, in seconds.
        loss_curve: `[step, training loss]` pairs in order of steps.
        metrics: the task's scores; for addition see `tape_pe.tasks.addition`.
    """

    name: str
    task: str
    config: dict[str, Any]
    seed: int
    git_revision: str | None
    versions: dict[str, str]
    parameters: int
    steps: int
    tokens: int
    train_seconds: float
    eval_seconds: float
    loss_curve: list[list[float]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def encoding(self) -> str:
        """Name of the positional encoding."""
        return str(self.config["model"]["encoding"])


@dataclass(frozen=True)
class Measurement:
    """What a language model scored, wherever it was trained.

    Attributes:
        task: what was measured, `"perplexity"` or `"passkey"`.
        model: the model's folder or hub name.
        settings: all that the scores depend on beside the model's name, as plain JSON values; two measurements that
            agree in them measure the same.
        git_revision: as in `Result`.
        versions: as in `Result`.
        parameters: number of parameters.
        seconds: wall time, in seconds.
        metrics: the scores.
    """

    task: str
    model: str
    settings: dict[str, Any]
    git_revision: str | None
    versions: dict[str, str]
    parameters: int
    seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What something costs, as `tape bench` measures it.

    Attributes:
        kind: `"time"`, `"count"`, `"saved"`, `"cache"`, `"memory"` or `"target"`.
        name: what was measured: an encoding on a backend, or a target.
        settings: all that the figures depend on beside the machine, as plain JSON values.
        git_revision: as in `Result`.
        versions: as in `Result`.
        machine: `device`, its `name`, and the `cores` of the CPU.
        metrics: the figures.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    git_revision: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)


def append_result(run: Path, result: Result) -> Path:
    """Appends `result` as one line to the run folder's results file and returns the file's path."""
    return append_line(run / RESULTS_FILE, result)


def append_line(path: Path, record: Result | Measurement | Cost) -> Path:
    """Appends `record` as one line to a file, which need not exist, and returns the path."""
    return append_values(path, asdict(record))


def append_values(path: Path, values: dict[str, Any]) -> Path:
    """Appends JSON values as one line to a file, which need not exist, and returns the path."""
    write_text(path, whole_lines(path) + json.dumps(values, allow_nan=False) + "\n")
    return path


def whole_lines(path: Path) -> str:
    """The text of a file, which need not exist, without a last line that an interruption cut off."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1]


def read_results(run: Path) -> list[Result]:
    """Reads all result lines of a run folder, oldest first.

    Raises:
        FileNotFoundError: `run` has no results file (it was never evaluated).
        ValueError: a line is not a result; the message names the file and the line.
    """
    path = run / RESULTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: evaluate the run first, with `tape evaluate {run}`")
    return read_lines(path, Result)


def read_measurements(path: Path) -> list[Measurement]:
    """Reads all lines of a file of measurements, oldest first; none where there is no file, or from a torn last line.

    Raises:
        ValueError: a line is not a measurement; the message names the file and the line.
    """
    return read_lines(path, Measurement, torn_end=True) if path.is_file() else []


def read_costs(path: Path) -> list[Cost]:
    """Reads all lines of a file of costs, oldest first.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a line is not a cost; the message names the file and the line.
    """
    return read_lines(path, Cost)


def read_lines(path: Path, kind: type[RecordType], torn_end: bool = False) -> list[RecordType]:
    """Reads all lines of a file, oldest first.

    Args:
        path: the file.
        kind: what its lines are.
        torn_end: whether a last line that an interruption cut off is left out, and is no error.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: a line is something else; the message names the file and the line.
    """
    known = {f.name for f in fields(kind)}
    text = whole_lines(path) if torn_end else path.read_text(encoding="utf-8")
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            unknown = sorted(set(values) - known)
            if unknown:
                raise TypeError(f"unknown fields {unknown}")
            records.append(kind(**values))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a {kind.__name__.lower()} line ({error})") from error
    return records


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    import torch
    import transformers

    from tape_pe import __version__

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tape-pe": __version__,
    }


def git_revision() -> str | None:
    """Revision of the checkout that holds this package, with `+dirty` for local changes; `None` outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return revision + "+dirty" if git("status", "--porcelain", "--untracked-files=no") else revision
    except (OSError, subprocess.CalledProcessError):
        return None
