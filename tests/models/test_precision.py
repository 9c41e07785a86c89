"""Phases are right whatever the model's dtype, and however it came to be where it is."""

from __future__ import annotations

import copy

import pytest
import torch

from tape_pe.models import TapeLMForCausalLM

ROTARY = ["tape", "rope"]


def start_state(model, positions):
    """The state that layer 0 reads, as the model itself computes it, `[N, D]`."""
    input_ids = torch.ones(1, len(positions), dtype=torch.long)
    with torch.no_grad():
        out = model(input_ids, position_ids=torch.tensor([positions]), output_position_states=True)
    return out.position_states[0][0, 0]


def exact_state(positions, head_dim=8, theta=10000.0):
    """Packed `[cos | sin]` in fp64, `[N, D]`."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    phases = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


def to_empty(model):
    with torch.device("meta"):
        empty = TapeLMForCausalLM(model.config)
    # Whatever memory holds: had phases been in a buffer, they would be this.
    empty = empty.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(float("nan"))
    empty.load_state_dict(model.state_dict())
    return empty.eval()


def save_and_load(model, path):
    model.save_pretrained(path)
    return TapeLMForCausalLM.from_pretrained(path).eval()


CHANGES = {
    "as built": lambda model, path: model,
    "half": lambda model, path: model.half(),
    "bfloat16": lambda model, path: model.to(torch.bfloat16),
    "bfloat16 and back": lambda model, path: model.to(torch.bfloat16).float(),
    "half and back": lambda model, path: model.half().float(),
    "double": lambda model, path: model.double(),
    "to_empty": lambda model, path: to_empty(model),
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "saved and loaded": save_and_load,
    "saved and loaded in bfloat16": lambda model, path: save_and_load(model.to(torch.bfloat16), path),
    "loaded as bfloat16": lambda model, path: (
        model.save_pretrained(path) or TapeLMForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ),
}
# Rounding to the dtype (half a unit in the last place of numbers below 1), and nothing else.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}
POSITIONS = [0, 1, 2, 255, 256, 257, 1023, 1857, 2047, 4097, 16383, 16384]


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("name", ROTARY)
def test_phases(make_model, tmp_path, name, change):
    model = CHANGES[change](make_model(name), tmp_path)
    state = start_state(model, POSITIONS)
    assert state.dtype == model.dtype
    assert (state.double() - exact_state(POSITIONS)).abs().max() <= TOLERANCES[state.dtype]


@pytest.mark.parametrize("name", ROTARY)
def test_neighbours_far_out_differ_in_bfloat16(make_model, name):
    """In bf16, 257 is 256: positions must not pass through the model's dtype."""
    state = start_state(make_model(name).to(torch.bfloat16), [256, 257, 16000, 16001]).float()
    expected = exact_state([256, 257, 16000, 16001]).float()
    for first in (0, 2):
        difference = state[first + 1] - state[first]
        torch.testing.assert_close(difference, expected[first + 1] - expected[first], rtol=0, atol=8e-3)
        assert difference.abs().max() > 0.3


@pytest.mark.parametrize("change", ["to_empty", "deepcopy", "saved and loaded", "half and back"])
def test_logits_after(make_model, encoding, kv_heads, make_tokens, tmp_path, change):
    model, input_ids = make_model(encoding, kv_heads), make_tokens(2, 9)
    if change == "half and back":
        model = model.half().float()  # weights are rounded once; computing must not round again
    expected = model(input_ids).logits
    assert torch.equal(CHANGES[change](model, tmp_path)(input_ids).logits, expected)


def test_no_buffers(model):
    """Nothing that a move, an empty device or a checkpoint could spoil."""
    assert not dict(model.named_buffers())


def test_order_of_calls_does_not_matter(make_model, make_tokens):
    """No table remembers another length, dtype or base (a cached table must be keyed by all it depends on)."""
    input_ids = make_tokens(1, 6)
    for theta in (10000.0, 500000.0):
        model = make_model("tape", rope_parameters={"rope_type": "default", "rope_theta": theta})
        expected = model(input_ids).logits
        model(make_tokens(1, 300))
        model.to(torch.bfloat16)(input_ids)
        state = start_state(model.float(), [1, 5, 300])
        assert (state - exact_state([1, 5, 300], theta=theta)).abs().max() <= 1e-6
        fresh = make_model("tape", rope_parameters={"rope_type": "default", "rope_theta": theta})
        fresh(make_tokens(1, 300))
        assert torch.equal(fresh(input_ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(model, make_tokens, dtype):
    """The whole decoder in half precision, cached and not, against fp64 with the same rounded weights."""
    input_ids = make_tokens(2, 24)
    low = model.to(dtype)
    high = copy.deepcopy(low).double()
    with torch.no_grad():
        expected = high(input_ids).logits
        actual = low(input_ids).logits
        cache = low(input_ids[:, :20]).cache
        cached = low(input_ids[:, 20:], cache=cache).logits
    assert actual.dtype == dtype
    scale = expected.abs().max()
    tolerance = 0.15 if dtype == torch.bfloat16 else 0.02
    assert (actual.double() - expected).abs().max() <= tolerance * scale
    assert (cached.double() - expected[:, 20:]).abs().max() <= tolerance * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(make_model, make_tokens, dtype):
    """Mixed precision training: states stay in the dtype of the residual stream, gradients are finite."""
    model, input_ids = make_model("tape").train(), make_tokens(2, 12)
    with torch.autocast("cpu", dtype=dtype):
        out = model(input_ids, labels=input_ids, output_position_states=True)
    assert all(state.dtype == torch.float32 for state in out.position_states)
    out.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert out.loss.item() == pytest.approx(model(input_ids, labels=input_ids).loss.item(), rel=0.05)
