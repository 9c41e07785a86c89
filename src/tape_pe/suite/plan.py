"""What a suite runs: its file, the runs that follow from it, and which of them have finished."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from tape_pe.encodings.base import check_option_types
from tape_pe.files import read_yaml
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.options import ModelOptions, RunOptions
from tape_pe.results import RESULTS_FILE, Result, read_lines
from tape_pe.tasks import make_task
from tape_pe.train import FREE_ON_RESUME, build_config, check_run, check_same_run

SUITE_FILE, FAILURES_FILE, SITE_FOLDER = "suite.yaml", "failures.jsonl", "site"
TAKEN_NAMES = frozenset({SUITE_FILE, FAILURES_FILE, SITE_FOLDER, RESULTS_FILE})
"""What else stands in a suite's folder, beside the folders of its tasks."""


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Args:
        task: `name`, one of the registered tasks, and its options.
        model: options of the model for this task, over those of the suite.
        training: options of training for this task, over those of the suite.
        encodings: labels of the encodings that this task runs with; default: all.
        overrides: by label of an encoding, options of its model for this task, over all others.
    """

    task: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    encodings: Sequence[str] | None = None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """What a suite runs.

    Args:
        name: name of the suite.
        encodings: by label, what sets a model apart: `encoding`, `encoding_options` or any other option of the model.
            The label of an entry without `encoding` is the encoding's name.
        tasks: by label.
        seeds: seeds of initial weights and of data; runs with the same seed of a task see the same samples in the same
            order.
        model: options that all models share.
        training: options of training that all runs share.
        match_parameters: label of the encoding whose number of parameters all others are given, as nearly as one
            `intermediate_size` allows; by default nothing is adjusted.
        output_dir: the suite's folder; default: `runs/NAME`.
        processes: runs at a time.
        threads: CPU threads of each process.
        launcher: what starts a run in place of Python, such as `accelerate launch --config_file FILE`.
        flops_per_second: what each device of the machine that the suite is meant for does, for an estimate of its time
            where that cannot be measured here.
    """

    name: str
    encodings: dict[str, dict[str, Any]]
    tasks: dict[str, SuiteTask]
    seeds: Sequence[int] = (0, 1, 2)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    match_parameters: str | None = None
    output_dir: str | None = None
    processes: int = 2
    threads: int = 1
    launcher: str | None = None
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        check_option_types(Suite, {f.name: getattr(self, f.name) for f in fields(Suite)}, "")
        for name in ("processes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: an integer of at least 1 is needed")
        if not _are_distinct(self.seeds, int):
            raise ValueError(f"seeds={self.seeds!r}: different integers, one or more, are needed")
        try:
            _ = self.launcher_words
        except ValueError as error:
            raise ValueError(f"launcher={self.launcher!r}: not the beginning of a command ({error})") from error
        for name in ("encodings", "tasks"):
            labels = getattr(self, name)
            if not labels:
                raise ValueError(f"{name}={labels!r}: at least one is needed")
            for label in labels:
                if not isinstance(label, str) or not 0 < len(label) <= 100 or set(label) & set("/\\ \t\n"):
                    raise ValueError(f"{name}={label!r}: a label is a folder's name, without spaces or slashes")
                if label.startswith(".") or label in TAKEN_NAMES:
                    raise ValueError(f"{name}={label!r}: another label is needed; the suite's folder has such a name")
        for label, task in self.tasks.items():
            if task.encodings is not None and not _are_distinct(task.encodings, str):
                raise ValueError(
                    f"tasks.{label}.encodings={task.encodings!r}: different labels, one or more, are needed"
                )
            for name, named in (("encodings", task.encodings or ()), ("overrides", task.overrides)):
                for encoding in named:
                    if encoding not in self.encodings:
                        raise ValueError(f"tasks.{label}.{name}={encoding!r}: one of {list(self.encodings)} is needed")
        if self.match_parameters is not None and self.match_parameters not in self.encodings:
            raise ValueError(
                f"match_parameters={self.match_parameters!r}: one of {list(self.encodings)} is needed, or nothing"
            )
        if self.flops_per_second is not None and not self.flops_per_second > 0:
            raise ValueError(f"flops_per_second={self.flops_per_second!r}: a positive number is needed")

    @property
    def folder(self) -> Path:
        """The suite's folder."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def launcher_words(self) -> list[str]:
        """`launcher` as words of a command line."""
        return shlex.split(self.launcher or "")

    def to_yaml(self) -> str:
        """The suite as YAML that `load_suite` reads."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite.

    Attributes:
        name: `TASK/ENCODING/seed-N`.
        options: the run's options; its folder is `name` in the suite's folder.
        parameters: number of the model's parameters.
    """

    name: str
    options: RunOptions
    parameters: int

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.options.output_dir)


def _are_distinct(values: Any, kind: type) -> bool:
    """Whether a list holds values of this kind alone, each once, and at least one."""
    is_list = isinstance(values, (list, tuple)) and all(type(value) is kind for value in values)
    return is_list and 0 < len(values) == len(set(values))


def load_suite(path: Path, **changes: Any) -> Suite:
    """Reads a suite's YAML file.

    Args:
        path: the file, or the folder of a suite that was begun.
        changes: values in place of the file's; `None` stands for the file's own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a suite's; the message names the key.
    """
    if path.is_dir():
        path = path / SUITE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; a suite is a YAML file, or the folder of one that was begun")
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no suite: keys such as encodings and tasks are needed")
    values = {"name": path.stem, **values, **{key: value for key, value in changes.items() if value is not None}}
    try:
        _check_keys(Suite, values, "")
        encodings = values["encodings"]
        if isinstance(encodings, list):
            if not _are_distinct(encodings, str):
                raise ValueError(f"encodings={encodings!r}: different labels, or a mapping from them, are needed")
            encodings = dict.fromkeys(encodings)
        values["encodings"] = {
            label: _mapping(options, f"encodings.{label}")
            for label, options in _mapping(encodings, "encodings").items()
        }
        tasks = {}
        for label, entry in _mapping(values["tasks"], "tasks").items():
            _check_keys(SuiteTask, _mapping(entry, f"tasks.{label}"), f"tasks.{label}.")
            tasks[label] = SuiteTask(**entry)
        return Suite(**{**values, "tasks": tasks})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def plan(suite: Suite) -> list[PlannedRun]:
    """All runs in order: all tasks and encodings with the first seed, then with the next.

    Raises:
        ValueError, FileExistsError: a run that cannot work; the message names it.
    """
    runs = []
    tasks = {label: _task(label, entry) for label, entry in suite.tasks.items()}
    models: dict[tuple[str, str], tuple[ModelOptions, int]] = {}
    checked: set[str] = set()
    for seed in suite.seeds:
        for label, entry in suite.tasks.items():
            for encoding in entry.encodings or suite.encodings:
                name = f"{label}/{encoding}/seed-{seed}"
                try:
                    if (label, encoding) not in models:
                        models[label, encoding] = _matched(suite, entry, tasks[label][1], encoding)
                    model, parameters = models[label, encoding]
                    training = {**suite.training, **entry.training, "seed": seed}
                    training = {"report_to": "none", "disable_tqdm": True, **training}
                    options = RunOptions(str(suite.folder / name), model, *tasks[label], training)
                    if seed == suite.seeds[0] or Path(options.output_dir).exists():
                        elsewhere = suite.launcher is not None
                        check_run(options, resume=True, elsewhere=elsewhere, check_task=label not in checked)
                        checked.add(label)
                except (ValueError, OSError) as error:
                    kind = FileExistsError if isinstance(error, FileExistsError) else ValueError
                    raise kind(f"{name}: {error}") from error
                runs.append(PlannedRun(name, options, parameters))
    return runs


def finished_results(suite: Suite, runs: Sequence[PlannedRun]) -> dict[str, Result]:
    """The results of those runs that have finished, by name: of the suite's result lines and of its run folders.

    Raises:
        ValueError: a line that cannot be read, or of a run with other options than planned.
    """
    lines = suite_lines(suite)
    found = {}
    for run in runs:
        result = lines.get(run.name) or run_result(run)
        if result is not None:
            sections = {key: result.config[key] for key in ("model", "task", "training")}
            try:
                before = RunOptions.from_sections({**sections, "output_dir": str(run.folder)})
                check_same_run(before, run.options, free=FREE_ON_RESUME - {"max_steps"})
            except ValueError as error:
                raise ValueError(f"{run.name}: {error}; choose another output_dir for a changed suite") from error
            found[run.name] = result
    return found


def run_result(run: PlannedRun) -> Result | None:
    """The latest result in the run's folder, under the run's name in the suite, if its training has finished and it was
    evaluated as planned."""
    path = run.folder / RESULTS_FILE
    lines = read_lines(path, Result, torn_end=True) if path.is_file() else []
    task = json.loads(json.dumps(run.options.sections()["task"]))  # as lines have it
    evaluation = {name: task[name] for name in run.options.task.evaluation_options}.items()
    steps = run.options.training["max_steps"]
    found = [line for line in lines if line.steps >= steps and evaluation <= line.config["evaluation"].items()]
    return replace(found[-1], name=run.name) if found else None


def suite_lines(suite: Suite) -> dict[str, Result]:
    """The suite's result lines by name; none before its first run has finished."""
    path = suite.folder / RESULTS_FILE
    return {line.name: line for line in read_lines(path, Result, torn_end=True)} if path.is_file() else {}


def _check_keys(kind: type, values: Mapping[str, Any], prefix: str) -> None:
    known = [f.name for f in fields(kind)]
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]} is not a key; the keys are {', '.join(known)}")
    for name in ("encodings", "tasks") if kind is Suite else ("task",):
        if name not in values:
            raise ValueError(f"{prefix}{name} is missing")
    for name in ("model", "training", "task"):
        if name in values:
            _mapping(values[name], prefix + name)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r}: keys and values are needed")
    return value


def _task(label: str, entry: SuiteTask) -> tuple[str, Any]:
    options = dict(entry.task)
    name = options.pop("name", label)
    try:
        return name, make_task(name, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"tasks.{label}: {error}") from error


def _model(suite: Suite, entry: SuiteTask, label: str) -> ModelOptions:
    own = dict(suite.encodings[label])
    own.setdefault("encoding", label)
    return ModelOptions.from_section({**suite.model, **entry.model, **own, **entry.overrides.get(label, {})})


def _matched(suite: Suite, entry: SuiteTask, task: Any, label: str) -> tuple[ModelOptions, int]:
    """The model's options, its MLP's width adjusted to `match_parameters`, and its number of parameters."""
    tokenizer = task.tokenizer()
    options = _model(suite, entry, label)
    count = _parameters(build_config(options, tokenizer))
    if suite.match_parameters is None:
        return options, count
    target = _parameters(build_config(_model(suite, entry, suite.match_parameters), tokenizer))
    wider = replace(options, intermediate_size=options.intermediate_size + 1)
    by_one = _parameters(build_config(wider, tokenizer)) - count
    width = options.intermediate_size + round((target - count) / by_one)
    if width < 1:
        raise ValueError(
            f"match_parameters={suite.match_parameters!r}: {label} has {count - target} parameters more, "
            f"which an MLP of width {options.intermediate_size} cannot make up for"
        )
    return replace(options, intermediate_size=width), count + (width - options.intermediate_size) * by_one


def _parameters(config: TapeLMConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in TapeLMForCausalLM(config).parameters())
