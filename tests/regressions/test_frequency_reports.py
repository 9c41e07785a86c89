"""Faults that users reported elsewhere about frequency rules, as tests. Each is named after its report."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tape_pe.ops import rotary_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic_yarn"])
@pytest.mark.parametrize(
    ("factor", "given", "expected"), [(64.0, 1.0, 1.0), (64.0, None, 1.4158883), (16.0, None, 1.2772589)]
)
def test_vllm_46280_transformers_38224_attention_factor_of_yarn(make_model, rope_type, factor, given, expected):
    """A given attention factor counts as it is; without one it is 0.1 ln(factor) + 1. Key present but null is unset."""
    rule = {"rope_type": rope_type, "factor": factor, "original_max_position_embeddings": 64}
    rules = [{**rule, "attention_factor": given}] + ([rule] if given is None else [])
    for scaling in rules:
        actual = rotary_frequencies(8, scaling=scaling, lengths=torch.ones(1, 1)).attention_factor
        assert actual == pytest.approx(expected, abs=1e-7)
        for name in ("rope", "tape"):
            model = make_model(name, rope_parameters=scaling)
            states = model(torch.ones(1, 3, dtype=torch.long), output_position_states=True).position_states
            assert states[0][..., 0, :4].unique().item() == pytest.approx(expected, abs=1e-6)  # cos of position 0


@pytest.mark.parametrize("name", ["rope", "tape"])
def test_unsloth_7028_llama3_with_another_base(make_model, name):
    """The base of the config counts, also under llama3's rule, far beyond the original length too."""
    model = make_model(name, head_dim=64, rope_parameters=LLAMA3, max_position_embeddings=131072)
    positions = torch.tensor([[0, 1, 2, 7, 100, 1000]])
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=LLAMA3, max_position_embeddings=131072)
    llama = LlamaRotaryEmbedding(config)
    cos, sin = llama(torch.zeros(1), positions)
    inputs = torch.ones(1, 6, dtype=torch.long)
    state = model(inputs, position_ids=positions, output_position_states=True).position_states[0][:, 0]
    expected = torch.cat([cos[..., :32], sin[..., :32]], dim=-1)
    torch.testing.assert_close(state[:, :5], expected[:, :5], rtol=0, atol=1e-5)  # phases of theirs are fp32
    torch.testing.assert_close(state[:, :3], expected[:, :3], rtol=0, atol=1e-6)
    frequencies = rotary_frequencies(64, theta=500000.0, scaling=LLAMA3).inverse
    torch.testing.assert_close(frequencies.float(), llama.inv_freq, rtol=1e-6, atol=0)
    # Far away, with the phases of theirs computed as ours are.
    far = torch.tensor([[131071, 8191, 4097, 2048, 100, 17]])
    phases = far[..., None].double() * llama.inv_freq.double()
    state = model(inputs, position_ids=far, output_position_states=True).position_states[0][:, 0]
    exact = far[..., None].double() * frequencies
    torch.testing.assert_close(state, torch.cat([exact.cos(), exact.sin()], dim=-1).float(), rtol=0, atol=1e-6)
    assert (phases - exact).abs().max() <= 1e-6 * exact.abs().max()
