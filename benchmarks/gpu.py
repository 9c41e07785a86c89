"""Are the GPU backends right, and are they faster? Run it on the first card at hand:

    python benchmarks/gpu.py

compares outputs and gradients of each backend with the fp64 reference in all dtypes, times attention, cached decoding,
the update of position states and a whole (compiled) layer, and prints one table: times of TAPE as ratios to RoPE by
torch's fastest kernel. It takes less than five minutes; what does not fit is marked so. Every finding is a JSON line in
`--output`.

Each variant runs in a process of its own, and what fails is reported in its place while the rest goes on: a kernel that
reads memory it must not ends the process, and the next one continues after it.

Exit codes: 0 done, 1 a check failed or something crashed, 2 there is no GPU. `--dry_run` walks through tiny cases on
the CPU, with TRITON_INTERPRET=1 through the Triton kernels as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_cases import DTYPES, TOLERANCES, VARIANTS, Case, cases_of, run, tiny
from jsonargparse import ArgumentParser, Namespace

from tape_pe.results import append_values, git_revision, library_versions, whole_lines

GRACE_SECONDS = 15.0
"""Time that a worker has beyond its share before it is ended: it looks at the clock between cases only."""
OUT_OF_TIME = "out of time"
LOST = 3
"""Exit code of a worker that cannot use the device any more: its last case says why, and another worker goes on."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Args:
        output: file of JSON lines; written anew.
        minutes: time for everything.
        tokens: tokens of a batch in timed cases.
        lengths: sequence lengths of timed cases.
        repeat_seconds: time for the repetitions of a timed case.
        dry_run: on the CPU, in tiny sizes.
        variant: used by the script itself: do the cases of this variant, and no other.
        first: used by the script itself: begin with this case.
    """

    output: str = "runs/gpu.jsonl"
    minutes: float = 5.0
    tokens: int = 16384
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    repeat_seconds: float = 0.2
    dry_run: bool = False
    variant: str | None = None
    first: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_class_arguments(Options)
    options = Options(**_plain(parser.parse_args(arguments)))
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA GPU here (--dry_run true walks through the cases on the CPU)")
        return 2
    if options.variant is not None:
        return work(options)
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    Path(options.output).write_text("")
    started = time.monotonic()
    for number, variant in enumerate(VARIANTS):
        left = 60 * options.minutes - (time.monotonic() - started)
        supervise(options, variant, left / (len(VARIANTS) - number))
    lines = read(Path(options.output))
    print(report(lines, options))
    return 0 if all(line.get("ok", True) and not line.get("crashed") for line in lines) else 1


def _plain(namespace: Namespace) -> dict[str, Any]:
    values = dict(namespace.as_dict())
    values["lengths"] = tuple(values["lengths"])
    return values


def supervise(options: Options, variant: str, seconds: float) -> None:
    """Runs the cases of a variant in processes of their own, a new one after each that ends before its time."""
    output = Path(options.output)
    cases = _cases(options, variant)
    ends = time.monotonic() + seconds
    first = 0
    while first < len(cases) and (left := ends - time.monotonic()) > 0:
        before = len(read(output))
        command = [sys.executable, __file__, *_arguments(options), "--variant", variant, "--first", str(first)]
        try:
            process = subprocess.run([*command, "--minutes", str(left / 60)], timeout=left + GRACE_SECONDS)
            problem = f"the process ended with the code {process.returncode}"
            problem = None if process.returncode in (0, LOST) else problem
        except subprocess.TimeoutExpired:
            problem = "took too long"
        first += len(read(output)) - before
        if problem is not None and first < len(cases):
            append_values(output, {"variant": variant, "case": asdict(cases[first]), "crashed": True, "error": problem})
            first += 1
    for case in cases[first:]:
        append_values(output, {"variant": variant, "case": asdict(case), "error": OUT_OF_TIME})


def _arguments(options: Options) -> list[str]:
    lengths = json.dumps(list(options.lengths))
    arguments = ["--output", options.output, "--tokens", str(options.tokens), "--lengths", lengths]
    arguments += ["--repeat_seconds", str(options.repeat_seconds)]
    return [*arguments, "--dry_run", "true"] if options.dry_run else arguments


def work(options: Options) -> int:
    """Does the cases of one variant and appends a line for each."""
    assert options.variant is not None
    ends = time.monotonic() + 60 * options.minutes
    device = torch.device("cpu" if options.dry_run else "cuda")
    warnings.simplefilter("ignore")  # torch says at length why a kernel cannot do a case
    for case in _cases(options, options.variant)[options.first :]:
        line: dict[str, Any] = {"variant": options.variant, "case": asdict(case)}
        started = time.monotonic()
        if started > ends:
            line["error"] = OUT_OF_TIME
        else:
            try:
                line.update(run(case, options.variant, device, options.repeat_seconds))
                _synchronize(device)
            except Exception as error:  # whatever it is, it is this case's finding
                line["error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            if _lost(device):
                line["crashed"] = True
        line["seconds"] = round(time.monotonic() - started, 2)
        append_values(Path(options.output), line)
        if line.get("crashed"):
            return LOST
    return 0


def _synchronize(device: torch.device) -> None:
    """Errors in kernels show here at the latest."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _lost(device: torch.device) -> bool:
    """Whether this process cannot use the device any more, as after a kernel that read memory it must not."""
    try:
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _cases(options: Options, variant: str) -> list[Case]:
    cases = cases_of(variant, options.tokens, options.lengths)
    return list(dict.fromkeys(map(tiny, cases))) if options.dry_run else cases


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of the file."""
    return [json.loads(line) for line in whole_lines(path).splitlines()]


def report(lines: list[dict[str, Any]], options: Options) -> str:
    """Everything as one page of text."""
    versions = library_versions() | {"triton": _triton_version()}
    cuda = torch.cuda.is_available() and not options.dry_run
    device = "cpu (dry run: the times mean nothing)"
    if cuda:
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    text = [device, ", ".join(f"{name} {version}" for name, version in versions.items()) + f", {git_revision()}", ""]
    text += ["Largest error of outputs and gradients, relative to the largest entry, against the reference in fp64:"]
    text += _table(["", *DTYPES], [[variant, *_errors(lines, variant)] for variant in VARIANTS[1:]])
    text += ["", "Time of RoPE in ms, and of TAPE as a ratio to it (update: of the published einsums, and the ratio):"]
    rows = []
    for case in dict.fromkeys(
        json.dumps(line["case"]) for line in lines if not line["case"]["kind"].startswith("check")
    ):
        rows.append(_times(lines, json.loads(case)))
    heads = ["", "N", "D", "H/Hkv", "mask", "", *VARIANTS]
    text += _table(heads, rows)
    notes = dict.fromkeys(f"{line['variant']}: {line['error']}" for line in lines if "error" in line)
    text += ["", *notes] if notes else []
    return "\n".join([*text, f"All lines: {options.output}"])


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _errors(lines: list[dict[str, Any]], variant: str) -> list[str]:
    """A cell per dtype: the largest error, and whether it is too large or some cases failed."""
    cells = []
    for dtype in DTYPES:
        checks = [line for line in lines if line["variant"] == variant and line["case"]["kind"].startswith("check")]
        chosen = [line for line in checks if line["case"]["dtype"] == dtype]
        found = [error for line in chosen for error in line.get("errors", {}).values()]
        failed = sum("error" in line for line in chosen)
        cell = f"{max(found):.1e}" if found else "-"
        if found and max(found) > TOLERANCES[dtype]:
            cell += " WRONG"
        cells.append(cell + (f" ({failed} of {len(chosen)} failed)" if failed else ""))
    return cells


def _times(lines: list[dict[str, Any]], case: dict[str, Any]) -> list[str]:
    """A row: the case, RoPE's time, and ratios."""
    found = {line["variant"]: line for line in lines if line["case"] == case}
    base = found.get(VARIANTS[0], {}).get("ms")
    cells = []
    for variant in VARIANTS:
        line = found.get(variant, {})
        if "ms" not in line:
            cells.append("failed" if "error" in line else "-")
        elif variant == VARIANTS[0] or base is None:
            cells.append(
                f"{line['ms']:.3f} ms" + (f" {line['kernel'].split('_')[0].lower()}" if "kernel" in line else "")
            )
        else:
            cells.append(f"{line['ms'] / base:.2f}")
    what = "fwd+bwd" if case["backward"] else "fwd"
    return [
        case["kind"], str(case["keys"]), str(case["width"]), f"{case['heads']}/{case['kv_heads']}", case["mask"], what,
        *cells,
    ]  # fmt: skip


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    ]


if __name__ == "__main__":
    sys.exit(main())
