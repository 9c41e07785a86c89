"""What several seeds say: median, worst seed, mean with its confidence interval, differences between encodings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # scipy.stats has the same, and takes a second to import

from tape_pe.report.parts import Column

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """The scores of several seeds.

    Attributes:
        values: one per seed.
        median: their median.
        worst: the worst of them.
        mean: their mean.
        low: lower end of the confidence interval of the mean; `None` for fewer than two seeds.
        high: its upper end.
    """

    values: Sequence[float]
    median: float
    worst: float
    mean: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """How much more one encoding scores than another with the same seed.

    Attributes:
        pairs: number of seeds that both have.
        mean: mean difference.
        low: lower end of its confidence interval; `None` for fewer than two pairs.
        high: its upper end.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero, and has a width."""
        if self.low is None or self.high is None or self.low == self.high:
            return False
        return self.low > 0 or self.high < 0


def spread(values: Sequence[float], column: Column) -> Spread | None:
    """Summarises the scores of several seeds; `None` where there are none. The interval keeps to `column.bounds`."""
    if not values:
        return None
    low, high = mean_interval(values)
    if low is not None and high is not None:
        low, high = max(low, column.bounds[0]), min(high, column.bounds[1])
    worst = (min if column.higher_is_better else max)(values)
    return Spread(list(values), median(values), worst, mean(values), low, high)


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The confidence interval of the mean by Student's t distribution; `None, None` for fewer than two values.

    Where all values are the same it has no width, which says nothing about further seeds.
    """
    if len(values) < 2:
        return None, None
    half = interval_factor(len(values)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def interval_factor(seeds: int) -> float:
    """How many standard errors the interval reaches to either side."""
    return float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2))


def difference(scores: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """How `scores` by seed differ from those of another encoding; `None` where no seed is in both."""
    seeds = sorted(set(scores) & set(baseline))
    if not seeds:
        return None
    differences = [scores[seed] - baseline[seed] for seed in seeds]
    return Difference(len(seeds), mean(differences), *mean_interval(differences))


def clearly_best(spreads: Mapping[str, Spread], column: Column) -> str | None:
    """The encoding whose interval lies wholly on the better side of the intervals of all others; `None` if none does.

    An encoding without an interval leaves it open, and so does one whose seeds all score the same, if it is this one.
    """
    if len(spreads) < 2:
        return None
    sign = 1 if column.higher_is_better else -1
    ends: dict[str, tuple[float, float]] = {}
    for label, one in spreads.items():
        if one.low is None or one.high is None:
            return None
        ends[label] = (min(sign * one.low, sign * one.high), max(sign * one.low, sign * one.high))
    best = max(ends, key=lambda label: ends[label][0])
    if len(set(spreads[best].values)) == 1:
        return None
    return best if all(ends[best][0] > high for label, (_, high) in ends.items() if label != best) else None


def places(spreads: Sequence[Spread], column: Column) -> tuple[float, float]:
    """The ends of a scale for all of `spreads`: the bounds where these are finite, else their smallest and largest."""
    if all(map(math.isfinite, column.bounds)):
        return column.bounds
    values = np.array([value for one in spreads for value in one.values])
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)
