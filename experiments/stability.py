"""The published stability test in small: what moving a text changes in TAPE, RoPE, and TAPE without equivariance.

    python experiments/stability.py

Trains each model on the sources of Python's standard library, then measures it (`tape_pe.analysis.stability`) on the
beginnings of held-out files: in fp32, in fp32 with the start state (cos and sin) rounded to bf16, and in bf16. "Without
equivariance" is TAPE with `structure="unstructured"`, whose weights act on all heads and channels at once. One line per
model and seed goes to `results/stability.jsonl`; lines that are there already are not computed again, and an
interrupted training goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jsonargparse import CLI
from torch import Tensor

from tape_pe.analysis.stability import Stability, first_tokens, front_token, measure_stability
from tape_pe.evaluate import load_run
from tape_pe.language.text import STDLIB, read_texts
from tape_pe.models import TapeLMForCausalLM
from tape_pe.options import ModelOptions, RunOptions
from tape_pe.report.stability import PRECISIONS
from tape_pe.results import Result, append_line, whole_lines
from tape_pe.tasks import make_task
from tape_pe.train import TRAINING_FILE, train

MODELS: dict[str, dict[str, Any]] = {
    "rope": {"encoding": "rope"},
    "tape": {"encoding": "tape"},
    "tape_without_equivariance": {"encoding": "tape", "encoding_options": {"structure": "unstructured"}},
}


@dataclass(frozen=True)
class Plan:
    """The comparison.

    Attributes:
        results: file of JSON lines to append to.
        runs: folder for the models.
        models: which of rope, tape and tape_without_equivariance.
        seeds: seeds of weights and of samples.
        length: tokens of a training sample and of a text to measure.
        layers: number of layers; the published figures are of layers 1, 2, 4 and 8.
        width: of the token stream.
        batch_size: samples of a step.
        steps: optimizer steps.
        learning_rate: its peak; cosine, warm-up of a twentieth.
        texts: texts to measure.
    """

    results: str = "results/stability.jsonl"
    runs: str = "runs/stability"
    models: tuple[str, ...] = tuple(MODELS)
    seeds: tuple[int, ...] = (0, 1, 2)
    length: int = 128
    layers: int = 8
    width: int = 64
    batch_size: int = 16
    steps: int = 600
    learning_rate: float = 3e-3
    texts: int = 64


def main(plan: Plan) -> None:
    """Runs what is missing."""
    results = Path(plan.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in whole_lines(results).splitlines()]
    done = {(line["name"], line["seed"]) for line in lines}
    for seed in plan.seeds:
        for name in plan.models:
            if (name, seed) not in done:
                line = run(plan, name, seed)
                append_line(results, line)
                shift = {key: line.metrics[key]["shift"]["attention"] for key in PRECISIONS}
                print(name, seed, f"loss {line.metrics['held_out_loss']:.3f}", json.dumps(shift), flush=True)


def run(plan: Plan, name: str, seed: int) -> Result:
    """Trains one model, unless that is done, and measures it."""
    folder = Path(plan.runs) / f"{name}-{seed}"
    options = run_options(plan, name, seed, folder)
    if not (folder / TRAINING_FILE).is_file():
        train(options, resume=folder.exists())
    _, model, tokenizer, training = load_run(folder)
    started = time.perf_counter()
    token, what = front_token(tokenizer)
    rows = first_tokens(tokenizer, read_texts(STDLIB, split="test"), plan.texts, plan.length)
    metrics: dict[str, Any] = {"front_token": what, "texts": len(rows)}
    with torch.inference_mode():
        metrics["held_out_loss"] = float(model(rows.to(model.device), labels=rows.to(model.device)).loss)
    for precision in PRECISIONS:
        measured = measure(model, rows, token, precision)
        metrics[precision] = {moved: part._asdict() for moved, part in measured._asdict().items()}
    return Result(
        name=name,
        task="stability",
        config={**options.sections(), "length": plan.length, "texts": plan.texts},
        seed=seed,
        eval_seconds=time.perf_counter() - started,
        metrics=metrics,
        **{
            key: training[key]
            for key in ("git_revision", "versions", "parameters", "steps", "tokens", "train_seconds", "loss_curve")
        },
    )


def measure(model: TapeLMForCausalLM, rows: Tensor, token: int, precision: str) -> Stability:
    """Measures a model in one of `PRECISIONS`, to which its weights are converted."""
    if precision != "bfloat16_start":
        return measure_stability(model.to(getattr(torch, precision)), rows, token)
    encoding = model.model.encoding
    start = encoding.start

    def rounded(*args: Any) -> Tensor | None:
        state = start(*args)
        return None if state is None else state.bfloat16().to(state.dtype)

    with patch.object(encoding, "start", rounded):
        return measure_stability(model, rows, token)


def run_options(plan: Plan, name: str, seed: int, folder: Path) -> RunOptions:
    """The options of one training."""
    model = ModelOptions(
        hidden_size=plan.width,
        intermediate_size=4 * plan.width,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        max_position_embeddings=plan.length,
        **MODELS[name],
    )
    training = {
        "max_steps": plan.steps,
        "per_device_train_batch_size": plan.batch_size,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "weight_decay": 0.01,
        "logging_steps": 20,
        "save_steps": 100,
        "seed": seed,
    }
    task = make_task("language_modelling", length=plan.length, eval_factors=[0.125, 0.25, 0.5, 1, 2, 4])
    return RunOptions(str(folder), model, "language_modelling", task, training)


if __name__ == "__main__":
    main(CLI(Plan, as_positional=False))
