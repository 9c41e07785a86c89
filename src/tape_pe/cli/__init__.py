"""The `tape` command. Options are those of dataclasses, so that a file, a flag and Python have the same names.

Exit codes: 0 done, 1 the work failed, 2 the input was refused (before any work), 130 interrupted.
What only some commands need is imported inside them; torch and transformers come with the package in any case.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentError, ArgumentParser

from tape_pe import __version__
from tape_pe.cli import bench, encodings, finetune, inspection, language, runs, suite
from tape_pe.cli.parts import UsageError

COMMANDS = {
    **runs.COMMANDS,
    **suite.COMMANDS,
    **finetune.COMMANDS,
    **language.COMMANDS,
    **encodings.COMMANDS,
    **inspection.COMMANDS,
    **bench.COMMANDS,
}


def _parser(arguments: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of everything, and the options of the chosen command.

    Only the chosen command's arguments are looked up, since that takes imports.
    """
    parser = ArgumentParser(prog="tape", description="TAPE positional encoding for transformers.", exit_on_error=False)
    parser.add_argument("--version", action="version", version=f"tape-pe {__version__}")
    commands = parser.add_subcommands(dest="command")
    known: list[str] = []
    for name, command in COMMANDS.items():
        subparser = ArgumentParser(description=command.help, exit_on_error=False)
        if arguments[:1] == [name]:
            command.add_arguments(subparser, arguments[1:])
            known = list(subparser.get_defaults().keys())
        commands.add_subcommand(name, subparser, help=command.help)
    return parser, known


def _explain(message: str, known: list[str]) -> str:
    """One line, with the names that an unknown option may have been meant to be."""
    message = re.sub(r"\s*\n\s*", " ", message).strip()
    unknown = re.search(r"(?:unrecognized arguments: --|does not accept option ')([\w.]+)", message)
    if unknown is None:
        return message
    section = unknown[1].rpartition(".")[0]
    names = [name for name in known if name.startswith(f"{section}.")] if section else []
    names = names or sorted({name.partition(".")[0] for name in known})
    if len(names) > 20:
        names = difflib.get_close_matches(unknown[1], names, n=3, cutoff=0.0)
        return f"{unknown[1]} is not an option; the nearest ones are {', '.join(names)}"
    return f"{unknown[1]} is not an option; the options are {', '.join(names)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the `tape` command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    known: list[str] = []
    try:
        if words[:1] == ["train"]:
            words[1:] = runs.expand_config(words[1:])
        if words[:1] == ["lm-eval"]:
            return language.run_lm_eval(words[1:])
        parser, known = _parser(words)
        namespace = parser.parse_args(words)
        return COMMANDS[namespace.command].run(namespace[namespace.command])
    except (UsageError, ArgumentError) as error:
        print(f"tape: error: {_explain(str(error), known)}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"tape: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tape: interrupted", file=sys.stderr)
        return 130
