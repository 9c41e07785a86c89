"""Pictures of medians over seeds: training loss by steps, scores by the size of the problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tape_pe.report.figures import FAINT, QUIET, add_legend, log_axis, new_figure, plain_axes, saved, step_axis


class Band(NamedTuple):
    """A line, with a band around it where it stands for several runs.

    Attributes:
        label: its name in the legend.
        look: colour and dash.
        x: where it has values, in order.
        middle: its values.
        low: lower edge of the band; the same as `middle` for one run.
        high: upper edge.
    """

    label: str
    look: tuple[str, Any]
    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def median_band(label: str, look: tuple[str, Any], x: Sequence[float], runs: Sequence[Sequence[float]]) -> Band:
    """The median of `runs` `[R, N]` at each of N places `x`, in a band from the smallest to the largest value."""
    values = np.asarray(runs, dtype=float)
    return Band(label, look, x, np.median(values, axis=0).tolist(), values.min(axis=0).tolist(), values.max(0).tolist())


def learning_curves(bands: Sequence[Band], *, narrow: bool = False, file_format: str = "svg") -> bytes:
    """Training loss against steps, on a log scale where it is positive.

    Args:
        bands: one per encoding.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    with _figure(bands, narrow) as figure:
        axes = figure.add_subplot()
        lines = [_draw(axes, band) for band in bands]
        is_log = _log_values(axes, bands)
        axes.set_ylabel("training loss (log scale)" if is_log else "training loss")
        step_axis(axes, narrow=narrow)
        add_legend(figure, lines, [band.label for band in bands], narrow=narrow)
        return saved(figure, file_format)


def size_curves(
    bands: Sequence[Band],
    labels: tuple[str, str],
    *,
    trained: float | None = None,
    guess: float | None = None,
    shares: bool = True,
    powers: bool = False,
    narrow: bool = False,
    file_format: str = "svg",
) -> bytes:
    """Scores against the size of the problem.

    Args:
        bands: one per run or encoding.
        labels: what the sizes and the scores are.
        trained: sizes up to this one occur in training; they are shaded.
        guess: the score of guessing, a dotted line.
        shares: scores are in 0..1 and shown from 0 % to 100 %; otherwise they are positive, on a log scale.
        powers: sizes grow by factors, so their scale is logarithmic.
        narrow: lay the picture out for a phone.
        file_format: `"svg"` or `"png"`.
    """
    with _figure(bands, narrow) as figure:
        axes = figure.add_subplot()
        sizes = sorted({size for band in bands for size in band.x})
        if powers:
            axes.set_xscale("log", base=2)
            shown = sizes if len(sizes) <= 10 else sizes[:: -(-len(sizes) // 8)]
            axes.xaxis.set_major_locator(FixedLocator(shown))
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 10, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        lines = [_draw(axes, band, marker="o") for band in bands]
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.margins(x=0.01)
        plain_axes(axes)
        axes.margins(x=0.03)
        axes.autoscale_view()
        if shares:
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
        else:
            _log_values(axes, bands)
        left, right = axes.get_xlim()
        if trained is not None and sizes[0] <= trained:
            end = min(trained, right)
            axes.axvspan(left, end, color=FAINT, alpha=0.45, linewidth=0, zorder=0).set_gid("trained-sizes")
            axes.axvline(end, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                "trained", (end, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, 3), textcoords="offset points",
                ha="right", va="bottom", fontsize=9, color=QUIET,
            )  # fmt: skip
        if guess is not None:
            axes.axhline(guess, color=QUIET, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
            axes.annotate(
                "guessing", (1.0, guess), xycoords=("axes fraction", "data"), xytext=(-2, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=9, color=QUIET,
            )  # fmt: skip
        axes.set_xlim(left, right)
        add_legend(figure, lines, [band.label for band in bands], narrow=narrow)
        return saved(figure, file_format)


def _figure(bands: Sequence[Band], narrow: bool) -> Any:
    return new_figure(4.0, 3.7 + 0.21 * len(bands)) if narrow else new_figure(9.6, max(3.7, 0.6 + 0.22 * len(bands)))


def _draw(axes: Any, band: Band, marker: str = "") -> Any:
    colour, dash = band.look
    if list(band.low) != list(band.high):
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.14, linewidth=0)
    marker = marker or ("o" if len(band.x) == 1 else "")
    return axes.plot(band.x, band.middle, color=colour, linestyle=dash, linewidth=1.8, marker=marker, markersize=3.5)[0]


def _log_values(axes: Any, bands: Sequence[Band]) -> bool:
    """A log scale where all values but zeros are positive; whether it is one."""
    positive = [value for band in bands for value in (*band.low, *band.high) if value > 0]
    if positive:
        log_axis(axes, min(positive), max(positive))
    return bool(positive)
