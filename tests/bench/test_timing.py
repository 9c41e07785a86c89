"""Interleaved timing: who takes turns when, and what is made of the times."""

import time

import pytest
import torch

from tape_pe.bench.check import growth
from tape_pe.bench.run import baseline_of
from tape_pe.bench.timing import Timings, interleave, spread
from tape_pe.bench.variants import Variant, variants


def test_every_round_has_every_variant_once_in_changing_order():
    seen = []

    def call(name):
        return lambda: (seen.append(name), time.sleep(0.006))

    names = ["a", "b", "c"]
    timings = interleave({name: call(name) for name in names}, seconds=0.01, rounds=8)
    warm_up = len(seen) - 24
    assert seen[:warm_up] == ["a", "a", "b", "b", "c", "c"]
    rounds = [tuple(seen[start : start + 3]) for start in range(warm_up, len(seen), 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len(set(rounds)) > 1
    assert all(len(values) == 8 for values in timings.seconds.values())
    assert all(0.006 <= value < 0.1 for values in timings.seconds.values() for value in values)


def test_short_calls_are_repeated_and_threads_are_set_and_put_back():
    before, calls, threads = torch.get_num_threads(), [], set()

    def call():
        calls.append(1)
        threads.add(torch.get_num_threads())

    timings = interleave({"a": call}, threads=before + 1, seconds=0.001, rounds=2)
    assert len(calls) > 20
    assert threads == {before + 1}
    assert torch.get_num_threads() == before
    assert timings.time("a").median < 0.001


def test_rounds_go_on_until_the_time_is_up():
    started = time.perf_counter()
    timings = interleave({"a": lambda: time.sleep(0.006)}, seconds=0.1, rounds=1)
    assert time.perf_counter() - started >= 0.1
    assert len(timings.seconds["a"]) > 1


def test_the_cpu_clock_does_not_count_sleep():
    timings = interleave({"a": lambda: time.sleep(0.001)}, clock="cpu", seconds=0.01, rounds=2)
    assert timings.time("a").median < 0.0005


def test_median_and_quartiles():
    assert spread([5, 1, 3, 2, 4]) == (3, 2, 4, 5)
    assert spread([7.0]) == (7.0, 7.0, 7.0, 1)


def test_ratios_are_paired_within_rounds():
    """The machine is twice as slow in every second round, for both."""
    timings = Timings({"a": [1.0, 2.0, 1.0, 2.0], "b": [1.5, 3.0, 1.5, 3.0]})
    assert timings.ratio("b", "a") == (1.5, 1.5, 1.5, 4)


def test_the_baseline_is_the_faster_rope():
    slow_sdpa = {"rope (blockwise)": [1.0, 1.1, 1.2], "rope (sdpa)": [1.3, 0.1, 1.4], "tape (blockwise)": [0.5] * 3}
    assert baseline_of(Timings(slow_sdpa)) == "rope (blockwise)"
    slow_blockwise = {**slow_sdpa, "rope (sdpa)": [0.9, 1.0, 1.1]}
    assert baseline_of(Timings(slow_blockwise)) == "rope (sdpa)"
    assert baseline_of(Timings({"tape": [1.0], "einsums": [2.0]})) == "einsums"


def test_rope_always_runs_and_on_sdpa_too():
    cpu = torch.device("cpu")
    assert variants(["tape"], cpu) == [
        Variant("rope", "blockwise"),
        Variant("rope", "sdpa"),
        Variant("tape", "blockwise"),
    ]
    names = [str(variant) for variant in variants(["tape", "nope"], cpu, ["sdpa"])]
    assert names[2:] == ["tape (blockwise)", "tape (sdpa)", "nope (blockwise)", "nope (sdpa)"]


def test_growth_is_in_units_of_the_baseline_and_leaves_out_the_prompt():
    baseline = [9.0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert growth([99.0, *[2 * one for one in baseline[1:]]], baseline) == [1.0, 1.0]
    assert growth([0.0, 1, 1, 1, 1, 2, 2, 4, 4], baseline) == [2.0, 2.0]


def test_a_call_that_fails_leaves_collection_on():
    import gc

    calls = iter([None, None, None])
    with pytest.raises(StopIteration):
        interleave({"a": lambda: (time.sleep(0.006), next(calls))}, rounds=5)
    assert gc.isenabled()
