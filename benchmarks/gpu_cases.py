"""What `gpu.py` checks and times: one case is one variant (a backend, with or without states) on one problem."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.ops import contextualize, positional_attention, reference

VARIANTS = ("rope sdpa", "tape sdpa", "tape triton", "tape flex")
"""The first is what the others are compared with."""
TOLERANCES = {"fp32": 1e-4, "tf32": 2e-2, "fp16": 1e-2, "bf16": 5e-2}
"""Largest error that a check accepts, relative to the largest entry of the reference."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        kind: `"check"` or `"check decode"` against the reference in fp64; or, timed, `"attention"`, `"decode"` (one
            query), `"update"` (of the position states) or `"layer"`.
        keys: tokens, N.
        width: channels of a head, D.
        heads: H.
        kv_heads: Hkv.
        dtype: a key of `DTYPES`.
        backward: whether the backward pass belongs to it.
        mask: `"causal"`, or `"documents"` with padding here and there.
        batch: B.
    """

    kind: str
    keys: int
    width: int = 64
    heads: int = 16
    kv_heads: int = 16
    dtype: str = "bf16"
    backward: bool = False
    mask: str = "causal"
    batch: int = 1


def tiny(case: Case) -> Case:
    """The case for a dry run: few heads and tokens, and not bf16, whose products Triton's interpreter gets wrong."""
    keys = 48 if case.kind.startswith("check") else 20
    dtype = "fp16" if case.dtype == "bf16" else case.dtype
    return replace(case, keys=keys, heads=case.heads // case.kv_heads, kv_heads=1, batch=1, dtype=dtype)


def cases_of(variant: str, tokens: int, lengths: tuple[int, ...]) -> list[Case]:
    """All cases of a variant, what matters most first.

    Args:
        variant: one of `VARIANTS`.
        tokens: tokens of a batch in timed cases.
        lengths: what N is in them.
    """
    cases = []
    if variant != "rope sdpa":
        # Kernels are compiled for each of these, so not for all combinations.
        for dtype, width, mask in (
            ("bf16", 64, "documents"), ("bf16", 64, "causal"), ("bf16", 128, "documents"), ("bf16", 128, "causal"),
            ("fp16", 64, "documents"), ("fp16", 128, "documents"), ("tf32", 64, "documents"), ("fp32", 64, "documents"),
        ):  # fmt: skip
            sizes = {"keys": 777, "width": width, "heads": 4, "kv_heads": 2, "batch": 2}
            cases.append(Case("check", dtype=dtype, mask=mask, backward=True, **sizes))
            cases.append(Case("check decode", dtype=dtype, mask=mask, **sizes))
    for width in (64, 128):
        for length in lengths:
            batch = max(1, tokens // length)
            cases += [Case("attention", length, width, backward=backward, batch=batch) for backward in (False, True)]
            cases.append(Case("decode", length, width, batch=8))
    middle = lengths[len(lengths) // 2]
    batch = max(1, tokens // middle)
    cases += [Case("attention", middle, 128, 32, 8, backward=backward, batch=batch) for backward in (False, True)]
    cases.append(Case("attention", middle, backward=True, mask="documents", batch=batch))
    cases.append(Case("decode", middle, 128, 32, 8, batch=8))
    sizes = {"width": 64, "heads": 12, "kv_heads": 12, "batch": max(1, tokens // lengths[0])}
    if variant in ("rope sdpa", "tape sdpa"):  # the published einsums, and this package's update
        cases += [Case("update", lengths[0], backward=backward, **sizes) for backward in (False, True)]
    cases += [Case("layer", lengths[0], backward=backward, **sizes) for backward in (False, True)]
    return cases


def run(case: Case, variant: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """What is found: `errors` by tensor and `ok` of a check; `ms`, the median of repeated runs, of a timed case."""
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    torch.manual_seed(0)
    with_state, backend = variant.startswith("tape"), variant.split()[1]
    if case.kind.startswith("check"):
        errors = _errors(case, backend, device)
        return {"errors": errors, "ok": all(error <= TOLERANCES[case.dtype] for error in errors.values())}
    if case.kind == "update":
        return {"ms": _median_ms(_update(case, with_state, device), device, seconds)}
    if case.kind == "layer":
        with _backend(backend):
            return {"ms": _median_ms(_layer(case, with_state, device), device, seconds)}
    step = _attention(case, with_state, backend, device)
    if with_state:
        return {"ms": _median_ms(step, device, seconds)}
    return _fastest_sdpa(step, device, seconds)


def _problem(case: Case, queries: int, with_state: bool, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value and state, and segment ids."""
    dtype = DTYPES[case.dtype]
    shape = (case.batch, case.keys, case.kv_heads, case.width)
    query = torch.randn(case.batch, queries, case.heads, case.width, device=device, dtype=dtype)
    leaves = [query, *(torch.randn(shape, device=device, dtype=dtype) for _ in range(3 if with_state else 2))]
    ids = None
    if case.mask == "documents":
        columns = torch.arange(case.keys, device=device).expand(case.batch, -1)
        ids = (columns // max(1, case.keys // 5)).where((columns % 50 != 7) | (columns == case.keys - 1), -1)
    return [x.transpose(1, 2).requires_grad_(case.backward) for x in leaves], ids


def _errors(case: Case, backend: str, device: torch.device) -> dict[str, float]:
    """Largest errors of outputs and gradients, relative to the largest entry, against the reference in fp64."""
    queries = 1 if case.kind == "check decode" else case.keys * 2 // 3
    leaves, ids = _problem(case, queries, True, device)
    directions = [torch.randn_like(leaves[0]) for _ in range(2)]
    names = ["output", "averaged", "dq", "dk", "dv", "dz"]
    results = []
    for name, dtype in ((backend, DTYPES[case.dtype]), ("reference", torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_(case.backward) for x in leaves]
        outputs = positional_attention(*inputs, segment_ids=ids, backend=name)
        grads = torch.autograd.grad(outputs, inputs, [x.to(dtype) for x in directions]) if case.backward else ()
        results.append([*outputs, *grads])
    errors = {}
    for name, actual, expected in zip(names, *results, strict=False):
        error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
        errors[name] = error if math.isfinite(error) else 1e30  # JSON has no infinity
    return errors


def _attention(case: Case, with_state: bool, backend: str, device: torch.device) -> Callable[[], Any]:
    queries = 1 if case.kind == "decode" else case.keys
    leaves, ids = _problem(case, queries, with_state, device)
    directions = [torch.randn_like(leaves[0]) for _ in range(2 if with_state else 1)]

    def step() -> Any:
        outputs = positional_attention(*leaves, segment_ids=ids, backend=backend)
        if case.backward:
            return torch.autograd.grad([x for x in outputs if x is not None], leaves, directions)
        return outputs

    return step


def _fastest_sdpa(step: Callable[[], Any], device: torch.device, seconds: float) -> dict[str, Any]:
    """The time of torch's fastest kernel for it, and which that is."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, float] = {"default": _median_ms(step, device, seconds)}
    if device.type == "cuda":
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    found[backend.name] = _median_ms(step, device, seconds)
            except RuntimeError as error:
                if "out of memory" in str(error) or "CUDA error" in str(error):
                    raise
    best = min(found, key=lambda name: found[name])
    return {"ms": found[best], "kernel": best}


def _update(case: Case, fast: bool, device: torch.device) -> Callable[[], Any]:
    dtype, size = DTYPES[case.dtype], 4 * case.heads
    state, averaged = (
        torch.randn(case.batch, case.keys, case.heads, case.width, device=device, dtype=dtype).transpose(1, 2)
        for _ in range(2)
    )
    gate = torch.randn(case.batch, case.keys, size, device=device, dtype=dtype)
    mix, up, down = (
        0.1 * torch.randn(rows, columns, device=device, dtype=dtype)
        for rows, columns in ((case.heads, case.heads), (size, case.heads), (case.heads, size))
    )
    leaves = [x.requires_grad_(case.backward) for x in (state, averaged, gate, mix, up, down)]
    function = contextualize if fast else reference.contextualize

    def step() -> Any:
        new = function(*leaves[:3], mix=mix, up=up, down=down)
        return torch.autograd.grad(new, leaves, averaged.detach()) if case.backward else new

    return step


def _layer(case: Case, with_state: bool, device: torch.device) -> Callable[[], Any]:
    """A decoder's layer in the middle, compiled on a GPU."""
    hidden_size = case.heads * case.width
    config = TapeLMConfig(
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=3,
        num_attention_heads=case.heads,
        encoding="tape" if with_state else "rope",
    )
    model = TapeLMForCausalLM(config).to(device, DTYPES[case.dtype])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".encoding." in name:
                parameter.normal_(std=0.02)
    tokens = torch.zeros(case.batch, case.keys, dtype=torch.long, device=device)
    caught: dict[str, Any] = {}
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: caught.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens, use_cache=False)
    hook.remove()
    hidden, state, bias = caught["args"]
    wanted = [x.detach().requires_grad_(case.backward) for x in (hidden, state)]
    layer = model.model.layers[1].requires_grad_(case.backward)
    function = torch.compile(layer) if device.type == "cuda" else layer
    leaves = [*(wanted if with_state else wanted[:1]), *(layer.parameters() if case.backward else ())]

    def step() -> Any:
        result = function(*wanted, bias, **caught["kwargs"])
        if not case.backward:
            return result
        outputs = [result.hidden_states, result.state] if with_state else [result.hidden_states]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])

    return step


@contextmanager
def _backend(name: str) -> Iterator[None]:
    before = os.environ.get("TAPE_BACKEND")
    os.environ["TAPE_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["TAPE_BACKEND"]
        else:
            os.environ["TAPE_BACKEND"] = before


def _median_ms(step: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Median time of a step in ms: at least 3 repetitions, and more until `seconds` are over."""
    for _ in range(2):
        step()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or (len(times) < 100 and time.perf_counter() - started < seconds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            before = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)
