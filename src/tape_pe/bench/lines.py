"""Lines of costs: on which machine, from which revision, with which settings."""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tape_pe.results import Cost, git_revision, library_versions


def make_cost(kind: str, name: str, settings: dict[str, Any], metrics: dict[str, Any], device: str) -> Cost:
    """A line of something that was measured now, in this process."""
    revision, versions = _origin()
    return Cost(kind, name, settings, revision, versions, machine(device), metrics)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    kind = torch.device(device)
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else _processor()
    return {"device": kind.type, "name": name, "cores": os.cpu_count()}


@cache
def _origin() -> tuple[str | None, dict[str, str]]:
    return git_revision(), library_versions()


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file() and (found := re.search(r"model name\s*:\s*(.+)", facts.read_text(encoding="utf-8"))):
        return found[1].strip()
    return platform.processor() or platform.machine()
