"""Checkpoints of sharded (FSDP2) training in the form of unsharded training, so that each can go on from the other's.

Collective functions: every process calls them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be if nothing were sharded, on the CPU of the first process.

    The other processes get an empty one.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    named: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    groups = named.get("param_groups", [])
    order = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    return {
        "state": {numbers[name]: values for name, values in named.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Gives a sharded optimizer the state that `whole_optimizer_state`, or an unsharded optimizer, has saved.

    Raises:
        ValueError: the file holds the state of another number of parameters.
    """
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # mapped: processes share the pages
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    if len(order) != sum(len(group["params"]) for group in saved["param_groups"]):
        raise ValueError(f"{path} holds the optimizer state of another model")
    state: dict[str, Any] = {
        "state": {order[number]: values for number, values in saved["state"].items()},
        "param_groups": [
            {**group, "params": [order[number] for number in group["params"]]} for group in saved["param_groups"]
        ],
    }
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def load_weights(model: nn.Module, folder: Path) -> Any:
    """Gives a sharded model the weights in `model*.safetensors`; returns what was missing and unexpected."""
    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights.update(load_file(path))
    return set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))
