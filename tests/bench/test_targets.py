"""Targets: the verdicts, their table, and the exit code of `tape bench --check`."""

import json
from dataclasses import replace

import pytest

from tape_pe.bench import check, run
from tape_pe.bench.options import BenchOptions
from tape_pe.bench.tables import figures_of, target_table
from tape_pe.bench.targets import TARGETS, verdict_table, verdicts
from tape_pe.cli import main
from tape_pe.results import read_costs


def by_name(figures):
    return {verdict.target.name: verdict for verdict in verdicts(figures)}


def test_verdicts_are_on_the_median(make_figures):
    assert all(verdict.passed for verdict in verdicts(make_figures()))
    missed = by_name(make_figures(layer_both=1.101, update_both=5.99, flops=1.06))
    assert not missed["layer_both"].passed
    assert not missed["update_both"].passed
    assert missed["flops"].passed
    assert missed["flops"].word == "pass"
    assert missed["layer_both"].word == "FAIL"


def test_what_is_only_reported_never_fails(make_figures):
    found = by_name(make_figures(step_12=9.0))
    assert found["step_12"].passed
    assert found["step_12"].word not in ("pass", "FAIL")


def test_a_target_without_a_figure_fails(make_figures):
    figures = make_figures()
    del figures["cache"]
    assert not by_name(figures)["cache"].passed


def test_an_allowance_is_shown_and_counts(make_figures):
    figures = make_figures(generate_growth=1.04)
    assert not by_name(figures)["generate_growth"].passed
    figures["generate_growth"] = replace(figures["generate_growth"], allowance=0.05)
    assert by_name(figures)["generate_growth"].passed
    row = next(row for row in verdict_table(verdicts(figures)).rows if "growth" in row[0].text)
    assert row[1].text == "<= 1.00 + 0.05"
    assert [cell.text for cell in row[2:5]] == ["1.04", "0.99 to 1.09", "pass"]


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"decode_4096": 1.56}, 1), ({"update_forward": 4.9}, 1)])
def test_the_exit_code_says_whether_all_are_met(monkeypatch, tmp_path, capsys, make_figures, changes, code):
    figures = make_figures(**changes)
    monkeypatch.setattr(run, "measure_targets", lambda options: iter(figures.items()))
    output = tmp_path / "check.jsonl"
    assert main(["bench", "--check", "--device", "cpu", "--output", str(output)]) == code
    text = capsys.readouterr().out
    for target in TARGETS:
        assert target.what in text
    assert ("all targets are met" in text) == (code == 0)
    for name in changes:
        assert f"missed: {name}" in text
    lines = read_costs(output)
    assert [line.name for line in lines] == list(figures)
    assert all(line.settings["threads"] == 1 for line in lines)
    assert figures_of(lines) == figures
    assert target_table(lines) == verdict_table(verdicts(figures))
    page = output.with_suffix(".html").read_text(encoding="utf-8")
    assert (">FAIL<" in page) == (code == 1)


def test_a_second_check_counts(monkeypatch, tmp_path, make_figures):
    output = tmp_path / "check.jsonl"
    for figures in (make_figures(cache=9.0), make_figures(cache=1.4)):
        monkeypatch.setattr(run, "measure_targets", lambda options, figures=figures: iter(figures.items()))
        main(["bench", "--check", "--device", "cpu", "--output", str(output)])
    assert ">FAIL<" not in output.with_suffix(".html").read_text(encoding="utf-8")
    assert len(output.read_text(encoding="utf-8").splitlines()) == 2 * len(TARGETS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "64"], "lengths=[64]: the targets have sizes of their own"),
        (["--threads", "1,2"], "threads=(1, 2): the targets are checked with one number of threads"),
    ],
)
def test_check_refuses_other_sizes(capsys, flags, message):
    assert main(["bench", "--check", "--device", "cpu", *flags]) == 2
    assert message in capsys.readouterr().err


def test_what_is_counted_meets_its_targets():
    """Not a timing: the same on every machine."""
    figures = dict(check._counted())
    assert set(figures) == {"flops", "parameters", "saved", "cache"}
    for name, figure in figures.items():
        assert by_name({name: figure})[name].passed, (name, figure)
        json.dumps(figure.details)


def test_check_runs_on_one_thread_unless_told_otherwise():
    assert check.check_options(BenchOptions(device="cpu")).threads == (1,)
    assert check.check_options(BenchOptions(device="cpu", threads=(2,))).threads == (2,)
