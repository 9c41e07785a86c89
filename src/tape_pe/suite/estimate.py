"""How long a suite takes: measured steps where the machine that it is meant for is this one, else counted FLOPs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from statistics import mean, median

import torch
from torch.utils.data import DataLoader

from tape_pe.options import RunOptions, training_arguments
from tape_pe.results import Result
from tape_pe.suite.plan import PlannedRun, Suite
from tape_pe.tasks.base import RightPaddingCollator
from tape_pe.train import build_model

_STEPS, _SAMPLES = 3, 64


def estimate_seconds(suite: Suite, runs: Sequence[PlannedRun], finished: dict[str, Result]) -> dict[str, float]:
    """Seconds that each unfinished run will take, by name.

    Of a run whose like with another seed has finished: what that took. Otherwise training alone, without scoring:
    where the suite gives `flops_per_second`, from the 6 FLOPs per parameter and token of forward and backward (Kaplan
    et al., arXiv 2001.08361, section 2.1), otherwise measured by a few steps in this process.
    """
    known: dict[str, list[float]] = {}
    for name, result in finished.items():
        known.setdefault(name.rpartition("/")[0], []).append(result.train_seconds + result.eval_seconds)
    estimates = {}
    for run in runs:
        if run.name in finished:
            continue
        like = run.name.rpartition("/")[0]
        if like not in known:
            known[like] = [_seconds(suite, run)]
        estimates[run.name] = median(known[like])
    return estimates


def _seconds(suite: Suite, run: PlannedRun) -> float:
    arguments = training_arguments(run.options, elsewhere=suite.launcher is not None)
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    if suite.flops_per_second:
        dataset = run.options.task.training_dataset(0, _SAMPLES)
        length = mean(len(sample["input_ids"]) for sample in islice(DataLoader(dataset, batch_size=None), _SAMPLES))
        flops = 6 * run.parameters * length * rows * arguments.max_steps
        return flops / suite.flops_per_second
    return arguments.max_steps * _step_seconds(run.options, rows, suite.threads)


def _step_seconds(options: RunOptions, rows: int, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokenizer = options.task.tokenizer()
        model = build_model(options.model, tokenizer, 0)
        dataset = options.task.training_dataset(0, rows * (_STEPS + 1))
        batches = DataLoader(dataset, rows, collate_fn=RightPaddingCollator(int(tokenizer.pad_token_id)))
        optimizer = torch.optim.AdamW(model.parameters())
        seconds = []
        for batch in islice(batches, _STEPS + 1):
            started = time.perf_counter()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        return median(seconds[1:])
    finally:
        torch.set_num_threads(before)
