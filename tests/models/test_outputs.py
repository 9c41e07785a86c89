"""What forward returns when it is asked for more than logits, and that asking changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tape_pe.encodings import Tokens

ASKED = ("output_hidden_states", "output_attentions", "output_position_states")


@pytest.mark.parametrize("use_cache", [False, True])
def test_asking_changes_no_logits(any_model, make_tokens, use_cache):
    """transformers#4499, and all combinations."""
    input_ids = make_tokens(2, 9)
    with torch.no_grad():
        expected = any_model(input_ids, use_cache=False).logits
        for flags in itertools.product([False, True], repeat=3):
            out = any_model(input_ids, use_cache=use_cache, **dict(zip(ASKED, flags, strict=True)))
            assert torch.equal(out.logits, expected)
            assert (out.cache is not None) == use_cache
            for name, flag in zip(ASKED, flags, strict=True):
                assert (getattr(out, name.removeprefix("output_")) is not None) == flag


def test_shapes(any_model, make_tokens):
    config = any_model.config
    out = any_model(make_tokens(2, 9), **dict.fromkeys(ASKED, True))
    assert out.logits.shape == (2, 9, config.vocab_size)
    assert [tuple(hidden.shape) for hidden in out.hidden_states] == [(2, 9, 32)] * 4
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, 4, 9, 9)] * 3
    has_state = any_model.model.encoding.start(Tokens(torch.arange(9)[None], 9)) is not None
    assert len(out.position_states) == (3 if has_state else 0)
    for state in out.position_states:
        assert state.shape[:3] == (2, config.num_key_value_heads, 9)


def test_hidden_states_are_the_streams(model, make_tokens, layer_outputs):
    input_ids = make_tokens(2, 7)
    with layer_outputs(model) as layers:
        out = model(input_ids, output_hidden_states=True, output_position_states=True)
    for (hidden, _), returned in zip(layers[:-1], out.hidden_states[1:-1], strict=True):
        assert torch.equal(hidden, returned)
    assert torch.equal(model.model.norm(layers[-1][0]), out.hidden_states[-1])
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    if out.position_states:
        for (_, state), returned in zip(layers[:-1], out.position_states[1:], strict=True):
            assert torch.equal(state.expand_as(returned), returned)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_attention_weights(any_model, make_tokens, padded):
    input_ids = make_tokens(2, 9)
    mask = torch.ones_like(input_ids)
    if padded:
        mask[1, :4] = 0
    for weights in any_model(input_ids, attention_mask=mask, output_attentions=True).attentions:
        assert (weights >= 0).all()
        real = (mask != 0)[:, None, :].expand(2, 4, 9)
        torch.testing.assert_close(weights.sum(dim=-1)[real], torch.ones(int(real.sum())))
        assert (weights.triu(1) == 0).all(), "a token attends to a later one"
        assert (weights[~real] == 0).all(), "padding attends to something"
        assert (weights.transpose(2, 3)[~real] == 0).all(), "something attends to padding"


def test_attention_weights_are_those_that_were_used(model, make_tokens):
    """Values averaged with the returned weights are the attention's output."""
    attention = model.model.layers[1].self_attn
    seen = {}
    attention.v_proj.register_forward_hook(lambda module, args, value: seen.update(value=value))
    attention.o_proj.register_forward_pre_hook(lambda module, args: seen.update(output=args[0]))
    weights = model(make_tokens(2, 8), output_attentions=True, use_cache=False).attentions[1]
    value = seen["value"].unflatten(-1, (-1, 8)).transpose(1, 2)
    value = value.repeat_interleave(4 // value.shape[1], dim=1)
    expected = (weights @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen["output"], expected, rtol=1e-4, atol=1e-5)


def test_outputs_with_a_cache_are_rows_of_the_full_ones(model, make_tokens):
    input_ids = make_tokens(2, 8)
    asked = dict.fromkeys(ASKED, True)
    full = model(input_ids, use_cache=False, **asked)
    cache = model(input_ids[:, :5]).cache
    step = model(input_ids[:, 5:], cache=cache, **asked)
    for a, b in zip(step.attentions, full.attentions, strict=True):
        assert a.shape == (2, 4, 3, 8)
        torch.testing.assert_close(a, b[:, :, 5:], rtol=1e-4, atol=1e-5)
    for a, b in zip(step.hidden_states, full.hidden_states, strict=True):
        torch.testing.assert_close(a, b[:, 5:], rtol=1e-4, atol=1e-4)
    for a, b in zip(step.position_states, full.position_states, strict=True):
        torch.testing.assert_close(a, b[:, :, 5:], rtol=1e-4, atol=1e-4)


def test_config_asks(make_model, make_tokens):
    model = make_model("tape", output_hidden_states=True, output_attentions=True)
    out = model(make_tokens(1, 4))
    assert len(out.hidden_states) == 4
    assert len(out.attentions) == 3
    out = model(make_tokens(1, 4), output_hidden_states=False, output_attentions=False)
    assert out.hidden_states is None
    assert out.attentions is None


def test_tuple(make_model, make_tokens):
    model, input_ids = make_model("tape"), make_tokens(1, 4)
    logits, cache = model(input_ids, return_dict=False)
    assert torch.equal(logits, model(input_ids).logits)
    assert cache.get_seq_length() == 4


def test_loss_is_cross_entropy(model, make_tokens):
    input_ids = make_tokens(2, 9)
    labels = input_ids.clone()
    labels[0, 3:5] = -100
    out = model(input_ids, labels=labels)
    log_probabilities = out.logits.double().log_softmax(dim=-1)
    picked = [
        -log_probabilities[row, column, labels[row, column + 1]]
        for row in range(2)
        for column in range(8)
        if labels[row, column + 1] != -100
    ]
    assert len(picked) == 14
    assert out.loss.item() == pytest.approx(torch.stack(picked).mean().item(), rel=1e-6)
    by_hand = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert out.loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    scaled = model(input_ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    assert scaled.item() == pytest.approx(by_hand.item() * 14 / 7, rel=1e-6)


def test_logits_to_keep(model, make_tokens):
    input_ids = make_tokens(2, 9)
    full = model(input_ids).logits
    torch.testing.assert_close(model(input_ids, logits_to_keep=3).logits, full[:, -3:])
    columns = torch.tensor([0, 4, 5])
    torch.testing.assert_close(model(input_ids, logits_to_keep=columns).logits, full[:, columns])
    assert model(input_ids, logits_to_keep=0).logits.shape == full.shape


def test_inputs_embeds(model, make_tokens):
    input_ids = make_tokens(2, 9)
    embeds = model.get_input_embeddings()(input_ids)
    if model.config.encoding == "abacus":  # it reads digits
        with pytest.raises(ValueError, match="inputs_embeds: encoding='abacus'"):
            model(inputs_embeds=embeds)
        return
    assert torch.equal(model(inputs_embeds=embeds).logits, model(input_ids).logits)


def test_causality(any_model, make_tokens, run_row, assert_same):
    """A later token changes no earlier output, hidden state or position state, by exactly nothing."""
    input_ids = make_tokens(1, 150)
    for changed in (1, 70, 149):
        other = input_ids.clone()
        other[0, changed:] = other[0, changed:] % 60 + 1
        before, after = (run_row(any_model, ids, 0, slice(None, changed)) for ids in (input_ids, other))
        assert_same(after, before, exactly=True)


def test_rows_are_independent(any_model, make_tokens, run_row, assert_same):
    input_ids = make_tokens(3, 9)
    other = input_ids.clone()
    other[[0, 2]] = make_tokens(2, 9, seed=8)
    assert_same(run_row(any_model, other, 1), run_row(any_model, input_ids, 1), exactly=True)
    assert_same(run_row(any_model, input_ids[1:2]), run_row(any_model, input_ids, 1))


@pytest.mark.parametrize("name", ["tape", "rope", "nope", "alibi", "t5", "cope"])
def test_shift_of_all_positions(make_model, kv_heads, make_tokens, name):
    """Relative encodings do not see where a text stands."""
    model, input_ids = make_model(name, kv_heads), make_tokens(2, 40)
    positions = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(input_ids, position_ids=positions).logits
        shifted = model(input_ids, position_ids=positions + 1000).logits
    assert (shifted - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_positions_are_felt(make_model, make_tokens):
    """Else the test above would pass with positions ignored."""
    for name in ("tape", "rope", "alibi", "t5", "fire"):
        model, input_ids = make_model(name), make_tokens(1, 6)
        spread = model(input_ids, position_ids=torch.tensor([[0, 3, 4, 9, 20, 21]])).logits
        assert (spread - model(input_ids).logits).abs().max() > 0.05


def test_backends_agree(model, make_tokens, monkeypatch, run_row, assert_same):
    input_ids = make_tokens(2, 40)
    mask = torch.ones_like(input_ids)
    mask[1, :15] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        results = []
        for backend in ("reference", "sdpa", "blockwise"):
            monkeypatch.setenv("TAPE_BACKEND", backend)
            results.append(run_row(model, input_ids, 1, mask[1] != 0 if kwargs else slice(None), **kwargs))
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])


def test_unknown_backend(make_model, make_tokens, monkeypatch):
    monkeypatch.setenv("TAPE_BACKEND", "abacus")
    with pytest.raises(ValueError, match="TAPE_BACKEND='abacus'"):
        make_model("tape")(make_tokens(1, 3))
