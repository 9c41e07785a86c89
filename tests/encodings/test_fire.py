"""FIRE: the bias against its formula, values and gradients, and what its weights start at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.fire import Fire, FireBias, FireLayer, FireOptions
from tape_pe.models import TapeLMForCausalLM

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def literal_bias(tokens: Tokens, weights: dict[str, torch.Tensor], initial_length: float) -> torch.Tensor:
    """The formula by loops, `[B | 1, H, N, Nk]` in the dtype of the weights."""
    c, m = weights["c"][0], weights["length_factor"][0]
    heads = len(weights["out_bias"])
    rows, num_all = tokens.position_ids.shape
    entries = []
    for b in range(rows):
        positions = tokens.position_ids[b].tolist()
        for i in positions[num_all - tokens.num_new :]:
            for j in positions:
                length = torch.maximum(torch.tensor(i).to(m), (m * initial_length).abs())
                phi = torch.log((c * (i - j)).abs() + 1) / (torch.log((c * length).abs() + 1) + 1e-6)
                hidden = [
                    torch.relu(w[0] * phi + bias)
                    for w, bias in zip(weights["hidden_weight"], weights["hidden_bias"], strict=True)
                ]
                for h in range(heads):
                    entries.append(
                        sum(
                            (w * u for w, u in zip(weights["out_weight"][h], hidden, strict=True)),
                            weights["out_bias"][h],
                        )
                    )
    return torch.stack(entries).view(rows, tokens.num_new, num_all, heads).permute(0, 3, 1, 2)


def random_layer(options: FireOptions, seed: int = 0) -> FireLayer:
    layer = FireLayer(SIZES, options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def bias_of(layer: FireLayer, tokens: Tokens, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    query, key = (torch.zeros(1, heads, tokens.num_new, 8, dtype=dtype) for heads in (4, 2))
    return layer.bias(query, key, tokens).materialize()


@pytest.mark.parametrize("initial_length", [3.0, 512.0])
def test_values_and_gradients(tokens: Tokens, initial_length: float) -> None:
    layer = random_layer(FireOptions(hidden_width=5, initial_length=initial_length))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in layer.named_parameters()}
    actual, expected = bias_of(layer, tokens), literal_bias(tokens, weights, initial_length)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", ["c", "length_factor"])
def test_signs_of_c_and_m_do_not_matter(name: str) -> None:
    layer, tokens = random_layer(FireOptions(initial_length=4.0)), Tokens(torch.arange(9)[None], 9)
    expected = bias_of(layer, tokens)
    with torch.no_grad():
        getattr(layer, name).neg_()
    torch.testing.assert_close(bias_of(layer, tokens), expected)


def test_gradients_are_finite_where_c_is_zero() -> None:
    layer = random_layer(FireOptions())
    with torch.no_grad():
        layer.c.zero_()
    bias_of(layer, Tokens(torch.arange(5)[None], 5)).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_distances_are_interpolated() -> None:
    """phi is in [0, 1], 0 on the diagonal and 1 from the first to the last of more than L0 tokens."""
    layer = FireLayer(SIZES, FireOptions(initial_length=8.0))
    bias = FireBias(Tokens(torch.arange(100)[None], 100), layer, torch.float64)
    phi = bias.interpolated(*bias.pairs())[0, 0].detach()
    assert not phi.diagonal().any()
    torch.testing.assert_close(phi[8:, 0], torch.ones(92, dtype=torch.float64), rtol=0, atol=1e-5)
    assert (phi.tril() <= 1).all()
    assert (phi[:8, 0] < 0.95).all()


def test_bfloat16_weights_and_far_positions() -> None:
    """Positions up to 100k stay apart: only the weights are rounded."""
    layer = random_layer(FireOptions(initial_length=4.0)).bfloat16()
    tokens = Tokens(torch.tensor([[0, 1, 99_998, 99_999, 100_000]]), 5)
    actual = bias_of(layer, tokens, torch.bfloat16)
    assert actual.dtype == torch.float32
    expected = bias_of(layer.double(), tokens)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    assert (actual[..., 4, 2] - actual[..., 4, 3]).abs().max() > 1e-3


def test_autocast_does_not_round() -> None:
    layer, tokens = random_layer(FireOptions()).float(), Tokens(torch.arange(50)[None], 50)
    expected = bias_of(layer, tokens, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bias_of(layer, tokens, torch.bfloat16), expected)


def test_start_weights(make_config) -> None:
    """c, m and the MLP as published, and not overwritten by the decoder's own start weights."""
    torch.manual_seed(0)
    options = {"initial_c": 0.25, "hidden_width": 64}
    model = TapeLMForCausalLM(make_config("fire", encoding_options=options))
    for layer in model.model.layers:
        fire = layer.encoding
        assert fire.c.item() == 0.25
        assert fire.length_factor.item() == 1.0
        assert fire.hidden_weight.shape == (64, 1)
        assert fire.out_weight.shape == (4, 64)
        assert 0.4 < fire.hidden_weight.std() < 0.75  # uniform in [-1, 1]
        assert 0.05 < fire.out_weight.std() < 0.09  # uniform in [-1/8, 1/8]
        assert fire.hidden_bias.any()
    assert FireOptions() == FireOptions(hidden_width=32, initial_c=0.1, initial_length=512.0)


def test_every_layer_has_its_own() -> None:
    layers = [Fire.layer(SIZES, FireOptions(), idx) for idx in range(3)]
    assert all(sum(p.numel() for p in layer.parameters()) == 2 + 2 * 32 + 4 * 32 + 4 for layer in layers)
    assert not list(Fire(SIZES, FireOptions()).parameters())
    assert Fire.layer(replace(SIZES, num_attention_heads=6), FireOptions(), 0).out_bias.shape == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_width": 0}, r"encoding_options\.hidden_width=0: at least 1"),
        ({"initial_c": 0.0}, r"encoding_options\.initial_c=0\.0: a positive number"),
        ({"initial_length": -512}, r"encoding_options\.initial_length=-512: a positive number"),
        ({"initial_length": float("inf")}, r"encoding_options\.initial_length=inf: a positive number"),
        ({"initial_c": "small"}, r"encoding_options\.initial_c='small': float"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FireOptions.from_dict("fire", options)


def test_attention_weights(make_model, make_tokens, first_layer, literal_weights) -> None:
    """Rows with padding on the left, in the whole decoder."""
    model = make_model("fire", encoding_options={"initial_length": 3.0, "hidden_width": 4}).double()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    query, key, weights = first_layer(model, make_tokens(2, 8), attention_mask=mask)
    tokens = Tokens(torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], list(range(8))]), 8)
    parameters = {name: p.detach() for name, p in model.model.layers[0].encoding.named_parameters()}
    bias = literal_bias(tokens, parameters, 3.0)
    torch.testing.assert_close(weights, literal_weights(query, key, bias, mask - 1))
