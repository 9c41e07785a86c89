"""Shared by the tests of training, evaluation and the command line."""

from pathlib import Path
from typing import Any

import pytest

from tape_pe.options import ModelOptions, RunOptions
from tape_pe.tasks import Addition


@pytest.fixture
def make_options(tmp_path: Path):
    """Options of a run that takes a second; keyword arguments go to its `training` section."""

    def make(name: str = "run", task: Addition | None = None, **training: Any) -> RunOptions:
        model = ModelOptions(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, encoding="tape"
        )
        defaults = {
            "max_steps": 20,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "logging_steps": 4,
            "save_steps": 10,
            "seed": 3,
            "disable_tqdm": True,
        }
        task = task or Addition(max_digits=2, eval_max_digits=3, pairs_per_cell=4)
        return RunOptions(str(tmp_path / name), model, "addition", task, {**defaults, **training})

    return make
