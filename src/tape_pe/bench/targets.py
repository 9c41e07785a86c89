"""The targets of `tape bench --check`, in one table. Ratios are to RoPE in the same run, at its faster backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tape_pe.bench.timing import Spread
from tape_pe.report.parts import MISSING, Cell, Table

DESIGN, PAPER = "set for this library", "arXiv 2501.00712"


@dataclass(frozen=True)
class Target:
    """What a figure has to reach.

    Attributes:
        name: its key.
        what: what is measured, for readers.
        limit: the figure's bound; `None` where it is only reported.
        at_least: whether the bound is the smallest value allowed, not the largest.
        source: where the bound is from, with what is published to compare it with.
        digits: decimals to show.
    """

    name: str
    what: str
    limit: float | None
    source: str = DESIGN
    at_least: bool = False
    digits: int = 2


@dataclass(frozen=True)
class Figure:
    """What was measured for a target.

    Attributes:
        value: median and quartiles; the verdict is on the median.
        note: how the figure came about, where that is not plain.
        allowance: how far the median may be beyond the limit; see the target's note.
        details: what it was computed from.
    """

    value: Spread
    note: str = ""
    allowance: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


def _attention(length: int) -> list[Target]:
    where = f"attention core, N={length}"
    published = "three calls of the released code: 2.7 and 2.9"
    return [
        Target(f"attention_forward_{length}", f"{where}, forward", 1.50, f"{DESIGN}; {published}"),
        Target(f"attention_both_{length}", f"{where}, forward+backward", 1.45, f"{DESIGN}; {published}"),
    ]


TARGETS = (
    Target("flops", "FLOPs of the 155M model, forward, N=1024", 1.06, f"{DESIGN}; {PAPER} has 1.139", digits=4),
    Target("parameters", "parameters added to the 155M model, M", 0.46, f"{DESIGN}; {PAPER} has 0.44 Mi", digits=3),
    Target("saved", "tensors that a layer saves for backward, N=1024", 1.25, f"{DESIGN}; released code: 2.0 to 2.6"),
    Target("cache", "cache per token, 12 layers", 1.50),
    *(target for length in (256, 512, 1024) for target in _attention(length)),
    Target("layer_forward", "layer, N=1024, forward", 1.10, f"{DESIGN}; released code: 1.74"),
    Target("layer_both", "layer, N=1024, forward+backward", 1.10, f"{DESIGN}; released code: 1.67"),
    Target("update_forward", "position update against einsums, times faster, forward", 5.0, at_least=True),
    Target("update_both", "position update against einsums, times faster, forward+backward", 6.0, at_least=True),
    Target("decode_4096", "attention core, one token after 4096", 1.55),
    Target("decode_16384", "attention core, one token after 16384", 1.55),
    Target("layer_decode_4096", "layer, one token after 4096", None),
    Target("layer_decode_16384", "layer, one token after 16384", None),
    Target("step", "training step, 2 layers of the 155M model, N=1024", 1.08),
    Target("step_12", "training step, 12 layers, derived", None),
    Target("generate_total", "512 tokens after a prompt of 1024, 4 layers, in all", 1.30),
    Target("generate_growth", "the same, growth of the time per token in units of RoPE's", 1.00),
    Target("memory_forward", "peak memory of a model, N=8192 against 4096, forward", 2.20),
    Target("memory_both", "peak memory of a model, N=8192 against 4096, forward+backward", 2.20),
)
"""All targets, in the order in which they are shown."""


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        target: the target.
        figure: its figure; `None` if there is none, which is a failure.
    """

    target: Target
    figure: Figure | None

    @property
    def bound(self) -> str:
        """The limit, and what is allowed beyond it."""
        target = self.target
        if target.limit is None:
            return "reported"
        bound = f"{'>=' if target.at_least else '<='} {target.limit:.{target.digits}f}"
        if self.figure is None or not self.figure.allowance:
            return bound
        return f"{bound} {'-' if target.at_least else '+'} {self.figure.allowance:.{target.digits}f}"

    @property
    def passed(self) -> bool:
        """Whether the median keeps the limit; figures that are only reported always do."""
        if self.target.limit is None:
            return True
        if self.figure is None:
            return False
        median = self.figure.value.median
        if self.target.at_least:
            return median >= self.target.limit - self.figure.allowance
        return median <= self.target.limit + self.figure.allowance

    @property
    def word(self) -> str:
        """The verdict in a word."""
        return MISSING if self.target.limit is None else "pass" if self.passed else "FAIL"


def verdicts(figures: Mapping[str, Figure]) -> list[Verdict]:
    """All targets with their figures, by name."""
    return [Verdict(target, figures.get(target.name)) for target in TARGETS]


def verdict_table(found: Iterable[Verdict]) -> Table:
    """One row per target."""
    rows = []
    for verdict in found:
        target, figure = verdict.target, verdict.figure
        measured, quartiles, note = MISSING, MISSING, ""
        if figure is not None:
            value, digits, note = figure.value, target.digits, figure.note
            measured = f"{value.median:.{digits}f}"
            quartiles = f"{value.low:.{digits}f} to {value.high:.{digits}f}" if value.values > 1 else "exact"
        rows.append([*map(Cell, (target.what, verdict.bound, measured, quartiles, verdict.word, target.source, note))])
    headers = ["Target", "Bound", "Measured", "Quartiles", "Verdict", "Source", "Note"]
    return Table("Targets", headers, rows, [False, True, True, True, False, False, False], sortable=False)
