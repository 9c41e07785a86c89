"""Frequency rules, against transformers' own and their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tape_pe.ops import Frequencies, rotary_frequencies, rotary_state
from tape_pe.ops.frequencies import RULES, check_scaling, complete_scaling, reads_length

ORIGINAL = "original_max_position_embeddings"
YARN = [
    {},
    {"attention_factor": 1.0},
    {"attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 2.0},
    {"mscale": 1.0, "mscale_all_dim": 0},
    {"truncate": False},
    {"truncate": True, "beta_fast": 16, "beta_slow": 2},
    {"beta_fast": 64.0, "beta_slow": 0.5, "truncate": False},
    {"beta_fast": None, "beta_slow": None, "attention_factor": None},
]


def longrope(head_dim: int) -> dict:
    pairs = torch.arange(head_dim // 2)
    return {"short_factor": (1 + pairs / 100).tolist(), "long_factor": (1.5 + pairs * 0.75).tolist()}


def transformers_frequencies(head_dim: int, rule: dict, length: int | None = None) -> tuple[Tensor, float]:
    """What transformers computes; its Llama has the original length of "dynamic" in `max_position_embeddings`."""
    original = rule.get(ORIGINAL, 64)
    is_dynamic = rule["rope_type"] == "dynamic"
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=original if is_dynamic else 4 * original,
        rope_parameters={key: value for key, value in rule.items() if not (is_dynamic and key == ORIGINAL)},
    )
    return ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu", seq_len=length)


def ours(head_dim: int, rule: dict, length: int | None = None) -> Frequencies:
    lengths = None if length is None else torch.tensor(length)
    return rotary_frequencies(head_dim, theta=rule["rope_theta"], scaling=rule, lengths=lengths)


def assert_equal(actual: Frequencies, expected: tuple[Tensor, float], rtol: float = 1e-6) -> None:
    assert actual.inverse.dtype == torch.float64
    torch.testing.assert_close(actual.inverse, expected[0].double(), rtol=rtol, atol=0)
    assert actual.attention_factor == pytest.approx(expected[1], rel=1e-12)


sizes = pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original"),
    list(itertools.product((8, 64, 96, 128), (10000.0, 500000.0), (1.0, 2.5, 32.0), (64, 4096))),
)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 17])
def test_frequencies_are_powers_of_the_base(theta: float) -> None:
    frequencies = rotary_frequencies(6, theta=theta)
    assert frequencies.inverse.dtype == torch.float64
    assert frequencies.inverse.tolist() == pytest.approx([1.0, theta ** (-2 / 6), theta ** (-4 / 6)], rel=1e-15)
    assert frequencies.attention_factor == 1.0


@pytest.mark.parametrize("head_dim", [2, 8, 64, 96])
def test_default_equals_llama(head_dim: int) -> None:
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1)
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert_equal(rotary_frequencies(head_dim, scaling={"rope_type": "default"}), (expected, 1.0))


@sizes
def test_linear(head_dim: int, theta: float, factor: float, original: int) -> None:
    rule = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    assert_equal(ours(head_dim, rule), transformers_frequencies(head_dim, rule))


@sizes
def test_dynamic(head_dim: int, theta: float, factor: float, original: int) -> None:
    rule = {"rope_type": "dynamic", "factor": factor, "rope_theta": theta, ORIGINAL: original}
    for length in (1, original, original + 1, 4 * original - 3):
        assert_equal(ours(head_dim, rule, length), transformers_frequencies(head_dim, rule, length))


@sizes
def test_yarn(head_dim: int, theta: float, factor: float, original: int) -> None:
    for options in YARN:
        rule = {"rope_type": "yarn", "factor": factor, "rope_theta": theta, ORIGINAL: original, **options}
        # transformers' fp32 loses a digit where 1 - (1 - ramp) is much smaller than 1.
        assert_equal(ours(head_dim, rule), transformers_frequencies(head_dim, rule), rtol=1e-6 if factor < 32 else 2e-6)


@sizes
def test_llama3(head_dim: int, theta: float, factor: float, original: int) -> None:
    for low, high in ((1.0, 4.0), (0.5, 8)):
        rule = {"rope_type": "llama3", "factor": factor, "rope_theta": theta, ORIGINAL: original}
        rule |= {"low_freq_factor": low, "high_freq_factor": high}
        assert_equal(ours(head_dim, rule), transformers_frequencies(head_dim, rule))


@sizes
def test_longrope(head_dim: int, theta: float, factor: float, original: int) -> None:
    rule = {"rope_type": "longrope", "factor": factor, "rope_theta": theta, ORIGINAL: original, **longrope(head_dim)}
    for options, length in itertools.product(({}, {"attention_factor": 1.3}), (1, original, original + 1)):
        rule |= options
        assert_equal(ours(head_dim, rule, length), transformers_frequencies(head_dim, rule, length))


@sizes
def test_ntk_raises_the_base(head_dim: int, theta: float, factor: float, original: int) -> None:
    base = theta * factor ** (head_dim / (head_dim - 2))
    expected = torch.tensor([base ** (-2 * j / head_dim) for j in range(head_dim // 2)], dtype=torch.float64)
    assert_equal(ours(head_dim, {"rope_type": "ntk", "factor": factor, "rope_theta": theta}), (expected, 1.0))


@pytest.mark.parametrize("options", YARN, ids=str)
def test_dynamic_yarn_is_yarn_beyond_the_original_length(options: dict) -> None:
    head_dim, theta, original = 64, 10000.0, 512
    rule = {"rope_type": "yarn", "factor": 8.0, "rope_theta": theta, ORIGINAL: original, **options}
    yarn, plain = ours(head_dim, rule), rotary_frequencies(head_dim, theta=theta).inverse
    rule["rope_type"] = "dynamic_yarn"
    for length in (1, original, original + 1, 3 * original):
        actual = ours(head_dim, rule, length)
        assert torch.equal(actual.inverse, yarn.inverse if length > original else plain)
        assert actual.attention_factor == yarn.attention_factor  # whatever the length


def test_yarn_keeps_all_pairs_that_turn_often_in_a_very_long_original_length() -> None:
    """The ramp lies beyond the last pair. transformers clamps its ends from one side alone, and then scales all."""
    rule = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10.0, ORIGINAL: 10**9}
    assert torch.equal(ours(8, rule).inverse, rotary_frequencies(8, theta=10.0).inverse)


EVERY = {
    "default": {},
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0, ORIGINAL: 16},
    "yarn": {"factor": 2.0, ORIGINAL: 16},
    "dynamic_yarn": {"factor": 2.0, ORIGINAL: 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16},
    "longrope": {"factor": 2.0, ORIGINAL: 16, **longrope(8)},
}


def test_every_rule_is_tested() -> None:
    assert EVERY.keys() == RULES.keys()


@pytest.mark.parametrize("name", EVERY)
def test_rules_have_no_memory(name: str) -> None:
    rule = {"rope_type": name, **EVERY[name]}
    short, long = torch.arange(9)[None], torch.arange(40)[None]
    before = rotary_state(short, 8, scaling=rule)
    longer = rotary_state(long, 8, scaling=rule)
    assert torch.equal(rotary_state(short, 8, scaling=rule), before)
    changed = not torch.equal(longer[:, :, :9], before)
    assert changed == reads_length(rule) == (name in ("dynamic", "dynamic_yarn", "longrope"))


@pytest.mark.parametrize("name", EVERY)
def test_each_row_and_each_token_has_a_length_of_its_own(name: str) -> None:
    rule = {"rope_type": name, **EVERY[name]}
    position_ids = torch.stack([torch.arange(40), torch.arange(40).clamp(max=8)])
    together = rotary_state(position_ids, 8, scaling=rule)
    for row in range(2):
        assert torch.equal(together[row], rotary_state(position_ids[row : row + 1], 8, scaling=rule)[0])
    packed = torch.cat([torch.arange(40), torch.arange(9)])[None]
    lengths = torch.tensor([[40] * 40 + [9] * 9])
    state = rotary_state(packed, 8, scaling=rule, lengths=lengths)
    assert torch.equal(state[:, :, :40], rotary_state(torch.arange(40)[None], 8, scaling=rule))
    assert torch.equal(state[:, :, 40:], rotary_state(torch.arange(9)[None], 8, scaling=rule))


@pytest.mark.parametrize("name", EVERY)
def test_the_older_key_for_the_name(name: str) -> None:
    older = {"type": name, **EVERY[name]}
    new = {"rope_type": name, **EVERY[name]}
    lengths = torch.tensor([[40]])
    expected = rotary_frequencies(8, scaling=new, lengths=lengths)
    actual = rotary_frequencies(8, scaling=older, lengths=lengths)
    assert torch.equal(actual.inverse, expected.inverse)
    assert actual.attention_factor == expected.attention_factor
    assert reads_length(older) == reads_length(new)


def test_rope_type_counts_where_both_keys_are_given() -> None:
    frequencies = rotary_frequencies(8, scaling={"type": "default", "rope_type": "linear", "factor": 2.0}).inverse
    assert torch.equal(frequencies, rotary_frequencies(8).inverse / 2)


@pytest.mark.parametrize(
    ("rule", "filled"),
    [
        ({"rope_type": "default"}, {}),
        ({"rope_type": "linear", "factor": 2.0}, {}),
        ({"rope_type": "dynamic", "factor": 2.0}, {ORIGINAL: 64}),
        ({"rope_type": "llama3", "factor": 2.0}, {ORIGINAL: 64}),
        ({"rope_type": "yarn"}, {ORIGINAL: 64, "factor": 1.0}),
        ({"rope_type": "yarn", ORIGINAL: 16}, {"factor": 4.0}),
        ({"rope_type": "yarn", ORIGINAL: 16, "factor": None}, {"factor": 4.0}),
        ({"rope_type": "yarn", ORIGINAL: 16, "factor": 5.0}, {}),
        ({"type": "longrope", ORIGINAL: 32}, {"factor": 2.0}),
        ({"type": "dynamic_yarn", ORIGINAL: None, "factor": 4.0}, {ORIGINAL: 64}),
    ],
    ids=str,
)
def test_what_the_models_length_fills_in(rule: dict, filled: dict) -> None:
    given = dict(rule)
    assert complete_scaling(rule, 64) == given | filled
    assert rule == given


HARMLESS = {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "finetuned": True, "mscale": None, "beta_fast": None}


@pytest.mark.parametrize("name", EVERY)
def test_keys_that_change_nothing_are_let_through(name: str) -> None:
    rule = {"rope_type": name, **EVERY[name]}
    carried = HARMLESS | {ORIGINAL: 16} | rule
    actual, expected = (rotary_frequencies(8, scaling=r, lengths=torch.tensor([40])) for r in (carried, rule))
    assert torch.equal(actual.inverse, expected.inverse)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partial_rotary_factor", 0.5),
        ("mrope_section", [16, 24, 24]),
        ("mrope_interleaved", True),
        ("short_mscale", 1.2),
        ("llama_4_scaling_beta", 0.1),
        ("alpha", 1000.0),
        ("colour", "red"),
    ],
)
def test_keys_that_would_change_something_are_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"rope_parameters\.{key}=.*: rope_type='{name}' reads "):
        check_scaling({"rope_type": name, **EVERY[name], key: value})


@pytest.mark.parametrize(
    ("key", "name"), [("attention_factor", "linear"), ("beta_fast", "llama3"), ("factor", "default")]
)
def test_keys_of_other_rules_are_refused(key: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"rope_parameters\.{key}=7"):
        check_scaling({"rope_type": name, **EVERY[name], key: 7})


@pytest.mark.parametrize("head_dim", [0, -2, 1, 7])
def test_head_dim_must_be_even(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        rotary_frequencies(head_dim)


@pytest.mark.parametrize("theta", [0.0, -1.0, math.nan, math.inf, None, "10000"])
def test_theta_must_be_positive(theta: float) -> None:
    with pytest.raises(ValueError, match=f"theta={theta}"):
        rotary_frequencies(8, theta=theta)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type='spiral': known frequency rules are default, linear, ntk, dynamic"),
        ({"type": "spiral"}, "rope_type='spiral': known frequency rules are"),
        ({"rope_type": "linear"}, "factor=None: rope_type='linear'"),
        ({"rope_type": "linear", "factor": 0}, "factor=0: "),
        ({"rope_type": "linear", "factor": True}, "factor=True: "),
        ({"rope_type": "linear", "factor": math.nan}, "factor=nan: "),
        ({"rope_type": "linear", "factor": "two"}, "factor='two': "),
        ({"rope_type": "linear", "factor": [1.0] * 4}, "factor=[1.0, 1.0, 1.0, 1.0]: "),
        ({"rope_type": "dynamic", "factor": 2.0}, "original_max_position_embeddings=None: "),
        ({**EVERY["longrope"], "rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 numbers"),
        ({**EVERY["longrope"], "rope_type": "longrope", "long_factor": []}, "long_factor=[]: "),
        ({**EVERY["longrope"], "rope_type": "longrope", ORIGINAL: 1}, "original_max_position_embeddings=1: LongRoPE"),
        ({**EVERY["llama3"], "rope_type": "llama3", "high_freq_factor": 1.0}, "high_freq_factor=1.0: must be above"),
        ({**EVERY["yarn"], "rope_type": "yarn", "attention_factor": "one"}, "attention_factor='one': a positive"),
        ({**EVERY["yarn"], "rope_type": "yarn", "attention_factor": -1.0}, "attention_factor=-1.0: a positive"),
        ({**EVERY["yarn"], "rope_type": "yarn", "truncate": "no"}, "truncate='no': true or false"),
        ({**EVERY["yarn"], "rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}, "beta_fast=1: must not be below"),
    ],
    ids=str,
)
def test_bad_frequency_rules_are_named(scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"rope_") as caught:
        rotary_frequencies(8, scaling=scaling, lengths=torch.ones(1))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["dynamic", "dynamic_yarn", "longrope"])
def test_rules_that_read_the_length_need_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"lengths=None: rope_type='{name}'"):
        rotary_frequencies(8, scaling={"rope_type": name, **EVERY[name]})


def test_bases_that_a_rule_cannot_raise_or_take_logarithms_of() -> None:
    for name in ("ntk", "dynamic"):
        with pytest.raises(ValueError, match="head_dim=2"):
            rotary_frequencies(2, scaling={"rope_type": name, **EVERY[name]}, lengths=torch.ones(1))
    with pytest.raises(ValueError, match=r"rope_theta=1\.0: YaRN needs a base above 1"):
        rotary_frequencies(8, theta=1.0, scaling={"rope_type": "yarn", **EVERY["yarn"]})
