"""Sinusoidal positions against the formula of Vaswani et al."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.sinusoidal import Sinusoidal

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 500.0}, 0.02)
POSITIONS = [0, 1, 5, 63, 64, 257, 1023, 16001, 1_000_003]


@pytest.mark.parametrize("size", [32, 7])
def test_table(size: int) -> None:
    """Even channels are sines, odd ones cosines; rope's base has no say; a position far beyond the model's length has
    its row as well."""
    added = Sinusoidal(replace(SIZES, hidden_size=size), Sinusoidal.options_class()).embed(
        Tokens(torch.tensor([POSITIONS]), len(POSITIONS))
    )
    assert added.shape == (1, len(POSITIONS), size)
    for row, n in zip(added[0].tolist(), POSITIONS, strict=True):
        for channel, value in enumerate(row):
            phase = n * 10000.0 ** (-2 * (channel // 2) / size)
            expected = math.cos(phase) if channel % 2 else math.sin(phase)
            assert value == pytest.approx(expected, abs=1e-9)


def test_only_new_tokens_get_rows() -> None:
    encoding = Sinusoidal(SIZES, Sinusoidal.options_class())
    every = encoding.embed(Tokens(torch.tensor([[0, 1, 2, 9], [3, 4, 5, 6]]), 4))
    assert torch.equal(encoding.embed(Tokens(torch.tensor([[0, 1, 2, 9], [3, 4, 5, 6]]), 1)), every[:, -1:])
    assert not encoding.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_added_to_the_token_embeddings(make_model, make_tokens, dtype) -> None:
    """Exact positions whatever the dtype: in bf16, 257 is 256."""
    model, input_ids = make_model("sinusoidal").to(dtype), make_tokens(1, 4)
    position_ids = torch.tensor([[256, 257, 16000, 16001]])
    hidden = model(input_ids, position_ids=position_ids, output_hidden_states=True).hidden_states[0]
    table = model.model.encoding.embed(Tokens(position_ids, 4)).to(dtype)
    assert torch.equal(hidden, model.get_input_embeddings()(input_ids) + table)
    assert (table[0, 0] != table[0, 1]).sum() > 8
