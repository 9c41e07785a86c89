"""Measures of position states: tensors in, tensors out.

A state holds one complex number z = C + i S per channel pair (or per channel, for the structures of TAPE whose two
channels of a pair differ): `[B, Hkv, N, Ds]` packed `[C | S]`, P = Ds / 2 numbers. At the start |z| = 1. None of the
measures changes when all positions are shifted by the same amount, as far as the states are equivariant: that
multiplies z[n, p] and its start value by one and the same exp(i w_p shift).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Movement(NamedTuple):
    """How states differ from their start values z0, by r = z / z0. All are fp32 or wider.

    Attributes:
        phase: mean over channel pairs of |angle(r)|, in degrees (0 to 180), `[B, Hkv, N]`.
        drift: angle of the mean of r over channel pairs, in degrees, with its sign: where the state as a whole turned,
            `[B, Hkv, N]`.
        magnitude: root mean square of |r| over channel pairs, `[B, Hkv, N]`.
        pair_phase: mean over tokens of |angle(r)| in degrees, `[B, Hkv, P]`.
    """

    phase: Tensor
    drift: Tensor
    magnitude: Tensor
    pair_phase: Tensor


def complex_state(state: Tensor) -> Tensor:
    """`[..., Ds]` packed `[C | S]` as complex numbers `[..., Ds / 2]`."""
    c, s = state.chunk(2, dim=-1)
    return torch.complex(c.contiguous(), s.contiguous())


def inner_products(state: Tensor) -> Tensor:
    """P[i, j] = sum_p Re(z[i, p] conj(z[j, p])) / P, the inner product of encodings e[i] and e[j] over channel pairs.

    It is 1 for i = j at the start.

    Args:
        state: `[B, Hkv, N, Ds]`.

    Returns:
        `[B, Hkv, N, N]`.
    """
    return state @ state.transpose(-1, -2) / (state.shape[-1] / 2)


def state_norms(state: Tensor) -> Tensor:
    """Root mean square of |z| over channel pairs, 1 at the start: `[B, Hkv, N, Ds]` -> `[B, Hkv, N]`."""
    return (state.square().sum(dim=-1) / (state.shape[-1] / 2)).sqrt()


def relative_difference(changed: Tensor, plain: Tensor) -> Tensor:
    """||X' - X|| / ||X|| of `[..., N, N]` matrices, Frobenius norms over pairs with key j <= query i: `[...]`."""
    difference, size = (matrix.tril().flatten(-2).norm(dim=-1) for matrix in (changed - plain, plain))
    return difference / size


def attention_difference(changed: Tensor, plain: Tensor) -> Tensor:
    """mean_i sum_j |A'[i, j] - A[i, j]| of attention weights, 0 to 2: `[..., N, N]` -> `[...]`."""
    return (changed - plain).abs().sum(dim=-1).mean(dim=-1)


def movement(state: Tensor, start: Tensor) -> Movement:
    """Where states went from their start values.

    Args:
        state: `[B, Hkv, N, Ds]`.
        start: the start state in the same shape, no number of which is 0.
    """
    z, z0 = complex_state(state), complex_state(start)
    ratio = z * z0.conj() / z0.abs().square()  # unlike z / z0, real to the last bit for states that have not moved
    angles = ratio.angle().abs().rad2deg()
    return Movement(
        phase=angles.mean(dim=-1),
        drift=ratio.mean(dim=-1).angle().rad2deg(),
        magnitude=ratio.abs().square().mean(dim=-1).sqrt(),
        pair_phase=angles.mean(dim=-2),
    )
