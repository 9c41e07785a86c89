"""Peak memory of attention, each measurement in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tape_pe

# Prints how many MiB forward and backward add at their peak. VmHWM and not ru_maxrss: the latter starts at what the
# process that spawned this one had.
SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
from tape_pe.ops import positional_attention

def high_water_mark():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

heads, tokens, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None

def solve(tokens):
    query, key, value, state = (torch.randn(1, heads, tokens, 64, requires_grad=True) for _ in range(4))
    before = high_water_mark()
    result = positional_attention(query, key, value, state, backend=backend)
    (result.output.sum() + result.averaged_state.sum()).backward()
    return (high_water_mark() - before) / 1024

solve(16)
print(solve(tokens))
"""


def peak(heads: int, tokens: int, backend: str = "") -> float:
    source = str(Path(tape_pe.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(heads), str(tokens), backend],
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout)


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a Linux process")


def test_default_path_builds_no_square_buffer() -> None:
    """Twice the length takes about twice the memory, and twelve heads a fifth of what dense attention takes for three."""
    short, long = peak(12, 2048), peak(12, 4096)
    assert long <= 2.2 * short
    assert 5 * long < peak(3, 4096, "reference")
