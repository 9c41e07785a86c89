"""A step of decoding on CPU: against the reference, from every layout of a cache, without copying it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tape_pe.ops import positional_attention
from tape_pe.ops.backends import one_query

WIDTH = 16


def front(batch: int, heads: int, keys: int) -> torch.Tensor:
    """The front of a larger buffer, as caches hand it out."""
    return torch.randn(batch, heads, keys + 37, WIDTH)[:, :, :keys]


def token_major(batch: int, heads: int, keys: int) -> torch.Tensor:
    return torch.randn(batch, keys, heads, WIDTH).transpose(1, 2)


def behind_others(batch: int, heads: int, keys: int) -> torch.Tensor:
    """The last tokens of a buffer, whose first row is not its first number."""
    return torch.randn(batch, heads, keys + 5, WIDTH)[:, :, 5:]


def half_of_wide(batch: int, heads: int, keys: int) -> torch.Tensor:
    """Part of `[v | z]`: rows that do not follow each other."""
    return torch.randn(batch, heads, keys, 2 * WIDTH)[..., WIDTH:]


def odd_steps(batch: int, heads: int, keys: int) -> torch.Tensor:
    """Heads that begin in the middle of a row."""
    return torch.randn(batch * heads * (keys * WIDTH + 3)).as_strided(
        (batch, heads, keys, WIDTH), (heads * (keys * WIDTH + 3), keys * WIDTH + 3, WIDTH, 1)
    )


def one_table(batch: int, heads: int, keys: int) -> torch.Tensor:
    """One table for all, as in layer 0."""
    return torch.randn(1, 1, keys, WIDTH).expand(batch, heads, -1, -1)


LAYOUTS = [front, token_major, behind_others, half_of_wide, odd_steps, one_table]


@pytest.fixture
def bags(monkeypatch):
    """How often rows were summed by `embedding_bag`."""
    calls = []
    original = torch.nn.functional.embedding_bag
    monkeypatch.setattr(one_query.F, "embedding_bag", lambda *a, **k: (calls.append(a[0].shape), original(*a, **k))[1])
    return calls


@pytest.mark.parametrize("keys", [40, one_query.MANY_KEYS + 1])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_reference(layout, batch, groups, keys, bags) -> None:
    torch.manual_seed(0)
    key, value, state = front(batch, 2, keys), layout(batch, 2, keys), layout(batch, 2, keys)
    query = torch.randn(batch, 2 * groups, 1, WIDTH)
    with torch.no_grad():
        found = positional_attention(query, key, value, state, backend="blockwise")
        wide = [tensor.double() for tensor in (query, key, value, state)]
        expected = positional_attention(*wide, backend="reference")
        alone = positional_attention(query, key, value, backend="blockwise")
    torch.testing.assert_close(found.output.double(), expected.output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.averaged_state.double(), expected.averaged_state, atol=1e-6, rtol=1e-5)
    assert alone.averaged_state is None
    torch.testing.assert_close(alone.output, found.output)
    fast = groups == 1 and keys > 40 and layout in (front, behind_others, one_table)
    assert len(bags) == (3 if fast else 0)


def test_a_wider_dtype_is_exact(bags) -> None:
    query, key, value = (torch.randn(2, 2, n, WIDTH, dtype=torch.float64) for n in (1, 700, 700))
    with torch.no_grad():
        found = positional_attention(query, key, value, backend="blockwise")
    expected = positional_attention(query, key, value, backend="reference")
    torch.testing.assert_close(found.output, expected.output, atol=1e-13, rtol=0)
    assert not bags


@pytest.mark.parametrize("layout", [front, one_table])
def test_nothing_of_the_size_of_a_cache_is_made(layout) -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                    largest = max(largest, x.untyped_storage().nbytes())
            return result

    key, value, state = front(2, 4, 2000), front(2, 4, 2000), layout(2, 4, 2000)
    query = torch.randn(2, 4, 1, WIDTH)
    with torch.no_grad(), Watch():
        positional_attention(query, key, value, state, backend="blockwise")
    assert 0 < largest <= 2 * 4 * 2037 * 4, "numbers of rows and weights: one for each key and head"
