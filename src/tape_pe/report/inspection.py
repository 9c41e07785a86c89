"""The page about one model reading one text: what every layer attends to, and where its position states went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tape_pe.analysis.capture import LayerView
from tape_pe.analysis.positions import inner_products, movement, relative_difference, state_norms
from tape_pe.analysis.summary import LayerSummary, summarize
from tape_pe.report import inspection_figures, pattern_figures
from tape_pe.report.html import check_output, template, write_page
from tape_pe.report.parts import MISSING, Cell, Panel, Picture, Table

MOST_LAYERS = 6
"""Layers whose heads are drawn."""
MOST_HEADS = 8
MOST_TOKENS = 12
"""Tokens in the table of those that moved most."""
_GAMMA = 0.4


@dataclass(frozen=True)
class Subject:
    """What is inspected.

    Attributes:
        label: what the page calls the model.
        description: its encoding and sizes, in a few words.
        text: what it reads.
        tokens: the text's tokens, for people.
        no_states: why there are no states, if there are none; why they do not move, if they do not.
    """

    label: str
    description: str
    text: str
    tokens: Sequence[str]
    no_states: str


def write_inspection(output: Path, subject: Subject, views: Sequence[LayerView]) -> Path:
    """Writes one HTML page with everything it needs inside, and returns its path.

    Args:
        output: the HTML file to write.
        subject: the model and the text.
        views: one per layer, of that text alone (B = 1).

    Raises:
        IsADirectoryError: `output` is a folder.
    """
    check_output(output)
    moving = [index for index, view in enumerate(views) if view.moved]
    panels = []
    if moving:
        panels += [_depth_panel(views), _token_panel(views, subject.tokens), _pair_panel(views)]
    shown = chosen(len(views), MOST_LAYERS)
    panels += [_layer_panel(index, views[index]) for index in shown]
    notes = [] if moving else [subject.no_states]
    if len(shown) < len(views):
        notes.append(f"Of {len(views)} layers, {', '.join(map(str, shown))} are drawn below; the table has all.")
    page = template("inspection.html.j2").render(
        title=f"Inside {subject.label}",
        about=f"{subject.description}, reading {len(subject.tokens)} tokens: {_shortened(subject.text)!r}",
        layers=layer_table([summarize(view) for view in views]),
        glossary=_glossary(bool(moving)),
        notes=notes,
        panels=panels,
    )
    return write_page(output, page)


def layer_table(summaries: Sequence[LayerSummary]) -> Table:
    """One row per layer; columns that no layer has are left out."""
    columns = [
        ("State norm", "norm", lambda value: f"{value:.3f}"),
        ("Phase moved", "phase", lambda value: f"{value:.2f}\u00b0"),
        ("States to RoPE", "states_to_rope", lambda value: f"{100 * value:.2f} %"),
        ("Attention to RoPE", "attention_to_rope", lambda value: f"{100 * value:.2f}e-2"),
        ("Attention distance", "attention_distance", lambda value: f"{value:.1f}"),
        ("On first token", "first_token", lambda value: f"{100 * value:.1f} %"),
    ]
    present = [one for one in columns if any(getattr(summary, one[1]) is not None for summary in summaries)]
    rows = []
    for index, summary in enumerate(summaries):
        row = [Cell(str(index), index)]
        for _, name, write in present:
            value = getattr(summary, name)
            row.append(Cell(MISSING) if value is None else Cell(write(value), value))
        rows.append(row)
    headers = ["Layer", *(title for title, _, _ in present)]
    return Table("Layers, means over heads and tokens", headers, rows, [True] * len(headers), sortable=False)


def chosen(count: int, most: int) -> list[int]:
    """At most `most` of `count` things, evenly, the first and the last among them."""
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, most))})


def _glossary(moving: bool) -> list[tuple[str, str]]:
    """The columns of the table, explained."""
    attention = [
        ("Attention distance", "how many tokens back a query looks on average."),
        ("On first token", "the share of attention that goes to it: where heads look that find nothing else."),
    ]
    if not moving:
        return attention
    return [
        (
            "State",
            "one complex number z per token, head and channel pair. Layer 0 reads the start state z0, which RoPE has "
            "in every layer.",
        ),
        ("State norm", "the root mean square of |z| over that of z0."),
        ("Phase moved", "the mean of |angle(z / z0)| over channel pairs; 90\u00b0 is what unrelated states have."),
        ("States to RoPE", "the relative difference of the states' inner products to those of the start states."),
        (
            "Attention to RoPE",
            "how differently the same layer, given the same input, would attend with the start states: the sum of "
            "absolute differences of a query's attention weights, at most 200e-2.",
        ),
        *attention,
    ]


def _depth_panel(views: Sequence[LayerView]) -> Panel:
    norms, differences, phases = [], [], []
    for view in views:
        if view.state is None or view.start is None:
            continue
        norms.append((state_norms(view.state) / state_norms(view.start))[0].mean(dim=-1))
        differences.append(100 * relative_difference(*map(inner_products, (view.state, view.start)))[0])
        phases.append(movement(view.state, view.start).phase[0].mean(dim=-1))
    pictures = [
        _curves(norms, "state norm", "Growth of states, 1 at the start.", views),
        _curves(differences, "states to RoPE, %", "How far inner products of states are from RoPE's.", views),
        _curves(phases, "phase moved, degrees", "How far states turned.", views),
    ]
    return Panel("How positions change with depth", [], pictures, min_width=18)


def _curves(rows: Sequence[Tensor], label: str, caption: str, views: Sequence[LayerView]) -> Picture:
    values = np.full((len(rows[0]), len(views)), np.nan)
    with_state = [index for index, view in enumerate(views) if view.state is not None]
    values[:, with_state] = torch.stack(list(rows), dim=1).numpy()
    heads = chosen(len(values), MOST_HEADS)
    titles = [f"head {head}" for head in heads]
    last = values[:, np.isfinite(values).all(axis=0)][:, -1]
    return Picture(
        svg=inspection_figures.depth_curves(values[heads], titles, label),
        alt=f"{label} of {len(heads)} heads against the layer; in the last one {last.min():.3g} to {last.max():.3g}",
        caption=caption,
    )


def _token_panel(views: Sequence[LayerView], tokens: Sequence[str]) -> Panel:
    phases = np.full((len(views), len(tokens)), np.nan)
    norms = np.full_like(phases, np.nan)
    for index, view in enumerate(views):
        if view.state is not None and view.start is not None:
            moved = movement(view.state, view.start)
            phases[index], norms[index] = moved.phase[0].mean(dim=0).numpy(), moved.magnitude[0].mean(dim=0).numpy()
    last = max(index for index, view in enumerate(views) if view.moved)
    pictures = [
        _map(phases, tokens, "token", "phase moved, degrees", "By token and layer, mean over heads and channel pairs."),
        _map(norms, tokens, "token", "|z / z0|", "How much longer or shorter states became, mean over heads."),
    ]
    order = np.argsort(-phases[last], kind="stable")[:MOST_TOKENS]
    rows = [
        [
            Cell(str(place), int(place)),
            Cell(tokens[place], code=True),
            Cell(f"{phases[last, place]:.1f}\u00b0", float(phases[last, place])),
            Cell(f"{norms[last, place]:.3f}", float(norms[last, place])),
        ]
        for place in order
    ]
    table = Table(
        f"Tokens that moved most, layer {last}",
        ["Position", "Token", "Phase moved", "|z / z0|"],
        rows,
        [True, False, True, True],
        sortable=False,
    )
    pictures[0] = Picture(**{**pictures[0].__dict__, "table": table})
    best = ", ".join(f"{tokens[place]} (at {place}, {phases[last, place]:.1f}\u00b0)" for place in order[:5])
    return Panel("Where tokens moved", [f"In layer {last} these moved most: {best}."], pictures, min_width=40)


def _pair_panel(views: Sequence[LayerView]) -> Panel:
    with_state = [view for view in views if view.state is not None]
    pairs = max(view.state.shape[-1] // 2 for view in with_state if view.state is not None)
    values = np.full((len(views), pairs), np.nan)
    for index, view in enumerate(views):
        if view.state is not None and view.start is not None:
            moved = movement(view.state, view.start).pair_phase[0].mean(dim=0).numpy()
            values[index, : len(moved)] = moved
    across = "channel pair, from the fastest to the slowest"
    picture = _map(values, None, across, "phase moved, degrees", "Mean over tokens and heads.")
    return Panel("Which frequencies moved", [], [picture], min_width=40)


def _map(values: np.ndarray, columns: Sequence[str] | None, across: str, label: str, caption: str) -> Picture:
    finite = values[np.isfinite(values)]
    return Picture(
        svg=inspection_figures.depth_map(values, columns, (across, label)),
        narrow=inspection_figures.depth_map(values, columns, (across, label), narrow=True),
        alt=f"Map of {label} by layer and {across}: values from {finite.min():.3g} to {finite.max():.3g}",
        caption=caption,
        title=label[0].upper() + label[1:] + ".",
    )


def _layer_panel(index: int, view: LayerView) -> Panel:
    pictures = [_heads(view.attention[0].numpy(), f"attention of layer {index}", "Attention.", _GAMMA)]
    if view.moved and view.rope_attention is not None:
        difference = (view.attention - view.rope_attention)[0].abs().numpy()
        pictures.append(
            _heads(difference, f"difference to RoPE's attention in layer {index}", "Difference to RoPE.", _GAMMA)
        )
    if view.state is not None and (view.moved or index == 0):
        products = inner_products(view.state)[0].numpy()
        pictures.append(
            _heads(products, f"inner products of states in layer {index}", "Inner products of states.", 1.0)
        )
    return Panel(f"Layer {index}", [], pictures, min_width=19)


def _heads(maps: np.ndarray, what: str, title: str, gamma: float) -> Picture:
    """A heat map per head, or one where all heads are the same."""
    if np.array_equal(maps, np.broadcast_to(maps[:1], maps.shape)):
        maps, titles = maps[:1], ["all heads"]
    else:
        heads = chosen(len(maps), MOST_HEADS)
        maps, titles = maps[heads], [f"head {head}" for head in heads]
    low, high = pattern_figures.value_range(maps)
    return Picture(
        svg=pattern_figures.pattern_maps(maps, titles, gamma=gamma, narrow=True),  # two heads side by side suit both
        alt=f"Heat maps of the {what}, {', '.join(titles)}: values from {low:.3g} to {high:.3g}",
        caption=f"{0 if abs(low) < 1e-3 else low:.3g} to {high:.3g}; queries down, keys across.",
        title=title,
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 160 else text[:110] + " \u2026 " + text[-40:]
