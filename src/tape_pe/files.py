"""Files that an interruption cannot leave half written: to a temporary name first, renamed when complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout


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


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: it is not YAML, or not UTF-8 text.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML readers take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for number, key in enumerate(keys) if key != "<<" and key in keys[:number]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the latter also of text that is not UTF-8
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for the same out of a folder; the system frees it when the process ends.

    Raises:
        FileExistsError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise FileExistsError(f"{folder} is in use: another process writes to it; wait for it, or end it") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder inside `parent`, to move things from when they are complete; removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(path: Path, complete: Path) -> None:
    """Moves the folder `complete` to `path`, on the same file system; an older folder there goes only if that works."""
    if not path.exists():
        os.replace(complete, path)
        return
    with staging_folder(path.parent) as aside:
        os.replace(path, aside / path.name)
        try:
            os.replace(complete, path)
        except OSError:
            os.replace(aside / path.name, path)
            raise


def remove_staging_folders(parent: Path) -> None:
    """Removes what killed processes left of `staging_folder`."""
    for staging in parent.glob(".partial-*"):
        shutil.rmtree(staging, ignore_errors=True)
