"""Commands that show what there is: `tape encodings`, `info`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import Command, UsageError, quiet_loading, refusing

# --- encodings -----------------------------------------------------------------------------------------------------


def _encodings_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.add_argument("names", type=str, nargs="*", help="Encodings to explain in full; default: a table of all.")
    parser.add_argument("--json", action="store_true", help="Print the facts as JSON.")
    parser.add_argument("--encoding_options", type=dict[str, Any], help="Options of the one encoding that is named.")
    parser.add_argument("--picture", type=str, help="Write a page of position patterns to this HTML file instead.")
    parser.add_argument("--length", type=int, help="Positions to draw; default: 64.")
    parser.add_argument("--model", type=str, help="Draw the layers of this run or model folder.")
    parser.add_argument("--text", type=str, help="What the model reads; default: random tokens.")


def _encodings(namespace: Namespace) -> int:
    from tape_pe.catalogue import describe, facts_as_json
    from tape_pe.encodings import get_encoding

    names, options = list(dict.fromkeys(namespace.names)), namespace.encoding_options
    for name in names:
        refusing(get_encoding, name)
    for option, needed in (("length", "picture"), ("model", "picture"), ("text", "model")):
        if namespace[option] is not None and namespace[needed] is None:
            raise UsageError(f"{option} is {namespace[option]!r}; it needs --{needed}")
    if options and len(names) != 1:
        raise UsageError(f"encoding_options is {options}; it needs the name of one encoding, there are {len(names)}")
    if namespace.picture:
        if namespace.json:
            raise UsageError("json and picture are both set; at most one can be")
        return _picture(namespace, names)
    print(refusing(facts_as_json if namespace.json else describe, names, options))
    return 0


def _picture(namespace: Namespace, names: list[str]) -> int:
    from tape_pe.report.pattern_page import write_encoding_patterns, write_run_patterns

    output, length = Path(namespace.picture), 64 if namespace.length is None else namespace.length
    if namespace.model is None:
        page = refusing(write_encoding_patterns, output, names, namespace.encoding_options, length)
        for name, reason in page.left_out.items():
            print(f"left out {name}: {reason}")
        print(page.path)
        return 0
    if names:
        raise UsageError(f"model is {namespace.model!r}; it has an encoding of its own, {names[0]} cannot be named")
    if namespace.text is not None and namespace.length is not None:
        raise UsageError(f"text and length are both set; the text has a length of its own, not {length}")
    quiet_loading()
    print(refusing(write_run_patterns, output, Path(namespace.model), namespace.text, length))
    return 0


# --- info ----------------------------------------------------------------------------------------------------------


def _no_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    pass


def _info(namespace: Namespace) -> int:
    import torch

    from tape_pe.ops.backends import describe_backends, describe_bias_cost
    from tape_pe.results import library_versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = refusing(describe_backends, device)
    for name, version in library_versions().items():
        print(f"{name}: {version}")
    print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else device}")
    print(f"threads: {torch.get_num_threads()}")
    for name, available, reason, chosen in backends:
        state = "chosen" if chosen else "available" if available else "unavailable"
        print(f"backend {name}: {state} ({reason})")
    print(f"additive biases: {describe_bias_cost(device)}")
    return 0


COMMANDS = {
    "encodings": Command("List positional encodings, or draw them.", _encodings_arguments, _encodings),
    "info": Command("Show versions, device, threads and attention backends.", _no_arguments, _info),
}
