"""The `tape` command. Options are those of the dataclasses in `tape_pe.options` and `tape_pe.tasks`.

Exit codes: 0 done, 1 the work failed, 2 the input was refused (before any work), 130 interrupted.
What only some commands need is imported inside them; torch and transformers come with the package in any case.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from tape_pe import __version__, cli_finetune, cli_language
from tape_pe.cli_parts import Command, UsageError, quiet_loading, refusing

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


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
    import yaml

    if not path.is_file():
        raise UsageError(f"{path} is not a file; the configuration must be a YAML file or a run folder")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold options; it must hold the sections model, task and training")
    return values


def _expand_config(arguments: list[str]) -> list[str]:
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
    print(f"Trained: {run}\nNext: tape evaluate {run}")
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
    from tape_pe.evaluate import check_evaluation, evaluate

    run = Path(namespace.run)
    task_options = namespace.task.as_dict() if "task" in namespace else {}
    how = {"task_options": task_options, "batch_size": namespace.batch_size, "device": namespace.device}
    refusing(check_evaluation, run, **how)
    quiet_loading()
    result = refusing(evaluate, run, **how)
    for name, value in result.metrics.items():
        if not isinstance(value, (list, dict)):
            print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    print(f"Evaluated in {result.eval_seconds:.1f} s; appended to {run / 'results.jsonl'}")
    return 0


def _report_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="Run folders that have been evaluated.")
    parser.add_argument("--output", type=str, default="report.html", help="The file to write.")


def _report(namespace: Namespace) -> int:
    from tape_pe.report import summary_table, write_report
    from tape_pe.results import read_results

    runs = [Path(run) for run in namespace.runs]
    page = refusing(write_report, runs, Path(namespace.output))
    print(summary_table([read_results(run)[-1] for run in runs]))
    print(f"\n{page}")
    return 0


# --- encodings -----------------------------------------------------------------------------------------------------


def _encodings_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("names", type=str, nargs="*", help="Encodings to explain in full; default: a table of all.")
    parser.add_argument("--json", action="store_true", help="Print the facts as JSON.")
    parser.add_argument("--encoding_options", type=dict[str, Any], help="Options of the one encoding that is named.")
    parser.add_argument("--picture", type=str, help="Write a page of position patterns to this HTML file instead.")
    parser.add_argument("--length", type=int, help="Positions to draw; default: 64.")
    parser.add_argument("--model", type=str, help="Draw the layers of this run or model folder.")
    parser.add_argument("--text", type=str, help="What the model reads; default: random tokens.")


def _encodings(namespace: Namespace) -> int:
    from tape_pe.catalogue import describe, facts_as_json
    from tape_pe.encodings import get_encoding

    names, options = list(dict.fromkeys(namespace.names)), namespace.encoding_options
    for name in names:
        refusing(get_encoding, name)
    for option, needed in (("length", "picture"), ("model", "picture"), ("text", "model")):
        if namespace[option] is not None and namespace[needed] is None:
            raise UsageError(f"{option} is {namespace[option]!r}; it needs --{needed}")
    if options and len(names) != 1:
        raise UsageError(f"encoding_options is {options}; it needs the name of one encoding, there are {len(names)}")
    if namespace.picture:
        if namespace.json:
            raise UsageError("json and picture are both set; at most one can be")
        return _picture(namespace, names)
    print(refusing(facts_as_json if namespace.json else describe, names, options))
    return 0


def _picture(namespace: Namespace, names: list[str]) -> int:
    from tape_pe.report.pattern_page import write_encoding_patterns, write_run_patterns

    output, length = Path(namespace.picture), 64 if namespace.length is None else namespace.length
    if namespace.model is None:
        page = refusing(write_encoding_patterns, output, names, namespace.encoding_options, length)
        for name, reason in page.left_out.items():
            print(f"left out {name}: {reason}")
        print(page.path)
        return 0
    if names:
        raise UsageError(f"model is {namespace.model!r}; it has an encoding of its own, {names[0]} cannot be named")
    if namespace.text is not None and namespace.length is not None:
        raise UsageError(f"text and length are both set; the text has a length of its own, not {length}")
    quiet_loading()
    print(refusing(write_run_patterns, output, Path(namespace.model), namespace.text, length))
    return 0


# --- info, import-official -----------------------------------------------------------------------------------------


def _no_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    pass


def _info(namespace: Namespace) -> int:
    import torch

    from tape_pe.ops.backends import describe_backends, describe_bias_cost
    from tape_pe.results import library_versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = refusing(describe_backends, device)
    for name, version in library_versions().items():
        print(f"{name}: {version}")
    print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else device}")
    print(f"threads: {torch.get_num_threads()}")
    for name, available, reason, chosen in backends:
        state = "chosen" if chosen else "available" if available else "unavailable"
        print(f"backend {name}: {state} ({reason})")
    print(f"additive biases: {describe_bias_cost(device)}")
    return 0


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
    **cli_finetune.COMMANDS,
    **cli_language.COMMANDS,
    "report": Command("Write a report of evaluated runs.", _report_arguments, _report),
    "encodings": Command("List positional encodings, or draw them.", _encodings_arguments, _encodings),
    "info": Command("Show versions, device, threads and attention backends.", _no_arguments, _info),
    "import-official": Command("Convert a released checkpoint.", _import_arguments, _import_official),
}


def _parser(arguments: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of everything, and the options of the chosen command.

    Only the chosen command's arguments are looked up, since that takes imports.
    """
    parser = ArgumentParser(prog="tape", description="TAPE positional encoding for transformers.", exit_on_error=False)
    parser.add_argument("--version", action="version", version=f"tape-pe {__version__}")
    commands = parser.add_subcommands(dest="command")
    known: list[str] = []
    for name, command in COMMANDS.items():
        subparser = ArgumentParser(description=command.help, exit_on_error=False)
        if arguments[:1] == [name]:
            command.add_arguments(subparser, arguments[1:])
            known = list(subparser.get_defaults().keys())
        commands.add_subcommand(name, subparser, help=command.help)
    return parser, known


def _explain(message: str, known: list[str]) -> str:
    """One line, with the names that an unknown option may have been meant to be."""
    message = re.sub(r"\s*\n\s*", " ", message).strip()
    unknown = re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message)
    if unknown is None:
        return message
    section = unknown[1].rpartition(".")[0]
    names = [name for name in known if name.startswith(f"{section}.")] if section else []
    names = names or sorted({name.partition(".")[0] for name in known})
    if len(names) > 20:
        names = difflib.get_close_matches(unknown[1], names, n=3, cutoff=0.0)
        return f"{unknown[1]} is not an option; the nearest ones are {', '.join(names)}"
    return f"{unknown[1]} is not an option; the options are {', '.join(names)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the `tape` command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    known: list[str] = []
    try:
        if words[:1] == ["train"]:
            words[1:] = _expand_config(words[1:])
        if words[:1] == ["lm-eval"]:
            return cli_language.run_lm_eval(words[1:])
        parser, known = _parser(words)
        namespace = parser.parse_args(words)
        return COMMANDS[namespace.command].run(namespace[namespace.command])
    except (UsageError, ArgumentError) as error:
        print(f"tape: error: {_explain(str(error), known)}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"tape: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tape: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
