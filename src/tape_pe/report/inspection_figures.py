"""Pictures of one model at work: curves over layers, and maps of layers by tokens or channel pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from tape_pe.report.figures import COLOUR_MAP, FAINT, line_looks, new_figure, plain_axes, saved

MOST_LABELS = 48  # more tokens have no room for their text


def depth_curves(values: np.ndarray, titles: Sequence[str], label: str, *, file_format: str = "svg") -> bytes:
    """A number of each head against the layer.

    Args:
        values: `[H, L]`, NaN where a layer has none.
        titles: one per head.
        label: what the number is.
        file_format: `"svg"` or `"png"`.
    """
    legend_lines = -(-len(titles) // 4) if len(titles) > 1 else 0
    with new_figure(4.4, 3.2 + 0.2 * legend_lines) as figure:
        axes = figure.add_subplot()
        lines = []
        marker = "o" if values.shape[1] <= 16 else ""
        for row, (colour, style) in zip(values, line_looks([""] * len(values)), strict=True):
            lines += axes.plot(row, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=3)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        plain_axes(axes)
        if legend_lines:
            figure.legend(lines, titles, loc="outside lower center", ncols=4, frameon=False, fontsize=9, handlelength=2)
        return saved(figure, file_format)


def depth_map(
    values: np.ndarray,
    columns: Sequence[str] | None,
    labels: tuple[str, str],
    *,
    narrow: bool = False,
    file_format: str = "svg",
) -> bytes:
    """A map with the layers from top to bottom.

    Args:
        values: `[L, N]`, NaN where a layer has no number.
        columns: what to write under the columns; `None`: their numbers.
        labels: what the columns are, and what the colours are.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    layers, width = values.shape
    with new_figure(4.4 if narrow else 9.6, 1.2 + min(0.34 * layers, 4.0) + (0.5 if columns else 0)) as figure:
        axes = figure.add_subplot()
        axes.set_facecolor(FAINT)
        image = axes.imshow(
            values, cmap=COLOUR_MAP, norm=Normalize(*_range(values)), interpolation="nearest", aspect="auto"
        )
        axes.set_xlabel(labels[0])
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        most = MOST_LABELS // 2 if narrow else MOST_LABELS
        if columns is not None and width <= most:
            upright = max(map(len, columns)) <= 2
            texts = axes.set_xticks(range(width), columns, rotation=0 if upright else 90, fontsize=8)
            for tick in texts:
                tick.label1.set_parse_math(False)  # tokens may hold a "$"
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 12, integer=True))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, aspect=12, pad=0.02)
        bar.set_label(labels[1])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        return saved(figure, file_format)


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)
