"""Random numbers without state: number `s` of stream `(a, b, ...)` is a hash of these integers.

A training set made of them needs no storage, can be entered anywhere, and is the same on every machine.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al., 2014), a bijection of 64-bit integers; uint64 in and out."""
    values = (values ^ (values >> np.uint64(30))) * _FACTOR_1
    values = (values ^ (values >> np.uint64(27))) * _FACTOR_2
    return values ^ (values >> np.uint64(31))


def random_bits(*keys: int | np.ndarray, slots: int) -> np.ndarray:
    """64 random bits for every stream and slot.

    Args:
        keys: non-negative integers or integer arrays that broadcast to [B]; together they name the streams.
        slots: how many numbers to draw from each stream.

    Returns:
        uint64 [B, slots].
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, dtype=np.uint64)
        for key in keys:
            state = mix(state * _GOLDEN + np.asarray(key).astype(np.uint64) + _GOLDEN)
        slot = np.arange(1, slots + 1, dtype=np.uint64)
        return mix(state[:, None] + slot * _GOLDEN)
