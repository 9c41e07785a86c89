"""Pieces that all tasks share."""

import numpy as np
import pytest

from tape_pe.tasks.base import are_among


@pytest.mark.parametrize("known", [[], [3], [1, 3, 3, 9], list(range(0, 1000, 2))])
def test_are_among_finds_what_a_set_has(known: list[int]) -> None:
    values = np.array([0, 1, 3, 4, 9, 10, 998, 999, 2**63], dtype=np.uint64)
    assert are_among(values, np.array(known, dtype=np.uint64)).tolist() == [int(value) in known for value in values]
