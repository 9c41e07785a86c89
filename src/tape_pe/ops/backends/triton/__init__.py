"""Triton kernels: values and states averaged with the same weights, forward, backward and in cached decoding.

`kernels.py`, `backward.py` and `decode.py` are the kernels, `tiles.py` how they are cut, `launch.py` calls them, and
`operators.py` makes them operators of torch. Triton is imported when the first of them runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os

import torch
from torch import Tensor

from tape_pe.ops.backends import sdpa
from tape_pe.ops.backends.triton import operators  # noqa: F401  (registers torch.ops.tape_pe.triton_*)
from tape_pe.ops.backends.triton.tiles import has_tiles, precision
from tape_pe.ops.derivatives import refuse_tangents
from tape_pe.ops.inputs import AttentionInputs
from tape_pe.ops.layout import dense_channels

KNOWN_VERSIONS = ("3.7", "3.8", "3.9")
"""Versions of Triton for which the kernels are known to compile; 3.7 comes with torch 2.12 and 2.13."""
LEAST_CAPABILITY = (8, 0)
MAX_HEADS = 65535
"""Heads of all batch rows are the second axis of a grid, which CUDA limits to so many."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.compiler.assume_constant_result
def unavailable(device: torch.device) -> str | None:
    """Why it cannot run on `device`, or `None`."""
    return _unavailable(device.type, device.index)


@functools.cache
def _unavailable(device: str, index: int | None) -> str | None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "needs the package triton"
    if version.rpartition(".")[0] not in KNOWN_VERSIONS:
        return f"is known to work with Triton {', '.join(KNOWN_VERSIONS)}, not with {version}"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if torch.version.hip:
        return "is for GPUs of NVIDIA"
    if not torch.cuda.is_available():
        return "finds no GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return "needs compute capability {}.{}, not {}.{}".format(*LEAST_CAPABILITY, *capability)
    return None


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`. Segment ids must be below 2**31.

    What the kernels cannot do goes to `sdpa`: a bias, fp64, values or states that are not as wide as keys, widths for
    which there are no tiles (see `tiles`), and more than `MAX_HEADS` heads in all batch rows.
    """
    query, key, value, state, segment_ids, bias, causal, scale = inputs
    tensors = [tensor for tensor in (query, key, value, state) if tensor is not None]
    refuse_tangents("triton", *tensors)
    width = query.shape[3]
    if bias is not None or query.dtype not in DTYPES or any(x.shape[3] != width for x in tensors):
        return sdpa.attention(inputs)
    if not has_tiles(width, precision(query.dtype)) or query.shape[0] * query.shape[1] > MAX_HEADS:
        return sdpa.attention(inputs)
    query, key, value = (dense_channels(tensor) for tensor in (query, key, value))
    state = None if state is None else dense_channels(state)
    output, averaged, _ = torch.ops.tape_pe.triton_attention(query, key, value, state, segment_ids, causal, scale)
    return output, None if state is None else averaged
