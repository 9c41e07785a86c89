"""Commands for the package's own decoder: `tape train`, `evaluate`, `report`, `import-official`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import Command, UsageError, quiet_loading, refusing

# --- train ---------------------------------------------------------------------------------------------------------


def _train_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from transformers import TrainingArguments

    from tape_pe.options import HIDDEN_TRAINING_FIELDS, ModelOptions
    from tape_pe.tasks import TASKS

    task = _task_name(arguments)
    if task not in TASKS:
        raise UsageError(f"task.name is {task!r}; it must be one of {sorted(TASKS)}")
    parser.add_argument("--config", action="config", help="YAML file of options; `tape train FILE` is the short form.")
    parser.add_argument("--output_dir", type=str, help="The run folder; default: runs/NAME for NAME.yaml.")
    parser.add_argument("--resume", action="store_true", help="Go on from the run folder's last checkpoint.")
    parser.add_argument("--checkpoint", type=str, help="With --resume: go on from this checkpoint folder instead.")
    parser.add_argument("--overwrite", action="store_true", help="Delete an earlier run in the same folder first.")
    parser.add_argument("--evaluate", action="store_true", help="Score the run as well, as `tape evaluate` does.")
    parser.add_class_arguments(ModelOptions, "model")
    parser.add_class_arguments(TASKS[task], "task")
    parser.add_argument("--task.name", type=str, default=task, help=f"One of {', '.join(sorted(TASKS))}.")
    parser.add_class_arguments(TrainingArguments, "training", skip=set(HIDDEN_TRAINING_FIELDS))


def _task_name(arguments: list[str]) -> str:
    """The task decides which options there are, so it is looked up before they are parsed."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--task.name"):
            return argument.partition("=")[2] or next(iter(arguments[index + 1 :]), "")
    path = _config_file(arguments)
    task = _read_yaml(path).get("task") if path else None
    return str(task.get("name", "addition")) if isinstance(task, dict) else "addition"


def _config_file(arguments: list[str]) -> Path | None:
    """The file behind `--config`."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config"):
            return Path(argument.partition("=")[2] or next(iter(arguments[index + 1 :]), ""))
    return None


def _read_yaml(path: Path) -> dict[str, Any]:
    from tape_pe.files import read_yaml

    if not path.is_file():
        raise UsageError(f"{path} is not a file; the configuration must be a YAML file or a run folder")
    values = refusing(read_yaml, path)
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold options; it must hold the sections model, task and training")
    return values


def expand_config(arguments: list[str]) -> list[str]:
    """Turns `CONFIG.yaml ...` and `RUN ...` into the flags that they stand for."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    path, rest = Path(arguments[0]), arguments[1:]
    if path.is_dir():
        from tape_pe.options import CONFIG_FILE

        return ["--config", str(path / CONFIG_FILE), "--output_dir", str(path), *rest]
    default = [] if _read_yaml(path).get("output_dir") else ["--output_dir", str(Path("runs") / path.stem)]
    return ["--config", str(path), *default, *rest]


def _train(namespace: Namespace) -> int:
    from accelerate import PartialState

    from tape_pe.options import RunOptions
    from tape_pe.train import TrainingInterruptedError, check_run, train

    values = namespace.as_dict()
    sections = {name: values[name] for name in ("output_dir", "model", "task", "training")}
    options = refusing(RunOptions.from_sections, sections)
    if namespace.checkpoint and not namespace.resume:
        raise UsageError(f"checkpoint is {namespace.checkpoint}; it needs --resume")
    how = {"resume": namespace.checkpoint or namespace.resume, "overwrite": namespace.overwrite}
    refusing(check_run, options, **how)
    quiet_loading()
    try:
        run = refusing(train, options, **how)
    except TrainingInterruptedError as interruption:
        print(f"\nInterrupted: {interruption}\nGo on with: tape train {options.output_dir} --resume", file=sys.stderr)
        return 130
    print(f"Trained: {run}")
    if not namespace.evaluate:
        print(f"Next: tape evaluate {run}")
    elif PartialState().is_main_process:
        _score(run)
    return 0


# --- evaluate, report ----------------------------------------------------------------------------------------------


def _evaluate_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from tape_pe.options import load_options

    parser.add_argument("run", type=str, help="The run folder.")
    parser.add_argument("--batch_size", type=int, default=256, help="Prompts decoded together.")
    parser.add_argument("--device", type=str, help="Where to run, such as cpu or cuda; default: the GPU if any.")
    words = [argument for argument in arguments if not argument.startswith("-")]
    run = next((word for word in words if Path(word).is_dir()), next(iter(arguments), "-"))
    if not run.startswith("-"):
        task = refusing(load_options, Path(run)).task
        hidden = {f.name for f in fields(task)} - set(task.evaluation_options)
        parser.add_class_arguments(type(task), "task", skip=hidden)
        parser.set_defaults({f"task.{name}": getattr(task, name) for name in task.evaluation_options})


def _evaluate(namespace: Namespace) -> int:
    from tape_pe.evaluate import check_evaluation

    run = Path(namespace.run)
    task_options = namespace.task.as_dict() if "task" in namespace else {}
    how = {"task_options": task_options, "batch_size": namespace.batch_size, "device": namespace.device}
    refusing(check_evaluation, run, **how)
    quiet_loading()
    _score(run, **how)
    return 0


def _score(run: Path, **how: Any) -> None:
    from tape_pe.evaluate import evaluate

    result = refusing(evaluate, run, **how)
    for name, value in result.metrics.items():
        if not isinstance(value, (list, dict)):
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    print(f"Evaluated in {result.eval_seconds:.1f} s; appended to {run / 'results.jsonl'}")


def _report_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="Run folders that have been evaluated, or a suite's folder.")
    parser.add_argument(
        "--output", type=str, help="The file to write, or a suite's folder of pages; default: report.html, SUITE/site."
    )


def _report(namespace: Namespace) -> int:
    from tape_pe.report import overview_text, read_suite, summary_table, write_report, write_site
    from tape_pe.report.suite_results import SUITE_FILE
    from tape_pe.results import read_results

    runs = [Path(run) for run in namespace.runs]
    suites = [run for run in runs if (run / SUITE_FILE).is_file()]
    if suites:
        if len(runs) > 1:
            raise UsageError(f"{suites[0]} is the folder of a suite, which has a site of its own; name it alone")
        page = refusing(write_site, suites[0], output=namespace.output)
        print(f"{overview_text(read_suite(suites[0]))}\n\n{page}")
        return 0
    page = refusing(write_report, runs, Path(namespace.output or "report.html"))
    print(summary_table([read_results(run)[-1] for run in runs]))
    print(f"\n{page}")
    return 0


# --- import-official -----------------------------------------------------------------------------------------------


def _import_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("checkpoint_dir", type=str, help="Folder of a released checkpoint.")
    parser.add_argument("out_dir", type=str, help="Folder to write the model to.")


def _import_official(namespace: Namespace) -> int:
    from tape_pe.models.official import import_official

    refusing(import_official, Path(namespace.checkpoint_dir), Path(namespace.out_dir))
    print(namespace.out_dir)
    return 0


COMMANDS = {
    "train": Command("Train a model: tape train CONFIG.yaml [options].", _train_arguments, _train),
    "evaluate": Command("Score a finished run: tape evaluate RUN [options].", _evaluate_arguments, _evaluate),
    "report": Command("Write a report of evaluated runs.", _report_arguments, _report),
    "import-official": Command("Convert a released checkpoint.", _import_arguments, _import_official),
}
