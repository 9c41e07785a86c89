"""Commands that look into models: `tape inspect`, `stability`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import DTYPES, Command, UsageError, quiet_loading, refusing

_MODEL = "run folder, model folder, adapter folder or hub name"


def _common_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--dtype", type=str, default="float32", help=f"Precision: {', '.join(DTYPES)}.")
    parser.add_argument("--device", type=str, help="Where to run, such as cpu or cuda; default: the GPU if any.")


def _dtype(namespace: Namespace) -> Any:
    import torch

    if namespace.dtype not in DTYPES:
        raise UsageError(f"dtype={namespace.dtype!r}: it must be one of {', '.join(DTYPES)}")
    return getattr(torch, namespace.dtype)


# --- inspect -------------------------------------------------------------------------------------------------------


def _inspect_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("model", type=str, help=f"A {_MODEL}.")
    parser.add_argument("--text", type=str, required=True, help="What the model reads.")
    parser.add_argument("--output", type=str, default="inspect.html", help="The page to write.")
    parser.add_argument("--max_tokens", type=int, default=256, help="Texts of more tokens are refused.")
    _common_arguments(parser)


def _inspect(namespace: Namespace) -> int:
    from tape_pe.analysis import capture, subject
    from tape_pe.analysis.summary import summarize
    from tape_pe.language.pretrained import short_name
    from tape_pe.report.html import check_output
    from tape_pe.report.inspection import Subject, layer_table, write_inspection
    from tape_pe.report.tables import plain_text

    output, dtype = Path(namespace.output), _dtype(namespace)
    refusing(subject.check_text, namespace.text, namespace.max_tokens)
    refusing(check_output, output)
    quiet_loading()
    model, tokenizer = refusing(subject.load_model, namespace.model, dtype, namespace.device)
    known = model.get_input_embeddings().num_embeddings
    ids = refusing(subject.read_tokens, tokenizer, namespace.text, namespace.max_tokens, known)
    views = refusing(capture, model, ids.to(model.device), rope_attention=True)
    has_states = any(view.state is not None for view in views)
    inspected = Subject(
        label=short_name(namespace.model),
        description=subject.describe(model),
        text=namespace.text,
        tokens=subject.token_texts(tokenizer, ids),
        no_states=subject.why_no_states(model, has_states),
    )
    page = write_inspection(output, inspected, views)
    print(plain_text(layer_table([summarize(view) for view in views])))
    if not any(view.moved for view in views):
        print(f"\n{inspected.no_states}")
    print(f"\n{page}")
    return 0


# --- stability -----------------------------------------------------------------------------------------------------


def _stability_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("models", type=str, nargs="+", help=f"Each a {_MODEL}.")
    parser.add_argument("--data", type=str, default="python-stdlib", help="A file or folder of texts, or a data set.")
    parser.add_argument("--split", type=str, default="test", help="Split of a data set.")
    parser.add_argument("--text_field", type=str, default="text", help="Field of a data set that holds the text.")
    parser.add_argument("--texts", type=int, default=16, help="How many texts to read.")
    parser.add_argument("--length", type=int, default=128, help="Tokens of each text.")
    _common_arguments(parser)


def _stability(namespace: Namespace) -> int:
    from tape_pe.analysis.stability import MOVED, first_tokens, front_token, measure_stability
    from tape_pe.analysis.subject import LONGEST, load_model
    from tape_pe.language.pretrained import short_name
    from tape_pe.language.text import read_texts
    from tape_pe.report.stability import stability_tables
    from tape_pe.report.tables import plain_text

    dtype = _dtype(namespace)
    for name, least, most in (("texts", 1, 4096), ("length", 2, LONGEST)):
        if not least <= namespace[name] <= most:
            raise UsageError(f"{name}={namespace[name]}: it must be {least} to {most}")
    texts = refusing(read_texts, namespace.data, split=namespace.split, text_field=namespace.text_field)
    quiet_loading()
    measured, added = {}, set()
    for place in dict.fromkeys(namespace.models):
        model, tokenizer = refusing(load_model, place, dtype, namespace.device)
        token, what = refusing(front_token, tokenizer)
        rows = refusing(first_tokens, tokenizer, texts, namespace.texts, namespace.length)
        name = short_name(place)
        measured[place if name in measured else name] = refusing(measure_stability, model, rows, token)
        added.add(what)
    read = f"{namespace.texts} texts of {namespace.length} tokens, {namespace.dtype}"
    print(f"{read}; in front: {MOVED} {'/'.join(sorted(added))}; layers from 1")
    for table in stability_tables(measured):
        print(f"\n{table.caption}\n{plain_text(table)}")
    return 0


COMMANDS = {
    "inspect": Command(
        "Show what a model's layers do with positions: tape inspect MODEL --text TEXT.", _inspect_arguments, _inspect
    ),
    "stability": Command(
        "How much moving a text changes in models: tape stability MODEL... [--data DATA].",
        _stability_arguments,
        _stability,
    ),
}
