"""What an adapter buys: SmolLM2-135M adapted to text it cannot have seen, by TAPE, LoRA, and both together.

    make smollm2
    python experiments/adapters.py

The text is the model code in the installed transformers that its licence lines date to 2026, after the model was
trained; every tenth file is held out. Each method trains about the same number of parameters (0.23 M). One JSON line
per run goes to `results/adapters.jsonl`; lines that are there already are not computed again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jsonargparse import CLI
from torch import Tensor

from tape_pe.finetuning.finetune import finetune, held_out_loss
from tape_pe.finetuning.options import FinetuneOptions
from tape_pe.language.pretrained import load_causal_lm
from tape_pe.language.text import read_texts
from tape_pe.results import append_values, whole_lines

HELD_OUT_FILES = 8

# Options of `tape finetune` that give 0.23 M trained parameters on 30 layers of width 576 with 9 and 3 heads.
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "lora_rank": 2, "lora_alpha": 4.0},
    "tape": {"method": "tape", "tape": {"position_size": 14}},
    "tape_lora": {"method": "tape_lora", "lora_rank": 1, "lora_alpha": 2.0, "tape": {"position_size": 7}},
}


@dataclass(frozen=True)
class Plan:
    """The comparison.

    Attributes:
        model: folder of the base model.
        results: file of JSON lines to append to.
        runs: folder for data and checkpoints.
        methods: which of lora, tape and tape_lora.
        seeds: seeds of new weights and of the order of samples.
        length: tokens of a training sample.
        batch_size: samples of a step.
        steps: optimizer steps.
        learning_rates: constant after a warm-up of a tenth of the steps. The first seed runs with each; later seeds
            with the one that was better for their method, at the longest length.
        lengths: lengths at which the held-out loss is measured; each divides the largest.
    """

    model: str = str(Path("~/.cache/tape-pe/SmolLM2-135M-Instruct").expanduser())
    results: str = "results/adapters.jsonl"
    runs: str = "runs/adapters"
    methods: tuple[str, ...] = ("lora", "tape", "tape_lora")
    seeds: tuple[int, ...] = (0, 1, 2)
    length: int = 512
    batch_size: int = 1
    steps: int = 60
    learning_rates: tuple[float, ...] = (2e-4, 1e-3)
    lengths: tuple[int, ...] = (256, 1024)


def new_model_code() -> Iterator[tuple[str, str]]:
    """Path and text of transformers' model code that is dated to 2026."""
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.rglob("model*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"Copyright 2026", text[:600]):
            yield str(path.relative_to(folder)), text


def write_data(folder: Path) -> None:
    """`train.jsonl` and `test.jsonl`, every tenth file in the latter; a model's files stay together."""
    parts: dict[str, list[str]] = {"train": [], "test": []}
    models: dict[str, int] = {}
    for name, text in new_model_code():
        number = models.setdefault(name.split("/")[0], len(models))
        parts["test" if number % 10 == 9 else "train"].append(json.dumps({"path": name, "text": text}))
    folder.mkdir(parents=True, exist_ok=True)
    for part, lines in parts.items():
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_out_tokens(tokenizer: Any, folder: Path, length: int) -> Tensor:
    """The second `length` tokens, behind the licence, of each held-out file that is long enough: `[files, length]`."""
    rows = [tokenizer(text).input_ids[length : 2 * length] for text in read_texts(str(folder / "test.jsonl"))]
    return torch.tensor([row for row in rows if len(row) == length][:HELD_OUT_FILES])


def held_out_losses(model: Any, tokens: Tensor, lengths: tuple[int, ...]) -> dict[str, float | None]:
    """Mean loss in nats per token, the tokens cut into rows of each length."""
    return {str(n): held_out_loss(model, tokens.reshape(-1, n), max(lengths) // n) for n in lengths}


def main(plan: Plan) -> None:
    """Runs what is missing of the comparison."""
    data, results = Path(plan.runs) / "data", Path(plan.results)
    write_data(data)
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, whole_lines(results).splitlines())
    done = {(line["method"], line["learning_rate"], line["seed"]): line for line in lines}
    tokenizer = load_causal_lm(plan.model)[1]
    tokens = held_out_tokens(tokenizer, data, max(plan.lengths))

    def append(values: dict[str, Any]) -> None:
        append_values(results, values)
        done[values["method"], values["learning_rate"], values["seed"]] = values
        print(values["method"], values["learning_rate"], values["seed"], values["held_out_loss"], flush=True)

    if ("none", 0.0, 0) not in done:
        losses = held_out_losses(load_causal_lm(plan.model)[0], tokens, plan.lengths)
        append({"method": "none", "learning_rate": 0.0, "seed": 0, "held_out_loss": losses})
    for seed in plan.seeds:
        for method in plan.methods:
            for rate in plan.learning_rates if seed == plan.seeds[0] else [best_rate(plan, method, done)]:
                if (method, rate, seed) not in done:
                    append(run(plan, method, rate, seed, data, tokens))


def best_rate(plan: Plan, method: str, done: dict[tuple[str, float, int], dict[str, Any]]) -> float:
    """The learning rate with the lowest held-out loss at the longest length, for the first seed."""
    longest = str(max(plan.lengths))
    return min(plan.learning_rates, key=lambda rate: done[method, rate, plan.seeds[0]]["held_out_loss"][longest])


def run(plan: Plan, method: str, rate: float, seed: int, data: Path, tokens: Tensor) -> dict[str, Any]:
    """Fine-tunes once and measures; goes on where an interrupted run stopped."""
    started = time.time()
    folder = Path(plan.runs) / f"{method}-{rate:g}-{seed}"
    options = FinetuneOptions(
        model=plan.model,
        length=plan.length,
        output_dir=str(folder),
        data=str(data / "train.jsonl"),
        data_tokens=2_000_000,
        eval_blocks=0,
        rope="none",
        also_train=(),
        max_steps=plan.steps,
        batch_size=plan.batch_size,
        accumulation=1,
        learning_rate=rate,
        warmup_steps=plan.steps // 10,
        save_steps=20,
        progress=False,
        seed=seed,
        **METHODS[method],
    )
    result = finetune(options, resume=folder.exists())
    losses = held_out_losses(load_causal_lm(str(folder))[0], tokens, plan.lengths)
    return {
        "method": method,
        "learning_rate": rate,
        "seed": seed,
        "held_out_loss": losses,
        "seconds": round(time.time() - started),
        "finetune": result,
    }


if __name__ == "__main__":
    main(CLI(Plan, as_positional=False))
