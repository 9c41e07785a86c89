"""Writes that an interruption cannot leave half done: to a temporary name first, renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a UTF-8 text file."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Writes or replaces a JSON file.

    Raises:
        ValueError: `values` hold a number that is not finite.
    """
    write_text(path, json.dumps(values, allow_nan=False, indent=1))


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder inside `parent`, to move things from when they are complete; removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_staging_folders(parent: Path) -> None:
    """Removes what killed processes left of `staging_folder`."""
    for staging in parent.glob(".partial-*"):
        shutil.rmtree(staging, ignore_errors=True)
