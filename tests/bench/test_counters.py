"""Counters against values computed by hand, and the yardstick of the position update."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from tape_pe.bench import flops, layers, ops, storage
from tape_pe.bench.options import PUBLISHED, Shape
from tape_pe.bench.variants import Variant, variants
from tape_pe.ops import positional_attention

CPU = torch.device("cpu")
TINY = Shape(length=6, heads=2, kv_heads=2, head_dim=4, layers=2, intermediate_size=16, vocab_size=10, position_size=3)


def projections(shape):
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return 2 * width * width + 2 * width * kv_width + 3 * width * shape.intermediate_size


def test_flops_and_parameters_of_a_tiny_model():
    N, H, D, I, d = TINY.length, TINY.heads, TINY.head_dim, TINY.position_size, 8  # noqa: E741
    rope, tape = flops.count(TINY, "rope"), flops.count(TINY, "tape")
    matrices = 2 * projections(TINY) + d * TINY.vocab_size
    assert rope.forward == 2 * N * matrices + 2 * (2 * H * N * N * 2 * D)
    assert rope.parameters == matrices + d * TINY.vocab_size + 5 * d
    # One of the two layers updates states: averages, the gate, the maps M = T - I, M W_mix, and both maps' products.
    added = 2 * H * N * N * D + 2 * N * d * I + 2 * N * I * H * H + 2 * N * H * H * H + 2 * (2 * N * H * H * D)
    assert tape.forward - rope.forward == added
    assert tape.parameters - rope.parameters == H * H + d * I + 2 * I * H
    assert 2.9 < tape.both / tape.forward < 3.3


def test_flops_with_grouped_queries_and_batches():
    shape = replace(TINY, batch_size=3, kv_heads=1)
    expected = 3 * (2 * 6 * (2 * projections(shape) + 80) + 2 * 2 * 2 * 36 * 8)
    assert flops.count(shape, "rope").forward == expected


def test_the_published_model():
    """Published: 321.10 G for RoPE, 154.89 Mi and 155.33 Mi parameters."""
    rope, tape = flops.count(PUBLISHED, "rope"), flops.count(PUBLISHED, "tape")
    assert rope.forward / 1e9 == pytest.approx(321.10, rel=1e-3)
    assert rope.parameters / 2**20 == pytest.approx(154.89, abs=0.01)
    assert tape.parameters / 2**20 < 155.33


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("state_grad", [None, False, True])
def test_flops_of_attention_follow_torch(kv_heads, state_grad):
    """Scores are computed again in backward; a state adds an average, a gradient of weights and one of its own."""
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, kv_heads, 7, 8), torch.randn(2, kv_heads, 7, 8)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    state = None if state_grad is None else torch.randn(2, kv_heads, 7, 6, requires_grad=state_grad)

    def run():
        return positional_attention(query, key, value, state, backend="blockwise")

    average = 0 if state is None else 2 * 2 * 4 * 5 * 7 * 6
    forward = sdpa_flop_count(query.shape, key.shape, value.shape) + average
    assert flops.count_flops(run) == forward
    result = run()
    outputs = [one.sum() for one in result if one is not None]
    backward = sdpa_backward_flop_count(query.shape, query.shape, key.shape, value.shape)
    backward += average * (1 + bool(state_grad))
    assert flops.count_flops(sum(outputs).backward) == backward


def test_products_in_place_count_like_others():
    total, left, right = torch.zeros(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    assert flops.count_flops(lambda: total.baddbmm_(left, right)) == 2 * 2 * 3 * 4 * 5
    assert flops.count_flops(lambda: total[0].addmm_(left[0], right[0])) == 2 * 3 * 4 * 5


def test_every_operator_of_the_library_has_a_formula():
    operators = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    names = {name.partition(".")[0] for library, _, name in operators if library == "tape_pe"}
    assert names
    assert names == set(flops.FORMULAS)


def test_saved_bytes_count_storages_once_and_leave_out_what_is_excluded():
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    assert storage.saved_bytes(lambda: (x * w).sum()) == 2 * 64
    assert storage.saved_bytes(lambda: (x * w).sum(), excluded=[w]) == 64
    assert storage.saved_bytes(lambda: (x.exp() * x[:2].repeat(2, 1)).sum()) == 64 + 64
    assert storage.saved_bytes(lambda: x[0] * x[1]) == 64


def test_saved_bytes_of_a_layer():
    """RoPE: 4 inputs of matrices and of norms, queries, keys, values, output, and 4 of the MLP; nothing N x N."""
    short, long = (
        [storage.saved_by_layer(replace(TINY, length=n), variant, CPU) for variant in variants(["tape"], CPU)]
        for n in (64, 128)
    )
    assert long[2] > long[0]
    assert [one / other for one, other in zip(long, short, strict=True)] == pytest.approx([2, 2, 2], rel=0.05)


def test_cached_bytes():
    """Layer 0 has one table for all heads, the last layer no states; each layer keys and values."""
    shape = replace(TINY, layers=4, length=5, batch_size=2)
    keys_and_values, table, states = 4 * 2 * 2 * 4, 4 * 4, 4 * 2 * 4
    assert storage.cached_bytes(shape, "rope") == [keys_and_values] * 4
    first, second, third, last = storage.cached_bytes(shape, "tape")
    assert (second, third, last) == (keys_and_values + states, keys_and_values + states, keys_and_values)
    assert first - keys_and_values in (table, table / 2)  # one for each row, or one for all
    halved = storage.cached_bytes(replace(shape, dtype="bfloat16"), "tape")
    assert halved[1] == (keys_and_values + states) / 2


def test_an_expanded_axis_holds_one_element():
    assert storage.distinct_bytes(torch.zeros(2, 1, 3).expand(2, 5, 3)) == 24
    assert storage.distinct_bytes(torch.zeros(2, 4, 3)[:, :2]) == 48


def test_the_einsum_update_is_the_update():
    """Outputs and gradients, in float64; both halves of its tables stay equal."""
    inputs = ops.update_inputs(replace(TINY, dtype="float64", batch_size=2), CPU, 6)
    tables = ops.full_width(inputs)
    packed = ops.packed_update(inputs)
    cosines, sines = ops.einsum_update(*tables, inputs)
    for table, half in zip((cosines, sines), packed.chunk(2, dim=-1), strict=True):
        torch.testing.assert_close(table, torch.cat([half, half], dim=-1))
    assert not torch.allclose(packed, inputs.state, atol=1e-3)
    gradient = torch.randn(packed.shape, dtype=torch.float64)
    halves = [torch.cat([half, torch.zeros_like(half)], dim=-1) for half in gradient.chunk(2, dim=-1)]
    expected = torch.autograd.grad(packed, inputs, gradient)
    found = torch.autograd.grad((cosines, sines), [*tables, *inputs[2:]], halves)
    for index, packed_gradient in enumerate(expected[:2]):
        pair = [table.chunk(2, dim=-1) for table in found[2 * index : 2 * index + 2]]
        torch.testing.assert_close(torch.cat([first for first, _ in pair], dim=-1), packed_gradient)
        assert all(not bool(second.any()) for _, second in pair)
    torch.testing.assert_close(found[4:], expected[2:])


def test_all_weights_that_are_timed_count():
    inputs = layers.layer_inputs(TINY, "tape", CPU)
    assert all(bool(parameter.any()) for parameter in inputs.layer.parameters())
    assert inputs.state.requires_grad
    assert inputs.state.shape == (1, 2, 6, 4)
    result = inputs.layer(inputs.hidden, inputs.state, inputs.bias, tokens=inputs.tokens)
    assert not torch.allclose(result.state, inputs.state, atol=1e-5)
    rope = layers.layer_inputs(TINY, "rope", CPU)
    assert not rope.state.requires_grad


def test_variants_of_attention_agree():
    """What is compared computes the same output, `sdpa` being torch's own function called directly."""
    chosen = [Variant("rope", "sdpa"), Variant("rope", "blockwise"), Variant("tape", "blockwise")]
    for shape in (TINY, replace(TINY, kv_heads=1)):
        for phase in ("forward", "decode"):
            first, *others = (call()[0] for call in ops.attention(shape, phase, CPU, chosen).values())
            for other in others:
                torch.testing.assert_close(first, other)
