"""Faults reported about positions and attention in neighbouring software; each test is named after its report."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half_split

from tape_pe.encodings import Tokens, get_encoding
from tape_pe.models import TapeLMConfig
from tape_pe.ops import (
    contextualize,
    make_segment_ids,
    positional_attention,
    rotary_state,
    rotate,
    segment_positions,
)
from tape_pe.ops.backends import describe_backends

AVAILABLE = [report.name for report in describe_backends("cpu") if report.available]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gpt_neox_1003_half_precision_tables_stay_exact(dtype: torch.dtype) -> None:
    """Phases computed in fp16 were off by 0.78 at position 1857. Only the rounding of the result may remain."""
    expected = rotary_state(torch.arange(2048)[None], 32, dtype=torch.float64)
    error = (rotary_state(torch.arange(2048)[None], 32, dtype=dtype).double() - expected).abs()
    assert error.max() <= {torch.float16: 1e-3, torch.bfloat16: 2**-8, torch.float32: 1e-6}[dtype]


def test_gpt_neox_1003_holds_for_an_encoding_after_half() -> None:
    config = TapeLMConfig(hidden_size=32, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    expected = rotary_state(torch.arange(2048)[None], 32, dtype=torch.float64)
    for name in ("tape", "rope"):
        kind = get_encoding(name)
        encoding = kind(config.encoding_sizes(), kind.options_class()).half()
        for dtype in (torch.float16, torch.float32):
            assert (
                encoding.start(Tokens(torch.arange(2048)[None], 2048), dtype).double() - expected
            ).abs().max() <= 1e-3


@pytest.mark.parametrize("head_dim", [1, 7, 33])
def test_rotary_embedding_torch_45_odd_head_dim_is_named(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        rotary_state(torch.arange(4)[None], head_dim)
    for encoding in ("tape", "rope"):
        with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
            TapeLMConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, encoding=encoding)


@pytest.mark.parametrize("position", [0, 1, 2, 1000])
def test_transformers_25199_and_nanotron_427_pairs_are_half_split(position: int) -> None:
    """Channel j turns with j + D/2 as in Llama, not with its neighbour. Position 0 cannot tell the two apart."""
    u = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = rotary_state(torch.tensor([[position]]), 8, dtype=torch.float64)
    cos, sin = (x.repeat(1, 1, 2) for x in state[:, 0].chunk(2, dim=-1))
    half_split, interleaved = rotate_half_split(u, u, cos, sin)[0], rotate_interleaved(u, u, cos, sin)[0]
    rotated = rotate(u, state)
    torch.testing.assert_close(rotated, half_split, rtol=1e-12, atol=1e-12)
    assert torch.allclose(rotated, interleaved) == (position == 0)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # the permutation between the two conventions
    reordered = rotate_interleaved(u[..., order], u, cos, sin)[0]
    torch.testing.assert_close(rotated[..., order], reordered, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("padded", [False, True])
def test_x_transformers_187_one_query_equals_the_last_row(backend: str, padded: bool) -> None:
    """A causal mask aligned at the top left would let the single query see the first key alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, state = (torch.randn(2, h, 13, 8, generator=generator) for h in (4, 2, 2, 2))
    segment_ids = (torch.arange(13) >= torch.tensor([[0], [5]])).long() - 1 if padded else None
    full = positional_attention(query, key, value, state, segment_ids=segment_ids, backend=backend)
    for new in (1, 4):
        last = positional_attention(query[:, :, -new:], key, value, state, segment_ids=segment_ids, backend=backend)
        torch.testing.assert_close(last.output, full.output[:, :, -new:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(last.averaged_state, full.averaged_state[:, :, -new:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pytorch_103749_fully_masked_rows_are_finite(backend: str, dtype: torch.dtype) -> None:
    """A row that sees no key was NaN, and so was every gradient. It passes through a whole layer here."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 2, 6, 8, generator=generator).to(dtype).requires_grad_() for _ in range(4)]
    segment_ids = torch.tensor([[-1, -1, 0, 0, 0, 0], [-1] * 6, [0, 0, -1, -1, 1, 1]])
    query, key, value, state = tensors
    result = positional_attention(
        rotate(query, state), rotate(key, state), value, state, segment_ids=segment_ids, backend=backend
    )
    mix = torch.randn(2, 2, generator=generator).to(dtype).requires_grad_()
    new_state = contextualize(state, result.averaged_state, None, mix=mix)
    (result.output.float().square().sum() + new_state.float().square().sum()).backward()
    dead = segment_ids < 0
    for x in result:
        assert x.isfinite().all()
        assert not x.transpose(1, 2)[dead].any()
    for leaf in (*tensors, mix):
        assert leaf.grad.isfinite().all()
    for leaf in (query, key, value):
        assert not leaf.grad.transpose(1, 2)[dead].any()
    assert torch.equal(new_state.transpose(1, 2)[dead], state.transpose(1, 2)[dead])


LENGTHS = (5, 1, 8, 3)


def _layer(backend: str, *tensors: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """One layer's output and new state, `[B, H, N, 8]` and `[B, Hkv, N, 8]`."""
    query, key, value, gate, mix, up, down = tensors
    state = rotary_state(segment_positions(segment_ids), 8, dtype=query.dtype)
    query, key = rotate(query, state), rotate(key, state)
    output, averaged = positional_attention(query, key, value, state, segment_ids=segment_ids, backend=backend)
    return output, contextualize(state, averaged, gate, mix=mix, up=up, down=down)


@pytest.mark.parametrize("slack", [0, 4])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", AVAILABLE)
def test_fla_837_and_892_packed_equals_padded(backend: str, side: str, slack: int) -> None:
    """Documents one after the other give what they give one a row: outputs, states, and gradients of everything.

    Slack rows behind the last document hold NaN-prone numbers here, and get the gradient zero.
    """
    generator = torch.Generator().manual_seed(0)
    total, longest = sum(LENGTHS), max(LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = [random(1, h, total + slack, 8) for h in (4, 2, 2)]
    tokens.append(random(1, total + slack, 5))
    for x in tokens:
        x[..., total:, :] = 1e30
    weights = [random(2, 4), random(5, 2), random(2, 5)]
    packed_ids = torch.tensor([[d for d, n in enumerate(LENGTHS) for _ in range(n)] + [-1] * slack])

    # Where packed column n stands in the padded batch.
    row = torch.tensor([d for d, n in enumerate(LENGTHS) for _ in range(n)])
    column = torch.tensor([c + (longest - n if side == "left" else 0) for n in LENGTHS for c in range(n)])
    mask = torch.zeros(len(LENGTHS), longest).index_put((row, column), torch.tensor(1.0))

    def pad(x: Tensor) -> Tensor:
        """`[1, ..., N, C]` -> `[documents, ..., longest, C]`."""
        padded = random(len(LENGTHS), *x.shape[1:-2], longest, x.shape[-1])
        padded.movedim(-2, 1)[row, column] = x.movedim(-2, 1)[0, :total]
        return padded

    def solve(tensors: list[Tensor], segment_ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.clone().requires_grad_() for x in (*tensors, *weights)]
        results = [x.movedim(-2, 1) for x in _layer(backend, *leaves, segment_ids=segment_ids)]
        real = [x[segment_ids >= 0] for x in results]  # [tokens, ...], documents in order
        loss = sum((x * x.cos()).sum() for x in real)
        grads = torch.autograd.grad(loss, leaves)
        return real, [*(x.movedim(-2, 1)[segment_ids >= 0] for x in grads[:4]), *grads[4:], *grads[:4]]

    packed, padded = solve(tokens, packed_ids), solve([pad(x) for x in tokens], make_segment_ids(mask, None))
    for actual, expected in zip(packed[0] + packed[1][:7], padded[0] + padded[1][:7], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for x in packed[1][7:]:
        assert not x[..., total:, :].any(), "slack rows"


@pytest.mark.parametrize("backend", AVAILABLE)
def test_fla_892_documents_never_influence_each_other(backend: str) -> None:
    """By exactly nothing, gradients included."""
    generator = torch.Generator().manual_seed(0)
    segment_ids = torch.tensor([[0] * 5 + [1] * 6])
    tensors = [torch.randn(1, h, 11, 8, generator=generator) for h in (4, 2, 2)]
    tensors += [torch.randn(1, 11, 5, generator=generator)]
    tensors += [torch.randn(shape, generator=generator) for shape in ((2, 4), (5, 2), (2, 5))]

    def second(document: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [x.clone().requires_grad_() for x in document]
        results = [x[:, :, 5:] for x in _layer(backend, *leaves, segment_ids=segment_ids)]
        return results, torch.autograd.grad(sum(x.square().sum() for x in results), leaves)

    before, before_grads = second(tensors)
    for x in tensors[:4]:
        x[..., :5, :] = torch.randn(x[..., :5, :].shape, generator=generator) * math.e
    after, after_grads = second(tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before_grads, after_grads, strict=True))
    assert not any(x[..., :5, :].any() for x in after_grads[:4])
