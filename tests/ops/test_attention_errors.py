"""What attention refuses, by name."""

from __future__ import annotations

import pytest
import torch

from tape_pe.ops import positional_attention
from tape_pe.ops.backends import describe_backends

AVAILABLE = tuple(report.name for report in describe_backends("cpu") if report.available)

BAD = [
    ("query", (2, 4, 9), "query has the shape (2, 4, 9): four axes"),
    ("query", (2, 3, 9, 8), "query has 3 heads: not a multiple of the 2 heads of key"),
    ("query", (2, 4, 0, 8), "query has 0 tokens"),
    ("query", (2, 4, 10, 8), "query has 10 tokens: more than the 9 of key"),
    ("key", (1, 2, 9, 8), "key has the shape (1, 2, 9, 8)"),
    ("key", (2, 2, 9, 6), "key has the shape (2, 2, 9, 6)"),
    ("value", (2, 4, 9, 6), "value has the shape (2, 4, 9, 6)"),
    ("state", (2, 4, 9, 8), "state has the shape (2, 4, 9, 8)"),
    ("state", (2, 2, 8, 8), "state has the shape (2, 2, 8, 8)"),
    ("segment_ids", (2, 8), "segment_ids has the shape (2, 8)"),
    ("segment_ids", (2, 9), "dtype torch.float64: integers"),
    ("bias", (3, 9, 9), "bias has the shape (3, 9, 9): not broadcastable to (2, 4, 9, 9)"),
    ("bias", (1, 2, 4, 9, 9), "bias has the shape (1, 2, 4, 9, 9)"),
]


@pytest.mark.parametrize(("name", "shape", "message"), BAD)
def test_bad_shapes_are_named(make_problem, name, shape, message) -> None:
    problem = make_problem("causal")
    arguments = {key: getattr(problem, key) for key in ("query", "key", "value", "state")}
    with pytest.raises(ValueError, match=r".") as caught:
        positional_attention(**arguments | {name: torch.zeros(shape, dtype=torch.float64)})
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_a_bias_larger_than_the_scores_is_refused(backend) -> None:
    """It broadcasts *with* the scores of one batch row, and would multiply the batch."""
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="not broadcastable to"):
        positional_attention(x, x, x, bias=torch.zeros(3, 2, 5, 5), backend=backend)


def test_a_boolean_bias_is_refused() -> None:
    """A mask in place of a bias would be added as 0 and 1 without a word."""
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"bias has the dtype torch\.bool"):
        positional_attention(x, x, x, bias=torch.ones(5, 5, dtype=torch.bool))


def test_mixed_dtypes_are_refused() -> None:
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"torch\.float32, torch\.float32 and torch\.float16: not equal"):
        positional_attention(x, x, x.half())
