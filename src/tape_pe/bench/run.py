"""`tape bench`: everything that its options ask for, as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from tape_pe.bench import decoders, flops, layers, ops, storage
from tape_pe.bench.check import measure_targets
from tape_pe.bench.lines import make_cost
from tape_pe.bench.memory import Job, peak_memory
from tape_pe.bench.ops import Calls
from tape_pe.bench.options import BenchOptions, Shape
from tape_pe.bench.targets import Figure, Verdict, verdicts
from tape_pe.bench.timing import Timings, interleave
from tape_pe.bench.variants import BASELINE, Variant, variants
from tape_pe.results import Cost, append_line

SECONDS = 0.3
TRAINING = ("forward", "forward+backward")
_OP_SIZES = ("length", "batch_size", "heads", "kv_heads", "head_dim", "dtype")
_LAYER_SIZES = (*_OP_SIZES, "intermediate_size", "position_size")
_MODEL_SIZES = (*_LAYER_SIZES, "layers", "vocab_size")


class Comparison(NamedTuple):
    """Something that several variants do.

    Attributes:
        level: `"op"`, `"layer"` or `"model"`.
        operation: `"rotation"`, `"attention"`, `"update"`, `"layer"` or `"model"`.
        phase: see `BenchOptions`.
        shape: its sizes.
        threads: threads of the CPU.
        sizes: names of the sizes that it depends on.
        build: makes the calls.
    """

    level: str
    operation: str
    phase: str
    shape: Shape
    threads: int
    sizes: Sequence[str]
    build: Callable[[], Calls]

    @property
    def settings(self) -> dict[str, Any]:
        """For its lines."""
        what = {"level": self.level, "operation": self.operation, "phase": self.phase, "threads": self.threads}
        return {**what, **{name: getattr(self.shape, name) for name in self.sizes}}


def comparisons(options: BenchOptions) -> Iterator[Comparison]:
    """All that the options ask for, in the order in which it is measured."""
    device = torch.device(options.device or "cpu")
    chosen = variants(options.encodings, device, options.backends)
    for threads in options.threads or (torch.get_num_threads(),):
        for shape in options.shapes():
            for level, operation, phases, sizes, build in _OPERATIONS:
                for phase in phases:
                    if level in options.levels and phase in options.phases:
                        call = _builder(build, shape, phase, device, chosen)
                        yield Comparison(level, operation, phase, shape, threads, sizes, call)


def _builder(
    build: Callable[..., Calls], shape: Shape, phase: str, device: torch.device, chosen: Sequence[Variant]
) -> Callable[[], Calls]:
    return lambda: build(shape, phase, device, chosen)


_OPERATIONS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...], Callable[..., Calls]], ...] = (
    ("op", "rotation", TRAINING, _OP_SIZES, lambda shape, phase, device, _: ops.rotation(shape, phase, device)),
    ("op", "attention", (*TRAINING, "decode"), _OP_SIZES, ops.attention),
    (
        "op",
        "update",
        (*TRAINING, "decode"),
        (*_OP_SIZES, "position_size"),
        lambda shape, phase, device, _: ops.update(shape, phase, device),
    ),
    ("layer", "layer", (*TRAINING, "prefill", "decode"), _LAYER_SIZES, layers.layer),
    ("model", "model", (*TRAINING, "step", "prefill", "decode"), _MODEL_SIZES, decoders.decoder),
    ("model", "model", ("generate",), (*_MODEL_SIZES, "new_tokens"), decoders.decoder),
)


def run_bench(options: BenchOptions, output: Path | None = None, *, progress: bool = False) -> list[Cost]:
    """Measures what the options ask for.

    Args:
        options: what to measure.
        output: file to add each line to as soon as it is measured.
        progress: whether to show a progress bar.

    Returns:
        The lines, counts first, then times, then peaks of memory.
    """
    lines = []
    wanted = list(comparisons(options))
    for cost in _counts(options):
        lines.append(_keep(cost, output))
    for comparison in tqdm(wanted, desc="bench", unit="comparison", disable=None if progress else True):
        for cost in time_comparison(comparison, options):
            lines.append(_keep(cost, output))
    for cost in _memory(options):
        lines.append(_keep(cost, output))
    return lines


def run_check(
    options: BenchOptions, output: Path | None = None, show: Callable[[Verdict], None] = lambda verdict: None
) -> list[Verdict]:
    """Measures all targets.

    Args:
        options: from `check_options`.
        output: file to add each line to as soon as it is measured.
        show: called with every verdict as soon as it is known.
    """
    figures: dict[str, Figure] = {}
    for name, figure in measure_targets(options):
        figures[name] = figure
        verdict = next(one for one in verdicts(figures) if one.target.name == name)
        _keep(target_cost(verdict, figure, options), output)
        show(verdict)
    return verdicts(figures)


def time_comparison(comparison: Comparison, options: BenchOptions) -> list[Cost]:
    """A line for each variant."""
    timings = interleave(
        comparison.build(),
        device=options.device or "cpu",
        threads=comparison.threads,
        seconds=options.seconds or SECONDS,
        rounds=options.rounds,
        clock=options.clock,
        seed=options.seed,
    )
    baseline = baseline_of(timings)
    lines = []
    for name in timings.seconds:
        metrics = {
            "seconds": timings.time(name)._asdict(),
            "ratio": timings.ratio(name, baseline)._asdict(),
            "baseline": baseline,
        }
        settings = {**comparison.settings, "clock": options.clock}
        lines.append(make_cost("time", name, settings, metrics, options.device or "cpu"))
    return lines


def baseline_of(timings: Timings) -> str:
    """The fastest RoPE; of the position update, which RoPE has not, the published einsums, or else the first."""
    ropes = [name for name in timings.seconds if name.partition(" ")[0] == BASELINE]
    if ropes:
        return timings.fastest(ropes)
    return str(ops.EINSUMS) if str(ops.EINSUMS) in timings.seconds else next(iter(timings.seconds))


def target_cost(verdict: Verdict, figure: Figure, options: BenchOptions) -> Cost:
    """The line of a target."""
    settings = {"threads": options.threads[0], "clock": options.clock, "limit": verdict.target.limit}
    metrics = {
        **figure.value._asdict(),
        "allowance": figure.allowance,
        "passed": verdict.passed,
        "note": figure.note,
        "details": dict(figure.details),
    }
    return make_cost("target", verdict.target.name, settings, metrics, "cpu")


def _counts(options: BenchOptions) -> Iterator[Cost]:
    """Operations, parameters, saved tensors and caches; none of them depends on threads."""
    device = torch.device(options.device or "cpu")
    chosen = variants(options.encodings, device, options.backends)
    names = list(dict.fromkeys(variant.encoding for variant in chosen))
    for shape in options.shapes():
        sizes = {name: value for name, value in asdict(shape).items() if name in _MODEL_SIZES}
        for name in names:
            yield make_cost("count", name, sizes, flops.count(shape, name)._asdict(), str(device))
            if shape.length == options.lengths[0]:
                cached = storage.cached_bytes(replace(shape, length=_CACHED_TOKENS, layers=3), name)
                metrics = {"bytes_per_token": cached[1], "layers": cached}
                few = {"length": _CACHED_TOKENS, "layers": 3}
                yield make_cost("cache", name, {**sizes, **few}, metrics, str(device))
        if "layer" in options.levels:
            for variant in chosen:
                found = {"bytes": storage.saved_by_layer(shape, variant, device)}
                settings = {name: sizes[name] for name in _LAYER_SIZES}
                yield make_cost("saved", str(variant), settings, found, str(device))


_CACHED_TOKENS = 64


def _memory(options: BenchOptions) -> Iterator[Cost]:
    """Peaks of a model's forward and backward pass, on the backend that is chosen for its device."""
    device = torch.device(options.device or "cpu")
    threads = (options.threads or (torch.get_num_threads(),))[0]
    by_encoding = {variant.encoding: variant for variant in reversed(variants(options.encodings, device))}
    if "model" not in options.levels or "forward+backward" not in options.phases:
        return
    jobs = [
        Job(replace(shape, length=length), "forward+backward", variant, str(device), threads)
        for shape in options.shapes()
        if shape.length == options.lengths[0]
        for length in options.memory_lengths
        for variant in reversed(by_encoding.values())
    ]
    for job, peak in zip(jobs, peak_memory(jobs), strict=True):
        sizes = {name: getattr(job.shape, name) for name in _MODEL_SIZES}
        yield make_cost("memory", str(job.variant), {**sizes, "phase": job.phase}, {"bytes": peak}, str(device))


def _keep(cost: Cost, output: Path | None) -> Cost:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        append_line(output, cost)
    return cost


def verdict_line(verdict: Verdict) -> str:
    """One target for a terminal, as soon as it is known."""
    figure = verdict.figure
    value = "not measured" if figure is None else f"{figure.value.median:.{verdict.target.digits}f}"
    return f"{verdict.word:>4}  {verdict.target.what}: {value} ({verdict.bound})"
