"""Frequency rules in a decoder: read from configs of Hugging Face, without memory, and trained."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tape_pe.models import TapeCache, TapeLMConfig, TapeLMForCausalLM

ORIGINAL = "original_max_position_embeddings"
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
RULES = {
    "default": {},
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0, ORIGINAL: 16},
    "yarn": {"factor": 2.0, ORIGINAL: 16},
    "dynamic_yarn": {"factor": 2.0, ORIGINAL: 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16},
    "longrope": {"factor": 2.0, ORIGINAL: 16, **FACTORS},
}
READ_LENGTH = ("dynamic", "dynamic_yarn", "longrope")
SHORT, LONG = 9, 40
names = pytest.mark.parametrize("name", ["rope", "tape"])
rules = pytest.mark.parametrize("rule", RULES)
trained = pytest.mark.parametrize("trained", [False, True], ids=["fixed", "trained"])


@pytest.fixture
def rule_model(make_model):
    """A decoder with a frequency rule."""

    def make(name: str, rule: str, trained: bool = False, **changes):
        parameters = {"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}
        options = {"trainable_frequencies": trained}
        model = make_model(name, rope_parameters=parameters, encoding_options=options, **changes)
        if trained:
            with torch.no_grad():
                model.model.encoding.frequency_shift.copy_(torch.tensor([0.1, -0.2, 0.05, 0.3]))
        return model

    return make


# --- configs


@names
@pytest.mark.parametrize("key", ["rope_type", "type"])
@rules
def test_older_configs_read_the_same(make_config, name, rule, key):
    """`rope_scaling` with `type` or `rope_type`, and `rope_theta` beside it."""
    scaling = {key: rule, **RULES[rule]}
    given = dict(scaling)
    older = make_config(name, rope_scaling=scaling, rope_theta=500000.0)
    new = make_config(name, rope_parameters={"rope_type": rule, "rope_theta": 500000.0, **RULES[rule]})
    assert scaling == given
    assert {k: v for k, v in older.rope_parameters.items() if k != "type"} == new.rope_parameters
    tokens = torch.arange(LONG)[None]
    first, second = (TapeLMForCausalLM(c)(tokens, output_position_states=True) for c in (older, new))
    assert torch.equal(first.position_states[0], second.position_states[0])


@names
def test_defaults_are_filled_in_as_in_transformers(make_config, name):
    def parameters(**scaling):
        return make_config(name, rope_parameters=scaling, max_position_embeddings=512).rope_parameters

    assert parameters(rope_type="linear", factor=2.0) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for rule in ("llama3", "dynamic", "yarn", "longrope"):
        extra = {key: value for key, value in RULES[rule].items() if key != ORIGINAL}
        assert parameters(rope_type=rule, **extra)[ORIGINAL] == 512
    assert parameters(rope_type="yarn", original_max_position_embeddings=64)["factor"] == 8.0
    assert parameters(rope_type="longrope", original_max_position_embeddings=128, **FACTORS)["factor"] == 4.0


@names
def test_the_callers_dictionary_stays_as_it_is(make_config, name):
    parameters = {"rope_type": "yarn", ORIGINAL: 64}
    config = make_config(name, rope_parameters=parameters)
    assert parameters == {"rope_type": "yarn", ORIGINAL: 64}
    assert config.rope_parameters is not parameters


@names
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor=None"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor=None"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "big"}}, "mscale='big'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_theta": -3.0}, "rope_theta=-3.0"),
    ],
    ids=str,
)
def test_bad_rules_are_refused_with_their_names(make_config, name, change, message):
    with pytest.raises(ValueError, match=r"rope_") as caught:
        make_config(name, **change)
    assert message in str(caught.value)


@names
def test_keys_that_change_nothing_pass(make_config, name):
    parameters = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0, ORIGINAL: 64, "finetuned": True}
    assert make_config(name, rope_parameters=parameters).rope_parameters["factor"] == 2.0


@names
@rules
def test_rules_survive_a_round_trip(rule_model, make_tokens, tmp_path, name, rule):
    model, input_ids = rule_model(name, rule), make_tokens(1, LONG)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"] == rule
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(again(input_ids).logits, model(input_ids).logits)


# --- no memory


@names
@rules
@trained
def test_short_long_short(rule_model, make_tokens, run_row, assert_same, name, rule, trained):
    """What one model object computed before, for whatever length, changes no bit."""
    model = rule_model(name, rule, trained)
    short, long = make_tokens(2, SHORT), make_tokens(2, LONG, seed=1)
    before = run_row(model, short)
    first = run_row(model, long)
    assert_same(run_row(model, short), before, exactly=True)
    assert_same(run_row(model, long), first, exactly=True)


@names
@rules
@trained
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padded_rows_equal_rows_alone(rule_model, make_tokens, run_row, assert_same, name, rule, trained, side):
    """Each row's own length counts, whether shorter or longer than the original one."""
    model, input_ids = rule_model(name, rule, trained), make_tokens(3, LONG)
    columns = torch.arange(LONG)
    counts = torch.tensor([LONG, SHORT, 17])[:, None]
    real = {
        "right": columns < counts,
        "left": columns >= LONG - counts,
        "middle": (columns < 4) | (columns >= LONG - counts + 4),
    }[side]
    for row in range(3):
        together = run_row(model, input_ids, row, real[row], attention_mask=real.long())
        assert_same(together, run_row(model, input_ids[row : row + 1, real[row]]))


@names
@rules
@trained
def test_packed_documents_equal_documents_alone(rule_model, make_tokens, run_row, assert_same, name, rule, trained):
    model = rule_model(name, rule, trained)
    counts = (SHORT, LONG, 1, 17, 16)
    input_ids = make_tokens(1, sum(counts))
    document_ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None]
    for document in range(len(counts)):
        own = document_ids[0] == document
        together = run_row(model, input_ids, 0, own, document_ids=document_ids)
        assert_same(together, run_row(model, input_ids[:, own]))


@names
@pytest.mark.parametrize("rule", READ_LENGTH)
def test_order_of_positions_does_not_matter(rule_model, make_tokens, name, rule):
    """The length is the largest position plus one, not the last one, with and without a mask."""
    model, input_ids = rule_model(name, rule), make_tokens(1, LONG)
    positions = torch.arange(LONG).flip(0)[None]
    expected = model(input_ids, position_ids=positions, output_position_states=True)
    masked = model(
        input_ids, position_ids=positions, attention_mask=torch.ones_like(input_ids), output_position_states=True
    )
    assert torch.equal(masked.position_states[0], expected.position_states[0])
    forward = model(input_ids, output_position_states=True).position_states[0]
    torch.testing.assert_close(expected.position_states[0].flip(2), forward, rtol=0, atol=0)


@names
@rules
def test_cached_decoding_within_the_original_length(rule_model, make_tokens, name, rule):
    """Beyond it, keys in the cache keep the frequencies they were written with: not compared."""
    model, input_ids = rule_model(name, rule), make_tokens(2, 16)
    cache = TapeCache()
    with torch.no_grad():
        steps = [model(piece, cache=cache).logits for piece in input_ids.split(3, dim=1)]
        expected = model(input_ids).logits
    assert (torch.cat(steps, dim=1) - expected).abs().max() <= 1e-5 * expected.abs().max()


@rules
def test_compiles_whole_for_all_lengths(rule_model, make_tokens, rule):
    torch._dynamo.reset()
    model = rule_model("rope", rule, trained=True, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (SHORT, LONG):
        input_ids = make_tokens(2, length)
        with torch.no_grad():
            actual = compiled(input_ids, use_cache=False).logits
            torch.testing.assert_close(actual, model(input_ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


# --- trained frequencies


@names
@rules
def test_trained_frequencies_start_as_the_fixed_ones(make_config, make_tokens, name, rule):
    parameters = {"rope_type": rule, "rope_theta": 10000.0, **RULES[rule]}
    states = []
    for trainable in (False, True):
        config = make_config(name, rope_parameters=parameters, encoding_options={"trainable_frequencies": trainable})
        out = TapeLMForCausalLM(config)(make_tokens(1, LONG), output_position_states=True)
        states.append(out.position_states[0])
    assert torch.equal(*states)


@names
@pytest.mark.parametrize("rule", ["default", "dynamic", "yarn", "dynamic_yarn"])
def test_gradient_of_the_frequencies(rule_model, make_tokens, name, rule):
    """Against finite differences, in fp64."""
    model, input_ids = rule_model(name, rule, True).double(), make_tokens(1, LONG)
    shift = model.model.encoding.frequency_shift

    def loss():
        return model(input_ids).logits.square().mean()

    loss().backward()
    for pair in range(4):
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                shift[pair] += step
                values.append(loss().item())
                shift[pair] -= step
        assert shift.grad[pair].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-8)
    assert shift.grad.abs().min() > 0


@names
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_keeps_the_gradient(rule_model, make_tokens, gradients, name, reentrant, packed):
    model, input_ids = rule_model(name, "dynamic", True).train(), make_tokens(2, LONG)
    kwargs = {"document_ids": torch.tensor([[0] * 25 + [1] * 15])} if packed else {}
    expected = gradients(model, model(input_ids, labels=input_ids, **kwargs).loss)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    actual = gradients(model, model(input_ids, labels=input_ids, **kwargs).loss)
    assert expected["model.encoding.frequency_shift"].abs().min() > 0
    for parameter, grad in expected.items():
        torch.testing.assert_close(actual[parameter], grad, rtol=1e-5, atol=1e-7)


@names
def test_gradient_of_packed_documents_is_the_sum(rule_model, make_tokens, name):
    model, input_ids = rule_model(name, "dynamic_yarn", True), make_tokens(1, 49)
    document_ids = torch.tensor([[0] * LONG + [1] * SHORT])
    grads = []
    for parts in (
        [(input_ids, {"document_ids": document_ids})],
        [(input_ids[:, :LONG], {}), (input_ids[:, LONG:], {})],
    ):
        model.zero_grad()
        for tokens, kwargs in parts:
            model(tokens, **kwargs).logits.square().sum().backward()
        grads.append(model.model.encoding.frequency_shift.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@names
def test_half_precision_rounds_the_shift_alone(rule_model, make_tokens, name):
    """In bf16 the frequencies themselves would be off by 2^-9, four radians at position 2048. Their shifts round
    instead: to nothing where they are zero, and by 2^-9 of a small number where they are small."""
    positions = torch.arange(2048)
    base = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    for shift in (0.0, 0.01):
        model = rule_model(name, "default", True)
        with torch.no_grad():
            model.model.encoding.frequency_shift.fill_(shift)
        model = model.bfloat16()
        rounded = torch.tensor(shift).bfloat16().double()
        phases = positions[:, None] * (base * rounded.exp())
        with torch.no_grad():
            state = model(torch.ones(1, 2048, dtype=torch.long), output_position_states=True).position_states[0][0, 0]
        assert (state.double() - torch.cat([phases.cos(), phases.sin()], dim=-1)).abs().max() <= 2**-8
        # Neighbouring positions stay apart in the fastest pair.
        assert (state[1:, [0, 4]] - state[:-1, [0, 4]]).float().norm(dim=-1).min() > 0.9
        assert (phases - positions[:, None] * (base * math.exp(shift))).abs().max() < 0.1


@names
def test_saving_and_loading_trained_frequencies(rule_model, make_tokens, tmp_path, name):
    model, input_ids = rule_model(name, "dynamic", True), make_tokens(1, LONG)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.encoding.frequency_shift, model.model.encoding.frequency_shift)
    assert torch.equal(again(input_ids).logits, model(input_ids).logits)
    assert "frequency_shift" not in rule_model(name, "dynamic").state_dict()


@names
def test_training_goes_on_after_loading(rule_model, make_tokens, tmp_path, name):
    """Two steps, saved with the optimiser, and two more are four steps."""

    def steps(model, optimizer, seeds):
        for seed in seeds:
            input_ids = make_tokens(2, LONG, seed=seed)
            optimizer.zero_grad()
            model(input_ids, labels=input_ids).loss.backward()
            optimizer.step()

    through, stopped = (rule_model(name, "dynamic", True).train() for _ in range(2))
    start = through.model.encoding.frequency_shift.detach().clone()
    steps(through, torch.optim.AdamW(through.parameters(), lr=1e-2), range(4))
    optimizer = torch.optim.AdamW(stopped.parameters(), lr=1e-2)
    steps(stopped, optimizer, range(2))
    stopped.save_pretrained(tmp_path)
    again = TapeLMForCausalLM.from_pretrained(tmp_path).train()
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    resumed.load_state_dict(optimizer.state_dict())
    steps(again, resumed, range(2, 4))
    assert (through.model.encoding.frequency_shift - start).abs().min() > 1e-3
    for (parameter, expected), actual in zip(through.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(actual, expected), parameter


def test_a_fresh_shift_is_zero_also_from_a_meta_device(make_config):
    config = make_config("rope", encoding_options={"trainable_frequencies": True})
    assert not TapeLMForCausalLM(config).model.encoding.frequency_shift.any()
    with torch.device("meta"):
        model = TapeLMForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.init_weights()
    assert not model.model.encoding.frequency_shift.any()


def test_encodings_without_phases_have_no_trainable_frequencies():
    with pytest.raises(ValueError, match=r"encoding_options\.trainable_frequencies=True"):
        TapeLMConfig(encoding="nope", encoding_options={"trainable_frequencies": True})
