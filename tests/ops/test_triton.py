"""The Triton backend without a GPU: its kernels interpreted, compared with the reference, and when it is available."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tape_pe.ops.backends import select_backend, triton

needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed: `make test-triton` has it"
)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_interpreted() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("TAPE_BACKEND", None)
    tests = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    done = subprocess.run(command, env=environment, cwd=tests.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture
def reason(monkeypatch: pytest.MonkeyPatch):
    """Why it is not available where torch and Triton are as given."""

    def ask(version: str | None, device: str = "cuda", capability: tuple[int, int] | None = (8, 0), hip=None):
        def installed(name: str) -> str:
            if version is None:
                raise triton.importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(triton.importlib.metadata, "version", installed)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        triton._unavailable.cache_clear()
        return triton.unavailable(torch.device(device))

    yield ask
    triton._unavailable.cache_clear()


def test_says_why_it_is_not_available(reason) -> None:
    assert reason(None) == "needs the package triton"
    assert reason("3.2.0") == "is known to work with Triton 3.7, 3.8, 3.9, not with 3.2.0"
    assert reason("3.9.0", "cpu") == "runs on cuda, not on cpu"
    assert reason("3.9.0", hip="6.4") == "is for GPUs of NVIDIA"
    assert reason("3.9.0", capability=None) == "finds no GPU"
    assert reason("3.9.0", capability=(7, 5)) == "needs compute capability 8.0, not 7.5"
    assert reason("3.9.0") is None
    assert reason("3.7.1", capability=(12, 0)) is None


def test_is_not_the_default(reason) -> None:
    assert reason("3.9.0") is None
    assert select_backend(torch.device("cuda")).name == "sdpa"
    assert select_backend(torch.device("cuda"), "triton").name == "triton"
