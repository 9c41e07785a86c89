"""Activation checkpointing recomputes layers and changes no gradient."""

from __future__ import annotations

import pytest
import torch

MODES = {
    "non-reentrant": {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    "every second layer": {"every_n_layers": 2},
}


def backward(model, input_ids, gradients, **kwargs):
    torch.manual_seed(0)  # for encodings that draw positions
    return gradients(model, model(input_ids, labels=input_ids, **kwargs).loss)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
def test_gradients(any_model, make_tokens, gradients, mode, documents):
    any_model.train()
    input_ids = make_tokens(2, 12)
    kwargs = {"document_ids": torch.tensor([[0] * 5 + [1] * 7])} if documents else {}
    expected = backward(any_model, input_ids, gradients, **kwargs)
    any_model.activation_checkpointing_enable(**MODES[mode])
    actual = backward(any_model, input_ids, gradients, **kwargs)
    for name, grad in expected.items():
        assert torch.equal(actual[name], grad), name
        assert torch.count_nonzero(grad), f"{name} has a gradient of nothing but zeros"


@pytest.mark.parametrize("mode", list(MODES))
def test_layers_run_twice(make_model, make_tokens, gradients, layer_outputs, mode):
    """Else the tests above would compare nothing."""
    model = make_model("tape").train()
    model.activation_checkpointing_enable(**MODES[mode])
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *args: calls.append(1))
    backward(model, make_tokens(1, 6), gradients)
    assert len(calls) == (6 if mode != "every second layer" else 5)


def test_disable(make_model, make_tokens, gradients):
    model = make_model("tape").train()
    expected = backward(model, make_tokens(1, 6), gradients)
    model.activation_checkpointing_enable()
    model.activation_checkpointing_disable()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    actual = backward(model, make_tokens(1, 6), gradients)
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


def test_no_cache_in_training(make_model, make_tokens):
    model, input_ids = make_model("tape").train(), make_tokens(1, 4)
    assert model(input_ids).cache is None
    assert model(input_ids, use_cache=True).cache is not None
    with torch.no_grad():
        assert model(input_ids).cache is not None
    model.activation_checkpointing_enable()
    assert model(input_ids, use_cache=True).cache is None


def test_outputs_under_checkpointing(make_model, make_tokens):
    """Everything that can be asked for still comes."""
    model, input_ids = make_model("tape").train(), make_tokens(2, 6)
    asked = {"output_hidden_states": True, "output_attentions": True, "output_position_states": True}
    expected = model(input_ids, **asked)
    for mode in MODES.values():
        model.activation_checkpointing_enable(**mode)
        out = model(input_ids, **asked)
        assert torch.equal(out.logits, expected.logits)
        for field in ("hidden_states", "attentions", "position_states"):
            for a, b in zip(out[field], expected[field], strict=True):
                assert torch.equal(a, b)


def test_last_layer_has_no_position_parameters(make_model):
    """Nobody reads its new state, and distributed training stumbles over parameters that get no gradient."""
    for depth in (1, 3):
        model = make_model("tape", num_hidden_layers=depth)
        counts = [sum(1 for _ in layer.encoding.parameters()) for layer in model.model.layers]
        assert counts == [4] * (depth - 1) + [0]


def test_gradient_accumulation_over_unequal_rows(make_model, make_tokens, gradients):
    """transformers#34191, torchtune#1875: rows one by one, with the token count of all, give the batch's gradient."""
    model, input_ids = make_model("tape").train(), make_tokens(3, 9)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] * 6 + [0] * 3])
    labels = input_ids.masked_fill(mask == 0, -100)
    count = torch.tensor(8 + 3 + 5)
    expected = gradients(model, model(input_ids, attention_mask=mask, labels=labels).loss)
    total = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    for row in range(3):
        real = mask[row] != 0
        ids = input_ids[row : row + 1, real]
        for name, grad in gradients(model, model(ids, labels=ids, num_items_in_batch=count).loss).items():
            total[name] += grad
    for name, grad in expected.items():
        torch.testing.assert_close(total[name], grad, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_loss(any_model, make_tokens, gradients):
    """In fp64, against the change of the loss along a random direction for each parameter: nothing is detached."""
    model, input_ids = any_model.double(), make_tokens(2, 9)

    def loss():  # that of the model would round logits to fp32
        logits = model(input_ids, document_ids=torch.tensor([[0] * 5 + [1] * 4])).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())

    grads = gradients(model, loss())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        with torch.no_grad():
            for step in (1e-6, -1e-6):
                parameter += step * direction
                losses.append(loss().item())
                parameter -= step * direction
        expected = (losses[0] - losses[1]) / 2e-6
        assert (grads[name] * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-7), name
