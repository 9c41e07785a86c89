"""Every encoding by name: its options, and what the decoder may expect of it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from tape_pe.encodings import ENCODINGS, Encoding, EncodingSizes, LayerEncoding, Tokens, get_encoding

SIZES = EncodingSizes(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=3,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    initializer_range=0.02,
)
NEEDED_OPTIONS = {"abacus": {"digit_token_ids": [3, 4]}}
every = pytest.mark.parametrize("name", ENCODINGS)


def build(name: str, **options: object) -> tuple[Encoding, list[LayerEncoding]]:
    """The encoding of a model and of its layers."""
    kind = get_encoding(name)
    parsed = kind.options_class.from_dict(name, NEEDED_OPTIONS.get(name, {}) | options)
    kind.check(SIZES, parsed)
    return kind(SIZES, parsed), [kind.layer(SIZES, parsed, idx) for idx in range(SIZES.num_hidden_layers)]


def test_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"encoding='spiral': known encodings are tape, rope, nope") as caught:
        get_encoding("spiral")
    assert all(name in str(caught.value) for name in ENCODINGS)


@every
def test_unknown_options_are_refused_by_name(name: str) -> None:
    kind = get_encoding(name)
    with pytest.raises(ValueError, match=rf"encoding_options\.colour='red': encoding='{name}' has") as caught:
        kind.options_class.from_dict(name, {"colour": "red"})
    names = [f.name for f in fields(kind.options_class)]
    assert all(option in str(caught.value) for option in names or ["no options"])


@every
def test_options_are_frozen_and_all_have_defaults(name: str) -> None:
    options = get_encoding(name).options_class.from_dict(name, {})
    for f in fields(options):
        with pytest.raises(FrozenInstanceError):
            setattr(options, f.name, None)


@every
@pytest.mark.parametrize("batch", [1, 2])
def test_contract(name: str, batch: int) -> None:
    """Shapes and dtypes of a pass through all layers, as the decoder makes it."""
    encoding, layers = build(name)
    tokens = Tokens(torch.arange(5).expand(batch, 5), 5, input_ids=torch.arange(5).expand(batch, 5))
    added = encoding.embed(tokens)
    assert added is None or added.shape[1:] == (5, 32)
    state = encoding.start(tokens)
    if state is not None:
        assert state.dtype == torch.float32
        assert state.shape[0] in (1, batch)
        assert state.shape[1:3] == (1, 5)
        assert encoding.start(tokens, torch.float64).dtype == torch.float64
    hidden_states = torch.randn(batch, 5, 32)
    for layer in layers:
        query, key = layer.rotate(torch.randn(batch, 4, 5, 8), torch.randn(batch, 2, 5, 8), state)
        assert query.shape == (batch, 4, 5, 8)
        assert key.shape == (batch, 2, 5, 8)
        averaged = torch.randn(batch, 4, 5, 8) if layer.averages_state else None
        state = layer(state, averaged, hidden_states, hidden_states)
        assert state is None or state.shape[2] == 5


@every
def test_the_last_layer_has_no_parameters_of_positions_that_nobody_reads(name: str) -> None:
    _, layers = build(name)
    assert not layers[-1].averages_state
    if name == "tape":
        assert not list(layers[-1].parameters())
