"""Templates, and the one way in which all pages are written."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from tape_pe.files import write_text


@cache
def template(name: str) -> jinja2.Template:
    """The template `name` from the folder `templates`; values are escaped, and missing ones are errors."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tape_pe.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")  # keeps the sign with its number
    return environment.get_template(name)


def check_output(output: Path) -> None:
    """Refuses, before any work, a page that could not be written.

    Raises:
        IsADirectoryError: `output` is a folder.
    """
    if output.is_dir():
        raise IsADirectoryError(f"output is a folder: {output}; name the HTML file to write")


def write_page(output: Path, page: str) -> Path:
    """Writes a page, which appears under its name only once it is complete, and returns its path.

    Parent folders are created.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
    return output
