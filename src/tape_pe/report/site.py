"""A suite as a folder of linked pages: an overview, a page per task, and the files that the numbers come from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from tape_pe.files import replace_folder, staging_folder, write_text
from tape_pe.report.html import template
from tape_pe.report.parts import Cell, Run, Table, duration
from tape_pe.report.scores import Scores, failures, headlines, overview_tables
from tape_pe.report.spread import interval_factor
from tape_pe.report.suite_results import SuiteResults, TaskRuns, read_suite
from tape_pe.report.tables import task_report
from tape_pe.report.task_page import task_page
from tape_pe.results import RESULTS_FILE
from tape_pe.suite.plan import FAILURES_FILE, SITE_FOLDER, SUITE_FILE

GENERATOR = "tape-pe suite"  # marks the folders that may be replaced


def write_site(folder: Path | str, *, output: Path | str | None = None) -> Path:
    """Writes the site of a suite, finished or not, and returns its first page.

    Everything comes from `suite.yaml`, `results.jsonl` and `failures.jsonl`, so a site can be made again where the run
    folders are gone. It appears only once it is complete; an older one is replaced.

    Args:
        folder: the suite's folder.
        output: the folder to write; default: `site` in the suite's folder.

    Raises:
        FileNotFoundError: `folder` is not a suite's folder.
        FileExistsError: `output` holds something other than a site.
        ValueError: a file that cannot be read.
    """
    folder = Path(folder)
    output = Path(output) if output is not None else folder / SITE_FOLDER
    suite = read_suite(folder)
    _check_output(output)
    with staging_folder(output.parent) as staging:
        complete = staging / output.name
        complete.mkdir(mode=0o755)
        _write_files(complete, folder, suite)
        replace_folder(output, complete)
    return output / "index.html"


def _check_output(output: Path) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    index = output / "index.html"
    if not index.is_file() or f'content="{GENERATOR}"' not in index.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"output={str(output)!r}: it holds something other than a site; a new folder is needed")


def _write_files(site: Path, folder: Path, suite: SuiteResults) -> None:
    names = _file_names([task.label for task in suite.tasks], taken=["index"])
    runs = [run for task in suite.tasks for run in task.runs]
    lines = _file_names([run.label for run in runs])
    links = {name: (f"runs/{file}.json", f"configs/{file}.yaml") for name, file in lines.items()}
    for run in runs:
        _write_run(site, run, links[run.label])
    sources = [name for name in (SUITE_FILE, RESULTS_FILE, FAILURES_FILE) if (folder / name).is_file()]
    for name in sources:
        write_text(site / name, (folder / name).read_text(encoding="utf-8"))
    pages = [("Overview", "index.html"), *((task.label, f"{names[task.label]}.html") for task in suite.tasks)]
    common = {"suite": suite.name, "pages": pages, "generator": GENERATOR}
    for task in suite.tasks:
        page, address = task_page(suite, task, links), f"{names[task.label]}.html"
        write_text(site / address, template("suite_task.html.j2").render(**vars(page), **common, here=address))
    values = _overview(suite, dict(pages), sources)
    write_text(site / "index.html", template("suite_index.html.j2").render(**values, **common, here="index.html"))


def _write_run(site: Path, run: Run, addresses: tuple[str, str]) -> None:
    line, config = (site / address for address in addresses)
    for path in (line, config):
        path.parent.mkdir(exist_ok=True)
    write_text(line, json.dumps(asdict(run.result), indent=1, ensure_ascii=False) + "\n")
    write_text(config, yaml.safe_dump(run.result.config, sort_keys=False, allow_unicode=True))


def _file_names(labels: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """A name for each label, of letters that addresses and all file systems bear, different in more than case."""
    used, names = set(taken), {}
    for label in labels:
        plain = re.sub(r"[^A-Za-z0-9_.=-]+", "-", label).strip("-.") or "page"
        name, number = plain, 1
        while name.lower() in used:
            number += 1
            name = f"{plain}-{number}"
        used.add(name.lower())
        names[label] = name
    return names


def _overview(suite: SuiteResults, pages: dict[str, str], sources: Sequence[str]) -> dict[str, Any]:
    done, planned = sum(len(task.finished) for task in suite.tasks), sum(task.planned for task in suite.tasks)
    seeds = suite.tasks[0].seeds
    failed = failures(suite)
    sizes = ((len(suite.encodings), "encoding"), (len(suite.tasks), "task"), (len(seeds), "seed"))
    about = f"{', '.join(_count(*size) for size in sizes)}: {done} of {planned} runs have finished"
    if failed:
        about += f", {len(failed)} failed"
    notes = []
    if len(seeds) == 1:
        notes.append("One seed proves nothing: two seeds of the same encoding can differ more than two encodings do.")
    if suite.unplanned:
        notes.append(f"Left out, as the plan does not have them: {', '.join(suite.unplanned)}.")
    return {
        "title": suite.name,
        "about": about + ".",
        "notes": notes,
        "verdicts": [_verdict(task, pages[task.label]) for task in suite.tasks],
        "tables": overview_tables(suite),
        "plan": _plan(suite, pages),
        "failed": _failed(failed) if failed else None,
        "reading": _reading(len(seeds), suite.baseline),
        "sources": sources,
    }


def _verdict(task: TaskRuns, address: str) -> dict[str, str]:
    """What the intervals say of the score out of range, or of the one in range where there is none."""
    for column in headlines(task):
        if column is not None and (scores := Scores(task, column)).spreads:
            return {"task": task.label, "address": address, "score": column.title.lower(), "text": scores.verdict()}
    return {"task": task.label, "address": address, "score": "", "text": "no scores yet."}


def _plan(suite: SuiteResults, pages: dict[str, str]) -> Table:
    rows = []
    for task in suite.tasks:
        results = [run.result for run in task.runs]
        steps = sorted({result.steps for result in results})
        time = sum(result.train_seconds + result.eval_seconds for result in results)
        rows.append(
            [
                Cell(task.label, link=pages[task.label], note=task_report(task.task).title),
                Cell(f"{len(results)} of {task.planned}", len(results)),
                Cell(str(len(task.failed)), len(task.failed)),
                Cell(str(len(task.encodings)), len(task.encodings)),
                Cell(", ".join(map(str, task.seeds))),
                Cell(" or ".join(f"{count:,}" for count in steps) or "\N{EN DASH}", steps[0] if steps else None),
                Cell(duration(time), time),
            ]
        )
    headers = ["Task", "Finished", "Failed", "Encodings", "Seeds", "Steps", "Time of all runs"]
    return Table("Tasks", headers, rows, [False, True, True, True, False, True, True])


def _failed(failed: dict[str, str]) -> Table:
    rows = [[Cell(name), Cell(why, code=True)] for name, why in failed.items()]
    return Table("Runs that failed in the last attempt", ["Run", "Why"], rows, [False, False])


def _reading(seeds: int, baseline: str) -> list[str]:
    interval = (
        "The interval is Student's 95 % confidence interval of the mean over seeds: were the whole set of seeds drawn "
        "anew many times, 19 of 20 such intervals would hold the mean of all possible seeds, if scores were normally "
        "distributed, which few seeds cannot show. "
    )
    if seeds > 1:
        interval += (
            f"With {seeds} seeds it reaches {interval_factor(seeds):.1f} standard errors to either side, "
            f"{'which is wide because so few seeds say little' if seeds < 6 else 'as so many seeds allow'}. "
        )
    interval += "Where all seeds score the same it has no width; that does not make the next seed certain."
    return [
        "Large: the median over seeds. Below it: the interval of the mean, and the worst seed. Dots are the seeds, the "
        "bar is the interval, the upright line is the median; shares are drawn from 0 % to 100 %, other scores from "
        "the task's smallest to its largest.",
        interval,
        "An encoding is called clearly best only where its interval lies wholly beyond the intervals of all others. "
        "That is a strict rule, and silence is no proof of equality. Of many comparisons some come out by chance.",
        f"The tasks' pages also compare each encoding with {baseline} seed by seed, as runs with the same seed see the "
        "same samples; clear means that the interval of the differences leaves out zero.",
    ]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
