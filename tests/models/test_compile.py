"""`torch.compile`: whole graphs, as many for a deep model as for a shallow one, and one for all lengths."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.detach().abs().max()))


def test_full_graph_at_three_lengths(make_model, encoding, make_tokens):
    """With dynamic shapes the second and third length run what the first compiled."""
    model = make_model(encoding, num_hidden_layers=2)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17, 30):
        input_ids = make_tokens(2, length)
        with torch.no_grad():
            assert_close(compiled(input_ids, use_cache=False).logits, model(input_ids, use_cache=False).logits)
    assert counter.frame_count == 1


def test_static_shapes_become_dynamic(make_model, make_tokens):
    """torch's default: the first length is compiled as it is, the second for all lengths."""
    model = make_model("tape", num_hidden_layers=2)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 17, 30):
        with torch.no_grad():
            compiled(make_tokens(2, length), use_cache=False)
    assert counter.frame_count == 2


@pytest.mark.parametrize("how", ["mask and documents", "positions", "attentions"])
def test_masks_documents_and_labels(make_model, make_tokens, how):
    model = make_model("tape", num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    input_ids = make_tokens(2, 12)
    kwargs = {
        "mask and documents": {
            "attention_mask": torch.tensor([[1] * 12, [0] * 5 + [1] * 7]),
            "document_ids": torch.tensor([[0] * 5 + [1] * 7]),
        },
        "positions": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])},
        "attentions": {"output_attentions": True, "output_position_states": True},
    }[how]
    actual = compiled(input_ids, labels=input_ids, use_cache=False, **kwargs)
    expected = model(input_ids, labels=input_ids, use_cache=False, **kwargs)
    assert_close(actual.logits, expected.logits)
    assert_close(actual.loss, expected.loss)


def test_gradients(make_model, make_tokens, gradients):
    model, input_ids = make_model("tape", num_hidden_layers=2).train(), make_tokens(2, 12)
    expected = gradients(model, model(input_ids, labels=input_ids).loss)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = gradients(model, compiled(input_ids, labels=input_ids).loss)
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor(make_model, make_tokens):
    model, input_ids = make_model("tape", num_hidden_layers=2), make_tokens(2, 12)
    with torch.no_grad():
        actual = torch.compile(model, fullgraph=True)(input_ids, use_cache=False).logits
        assert_close(actual, model(input_ids, use_cache=False).logits)


def test_layers_compile_once_for_all(make_model, make_tokens):
    """transformers#36484, by the layer: a deep stack of compiled layers compiles no more often than a shallow one."""
    counts = []
    for depth in (3, 6):
        torch._dynamo.reset()
        model = make_model("tape", num_hidden_layers=depth)
        counter = CompileCounterWithBackend("eager")
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
        with torch.no_grad():
            model(make_tokens(2, 9), use_cache=False)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= 3  # the first layer's shared table, those between, and the last without an update
