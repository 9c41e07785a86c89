"""RoPE as an encoding, and NoPE, which does nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens, get_encoding
from tape_pe.encodings.nope import NoPE
from tape_pe.encodings.rope import Rope, RopeOptions
from tape_pe.ops import rotary_state, rotate


def tokens_at(position_ids: torch.Tensor) -> Tokens:
    """Tokens at these positions, all new, each row one segment."""
    return Tokens(position_ids, position_ids.shape[1])


SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def test_start_is_the_rotary_state_of_the_given_base() -> None:
    positions = torch.tensor([[3, 4, 900]])
    for theta in (10000.0, 500000.0):
        rope = Rope(replace(SIZES, rope_parameters={"rope_theta": theta}), RopeOptions())
        assert torch.equal(rope.start(tokens_at(positions)), rotary_state(positions, 8, theta=theta))
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    rope = Rope(replace(SIZES, rope_parameters=linear), RopeOptions())
    torch.testing.assert_close(rope.start(tokens_at(2 * positions)), rotary_state(positions, 8))


def test_state_never_changes() -> None:
    options = RopeOptions()
    layer = Rope.layer(SIZES, options, 0)
    state = Rope(SIZES, options).start(tokens_at(torch.arange(5)[None]))
    assert layer(state, None, torch.randn(1, 5, 32), torch.randn(1, 5, 32)) is state
    assert not layer.averages_state
    assert not list(layer.parameters())


def test_no_tables_are_kept_that_a_cast_or_an_empty_device_could_spoil() -> None:
    rope = Rope(SIZES, RopeOptions())
    assert not rope.state_dict()
    assert not list(rope.buffers())


def test_log_scale_scales_queries_alone() -> None:
    positions = torch.tensor([[1, 7, 63, 255]])
    state = Rope(SIZES, RopeOptions(log_scale=64)).start(tokens_at(positions))
    assert state.shape == (1, 1, 4, 16)
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    actual = Rope.layer(SIZES, RopeOptions(log_scale=64), 0).rotate(query, key, state)
    plain = rotary_state(positions, 8)
    scale = torch.tensor([math.log(n + 1) / math.log(64) for n in positions[0].tolist()])
    torch.testing.assert_close(actual[0], rotate(query, plain) * scale[:, None])
    assert torch.equal(actual[1], rotate(key, plain))


@pytest.mark.parametrize("log_scale", [1, 0, -5])
def test_log_scale_must_be_a_length(log_scale: int) -> None:
    with pytest.raises(ValueError, match=rf"encoding_options\.log_scale={log_scale}: a length above 1"):
        RopeOptions(log_scale=log_scale)


@pytest.mark.parametrize("name", ["rope", "tape"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 7}, "head_dim=7"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "spiral"}}, "rope_type='spiral'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "theta=-1.0"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear"}}, "factor=None"),
    ],
)
def test_check_names_what_does_not_fit(name: str, change: dict, message: str) -> None:
    kind = get_encoding(name)
    with pytest.raises(ValueError, match=message):
        kind.check(replace(SIZES, **change), kind.options_class())


def test_nope_does_nothing() -> None:
    nope, layer = NoPE(SIZES, NoPE.options_class()), NoPE.layer(SIZES, NoPE.options_class(), 0)
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    assert nope.embed(tokens_at(torch.arange(5)[None])) is None
    assert nope.start(tokens_at(torch.arange(5)[None])) is None
    assert layer.rotate(query, key, None)[0] is query
    assert layer.rotate(query, key, None)[1] is key
    assert layer(None, None, query, query) is None
