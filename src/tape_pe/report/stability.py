"""Tables of the stability test, in the units of the published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tape_pe.analysis.stability import MOVED, Stability
from tape_pe.report.parts import MISSING, Cell, Table

WAYS = {"front": f"{MOVED} tokens in front", "shift": f"position ids from {MOVED}"}
MEASURES = {"attention": "Difference in attention weights, x1e-2", "states": "Difference of state inner products, %"}


def figure(value: float | None) -> str:
    """A difference in hundredths, with three digits."""
    return MISSING if value is None else f"{100 * value:.3g}"


def stability_tables(measured: Mapping[str, Stability]) -> list[Table]:
    """A table per measure, a row per model and way of moving, a column per layer, counted from 1 as published."""
    layers = max(len(stability.front.attention) for stability in measured.values())
    headers = ["Model", "Moved by", *(f"layer {layer}" for layer in range(1, layers + 1))]
    numeric = [False, False] + [True] * layers
    return [
        Table(caption, headers, [*_rows(measured, measure, layers)], numeric) for measure, caption in MEASURES.items()
    ]


def _rows(measured: Mapping[str, Stability], measure: str, layers: int) -> Sequence[Sequence[Cell]]:
    rows = []
    for way, described in WAYS.items():
        for name, stability in measured.items():
            values = list(getattr(getattr(stability, way), measure))
            values += [None] * (layers - len(values))
            rows.append([Cell(name), Cell(described), *(Cell(figure(value), value) for value in values)])
    return rows
