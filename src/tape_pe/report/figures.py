"""Pictures, drawn with matplotlib's objects without pyplot; its settings are changed only while a picture is made."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from tape_pe.report.parts import Picture

COLOUR_MAP = "viridis"
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#333333", "#56B4E9")  # after Okabe and Ito
LINE_STYLES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
INK, QUIET, FAINT = "#1f2328", "#57606a", "#d8dee4"
LARGEST_WITH_VALUES = 24  # cells of larger grids have no room for a number
LARGEST_VECTOR_GRID = 32  # larger grids would make pictures of thousands of shapes
_SETTINGS = {
    "svg.fonttype": "none",  # labels stay text
    "svg.hashsalt": "tape",  # same input, same file
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; the long default list would be repeated at every label
    "font.size": 10,
    "text.color": INK,
    "text.usetex": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}


class Curve(NamedTuple):
    """A run's training loss.

    Attributes:
        label: name of the run in the legend.
        group: curves of one group share a colour.
        points: `[step, loss]` pairs in order of steps.
    """

    label: str
    group: str
    points: Sequence[Sequence[float]]


def smoothing_window(points: int) -> int:
    """Number of logged points (odd) that the smoothed loss curve averages over."""
    return 2 * (points // 40) + 1


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean of `values` `[N]` over an odd `window`, cut off at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first = np.maximum(index - window // 2, 0)
    behind = np.minimum(index + window // 2 + 1, len(values))
    return (sums[behind] - sums[first]) / (behind - first)


def loss_curves(curves: Sequence[Curve], *, narrow: bool = False, file_format: str = "svg") -> bytes:
    """Training loss against steps of several runs: raw values faint, their running mean in full colour, log scale.

    Args:
        curves: the runs; those without points are left out.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    with new_figure(4.0, 3.7 + 0.12 * len(curves)) if narrow else new_figure(9.6, 3.7) as figure:
        axes = figure.add_subplot()
        lines = []
        lowest, highest = np.inf, 0.0
        drawn = [curve for curve in curves if len(curve.points)]
        for curve, (colour, style) in zip(drawn, line_looks([curve.group for curve in drawn]), strict=True):
            steps, losses = np.asarray(curve.points, dtype=float).T
            mean = smoothed(losses, smoothing_window(len(losses)))
            axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.22)
            marker = "o" if len(losses) == 1 else ""
            lines += axes.plot(steps, mean, color=colour, linestyle=style, linewidth=1.8, marker=marker)
            positive = losses[losses > 0]
            if len(positive):
                lowest, highest = min(lowest, positive.min()), max(highest, positive.max())
        if highest > 0:
            log_axis(axes, lowest, highest)
        axes.set_ylabel("training loss (log scale)" if highest > 0 else "training loss")
        step_axis(axes, narrow=narrow)
        if lines:
            add_legend(figure, lines, [curve.label for curve in drawn], narrow=narrow)
        return saved(figure, file_format)


def heat_map(grid: Sequence[Sequence[float]], trained: int, *, file_format: str = "svg") -> bytes:
    """Scores over two lengths, from 0 % to 100 % on the one colour scale that all heat maps share.

    Args:
        grid: shares in 0..1; row n - 1, column m - 1 is the score of lengths n and m.
        trained: lengths up to this one occur in training; their square is outlined.
        file_format: `"svg"` or `"png"`.
    """
    values = 100 * np.asarray(grid, dtype=float)
    rows, columns = values.shape
    with new_figure(5.0, 5.0 * (rows + 0.6) / (columns + 0.6)) as figure:
        axes = figure.add_subplot()
        _draw_shares(axes, values)
        square = Rectangle(
            (0.5, 0.5),
            min(trained, columns),
            min(trained, rows),
            fill=False,
            edgecolor="white",
            linewidth=2.0,
            zorder=5,
        )
        square.set_path_effects([withStroke(linewidth=5.0, foreground="#111111"), Normal()])
        square.set_clip_on(False)
        square.set_gid("trained-square")
        axes.add_patch(square)
        axes.set_xlim(0.5, columns + 0.5)
        axes.set_ylim(rows + 0.5, 0.5)
        axes.set_aspect("equal")
        axes.set_xlabel("digits of the second operand, m")
        axes.set_ylabel("digits of the first operand, n")
        for axis in (axes.xaxis, axes.yaxis):
            _length_ticks(axis, columns if axis is axes.xaxis else rows)
        axes.tick_params(length=0, pad=6)
        axes.spines[:].set_visible(False)
        return saved(figure, file_format)


def share_map(
    grid: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    *,
    file_format: str = "svg",
) -> bytes:
    """Scores over any two things, from 0 % to 100 % on the one colour scale that all heat maps share.

    Args:
        grid: shares in 0..1, NaN where there is none.
        rows: what the rows are, from the top.
        columns: what the columns are.
        labels: what rows and columns are of.
        file_format: `"svg"` or `"png"`.
    """
    values = 100 * np.asarray(grid, dtype=float)
    with new_figure(5.0, 1.0 + 3.6 * min(1.4, max(0.12, len(rows) / len(columns)))) as figure:
        axes = figure.add_subplot()
        axes.set_facecolor(FAINT)
        _draw_shares(axes, values)
        axes.set_xlim(0.5, len(columns) + 0.5)
        axes.set_ylim(len(rows) + 0.5, 0.5)
        axes.set_xticks(range(1, len(columns) + 1), columns, rotation=45 if len(columns) > 7 else 0)
        axes.set_yticks(range(1, len(rows) + 1), rows)
        axes.set_ylabel(labels[0])
        axes.set_xlabel(labels[1])
        axes.tick_params(length=0, pad=6)
        axes.spines[:].set_visible(False)
        return saved(figure, file_format)


def colour_scale(label: str, *, file_format: str = "svg") -> bytes:
    """The colour scale that all heat maps share, as a picture of its own."""
    with new_figure(3.6, 0.62) as figure:
        axes = figure.add_subplot()
        bar = figure.colorbar(ScalarMappable(Normalize(0, 100), COLOUR_MAP), cax=axes, orientation="horizontal")
        bar.set_ticks([0, 25, 50, 75, 100], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
        bar.set_label(label)
        bar.outline.set_visible(False)
        axes.tick_params(length=0)
        return saved(figure, file_format)


def colour_key(label: str) -> Picture:
    """`colour_scale` with its text alternative."""
    return Picture(colour_scale(label), "Colour scale from 0 % (dark violet) to 100 % (yellow)", caption="")


def line_looks(groups: Sequence[str]) -> list[tuple[str, Any]]:
    """Colour and dash of each curve: one colour per group and one dash per curve within it.

    Where all curves are of one group, every curve has its own colour.
    """
    names = list(dict.fromkeys(groups))
    looks: list[tuple[str, Any]] = []
    for index, group in enumerate(groups):
        colour, dash = (index, 0) if len(names) == 1 else (names.index(group), groups[:index].count(group))
        dash += colour // len(LINE_COLOURS)
        looks.append((LINE_COLOURS[colour % len(LINE_COLOURS)], LINE_STYLES[dash % len(LINE_STYLES)]))
    return looks


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of `width` x `height` inches; matplotlib's settings are ours until it is saved."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure


def saved(figure: Figure, file_format: str) -> bytes:
    """The figure as a file; the same input gives the same file."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else None
    figure.savefig(buffer, format=file_format, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _draw_shares(axes: Any, values: np.ndarray) -> None:
    """Percentages as coloured cells; those of row r and column c around (c + 1, r + 1), with their numbers if few."""
    rows, columns = values.shape
    few = max(rows, columns) <= LARGEST_WITH_VALUES
    edges: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.6} if few else {}
    mesh = axes.pcolormesh(
        np.arange(columns + 1) + 0.5,
        np.arange(rows + 1) + 0.5,
        values,
        cmap=COLOUR_MAP,
        vmin=0,
        vmax=100,
        rasterized=max(rows, columns) > LARGEST_VECTOR_GRID,
        **edges,
    )
    if not few:
        return
    size = min(10.5, 125 / max(rows, columns))
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = mesh.cmap(mesh.norm(value))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        colour = "#000000" if bright else "#ffffff"
        axes.text(column + 1, row + 1, f"{value:.0f}", color=colour, fontsize=size, ha="center", va="center")


def add_legend(figure: Figure, lines: Sequence[Any], labels: Sequence[str], *, narrow: bool) -> None:
    """Names lines: beside the picture, or below it on a phone. Labels may begin with "_" or hold "$"."""
    legend = figure.legend(
        lines,
        [str(index) for index in range(len(lines))],
        loc="outside lower left" if narrow else "outside right upper",
        frameon=False,
        handlelength=2.6,
        fontsize=10,
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(shortened(label, 40 if narrow else 28))


def step_axis(axes: Any, *, narrow: bool) -> None:
    """Lays out an axis of optimizer steps, and the rest of a picture of lines."""
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.margins(x=0.01)
    plain_axes(axes)


def plain_axes(axes: Any) -> None:
    """A faint grid and no frame."""
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def log_axis(axes: Any, lowest: float, highest: float) -> None:
    """A logarithmic scale for positive values from `lowest` to `highest`, with plain numbers."""
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(lowest / 1.15, highest * 1.15)
    decades = np.log10(highest / lowest)
    subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _length_ticks(axis: Any, size: int) -> None:
    step = 1 if size <= LARGEST_WITH_VALUES else max(2, size // 8)
    axis.set_ticks(list(range(step, size + 1, step)))


def shortened(name: str, length: int) -> str:
    """A `name`, its middle cut out where it is longer than `length` characters (names often differ at the end)."""
    return name if len(name) <= length else name[: length // 2 - 1] + "…" + name[-(length - length // 2) :]
