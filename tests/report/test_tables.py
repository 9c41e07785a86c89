"""Tables as values and as plain text."""

from __future__ import annotations

import pytest

from tape_pe.report import summary_table
from tape_pe.report.parts import Column, Run, duration, metric, percent
from tape_pe.report.tables import flat, over_seeds, variants


def test_summary_table_for_the_terminal(result):
    lines = summary_table([result("tape-0"), result("rope-run", encoding="rope", metrics={})]).splitlines()
    assert (
        " ".join(lines[0].split())
        == "Run Encoding Seed Parameters Steps Tokens Train time In range Out of range Whole grid"
    )
    assert " ".join(lines[2].split()) == "tape-0 tape 0 790,528 100 1,234,567 18 min 40 s 100.0 % 10.4 % 32.8 %"
    assert lines[3].split()[-1] == "\N{EN DASH}"
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1, "columns are aligned"


def test_summary_table_adds_medians_and_tasks(result):
    text = summary_table(
        [result("a", seed=0), result("b", seed=1), result("c", task="copy", metrics={"accuracy": 0.5})]
    )
    assert "Whole grid, worst" in text
    assert "\n\nCopy\n\n" in text
    with pytest.raises(ValueError, match="results is empty"):
        summary_table([])


def test_runs_that_differ_in_more_than_the_seed_are_not_pooled(result):
    runs = [Run(f"r{index}", result(seed=index)) for index in range(3)]
    runs[2].result.config["model"]["hidden_size"] = 64
    groups = variants(runs)
    assert {label: len(group) for label, group in groups.items()} == {
        "tape, hidden_size=32": 2,
        "tape, hidden_size=64": 1,
    }


def test_values_that_read_the_same_are_still_told_apart(result):
    runs = [Run("a", result()), Run("b", result())]
    runs[1].result.config["model"]["hidden_size"] = "32"
    assert [len(group) for group in variants(runs).values()] == [1, 1]


def test_worst_follows_the_direction_of_the_score(result):
    runs = [Run(str(seed), result(seed=seed, metrics={"loss": float(seed)})) for seed in (1, 2, 4)]
    table = over_seeds(runs, [Column("Loss", metric("loss"), text="{:.2f}".format, higher_is_better=False)])
    assert [cell.text for cell in table.rows[0]] == ["tape", "3", "1, 2, 4", "2.00", "4.00"]


def test_metric_reads_numbers_only(result):
    read = metric("x")
    values = [read(result(metrics={"x": x})) for x in (1, 0.5, True, None, "1", float("nan"))]
    assert values == [1.0, 0.5, None, None, None, None]


def test_texts():
    assert [percent(share) for share in (0, 0.0251, 1)] == ["0.0 %", "2.5 %", "100.0 %"]
    seconds = (9.34, 59.96, 1120.4, 3599.7, 7500)
    assert [duration(s) for s in seconds] == ["9.3 s", "1 min 00 s", "18 min 40 s", "1 h 00 min", "2 h 05 min"]


def test_flat():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "d": [1]}


def test_what_follows_from_the_seed_does_not_part_seeds(result):
    runs = [Run(f"r{index}", result(seed=index)) for index in range(2)]
    for index, run in enumerate(runs):
        run.result.config["data"] = {"samples": 100, "redrawn": index}
        run.result.config["output_dir"] = f"runs/{index}"
    assert [len(group) for group in variants(runs).values()] == [2]
