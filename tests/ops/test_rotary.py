"""Start states and rotation, against transformers' Llama and plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tape_pe.ops import reference, rotary_state, rotate

POSITIONS = torch.tensor([[1, 2, 17, 1000, 8191]])


def test_rotation_equals_llama() -> None:
    u = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))(u, POSITIONS)
    expected, _ = apply_rotary_pos_emb(u, u, cos, sin)
    actual = rotate(u, rotary_state(POSITIONS, 16))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)  # theirs has phases in fp32, off by 8191 * 2^-24
    torch.testing.assert_close(actual[:, :, :3], expected[:, :, :3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_phases_are_exact_whatever_the_dtype(dtype: torch.dtype) -> None:
    state = rotary_state(POSITIONS, 8, theta=10000.0, dtype=dtype)
    assert state.dtype == dtype
    assert state.shape == (1, 1, 5, 8)
    for n, position in enumerate(POSITIONS[0].tolist()):
        for j in range(4):
            phase = position * 10000.0 ** (-2 * j / 8)
            assert state[0, 0, n, j].item() == pytest.approx(math.cos(phase), abs=torch.finfo(dtype).eps + 1e-11)
            assert state[0, 0, n, 4 + j].item() == pytest.approx(math.sin(phase), abs=torch.finfo(dtype).eps + 1e-11)


def test_positions_may_be_given_in_half_precision_models_as_integers_of_any_width() -> None:
    expected = rotary_state(POSITIONS, 8)
    for dtype in (torch.int32, torch.int16, torch.float32):
        assert torch.equal(rotary_state(POSITIONS.to(dtype), 8), expected)


def test_position_zero_is_one() -> None:
    assert rotary_state(torch.zeros(1, 1, dtype=torch.long), 4).flatten().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("state_heads", [1, 2, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_rotate_equals_reference(state_heads: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 6, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    state = torch.randn(batch, state_heads, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 6, 5, 8, generator=generator, dtype=torch.float64)
    actual, expected = rotate(u, state), reference.rotate(u, state)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad(x, (u, state), grad) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("state_shape", [(2, 4, 3, 6), (2, 2, 3, 6), (1, 1, 3, 6)])
def test_rotate_gradcheck(state_shape: tuple[int, ...]) -> None:
    u = torch.randn(2, 3, 4, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    state = torch.randn(state_shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (u, state))


def test_a_fixed_table_keeps_no_queries_for_backward() -> None:
    u, state = torch.randn(1, 2, 5, 8, requires_grad=True), rotary_state(POSITIONS, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        rotate(u, state)
    assert kept == [state.shape]


def test_compiled_rotation_is_the_eager_one() -> None:
    u, state = torch.randn(1, 2, 5, 8), rotary_state(POSITIONS, 8)
    assert torch.equal(torch.compile(rotate, fullgraph=True, backend="eager")(u, state), rotate(u, state))


def test_rotate_keeps_the_dtype_of_its_input() -> None:
    u = torch.randn(1, 2, 5, 8).bfloat16()
    assert rotate(u, rotary_state(POSITIONS, 8)).dtype == torch.bfloat16


def test_scores_depend_on_distance_alone() -> None:
    u = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = []
    for shift in (0, 5, 4000):
        first, second = (rotary_state(torch.tensor([[n + shift]]), 16, dtype=torch.float64) for n in (3, 10))
        scores.append((rotate(u[0], first) * rotate(u[1], second)).sum().item())
    assert scores[1:] == pytest.approx([scores[0]] * 2, abs=1e-10)
