"""The flex backend on a CPU: flex_attention not compiled, which computes what its kernels compute in dense math, its
compiled forward pass, and which pairs of blocks it would compute.

Two refusals of torch are lifted for it here: it runs on CUDA alone, and flex_attention refuses gradients on a CPU,
although its dense math has them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
import torch.nn.attention.flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.alibi import AlibiBias
from tape_pe.encodings.fire import FireBias, FireLayer, FireOptions
from tape_pe.encodings.t5 import T5, BucketBias, T5Options
from tape_pe.ops import PairBias, positional_attention, reference
from tape_pe.ops.backends import BACKENDS, flex, sdpa
from tape_pe.ops.bias import TensorBias
from tape_pe.ops.inputs import AttentionInputs
from tape_pe.ops.masks import dense_mask

MASKS = ("causal", "full", "left", "documents", "padded documents", "dead rows", "bias", "bias left")
GROUPS = {1: (4, 4), 3: (6, 2), "H": (4, 1)}
RULES = {"alibi": AlibiBias, "t5": BucketBias, "fire": FireBias}

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def uncompiled(inputs: AttentionInputs):
    return flex.attend(*flex.prepare(inputs))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `backend="flex"` run here, not compiled, at every size and with gradients."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None, raising=False)
    backend = BACKENDS["flex"]._replace(attention=uncompiled, unavailable=lambda device: None)
    monkeypatch.setitem(BACKENDS, "flex", backend)


@pytest.fixture
def not_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it an error to build the bias of all pairs."""

    def refuse(self: PairBias) -> None:
        raise AssertionError("materialized")

    for rule in (PairBias, *RULES.values()):
        monkeypatch.setattr(rule, "materialize", refuse)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("groups", "mask"), [(3, mask) for mask in MASKS] + [(g, mask) for g in (1, "H") for mask in ("full", "bias left")]
)
def test_equals_reference(make_problem, assert_close, groups, mask) -> None:
    """Outputs and gradients, the bias's too."""
    heads, kv_heads = GROUPS[groups]
    problem = make_problem(mask, heads=heads, kv_heads=kv_heads, queries=37)
    expected = problem.solve("reference")
    assert_close(problem.solve("flex"), expected, 1e-12)
    if groups == 3:
        assert_close(problem.to(torch.float32).solve("flex"), expected, 1e-5)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mask", ["causal", "padded documents", "bias left"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (5, 64), (130, 257)])
def test_queries_are_the_last_of_the_keys(make_problem, assert_close, queries, keys, mask) -> None:
    problem = make_problem(mask, heads=6, kv_heads=2, queries=queries, keys=keys)
    assert_close(problem.solve("flex"), problem.solve("reference"), 1e-12)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("state_shape", [None, (1, 1), (3, 1)])
def test_states_shared_by_batch_rows_or_heads(make_problem, assert_close, state_shape) -> None:
    problem = make_problem("documents", batch=3, heads=6, kv_heads=2, queries=33, state_shape=state_shape)
    assert_close(problem.solve("flex"), problem.solve("reference"), 1e-12)


@pytest.mark.usefixtures("on_cpu")
def test_rows_without_a_key_are_zero_with_zero_gradients(make_problem) -> None:
    problem = make_problem("left", queries=11)
    dead = problem.segment_ids < 0
    for name, x in problem.solve("flex").items():
        rows = x.transpose(1, 2)
        assert rows[dead].numel()
        assert torch.equal(rows[dead], torch.zeros_like(rows[dead])), name


@pytest.mark.usefixtures("on_cpu")
def test_rows_hidden_by_an_infinite_bias_are_zero(make_problem) -> None:
    bias = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    bias[:, :, 4] = -torch.inf
    results = replace(make_problem("causal"), bias=bias).solve("flex")
    assert all(x.isfinite().all() for x in results.values())
    for name in ("output", "averaged_state", "gradient of query", "gradient of bias"):
        assert not results[name][:, :, 4].any(), name
        assert results[name][:, :, 6].any(), name


@pytest.mark.usefixtures("on_cpu")
def test_scale(make_problem) -> None:
    problem = make_problem("causal")
    arguments = (problem.query, problem.key, problem.value, problem.state)
    actual, expected = (positional_attention(*arguments, scale=0.3, backend=name) for name in ("flex", "reference"))
    torch.testing.assert_close(actual, expected)


def rule_of(kind: str, tokens: Tokens, dtype: torch.dtype = torch.float64) -> tuple[PairBias, list[torch.nn.Parameter]]:
    """A rule for six heads, and the parameters that it depends on."""
    sizes = EncodingSizes(32, 6, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.5)
    torch.manual_seed(0)
    if kind == "alibi":
        return AlibiBias(tokens, 6, dtype), []
    if kind == "t5":
        encoding = T5(sizes, T5Options(max_distance=40)).to(dtype)
        return encoding.bias(tokens, dtype), list(encoding.parameters())
    layer = FireLayer(sizes, FireOptions(hidden_width=4, initial_length=20.0)).to(dtype)
    return FireBias(tokens, layer, dtype), list(layer.parameters())


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("rows", [1, 2])
def test_rules_of_one_pair_are_those_of_all(kind, rows) -> None:
    """FIRE and T5 have two ways to the same numbers; gradients of both agree as well."""
    positions = torch.tensor([[3, 0, 4, 1, 5, 60], [0, 1, 2, 0, 1, 100]])[:rows]
    bias, parameters = rule_of(kind, Tokens(positions, 4))
    pairs = torch.cartesian_prod(*(torch.arange(size) for size in bias.shape)).unbind(1)
    whole, singly = bias.materialize(), bias.at(*pairs).view(bias.shape)
    torch.testing.assert_close(singly, whole, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(whole)
    if parameters:
        expected, actual = (torch.autograd.grad(x, parameters, direction, retain_graph=True) for x in (whole, singly))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("rows", [1, 2])
def test_rules_equal_reference(make_problem, kind, rows) -> None:
    problem = make_problem("padded documents", heads=6, kv_heads=2, queries=40, keys=50)
    positions = torch.arange(50).expand(rows, -1) * 2
    results = []
    for backend in ("flex", "reference"):
        bias, parameters = rule_of(kind, Tokens(positions.contiguous(), 40))
        leaves = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value, problem.state)]
        outputs = positional_attention(*leaves, segment_ids=problem.segment_ids, bias=bias, backend=backend)
        directions = (problem.grad_output, problem.grad_averaged)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves + parameters, directions)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("on_cpu", "not_materialized")
@pytest.mark.parametrize(("kind", "learning"), [("alibi", True), ("t5", True), ("fire", False)])
def test_rules_are_not_materialized(make_problem, kind, learning) -> None:
    problem = make_problem("causal", heads=6, kv_heads=2, queries=20)
    with torch.set_grad_enabled(learning):
        bias, _ = rule_of(kind, Tokens(torch.arange(20)[None], 20))
        positional_attention(problem.query, problem.key, problem.value, problem.state, bias=bias, backend="flex")


@pytest.mark.usefixtures("on_cpu", "not_materialized")
@pytest.mark.parametrize(
    ("encoding", "use_reentrant"),
    # Not t5 with False: flex_attention's dense math asks tensors that such checkpoints have detached whether they need
    # gradients, and returns garbage for the table (pytorch pull request 188860). Its kernels do not ask.
    [("alibi", None), ("alibi", True), ("alibi", False), ("t5", None), ("t5", True)],
)
def test_decoders_train_without_a_whole_bias(
    make_model, make_tokens, gradients, monkeypatch, encoding, use_reentrant
) -> None:
    """Logits and all gradients are those of the default backend; with activation checkpointing too."""
    model, tokens = make_model(encoding).double(), make_tokens(2, 19)
    monkeypatch.setenv("TAPE_BACKEND", "flex")
    model.train()
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    outputs = model(tokens, labels=tokens)
    actual = gradients(model, outputs.loss)
    monkeypatch.undo()
    expected = model(tokens, labels=tokens)
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(actual, gradients(model, expected.loss))


@pytest.mark.usefixtures("on_cpu", "not_materialized")
@pytest.mark.parametrize("encoding", ["alibi", "t5", "fire"])
def test_decoders_generate_without_a_whole_bias(make_model, make_tokens, monkeypatch, encoding) -> None:
    options = {"hidden_width": 4} if encoding == "fire" else {}
    model, tokens = make_model(encoding, encoding_options=options), make_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    monkeypatch.setenv("TAPE_BACKEND", "flex")
    actual = model.generate(tokens, **arguments)
    monkeypatch.undo()
    assert torch.equal(actual, model.generate(tokens, **arguments))


@pytest.mark.usefixtures("on_cpu")
def test_is_part_of_an_outer_graph(make_problem) -> None:
    """Mask, bias and attention compile in one graph with what is around them, and once for all lengths."""

    def layer(query, key, value, state, segment_ids):
        tokens = Tokens(torch.arange(key.shape[2])[None], query.shape[2], segment_ids)
        bias = AlibiBias(tokens, query.shape[1], torch.float64)
        return positional_attention(query, key, value, state, segment_ids=segment_ids, bias=bias, backend="flex")

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for queries, keys in ((140, 260), (300, 390)):
            problem = make_problem("padded documents", queries=queries, keys=keys)
            arguments = (problem.query, problem.key, problem.value, problem.state, problem.segment_ids)
            torch.testing.assert_close(compiled(*arguments), layer(*arguments))
    assert counter.frame_count == 1


def big_problem(mask: str, queries: int, keys: int, causal: bool = True) -> AttentionInputs:
    torch.manual_seed(0)
    query = torch.randn(2, 6, queries, 16)
    key, value, state = (torch.randn(2, 2, keys, width) for width in (16, 16, 24))
    columns = torch.arange(keys).expand(2, -1)
    segment_ids = {
        "none": None,
        "documents": (columns >= 260).long(),
        "padded": (columns >= torch.tensor([[0], [140]])).long() - 1,
        "mixed": torch.randint(-1, 3, (2, keys)),
    }[mask]
    return AttentionInputs(query, key, value, state, segment_ids, None, causal, 0.25)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", ["none", "documents", "padded", "mixed"])
@pytest.mark.parametrize(("queries", "keys"), [(384, 384), (300, 300), (130, 391), (128, 512)])
def test_blocks_cover_what_is_seen(mask, queries, keys, causal) -> None:
    """Every visible pair is in a block that is computed, and blocks computed without a mask are visible throughout."""
    inputs = big_problem(mask, queries, keys, causal)
    blocks = flex.make_block_mask(*flex.prepare(inputs))
    expected = dense_mask(queries, keys, segment_ids=inputs.segment_ids, causal=causal)
    rows = expected.shape[0]

    def spread(numbers, indices):  # to pairs of tokens
        among_first = torch.arange(indices.shape[-1]) < numbers[..., None]
        dense = torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), among_first)
        dense = dense.repeat_interleave(flex.BLOCK, -2).repeat_interleave(flex.BLOCK, -1)
        return dense.expand(rows, -1, -1, -1)

    partial = spread(blocks.kv_num_blocks, blocks.kv_indices)[..., :queries, :keys]
    full = spread(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not full[..., queries:, :].any(), "a whole block sticks out"
    assert not full[..., keys:].any(), "a whole block sticks out"
    full = full[..., :queries, :keys]
    assert not (partial & full).any()
    assert (expected <= (partial | full)).all(), "a visible pair is not computed"
    assert (full <= expected).all(), "a pair is computed without its mask"
    pairs = torch.cartesian_prod(*(torch.arange(n) for n in (2, 1, queries, keys))).unbind(1)
    assert torch.equal(blocks.mask_mod(*pairs).view(2, 1, queries, keys), expected.expand(2, -1, -1, -1))
    if causal and mask != "mixed":  # and no more than these
        seen = torch.nn.functional.pad(expected, (0, -keys % flex.BLOCK, 0, -queries % flex.BLOCK))
        seen = seen.unflatten(3, (-1, flex.BLOCK)).unflatten(2, (-1, flex.BLOCK))
        assert torch.equal(blocks.to_dense().bool().expand(rows, -1, -1, -1), seen.any(dim=5).any(dim=3))


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize(("kind", "learning"), [("alibi", True), ("t5", True), ("fire", False)])
def test_masks_and_rules_are_linear_in_the_length(kind, learning) -> None:
    """What is given to the kernel has at most a few numbers per token: neither N x N nor H x N x N."""
    tokens = 4096
    x = torch.zeros(1, 6, tokens, 1)
    segment_ids = torch.arange(tokens)[None] // 1000
    with torch.set_grad_enabled(learning), LargestTensor() as largest:
        bias, _ = rule_of(kind, Tokens(torch.arange(tokens)[None], tokens, segment_ids))
        inputs = AttentionInputs(x, x, x, None, segment_ids, bias, True, 1.0)
        flex.make_block_mask(*flex.prepare(inputs))
    assert tokens <= largest.elements <= 2 * tokens


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize(
    ("mask", "queries", "keys", "kind"), [("documents", 400, 400, "alibi"), ("padded", 200, 300, "fire")]
)
def test_compiled_forward(mask, queries, keys, kind) -> None:
    inputs = big_problem(mask, queries, keys)
    with torch.no_grad():
        bias, _ = rule_of(kind, Tokens(torch.arange(keys)[None], queries), torch.float32)
        inputs = inputs._replace(bias=bias)
        actual = torch.compile(flex.attend, fullgraph=True)(*flex.prepare(inputs))
        torch.testing.assert_close(actual, reference.attention(inputs), rtol=1e-4, atol=1e-5)


def test_what_the_kernels_cannot_do_goes_to_sdpa(monkeypatch) -> None:
    called = []
    monkeypatch.setattr(flex, "_compiled", lambda: lambda inputs, columns: called.append("kernel"))
    monkeypatch.setattr(sdpa, "attention", lambda inputs: called.append("sdpa"))

    def call(tokens: int = 128, width: int = 16, dtype: torch.dtype = torch.float32) -> str:
        x = torch.zeros(1, 1, tokens, width, dtype=dtype)
        flex.attention(AttentionInputs(x, x, x, None, None, None, True, 1.0))
        return called.pop()

    assert call() == call(dtype=torch.bfloat16) == call(tokens=129, width=80) == "kernel"
    assert call(tokens=127) == call(width=15) == call(dtype=torch.float64) == "sdpa"


def test_tensors_are_read_where_they_are() -> None:
    """A bias that all batch rows share is not spread over them."""
    bias = TensorBias(torch.randn(1, 6, 1, 50))
    assert bias.entries.shape == (6, 50)
    assert bias.entries.data_ptr() == bias.tensor.data_ptr()
