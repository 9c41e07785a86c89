"""Growing tensors: equal to concatenation, few allocations, and nothing that was handed out ever changes."""

from __future__ import annotations

import copy

import pytest
import torch

from tape_pe.models.growing import GrowingTensor


def pieces(number, size=1, rows=2):
    return torch.randn(rows, 3, number * size, 4, generator=torch.Generator().manual_seed(0)).split(size, dim=2)


def grow(growing, new):
    for piece in new:
        growing = growing.append(piece)
    return growing


@pytest.mark.parametrize("size", [1, 3])
@torch.no_grad()
def test_is_concatenation_with_few_allocations(size):
    first, *new = pieces(1000, size)
    growing = GrowingTensor(first, dim=-2)
    addresses = set()
    for piece in new:
        growing = growing.append(piece)
        addresses.add(growing.tensor.data_ptr())
        room = growing.tensor.untyped_storage().nbytes()
        assert room <= 2 * growing.tensor.numel() * growing.tensor.element_size()
    assert torch.equal(growing.tensor, torch.cat([first, *new], dim=2))
    assert len(addresses) <= 10  # log2(1000)


@torch.no_grad()
def test_what_was_handed_out_never_changes():
    first, *new = pieces(20)
    growing = GrowingTensor(first, dim=2)
    seen = []
    for piece in new[:10]:  # the last one finds the memory full: there is room for the branches
        growing = growing.append(piece)
        seen.append((growing.tensor, growing.tensor.clone()))
    cut = GrowingTensor(growing.tensor[:, :, :5], dim=2)  # as a cache is cropped
    for held, added in ((cut, new[10:12]), (growing, new[12:15]), (growing, new[15:])):
        expected = torch.cat([held.tensor.clone(), *added], dim=2)
        branch = grow(held, added)
        assert torch.equal(branch.tensor, expected)
        seen.append((branch.tensor, expected))
    for tensor, before in seen:
        assert torch.equal(tensor, before)


@torch.no_grad()
def test_deep_copies_keep_their_room_and_go_on_alone():
    first, *new = pieces(10)
    growing = grow(GrowingTensor(first, dim=2), new[:4])  # room for 8 tokens
    twin = copy.deepcopy(growing)
    address = twin.tensor.data_ptr()
    one, two = growing.append(new[4]), twin.append(new[5])
    assert two.tensor.data_ptr() == address != one.tensor.data_ptr()
    assert torch.equal(one.tensor, torch.cat([first, *new[:5]], dim=2))
    assert torch.equal(two.tensor, torch.cat([first, *new[:4], new[5]], dim=2))


def test_concatenates_with_gradients_on():
    """Also where only the queries need gradients, for which autograd keeps keys that need none."""
    first, second, third = pieces(3)
    weight = torch.ones(4, requires_grad=True)
    growing = GrowingTensor(first, dim=2).append(second)
    loss = (growing.tensor * weight).sum()
    grown = growing.append(third)
    assert grown.tensor.data_ptr() != growing.tensor.data_ptr()
    loss.backward()
    torch.testing.assert_close(weight.grad, torch.cat([first, second], dim=2).sum(dim=(0, 1, 2)))


def test_gradients_after_growing_without_them():
    first, second, third = pieces(3)
    with torch.no_grad():
        growing = GrowingTensor(first, dim=2).append(second)
    leaf = third.clone().requires_grad_()
    growing.append(leaf).tensor.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * third)


def test_inference_mode_may_end():
    first, second, third, last = pieces(4)
    with torch.inference_mode():
        growing = grow(GrowingTensor(first, dim=2), (second, third))
    with torch.no_grad():
        growing = growing.append(last)
    assert torch.equal(growing.tensor, torch.cat([first, second, third, last], dim=2))


@torch.no_grad()
def test_rows_and_heads_that_are_shared_stay_one_until_they_differ():
    first, second = pieces(2, size=4, rows=1)
    other = pieces(1, size=2, rows=3)[0]
    growing = GrowingTensor(first[:, :1], dim=2).append(second[:, :1])
    assert growing.tensor.shape == (1, 1, 8, 4)
    grown = growing.append(other)
    expected = torch.cat([first, second], dim=2)[:, :1].expand(3, 3, -1, -1)
    assert torch.equal(grown.tensor, torch.cat([expected, other], dim=2))
    back = grown.append(first[:, :1])
    assert torch.equal(back.tensor[:, :, -4:], first[:, :1].expand(3, 3, -1, -1))


@torch.no_grad()
def test_wider_numbers_widen_what_is_held():
    held = GrowingTensor(torch.tensor([[0, 1]]), dim=1).append(torch.tensor([[2]])).append(torch.tensor([[3.5]]))
    assert torch.equal(held.tensor, torch.tensor([[0.0, 1.0, 2.0, 3.5]]))
