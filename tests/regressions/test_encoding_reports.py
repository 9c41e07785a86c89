"""Faults that users of neighbouring software reported about position biases, as tests named after the reports."""

from __future__ import annotations

import pytest
import torch

from tape_pe.encodings.alibi import alibi_slopes
from tape_pe.models import TapeCache

BIASED = [
    ("alibi", {}),
    ("t5", {"num_buckets": 8, "max_distance": 12}),
    ("t5", {"num_buckets": 8, "max_distance": 12, "shared": False}),
    ("fire", {"initial_length": 5.0}),
    ("cope", {"max_positions": 4}),
]


@pytest.fixture(params=BIASED, ids=lambda param: "-".join([param[0], *map(str, param[1].values())]))
def biased(request, make_model, kv_heads):
    """A decoder of every encoding that adds a bias."""
    name, options = request.param
    return make_model(name, kv_heads, encoding_options=options)


def test_mlx_3071_alibi_slopes() -> None:
    eight = alibi_slopes(8)
    assert eight == [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    assert alibi_slopes(12) == [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


@pytest.mark.parametrize("offset", [0, 90])
def test_transformers_19045_a_cached_step_is_its_row_of_the_full_forward(biased, make_tokens, offset: int) -> None:
    """The bias of a step must be that of its position, not of row 0; wherever the text starts."""
    input_ids = make_tokens(2, 20)
    position_ids = torch.arange(offset, offset + 20)[None]
    with torch.no_grad():
        full = biased(input_ids, position_ids=position_ids, output_attentions=True, use_cache=False)
        cache = TapeCache()
        for t in range(20):
            step = biased(
                input_ids[:, t : t + 1], position_ids=position_ids[:, t : t + 1], cache=cache, output_attentions=True
            )
            torch.testing.assert_close(step.logits[:, 0], full.logits[:, t], rtol=1e-5, atol=1e-5)
            for a, b in zip(step.attentions, full.attentions, strict=True):
                torch.testing.assert_close(a, b[:, :, t : t + 1, : t + 1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("past", [1, 8, 19])
def test_x_transformers_187_queries_are_the_last_of_the_keys(biased, make_tokens, past: int) -> None:
    """The mask and the bias are aligned at the bottom right: new tokens see all cached ones, at their distances."""
    input_ids = make_tokens(2, 20)
    with torch.no_grad():
        expected = biased(input_ids, use_cache=False).logits[:, past:]
        cache = biased(input_ids[:, :past]).cache
        actual = biased(input_ids[:, past:], cache=cache).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
