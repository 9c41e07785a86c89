"""Scores by size: the right numbers for the right sizes, of one run and of several seeds."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from tests.report.suites import TASKS, metrics

from tape_pe.report import curve_figures
from tape_pe.report.parts import Run, Series
from tape_pe.report.tables import TASK_REPORTS, task_report
from tape_pe.tasks import TASKS as REGISTERED
from tape_pe.tasks.sequences import SequenceTask

BY_SIZE = [label for label in TASKS if label != "addition"]
LOOK = ("#000000", "-")


@pytest.fixture
def make(result):
    def series(label: str, *skills: float, name: str = "tape") -> Series:
        task = TASKS.get(label, {"name": label})
        runs = [
            Run(f"{name}-{i}", result(task=task["name"], metrics=metrics(task["name"], skill), seed=i))
            for i, skill in enumerate(skills)
        ]
        for run in runs:
            run.result.config["task"] = dict(task)
        return Series(name, runs, LOOK)

    return series


def texts(svg: bytes) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_every_registered_task_has_a_report():
    assert set(TASK_REPORTS) == set(REGISTERED)


@pytest.mark.parametrize("label", TASKS)
def test_columns_read_what_the_task_scores(make, label):
    runs = make(label, 0.5).runs
    report = task_report(TASKS[label]["name"])
    values = [column.value(runs[0].result) for column in report.columns(runs)]
    assert len(values) == 3
    assert None not in values
    in_range, out_of_range = (column.value(runs[0].result) for column in (report.in_range, report.out_of_range))
    worse = in_range > out_of_range if report.in_range.higher_is_better else in_range < out_of_range
    assert worse, "this model does worse out of range"


@pytest.mark.parametrize("name", [name for name, task in REGISTERED.items() if issubclass(task, SequenceTask)])
def test_what_counts_is_drawn_first(make, name):
    picture = task_report(name).panels([make(name, 0.5)])[0].pictures[0]
    counts = {"token": "Share of tokens right.", "sequence": "Share of whole samples right."}
    assert picture.title == counts[REGISTERED[name].headline]


@pytest.mark.parametrize("label", BY_SIZE)
def test_numbers_are_also_a_table(make, label):
    panel = task_report(TASKS[label]["name"]).panels([make(label, 0.4), make(label, 0.8, 0.6, 0.5, name="rope")])[0]
    for picture in panel.pictures:
        assert "tape" in picture.alt
        assert "median of 3 seeds" in picture.alt
        tape, rope = picture.table.rows
        assert len(tape) == len(rope) == len(picture.table.headers) == len(picture.table.numeric)
        assert tape[0].text == "tape"
        assert all(cell.value is not None for cell in tape[1:])


def test_median_of_seeds_at_each_length(make):
    picture = task_report("passkey").panels([make("passkey", 0.2, 0.9, 0.5)])[0].pictures[0]
    assert [cell.text for cell in picture.table.rows[0]] == ["tape", "100.0", "50.0", "25.0", "6.2"]
    assert picture.table.headers[1:] == ["64", "128", "256", "512"]
    assert {"trained", "tokens of the prompt", "64", "512", "100 %"} <= set(texts(picture.svg))
    assert "100.0 % at 64, 6.2 % at 512" in picture.alt


def test_perplexity_is_no_share(make):
    panel = task_report("language_modelling").panels([make("text", 0.5)])[0]
    assert [picture.title for picture in panel.pictures] == ["Perplexity."]
    assert "%" not in "".join(texts(panel.pictures[0].svg))
    assert panel.pictures[0].table.rows[0][-1].text == "11.50"


def test_guessing_is_drawn_for_what_counts(make):
    first, second = task_report("state_tracking").panels([make("s3", 0.5)])[0].pictures
    assert "guessing" in texts(first.svg)
    assert "guessing" not in texts(second.svg)


def test_same_scores_are_drawn_once(make):
    assert len(task_report("modular_arithmetic").panels([make("modular", 0.5)])[0].pictures) == 1


def test_sizes_of_two_numbers_are_a_map(make):
    panel = task_report("flip_flop").panels([make("flip_flop", 0.5)])[0]
    assert panel.key is not None
    found = texts(panel.pictures[0].svg)
    assert {"32 / 80*", "64 / 80", "32 / 98", "128 / 10"} <= set(found), "* marks the trained length and percentage"
    recall = task_report("associative_recall").panels([make("recall", 0.5)])[0].pictures[0]
    assert {"64 / 4*", "64 / 8*", "64 / 16", "256 / 64"} <= set(texts(recall.svg))


def test_runs_of_other_sizes_are_compared_where_they_meet(make):
    series = make("copy", 0.4, 0.6)
    other = series.runs[1].result.metrics
    for name in ("sizes", "token_accuracy", "sequence_accuracy"):
        other[name] = other[name][:3]
    picture = task_report("copy").panels([series])[0].pictures[0]
    assert picture.table.headers[1:] == ["2", "5", "8"]


def test_a_run_without_scores_is_left_out(make):
    series = make("copy", 0.4)
    series.runs[0].result.metrics.clear()
    assert task_report("copy").panels([series]) == []


def test_refuses_scores_that_do_not_match_their_sizes(make):
    series = make("copy", 0.4)
    series.runs[0].result.metrics["token_accuracy"].pop()
    with pytest.raises(ValueError, match=r"run tape-0: metrics\['token_accuracy'\]"):
        task_report("copy").panels([series])


def test_bands_go_from_the_smallest_to_the_largest():
    band = curve_figures.median_band("a", LOOK, [1, 2], [[1.0, 5.0], [3.0, 4.0], [2.0, 9.0]])
    assert (band.middle, band.low, band.high) == ([2.0, 5.0], [1.0, 4.0], [3.0, 9.0])


@pytest.mark.parametrize("narrow", [False, True])
def test_curves_carry_their_labels(narrow):
    band = curve_figures.median_band("_a $x$", LOOK, [1, 2], [[1.0, 0.5], [0.9, 0.4]])
    learning = texts(curve_figures.learning_curves([band], narrow=narrow))
    assert {"_a $x$", "optimizer steps", "training loss (log scale)"} <= set(learning)
    svg = curve_figures.size_curves([band], ("length", "accuracy"), trained=1, narrow=narrow)
    assert {"length", "accuracy", "trained", "100 %"} <= set(texts(svg))
    assert b'id="trained-sizes"' in svg
    assert b'id="trained-sizes"' not in curve_figures.size_curves([band], ("length", "accuracy"), trained=0)
    assert curve_figures.size_curves([band], ("a", "b"), file_format="png").startswith(b"\x89PNG")
