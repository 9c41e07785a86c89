"""Peak memory of attention, each measurement in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tape_pe

# Prints how many MiB forward and backward add at their peak. One process imports torch, and a fork of it measures each
# case: VmHWM starts at what a fork holds then (ru_maxrss starts at the peak of the process that spawned it).
SCRIPT = """
import json, multiprocessing, sys, torch
from tape_pe.ops import positional_attention

def high_water_mark():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def solve(case):
    heads, tokens, backend = case
    torch.set_num_threads(1)
    for n in (16, tokens):
        query, key, value, state = (torch.randn(1, heads, n, 64, requires_grad=True) for _ in range(4))
        before = high_water_mark()
        result = positional_attention(query, key, value, state, backend=backend)
        (result.output.sum() + result.averaged_state.sum()).backward()
    return (high_water_mark() - before) / 1024

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(solve, json.loads(sys.argv[1]), chunksize=1)))
"""


def peaks(*cases: tuple[int, int, str | None]) -> list[float]:
    """Of cases (heads, tokens, backend)."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        env={"PYTHONPATH": str(Path(tape_pe.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a Linux process")
def test_default_path_builds_no_square_buffer() -> None:
    """Twice the length takes about twice the memory, and four heads a fifth of what dense attention takes for two."""
    short, long, dense = peaks((4, 2048, None), (4, 4096, None), (2, 4096, "reference"))
    assert 4 * 4096 * 64 * 4 / 2**20 < long <= 2.2 * short
    assert 5 * long < dense
