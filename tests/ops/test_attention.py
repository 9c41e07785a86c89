"""Every backend against the reference: outputs and the gradients of all inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from tape_pe.ops import contextualize, make_segment_ids, positional_attention, rotary_state, rotate
from tape_pe.ops.backends import blocks, describe_backends

MASKS = ("causal", "full", "left", "right", "documents", "padded documents", "dead rows", "bias", "bias left")
AVAILABLE = tuple(report.name for report in describe_backends("cpu") if report.available)
FAST = tuple(name for name in AVAILABLE if name != "reference")
GROUPS = {1: (4, 4), 3: (6, 2), "H": (4, 1)}


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes chunks so small that a small problem needs many of them."""

    def shrink(elements: int) -> None:
        monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(blocks, "ROWS", 4)
        monkeypatch.setattr(blocks, "LONG_ROWS", 8)

    return shrink


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tokens", [1, 7, 64, 257])
def test_backends_equal_reference_in_fp64(make_problem, assert_close, tokens, groups, mask) -> None:
    heads, kv_heads = GROUPS[groups]
    problem = make_problem(mask, heads=heads, kv_heads=kv_heads, queries=tokens)
    expected = problem.solve("reference")
    for backend in FAST:
        assert_close(problem.solve(backend), expected, 1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_backends_equal_reference_at_1024_tokens(make_problem, assert_close, mask) -> None:
    problem = make_problem(mask, batch=1, heads=3, kv_heads=1, queries=1024, widths=(4, 4, 4))
    expected = problem.solve("reference")
    for backend in FAST:
        assert_close(problem.solve(backend), expected, 1e-12)
        assert_close(problem.to(torch.float32).solve(backend), expected, 1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 7, 64, 257])
def test_fp32_is_within_1e_5_of_fp64(make_problem, assert_close, tokens, mask) -> None:
    problem = make_problem(mask, heads=6, kv_heads=2, queries=tokens)
    expected = problem.solve("reference")
    for backend in AVAILABLE:
        assert_close(problem.to(torch.float32).solve(backend), expected, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("mask", ["causal", "padded documents", "bias"])
def test_half_precision_in_and_out(make_problem, assert_close, mask, dtype, tolerance) -> None:
    problem = make_problem(mask, queries=64, widths=(8, 8, 8)).to(dtype)
    expected = problem.to(torch.float64).solve("reference")
    for backend in AVAILABLE:
        actual = problem.solve(backend)
        assert {x.dtype for x in actual.values()} == {dtype}
        assert_close(actual, expected, tolerance)


def test_blockwise_rounds_half_precision_once(make_problem) -> None:
    problem = make_problem("causal", queries=300).to(torch.bfloat16)
    expected = problem.to(torch.float64).solve("reference")["output"]
    actual = problem.solve("blockwise")["output"].double()
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (3, 64), (5, 257), (130, 257)])
def test_queries_are_the_last_of_the_keys(make_problem, assert_close, queries, keys, mask) -> None:
    problem = make_problem(mask, heads=6, kv_heads=2, queries=queries, keys=keys)
    expected = problem.solve("reference")
    for backend in FAST:
        assert_close(problem.solve(backend), expected, 1e-12)


@pytest.mark.parametrize("state_shape", [None, (1, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_states_shared_by_batch_rows_or_heads(make_problem, assert_close, mask, state_shape) -> None:
    problem = make_problem(mask, batch=3, heads=6, kv_heads=2, queries=33, state_shape=state_shape)
    expected = problem.solve("reference")
    if state_shape is not None:
        assert expected["gradient of state"].shape == (*state_shape, 33, 10)
    for backend in FAST:
        assert_close(problem.solve(backend), expected, 1e-12)


@pytest.mark.parametrize("bias_shape", [(37,), (37, 37), (4, 1, 1), (1, 4, 37, 37), (3, 1, 37, 37), (3, 4, 1, 37)])
def test_biases_of_any_broadcastable_shape(make_problem, assert_close, bias_shape) -> None:
    bias = torch.randn(bias_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem = replace(make_problem("documents", batch=3, queries=37), bias=bias)
    expected = problem.solve("reference")
    for backend in FAST:
        assert_close(problem.solve(backend), expected, 1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("elements", [1, 90, 700, 3000, 20000])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_chunks_of_any_size(make_problem, assert_close, tiny_chunks, layout, elements, mask) -> None:
    """From one row of one head at a time to several heads and batch rows at once, on both sides of every boundary."""
    problem = make_problem(mask, batch=5, heads=6, kv_heads=3, queries=13, keys=17)
    expected = problem.solve("reference")
    tiny_chunks(elements)
    if layout == "tokens first":
        tensors = {name: getattr(problem, name) for name in ("query", "key", "value", "state", "grad_output")}
        problem = replace(problem, **{name: _tokens_first(x) for name, x in tensors.items()})
    assert_close(problem.solve("blockwise"), expected, 1e-12)


@pytest.mark.parametrize("shape", [(2, 6), (6, 2), (1, 7), (7, 1)])
def test_chunks_cover_every_head_and_row_once(make_problem, assert_close, tiny_chunks, shape) -> None:
    batch, kv_heads = shape
    for queries in (5, 16, 17):
        problem = make_problem("documents", batch=batch, heads=2 * kv_heads, kv_heads=kv_heads, queries=queries)
        expected = problem.solve("reference")
        for elements in (2 * 16 * 16, 6 * 16 * 16, 2 * 17 * 17, 5 * 17 * 17):
            tiny_chunks(elements)
            assert_close(problem.solve("blockwise"), expected, 1e-12)
            tensors = {name: _tokens_first(getattr(problem, name)) for name in ("query", "key", "value", "state")}
            assert_close(replace(problem, **tensors).solve("blockwise"), expected, 1e-12)


def test_many_short_sequences_at_once(make_problem, assert_close) -> None:
    """As in the arithmetic tasks: more (batch row, head) pairs than fit one chunk."""
    for mask in ("causal", "left", "bias"):
        problem = make_problem(mask, batch=128, heads=4, kv_heads=4, queries=30, widths=(4, 4, 4))
        assert blocks.CHUNK_ELEMENTS < 128 * 4 * 30 * 30
        assert_close(problem.solve("blockwise"), problem.solve("reference"), 1e-12)


@pytest.mark.parametrize("backend", FAST)
def test_inputs_of_any_layout(make_problem, assert_close, backend) -> None:
    problem = make_problem("padded documents", batch=3, heads=4, kv_heads=2, queries=19, widths=(8, 8, 8))
    expected = problem.solve("reference")
    strided = replace(
        problem,
        query=_tokens_first(problem.query),
        key=torch.stack([problem.key, problem.key.neg()], dim=-1)[..., 0],
        value=problem.value.transpose(2, 3).contiguous().transpose(2, 3),
        state=torch.cat([problem.state, problem.state], dim=-1)[..., 8:],
        segment_ids=problem.segment_ids.t().contiguous().t(),
        grad_output=_tokens_first(problem.grad_output),
    )
    assert not any(x.is_contiguous() for x in (strided.query, strided.key, strided.value, strided.state))
    assert_close(strided.solve(backend), expected, 1e-12)
    expanded = replace(
        problem, value=problem.value[:1].expand(3, -1, -1, -1), key=problem.key[:, :1].expand(-1, 2, -1, -1)
    )
    assert_close(expanded.solve(backend), expanded.solve("reference"), 1e-12)


def _tokens_first(x: Tensor) -> Tensor:
    """The same `[B, heads, N, C]` with the memory of `[B, N, heads, C]`, as projections leave it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_key_are_zero_with_zero_gradients(make_problem, backend, causal) -> None:
    problem = replace(make_problem("left", queries=11), causal=causal)
    dead = problem.segment_ids < 0
    assert dead[0, 0]
    assert not dead[0, -1]
    results = problem.solve(backend)
    for name, x in results.items():
        assert x.isfinite().all(), name
        rows = x.transpose(1, 2)  # padding is neither query nor key: its rows and gradients are 0 everywhere
        assert torch.equal(rows[dead], torch.zeros_like(rows[dead])), name
        assert rows[:, -1].any(), name


@pytest.mark.parametrize("backend", AVAILABLE)
def test_rows_hidden_by_an_infinite_bias_are_zero(make_problem, backend) -> None:
    bias = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    bias[:, :, 4] = -torch.inf
    bias[:, :, 6, 2:] = -torch.inf
    results = replace(make_problem("causal"), bias=bias).solve(backend)
    assert all(x.isfinite().all() for x in results.values())
    for name in ("output", "averaged_state", "gradient of query", "gradient of bias"):
        assert not results[name][:, :, 4].any(), name
        assert results[name][:, :, 6].any(), name
    assert not results["gradient of bias"][:, :, 6, 2:].any()


@pytest.mark.parametrize("backend", AVAILABLE)
def test_whole_rows_of_padding(make_problem, backend) -> None:
    problem = make_problem("causal", batch=2, queries=9)
    segment_ids = torch.zeros(2, 9, dtype=torch.long)
    segment_ids[1] = -1
    for name, x in replace(problem, segment_ids=segment_ids).solve(backend).items():
        assert not x[1].any(), name
        assert x[0].any(), name
        assert x.isfinite().all(), name


@pytest.mark.parametrize("backend", FAST)
def test_scale(make_problem, assert_close, backend) -> None:
    problem = make_problem("causal")
    arguments = (problem.query, problem.key, problem.value, problem.state)
    actual, expected = (positional_attention(*arguments, scale=0.3, backend=name) for name in (backend, "reference"))
    assert_close(actual._asdict(), expected._asdict(), 1e-12)
    assert not torch.allclose(actual.output, positional_attention(*arguments, backend=backend).output)
    explicit = positional_attention(*arguments, scale=8**-0.5, backend=backend)
    assert torch.equal(explicit.output, positional_attention(*arguments, backend=backend).output)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_only_the_output_or_only_the_state_is_differentiated(make_problem, backend) -> None:
    problem = make_problem("causal", queries=9)
    for grad_output, grad_averaged in ((0.0, 1.0), (1.0, 0.0)):
        expected = replace(
            problem,
            grad_output=problem.grad_output * grad_output,
            grad_averaged=problem.grad_averaged * grad_averaged,
        ).solve("reference")
        leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value, problem.state)]
        result = positional_attention(*leaves, backend=backend)
        if grad_output:
            grads = torch.autograd.grad(result.output, leaves, problem.grad_output, allow_unused=True)
        else:
            grads = torch.autograd.grad(result.averaged_state, leaves, problem.grad_averaged, allow_unused=True)
        for name, actual in zip(("query", "key", "value", "state"), grads, strict=True):
            reference = expected[f"gradient of {name}"]
            torch.testing.assert_close(torch.zeros_like(reference) if actual is None else actual, reference)


@pytest.mark.parametrize("frozen", ["query", "key", "value", "state", "bias"])
def test_frozen_inputs_get_no_gradient(make_problem, frozen) -> None:
    problem = make_problem("bias", queries=9)
    expected = problem.solve("reference")
    names = ("query", "key", "value", "state", "bias")
    leaves = {name: getattr(problem, name).clone().requires_grad_(name != frozen) for name in names}
    result = positional_attention(**leaves, backend="blockwise")
    torch.autograd.backward(result, (problem.grad_output, problem.grad_averaged))
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[f"gradient of {name}"])


@pytest.mark.parametrize("mask", ["causal", "padded documents", "bias"])
def test_blockwise_gradcheck(make_problem, tiny_chunks, mask) -> None:
    problem = make_problem(mask, batch=2, heads=4, kv_heads=2, queries=4, keys=5, widths=(2, 3, 2))
    tiny_chunks(20)
    leaves = [problem.query, problem.key, problem.value, problem.state, problem.bias]
    leaves = [None if x is None else x.requires_grad_() for x in leaves]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, state, bias = tensors
        return tuple(
            positional_attention(
                query, key, value, state, segment_ids=problem.segment_ids, bias=bias, backend="blockwise"
            )
        )

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("mask", ["causal", "padded documents", "bias left"])
@pytest.mark.parametrize("with_state", [True, False])
def test_blockwise_operators_pass_opcheck(make_problem, mask, with_state) -> None:
    problem = make_problem(mask, queries=6, state_shape=(2, 2) if with_state else None)
    leaves = (problem.query, problem.key, problem.value, problem.state)
    bias = None if problem.bias is None else problem.bias.expand(2, -1, -1, -1).contiguous()
    arguments = (*leaves, problem.segment_ids, bias, True, 0.5)
    differentiable = tuple(
        x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )
    torch.library.opcheck(torch.ops.tape_pe.blockwise_attention.default, differentiable)
    grads = (problem.grad_output, problem.grad_averaged if with_state else torch.zeros(0, dtype=torch.float64))
    torch.library.opcheck(
        torch.ops.tape_pe.blockwise_attention_backward.default,
        (*grads, *arguments, with_state, bias is not None),
    )


@pytest.mark.parametrize("backend", AVAILABLE)
def test_autocast(backend) -> None:
    """Projections give bf16, states and norms fp32, and the layer still works."""
    torch.manual_seed(0)
    x, projection = torch.randn(2, 40, 32), nn.Linear(32, 96, bias=False)
    state = rotary_state(torch.arange(40)[None], 8)

    def loss() -> Tensor:
        query, key, value = projection(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, state), rotate(key, state)
        output, averaged = positional_attention(query, key, value, state, backend=backend)
        return output.float().square().mean() + averaged.float().square().mean()

    expected = loss()
    (expected_grad,) = torch.autograd.grad(expected, projection.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss()
    (grad,) = torch.autograd.grad(actual, projection.weight)
    assert grad.dtype == torch.float32
    assert abs(actual.item() - expected.item()) < 1e-2 * expected.item()
    assert (grad - expected_grad).norm() < 3e-2 * expected_grad.norm()


def test_autocast_leaves_fp32_inputs_of_blockwise_in_fp32(make_problem) -> None:
    problem = make_problem("causal", queries=64).to(torch.float32)
    arguments = (problem.query, problem.key, problem.value, problem.state)
    expected = positional_attention(*arguments, backend="blockwise")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = positional_attention(*arguments, backend="blockwise")
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.averaged_state, expected.averaged_state)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_one_graph_for_all_lengths(backend) -> None:
    """A whole layer of positions compiles without a break, and once for all lengths: backward too."""
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 8
    mix, up, down = (torch.randn(shape).mul(0.1).requires_grad_() for shape in ((2, 4), (6, 2), (2, 6)))

    def layer(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        state = rotary_state(torch.arange(query.shape[2])[None], width)
        segment_ids = make_segment_ids(mask, None)
        query, key = rotate(query, state), rotate(key, state)
        output, averaged = positional_attention(query, key, value, state, segment_ids=segment_ids, backend=backend)
        return output, contextualize(state, averaged, gate, mix=mix, up=up, down=down, norm="rms")

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    compilations = []
    for tokens in (17, 64, 150):
        inputs = [torch.randn(2, n, tokens, width, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
        inputs.append(torch.randn(2, tokens, 6, requires_grad=True))
        mask = torch.ones(2, tokens)
        mask[1, :5] = 0
        for x in (*inputs[:3], mask, inputs[3]):
            torch._dynamo.mark_dynamic(x, 2 if x.ndim == 4 else 1)
        leaves = [*inputs, mix, up, down]
        grads, results = [], []
        for function in (layer, compiled):
            output, state = function(*inputs, mask)
            results.append((output, state))
            grads.append(torch.autograd.grad(output.sum() + state.square().sum(), leaves))
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)
        compilations.append(counter.frame_count)
    assert compilations == compilations[:1] * 3


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_compiles_with_every_size_dynamic(make_problem, backend) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(positional_attention, fullgraph=True, dynamic=True, backend="eager")
    for heads, kv_heads in ((4, 4), (4, 2)):
        problem = make_problem("documents", heads=heads, kv_heads=kv_heads)
        arguments = (problem.query, problem.key, problem.value, problem.state)
        actual = compiled(*arguments, segment_ids=problem.segment_ids, backend=backend)
        expected = positional_attention(*arguments, segment_ids=problem.segment_ids, backend=backend)
        torch.testing.assert_close(actual, expected)


def test_two_backward_passes(make_problem) -> None:
    """Backward may run twice over the same graph, and changes none of what forward saved."""
    problem = make_problem("documents")
    leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value, problem.state)]
    result = positional_attention(*leaves, segment_ids=problem.segment_ids, backend="blockwise")
    directions = (problem.grad_output, problem.grad_averaged)
    first = torch.autograd.grad(result, leaves, directions, retain_graph=True)
    second = torch.autograd.grad(result, leaves, directions)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
