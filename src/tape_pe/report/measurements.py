"""Measurements of language models: tables for the terminal, and the page of passkey retrieval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tape_pe.report import figures
from tape_pe.report.html import check_output, template, write_page
from tape_pe.report.parts import MISSING, Cell, Panel, Picture, Table, duration, percent
from tape_pe.report.tables import plain_text
from tape_pe.results import Measurement

PROTOCOLS = {"exact_match": "exact match", "first_number": "first number"}
_ANY_DEPTH = "any"


def perplexity_table(measured: Sequence[Measurement]) -> str:
    """One row per model and length, as text."""
    rows = []
    for line in measured:
        metrics, length = line.metrics, line.settings["length"]
        numbers = [Cell(f"{length:,}"), Cell(f"{line.settings['stride']:,}"), Cell(f"{metrics['tokens']:,}")]
        scores = [Cell(f"{metrics['nll']:.4f}"), Cell(f"{metrics['perplexity']:.3f}"), Cell(duration(line.seconds))]
        rows.append([Cell(line.model), *numbers, *scores])
    headers = ["Model", "Length", "Stride", "Tokens scored", "Nats per token", "Perplexity", "Time"]
    return plain_text(Table("Perplexity", headers, rows, [False] + [True] * 6))


def passkey_table(measured: Sequence[Measurement]) -> str:
    """One row per model, length and depth, as text."""
    rows = []
    for line in measured:
        scores = [Cell(percent(line.metrics[name])) for name in PROTOCOLS]
        where = [Cell(f"{line.settings['length']:,}"), Cell(_depth(line)), Cell(str(line.settings["seeds"]))]
        rows.append([Cell(line.model), *where, *scores, Cell(duration(line.seconds))])
    headers = ["Model", "Length", "Depth", "Prompts", "Exact match", "First number", "Time"]
    return plain_text(Table("Passkey", headers, rows, [False] + [True] * 6))


def write_passkey_page(output: Path, measured: Sequence[Measurement]) -> Path:
    """Writes one HTML page with heat maps of passkey retrieval, length by depth, and returns its path.

    Args:
        output: the HTML file to write.
        measured: measurements of one or several models.

    Raises:
        ValueError: there are none.
        IsADirectoryError: `output` is a folder.
    """
    check_output(output)
    if not measured:
        raise ValueError("measured is empty: a page needs at least one measurement")
    models: dict[str, list[Measurement]] = {}
    for line in measured:
        models.setdefault(line.model, []).append(line)
    page = template("panels.html.j2").render(
        title="Passkey retrieval of " + ", ".join(models),
        about=f"Prompts of exactly {_several(line.settings['length'] for line in measured)} tokens.",
        reading=_reading(measured),
        panels=[_panel(name, lines) for name, lines in models.items()],
        left_out={},
    )
    return write_page(output, page)


def _reading(measured: Sequence[Measurement]) -> list[str]:
    fewest = min(line.settings["seeds"] for line in measured)
    margin = 100 * 1.96 * math.sqrt(0.25 / fewest)
    return [
        "A number of 1 to 50,000 is hidden in filler text, and the prompt ends with the question for it. Across: the "
        "prompt's length in tokens. Down: where the number is, from 0 (right behind the introduction) to 1 (right "
        f"before the question); {_ANY_DEPTH} means that every prompt draws its own depth.",
        "Exact match: decoding greedily, the model writes the tokens of the number, and nothing that makes it a longer "
        "one. First number: the first run of digits in its first 10 tokens is the number.",
        f"Each cell rests on at least {fewest} prompts, so that a cell near 50 % is uncertain by about {margin:.0f} "
        "points. A grey cell was not measured.",
    ]


def _panel(name: str, lines: Sequence[Measurement]) -> Panel:
    lengths = sorted({line.settings["length"] for line in lines})
    depths = sorted({_depth(line) for line in lines})
    pictures = []
    for metric, title in PROTOCOLS.items():
        found = {(_depth(line), line.settings["length"]): line.metrics[metric] for line in lines}
        grid = [[found.get((depth, length), math.nan) for length in lengths] for depth in depths]
        mean = sum(found.values()) / len(found)
        rows = [
            [Cell(depth), *(Cell(MISSING) if math.isnan(share) else Cell(f"{100 * share:.1f}", share) for share in row)]
            for depth, row in zip(depths, grid, strict=True)
        ]
        headers = ["Depth", *(f"{length:,}" for length in lengths)]
        columns = [f"{length:,}" for length in lengths]
        pictures.append(
            Picture(
                svg=figures.share_map(grid, depths, columns, ("depth of the key", "tokens of the prompt")),
                alt=f"Heat map of {name}: {title} by depth and length, {percent(mean)} on average",
                title=title.capitalize(),
                caption=f"{percent(mean)} on average.",
                table=Table(
                    caption=f"{name}: {title} in %, by depth and length",
                    headers=headers,
                    rows=rows,
                    numeric=[False] + [True] * len(lengths),
                    sortable=False,
                ),
            )
        )
    key = figures.colour_key("share of prompts answered, one scale for all maps")
    return Panel(name, [], pictures, key=key, min_width=24)


def _depth(line: Measurement) -> str:
    depth = line.settings["depth"]
    return _ANY_DEPTH if depth is None else f"{depth:g}"


def _several(lengths: Iterable[int]) -> str:
    found = [f"{length:,}" for length in sorted(set(lengths))]
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + f" and {found[-1]}"
