"""What there is to know of every registered encoding: what it says of itself, and what can be measured.

Measured on a decoder of 12 layers x 768 with 12 heads; none of it depends on the vocabulary.
"""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, get_type_hints

import docstring_parser
import torch

from tape_pe.encodings import ENCODINGS, EncodingOptions, get_encoding
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.ops import Bias, PairBias
from tape_pe.report.parts import MISSING as NOT_KNOWN
from tape_pe.report.parts import Cell, Table
from tape_pe.report.tables import plain_text

LAYERS, HEADS, HEAD_DIM = 12, 12, 64
_TOKENS = 7  # of the measured row; a number that no other size has


@dataclass(frozen=True)
class OptionFacts:
    """One option of an encoding.

    Attributes:
        name: its key in `encoding_options`.
        type: its annotation.
        default: its default value.
        description: what it does.
    """

    name: str
    type: str
    default: Any
    description: str


@dataclass(frozen=True)
class EncodingFacts:
    """One encoding; `summary`, `paper`, `extrapolates` and `cost` are its own words, see `Encoding`.

    Attributes:
        name: its registered name.
        options: its options.
        measured_with: the options that the numbers below belong to.
        parameters: parameters that it adds to those of NoPE.
        cached_state: numbers per token, over all layers, that it adds to the 2 * 12 * 768 of cached keys and values.
        shared_bias: shape of the additive bias that is built once for all layers, such as `"[12, N, N]"`; `None`
            without one.
        layer_bias: shape of the additive bias that each layer builds.
        in_place: when backends that can (`Backend.materializes_bias` is false) compute its biases in place and build
            none: `"always"`, `"inference"` or `"never"`; `None` without biases.
    """

    name: str
    summary: str
    paper: str
    extrapolates: str
    cost: str
    options: Sequence[OptionFacts]
    measured_with: Mapping[str, Any]
    parameters: int
    cached_state: int
    shared_bias: str | None
    layer_bias: str | None
    in_place: str | None

    @property
    def whole_cost(self) -> str:
        """`cost`, with the measured part of it in words."""
        parts = [self.cost] if self.cost else []
        if self.cached_state:
            keys_and_values = 2 * LAYERS * HEADS * HEAD_DIM
            parts.append(
                f"caches {self.cached_state:,} numbers per token beside {keys_and_values:,} of keys and values"
            )
        if self.shared_bias:
            parts.append(f"additive bias {self.shared_bias}, built once")
        if self.layer_bias:
            parts.append(f"additive bias {self.layer_bias} in each layer")
        if self.in_place in ("always", "inference"):
            when = "" if self.in_place == "always" else ", except in training"
            parts.append(f"no bias on a backend that computes it in place{when}")
        return "; ".join(parts)


def encoding_facts(name: str, options: Mapping[str, Any] | None = None) -> EncodingFacts:
    """Looks up and measures one encoding.

    Args:
        name: its registered name.
        options: options to measure it with; by default none, or its `example_options` where there have to be some.

    Raises:
        ValueError: the name is unknown, or the options are refused.
    """
    encoding = get_encoding(name)
    chosen = dict(options) if options else _default_options(name)
    shared_bias, layer_bias, in_place, cached_state = _measured(name, chosen)
    return EncodingFacts(
        name=name,
        summary=encoding.summary or _first_paragraph(encoding),
        paper=encoding.paper,
        extrapolates=encoding.extrapolates,
        cost=encoding.cost,
        options=option_facts(encoding.options_class),
        measured_with=chosen,
        parameters=_parameters(name, chosen) - _parameters("nope", {}),
        cached_state=cached_state,
        shared_bias=shared_bias,
        layer_bias=layer_bias,
        in_place=in_place,
    )


def describe(names: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> str:
    """The encodings named, in full, or a table of all; for `options` see `encoding_facts`."""
    if names:
        return "\n\n".join(facts_text(encoding_facts(name, options)) for name in names)
    return facts_table([encoding_facts(name) for name in ENCODINGS])


def facts_as_json(names: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> str:
    """The facts of the encodings named, or of all, as a JSON list of objects with the fields of `EncodingFacts`."""
    facts = [asdict(encoding_facts(name, options)) for name in names or ENCODINGS]
    return json.dumps(facts, indent=2, ensure_ascii=False)


def option_facts(options_class: type[EncodingOptions]) -> list[OptionFacts]:
    """The fields of a class of options, with what its docstring and those of its parents say of them."""
    descriptions: dict[str, str] = {}
    for parent in reversed(options_class.__mro__):
        for parameter in docstring_parser.parse(vars(parent).get("__doc__") or "").params:
            descriptions[parameter.arg_name] = " ".join((parameter.description or "").split())
    hints = get_type_hints(options_class)
    facts = []
    for f in fields(options_class):
        hint = hints[f.name]
        text = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        facts.append(OptionFacts(f.name, text, default, descriptions.get(f.name, "")))
    return facts


def facts_table(facts: Sequence[EncodingFacts], width: int | None = None) -> str:
    """The facts as text for a terminal of `width` columns, by default the one at hand."""
    width = width or max(100, shutil.get_terminal_size((140, 0)).columns)
    headers = ["Encoding", "What it is", "Parameters", "Beyond training", "Cost", "Options"]
    narrow = max(len(headers[0]), *(len(fact.name) for fact in facts)) + len(headers[2]) + 2 * len(headers)
    shares = [(width - narrow) * share // 100 for share in (28, 21, 25, 26)]
    rows: list[list[Cell]] = []
    for fact in facts:
        options = [f"{option.name}={option.default}" for option in fact.options]
        if fact.measured_with:
            options.append(f"(measured with {', '.join(fact.measured_with)} set)")
        texts = [
            [fact.name],
            _wrapped(f"{fact.summary} {fact.paper}", shares[0]),
            [f"{fact.parameters:,}"],
            _wrapped(fact.extrapolates or NOT_KNOWN, shares[1]),
            _wrapped(fact.whole_cost or NOT_KNOWN, shares[2]),
            [line for option in options or [NOT_KNOWN] for line in _wrapped(option, shares[3])],
        ]
        for line in range(max(map(len, texts))):
            rows.append([Cell(column[line] if line < len(column) else "") for column in texts])
        rows.append([Cell("")] * len(headers))
    table = plain_text(Table("Encodings", headers, rows[:-1], [False, False, True, False, False, False]))
    return (
        f"{table}\n\nParameters: added to those of nope, in {_where()}.\n"
        "Beyond training: on texts longer than those trained on. `tape encodings NAME` explains the options."
    )


def facts_text(fact: EncodingFacts, width: int | None = None) -> str:
    """One encoding in full, its options explained."""
    width = min(width or shutil.get_terminal_size((100, 0)).columns, 120)
    measured = f" with {_inline(fact.measured_with)}" if fact.measured_with else ""
    lines = [
        f"{fact.name}: {fact.summary}",
        f"paper: {fact.paper or NOT_KNOWN}",
        f"parameters: {fact.parameters:,} in {_where()}{measured}",
        f"beyond the trained length: {fact.extrapolates or NOT_KNOWN}",
        f"cost: {fact.whole_cost or NOT_KNOWN}",
        "options:" if fact.options else "options: none",
    ]
    lines = [wrapped for line in lines for wrapped in _wrapped(line, width, "    ")]
    for option in fact.options:
        lines.append(f"  {option.name}: {option.type} = {option.default!r}")
        lines += [f"      {line}" for line in _wrapped(option.description, width - 6)]
    return "\n".join(lines)


def _where() -> str:
    return f"a decoder of {LAYERS} layers x {HEADS * HEAD_DIM} with {HEADS} heads"


def _inline(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, max(width, 10), subsequent_indent=indent)


def _first_paragraph(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _config(name: str, options: Mapping[str, Any], **sizes: int) -> TapeLMConfig:
    fixed = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    return TapeLMConfig(encoding=name, encoding_options=dict(options), **fixed, **sizes)


def _default_options(name: str) -> dict[str, Any]:
    """No options, or the example's where the encoding refuses to be built without."""
    example = dict(get_encoding(name).example_options)
    try:
        _config(name, {})
    except ValueError:
        if not example:
            raise
        return example
    return {}


def _parameters(name: str, options: Mapping[str, Any]) -> int:
    """Of a decoder of the full size, which is never filled."""
    with torch.device("meta"):
        model = TapeLMForCausalLM(_config(name, options, hidden_size=HEADS * HEAD_DIM))
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _measured(name: str, options: Mapping[str, Any]) -> tuple[str | None, str | None, str | None, int]:
    """Shapes of the shared bias and of a layer's, when both are computed in place, and state numbers cached per token.

    They depend on layers and heads, not on the width of the token stream, which is small here.
    """
    with torch.random.fork_rng(devices=[]):
        config = _config(name, options, vocab_size=16, hidden_size=32, intermediate_size=8)
        model = TapeLMForCausalLM(config).eval()
    biases: dict[str, str | None] = {"shared": None, "layer": None}
    in_place: set[str] = set()

    def watch(module: Any, kind: str) -> None:
        original = module.bias

        def bias(*arguments: Any) -> Bias | None:
            result = original(*arguments)
            if result is not None:
                shape = result.shape[1:] if len(result.shape) == 4 else result.shape
                biases[kind] = "[" + ", ".join("N" if size == _TOKENS else str(size) for size in shape) + "]"
                by_rule = isinstance(result, PairBias)
                in_place.add("never" if not by_rule else "always" if result.gathers_gradients else "inference")
            return result

        module.bias = bias

    watch(model.model.encoding, "shared")
    for layer in model.model.layers:
        watch(layer.encoding, "layer")
    cache = model(torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=True).cache
    states = [layer.states for layer in cache.layers if layer.states is not None]
    if biases["shared"] and biases["layer"]:
        in_place.add("never")  # their sum is built
    weakest = next((when for when in ("never", "inference", "always") if when in in_place), None)
    return biases["shared"], biases["layer"], weakest, sum(state.numel() for state in states) // _TOKENS
