"""Lines of costs as tables: for terminals, for pages and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tape_pe.bench.targets import Figure, verdict_table, verdicts
from tape_pe.bench.timing import Spread
from tape_pe.bench.variants import BASELINE
from tape_pe.report.parts import MISSING, Cell, Table
from tape_pe.results import Cost

TITLES = {
    "rotation": "Rotation of queries and keys",
    "attention": "Attention core",
    "update": "Position update",
    "layer": "Decoder layer",
    "model": "Decoder",
}
_NOT_A_GROUP = ("length",)


def seconds_text(seconds: float) -> str:
    """A time for people, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bytes_text(count: float) -> str:
    """A size for people."""
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count:,.0f} B"


def latest(lines: Sequence[Cost]) -> list[Cost]:
    """Of several lines of the same thing the last one, in order of their first."""
    found: dict[str, Cost] = {}
    for line in lines:
        found[json.dumps([line.kind, line.name, line.settings], sort_keys=True)] = line
    return list(found.values())


def time_groups(lines: Sequence[Cost]) -> Iterator[tuple[str, list[Cost]]]:
    """Times by what was done, with which sizes: a title for each group, whose lines differ in length and variant."""
    groups: dict[str, list[Cost]] = {}
    times = [line for line in lines if line.kind == "time"]
    told = _differing([line.settings for line in times])
    for line in times:
        settings = line.settings
        sizes = [f"{name}={settings[name]}" for name in told if name in settings]
        title = ", ".join([f"{TITLES[settings['operation']]}, {settings['phase']}", *sizes])
        groups.setdefault(title, []).append(line)
    yield from groups.items()


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sizes that tell groups apart, beside what their titles say in any case."""
    known = ("level", "operation", "phase", "clock", *_NOT_A_GROUP)
    values: dict[str, set[Any]] = {}
    for one in settings:
        for name, value in one.items():
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if name not in known and len(found) > 1]


def time_table(title: str, lines: Sequence[Cost]) -> Table:
    """One row per length and variant."""
    rows = []
    for line in lines:
        seconds, ratio = Spread(**line.metrics["seconds"]), Spread(**line.metrics["ratio"])
        is_baseline = line.name == line.metrics["baseline"]
        rows.append(
            [
                Cell(line.name),
                Cell(f"{line.settings['length']:,}", line.settings["length"]),
                Cell(seconds_text(seconds.median), seconds.median),
                Cell(f"{seconds_text(seconds.low)} to {seconds_text(seconds.high)}"),
                Cell("1" if is_baseline else f"{ratio.median:.2f}", ratio.median),
                Cell(MISSING if is_baseline else f"{ratio.low:.2f} to {ratio.high:.2f}"),
                Cell(str(seconds.values), seconds.values),
            ]
        )
    headers = ["Variant", "Length", "Time", "Quartiles", "Ratio", "Quartiles of the ratio", "Rounds"]
    return Table(title, headers, rows, [False, *[True] * 6], sortable=False)


def count_tables(lines: Sequence[Cost]) -> list[Table]:
    """Operations and parameters, saved tensors, caches and peaks, each with its ratio to RoPE's; those there are."""
    return [table for table in (_flops(lines), _saved(lines), _cache(lines), _memory(lines)) if table.rows]


def tables(lines: Sequence[Cost]) -> list[Table]:
    """All tables of measurements."""
    return [*(time_table(title, group) for title, group in time_groups(lines)), *count_tables(lines)]


def target_table(lines: Sequence[Cost]) -> Table:
    """Verdicts on the latest line of each target."""
    return verdict_table(verdicts(figures_of(lines)))


def figures_of(lines: Sequence[Cost]) -> dict[str, Figure]:
    """The figures of targets that lines hold; of several of one target, the last counts."""
    found = {}
    for line in lines:
        if line.kind == "target":
            metrics = line.metrics
            value = Spread(metrics["median"], metrics["low"], metrics["high"], metrics["values"])
            found[line.name] = Figure(value, metrics["note"], metrics["allowance"], metrics["details"])
    return found


def _rows(lines: Sequence[Cost], kind: str, value: str) -> Iterator[tuple[Cost, float]]:
    """Lines of a kind, each with its ratio to the least of RoPE's lines of the same settings."""
    chosen = [line for line in lines if line.kind == kind]
    for line in chosen:
        ropes = [
            other.metrics[value]
            for other in chosen
            if other.name.partition(" ")[0] == BASELINE and other.settings == line.settings
        ]
        yield line, line.metrics[value] / min(ropes) if ropes else float("nan")


def _shape(line: Cost) -> list[Cell]:
    settings = line.settings
    heads = f"{settings['heads']}/{settings['kv_heads']} x {settings['head_dim']}"
    return [Cell(f"{settings['length']:,}", settings["length"]), Cell(str(settings["batch_size"])), Cell(heads)]


def _flops(lines: Sequence[Cost]) -> Table:
    rows = []
    for line, ratio in _rows(lines, "count", "forward"):
        metrics = line.metrics
        work = [Cell(f"{metrics[name] / 1e9:,.2f}", metrics[name]) for name in ("forward", "both")]
        parameters = Cell(f"{metrics['parameters']:,}", metrics["parameters"])
        rows.append([Cell(line.name), *_shape(line), *work, Cell(f"{ratio:.3f}", ratio), parameters])
    headers = [
        "Encoding",
        "Length",
        "Rows",
        "H/Hkv x D",
        "Forward, GFLOP",
        "With backward, GFLOP",
        "Ratio",
        "Parameters",
    ]
    return Table(
        "Floating-point operations of the decoder", headers, rows, [False, True, True, *[True] * 5], sortable=False
    )


def _saved(lines: Sequence[Cost]) -> Table:
    return _bytes_table(lines, "saved", "bytes", "Tensors that a layer saves for its backward pass", "Saved")


def _cache(lines: Sequence[Cost]) -> Table:
    return _bytes_table(lines, "cache", "bytes_per_token", "Cache of a middle layer", "Per token")


def _memory(lines: Sequence[Cost]) -> Table:
    return _bytes_table(lines, "memory", "bytes", "Peak memory of the decoder, forward+backward", "Above weights")


def _bytes_table(lines: Sequence[Cost], kind: str, value: str, caption: str, header: str) -> Table:
    rows = []
    for line, ratio in _rows(lines, kind, value):
        size = Cell(bytes_text(line.metrics[value]), line.metrics[value])
        rows.append([Cell(line.name), *_shape(line), size, Cell(f"{ratio:.2f}", ratio)])
    headers = ["Variant", "Length", "Rows", "H/Hkv x D", header, "Ratio"]
    return Table(caption, headers, rows, [False, *[True] * 5], sortable=False)
