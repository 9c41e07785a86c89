"""Scores a finished run with its task and appends the result line to the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tape_pe.ops.backends import select_backend
from tape_pe.options import RunOptions, load_options
from tape_pe.results import Result, append_result
from tape_pe.tasks import Task
from tape_pe.train import TRAINING_FILE


def load_run(
    run: Path, device: str | None = None
) -> tuple[RunOptions, PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Loads a finished run: its options, model (in evaluation mode), tokenizer and `training.json`.

    Args:
        run: the run folder.
        device: where the model goes; default: the GPU if there is one, else the CPU.

    Raises:
        FileNotFoundError: `run` is not a run folder, or its training has not finished.
        ValueError: `device` is not one that torch has here.
    """
    options = load_options(run)
    path = run / TRAINING_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run} has not finished training; go on with `tape train {run} --resume`")
    training = json.loads(path.read_text(encoding="utf-8"))
    target = check_device(device)
    model = AutoModelForCausalLM.from_pretrained(run).to(target).eval()
    return options, model, AutoTokenizer.from_pretrained(run), training


def check_device(device: str | None) -> torch.device:
    """The device of that name, or the default one.

    Raises:
        ValueError: torch does not know it, or cannot use it here.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(name)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return target


def check_evaluation(
    run: Path, *, task_options: Mapping[str, Any] | None = None, batch_size: int = 256, device: str | None = None
) -> Task:
    """Everything that `evaluate` refuses, found out before any work.

    Returns:
        The task with its evaluation options.

    Raises:
        FileNotFoundError, ValueError: see `evaluate`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    task = load_options(run).task.with_evaluation_options(task_options or {})
    if not (run / TRAINING_FILE).is_file():
        raise FileNotFoundError(f"{run} has not finished training; go on with `tape train {run} --resume`")
    select_backend(check_device(device))
    return task


def evaluate(
    run: Path | str,
    *,
    task_options: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    device: str | None = None,
) -> Result:
    """Scores a finished run, appends the result to its `results.jsonl` and returns it.

    Args:
        run: the run folder.
        task_options: evaluation options of the task to change, for example `{"pairs_per_cell": 20}`.
        batch_size: prompts decoded together.
        device: where to run; default: the GPU if there is one, else the CPU.

    Raises:
        FileNotFoundError: `run` is not a run folder, or its training has not finished.
        ValueError: an option is out of range or cannot be changed after training.
    """
    run = Path(run)
    trained = load_options(run).task
    task = check_evaluation(run, task_options=task_options, batch_size=batch_size, device=device)
    options, model, tokenizer, training = load_run(run, device)
    started = time.perf_counter()
    with torch.inference_mode():
        metrics = task.score(model, tokenizer, batch_size=batch_size, trained=trained)
    evaluation = {"batch_size": batch_size, "device": str(model.device)}
    evaluation.update({name: asdict(task)[name] for name in task.evaluation_options})
    result = Result(
        name=run.resolve().name,
        task=options.task_name,
        config={**options.sections(), "evaluation": evaluation, "data": training["data"]},
        seed=training["seed"],
        git_revision=training["git_revision"],
        versions=training["versions"],
        parameters=training["parameters"],
        steps=training["steps"],
        tokens=training["tokens"],
        train_seconds=training["train_seconds"],
        eval_seconds=time.perf_counter() - started,
        loss_curve=training["loss_curve"],
        metrics=metrics,
    )
    append_result(run, result)
    return result
