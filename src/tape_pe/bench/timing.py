"""Interleaved timing: variants take turns in rounds, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import timer
from torch.utils.benchmark.utils.common import set_torch_threads

Call = Callable[[], Any]
SHORTEST = 0.005  # seconds; shorter calls are repeated, so that reading the clock does not count
LONG = 0.3  # seconds; one call of that length warms up as well as two


class Spread(NamedTuple):
    """A median with its quartiles.

    Attributes:
        median: the median.
        low: first quartile.
        high: third quartile.
        values: number of values.
    """

    median: float
    low: float
    high: float
    values: int


def spread(values: Iterable[float]) -> Spread:
    """Median and quartiles of at least one value."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return Spread(ordered[0], ordered[0], ordered[0], 1)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(median, low, high, len(ordered))


class Timings(NamedTuple):
    """Seconds of one call, a number for each round, by variant."""

    seconds: Mapping[str, Sequence[float]]

    def time(self, variant: str) -> Spread:
        """How long one call takes, in seconds."""
        return spread(self.seconds[variant])

    def fastest(self, variants: Iterable[str]) -> str:
        """The variant with the smallest median."""
        return min(variants, key=lambda variant: self.time(variant).median)

    def ratio(self, variant: str, baseline: str) -> Spread:
        """How much longer `variant` takes than `baseline`, computed in each round: what slows a round, slows both."""
        pairs = zip(self.seconds[variant], self.seconds[baseline], strict=True)
        return spread(one / other for one, other in pairs)


def interleave(
    calls: Mapping[str, Call],
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
    seconds: float = 1.0,
    rounds: int = 5,
    clock: str = "wall",
    seed: int = 0,
) -> Timings:
    """Times several calls in rounds, after warming them up: each once in a round, in an order that is drawn anew.

    Args:
        calls: what to time, by variant.
        device: where they run.
        threads: threads of the CPU to use.
        seconds: time to spend in the rounds, over all variants.
        rounds: least number of rounds, however long they take.
        clock: `"wall"`, or `"cpu"` for the time of this process.
        seed: of the orders.

    Returns:
        Seconds of one call, for each round and variant.
    """
    measure = _timer(torch.device(device), clock)
    draw = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in calls}
    collects = gc.isenabled()
    with set_torch_threads(threads):
        repeats = {}
        for name, call in calls.items():
            took = measure(call, 1)
            if took < LONG:
                took = measure(call, 1)
            repeats[name] = max(1, math.ceil(SHORTEST / max(took, 1e-7)))
        gc.disable()
        try:
            started = time.perf_counter()
            while len(next(iter(found.values()))) < rounds or time.perf_counter() - started < seconds:
                for name in draw.sample(list(calls), len(calls)):
                    found[name].append(measure(calls[name], repeats[name]))
        finally:
            if collects:
                gc.enable()
    return Timings(found)


def clock_of(name: str) -> Callable[[], float]:
    """The clock `"wall"`, which waits for accelerators, or `"cpu"`, the time that this process had the CPU."""
    return time.process_time if name == "cpu" else timer


def _timer(device: torch.device, clock: str) -> Callable[[Call, int], float]:
    """A function of a call and a number of repetitions that returns the seconds of one."""
    if device.type == "cuda":
        return _cuda_seconds
    read = clock_of(clock)

    def measure(call: Call, repeats: int) -> float:
        started = read()
        for _ in range(repeats):
            call()
        return (read() - started) / repeats

    return measure


def _cuda_seconds(call: Call, repeats: int) -> float:
    """Seconds between two events of the GPU, which do not count the time to launch the first kernel."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    for _ in range(repeats):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1000 / repeats
