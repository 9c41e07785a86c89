"""`benchmarks/gpu.py` without a GPU: what it says, a dry run, and what it makes of failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Triton interprets in processes of their own, and only where it is installed.
PATHS = os.pathsep.join([str(FOLDER.parent / "src"), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": PATHS}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu")


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "gpu.py"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu() -> None:
    done = start()
    assert done.returncode == 2
    assert done.stdout == "no CUDA GPU here (--dry_run true walks through the cases on the CPU)\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dry_run(gpu: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "gpu.jsonl"
    done = start("--dry_run", "true", "--repeat_seconds", "0", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = gpu.read(output)
    options = gpu.Options(dry_run=True)
    for variant in gpu.VARIANTS:
        mine = [line for line in lines if line["variant"] == variant]
        assert [line["case"] for line in mine] == [gpu.asdict(case) for case in gpu._cases(options, variant)]
        if variant.endswith("flex"):
            assert all("not available" in line["error"] for line in mine)
        elif variant.endswith("sdpa") or not any("needs the package" in line.get("error", "") for line in mine):
            assert not [line["error"] for line in mine if "error" in line]
            assert all(line["ok"] for line in mine if "ok" in line)
            assert all(line["ms"] > 0 for line in mine if "ms" in line)
    assert "tape flex: ValueError: backend='flex': not available" in done.stdout


@pytest.mark.parametrize("failure", ["crash", "hang", "lost"])
def test_goes_on_after_a_process_that_ended(gpu: ModuleType, tmp_path: Path, monkeypatch, failure: str) -> None:
    """The third case ends its process; the others are done all the same."""
    options = gpu.Options(output=str(tmp_path / "gpu.jsonl"), dry_run=True)
    cases = gpu._cases(options, "tape triton")
    Path(options.output).write_text("")

    def run(command: list[str], timeout: float) -> SimpleNamespace:
        first = int(command[command.index("--first") + 1])
        for number in range(first, len(cases)):
            if number == 2:
                if failure == "hang":
                    raise subprocess.TimeoutExpired(command, timeout)
                if failure == "crash":
                    return SimpleNamespace(returncode=-6)
                line = {"variant": "tape triton", "case": gpu.asdict(cases[2]), "error": "CUDA error", "crashed": True}
                gpu.append_values(Path(options.output), line)
                return SimpleNamespace(returncode=gpu.LOST)
            line = {"variant": "tape triton", "case": gpu.asdict(cases[number]), "ms": 1.0}
            gpu.append_values(Path(options.output), line)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    gpu.supervise(options, "tape triton", 100.0)
    lines = gpu.read(Path(options.output))
    assert [line["case"] for line in lines] == [gpu.asdict(case) for case in cases]
    assert [number for number, line in enumerate(lines) if "error" in line] == [2]
    assert lines[2]["crashed"]
    expected = {"crash": "the process ended with the code -6", "hang": "took too long", "lost": "CUDA error"}
    assert lines[2]["error"] == expected[failure]


def test_what_does_not_fit_the_time_is_marked(gpu: ModuleType, tmp_path: Path) -> None:
    options = gpu.Options(output=str(tmp_path / "gpu.jsonl"), dry_run=True)
    Path(options.output).write_text("")
    gpu.supervise(options, "tape flex", 0.0)
    lines = gpu.read(Path(options.output))
    assert len(lines) == len(gpu._cases(options, "tape flex"))
    assert {line["error"] for line in lines} == {"out of time"}


def test_errors_of_a_case_are_its_finding(gpu: ModuleType, tmp_path: Path, monkeypatch) -> None:
    def run(case: object, *arguments: object) -> dict[str, float]:
        if case.kind == "decode":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return {"ms": 2.0}

    monkeypatch.setattr(gpu, "run", run)
    options = gpu.Options(output=str(tmp_path / "gpu.jsonl"), dry_run=True, variant="rope sdpa")
    assert gpu.work(options) == 0
    lines = gpu.read(Path(options.output))
    assert {line["case"]["kind"]: line.get("error") for line in lines} == {
        "attention": None, "decode": "OutOfMemoryError: CUDA out of memory.", "update": None, "layer": None,
    }  # fmt: skip


def test_a_worker_without_its_device_ends(gpu: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "run", lambda *arguments: {"ms": 1.0})
    monkeypatch.setattr(gpu, "_lost", lambda device: len(gpu.read(output)) == 1)
    output = tmp_path / "gpu.jsonl"
    output.write_text("")
    options = gpu.Options(output=str(output), dry_run=True, variant="rope sdpa", first=3)
    assert gpu.work(options) == gpu.LOST
    assert [line.get("crashed") for line in gpu.read(output)] == [None, True]


def test_report(gpu: ModuleType) -> None:
    def line(variant: str, kind: str, **found: object) -> dict:
        case = gpu.Case(kind, 64)
        return {"variant": variant, "case": json.loads(json.dumps(gpu.asdict(case))), **found}

    lines = [
        line("tape triton", "check", errors={"output": 0.2, "dq": 0.001}, ok=False),
        line("tape sdpa", "check", errors={"output": 0.003}, ok=True),
        line("rope sdpa", "attention", ms=2.0, kernel="FLASH_ATTENTION"),
        line("tape sdpa", "attention", ms=4.2),
        line("tape triton", "attention", ms=2.6),
        line("tape flex", "attention", error="RuntimeError: no"),
    ]
    page = gpu.report(lines, gpu.Options(dry_run=True)).splitlines()
    assert any(row.split() == ["tape", "triton", "-", "-", "-", "2.0e-01", "WRONG"] for row in page)
    assert any(row.split() == ["tape", "sdpa", "-", "-", "-", "3.0e-03"] for row in page)
    row = next(row for row in page if row.startswith("attention"))
    assert row.split() == [
        "attention",
        "64",
        "64",
        "16/16",
        "causal",
        "fwd",
        "2.000",
        "ms",
        "flash",
        "2.10",
        "1.30",
        "failed",
    ]
    assert "tape flex: RuntimeError: no" in page
