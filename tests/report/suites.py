"""Synthetic suites: the three files of a suite's folder, with scores that are functions of task, encoding and seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tape_pe.results import Result

SIZES = [2, 5, 8, 12, 16, 20, 24, 28, 32]
TASKS: dict[str, dict[str, Any]] = {
    "addition": {"name": "addition", "max_digits": 4},
    "s3": {"name": "state_tracking", "group": "S3", "max_length": 12},
    "flip_flop": {"name": "flip_flop", "length": 32, "ignore_percent": 80},
    "recall": {"name": "associative_recall", "vocab_size": 64, "train_cases": [[64, 4], [64, 8]]},
    "copy": {"name": "copy", "max_length": 12},
    "modular": {"name": "modular_arithmetic", "modulus": 5},
    "passkey": {"name": "passkey", "length": 128},
    "text": {"name": "language_modelling", "length": 256},
}


def metrics(task: str, skill: float) -> dict[str, Any]:
    """What the task's `score` returns, for a model of so much skill in 0..1."""
    if task == "addition":
        n = np.arange(1, 9)
        grid = np.clip(np.exp(-np.maximum(np.maximum(n[:, None], n) - 4, 0) * (1.5 - skill)), 0, 1)
        inside = np.maximum(n[:, None], n) <= 4
        scores = {"": grid.mean(), "_in_range": grid[inside].mean(), "_out_of_range": grid[~inside].mean()}
        return {
            **{f"exact_match{name}": float(value) for name, value in scores.items()},
            "grid": grid.tolist(), "trained_digits": 4, "pairs_per_cell": 100, "overlap_pairs": 0, "held_out_pairs": 9,
        }  # fmt: skip
    if task == "passkey":
        by_length = [1.0, skill, skill**2, skill**4]
        return {
            "exact_match": float(np.mean(by_length)), "exact_match_in_range": (1 + skill) / 2,
            "exact_match_out_of_range": (skill**2 + skill**4) / 2, "lengths": [64, 128, 256, 512],
            "exact_match_by_length": by_length, "first_number_by_length": [min(1.0, x + 0.05) for x in by_length],
            "trained_length": 128, "seeds": 50,
        }  # fmt: skip
    if task == "language_modelling":
        by_length = [9 - 3 * skill + (1 - skill) * max(0, factor - 3) ** 3 for factor in range(6)]
        return {
            "perplexity": by_length[3], "perplexity_longest": by_length[-1], "bits_per_byte": 1.5 - skill / 4,
            "lengths": [32, 64, 128, 256, 512, 1024], "perplexity_by_length": by_length,
            "bits_per_byte_by_length": [1.5 - skill / 4] * 6, "trained_length": 256, "tokens": 32767, "bytes": 32767,
        }  # fmt: skip
    sizes = [[size] for size in SIZES]
    names = [str(size) for size in SIZES]
    if task == "flip_flop":
        sizes = [[length, percent] for percent in (80, 98, 10) for length in (32, 64, 128)]
        names = [f"{length} instructions, {percent} % ignored" for length, percent in sizes]
    if task == "associative_recall":
        sizes = [[64, 4], [64, 8], [64, 16], [128, 32], [256, 64]]
        names = [f"{length} tokens, {pairs} pairs" for length, pairs in sizes]
    token = [float(1 / (1 + (1 - skill) * max(0, index - 2))) for index in range(len(sizes))]
    whole = token if task == "modular_arithmetic" else [value**4 for value in token]
    counted = whole if task in ("copy", "reverse", "modular_arithmetic") else token
    return {
        "accuracy": float(np.mean(counted)), "accuracy_in_range": float(np.mean(counted[:3])),
        "accuracy_out_of_range": float(np.mean(counted[3:])), "sizes": sizes, "size_names": names,
        "token_accuracy": token, "sequence_accuracy": whole, "trained_size": sizes[-1][0] // 2,
        "rows": [200] * len(sizes), "overlap_rows": 0,
    }  # fmt: skip


def steady(encoding: int, seed: int) -> float:
    """A skill by which each encoding is clearly better than the one before."""
    return 0.2 + 0.15 * encoding + 0.005 * seed


def noisy(encoding: int, seed: int) -> float:
    """A skill that seeds change more than encodings do."""
    return 0.45 + 0.02 * encoding + 0.2 * ((encoding + seed * 7) % 3 - 1)


def write_suite(
    folder: Path,
    *,
    tasks: Mapping[str, Mapping[str, Any]] = TASKS,
    encodings: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    skill: Callable[[int, int], float] = steady,
    missing: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    **changes: Any,
) -> Path:
    """Writes a suite's folder; `missing` and `failed` runs have no result line, `changes` are of all results."""
    encodings = {"rope": {}, "nope": {}, "tape": {}} if encodings is None else encodings
    plan = {
        "name": folder.name,
        "encodings": {label: dict(options) for label, options in encodings.items()},
        "tasks": {label: {"task": dict(task), "model": {}, "training": {}} for label, task in tasks.items()},
        "seeds": list(seeds),
    }
    folder.mkdir(parents=True)
    (folder / "suite.yaml").write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    lines = []
    for seed in seeds:
        for label, task in tasks.items():
            for index, (encoding, options) in enumerate(encodings.items()):
                name = f"{label}/{encoding}/seed-{seed}"
                if name in missing or name in (failed or {}):
                    continue
                level = skill(index, seed)
                curve = [
                    [step, float(3 * np.exp(-step / 400) + 1.2 - level + 0.02 * seed)] for step in range(50, 2001, 50)
                ]
                values = {
                    "name": name,
                    "task": task["name"],
                    "config": {
                        "output_dir": f"runs/suite/{name}",
                        "model": {"encoding": encoding, "hidden_size": 128, **options},
                        "task": dict(task),
                        "training": {"max_steps": 2000, "seed": seed},
                    },
                    "seed": seed,
                    "git_revision": "0123456789abcdef0123456789abcdef01234567",
                    "versions": {"python": "3.11.7", "torch": "2.9.0"},
                    "parameters": 790528 + 1000 * index,
                    "steps": 2000,
                    "tokens": 1234567 + seed,
                    "train_seconds": 1100.0 + 60 * index + seed,
                    "eval_seconds": 9.5,
                    "loss_curve": curve,
                    "metrics": metrics(task["name"], level) if task["name"] in _KNOWN else {"score": level},
                }
                lines.append(json.dumps(asdict(Result(**{**values, **changes})), allow_nan=False) + "\n")
    if lines:
        (folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
    if failed:
        failures = [{"name": name, "exit_code": 1, "message": message} for name, message in failed.items()]
        text = "".join(json.dumps(failure) + "\n" for failure in failures)
        (folder / "failures.jsonl").write_text(text, encoding="utf-8")
    return folder


_KNOWN = {task["name"] for task in TASKS.values()}
