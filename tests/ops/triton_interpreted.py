"""The Triton kernels, interpreted on a CPU; `test_triton.py` runs this file in a process of its own.

Tolerances of fp16 are what rounding weights and gradients of scores to fp16 costs.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from tape_pe.ops import positional_attention
from tape_pe.ops.backends import BACKENDS, describe_backends, sdpa, select_backend, triton
from tape_pe.ops.backends.triton import launch
from tape_pe.ops.bias import TensorBias

CPU = torch.device("cpu")
WIDTHS = (16, 16, 16)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3}
SIZES = {"heads": 2, "kv_heads": 1, "queries": 40, "keys": 70, "widths": WIDTHS}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran."""
    names: list[str] = []
    original = launch.launch

    def spy(kernel, grid, *arguments, **options):
        names.append(kernel.__name__)
        original(kernel, grid, *arguments, **options)

    monkeypatch.setattr(launch, "launch", spy)
    return names


@pytest.fixture
def check(make_problem, assert_close):
    """Compares outputs and gradients with the fp64 reference."""

    def compare(mask: str = "causal", dtype: torch.dtype = torch.float32, **sizes) -> None:
        problem = make_problem(mask, **{**SIZES, **sizes})
        assert_close(problem.to(dtype).solve("triton"), problem.solve("reference"), TOLERANCES[dtype])

    return compare


@pytest.mark.parametrize("mask", ["causal", "full", "left", "right", "documents", "padded documents", "dead rows"])
def test_equals_reference(check, launched, mask) -> None:
    check(mask)
    ranges = [] if mask in ("causal", "full") else ["segment_ranges_kernel"]
    kernels = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")
    assert launched == [name for kernel in kernels for name in (*ranges, kernel)]


@pytest.mark.parametrize("mask", ["causal", "dead rows"])
def test_half_precision(check, mask) -> None:
    check(mask, torch.float16)


@pytest.mark.skip(
    reason="Triton's interpreter multiplies bf16 numbers wrongly, as of 3.9; kernels differ in types alone"
)
def test_bfloat16(check) -> None:
    check("causal", torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_groups(check, heads, kv_heads) -> None:
    check("left", heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (65, 65), (17, 100)])
def test_sizes(check, queries, keys) -> None:
    check("causal", queries=queries, keys=keys)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_widths(check, width) -> None:
    check("documents", torch.float16, batch=1, widths=(width,) * 3)


@pytest.mark.parametrize("state_shape", [None, (1, 1), (2, 1)])
def test_states_shared_or_absent(check, state_shape) -> None:
    check("causal", state_shape=state_shape)


def test_expanded_state_is_read_where_it_is(make_problem, monkeypatch) -> None:
    seen = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda *arguments: seen.append(arguments[3]) or forward(*arguments))
    problem = make_problem("causal", **{**SIZES, "heads": 4, "kv_heads": 2}, state_shape=(1, 1)).to(torch.float32)
    positional_attention(problem.query, problem.key, problem.value, problem.state, backend="triton")
    assert seen[0].stride()[:2] == (0, 0)
    assert seen[0].data_ptr() == problem.state.data_ptr()


@pytest.mark.parametrize(
    ("mask", "queries", "keys"),
    [("causal", 1, 1), ("left", 1, 200), ("full", 1, 130), ("causal", 7, 130), ("dead rows", 7, 130)],
)
def test_decoding(check, launched, mask, queries, keys) -> None:
    """With gradients, too: they come from the same backward kernels."""
    check(mask, queries=queries, keys=keys)
    assert launched[:2] == ["decode_kernel", "merge_kernel"]
    assert "forward_kernel" not in launched


def test_decoding_in_half_precision_with_many_rows(check, launched) -> None:
    check("left", torch.float16, heads=3, queries=9, keys=100)  # 27 rows
    assert launched[0] == "decode_kernel"


def test_decoding_without_a_state(check, launched) -> None:
    check("causal", queries=1, keys=200, state_shape=None)
    assert launched[0] == "decode_kernel"


def test_rows_without_a_key_are_zero_with_zero_gradients(make_problem) -> None:
    problem = make_problem("left", **{**SIZES, "queries": 70}).to(torch.float32)
    dead = problem.segment_ids < 0
    for name, x in problem.solve("triton").items():
        rows = x.transpose(1, 2)
        assert rows[dead].numel()
        assert torch.equal(rows[dead], torch.zeros_like(rows[dead])), name


def test_documents_do_not_touch_each_other(make_problem) -> None:
    problem = make_problem("causal", **{**SIZES, "queries": 70}).to(torch.float32)
    ids = (torch.arange(70) >= 33).long().expand(2, -1)
    arguments = [x.clone() for x in (problem.query, problem.key, problem.value, problem.state)]
    first = positional_attention(*arguments, segment_ids=ids, backend="triton")
    for x in arguments:
        x[:, :, :33] = 1e4
    second = positional_attention(*arguments, segment_ids=ids, backend="triton")
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before[:, :, 33:], after[:, :, 33:])


def test_strides(make_problem, assert_close) -> None:
    """Token-major memory, one tensor for keys and values, and channels apart."""
    problem = make_problem("causal", **SIZES)
    expected = problem.solve("reference")

    def token_major(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    both = torch.cat([problem.key, problem.value], dim=-1).float()
    half = problem.to(torch.float32)
    apart = torch.stack([half.state, half.state], dim=-1)[..., 0]
    view = type(problem)(
        token_major(half.query), both[..., :16], both[..., 16:], apart, None, None, True, half.grad_output,
        token_major(half.grad_averaged),
    )  # fmt: skip
    assert not view.state.is_contiguous()
    assert_close(view.solve("triton"), expected, TOLERANCES[torch.float32])


def test_scale_and_frozen_state(make_problem) -> None:
    problem = make_problem("causal", **SIZES).to(torch.float32)
    results = []
    for backend in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        outputs = positional_attention(*leaves, problem.state, scale=0.6, backend=backend)
        grads = torch.autograd.grad(outputs, leaves, (problem.grad_output, problem.grad_averaged))
        results.append((*outputs, *grads))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_only_one_output_is_differentiated(make_problem) -> None:
    problem = make_problem("causal", **SIZES).to(torch.float32)
    grads = []
    for backend in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.state)]
        averaged = positional_attention(*leaves[:2], problem.value, leaves[2], backend=backend).averaged_state
        grads.append(torch.autograd.grad(averaged, leaves, problem.grad_averaged))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_operators(make_problem) -> None:
    """Fake outputs have the shapes and strides of true ones, and autograd is registered as torch wants it."""
    problem = make_problem("documents", **{**SIZES, "queries": 33, "keys": 40}).to(torch.float32)
    leaves = [x.requires_grad_() for x in (problem.query, problem.key, problem.value, problem.state)]
    arguments = (*leaves, problem.segment_ids, True, 0.25)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tape_pe.triton_attention.default, arguments, test_utils=checks)


def test_is_part_of_an_outer_graph(make_problem) -> None:
    """One graph, compiled once for all lengths."""

    def layer(query, key, value, state, segment_ids):
        return positional_attention(query, key, value, state, segment_ids=segment_ids, backend="triton")

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for queries, keys in ((20, 40), (33, 50)):
        problem = make_problem("padded documents", **{**SIZES, "queries": queries, "keys": keys}).to(torch.float32)
        results = []
        for function in (compiled, layer):
            leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value, problem.state)]
            outputs = function(*leaves, problem.segment_ids)
            grads = torch.autograd.grad(outputs, leaves, (problem.grad_output, problem.grad_averaged))
            results.append((*outputs, *grads))
        torch.testing.assert_close(results[0], results[1])
    assert counter.frame_count == 1


def test_decoders_train_and_generate(make_model, make_tokens, gradients, monkeypatch) -> None:
    model, tokens = make_model("tape", head_dim=16, num_hidden_layers=2), make_tokens(2, 19)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    monkeypatch.setenv("TAPE_BACKEND", "triton")
    outputs = model(tokens, attention_mask=mask, labels=tokens)
    actual = gradients(model, outputs.loss)
    generated = model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    monkeypatch.undo()
    expected = model(tokens, attention_mask=mask, labels=tokens)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual, gradients(model, expected.loss), rtol=1e-3, atol=1e-5)
    again = model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, again)


def test_what_the_kernels_cannot_do_goes_to_sdpa(monkeypatch, launched) -> None:
    monkeypatch.setattr(sdpa, "attention", lambda inputs: (launched.append("sdpa"), None))

    def call(key_width: int = 16, value_width: int = 16, dtype: torch.dtype = torch.float32, **options) -> str:
        q = torch.zeros(1, 1, 20, key_width, dtype=dtype)
        v = torch.zeros(1, 1, 20, value_width, dtype=dtype)
        launched.clear()
        positional_attention(q, q, v, backend="triton", **options)
        return launched[0]

    assert call() == call(dtype=torch.float16) == call(64, 64) == call(128, 128, torch.float16) == "forward_kernel"
    assert call(dtype=torch.float64) == call(24, 24) == call(8, 8) == call(value_width=32) == "sdpa"
    assert call(bias=torch.zeros(1, 1, 20, 20)) == call(bias=TensorBias(torch.zeros(1, 1, 20, 20))) == "sdpa"
    with monkeypatch.context() as patch:
        patch.setattr(triton, "MAX_HEADS", 0)
        assert call() == "sdpa"
    assert call(128, 128) == "sdpa", "fp32 without tensor cores"
    torch.set_float32_matmul_precision("high")
    try:
        assert call(128, 128) == "forward_kernel"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_derivatives_that_it_does_not_have() -> None:
    x = torch.randn(1, 2, 20, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: positional_attention(x, x, v, backend="triton").output, (x,), (x,))
    (first,) = torch.autograd.grad(positional_attention(x, x, x, backend="triton").output.sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        first.sum().backward()


def test_has_to_be_asked_for(monkeypatch) -> None:
    monkeypatch.delenv("TAPE_BACKEND", raising=False)
    assert select_backend(CPU).name == "blockwise"
    assert select_backend(CPU, "triton") is BACKENDS["triton"]
    report = next(report for report in describe_backends("cpu") if report.name == "triton")
    assert report.available
    assert not report.chosen
