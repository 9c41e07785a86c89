"""TAPE's structural ablations as whole decoders, beyond what every encoding is tested for."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.tape import Tape, TapeOptions
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM

STRUCTURES = ("components", "channels", "unstructured")
WIDTH = {"rotary": 8, "components": 8, "channels": 16, "unstructured": 16}
SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)
structures = pytest.mark.parametrize("structure", STRUCTURES)


@pytest.fixture
def structured(make_model):
    """A decoder of a structure with random weights everywhere."""

    def make(structure: str, kv_heads: int = 2, options: dict | None = None, **changes):
        return make_model("tape", kv_heads, encoding_options={"structure": structure, **(options or {})}, **changes)

    return make


@structures
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fresh_model_is_rope_bit_for_bit(make_config, make_tokens, structure, kv_heads, dtype):
    """At the start values themselves, in every combination of options that changes weights."""
    rope = TapeLMForCausalLM(make_config("rope", kv_heads)).to(dtype)
    input_ids = make_tokens(2, 20)
    expected = rope(input_ids).logits
    for mixing, gate, attention, mlp in itertools.product(
        ("full", "diagonal"), ("mlp_output", "mlp_input"), (True, False), (True, False)
    ):
        options = {
            "structure": structure,
            "head_mixing": mixing,
            "gate_input": gate,
            "update_attention": attention,
            "update_mlp": mlp,
        }
        model = TapeLMForCausalLM(make_config("tape", kv_heads, encoding_options=options)).to(dtype)
        missing = model.load_state_dict(rope.state_dict(), strict=False).missing_keys
        assert all(".encoding." in name for name in missing)
        assert bool(missing) == (attention or mlp)
        assert torch.equal(model(input_ids).logits, expected)


@pytest.mark.parametrize("structure", WIDTH)
def test_position_states_have_the_documented_shape(structured, make_tokens, structure, kv_heads):
    states = structured(structure, kv_heads)(make_tokens(2, 9), output_position_states=True).position_states
    assert [tuple(state.shape) for state in states] == [(2, kv_heads, 9, WIDTH[structure])] * 3
    start = states[0]
    if WIDTH[structure] == 16:
        c_1, c_2, s_1, s_2 = start.chunk(4, dim=-1)
        assert torch.equal(c_1, c_2)
        assert torch.equal(s_1, s_2)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        (
            TapeOptions(structure="components"),
            {"mix": (2, 2, 4), "gate_proj.weight": (8, 32), "up": (2, 8, 2), "down": (2, 2, 8)},
        ),
        (
            TapeOptions(structure="channels", position_size=5),
            {"mix": (8, 8), "gate_proj.weight": (5, 32), "up": (5, 8), "down": (8, 5)},
        ),
        (
            TapeOptions(structure="unstructured"),
            {"mix": (2, 4), "gate_proj.weight": (8, 32), "up": (8, 16), "down": (16, 8)},
        ),
        (TapeOptions(structure="components", head_mixing="diagonal", update_mlp=False), {"mix": (2, 2, 2)}),
        (TapeOptions(structure="channels", head_mixing="diagonal", update_mlp=False), {"mix": (8,)}),
        (TapeOptions(structure="unstructured", head_mixing="diagonal", update_mlp=False), {"mix": (2, 2)}),
    ],
    ids=str,
)
def test_parameters(options, shapes):
    layer = Tape.layer(SIZES, options, 0)
    assert {name: tuple(x.shape) for name, x in layer.named_parameters()} == shapes
    assert not list(Tape.layer(SIZES, options, 2).parameters())


@structures
def test_every_start_value_can_learn(make_config, make_tokens, structure):
    """W_mix and W_up get a gradient at once; W_down and the gate as soon as W_up has moved."""
    model = TapeLMForCausalLM(make_config(encoding_options={"structure": structure}))
    input_ids, layer = make_tokens(2, 9), model.model.layers[0].encoding
    model(input_ids, labels=input_ids).loss.backward()
    assert layer.mix.grad.any()
    assert layer.up.grad.any()
    with torch.no_grad():
        layer.up -= 0.1 * layer.up.grad.sign()
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    assert all(weight.grad.any() for weight in layer.parameters())


@structures
@pytest.mark.parametrize("norm", ["none", "rms"])
def test_state_norm(structured, make_tokens, structure, norm):
    states = structured(structure, options={"state_norm": norm})(make_tokens(2, 9), output_position_states=True)
    for state in states.position_states[1:]:
        c, s = state.chunk(2, dim=-1)
        size = (c * c + s * s).mean(dim=-1).sqrt()
        assert bool((size - 1).abs().max() < 1e-5) == (norm == "rms")


@structures
def test_other_weights_mean_other_states(structured, make_tokens, structure):
    """Both updates and both states reach the logits."""
    model, input_ids = structured(structure), make_tokens(1, 9)
    with torch.no_grad():
        before = model(input_ids).logits
        for name in ("mix", "up", "down"):
            weight = getattr(model.model.layers[0].encoding, name)
            kept = weight.clone()
            weight.zero_()
            assert (model(input_ids).logits - before).abs().max() > 1e-4
            weight.copy_(kept)


@structures
def test_compiles_whole_for_all_lengths(structured, make_tokens, structure):
    torch._dynamo.reset()
    model = structured(structure, num_hidden_layers=2)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17, 30):
        input_ids = make_tokens(2, length)
        with torch.no_grad():
            actual = compiled(input_ids, use_cache=False).logits
            torch.testing.assert_close(actual, model(input_ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@structures
def test_saving_and_loading(structured, make_tokens, tmp_path, structure, kv_heads):
    model, input_ids = structured(structure, kv_heads), make_tokens(1, 9)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.encoding_options["structure"] == structure
    for (name, expected), actual in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(actual, expected), name
    assert torch.equal(again(input_ids).logits, model(input_ids).logits)


@structures
def test_frequency_rules_and_trained_frequencies(structured, make_tokens, gradients, structure):
    """The start of every structure is that of RoPE with the same rule."""
    rule = {"rope_type": "dynamic_yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = structured(structure, options={"trainable_frequencies": True}, rope_parameters=rule)
    input_ids = make_tokens(2, 30)
    grads = gradients(model, model(input_ids, labels=input_ids).loss)
    assert grads["model.encoding.frequency_shift"].abs().min() > 0


def test_the_last_layer_rotates_by_the_state_it_gets():
    """Its state is as wide as those of the layers before, or, with nothing to update, as the start."""
    tokens = Tokens(torch.arange(5)[None], 5)
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    rotary = Tape(SIZES, TapeOptions())
    expected = Tape.layer(SIZES, TapeOptions(), 2).rotate(query, key, rotary.start(tokens))
    for structure in STRUCTURES:
        nothing = TapeOptions(structure=structure, update_attention=False, update_mlp=False)
        for options in (TapeOptions(structure=structure), nothing):
            layer = Tape.layer(SIZES, options, 2)
            actual = layer.rotate(query, key, Tape(SIZES, options).start(tokens))
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_unknown_structures_are_refused():
    with pytest.raises(ValueError, match=r"encoding_options\.structure='tensor': allowed values are rotary, comp"):
        TapeLMConfig(encoding_options={"structure": "tensor"})
