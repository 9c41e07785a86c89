"""Cost against length, both on logarithmic axes: a power of the length is a straight line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from tape_pe.bench.tables import seconds_text
from tape_pe.report.figures import Curve, line_looks, new_figure, plain_axes, saved


def cost_curves(curves: Sequence[Curve], *, file_format: str = "svg") -> bytes:
    """Seconds against tokens of several variants.

    Args:
        curves: their points are `[length, median, first quartile, third quartile]`, in order of lengths; a group has a
            colour.
        file_format: `"svg"` or `"png"`.
    """
    with new_figure(4.6, 3.4 + 0.2 * len(curves)) as figure:
        axes = figure.add_subplot()
        lines = []
        for curve, (colour, style) in zip(curves, line_looks([curve.group for curve in curves]), strict=True):
            lengths, medians, low, high = np.asarray(curve.points, dtype=float).T
            axes.fill_between(lengths, low, high, color=colour, alpha=0.18, linewidth=0)
            lines += axes.plot(lengths, medians, color=colour, linestyle=style, linewidth=1.8, marker="o", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({point[0] for curve in curves for point in curve.points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        bottom, top = axes.get_ylim()
        subs = (1.0, 2.0, 5.0) if np.log10(top / bottom) < 2.5 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: seconds_text(seconds)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens")
        axes.set_ylabel("time")
        plain_axes(axes)
        figure.legend(
            lines,
            [curve.label for curve in curves],
            loc="outside lower left",
            frameon=False,
            handlelength=2.6,
            fontsize=10,
        )
        return saved(figure, file_format)
