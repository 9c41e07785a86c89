"""Figures that were not measured, for what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tape_pe.bench.targets import TARGETS, Figure
from tape_pe.bench.timing import Spread
from tape_pe.results import Cost


@pytest.fixture
def make_figures() -> Callable[..., dict[str, Figure]]:
    """Figures that meet all targets by a tenth; keywords override their medians."""

    def make(**medians: float) -> dict[str, Figure]:
        figures = {}
        for target in TARGETS:
            limit = 1.0 if target.limit is None else target.limit
            median = medians.get(target.name, limit * (1.1 if target.at_least else 0.9))
            figures[target.name] = Figure(Spread(median, median - 0.05, median + 0.05, 9))
        return figures

    return make


@pytest.fixture
def make_time() -> Callable[..., Cost]:
    """A line of a time."""

    def make(name: str, length: int, seconds: float, ratio: float = 1.0, **settings: Any) -> Cost:
        what = {"level": "layer", "operation": "layer", "phase": "forward", "threads": 1, "length": length, "heads": 2}
        metrics = {
            "seconds": Spread(seconds, 0.9 * seconds, 1.1 * seconds, 5)._asdict(),
            "ratio": Spread(ratio, ratio - 0.1, ratio + 0.1, 5)._asdict(),
            "baseline": "rope (sdpa)",
        }
        machine = {"device": "cpu", "name": "Some CPU", "cores": 2}
        return Cost("time", name, {**what, **settings}, "a" * 40 + "+dirty", {"torch": "2.x"}, machine, metrics)

    return make
