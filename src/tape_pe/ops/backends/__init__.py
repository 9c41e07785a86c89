"""Backends of `positional_attention`: each says whether it can run on a device and, if not, why."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tape_pe.ops import reference
from tape_pe.ops.backends import blockwise, flex, sdpa, triton
from tape_pe.ops.inputs import AttentionInputs

ENVIRONMENT_VARIABLE = "TAPE_BACKEND"


class Backend(NamedTuple):
    """A way to compute attention.

    Attributes:
        name: what `TAPE_BACKEND` and the `backend` argument call it.
        description: one line for `tape info`.
        attention: the computation, of the output `[B, H, Nq, Dv]` and the averaged state `[B, H, Nq, Ds]`, or `None`.
        unavailable: returns why it cannot run on a device, or `None` if it can.
        materializes_bias: whether an additive bias must be in memory as a whole, `[H, N, N]`; otherwise the backend
            computes a `PairBias` where it is needed.
    """

    name: str
    description: str
    attention: Callable[[AttentionInputs], tuple[Tensor, Tensor | None]]
    unavailable: Callable[[torch.device], str | None]
    materializes_bias: bool = True


class BackendReport(NamedTuple):
    """One line of `tape info`."""

    name: str
    available: bool
    reason: str
    chosen: bool


# In order of preference. `flex` and `triton` have never run on a GPU, so they have to be asked for.
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "blockwise",
            "rows in chunks, values and states with the same weights, no N x N buffer",
            blockwise.attention,
            lambda device: None if device.type == "cpu" else f"runs on cpu, not on {device.type}",
        ),
        Backend(
            "sdpa",
            "torch's scaled_dot_product_attention, called for values and for states",
            sdpa.attention,
            lambda device: None,
        ),
        Backend(
            "flex",
            "torch's flex_attention, compiled: values and states in one call, biases computed in place",
            flex.attention,
            flex.unavailable,
            materializes_bias=False,
        ),
        Backend(
            "triton",
            "Triton kernels for NVIDIA GPUs, not timed yet: values and states in one pass; biases go to sdpa",
            triton.attention,
            triton.unavailable,
        ),
        Backend(
            "reference",
            "the whole attention matrix, as the equations have it",
            reference.attention,
            lambda device: None,
        ),
    )
}


def select_backend(device: torch.device, name: str | None = None) -> Backend:
    """The backend `name`, else the one `TAPE_BACKEND` names, else the first that can run on `device`.

    Raises:
        ValueError: the named backend is unknown or cannot run on `device`.
    """
    source = "backend" if name else ENVIRONMENT_VARIABLE
    name = name or os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return next(backend for backend in BACKENDS.values() if backend.unavailable(device) is None)
    if name not in BACKENDS:
        raise ValueError(f"{source}={name!r}: known backends are {', '.join(BACKENDS)}")
    reason = BACKENDS[name].unavailable(device)
    if reason is not None:
        raise ValueError(f"{source}={name!r}: not available, it {reason}")
    return BACKENDS[name]


def describe_bias_cost(device: torch.device | str = "cpu") -> str:
    """What additive biases cost with the backend that would be used on `device`, in one line."""
    backend = select_backend(torch.device(device))
    if backend.materializes_bias:
        return f"{backend.name} needs the whole [H, N, N] bias in memory, so it grows with the square of the length"
    return (
        f"{backend.name} computes them where they are needed, without an [H, N, N] bias in memory "
        "(`tape encodings` says which encodings build one nevertheless)"
    )


def describe_backends(device: torch.device | str = "cpu") -> list[BackendReport]:
    """For every backend: can it run on `device`, why or why not, and is it the one that would be used."""
    device = torch.device(device)
    chosen = select_backend(device)
    reports = []
    for backend in BACKENDS.values():
        reason = backend.unavailable(device)
        reports.append(BackendReport(backend.name, reason is None, reason or backend.description, backend is chosen))
    return reports
