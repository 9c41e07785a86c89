"""The Triton kernels compiled for GPUs that are not here: none spills registers or needs too much shared memory.

The launchers run with a driver that knows its target and nothing else, so that what is compiled is what they would
launch: arguments, alignments and tiles. By default one dtype and mask for each architecture and width; the others have
the marker `compile_all` (ten minutes or more): `make test-triton TRITON_TESTS=''` runs them too.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: `make test-triton` has it")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from tape_pe.ops.backends.triton import launch, tiles  # noqa: E402

ARCHITECTURES = (80, 90)
OTHERS = (86, 89, 100, 120)
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have, by compute capability."""
MAX_REGISTERS = 255


class Usage(NamedTuple):
    """What a compiled kernel takes: registers of a thread, bytes of its stack, bytes of shared memory."""

    kernel: str
    registers: int
    stack: int
    shared: int
    ptx: str


class NoGPU:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class Compiler:
    """Compiles what the launchers would launch."""

    def __init__(self, architecture: int, folder: Path) -> None:
        self.cubin = folder / "kernel.cubin"
        self.usages: list[Usage] = []

    def __call__(self, kernel, grid, *arguments, **options) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        self.cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(self.cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
        assert found, report
        registers, stack, static = map(int, found.groups())
        shared = max(static, compiled.metadata.shared)
        self.usages.append(Usage(kernel.__name__, registers, stack, shared, compiled.asm["ptx"]))


@pytest.fixture
def compile_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs forward, backward and decoding without a GPU and returns what the kernels take."""

    def run(
        architecture: int,
        dtype: torch.dtype,
        width: int,
        *,
        segments: bool = True,
        state: bool = True,
        causal: bool = True,
        decode_rows: int | None = None,
    ) -> list[Usage]:
        compiler = Compiler(architecture, tmp_path)
        monkeypatch.setattr(driver, "_active", NoGPU(architecture))
        monkeypatch.setattr(launch, "launch", compiler)
        monkeypatch.setattr(launch, "capability", lambda device: divmod(architecture, 10))
        key = torch.zeros(2, 2, 256, width, dtype=dtype)
        ids = torch.zeros(2, 256, dtype=torch.int64) if segments else None
        states = key if state else None
        decoding = torch.zeros(2, 4, 1, width, dtype=dtype)
        if decode_rows:
            decoding = torch.zeros(2, decode_rows // 8, 16, width, dtype=dtype)
        else:
            query = torch.zeros(2, 4, 256, width, dtype=dtype)
            outputs = launch.forward(query, key, key, states, ids, causal, 0.1)
            launch.backward(query, query, query, key, key, states, ids, *outputs, causal, 0.1, state)
        launch.forward(decoding, key, key, states, ids, causal, 0.1)
        return compiler.usages

    return run


@pytest.fixture(autouse=True)
def _matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def check(usages: list[Usage], architecture: int, tensor_cores: bool = True) -> None:
    for usage in usages:
        found = str(usage[:4])
        assert usage.registers <= MAX_REGISTERS, found
        assert usage.stack == 0, found
        assert usage.shared <= SHARED_KIB[architecture] * 1024, found
        if tensor_cores and architecture == 90 and usage.kernel in ("forward_kernel", "key_gradient_kernel"):
            assert "wgmma.mma_async" in usage.ptx, found
        if usage.kernel == "forward_kernel" and architecture == 80:
            assert "mma.sync" in usage.ptx or not tensor_cores, found
            assert "ld.global.v4" in usage.ptx or "cp.async.cg.shared.global" in usage.ptx, "16 bytes at a time"


KERNELS = {
    "forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "decode_kernel", "merge_kernel",
    "segment_ranges_kernel",
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128])
def test_bfloat16_with_segments(compile_all, architecture, width) -> None:
    usages = compile_all(architecture, torch.bfloat16, width)
    assert {usage.kernel for usage in usages} == KERNELS
    check(usages, architecture)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", ["plain", "no state", "full", "full with segments"])
def test_half_precision(compile_all, architecture, width, dtype, options) -> None:
    flags = {
        "segments": options.endswith("segments"),
        "state": options != "no state",
        "causal": not options.startswith("full"),
    }
    check(compile_all(architecture, dtype, width, **flags), architecture)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("precision", ["tf32 64", "tf32 128", "ieee 64"])
def test_float32(compile_all, architecture, segments, precision) -> None:
    name, width = precision.split()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    check(compile_all(architecture, torch.float32, int(width), segments=segments), architecture, tensor_cores=False)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("width", [64, 128])
def test_other_architectures(compile_all, architecture, width) -> None:
    check(compile_all(architecture, torch.float16, width), architecture)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [16, 32])
def test_narrow_heads(compile_all, architecture, width) -> None:
    check(compile_all(architecture, torch.float16, width), architecture, tensor_cores=False)


@pytest.mark.compile_all
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rows", tiles.DECODE_ROWS[1:])
def test_decoding_with_many_rows(compile_all, architecture, rows) -> None:
    check(compile_all(architecture, torch.float16, 128, segments=False, decode_rows=rows), architecture)
