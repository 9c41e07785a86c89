"""The page as a reader gets it: parsed back, numbers in their cells, nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tape_pe.report import write_report


@pytest.fixture
def page(tmp_path: Path, parse: Callable[[str], Any]) -> Callable[..., Any]:
    """Writes the report of some runs and parses it."""

    def write(runs: list[Path], **options: str) -> Any:
        return parse(write_report(runs, tmp_path / "report.html", **options).read_text(encoding="utf-8"))

    return write


def test_numbers_are_in_the_right_cells(make_run, page):
    runs = [
        make_run("a", encoding="tape", seed=3),
        make_run("b", encoding="rope", train_seconds=12.0, metrics={"exact_match": 0.5}),
    ]
    rows = page(runs).table("Runs")
    assert rows[0] == {
        "Run": "a",
        "Encoding": "tape",
        "Seed": "3",
        "Parameters": "790,528",
        "Steps": "100",
        "Tokens": "1,234,567",
        "Train time": "18 min 40 s",
        "In range": "100.0 %",
        "Out of range": "10.4 %",
        "Whole grid": "32.8 %",
    }
    assert rows[1]["Encoding"] == "rope"
    assert rows[1]["Train time"] == "12.0 s"
    assert rows[1]["Whole grid"] == "50.0 %"
    assert rows[1]["In range"] == "\N{EN DASH}", "a missing score is shown as missing"


def test_one_run_has_no_comparison(make_run, page):
    parsed = page([make_run("alone")])
    assert parsed.captions[0] == "Runs"
    assert "Configuration keys that differ" not in parsed.captions
    assert "Median and worst seed per encoding" not in parsed.captions
    assert "One seed proves nothing" in parsed.text
    assert "the latest counts" not in parsed.text


def test_median_and_worst_seed(make_run, page):
    shares = {0: 0.1, 1: 0.7, 2: 0.4}
    runs = [make_run(f"t{s}", seed=s, metrics={"exact_match": share}) for s, share in shares.items()]
    runs.append(make_run("r0", encoding="rope", metrics={"exact_match": 0.2}))
    parsed = page(runs)
    tape, rope = parsed.table("Median and worst seed per encoding")
    assert (tape["Encoding"], tape["Runs"], tape["Seeds"]) == ("tape", "3", "0, 1, 2")
    assert (tape["Whole grid, median"], tape["Whole grid, worst"]) == ("40.0 %", "10.0 %")
    assert (rope["Runs"], rope["Whole grid, median"]) == ("1", "20.0 %")
    assert "Only one seed of rope" in parsed.text


def test_differing_and_whole_configurations(make_run, result, page):
    other = result("b", encoding="rope", seed=1)
    other.config["model"]["theta"] = 500000.0
    parsed = page([make_run("a"), make_run("b", other)])
    rows = {row["Key"]: (row["a"], row["b"]) for row in parsed.table("Configuration keys that differ")}
    assert rows == {
        "model.encoding": ("tape", "rope"),
        "model.theta": ("not set", "500000.0"),
        "training.seed": ("0", "1"),
    }
    assert "Whole configuration of a" in parsed.text
    assert '"hidden_size": 32' in parsed.text


def test_origin_of_the_numbers(make_run, page):
    runs = [
        make_run("a", git_revision=None),
        make_run("b", git_revision="f" * 40 + "+dirty", versions={"python": "3.12.1"}),
    ]
    parsed = page(runs)
    first, second = parsed.table("Revision, versions and evaluation of each run")
    assert first["Git revision"] == "\N{EN DASH}"
    assert (first["torch"], first["Evaluation time"]) == ("2.9.0", "9.3 s")
    assert second["Git revision"] == "f" * 12 + "+dirty"
    assert (second["python"], second["torch"]) == ("3.12.1", "\N{EN DASH}")
    assert "uncommitted changes (+dirty): b" in parsed.text


def test_latest_result_line_counts_and_the_page_says_so(make_run, result, page):
    old, new = result("a", metrics={"exact_match": 0.1}), result("a", metrics={"exact_match": 0.9})
    parsed = page([make_run("a", old, new)])
    assert parsed.table("Runs")[0]["Whole grid"] == "90.0 %"
    assert "the latest counts" in parsed.text
    assert parsed.table("Revision, versions and evaluation of each run")[0]["Result lines"] == "latest of 2"


def test_nothing_is_loaded_from_elsewhere(make_run, tmp_path, parse):
    html = write_report([make_run("a"), make_run("b")], tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//[a-z0-9]+\.", html, re.IGNORECASE)
    parsed = parse(html)
    sources = [image["src"] for image in parsed.attributes("img")] + [s["srcset"] for s in parsed.attributes("source")]
    assert len(sources) == 5, "loss curves twice (wide, phone), a colour scale, two heat maps"
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not parsed.attributes("link")
    assert all("src" not in script for script in parsed.attributes("script"))


def test_names_and_configurations_are_escaped(make_run, page):
    name = "<script>alert('$x')&amp;\""
    parsed = page([make_run(name), make_run("_b")], title="<b>bold</b>")
    assert len(parsed.attributes("script")) == 1
    assert not parsed.attributes("b")
    assert parsed.table("Runs")[0]["Run"] == name
    assert "<b>bold</b>" in parsed.text
    curves = base64.b64decode(parsed.attributes("img")[0]["src"].partition(",")[2]).decode()
    assert "&lt;script&gt;alert('$x')" in curves
    assert "<script" not in curves


def test_accessible_markup(make_run, page):
    parsed = page([make_run("a"), make_run("b")])
    assert all(image["alt"] for image in parsed.attributes("img"))
    assert all(head["scope"] in {"col", "row"} for head in parsed.attributes("th"))
    assert len(parsed.captions) == len(parsed.tables)
    identifiers = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    named_by = [attributes["aria-labelledby"] for _, attributes in parsed.tags if "aria-labelledby" in attributes]
    assert set(named_by) <= set(identifiers)
    assert parsed.attributes("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in parsed.attributes("meta"))


def test_tables_can_be_sorted_by_value(make_run, tmp_path, parse):
    path = write_report([make_run("a"), make_run("b", encoding="rope", metrics={})], tmp_path / "report.html")
    html = path.read_text(encoding="utf-8")
    parsed = parse(html)
    assert sum("sortable" in (table.get("class") or "") for table in parsed.attributes("table")) == 2
    values = [cell["data-value"] for cell in parsed.attributes("td") if "data-value" in cell]
    assert "790528" in values
    assert "0.328125" in values
    assert 'setAttribute("aria-sort", next)' in html


def test_heat_map_numbers_are_also_a_table(make_run, page):
    rows = page([make_run("a")]).table("a: exact match in %, by operand lengths n and m")
    assert rows[2] == {"Digits": "n=3", "m=1": "25.0", "m=2": "25.0", "m=3": "25.0", "m=4": "0.0"}


def test_two_runs_of_one_name_are_told_apart(make_run, page):
    runs = [make_run("a", folder="first"), make_run("a", folder="second")]
    assert [row["Run"] for row in page(runs).table("Runs")] == [str(run) for run in runs]


def test_a_section_per_task(make_run, page):
    copy = make_run("c", task="copy_task", metrics={"token_accuracy": 0.123456, "lengths": [1, 2]})
    parsed = page([make_run("a"), copy])
    assert parsed.captions.count("Runs") == 2
    assert "Addition" in parsed.text
    header, row = [table for table, caption in zip(parsed.tables, parsed.captions, strict=True) if caption == "Runs"][1]
    assert header[-1] == "Token accuracy"
    assert row[-1] == "0.1235"
    assert "Lengths" not in header


def test_runs_without_loss_curve_or_grid(make_run, page):
    parsed = page([make_run("a", loss_curve=[], metrics={})])
    assert not parsed.attributes("img")
    assert "Without a loss curve: b" in page([make_run("c"), make_run("b", loss_curve=[])]).text


def test_output_is_complete_or_absent(make_run, tmp_path, monkeypatch):
    output = tmp_path / "deep" / "er" / "report.html"
    assert write_report([make_run("a")], output) == output
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]
    before = output.read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("tape_pe.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report([make_run("b")], output)
    assert output.read_bytes() == before
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]


def test_the_same_runs_give_the_same_page(make_run, tmp_path):
    runs = [make_run("a"), make_run("b")]
    first, second = (write_report(runs, tmp_path / name).read_bytes() for name in ("1.html", "2.html"))
    assert first == second


def test_refuses_an_empty_list(tmp_path):
    with pytest.raises(ValueError, match="runs is empty"):
        write_report([], tmp_path / "report.html")


def test_refuses_runs_without_results(tmp_path):
    run = tmp_path / "fresh"
    with pytest.raises(FileNotFoundError, match=r"no run folder .*fresh"):
        write_report([run], tmp_path / "report.html")
    run.mkdir()
    with pytest.raises(FileNotFoundError, match=r"tape evaluate .*fresh"):
        write_report([run], tmp_path / "report.html")
    (run / "results.jsonl").touch()
    with pytest.raises(ValueError, match=r"fresh has no result lines.*tape evaluate"):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_refuses_a_run_given_twice(make_run, tmp_path):
    run = make_run("a")
    with pytest.raises(ValueError, match="twice"):
        write_report([run, run], tmp_path / "report.html")


def test_refuses_a_folder_as_output(make_run, tmp_path):
    with pytest.raises(IsADirectoryError, match="output is a folder"):
        write_report([make_run("a")], tmp_path)


@pytest.mark.parametrize("grid", [[[0.5], [0.5, 1.0]], [[1.5]], [["a"]], [[]]])
def test_refuses_a_malformed_grid(make_run, tmp_path, grid):
    run = make_run("a", metrics={"grid": grid, "trained_digits": 1})
    with pytest.raises(ValueError, match=r"run a: metrics\['grid'\]"):
        write_report([run], tmp_path / "report.html")
