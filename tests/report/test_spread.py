"""What seeds say: against figures worked out by hand and tables of Student's t distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tape_pe.report.parts import Column, metric
from tape_pe.report.spread import clearly_best, difference, interval_factor, mean_interval, places, spread

MORE = Column("x", metric("x"))
LESS = Column("x", metric("x"), higher_is_better=False, bounds=(1.0, math.inf))


@pytest.mark.parametrize(("seeds", "factor"), [(2, 12.706), (3, 4.303), (5, 2.776), (30, 2.045)])
def test_factors_are_those_of_printed_tables(seeds, factor):
    assert interval_factor(seeds) == pytest.approx(factor, abs=5e-4)


def test_interval_of_the_mean():
    low, high = mean_interval([1.0, 2.0, 3.0])  # standard error 1 / sqrt(3)
    assert (low, high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)
    assert mean_interval([1.0]) == (None, None)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)


def test_interval_holds_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    ends = [mean_interval(rng.normal(0.4, 0.1, size=3).tolist()) for _ in range(2000)]
    assert np.mean([low <= 0.4 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.02)


def test_spread_keeps_to_what_is_possible():
    one = spread([0.9, 0.1, 0.6], MORE)
    assert one is not None
    assert (one.median, one.worst, one.mean) == (0.6, 0.1, pytest.approx(1.6 / 3))
    assert (one.low, one.high) == (0.0, 1.0)
    assert spread([3.0, 9.0, 5.0], LESS)[2] == 9.0, "the worst perplexity is the largest"
    assert spread([3.0, 9.0, 5.0], LESS).low == 1.0
    assert spread([], MORE) is None


def test_paired_difference_uses_common_seeds_only():
    found = difference({0: 0.5, 1: 0.6, 7: 1.0}, {0: 0.4, 1: 0.4, 2: 0.0})
    assert found is not None
    assert (found.pairs, found.mean) == (2, pytest.approx(0.15))
    assert found.low == pytest.approx(0.15 - 12.7062 * 0.05, abs=1e-4)
    assert not found.is_clear
    assert difference({0: 1.0}, {1: 1.0}) is None
    assert difference({0: 1.0}, {0: 0.5}).is_clear is False, "one pair has no interval"
    assert not difference({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5}).is_clear, "an interval without width is none"
    noise = {seed: 0.3 * (seed % 3) for seed in range(6)}
    paired = difference({seed: value + 0.1 + 0.001 * seed for seed, value in noise.items()}, noise)
    assert paired.is_clear, "what two encodings have in common with a seed falls out"


@pytest.mark.parametrize(("column", "winner"), [(MORE, "b"), (LESS, "a")])
def test_clearly_best_needs_an_interval_apart_from_all_others(column, winner):
    unbounded = Column("x", metric("x"), higher_is_better=column.higher_is_better, bounds=(-math.inf, math.inf))

    def best(**values):
        return clearly_best({label: spread(scores, unbounded) for label, scores in values.items()}, unbounded)

    assert best(a=[1.0, 1.1, 1.2], b=[5.0, 5.1, 5.2]) == winner
    assert best(a=[1.0, 1.1, 1.2], b=[1.1, 1.2, 1.3]) is None, "intervals overlap"
    assert best(a=[1.0, 1.1, 1.2], b=[5.0]) is None, "one seed proves nothing"
    assert best(a=[1.0, 1.0], b=[1.0, 1.0]) is None, "equal ends are no distance"
    assert best(a=[1.0, 1.0], b=[5.0, 5.0]) is None, "equal seeds do not make the next one certain"
    assert best(a=[1.0, 1.1]) is None, "there is nothing to be better than"


def test_ends_of_a_scale():
    assert places([spread([0.4, 0.5], MORE)], MORE) == (0.0, 1.0)
    assert places([spread([4.0, 5.0], LESS), spread([3.0], LESS)], LESS) == (3.0, 5.0)
    assert places([spread([4.0], LESS)], LESS) == (3.5, 4.5)
