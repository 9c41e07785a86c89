"""What is recorded of a model is what its layers computed, and what they would have with the start state."""

import pytest
import torch
from tests.convert.pretrained import KINDS, small_model, small_tape_model, tokens, trained
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import tape_pe
from tape_pe.analysis import capture
from tape_pe.analysis.summary import summarize
from tape_pe.ops.reference import attention_weights, rotate, rotate_wide

STRUCTURES = ("rotary", "components", "channels", "unstructured")


def heads(projection, hidden_states, head_dim):
    return projection(hidden_states).unflatten(-1, (-1, head_dim)).transpose(1, 2)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_decoder(make_model, make_tokens, kv_heads, structure):
    model = make_model("tape", kv_heads, encoding_options={"structure": structure}).double()
    ids = make_tokens(2, 11)
    outputs = model(ids, output_attentions=True, output_hidden_states=True, output_position_states=True)
    views = capture(model, ids, rope_attention=True)
    assert len(views) == 3
    assert [view.moved for view in views] == [False, True, True]
    turn = rotate if structure in ("rotary", "components") else rotate_wide
    for index, (view, layer) in enumerate(zip(views, model.model.layers, strict=True)):
        torch.testing.assert_close(view.attention, outputs.attentions[index])
        torch.testing.assert_close(view.state, outputs.position_states[index])
        torch.testing.assert_close(view.start, outputs.position_states[0])
        hidden = layer.input_layernorm(outputs.hidden_states[index])
        query, key = (heads(one, hidden, 8) for one in (layer.self_attn.q_proj, layer.self_attn.k_proj))
        for state, found in ((view.state, view.attention), (view.start, view.rope_attention)):
            torch.testing.assert_close(found, attention_weights(turn(query, state), turn(key, state)))
    assert not torch.allclose(views[2].attention, views[2].rope_attention, atol=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_converted_model(model_type):
    model = small_tape_model(model_type).double()
    ids = tokens(2, 11)
    outputs = model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    views = capture(model, ids, rope_attention=True)
    assert [view.moved for view in views] == [False, True, True, True]
    tables = model.model.rotary_emb(outputs.hidden_states[0], torch.arange(11)[None])
    for index, (view, layer) in enumerate(zip(views, model.model.layers, strict=True)):
        torch.testing.assert_close(view.attention, outputs.attentions[index])
        assert view.state.shape == (2, 2, 11, 16)
        hidden = layer.input_layernorm(outputs.hidden_states[index])
        query, key = (heads(one, hidden, 16) for one in (layer.self_attn.q_proj, layer.self_attn.k_proj))
        at_start = attention_weights(*apply_rotary_pos_emb(query, key, *tables))
        torch.testing.assert_close(view.rope_attention, at_start)
        moved = attention_weights(rotate(query, view.state), rotate(key, view.state))
        torch.testing.assert_close(view.attention, moved)


@pytest.mark.parametrize("model_type", KINDS)
def test_fresh_conversions_have_not_moved(model_type):
    plain = small_model(model_type, attention="sdpa")
    ids = tokens(1, 9)
    expected = [view.attention for view in capture(plain, ids)]
    model = tape_pe.convert(plain)
    for view, attention in zip(capture(model, ids, rope_attention=True), expected, strict=True):
        assert not view.moved
        torch.testing.assert_close(view.attention, attention)
        assert torch.equal(view.attention, view.rope_attention)
        assert summarize(view).phase < 1e-5  # degrees
    assert any(view.moved for view in capture(trained(model), ids))


def test_peft_models_are_seen_through():
    peft = pytest.importorskip("peft")
    model = small_tape_model("llama")
    ids = tokens(1, 9)
    expected = capture(model, ids)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()  # B is zero: no change
    for view, plain in zip(capture(wrapped, ids), expected, strict=True):
        torch.testing.assert_close(view.state, plain.state)


def test_the_model_is_left_as_it_was():
    model = small_tape_model("llama", attention="sdpa")
    capture(model, tokens(1, 5))  # transformers leaves hooks of its own at the first call
    hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in model.modules()]
    before = [(dict(after), dict(first)) for after, first in hooks]
    capture(model, tokens(1, 5))
    with pytest.raises(RuntimeError):
        capture(model, tokens(1, 5), torch.zeros(1, 4, dtype=torch.long))
    assert model.config._attn_implementation == "sdpa"
    assert [(dict(after), dict(first)) for after, first in hooks] == before


def test_every_encoding_can_be_captured(make_model, make_tokens, encoding, kv_heads):
    model = make_model(encoding, kv_heads)
    for view in capture(model, make_tokens(1, 10), rope_attention=True):
        torch.testing.assert_close(view.attention.sum(-1), torch.ones(1, 4, 10))
        assert view.moved is False or encoding == "tape"
        assert (view.state is None) == (view.rope_attention is None)
        numbers = [value for value in vars(summarize(view)).values() if value is not None]
        assert torch.tensor(numbers).isfinite().all()
        if view.state is not None:
            assert view.state.shape == (1, kv_heads, 10, 8)


def test_half_precision_is_widened(make_model, make_tokens):
    view = capture(make_model("tape").to(torch.bfloat16), make_tokens(1, 6), rope_attention=True)[-1]
    assert {value.dtype for value in vars(view).values()} == {torch.float32}


def test_one_token_is_enough(make_model, make_tokens):
    for view in capture(make_model("tape"), make_tokens(1, 1), rope_attention=True):
        assert torch.tensor(list(vars(summarize(view)).values())).isfinite().all()


@pytest.mark.parametrize("shape", [(4,), (1, 0), (0, 4)])
def test_refused_shapes(make_model, shape):
    with pytest.raises(ValueError, match="input_ids has shape"):
        capture(make_model("tape"), torch.zeros(shape, dtype=torch.long))


def measures(model, ids, shift):
    positions = torch.arange(ids.shape[1])[None] + shift
    return [list(vars(summarize(view)).values()) for view in capture(model, ids, positions, rope_attention=True)]


@pytest.mark.parametrize("kind", ["mha", "gqa", "llama", "gemma3_text"])
def test_a_shift_of_all_positions_changes_nothing(make_model, make_tokens, kind):
    own = kind in ("mha", "gqa")
    model = (make_model("tape", 4 if kind == "mha" else 2) if own else small_tape_model(kind)).double()
    ids = make_tokens(2, 12)
    tolerance = 1e-9 if own else 1e-3  # transformers computes its tables of cosines in fp32
    for here, there in zip(measures(model, ids, 0), measures(model, ids, 17), strict=True):
        assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("structure", STRUCTURES[1:])
def test_without_equivariance_it_changes_them(make_model, make_tokens, structure):
    model = make_model("tape", encoding_options={"structure": structure}).double()
    ids = make_tokens(2, 12)
    here, there = measures(model, ids, 0)[-1], measures(model, ids, 17)[-1]
    assert max(abs(a - b) for a, b in zip(here, there, strict=True)) > 1e-2
