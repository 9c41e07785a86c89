"""Peak memory, each measurement in a process of its own: what one frees, another one would reuse unseen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tape_pe
from tape_pe.bench.decoders import decoder
from tape_pe.bench.options import Shape
from tape_pe.bench.variants import Variant

_WARM_UP = 32  # tokens
# glibc keeps large blocks that were freed unless every one is mapped on its own; what it keeps would hide a peak.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Job:
    """One measurement: a phase of the level `model`."""

    shape: Shape
    phase: str
    variant: Variant
    device: str
    threads: int


def peak_memory(jobs: Sequence[Job]) -> list[int]:
    """Bytes that each job needs at its peak, above what its process holds before: weights and inputs.

    Raises:
        RuntimeError: a process failed; the message has the end of what it wrote.
    """
    on_cpu = all(job.device == "cpu" for job in jobs)
    workers = min(2, os.cpu_count() or 1) if on_cpu else 1
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(_in_new_process, jobs))


def _in_new_process(job: Job) -> int:
    code = "from tape_pe.bench.memory import child; child()"
    places = [str(Path(tape_pe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **_ALLOCATOR, "PYTHONPATH": os.pathsep.join(place for place in places if place)}
    process = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(asdict(job)), env=environment, capture_output=True, text=True
    )
    if process.returncode:
        end = (process.stderr.strip().splitlines() or ["nothing was written"])[-1]
        raise RuntimeError(f"measuring {job.phase} of {job.variant} at {job.shape.length} tokens failed: {end}")
    return int(process.stdout.splitlines()[-1])


def child() -> None:
    """Reads a job, runs it and prints its peak."""
    values = json.load(sys.stdin)
    job = Job(
        Shape(**values["shape"]), values["phase"], Variant(*values["variant"]), values["device"], values["threads"]
    )
    print(measure(job))


def measure(job: Job) -> int:
    """Bytes that a call needs in this process, above what it holds before."""
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    # The first call of anything loads libraries; with a few tokens it does no more than that.
    few = replace(job.shape, length=_WARM_UP)
    (warm_up,) = decoder(few, job.phase, device, [job.variant]).values()
    warm_up()
    del warm_up
    (call,) = decoder(job.shape, job.phase, device, [job.variant]).values()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = _reset_peak()
    call()
    return _peak() - before


def _reset_peak() -> int:
    """Forgets the peak so far where the system can, and returns the memory that the process holds, in bytes."""
    # Where the system refuses, the new peak is measured from the one so far, which can only make it look smaller.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    """The largest memory that this process has held, in bytes.

    On Linux not by `getrusage`, whose peak a process inherits from the one that started it.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"))):
        return 1024 * int(found[1])
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
