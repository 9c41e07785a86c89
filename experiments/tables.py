"""Writes `results/README.md` from the JSON lines beside it: medians over seeds, with the best and the worst seed; and
the tables of `docs/performance.md`, from `results/bench.jsonl`.

python experiments/tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from tape_pe.bench.page import about
from tape_pe.bench.tables import count_tables, latest, target_table, time_groups, time_table
from tape_pe.report import overview_text, read_suite
from tape_pe.report.parts import MISSING, Cell, Table
from tape_pe.report.scores import Scores, headlines
from tape_pe.report.spread import difference
from tape_pe.report.stability import MEASURES, PRECISIONS, published_table, ratios
from tape_pe.report.suite_results import SuiteResults
from tape_pe.report.tables import plain_text
from tape_pe.results import Cost, read_costs, whole_lines

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PERFORMANCE = ROOT / "docs" / "performance.md"
Line = dict[str, Any]


def read_lines(name: str) -> list[Line]:
    """The lines of a file in `results/`; none if it is not there."""
    return [json.loads(line) for line in whole_lines(RESULTS / name).splitlines()]


def spread(values: Iterable[float], digits: int) -> Cell:
    """`median (smallest to largest)`, or the one value."""
    ordered = sorted(values)
    if not ordered:
        return Cell(MISSING)
    text = f"{median(ordered):.{digits}f}"
    return Cell(text if ordered[0] == ordered[-1] else f"{text} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})")


def table(
    caption: str, lines: list[Line], key: Callable[[Line], tuple[str, ...]], names: list[str], columns: Any
) -> str:
    """One row per key, in order of appearance, with a column of `spread` for each of `columns`."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    headers = [*names, "seeds", *(header for header, _, _ in columns)]
    rows = [
        [*map(Cell, group), Cell(str(len(members)))]
        + [spread([v for v in map(value, members) if v is not None], digits) for _, value, digits in columns]
        for group, members in groups.items()
    ]
    numeric = [False] * len(names) + [True] * (1 + len(columns))
    return f"{caption}:\n\n```\n{plain_text(Table(caption, headers, rows, numeric))}\n```\n"


def adapters() -> str:
    """The table of `experiments/adapters.py`."""
    lines = read_lines("adapters.jsonl")
    columns = [
        (f"loss at {length}", lambda line, length=length: line["held_out_loss"][length], 4)
        for length in ("256", "1024")
    ]
    columns.insert(0, ("trained", lambda line: line.get("finetune", {}).get("parameters", 0), 0))
    return table(
        "Held-out loss in nats per token",
        lines,
        lambda line: (line["method"], f"{line['learning_rate']:g}"),
        ["method", "learning rate"],
        columns,
    )


def context_extension() -> str:
    """The tables of `experiments/context_extension.py`."""
    lines = read_lines("context_extension.jsonl")
    if not lines:
        return "Not run yet.\n"
    lengths = list(lines[0]["metrics"]["perplexity"])
    perplexities = [(n, lambda line, n=n: line["metrics"]["perplexity"][n], 2) for n in lengths]
    perplexities.insert(0, ("trained", lambda line: line["parameters"], 0))
    prompts = list(lines[0]["metrics"]["passkey"])
    passkeys = [
        (f"{n} {kind}", lambda line, n=n, name=name: 100 * line["metrics"]["passkey"][n][name], 1)
        for n in prompts
        for kind, name in (("exact", "exact_match"), ("number", "first_number"))
    ]

    def key(line: Line) -> tuple[str, ...]:
        return (line["config"]["model"]["method"],)

    text = table("Perplexity by window length", lines, key, ["method"], perplexities)
    if passkeys:
        text += "\n" + table("Passkey, % right by prompt length", lines, key, ["method"], passkeys)
    return text


def stability() -> str:
    """The tables of `experiments/stability.py`, and the ratios that sum them up."""
    lines = read_lines("stability.jsonl")
    if not lines:
        return "Not run yet.\n"
    text = ""
    for measure in MEASURES:
        made = published_table(lines, measure)
        text += f"{made.caption}:\n\n```\n{plain_text(made)}\n```\n\n"
    headers = ["measure", "precision", "TAPE / RoPE, largest", "without equivariance / TAPE, smallest"]
    rows = []
    for measure in MEASURES:
        for precision, described in PRECISIONS.items():
            found = ratios(lines, measure, precision)
            # The first layer reads the start state, the same one with and without equivariance.
            bounds = max(found["tape"]), min(found["tape_without_equivariance"][1:])
            rows.append([Cell(measure), Cell(described), *(Cell(f"{bound:.3g}") for bound in bounds)])
    summary = plain_text(Table("", headers, rows, [False, False, True, True]))
    seeds = sorted({line["seed"] for line in lines})
    text += f"Position ids from 3, over all layers (the first left out on the right):\n\n```\n{summary}\n```\n\n"
    losses = {
        model: spread([line["metrics"]["held_out_loss"] for line in lines if line["name"] == model], 3).text
        for model in dict.fromkeys(line["name"] for line in lines)
    }
    told = "; ".join(f"{model} {loss}" for model, loss in losses.items())
    return text + f"Seeds {', '.join(map(str, seeds))}. Held-out loss in nats per byte: {told}.\n"


def suite() -> str:
    """The overview of the suite that two cores ran."""
    if not (RESULTS / "two_cores").is_dir():
        return "Not run yet.\n"
    found = read_suite(RESULTS / "two_cores")
    return f"{_paired(found)}\nAll encodings, the best median first:\n\n```\n{overview_text(found)}\n```\n"


def _paired(found: SuiteResults) -> str:
    """TAPE and its ablations against RoPE, seed by seed."""
    rows = []
    for task in found.tasks:
        for column in filter(None, headlines(task)):
            scores = Scores(task, column).by_seed
            factor = 100 if column.bounds == (0.0, 1.0) else 1
            for encoding in (label for label in task.encodings if label.startswith("tape")):
                if (one := difference(scores.get(encoding, {}), scores.get("rope", {}))) is None:
                    continue
                interval = "" if one.low is None else f"{factor * one.low:+.2f} to {factor * one.high:+.2f}"
                cells = [task.label, column.title, encoding, str(one.pairs), f"{factor * one.mean:+.2f}", interval]
                rows.append([*map(Cell, cells), Cell("clear" if one.is_clear else "")])
    headers = ["Task", "Score", "Encoding", "Pairs", "Mean difference", "95 % of it", ""]
    text = plain_text(Table("", headers, rows, [False] * 3 + [True] * 3 + [False]))
    return f"Against RoPE with the same seed (points; perplexity as it is, where less is better):\n\n```\n{text}\n```\n"


IN_AND_OUT = (("in range", "accuracy_in_range", 100, 1), ("out of range", "accuracy_out_of_range", 100, 1))
PERPLEXITIES = (("perplexity", "perplexity", 1, 3), ("at 4 x the length", "perplexity_longest", 1, 2))
POSITION_WEIGHTS = {"s3": IN_AND_OUT, "recall": IN_AND_OUT, "language": PERPLEXITIES}


def position_weights() -> str:
    """The tables of `experiments/position_weights.py`, each below the suite's own lines for the same task."""
    suite_lines, own = read_lines("two_cores/results.jsonl"), read_lines("position_weights.jsonl")
    tables = []
    for task, scores in POSITION_WEIGHTS.items():
        lines = [
            {**line, "name": encoding}
            for encoding in ("rope", "tape")
            for line in suite_lines
            if line["name"].startswith(f"{task}/{encoding}/")
        ]
        tasks = [line["config"]["task"] for line in lines]
        lines += [line for line in own if line["config"]["task"] in tasks]
        columns = [
            (header, lambda line, key=key, factor=factor: factor * line["metrics"][key], digits)
            for header, key, factor, digits in scores
        ]
        columns.append(("training loss", lambda line: line["loss_curve"][-1][1], 3))
        tables.append(table(task, lines, lambda line: (line["name"],), ["variant of tape"], columns))
    return "\n".join(tables)


def page() -> str:
    """The whole page."""
    return f"""# Results

Measured by the scripts in `experiments/`; every figure below is computed from the JSON lines in this folder by
`python experiments/tables.py`. Medians over seeds, with the smallest and the largest value.

## What an adapter buys

`python experiments/adapters.py`: SmolLM2-135M-Instruct adapted to model code that is newer than the model, about 0.23 M
trained parameters with each method (TAPE's weights alone, without embeddings and norms), 60 steps of 512 tokens. `none`
is the model as it is. The first seed ran with two learning rates; the others with the one that was better for their
method, so the choice was made on the same held-out text as the comparison.

Here LoRA wins: at the same number of trained parameters, changing what attention projects is worth far more for new
text than changing positions, and half the budget in each lies between the two.

{adapters()}
## Context extension in small

`python experiments/context_extension.py`: a small RoPE model trained here on 128 tokens, extended to 512 with each
method. `none` is the base as it is, `none_linear` the base with its positions divided by four. The base is far too
small and too briefly trained to look numbers up, so passkey scores near zero say nothing about the methods.

{context_extension()}
## Stability

`python experiments/stability.py`: what moving a text changes, as in the published test. Ours are 8 layers of width 64,
trained here on 1.2 M bytes of Python, read on 64 texts of 128 tokens; medians over seeds. The published ones have 155 M
parameters. Numbers are of the same kind (the equations are in `tape_pe.analysis.stability`), not of the same models.
Three EOS tokens stand in front, because the byte tokenizer has no BOS; packed training has EOS between documents.

A shift of all positions changes RoPE and TAPE by rounding alone, so the precision decides what the test shows. Rounding
cos and sin to bf16, and nothing else, gives RoPE's states the same difference at every layer, as published. There the
pattern is the published one, for attention and for states: TAPE stays within twice RoPE's difference at every layer,
and without equivariance it is more than five times TAPE's at every layer behind the first, whose state is the start
state with all three.

In fp32 throughout, TAPE's attention stays as near to RoPE's, and without equivariance it is ten thousands of times
TAPE's. Its inner products of states are above twice RoPE's there, because TAPE's states are rounded again in every
layer and RoPE's once; both are below 2e-7. In bf16 throughout, rounding of weights, queries, keys and states hides part
of what the ablation loses: at the layer where they are nearest, it is two to three times TAPE's difference.

{stability()}
## Encodings compared

`tape suite configs/suites/two_cores.yaml`: models of about 0.15 M parameters, equally many for each encoding, on the
same samples in the same order. *Out of range* is beyond the trained lengths. The interval is that of the mean (t);
`clearly best` stands where an encoding's interval lies apart from all others. `tape report results/two_cores` draws the
same lines as pages, with learning curves and scores by length. Some of the first seed's runs are of an earlier revision
than the rest (each line names its own), which differs from it in speed, messages and rounding.

One encoding is clearly best at one thing: ALiBi at text of four times the trained length. With three seeds only large
differences can be told from chance. What can be told about TAPE:

* It reads text of four times the trained length better than RoPE with every seed, by about a sixth of the perplexity,
  and as well as xPos; at the trained length the three are alike. ALiBi, FIRE and randomized positions, which were made
  for longer texts, are far ahead at that length: neither TAPE nor RoPE extrapolates here.
* It is behind RoPE on S3 with every seed, by half a point to two points. Without the update by the gated MLP it is not;
  the other ablations stay behind. A hint, not a proof: the clear intervals are those of TAPE itself out of range and of
  its `diagonal` form.
* On addition, Z60, flip-flop and recall the two cannot be told apart. RoPE failed to learn recall with one of three
  seeds and TAPE with none. Addition beyond the trained square is published as TAPE's strength, for models a thousand
  times as large; here it gets next to nothing of it right, like RoPE, xPos and T5, and the few points go to FIRE, NoPE,
  randomized positions and ALiBi.
* None of the five changes to TAPE is clearly better than TAPE, seed by seed, on both tasks that have them, so the
  defaults stay as published.

{suite()}
## What TAPE's own weights need

`python experiments/position_weights.py`: three tasks of the same suite, one thing changed in how TAPE's own weights are
trained; % of elements that are right, and perplexities. `rope` and `tape` are the suite's runs. Recall and language
have the three changes that did most on S3: `--tasks '[recall,language]' --variants
'["learning rate x 0.1","weight decay 1","position_size 4"]'`.

On S3 a tenth of the learning rate for TAPE's own weights, more weight decay for them, and fewer of them
(`position_size` 4 in place of 16) each take back about half or more of what TAPE loses to RoPE; three times the
learning rate can lose much more. Fewer weights do not carry over: they have the worst seeds of recall out of range and
of text at four times the length. The other two do no harm there, and no good that three seeds can show. So the defaults
stay, and who trains TAPE on state tracking should try the lower rate first.

{position_weights()}"""


def performance() -> str:
    """`docs/performance.md` with new tables; the text around them stays."""
    lines = latest(read_costs(RESULTS / "bench.jsonl"))
    times = [line for line in lines if line.kind == "time"]
    counted = [line for line in lines if line.kind not in ("time", "target")]
    targets = [line for line in lines if line.kind == "target"]
    tables = {
        "targets": _costs([target_table(targets)], targets),
        "counts": _costs(count_tables(counted), counted),
        "times": _costs([time_table(title, group) for title, group in time_groups(times)], times),
    }
    text = PERFORMANCE.read_text(encoding="utf-8")
    for name, made in tables.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        text = re.sub(f"(?<={start}).*?(?={end})", lambda _, made=made: made, text, count=1, flags=re.DOTALL)
    return text


def _costs(tables: list[Table], lines: list[Cost]) -> str:
    if not lines:
        return "Not measured yet.\n"
    blocks = [f"{table.caption}\n\n{plain_text(table)}" for table in tables]
    return about(lines) + "\n\n```\n" + "\n\n\n".join(blocks) + "\n```\n"


if __name__ == "__main__":
    PERFORMANCE.write_text(performance(), encoding="utf-8")
    (RESULTS / "README.md").write_text(page(), encoding="utf-8")
