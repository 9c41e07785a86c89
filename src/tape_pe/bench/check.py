"""`tape bench --check`: measures what the targets are about."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.benchmark.utils.common import set_torch_threads

from tape_pe.bench import decoders, flops, layers, ops, storage
from tape_pe.bench.memory import Job, peak_memory
from tape_pe.bench.options import PUBLISHED, BenchOptions, Shape
from tape_pe.bench.targets import Figure
from tape_pe.bench.timing import Call, Spread, Timings, clock_of, interleave, spread
from tape_pe.bench.variants import BASELINE, Variant, forced_backend, variants

SHAPE = Shape()
STEP = replace(PUBLISHED, layers=2)
GENERATION = Shape(layers=4, new_tokens=512)
MEMORY = Shape(layers=3, heads=4, kv_heads=4, intermediate_size=1024, position_size=16)
MEMORY_LENGTHS = (4096, 8192)
SECONDS = 4.0
ROUNDS = 15
STEP_ROUNDS, GENERATION_PASSES = 4, 2  # a step and a generation take seconds
PHASES = {"forward": "forward", "both": "forward+backward"}

Measured = Iterator[tuple[str, Figure]]


def check_options(options: BenchOptions) -> BenchOptions:
    """The options to check the targets with.

    Raises:
        ValueError: an option that a target fixes, or a device that the targets are not about.
    """
    free = ("threads", "clock", "device", "seed", "seconds")
    defaults = BenchOptions(device=options.device).to_dict()
    for name, value in options.to_dict().items():
        if name not in free and value != defaults[name]:
            raise ValueError(f"{name}={value}: the targets have sizes of their own; --check takes {', '.join(free)}")
    if torch.device(options.device or "cpu").type != "cpu":
        raise ValueError(f"device={options.device!r}: the targets are those of a CPU")
    if len(options.threads) > 1:
        raise ValueError(f"threads={options.threads}: the targets are checked with one number of threads")
    return replace(options, threads=options.threads or (1,), seconds=options.seconds or SECONDS)


def measure_targets(options: BenchOptions) -> Measured:
    """The figure of every target, by its name, one after the other.

    Args:
        options: from `check_options`.
    """
    bench = _Bench(options)
    for part in (_counted, bench.attention, bench.layer, bench.update, bench.decode, bench.step, bench.generation):
        yield from part()
    yield from bench.memory()


def _exact(value: float, note: str = "", details: Mapping[str, Any] | None = None) -> Figure:
    return Figure(Spread(value, value, value, 1), note, details=details or {})


def _counted() -> Measured:
    """What is the same on every machine."""
    rope, tape = (flops.count(PUBLISHED, name) for name in (BASELINE, "tape"))
    note = f"{tape.forward / 1e9:.2f} G to {rope.forward / 1e9:.2f} G"
    yield "flops", _exact(tape.forward / rope.forward, note, {"tape": tape.forward, "rope": rope.forward})
    yield "parameters", _exact((tape.parameters - rope.parameters) / 1e6)
    cpu = torch.device("cpu")
    saved = {str(variant): storage.saved_by_layer(SHAPE, variant, cpu) for variant in variants(["tape"], cpu)}
    baseline = min(size for name, size in saved.items() if name.startswith(BASELINE))
    yield "saved", _exact(next(reversed(saved.values())) / baseline, details=saved)
    cached = {name: storage.cached_bytes(replace(PUBLISHED, length=64), name) for name in (BASELINE, "tape")}
    most = max(one / other for one, other in zip(cached["tape"], cached[BASELINE], strict=True))
    yield "cache", _exact(sum(cached["tape"]) / sum(cached[BASELINE]), f"{most:.2f} in a middle layer", cached)


class _Bench:
    """The targets that depend on the machine."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.device = torch.device("cpu")
        self.threads = options.threads[0]
        self.variants = variants(["tape"], self.device)
        self.tape = str(self.variants[-1])
        self.layer_seconds: dict[str, float] = {}

    def interleaved(self, calls: Mapping[str, Call], rounds: int = ROUNDS) -> Timings:
        options = self.options
        assert options.seconds is not None
        how: dict[str, Any] = {"threads": self.threads, "clock": options.clock, "seed": options.seed}
        return interleave(calls, seconds=options.seconds, rounds=rounds, **how)

    def baseline(self, timings: Timings) -> str:
        """RoPE on the faster of its backends."""
        return timings.fastest(str(variant) for variant in self.variants if variant.encoding == BASELINE)

    def against_rope(self, timings: Timings) -> Figure:
        baseline = self.baseline(timings)
        details = {name: timings.time(name)._asdict() for name in timings.seconds}
        return Figure(timings.ratio(self.tape, baseline), f"to {baseline}", details=details)

    def attention(self) -> Measured:
        for length in (256, 512, 1024):
            for name, phase in PHASES.items():
                calls = ops.attention(replace(SHAPE, length=length), phase, self.device, self.variants)
                yield f"attention_{name}_{length}", self.against_rope(self.interleaved(calls))

    def layer(self) -> Measured:
        for name, phase in PHASES.items():
            timings = self.interleaved(layers.layer(SHAPE, phase, self.device, self.variants))
            self.layer_seconds = {variant: timings.time(variant).median for variant in timings.seconds}
            yield f"layer_{name}", self.against_rope(timings)

    def update(self) -> Measured:
        for name, phase in PHASES.items():
            timings = self.interleaved(ops.update(SHAPE, phase, self.device))
            details = {variant: timings.time(variant)._asdict() for variant in timings.seconds}
            yield f"update_{name}", Figure(timings.ratio(str(ops.EINSUMS), str(ops.TAPE)), details=details)

    def decode(self) -> Measured:
        for prefix, level in (("", ops.attention), ("layer_", layers.layer)):
            for length in (4096, 16384):
                calls = level(replace(SHAPE, length=length), "decode", self.device, self.variants)
                yield f"{prefix}decode_{length}", self.against_rope(self.interleaved(calls))

    def step(self) -> Measured:
        calls = decoders.decoder(STEP, "step", self.device, self.variants)
        timings = self.interleaved(calls, STEP_ROUNDS)
        yield "step", self.against_rope(timings)
        baseline, more = self.baseline(timings), PUBLISHED.layers - STEP.layers
        whole = {name: timings.time(name).median + more * self.layer_seconds[name] for name in (self.tape, baseline)}
        note = f"not measured: the step above and {more} times the layer's forward+backward"
        yield "step_12", _exact(whole[self.tape] / whole[baseline], note, whole)

    def generation(self) -> Measured:
        totals, growths, passes = [], [], []
        for number in range(GENERATION_PASSES):
            how: dict[str, Any] = {"threads": self.threads, "clock": self.options.clock}
            seconds = generation_seconds(GENERATION, self.variants, seed=self.options.seed + number, **how)
            baseline = min(
                (str(variant) for variant in self.variants if variant.encoding == BASELINE),
                key=lambda name: sum(seconds[name]),
            )
            totals.append(sum(seconds[self.tape]) / sum(seconds[baseline]))
            growths += growth(seconds[self.tape], seconds[baseline])
            passes.append({name: sum(values) for name, values in seconds.items()})
        yield "generate_total", Figure(spread(totals), "the prompt included", details={"seconds": passes})
        found = spread(growths)
        note = "last quarter of the tokens to the first, paired; may exceed the limit by the distance to its quartile"
        yield "generate_growth", Figure(found, note, allowance=found.median - found.low)

    def memory(self) -> Measured:
        variant = self.variants[-1]
        jobs = [
            Job(replace(MEMORY, length=length), phase, variant, "cpu", self.threads)
            for phase in PHASES.values()
            for length in reversed(MEMORY_LENGTHS)
        ]
        peaks = peak_memory(jobs)
        for index, name in enumerate(PHASES):
            longer, shorter = peaks[2 * index : 2 * index + 2]
            note = f"{longer / 2**20:,.0f} MiB to {shorter / 2**20:,.0f} MiB"
            details = dict(zip(map(str, reversed(MEMORY_LENGTHS)), (longer, shorter), strict=True))
            yield f"memory_{name}", _exact(longer / shorter, note, details)


def generation_seconds(
    shape: Shape, chosen: Sequence[Variant], *, threads: int = 1, clock: str = "wall", seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of each step of generation by variant, the first of which reads the prompt.

    The variants take turns at every token, in an order that is drawn anew.
    """
    device, draw = torch.device("cpu"), random.Random(seed)
    read = clock_of(clock)
    models = {name: decoders.make_model(shape, name, device) for name in {variant.encoding for variant in chosen}}
    prompt = decoders.make_tokens(shape, device)
    with set_torch_threads(threads):
        running = {variant: decoders.Generation(models[variant.encoding], prompt) for variant in chosen}
        for variant in chosen:  # warms up, on a few tokens
            with forced_backend(variant.backend):
                warm = decoders.Generation(models[variant.encoding], prompt[:, :32])
                warm.step()
                warm.step()
        seconds: dict[str, list[float]] = {str(variant): [] for variant in chosen}
        for _ in range(shape.new_tokens):
            for variant in draw.sample(chosen, len(chosen)):
                with forced_backend(variant.backend):
                    started = read()
                    running[variant].step()
                    seconds[str(variant)].append(read() - started)
    return seconds


def growth(seconds: list[float], baseline: list[float]) -> list[float]:
    """How a time per token, in units of the baseline's at the same token, grows from the first to the last quarter.

    Args:
        seconds: of each step; the first one, which reads the prompt, does not count.
        baseline: likewise.

    Returns:
        A number for each pair of tokens, one of each quarter.
    """
    ratios = [one / other for one, other in zip(seconds[1:], baseline[1:], strict=True)]
    quarter = len(ratios) // 4
    return [last / first for first, last in zip(ratios[:quarter], ratios[-quarter:], strict=True)]
