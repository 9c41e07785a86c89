"""State updates of the structural ablations, against their literal twins: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tape_pe.ops import (
    contextualize,
    contextualize_channels,
    contextualize_components,
    contextualize_unstructured,
    reference,
    rotary_state,
    rotate,
    rotate_wide,
    widen,
)

B, N, D, I = 2, 5, 8, 3  # noqa: E741
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "components": (contextualize_components, reference.contextualize_components, D),
    "channels": (contextualize_channels, reference.contextualize_channels, 2 * D),
    "unstructured": (contextualize_unstructured, reference.contextualize_unstructured, 2 * D),
}
structures = pytest.mark.parametrize("structure", FUNCTIONS)
grouped = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1), (1, 1)])


def weight_shapes(structure: str, heads: int, kv_heads: int, mixing: str) -> dict[str, tuple[int, ...]]:
    head_mix = (kv_heads, heads if mixing == "full" else heads // kv_heads)
    return {
        "components": {"mix": (2, *head_mix), "up": (2, I, kv_heads), "down": (2, kv_heads, I)},
        "channels": {"mix": (D, D) if mixing == "full" else (D,), "up": (I, D), "down": (D, I)},
        "unstructured": {"mix": head_mix, "up": (I, kv_heads * D), "down": (kv_heads * D, I)},
    }[structure]


def draw(structure: str, heads: int, kv_heads: int, mixing: str = "full", state_heads: int | None = None) -> dict:
    generator = torch.Generator().manual_seed(0)
    width = FUNCTIONS[structure][2]
    shapes = {
        "state": (B, kv_heads if state_heads is None else state_heads, N, width),
        "averaged_state": (B, heads, N, width),
        "gate": (B, N, I),
        **weight_shapes(structure, heads, kv_heads, mixing),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


def assert_equal(structure: str, arguments: dict[str, Any], **options: Any) -> None:
    fast, literal, _ = FUNCTIONS[structure]
    inputs = [x for x in arguments.values() if x is not None]
    actual, expected = fast(**arguments, **options), literal(**arguments, **options)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    grad = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(x, inputs, grad) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@structures
@grouped
@pytest.mark.parametrize("mixing", ["full", "diagonal"])
@pytest.mark.parametrize("norm", ["none", "rms"])
def test_update_equals_reference(structure: str, heads: int, kv_heads: int, mixing: str, norm: str) -> None:
    assert_equal(structure, draw(structure, heads, kv_heads, mixing), norm=norm)


@structures
@pytest.mark.parametrize("left_out", ["mix", "gate"])
def test_either_update_alone(structure: str, left_out: str) -> None:
    arguments = draw(structure, 4, 2)
    arguments |= dict.fromkeys(("mix", "averaged_state") if left_out == "mix" else ("gate", "up", "down"))
    assert_equal(structure, arguments)


@pytest.mark.parametrize("structure", ["components", "unstructured"])
@pytest.mark.parametrize("left_out", [None, "mix"])
def test_a_table_that_heads_share(structure: str, left_out: str | None) -> None:
    arguments = draw(structure, 4, 2, state_heads=1)
    if left_out:
        arguments |= {"mix": None, "averaged_state": None}
    assert_equal(structure, arguments)


@structures
def test_zero_weights_change_nothing(structure: str) -> None:
    arguments = draw(structure, 4, 2)
    arguments |= {name: torch.zeros_like(arguments[name]) for name in ("mix", "up")}
    fast, literal, _ = FUNCTIONS[structure]
    assert torch.equal(fast(**arguments), arguments["state"])
    assert torch.equal(literal(**arguments), arguments["state"])


def test_components_with_equal_weights_are_the_rotary_form() -> None:
    arguments = draw("components", 4, 2)
    for name in ("mix", "up", "down"):
        arguments[name] = arguments[name][:1].expand(2, -1, -1)
    shared = {name: arguments[name][0] for name in ("mix", "up", "down")}
    expected = contextualize(arguments["state"], arguments["averaged_state"], arguments["gate"], norm="rms", **shared)
    torch.testing.assert_close(contextualize_components(**arguments, norm="rms"), expected, rtol=0, atol=1e-12)


def test_unstructured_weights_contain_the_rotary_form() -> None:
    """With D times as many gates, those of each channel the same, and weights that keep channels apart."""
    rotary = draw("components", 4, 2)
    packed = {name: rotary[name] for name in ("state", "averaged_state", "gate")}
    mix, up, down = (rotary[name][0] for name in ("mix", "up", "down"))
    expected = contextualize(**packed, mix=mix, up=up, down=down)
    eye = torch.eye(D, dtype=torch.float64)
    wide = {name: widen(packed[name]) for name in ("state", "averaged_state")}
    gate = packed["gate"].repeat_interleave(D, dim=-1)
    actual = contextualize_unstructured(**wide, gate=gate, mix=mix, up=torch.kron(up, eye), down=torch.kron(down, eye))
    torch.testing.assert_close(actual, widen(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("state_heads", [1, 2, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotation_by_a_wide_state_equals_reference(state_heads: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 6, N, D, generator=generator, dtype=torch.float64, requires_grad=True)
    state = torch.randn(batch, state_heads, N, 2 * D, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 6, N, D, generator=generator, dtype=torch.float64)
    actual, expected = rotate_wide(u, state), reference.rotate_wide(u, state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad(x, (u, state), grad) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_widened_state_rotates_as_the_packed_one_bit_for_bit(dtype: torch.dtype) -> None:
    state = rotary_state(torch.arange(N)[None], D, dtype=dtype)
    u = torch.randn(B, 4, N, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert widen(state).shape == (1, 1, N, 2 * D)
    assert torch.equal(rotate_wide(u, widen(state)), rotate(u, state))


@structures
def test_unknown_norms_are_refused(structure: str) -> None:
    fast = FUNCTIONS[structure][0]
    with pytest.raises(ValueError, match="norm='l2': known state norms are none, rms"):
        fast(**draw(structure, 4, 2), norm="l2")
