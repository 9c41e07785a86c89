"""Runs Python source in several processes that train together on CPUs, as a launcher would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def run(source: str, processes: int = 1, environment: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    """Exit code and output of each process; one that outlives another's failure by a minute is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    shared = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    children = []
    for rank in range(processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(processes)}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", source],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**shared, **(ranks if processes > 1 else {}), **(addresses if processes > 1 else {})},
            )
        )
    results = []
    for child in children:
        try:
            output, _ = child.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
        results.append((child.returncode, output))
    return results
