"""What the modules of the `tape` command share."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

DTYPES = ("float32", "bfloat16", "float16", "float64")


class UsageError(Exception):
    """The command line or a file named on it cannot be used; the message says what is wrong with what."""


class Command(NamedTuple):
    """One command: its help line, the function that adds its arguments, and the function that runs it."""

    help: str
    add_arguments: Callable[[ArgumentParser, list[str]], None]
    run: Callable[[Namespace], int]


def refusing(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls `function`; its complaints about input become a `UsageError`."""
    try:
        return function(*arguments, **options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def comma_separated(kind: type) -> Any:
    """A type of arguments such as `1024,2048`; `[1024, 2048]`, as in YAML, is understood as well."""

    def parse(text: str | list) -> list:
        words = text if isinstance(text, list) else re.split(r"[\s,]+", text.strip("[] "))
        return [kind(word) for word in words if word]

    parse.__name__ = parse.__qualname__ = f"comma-separated {kind.__name__}s"
    return parse


def quiet_loading() -> None:
    """Hides the progress bars of reading and writing weights; those of training and scoring stay."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows warnings as one line each, without the code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"tape: warning: {message}", file=sys.stderr)
        yield
