"""Position patterns are what their definition says, and the page shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from tape_pe.encodings import ENCODINGS, Encoding, LayerEncoding, register_encoding
from tape_pe.ops import rotary_state
from tape_pe.report import pattern_figures
from tape_pe.report.pattern_page import write_encoding_patterns, write_model_patterns
from tape_pe.report.patterns import PatternParts, model_patterns, pattern_parts, position_pattern


class SlopeLayer(LayerEncoding):
    """Adds a bias of its own where keys are far, and forbids them from distance 5 on."""

    def bias(self, query, key, tokens):
        distance = tokens.new_position_ids[:, :, None] - tokens.position_ids[:, None]
        return torch.zeros_like(distance, dtype=query.dtype).masked_fill(distance >= 5, -math.inf)[:, None]


class Slopes(Encoding):
    """Adds minus slope times distance, a slope per head."""

    layer_class = SlopeLayer

    def bias(self, tokens, dtype=torch.float32):
        distance = tokens.new_position_ids[:, :, None] - tokens.position_ids[:, None]
        slopes = torch.arange(1, self.sizes.num_attention_heads + 1, dtype=dtype)
        return -slopes[:, None, None] * distance[:, None].to(dtype)


class Vectors(Encoding):
    """Adds a trained vector per position, of which there are 32."""

    def __init__(self, sizes, options):
        super().__init__(sizes, options)
        self.vectors = nn.Embedding(32, sizes.hidden_size)

    def embed(self, tokens):
        if int(tokens.position_ids.max()) >= 32:
            raise ValueError("position 32: there are 32")
        return self.vectors(tokens.new_position_ids)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_encoding("slopes", Slopes)
    register_encoding("vectors", Vectors)
    yield
    del ENCODINGS["slopes"], ENCODINGS["vectors"]


def test_rotation_of_rope_is_its_mean_cosine():
    pattern = position_pattern("rope", length=20, num_heads=2, head_dim=8)
    assert pattern.shape == (2, 20, 20)
    assert pattern.dtype == np.float64
    distance = np.arange(20)[:, None] - np.arange(20)
    expected = np.mean([np.cos(distance * 10000 ** (-k / 4)) for k in range(4)], axis=0)
    np.testing.assert_allclose(pattern[0], expected, atol=1e-12)
    np.testing.assert_array_equal(pattern[1], pattern[0])
    np.testing.assert_allclose(position_pattern("tape", None, 20, 2, 8), pattern, atol=1e-12)


def test_options_count():
    fixed = position_pattern("rope", length=8, num_heads=1)
    scaled = position_pattern("rope", {"log_scale": 4}, 8, 1)
    np.testing.assert_allclose(scaled[0, 3], fixed[0, 3], atol=1e-12)  # ln(3 + 1) / ln(4) is 1
    np.testing.assert_allclose(scaled[0, 0], 0.0, atol=1e-12)


def test_bias_is_the_shared_and_the_own_one():
    parts = pattern_parts("slopes", length=7, num_heads=3)
    assert parts.names() == ["bias"]
    pattern = parts.total()
    assert pattern[2, 6, 3] == -9.0
    assert pattern[0, 4, 0] == -4.0
    assert pattern[0, 5, 0] == -math.inf
    assert pattern_figures.value_range(pattern) == (-12.0, 0.0)


def test_embedding_is_a_cosine():
    parts = pattern_parts("vectors", length=9, num_heads=2)
    assert parts.names() == ["embedding"]
    pattern = parts.total()
    np.testing.assert_allclose(np.diagonal(pattern, axis1=1, axis2=2), 1.0)
    np.testing.assert_allclose(pattern, pattern.transpose(0, 2, 1))
    assert np.abs(pattern - np.eye(9)).max() < 0.5
    np.testing.assert_array_equal(position_pattern("vectors", length=9), position_pattern("vectors", length=9))


def test_parts_are_added():
    one = np.ones((1, 2, 2))
    np.testing.assert_array_equal(PatternParts(one, 2 * one, None).total(), 3 * one)


def test_encodings_without_parts_are_zero():
    assert pattern_parts("nope").names() == []
    np.testing.assert_array_equal(position_pattern("nope", length=3, num_heads=2), np.zeros((2, 3, 3)))


def test_every_encoding_has_a_pattern(encoding, encoding_options):
    pattern = position_pattern(encoding, encoding_options, 12, 4, 16)
    assert pattern.shape == (4, 12, 12)
    assert np.isfinite(pattern[:, np.tri(12, dtype=bool)]).all()


def test_random_numbers_of_the_caller_are_left_alone():
    before = torch.random.get_rng_state()
    position_pattern("vectors", length=4)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_layers_of_a_model_show_the_states_that_they_read(make_model, make_tokens, kv_heads):
    model, tokens = make_model("tape", kv_heads), make_tokens(1, 11)
    patterns = model_patterns(model, tokens)
    assert [parts.names() for parts in patterns] == [["rotation"]] * 3
    with torch.no_grad():
        states = model.double()(tokens, output_position_states=True).position_states
    for parts, state in zip(patterns, states, strict=True):
        inner = (state[0] @ state[0].transpose(1, 2) / 4).repeat_interleave(4 // kv_heads, dim=0)
        np.testing.assert_allclose(parts.rotation, inner.numpy(), rtol=1e-9, atol=1e-9)
    start = rotary_state(torch.arange(11)[None], 8, dtype=torch.float64)[0]
    np.testing.assert_allclose(patterns[0].rotation[0], (start[0] @ start[0].T / 4).numpy(), atol=1e-9)


def test_layers_of_models_without_states(make_model, make_tokens):
    names = [parts.names() for parts in model_patterns(make_model("vectors"), make_tokens(1, 6))]
    assert names == [["embedding"], [], []]
    model = make_model("slopes")
    assert [parts.names() for parts in model_patterns(model, make_tokens(1, 6))] == [["bias"]] * 3
    assert model.dtype == torch.float32, "the model is left as it is"


@pytest.mark.parametrize("length", [-1, 0, 1, 2049])
def test_lengths_out_of_range_are_refused(length, tmp_path):
    with pytest.raises(ValueError, match=f"length is {length}; it must be 2 to 2048"):
        position_pattern("rope", length=length)
    with pytest.raises(ValueError, match=f"length is {length}"):
        write_encoding_patterns(tmp_path / "page.html", length=length)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_pictures_carry_their_labels(heads, narrow):
    pattern = -np.arange(heads)[:, None, None] * np.ones((9, 9))
    titles = [f"head {head}" for head in range(heads)]
    for picture in (
        pattern_figures.pattern_maps(pattern, titles, narrow=narrow),
        pattern_figures.distance_curves(pattern[:, -1], titles, narrow=narrow),
    ):
        root = ElementTree.fromstring(picture)
        found = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert heads == 1 or set(titles) <= set(found)
        assert {"key position", "query position"} <= set(found) or "distance of the key from the last query" in found


def test_pictures_stay_small():
    pattern = np.random.default_rng(0).normal(size=(8, 512, 512))
    assert len(pattern_figures.pattern_maps(pattern, [str(head) for head in range(8)])) < 1_000_000


@pytest.fixture
def page(tmp_path, parse):
    def write(*arguments, **options):
        written = write_encoding_patterns(tmp_path / "page.html", *arguments, **options)
        return parse(written.path.read_text(encoding="utf-8")), written.left_out

    return write


def test_page_of_all_encodings_leaves_out_what_cannot_be_built(page):
    parsed, left_out = page(length=40)
    assert left_out["vectors"] == "position 32: there are 32"
    assert "Left out: vectors" in parsed.text
    assert {"rope", "tape", "nope", "slopes"}.isdisjoint(left_out)
    assert "nothing that depends on positions" in parsed.text
    assert all(image["alt"] for image in parsed.attributes("img"))
    assert all(image["src"].startswith("data:") for image in parsed.attributes("img"))
    row = parsed.table("rope: pattern by distance")[0]
    assert (row["Distance"], row["0"]) == ("all heads", "1")
    assert list(row) == ["Distance", "0", "1", "2", "4", "8", "16", "32", "39"]


def test_page_of_named_encodings(page):
    parsed, _ = page(["slopes"], length=4)
    rows = parsed.table("slopes: pattern by distance")
    assert [row["Distance"] for row in rows] == [f"head {head}" for head in range(8)]
    assert rows[1]["3"] == "-6"
    with pytest.raises(ValueError, match="position 32"):
        page(["vectors"], length=40)
    with pytest.raises(ValueError, match="known encodings"):
        page(["spiral"])
    assert "Options: log_scale=5" in page(["rope"], {"log_scale": 5})[0].text


def test_page_of_a_model(make_model, make_tokens, tmp_path, parse):
    path = write_model_patterns(tmp_path / "page.html", make_model("tape"), make_tokens(1, 6), "a<b", "'1+1'")
    parsed = parse(path.read_text(encoding="utf-8"))
    assert "Position patterns of a<b" in parsed.text
    assert [caption for caption in parsed.captions if caption.startswith("layer")] == [
        f"layer {idx}: pattern by distance" for idx in range(3)
    ]
