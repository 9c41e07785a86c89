"""The page of position patterns: every encoding, or every layer of a model, as heat maps and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from tape_pe.encodings import ENCODINGS, get_encoding
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.report import pattern_figures
from tape_pe.report.html import check_output, template, write_page
from tape_pe.report.parts import Cell, Panel, Picture, Table
from tape_pe.report.patterns import PatternParts, check_length, model_patterns, pattern_parts

MOST_HEADS = 8
_PARTS = {
    "rotation": "the inner product of rotated all-ones queries and keys over the head's width",
    "bias": "the bias added to attention scores",
    "embedding": "the cosine of the position embeddings",
}


class WrittenPatterns(NamedTuple):
    """A written page.

    Attributes:
        path: the HTML file.
        left_out: why encodings could not be drawn, by name.
    """

    path: Path
    left_out: dict[str, str]


def write_encoding_patterns(
    output: Path, names: Sequence[str] = (), options: Mapping[str, Any] | None = None, length: int = 64
) -> WrittenPatterns:
    """Writes one HTML page with the patterns of untrained encodings.

    Args:
        output: the HTML file to write.
        names: the encodings; by default all that can be built at this length without options.
        options: `encoding_options` of all of them.
        length: number of positions.

    Raises:
        ValueError: a name that is unknown, options that are refused, or a length that cannot be drawn.
    """
    check_output(output)
    check_length(length)
    panels, left_out = [], {}
    for name in names or ENCODINGS:
        try:
            parts = pattern_parts(name, options, length, num_heads=MOST_HEADS)
        except ValueError as error:
            if names:
                raise
            left_out[name] = str(error)
            continue
        encoding = get_encoding(name)
        paragraphs = [" ".join(filter(None, (encoding.summary, encoding.paper)))]
        if options:
            paragraphs.append("Options: " + ", ".join(f"{key}={value}" for key, value in options.items()) + ".")
        panels.append(_panel(name, parts, paragraphs))
    page = template("panels.html.j2").render(
        title="Position patterns of " + (", ".join(names) if names else "all encodings"),
        about=(
            f"{length} positions and {MOST_HEADS} heads of width 64, layer 0, before any training: "
            "where an encoding has parameters, this is what it starts from."
        ),
        reading=_reading(),
        panels=panels,
        left_out=left_out,
    )
    return WrittenPatterns(write_page(output, page), left_out)


def write_model_patterns(output: Path, model: TapeLMForCausalLM, input_ids: Tensor, label: str, text: str) -> Path:
    """Writes one HTML page with the patterns of a model's layers, and returns its path.

    Args:
        output: the HTML file to write.
        model: the decoder.
        input_ids: `[1, N]`, what it reads.
        label: what the page calls the model.
        text: says what it reads.

    Raises:
        ValueError: a length that cannot be drawn.
    """
    check_output(output)
    layers = enumerate(model_patterns(model, input_ids))
    page = template("panels.html.j2").render(
        title=f"Position patterns of {label}",
        about=f"The encoding {model.config.encoding} after training, layer by layer, while the model reads {text}.",
        reading=_reading(),
        panels=[_panel(f"layer {idx}", parts, []) for idx, parts in layers],
        left_out={},
    )
    return write_page(output, page)


def write_run_patterns(output: Path, folder: Path, text: str | None = None, length: int = 64) -> Path:
    """Writes one HTML page with the patterns of a stored model's layers, and returns its path.

    Args:
        output: the HTML file to write.
        folder: a run folder, or any folder that `from_pretrained` reads.
        text: what the model reads, in the words of the folder's tokenizer; by default random tokens.
        length: number of random tokens.

    Raises:
        ValueError: the folder holds no such model, or the tokenizer does not know the text.
        FileNotFoundError: the folder does not exist, or has no tokenizer for a text.
    """
    check_output(output)
    check_length(length)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model is {folder}; it must be a folder with a model's config.json")
    if not isinstance(config := AutoConfig.from_pretrained(folder), TapeLMConfig):
        raise ValueError(f"model is {folder}, a {config.model_type}; it must be a {TapeLMConfig.model_type}")
    model = TapeLMForCausalLM.from_pretrained(folder)
    if text is None:
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        return write_model_patterns(output, model, input_ids, folder.name, f"{length} random tokens")
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"text is {text!r}; model {folder} has no tokenizer that could read it")
    try:
        input_ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text).input_ids])
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"text is {text!r}; the tokenizer of {folder} does not know it: {error}") from error
    return write_model_patterns(output, model, input_ids, folder.name, f"{text!r}")


def _reading() -> list[str]:
    return [
        "A pattern is what an encoding by itself adds to attention between two positions, for queries and keys that "
        f"are all ones. It is the sum of the parts that an encoding has: {_PARTS['rotation']} (for a state z that is "
        f"Re\u27e8z, z'\u27e9 / (D/2)), {_PARTS['bias']}, and {_PARTS['embedding']}.",
        "Heat maps: keys across, queries down; a query sees no later keys. All heads of a picture share its colour "
        "scale, pictures do not share one. Curves: the row of the last query, by distance.",
    ]


def _panel(title: str, parts: PatternParts, paragraphs: Sequence[str]) -> Panel:
    pattern = parts.total()
    if pattern is None:
        nothing = "It adds nothing that depends on positions, so there is nothing to draw."
        return Panel(title, [*paragraphs, nothing], [])
    pattern, titles = _shown_heads(pattern)
    low, high = pattern_figures.value_range(pattern)
    heads = "The same in all heads." if len(titles) == 1 else f"{len(titles)} heads."
    drawn = f"Drawn: {' plus '.join(_PARTS[name] for name in parts.names())}. {heads}"
    if low == high:
        drawn += f" It is {low:.3g} everywhere."
    length = pattern.shape[1]
    by_distance = pattern[:, -1, ::-1]
    maps = Picture(
        svg=pattern_figures.pattern_maps(pattern, titles),
        narrow=pattern_figures.pattern_maps(pattern, titles, narrow=True) if len(titles) > 1 else None,
        alt=f"Heat maps of {title} for {length} positions, {', '.join(titles)}: values from {low:.3g} to {high:.3g}",
        caption=f"Values from {low:.3g} to {high:.3g}.",
    )
    curves = Picture(
        svg=pattern_figures.distance_curves(by_distance, titles),
        narrow=pattern_figures.distance_curves(by_distance, titles, narrow=True),
        alt=f"Pattern of {title} by distance from query {length - 1}: "
        + "; ".join(
            f"{name} goes from {row[0]:.3g} to {row[-1]:.3g}" for name, row in zip(titles, by_distance, strict=True)
        ),
        caption="The last query's row.",
        table=_numbers(title, by_distance, titles),
    )
    return Panel(title, [*paragraphs, drawn], [maps, curves], min_width=26)


def _shown_heads(pattern: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """At most `MOST_HEADS` heads, evenly chosen; one where all are the same."""
    if np.allclose(pattern, pattern[:1], rtol=0, atol=1e-9):
        return pattern[:1], ["all heads"]
    chosen = np.unique(np.linspace(0, len(pattern) - 1, min(MOST_HEADS, len(pattern))).round().astype(int))
    return pattern[chosen], [f"head {head}" for head in chosen]


def _numbers(title: str, by_distance: np.ndarray, titles: Sequence[str]) -> Table:
    """The curves at distances 0, 1, 2, 4, ... and the largest."""
    largest = by_distance.shape[1] - 1
    distances = sorted({0, largest, *(2**power for power in range(largest.bit_length()) if 2**power <= largest)})
    rows = [
        [Cell(name), *(Cell(f"{row[distance]:.3g}", float(row[distance])) for distance in distances)]
        for name, row in zip(titles, by_distance, strict=True)
    ]
    headers = ["Distance", *map(str, distances)]
    return Table(f"{title}: pattern by distance", headers, rows, [False] + [True] * len(distances), sortable=False)
