"""Segments, their positions, and the dense mask."""

from __future__ import annotations

import pytest
import torch

from tape_pe.ops import make_segment_ids, segment_positions
from tape_pe.ops.masks import dense_mask


def test_make_segment_ids_without_anything() -> None:
    assert make_segment_ids(None, None) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_make_segment_ids_from_a_padding_mask_of_any_dtype(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    segment_ids = make_segment_ids(mask, None)
    assert segment_ids is not None
    assert segment_ids.dtype == torch.long
    assert segment_ids.tolist() == [[-1, 0, 0], [0, 0, -1]]


def test_make_segment_ids_joins_padding_and_documents() -> None:
    documents = torch.tensor([[0, 0, 3, 3]], dtype=torch.int32)
    assert make_segment_ids(None, documents).tolist() == [[0, 0, 3, 3]]
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    assert make_segment_ids(mask, documents).tolist() == [[0, 0, 3, -1], [-1, 0, 3, 3]]


@pytest.mark.parametrize(
    ("segments", "positions"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([-1, -1, 0, 0], [0, 0, 0, 1]),
        ([0, 0, -1, -1], [0, 1, 0, 0]),
        ([0, 0, 1, 1, 1, 7], [0, 1, 0, 1, 2, 0]),
        ([2, 2, 0, 0], [0, 1, 0, 1]),
        ([0, -1, 0, -1, 1, 1, -1, 1], [0, 0, 1, 0, 0, 1, 0, 2]),
        ([-1, -1], [0, 0]),
    ],
)
def test_segment_positions(segments: list[int], positions: list[int]) -> None:
    assert segment_positions(torch.tensor([segments])).tolist() == [positions]


def test_segment_positions_equal_counting() -> None:
    generator = torch.Generator().manual_seed(0)
    segments = torch.rand(20, 30, generator=generator).lt(0.2).long().cumsum(dim=1)
    segments = segments.where(torch.rand(20, 30, generator=generator) > 0.3, -1)
    positions = segment_positions(segments)
    for row, actual in zip(segments.tolist(), positions.tolist(), strict=True):
        assert actual == [row[:n].count(s) if s >= 0 else 0 for n, s in enumerate(row)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3, 6])
def test_dense_mask_equals_its_definition(queries: int, causal: bool) -> None:
    segments = torch.tensor([[0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 1, 1], [0, 1, 0, 1, -1, -1]])
    mask = dense_mask(queries, 6, segment_ids=segments, causal=causal)
    assert mask.shape == (3, 1, queries, 6)
    for b, row in enumerate(segments.tolist()):
        for i in range(queries):
            own = 6 - queries + i
            expected = [s >= 0 and s == row[own] and (j <= own or not causal) for j, s in enumerate(row)]
            assert mask[b, 0, i].tolist() == expected
    assert torch.equal(
        dense_mask(queries, 6, causal=causal), dense_mask(queries, 6, segment_ids=segments[:1], causal=causal)
    )
