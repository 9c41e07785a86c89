"""The page about one model at work: what it holds with and without states, and that its numbers are those measured."""

import numpy as np
import pytest
import torch

from tape_pe.analysis import capture
from tape_pe.analysis.positions import movement
from tape_pe.analysis.summary import summarize
from tape_pe.report import inspection_figures
from tape_pe.report.inspection import MOST_TOKENS, Subject, chosen, layer_table, write_inspection

TOKENS = ["$x$", "<b>", "\u2423", "\u21b5", *(f"t{index}" for index in range(4, 14))]


def subject(no_states="There is nothing."):
    return Subject("a <model>", "encoding tape, 3 layers", "some & text", TOKENS, no_states)


@pytest.fixture
def views(make_model, make_tokens):
    return capture(make_model("tape"), make_tokens(1, len(TOKENS)), rope_attention=True)


def test_a_page_with_states(tmp_path, views, parse):
    page = parse(write_inspection(tmp_path / "deep" / "page.html", subject(), views).read_text(encoding="utf-8"))
    rows = page.table("Layers, means over heads and tokens")
    assert [row["Layer"] for row in rows] == ["0", "1", "2"]
    assert rows[2]["States to RoPE"] == f"{100 * summarize(views[2]).states_to_rope:.2f} %"
    assert rows[2]["Attention to RoPE"] == f"{100 * summarize(views[2]).attention_to_rope:.2f}e-2"
    assert rows[0]["State norm"] == "1.000"
    phase = movement(views[2].state, views[2].start).phase[0].mean(dim=0)
    moved = page.table("Tokens that moved most, layer 2")
    assert len(moved) == MOST_TOKENS
    assert moved[0]["Position"] == str(int(phase.argmax()))
    assert moved[0]["Token"] == TOKENS[int(phase.argmax())]
    assert moved[0]["Phase moved"] == f"{float(phase.max()):.1f}\u00b0"
    for title in ("How positions change with depth", "Where tokens moved", "Which frequencies moved", "Layer 2"):
        assert title in page.text
    images = page.attributes("img")
    assert len(images) == 3 + 2 + 1 + 2 + 3 + 3  # by depth, by token, by pair, and the heads of each layer
    assert all(image["alt"] and image["src"].startswith("data:image/svg+xml") for image in images)
    assert len({image["alt"] for image in images}) == len(images)
    assert "There is nothing." not in page.text


@pytest.mark.parametrize(("encoding", "pictures"), [("nope", 3), ("rope", 4)])
def test_a_page_without_moved_states(tmp_path, make_model, make_tokens, parse, encoding, pictures):
    views = capture(make_model(encoding), make_tokens(1, len(TOKENS)), rope_attention=True)
    page = parse(write_inspection(tmp_path / "page.html", subject(), views).read_text(encoding="utf-8"))
    assert "There is nothing." in page.text
    assert len(page.attributes("img")) == pictures  # attention, and RoPE's states once
    assert "How positions change with depth" not in page.text
    assert ("Phase moved" in page.text) == (encoding == "rope")


def test_many_layers_and_heads_are_thinned_out(tmp_path, make_model, make_tokens, parse):
    sizes = {"num_hidden_layers": 9, "num_attention_heads": 12, "hidden_size": 48}
    model = make_model("tape", 6, **sizes)
    views = capture(model, make_tokens(1, len(TOKENS)), rope_attention=True)
    page = parse(write_inspection(tmp_path / "page.html", subject(), views).read_text(encoding="utf-8"))
    assert len(page.table("Layers, means over heads and tokens")) == 9
    assert "Of 9 layers, 0, 2, 3, 5, 6, 8 are drawn below" in page.text
    assert any("attention of layer 8, head 0, head 2, head 3" in image["alt"] for image in page.attributes("img"))


def test_layers_without_a_state_are_left_blank():
    view = summarize(capture_like(state=False))
    table = layer_table([view, summarize(capture_like(state=True))])
    assert [cell.text for cell in table.rows[0][:2]] == ["0", "\u2013"]
    assert table.rows[1][1].text == "1.000"
    assert "State norm" not in layer_table([view]).headers


def capture_like(state):
    from tape_pe.analysis.capture import LayerView

    attention = torch.eye(4)[None, None]
    start = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
    return LayerView(attention, start, start, attention) if state else LayerView(attention)


def test_chosen():
    assert chosen(3, 8) == [0, 1, 2]
    assert chosen(30, 4) == [0, 10, 19, 29]
    assert chosen(1, 6) == [0]


def test_a_folder_is_no_page(tmp_path, views):
    with pytest.raises(IsADirectoryError):
        write_inspection(tmp_path, subject(), views)


@pytest.mark.parametrize("narrow", [False, True])
def test_figures(narrow):
    values = np.array([[1.0, np.nan, 2.0], [1.0, 1.5, 0.5]])
    for picture in (
        inspection_figures.depth_curves(values, ["head 0", "head 1"], "norm"),
        inspection_figures.depth_map(values, ["$a$", "bcd", "<c>"], ("token", "x"), narrow=narrow),
        inspection_figures.depth_map(np.full((2, 3), np.nan), None, ("token", "x"), narrow=narrow),
    ):
        assert picture.startswith(b"<?xml")
    again = inspection_figures.depth_map(values, ["$a$", "bcd", "<c>"], ("token", "x"), narrow=narrow)
    assert again == inspection_figures.depth_map(values, ["$a$", "bcd", "<c>"], ("token", "x"), narrow=narrow)
    assert b"$a$" in again
    assert b"&lt;c&gt;" in again
