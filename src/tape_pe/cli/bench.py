"""The command `tape bench`."""

from __future__ import annotations

import sys
import typing
from dataclasses import fields
from pathlib import Path

import docstring_parser
from jsonargparse import ArgumentParser, Namespace

from tape_pe.cli.parts import Command, comma_separated, quiet_loading, refusing

if typing.TYPE_CHECKING:
    from tape_pe.bench.options import BenchOptions


def _bench_arguments(parser: ArgumentParser, arguments: list[str]) -> None:
    from tape_pe.bench.options import BenchOptions

    parser.add_argument("--check", action="store_true", help="Measure the targets, and fail if one is missed.")
    parser.add_argument("--output", type=str, help="File of lines; default: below runs/bench.")
    helps = {one.arg_name: one.description for one in docstring_parser.parse(BenchOptions.__doc__ or "").params}
    hints = typing.get_type_hints(BenchOptions)
    lists = set()
    for f in fields(BenchOptions):
        if isinstance(f.default, tuple):
            lists.add(f.name)
            kind = comma_separated(typing.get_args(hints[f.name])[0])
            parser.add_argument(f"--{f.name}", type=kind, default=list(f.default), help=helps[f.name])
    parser.add_class_arguments(BenchOptions, skip=lists)


def _bench(namespace: Namespace) -> int:
    from tape_pe.bench.check import check_options
    from tape_pe.bench.options import BenchOptions
    from tape_pe.bench.page import write_costs_page
    from tape_pe.bench.tables import latest
    from tape_pe.report.html import check_output
    from tape_pe.results import read_costs

    options = refusing(BenchOptions, **{f.name: namespace[f.name] for f in fields(BenchOptions)})
    if namespace.check:
        options = refusing(check_options, options)
    output = Path(namespace.output or Path("runs") / "bench" / ("check.jsonl" if namespace.check else "bench.jsonl"))
    refusing(check_output, output)
    quiet_loading()
    if output.is_file():
        refusing(read_costs, output)
    try:
        code = (_check if namespace.check else _measure)(options, output)
    except RuntimeError as error:  # such as too little memory
        print(f"tape: error: {error}", file=sys.stderr)
        return 1
    print(f"\n{output}\n{write_costs_page(output.with_suffix('.html'), latest(read_costs(output)))}")
    return code


def _measure(options: BenchOptions, output: Path) -> int:
    from tape_pe.bench.page import about
    from tape_pe.bench.run import run_bench
    from tape_pe.bench.tables import tables
    from tape_pe.report.tables import plain_text

    lines = run_bench(options, output, progress=True)
    for table in tables(lines):
        print(f"{table.caption}\n{plain_text(table)}\n")
    print(about(lines))
    return 0


def _check(options: BenchOptions, output: Path) -> int:
    from tape_pe.bench.page import about
    from tape_pe.bench.run import run_check, target_cost, verdict_line
    from tape_pe.bench.targets import verdict_table
    from tape_pe.report.tables import plain_text

    found = run_check(options, output, lambda verdict: print(verdict_line(verdict), flush=True))
    lines = [target_cost(verdict, verdict.figure, options) for verdict in found if verdict.figure is not None]
    print(f"\n{plain_text(verdict_table(found))}\n\n{about(lines)}")
    failed = [verdict.target.name for verdict in found if not verdict.passed]
    print(f"missed: {', '.join(failed)}" if failed else "all targets are met")
    return 1 if failed else 0


COMMANDS = {
    "bench": Command("Measure what encodings cost, beside RoPE: tape bench [--check].", _bench_arguments, _bench)
}
