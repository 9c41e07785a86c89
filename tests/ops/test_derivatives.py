"""Derivatives that autograd's functions have to offer by themselves: second ones, forward mode, `torch.func`."""

from __future__ import annotations

import pytest
import torch

from tape_pe.ops import contextualize, rotate

STATE_SHAPES = [(2, 2, 3, 4), (1, 1, 3, 4)]


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def update(state, averaged, gate, mix, up, down):
    return contextualize(state, averaged, gate, mix=mix, up=up, down=down, norm="rms")


def inputs_of_update(state_shape) -> list[torch.Tensor]:
    return leaves(state_shape, (2, 4, 3, 4), (2, 3, 5), (2, 4), (5, 2), (2, 5))


@pytest.mark.parametrize("state_shape", STATE_SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(state_shape, interleaved) -> None:
    def call(u, state):
        return rotate(u, state, interleaved=interleaved)

    inputs = leaves((2, 4, 3, 4), state_shape)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("state_shape", STATE_SHAPES)
def test_update(state_shape) -> None:
    inputs = inputs_of_update(state_shape)
    assert torch.autograd.gradcheck(update, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(update, inputs)


def test_functional_transforms() -> None:
    query, state = leaves((2, 4, 3, 4), (2, 2, 3, 4))
    inputs = inputs_of_update((2, 2, 3, 4))[1:]

    def loss(query, state):
        return rotate(query, update(state, *inputs)).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1))(query, state)
    torch.testing.assert_close(found, torch.autograd.grad(loss(query, state), [query, state]))
    directions = [torch.randn_like(x) for x in (query, state)]
    _, tangent = torch.func.jvp(loss, (query, state), tuple(directions))
    torch.testing.assert_close(tangent, sum((g * d).sum() for g, d in zip(found, directions, strict=True)))
