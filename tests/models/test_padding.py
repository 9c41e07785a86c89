"""Padding, left, right or in the middle, changes nothing for real tokens and poisons nothing."""

from __future__ import annotations

import pytest
import torch

LENGTH = 11


def mask_of(side, lengths):
    columns = torch.arange(LENGTH)
    return torch.stack([(columns < n if side == "right" else columns >= LENGTH - n).long() for n in lengths])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(any_model, make_tokens, run_row, assert_same, side):
    input_ids = make_tokens(4, LENGTH)
    mask = mask_of(side, [11, 7, 1, 10])
    for row in range(4):
        real = mask[row] != 0
        together = run_row(any_model, input_ids, row, real, attention_mask=mask)
        assert_same(together, run_row(any_model, input_ids[row : row + 1, real]))


def test_padding_in_the_middle(model, make_tokens, run_row, assert_same):
    input_ids = make_tokens(2, LENGTH)
    mask = torch.ones_like(input_ids)
    mask[0, 3:6] = 0
    mask[1, [0, 4, 10]] = 0
    for row in range(2):
        real = mask[row] != 0
        together = run_row(model, input_ids, row, real, attention_mask=mask)
        assert_same(together, run_row(model, input_ids[row : row + 1, real]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_tokens_are_never_seen(model, make_tokens, run_row, assert_same, side):
    """Exactly, as any difference would be a leak."""
    input_ids, mask = make_tokens(2, LENGTH), mask_of(side, [6, 8])
    changed = torch.where(mask == 0, make_tokens(2, LENGTH, seed=1), input_ids)
    assert not torch.equal(changed, input_ids)
    for row in range(2):
        real = mask[row] != 0
        before = run_row(model, input_ids, row, real, attention_mask=mask)
        assert_same(run_row(model, changed, row, real, attention_mask=mask), before, exactly=True)


def test_long_padded_rows(model, make_tokens, run_row, assert_same):
    """Longer than one block of the attention, so that whole blocks are padding."""
    input_ids = make_tokens(2, 400)
    mask = torch.ones_like(input_ids)
    mask[1, :270] = 0
    together = run_row(model, input_ids, 1, slice(270, None), attention_mask=mask)
    assert_same(together, run_row(model, input_ids[1:, 270:]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_other_types(make_model, make_tokens, dtype):
    model, input_ids, mask = make_model("tape"), make_tokens(2, LENGTH), mask_of("left", [11, 4])
    expected = model(input_ids, attention_mask=mask).logits
    assert torch.equal(model(input_ids, attention_mask=mask.to(dtype)).logits, expected)


def test_all_ones_is_no_mask(model, make_tokens, run_row, assert_same):
    input_ids = make_tokens(2, LENGTH)
    expected = run_row(model, input_ids)
    assert_same(run_row(model, input_ids, attention_mask=torch.ones_like(input_ids)), expected)


def test_fully_masked_rows_stay_finite(any_model, make_tokens, layer_outputs, gradients):
    any_model.train()
    input_ids = make_tokens(3, LENGTH)
    mask = mask_of("left", [LENGTH, 0, 3])
    with layer_outputs(any_model) as layers:
        out = any_model(input_ids, attention_mask=mask, output_position_states=True, output_attentions=True)
    assert len(layers) == any_model.config.num_hidden_layers
    for hidden_states, state in layers:
        assert torch.isfinite(hidden_states).all()
        assert state is None or torch.isfinite(state).all()
    for tensor in (out.logits, *out.position_states, *out.attentions):
        assert torch.isfinite(tensor).all()
    assert all(torch.isfinite(grad).all() for grad in gradients(any_model, out.logits.square().mean()).values())


def test_padding_gives_no_gradient(model, make_tokens, gradients):
    """Labels of real tokens only: the gradient of a padded batch is that of its rows."""
    input_ids, mask = make_tokens(2, LENGTH), mask_of("right", [11, 6])
    labels = input_ids.masked_fill(mask == 0, -100)
    padded = gradients(model, model(input_ids, attention_mask=mask, labels=labels).loss * (10 + 5))
    rows = [gradients(model, model(input_ids[:1], labels=input_ids[:1]).loss * 10)]
    rows.append(gradients(model, model(input_ids[1:, :6], labels=input_ids[1:, :6]).loss * 5))
    for name, grad in padded.items():
        torch.testing.assert_close(grad, rows[0][name] + rows[1][name], rtol=1e-4, atol=1e-4)


def test_padding_is_not_predicted(make_model, make_tokens):
    """Nor is the token after it, which only padding precedes; whatever the labels of padding are."""
    model, input_ids = make_model("tape"), make_tokens(2, LENGTH)
    for side in ("left", "right"):
        mask = mask_of(side, [11, 6])
        losses = [model(input_ids[:1], labels=input_ids[:1]).loss * 10]
        real = mask[1] != 0
        losses.append(model(input_ids[1:, real], labels=input_ids[1:, real]).loss * 5)
        expected = sum(losses).item() / 15
        for labels in (input_ids, input_ids.masked_fill(mask == 0, -100)):
            loss = model(input_ids, attention_mask=mask, labels=labels).loss
            assert loss.item() == pytest.approx(expected, rel=1e-5)
