"""Pictures are valid files that carry the labels a reader needs."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from tape_pe.report import figures

SVG = "{http://www.w3.org/2000/svg}"


def labels(svg: bytes) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == SVG + "svg"
    return ["".join(text.itertext()) for text in root.iter(SVG + "text")]


def curve(label: str, group: str = "tape") -> figures.Curve:
    return figures.Curve(label, group, [[step, 2.0 / step] for step in range(1, 201)])


@pytest.mark.parametrize("narrow", [False, True])
def test_loss_curves(narrow):
    found = labels(figures.loss_curves([curve("tape-0"), curve("_hidden $x^$", "rope")], narrow=narrow))
    assert {"tape-0", "_hidden $x^$", "optimizer steps", "training loss (log scale)", "0.1", "1"} <= set(found)


def test_loss_curves_of_unusual_values():
    one_point = figures.Curve("one", "a", [[10, 0.5]])
    no_points = figures.Curve("none", "b", [])
    zeros = figures.Curve("zeros", "c", [[1, 0.0], [2, 0.0]])
    found = labels(figures.loss_curves([one_point, no_points, zeros]))
    assert "none" not in found
    assert {"one", "zeros"} <= set(found)
    assert "training loss" in labels(figures.loss_curves([zeros]))


def test_heat_map_shows_values_and_the_trained_square():
    svg = figures.heat_map([[1.0, 0.37], [0.12, 0.0]], trained=1)
    found = labels(svg)
    assert {"100", "37", "12", "0"} <= set(found)
    assert {"digits of the first operand, n", "digits of the second operand, m"} <= set(found)
    assert b'id="trained-square"' in svg


def test_heat_map_keeps_rows_and_columns_apart():
    root = ElementTree.fromstring(figures.heat_map([[0.11, 0.22, 0.33], [0.44, 0.55, 0.66]], trained=1))
    place = {"".join(text.itertext()): (float(text.get("x")), float(text.get("y"))) for text in root.iter(SVG + "text")}
    assert place["11"][0] < place["22"][0] < place["33"][0], "m runs to the right"
    assert place["11"][1] < place["44"][1], "n runs down"


def test_large_heat_map_has_no_values_and_stays_small():
    svg = figures.heat_map(np.full((40, 40), 0.37).tolist(), trained=20)
    assert "37" not in labels(svg)
    assert len(svg) < 100_000


def test_png():
    for picture in (
        figures.loss_curves([curve("a")], file_format="png"),
        figures.heat_map([[1.0]], 4, file_format="png"),
        figures.colour_scale("exact match", file_format="png"),
    ):
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")


def test_colour_scale():
    assert {"0 %", "100 %", "exact match"} <= set(labels(figures.colour_scale("exact match")))


def test_matplotlib_is_left_as_it_was():
    before = dict(matplotlib.rcParams)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    figures.heat_map([[1.0]], 1)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_smoothing_is_a_running_mean():
    values = np.array([1.0, 5.0, 3.0, 7.0])
    np.testing.assert_allclose(figures.smoothed(values, 3), [3.0, 3.0, 5.0, 5.0])
    np.testing.assert_allclose(figures.smoothed(values, 1), values)
    assert [figures.smoothing_window(n) for n in (1, 39, 200)] == [1, 1, 11]


def test_seeds_share_a_colour_and_encodings_do_not():
    looks = figures.line_looks(["tape", "tape", "rope"])
    assert looks[0][0] == looks[1][0] != looks[2][0]
    assert looks[0][1] != looks[1][1]
    alone = figures.line_looks(["tape"] * 3)
    assert len({colour for colour, _ in alone}) == 3
    many = figures.line_looks([str(index) for index in range(12)])
    assert len({(colour, str(dash)) for colour, dash in many}) == 12
