"""The page of `tape bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tape_pe.bench.figures import cost_curves
from tape_pe.bench.tables import TITLES, count_tables, seconds_text, target_table, time_groups, time_table
from tape_pe.report.figures import Curve
from tape_pe.report.html import check_output, template, write_page
from tape_pe.report.parts import Panel, Picture
from tape_pe.results import Cost

READING = (
    "All variants of a comparison took turns in one run, in rounds of a random order. Times are medians over rounds, "
    "with their quartiles, which the pictures shade.",
    "Ratios are to RoPE on the faster of its attention backends, computed in each round; those of the position update, "
    "which RoPE does not have, are to the published equations written as einsums.",
    "Time against length is drawn on two logarithmic axes, where every power of the length is a straight line: twice "
    "the length takes twice the time where it grows in proportion, four times where it grows with the square.",
)


def write_costs_page(output: Path, lines: Sequence[Cost]) -> Path:
    """Writes one HTML page about the lines of a run, and returns its path.

    Args:
        output: the HTML file to write.
        lines: what was measured, on one machine.

    Raises:
        ValueError: there are no lines.
        IsADirectoryError: `output` is a folder.
    """
    check_output(output)
    if not lines:
        raise ValueError("lines is empty: a page needs at least one measurement")
    targets = [target_table(lines)] if any(line.kind == "target" for line in lines) else []
    page = template("costs.html.j2").render(
        title="What positional encodings cost",
        about=about(lines),
        reading=READING,
        tables=targets,
        panels=_panels(lines),
        further_tables=count_tables(lines),
    )
    return write_page(output, page)


def about(lines: Sequence[Cost]) -> str:
    """The machine, the threads and the versions that the figures belong to."""

    def several(values: list[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    machine = several([f"{line.machine['name']}, {line.machine['cores']} cores" for line in lines])
    threads = several([line.settings.get("threads") for line in lines])
    clocks = several([line.settings.get("clock") for line in lines])
    versions = several([f"{name} {version}" for line in lines for name, version in line.versions.items()])
    revisions = several([_short(line.git_revision) for line in lines])
    return (
        f"Measured on {several([line.machine['device'] for line in lines])} ({machine}), "
        f"threads: {threads or 'any'}, clock: {clocks or 'none'}; {versions}; revision {revisions or 'unknown'}."
    )


def _short(revision: str | None) -> str | None:
    if revision is None:
        return None
    commit, _, dirty = revision.partition("+")
    return commit[:12] + ("+" + dirty if dirty else "")


def _panels(lines: Sequence[Cost]) -> list[Panel]:
    """An operation each, its phases side by side."""
    panels: dict[str, list[Picture]] = {}
    for title, group in time_groups(lines):
        panels.setdefault(TITLES[group[0].settings["operation"]], []).append(_picture(title, group))
    return [Panel(title, [], pictures) for title, pictures in panels.items()]


def _picture(title: str, lines: Sequence[Cost]) -> Picture:
    curves = []
    for name in dict.fromkeys(line.name for line in lines):
        seconds = {line.settings["length"]: line.metrics["seconds"] for line in lines if line.name == name}
        points = [(n, *(seconds[n][key] for key in ("median", "low", "high"))) for n in sorted(seconds)]
        curves.append(Curve(name, name, points))
    ends = "; ".join(f"{c.label} {seconds_text(c.points[-1][1])} at {c.points[-1][0]:,}" for c in curves)
    return Picture(
        svg=cost_curves(curves),
        alt=f"{title}: time against length on logarithmic axes, {ends}",
        title=title.partition(", ")[2].capitalize(),
        caption=_sentence(lines),
        table=time_table(title, lines),
    )


def _sentence(lines: Sequence[Cost]) -> str:
    """The ratios at the greatest length, in words."""
    longest = max(line.settings["length"] for line in lines)
    parts = [
        f"{line.name} takes {line.metrics['ratio']['median']:.2f} times as long as {line.metrics['baseline']}"
        for line in lines
        if line.settings["length"] == longest and line.name != line.metrics["baseline"]
    ]
    return f"At {longest:,} tokens, " + ", ".join(parts) + "." if parts else "There is nothing to compare with."
