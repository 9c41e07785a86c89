"""Choosing a backend."""

from __future__ import annotations

import pytest
import torch

from tape_pe.ops import backends, positional_attention
from tape_pe.ops.backends import BACKENDS, Backend, describe_backends, select_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPE_BACKEND", raising=False)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that ran."""
    names: list[str] = []

    def spy(backend: Backend) -> Backend:
        def attention(*args: object) -> tuple:
            names.append(backend.name)
            return backend.attention(*args)

        return backend._replace(attention=attention)

    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, spy(backend))
    return names


def test_default_on_cpu_is_blockwise(called: list[str]) -> None:
    x = torch.randn(1, 2, 5, 8)
    positional_attention(x, x, x, x)
    assert called == ["blockwise"]


def test_argument_beats_environment_beats_default(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 5, 8)
    monkeypatch.setenv("TAPE_BACKEND", "reference")
    positional_attention(x, x, x)
    positional_attention(x, x, x, backend="sdpa")
    monkeypatch.setenv("TAPE_BACKEND", "")
    positional_attention(x, x, x)
    assert called == ["reference", "sdpa", "blockwise"]


def test_names_are_keys() -> None:
    assert all(name == backend.name for name, backend in BACKENDS.items())
    assert list(BACKENDS)[-1] == "reference", "the slowest is the last choice"


def test_other_devices_fall_back_to_sdpa() -> None:
    assert select_backend(torch.device("meta")).name == "sdpa"


def test_flex_is_for_cuda_and_has_to_be_asked_for() -> None:
    assert select_backend(torch.device("cuda")).name == "sdpa"
    assert select_backend(torch.device("cuda"), "flex").name == "flex"
    assert {report.name: report.reason for report in describe_backends("cpu")}["flex"] == (
        "runs on cuda, not on cpu, where the compiled flex_attention has no backward pass"
    )


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_unknown_backend(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("TAPE_BACKEND", "abacus")
    name, source = ("abacus", "backend") if by == "argument" else (None, "TAPE_BACKEND")
    with pytest.raises(ValueError, match=f"{source}='abacus': known backends are blockwise, sdpa, flex"):
        select_backend(CPU, name)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_unavailable_backend_says_why(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("TAPE_BACKEND", "blockwise")
    name, source = ("blockwise", "backend") if by == "argument" else (None, "TAPE_BACKEND")
    with pytest.raises(ValueError, match=f"{source}='blockwise': not available, it runs on cpu, not on meta"):
        select_backend(torch.device("meta"), name)


def test_describe_backends() -> None:
    reports = {report.name: report for report in describe_backends("cpu")}
    assert list(reports) == list(BACKENDS)
    assert [name for name, report in reports.items() if report.chosen] == ["blockwise"]
    for name in ("blockwise", "sdpa", "reference"):
        assert reports[name].available
        assert reports[name].reason == BACKENDS[name].description


def test_describe_backends_gives_the_reason_of_those_that_cannot_run() -> None:
    reports = {report.name: report for report in describe_backends(torch.device("meta"))}
    assert not reports["blockwise"].available
    assert reports["blockwise"].reason == "runs on cpu, not on meta"
    assert reports["sdpa"].chosen


def test_describe_backends_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, "reference")
    assert [report.name for report in describe_backends() if report.chosen] == ["reference"]


def test_forward_mode_is_refused_where_it_would_be_zero():
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))

    def output(v: torch.Tensor, backend: str) -> torch.Tensor:
        return positional_attention(query, key, v, backend=backend).output

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: output(v, "blockwise"), (value,), (value,))
    _, tangent = torch.func.jvp(lambda v: output(v, "reference"), (value,), (value,))
    torch.testing.assert_close(tangent, output(value, "reference"))  # linear in the values
