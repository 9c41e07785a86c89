"""How TAPE's own weights want to be trained: their learning rate, weight decay, number and start values.

    python experiments/position_weights.py

Trains TAPE on tasks of `configs/suites/two_cores.yaml`, one thing changed at a time; everything else, samples and their
order included, is as in that suite, whose lines for `tape` and `rope` are what to compare with. One line per task,
variant and seed goes to `results/position_weights.jsonl`; lines that are there already are not computed again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jsonargparse import CLI

from tape_pe.encodings.tape import TapeLayer
from tape_pe.options import RunOptions, training_arguments
from tape_pe.results import Result, append_line, git_revision, library_versions, whole_lines
from tape_pe.suite import load_suite, plan
from tape_pe.tasks.base import RightPaddingCollator
from tape_pe.train import RunTrainer, build_model

SUITE = Path(__file__).parents[1] / "configs" / "suites" / "two_cores.yaml"


class Variant(NamedTuple):
    """What is changed.

    Attributes:
        rate: factor of the learning rate of TAPE's own weights.
        decay: their weight decay; `None` for that of the other weights.
        start: standard deviation that W_mix and W_up start with, which are zero otherwise.
        options: options of the encoding.
    """

    rate: float = 1.0
    decay: float | None = None
    start: float = 0.0
    options: Mapping[str, Any] = MappingProxyType({})


VARIANTS = {
    "learning rate x 0.1": Variant(rate=0.1),
    "learning rate x 3": Variant(rate=3.0),
    "weight decay 1": Variant(decay=1.0),
    "position_size 4": Variant(options={"position_size": 4}),
    "position_size 64": Variant(options={"position_size": 64}),
    "started at random": Variant(start=0.1),
}


@dataclass(frozen=True)
class Plan:
    """The comparison.

    Attributes:
        results: file of JSON lines to append to.
        tasks: labels of the suite's tasks.
        variants: which of the variants; default: all.
        seeds: seeds of weights and of samples, some of the suite's.
        threads: CPU threads.
    """

    results: str = "results/position_weights.jsonl"
    tasks: tuple[str, ...] = ("s3",)
    variants: tuple[str, ...] = tuple(VARIANTS)
    seeds: tuple[int, ...] = (0, 1, 2)
    threads: int = 1


class OwnRateTrainer(RunTrainer):
    """`RunTrainer` with a learning rate and a weight decay for the encoding's own weights."""

    variant = Variant()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """See `Trainer.create_optimizer`: every group is parted into the encoding's weights and the others."""
        optimizer = super().create_optimizer(*args, **kwargs)
        own = {id(p) for module in self.model.modules() if isinstance(module, TapeLayer) for p in module.parameters()}
        for group in list(optimizer.param_groups):
            parted = [p for p in group["params"] if id(p) in own]
            group["params"] = [p for p in group["params"] if id(p) not in own]
            decay = group["weight_decay"] if self.variant.decay is None else self.variant.decay
            changed = {"params": parted, "lr": group["lr"] * self.variant.rate, "weight_decay": decay}
            optimizer.add_param_group({**group, **changed})
        return optimizer


def main(what: Plan) -> None:
    """Runs what is missing."""
    torch.set_num_threads(what.threads)
    results = Path(what.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in whole_lines(results).splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        planned = {run.name: run.options for run in plan(load_suite(SUITE, output_dir=folder))}
    for seed in what.seeds:
        for task in what.tasks:
            options = planned[f"{task}/tape/seed-{seed}"]
            section = json.loads(json.dumps(options.sections()["task"]))
            there = {line["name"] for line in lines if line["seed"] == seed and line["config"]["task"] == section}
            for name in what.variants:
                if name not in there:
                    append_line(results, line := run(options, name, seed))
                    scores = [f"{key} {value:.3f}" for key, value in line.metrics.items() if isinstance(value, float)]
                    print(task, name, seed, *scores, f"{line.train_seconds:.0f} s", flush=True)


def run(options: RunOptions, name: str, seed: int) -> Result:
    """Trains and scores one model; `options` are those of TAPE's run in the suite."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        encoding_options = {**(options.model.encoding_options or {}), **variant.options}
        training = {**options.training, "save_strategy": "no"}
        model_options = replace(options.model, encoding_options=encoding_options)
        options = replace(options, model=model_options, training=training, output_dir=folder)
        arguments, tokenizer = training_arguments(options), options.task.tokenizer()
        model = build_model(options.model, tokenizer, seed)
        if variant.start:
            for layer in (module for module in model.modules() if isinstance(module, TapeLayer)):
                torch.nn.init.normal_(layer.mix, std=variant.start)
                torch.nn.init.normal_(layer.up, std=variant.start)
        size = arguments.max_steps * arguments.train_batch_size
        trainer = OwnRateTrainer(
            model=model,
            args=arguments,
            train_dataset=options.task.training_dataset(seed, size),
            data_collator=RightPaddingCollator(int(tokenizer.pad_token_id)),
            processing_class=tokenizer,
        )
        trainer.variant = variant
        trainer.train()
        progress, started = trainer.progress(), time.perf_counter()
        metrics = options.task.score(model.eval(), tokenizer)
    return Result(
        name=name,
        task=options.task_name,
        config={
            **options.sections(),
            "output_dir": "",
            "variant": {**variant._asdict(), "options": dict(variant.options)},
        },
        seed=seed,
        git_revision=git_revision(),
        versions=library_versions(),
        parameters=model.num_parameters(),
        eval_seconds=time.perf_counter() - started,
        metrics=metrics,
        **progress,
    )


if __name__ == "__main__":
    main(CLI(Plan, as_positional=False))
