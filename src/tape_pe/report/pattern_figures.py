"""Pictures of position patterns: heat maps of heads, and what the last query sees at every distance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from tape_pe.report.figures import COLOUR_MAP, line_looks, new_figure, plain_axes, saved


def pattern_maps(
    pattern: np.ndarray, titles: Sequence[str], *, gamma: float = 1.0, narrow: bool = False, file_format: str = "svg"
) -> bytes:
    """A heat map per head on one colour scale; keys across, queries down, later keys left blank.

    Args:
        pattern: `[H, N, N]`; values that are not finite are left blank as well.
        titles: one per head.
        gamma: below 1, small values get more of the colours, as attention weights need.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    heads, length, _ = pattern.shape
    visible = np.isfinite(pattern) & np.tri(length, dtype=bool)
    low, high = value_range(pattern)
    if low == high:  # one colour in the middle of a scale that shows the value
        low, high = low - 0.5, high + 0.5
    columns = min(heads, 2 if narrow else 4)
    rows = -(-heads // columns)
    # All heads in one image, with room between them: far quicker to draw than as many axes.
    across, down = round(1.12 * length) + 1, round(1.24 * length) + 1
    tiles = np.full((down * (rows - 1) + length, across * (columns - 1) + length), np.nan)
    corners = [(down * (index // columns), across * (index % columns)) for index in range(heads)]
    for (top, left), head, seen in zip(corners, pattern, visible, strict=True):
        tiles[top : top + length, left : left + length] = np.where(seen, head, np.nan)
    width = 4.4 if narrow else 5.2 if heads == 1 else 6.6
    with new_figure(width, (width - 1.2) * tiles.shape[0] / tiles.shape[1] + 0.5) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(tiles, cmap=COLOUR_MAP, norm=PowerNorm(gamma, low, high), interpolation="nearest")
        if heads > 1:
            for (top, left), title in zip(corners, titles, strict=True):
                axes.text(left + length / 2, top - 0.05 * length, title, fontsize=9, ha="center")
            axes.set_ylim(top=-0.24 * length)
        ends = range(0, length, max(length - 1, 1)) if heads > 1 else range(0, length, max(1, length // 8))
        axes.set_xticks([across * column + end for column in range(columns) for end in ends], [*ends] * columns)
        axes.set_yticks([down * row + end for row in range(rows) for end in ends], [*ends] * rows)
        axes.set_xlabel("key position")
        axes.set_ylabel("query position")
        axes.tick_params(length=0, labelsize=9)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=25, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        return saved(figure, file_format)


def distance_curves(
    rows: np.ndarray, titles: Sequence[str], *, narrow: bool = False, file_format: str = "svg"
) -> bytes:
    """What the last query sees, against the distance of the key.

    Args:
        rows: `[H, N]`, distances 0, 1, ..., N - 1.
        titles: one per head.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    legend_lines = -(-len(titles) // 4) if len(titles) > 1 else 0
    width, height = (4.4, 3.4) if narrow else (6.4, 4.0)
    with new_figure(width, height + 0.2 * legend_lines) as figure:
        axes = figure.add_subplot()
        lines = []
        for row, (colour, style) in zip(rows, line_looks([""] * len(rows)), strict=True):
            finite = np.where(np.isfinite(row), row, np.nan)
            lines += axes.plot(finite, color=colour, linestyle=style, linewidth=1.6)
        axes.set_xlabel("distance of the key from the last query")
        axes.set_ylabel("pattern")
        axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 8, integer=True))
        axes.margins(x=0.01)
        plain_axes(axes)
        if legend_lines:
            figure.legend(lines, titles, loc="outside lower center", ncols=4, frameon=False, fontsize=9, handlelength=2)
        return saved(figure, file_format)


def value_range(pattern: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest finite value where keys are not later than queries, of `[H, N, N]`; 0, 0 if none."""
    seen = pattern[np.isfinite(pattern) & np.tri(pattern.shape[1], dtype=bool)]
    return (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 0.0)
