"""What attention on CPU leaves out: keys that nobody sees, copies of cached keys, room for broadcast gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tape_pe.ops import positional_attention
from tape_pe.ops.backends import blocks


class Copies(TorchDispatchMode):
    """The largest copy that was made, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.cat.default):
            self.largest = max(self.largest, result.numel())
        return result


def cached(x: Tensor) -> Tensor:
    """The same `[B, heads, N, C]` as a view of a larger buffer."""
    buffer = torch.full((*x.shape[:2], x.shape[2] + 7, x.shape[3]), torch.nan, dtype=x.dtype)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


@pytest.mark.parametrize("state_shape", [None, (3, 2), (1, 1), (3, 1)])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_read_cached_keys_where_they_are(make_problem, assert_close, queries, heads, state_shape) -> None:
    problem = make_problem(
        batch=3, heads=heads, kv_heads=2, queries=queries, keys=300, state_shape=state_shape, widths=(8, 8, 8)
    )
    key, value = cached(problem.key), cached(problem.value)
    state = problem.state
    if state_shape == (3, 2):
        state = cached(state)
    with torch.no_grad():
        expected = positional_attention(problem.query, problem.key, problem.value, problem.state, backend="reference")
        with Copies() as copies:
            actual = positional_attention(problem.query, key, value, state, backend="blockwise")
    named = [{k: x for k, x in r._asdict().items() if x is not None} for r in (actual, expected)]
    assert_close(*named, 1e-12)
    assert copies.largest < 300 * 8  # the keys of one head


@pytest.mark.parametrize("shape", [(1, 1, 37, 37), (1, 4, 37, 37), (3, 1, 37, 37), (3, 4, 1, 37), (1, 4, 1, 1)])
def test_the_gradient_of_a_broadcast_bias_is_not_larger_than_the_bias(make_problem, shape) -> None:
    problem = make_problem(batch=3, heads=4, kv_heads=2, queries=37)
    leaves = problem.query, problem.key, problem.value, problem.state
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    *_, grad = torch.ops.tape_pe.blockwise_attention_backward(
        problem.grad_output, problem.grad_averaged, *leaves, None, bias, True, 8**-0.5, True, True
    )
    assert grad.shape == shape
    expected = replace(problem, bias=bias).solve("reference")["gradient of bias"]
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def visible(segment_ids: list[int], *, causal: bool = True) -> list[tuple[int, int, bool, bool]]:
    """First key, end of keys, whether some of them are hidden and whether queries are padding, of chunks of 4 rows."""
    tokens = len(segment_ids)
    x = torch.zeros(1, 1, tokens, 4)
    problem = blocks.Problem(x, x, x, None, torch.tensor([segment_ids]), None, causal, 1.0)
    assert problem.rows == 4
    found = problem.blocks(slice(0, 1), slice(0, 1))
    return [(block.keys.start, block.keys.stop, block.hides, block.dead) for block in found]


def test_keys_that_no_query_of_a_chunk_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    assert visible([0] * 4 + [1] * 6 + [2] * 2) == [(0, 4, False, False), (4, 8, False, False), (4, 12, True, False)]
    assert visible([-1] * 5 + [0] * 7) == [(0, 0, True, True), (5, 8, False, True), (5, 12, False, False)]
    assert visible([0] * 6 + [-1] * 6) == [(0, 4, False, False), (0, 6, False, True), (0, 0, True, True)]
    assert visible([0] * 6 + [-1] * 6, causal=False)[0] == (0, 6, False, False)
    # Documents in any order, and apart: what stands between the first and the last token is hidden.
    assert visible([3] * 4 + [1] * 4 + [3] * 4) == [(0, 4, False, False), (4, 8, False, False), (0, 12, True, False)]


@pytest.mark.parametrize("causal", [True, False])
def test_documents_in_any_order_and_apart(make_problem, assert_close, monkeypatch, causal) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    problem = make_problem("causal", batch=2, heads=4, kv_heads=2, queries=30)
    generator = torch.Generator().manual_seed(2)
    for runs in (1, 5):
        segment_ids = torch.randint(-1, 3, (2, 30 // runs), generator=generator).repeat_interleave(runs, dim=1)
        case = replace(problem, segment_ids=segment_ids, causal=causal)
        assert_close(case.solve("blockwise"), case.solve("reference"), 1e-12)


@pytest.mark.parametrize("tokens", [9, 33])
def test_short_rows_of_a_batch_are_taken_together(tokens) -> None:
    token_major = torch.zeros(64, tokens, 4, 8).transpose(1, 2)  # as projections make them: no one view
    segment_ids = torch.zeros(64, tokens, dtype=torch.long)
    segment_ids[::2, :3] = -1
    problem = blocks.Problem(token_major, token_major, token_major, None, segment_ids, None, True, 1.0)
    assert len(list(problem.rectangles())) <= 4
