"""Tables of the stability test, in the units of the published one, and beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tape_pe.analysis.stability import MOVED, Stability
from tape_pe.report.parts import MISSING, Cell, Table

WAYS = {"front": f"{MOVED} tokens in front", "shift": f"position ids from {MOVED}"}
MEASURES = {"attention": "Difference in attention weights, x1e-2", "states": "Difference of state inner products, %"}
PRECISIONS = {
    "float32": "float32",
    "bfloat16_start": "float32, start bfloat16",
    "bfloat16": "bfloat16",
}
"""What `experiments/stability.py` measures in. The second rounds the start state, cos and sin, and nothing else."""


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


PUBLISHED_LAYERS = (1, 2, 4, 8)
PUBLISHED: dict[str, dict[str, dict[str, tuple[float, float, float, float]]]] = {
    "attention": {
        "front": {
            "rope": (8.93, 8.51, 12.29, 11.46),
            "tape": (9.08, 11.24, 12.23, 13.78),
            "tape_without_equivariance": (11.30, 11.38, 13.32, 14.55),
        },
        "shift": {
            "rope": (0.01, 0.02, 0.02, 0.03),
            "tape": (0.01, 0.02, 0.04, 0.04),
            "tape_without_equivariance": (0.01, 0.24, 0.37, 0.51),
        },
    },
    "states": {
        "front": {
            "rope": (0.03, 0.03, 0.03, 0.03),
            "tape": (0.03, 0.37, 2.75, 6.62),
            "tape_without_equivariance": (0.03, 2.29, 3.34, 6.37),
        },
        "shift": {
            "rope": (0.03, 0.03, 0.03, 0.03),
            "tape": (0.03, 0.02, 0.03, 0.04),
            "tape_without_equivariance": (0.03, 0.54, 0.44, 0.86),
        },
    },
}
"""Zhu et al., arXiv 2501.00712, 155 M parameters trained on C4: by measure, way of moving, model; one per layer."""


def published_table(lines: Sequence[Mapping[str, Any]], measure: str) -> Table:
    """Our medians over seeds beside the published figures, for the layers that were published.

    Args:
        lines: result lines of `experiments/stability.py`.
        measure: `"attention"` or `"states"`.
    """
    rows = []
    for way, described in WAYS.items():
        for model, published in PUBLISHED[measure][way].items():
            start = [Cell(described), Cell(model)]
            rows.append([*start, Cell("published"), *(Cell(f"{value:.2f}") for value in published)])
            for precision, described_precision in PRECISIONS.items():
                found = [line["metrics"][precision][way][measure] for line in lines if line["name"] == model]
                values = [median(one[layer - 1] for one in found) for layer in PUBLISHED_LAYERS] if found else []
                rows.append([*start, Cell(f"ours, {described_precision}"), *(Cell(figure(value)) for value in values)])
    headers = ["moved by", "model", "figures", *(f"layer {layer}" for layer in PUBLISHED_LAYERS)]
    return Table(MEASURES[measure], headers, rows, [False] * 3 + [True] * 4)


def ratios(lines: Sequence[Mapping[str, Any]], measure: str, precision: str) -> dict[str, list[float]]:
    """What a shift of position ids does to TAPE, in units of RoPE, and without equivariance, in units of TAPE.

    Args:
        lines: result lines of `experiments/stability.py`, of the same seeds for all three models.
        measure: `"attention"` or `"states"`.
        precision: one of `PRECISIONS`.

    Returns:
        `"tape"` and `"tape_without_equivariance"`: the ratio of medians over seeds, for every layer.
    """

    def medians(model: str) -> list[float]:
        found = [line["metrics"][precision]["shift"][measure] for line in lines if line["name"] == model]
        return [median(layer) for layer in zip(*found, strict=True)]

    rope, tape, ablation = map(medians, PUBLISHED[measure]["shift"])
    return {
        "tape": [a / b for a, b in zip(tape, rope, strict=True)],
        "tape_without_equivariance": [a / b for a, b in zip(ablation, tape, strict=True)],
    }
