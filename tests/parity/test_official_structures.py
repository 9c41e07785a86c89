"""Agreement with the released code's structural ablations and YaRN models, see `tests/data/parity/README.md`.

No output of an `adayarn` model is recorded: it is compared with the README's formulas, written out in fp64, which are
checked against recorded models first.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tape_pe.models.official import load_official

DATA = Path(__file__).parents[1] / "data" / "parity"
STRUCTURES = ("adatensor", "adavector", "adawoeq")
WIDE = ("adavector", "adawoeq")


def released(name: str) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """Config, weights and everything recorded of a released model."""
    config = json.loads((DATA / f"{name}.config.json").read_text())
    recorded = load_file(DATA / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in recorded.items() if key.startswith("weights/")}
    return config, weights, recorded


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def released_gradient(name: str, find) -> Tensor | None:
    """The recorded gradient of one of our parameters, `find` giving recorded ones by their released names."""
    prefix, _, inner = name.partition(".encoding.")
    if not inner:
        return find(name)
    if inner == "gate_proj.weight":
        return find(f"{prefix}.pe.x_proj.weight")
    stems = {"up": "pe.up_proj", "down": "pe.down_proj", "mix": "post_attention_linear"}
    one, both = (f"{prefix}.{stems[inner]}{ending}.weight" for ending in ("", "s.{}"))
    grad = find(one)
    if grad is None:
        grad = torch.stack([find(both.format(component)) for component in (0, 1)])
    # All entries of a row of the released matrix have the gradient of their sum.
    return grad[..., :1] if inner == "mix" else grad


@pytest.mark.parametrize("name", [*STRUCTURES, "yarn"])
def test_logits_and_hidden_states(name):
    config, weights, recorded = released(name)
    with torch.no_grad():
        outputs = load_official(config, weights)(recorded["input_ids"], output_hidden_states=True)
    assert relative_error(outputs.logits, recorded["logits"]) < 1e-5
    assert relative_error(outputs.hidden_states[0], recorded["input/hidden"]) < 1e-5
    for layer in range(config["num_hidden_layers"] - 1):
        assert relative_error(outputs.hidden_states[layer + 1], recorded[f"layer{layer}/hidden"]) < 1e-5


@pytest.mark.parametrize("name", STRUCTURES)
def test_states(name):
    config, weights, recorded = released(name)
    with torch.no_grad():
        states = load_official(config, weights)(recorded["input_ids"], output_position_states=True).position_states
    places = ["input", *(f"layer{layer}" for layer in range(config["num_hidden_layers"] - 1))]
    assert len(states) == len(places)
    for state, place in zip(states, places, strict=True):
        for part, component in zip(state.chunk(2, dim=-1), ("cos", "sin"), strict=True):
            expected = recorded[f"{place}/position_{component}"]
            first, second = expected.chunk(2, dim=-1)
            assert torch.equal(first, second) == (name not in WIDE or place == "input")
            assert relative_error(part, expected if name in WIDE else first) < 1e-5, (place, component)


@pytest.mark.parametrize("name", [*STRUCTURES, "yarn"])
def test_gradients(name):
    config, weights, recorded = released(name)
    model = load_official(config, weights)
    loss = model(recorded["input_ids"]).logits.square().mean()
    assert loss.item() == pytest.approx(recorded["loss"].item(), rel=1e-5)
    loss.backward()
    compared = set()

    def find(released_name: str) -> Tensor | None:
        compared.add(released_name)
        return recorded.get(f"grads/{released_name}")

    for parameter_name, parameter in model.named_parameters():
        expected = released_gradient(parameter_name, find)
        assert relative_error(parameter.grad, expected.reshape(parameter.shape)) < 1e-4, parameter_name
    last = f".{config['num_hidden_layers'] - 1}.pe"
    recorded_names = {key.removeprefix("grads/") for key in recorded if key.startswith("grads/")}
    assert {key for key in recorded_names - compared if last not in key} == set()


def test_yarn_tables():
    config, weights, recorded = released("yarn")
    model = load_official(config, weights)
    state = model(recorded["input_ids"], output_position_states=True).position_states[0][0, 0]
    for part, component in zip(state.chunk(2, dim=-1), ("cos", "sin"), strict=True):
        assert relative_error(part, recorded[f"layer0/rope_{component}"][:, :4]) < 1e-6


@pytest.mark.parametrize(("longest", "factor"), [(128, 4.0), (100, 4.0), (97, 4.0), (96, 3.0), (32, 1.0), (20, 1.0)])
def test_yarn_factor_is_rounded_up(longest, factor):
    config, weights, _ = released("yarn")
    model = load_official(config | {"max_position_embeddings": longest}, weights)
    assert model.config.rope_parameters["factor"] == factor
    # `rope_scaling.factor` is not what the released code reads.
    other = config | {"max_position_embeddings": longest, "rope_scaling": {"type": "yarn", "factor": 7.0}}
    assert load_official(other, weights).config.rope_parameters == model.config.rope_parameters


def literal(config: dict, weights: dict[str, Tensor], input_ids: Tensor) -> Tensor:
    """Logits `[B, N, V]` of `adape`, of `adape` with a scaled base or positions, and of `adayarn`, as the README has
    them, in the dtype of the weights."""
    H, layers, N = config["num_attention_heads"], config["num_hidden_layers"], input_ids.shape[1]
    D = config["hidden_size"] // H
    h = weights["model.embed_tokens.weight"][input_ids]
    j = torch.arange(D // 2, dtype=torch.float64)
    w, positions, m = 10000.0 ** (-2 * j / D), torch.arange(N, dtype=torch.float64), 1.0
    scaling = config["rope_scaling"] or {}
    if scaling.get("type") == "linear":
        positions = positions / scaling["factor"]
    if scaling.get("type") == "dynamic" and config["max_position_embeddings"] < N:
        f = scaling["factor"]
        base = 10000.0 * (f * N / config["max_position_embeddings"] - (f - 1)) ** (D / (D - 2))
        w = base ** (-2 * j / D)
    if config["rpe_type"] == "adayarn":
        w, original = weights["model.rotary_emb.inv_freq"], config["original_max_position_embeddings"]
        s = config["max_position_embeddings"] / original
        m = 0.1 * math.log(s) + 1 if s > 1 else 1.0
        if original < N:
            low, high = (D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32, 1))
            low, high = min(max(math.floor(low), 0), D - 1), min(max(math.ceil(high), 0), D - 1)
            g = 1 - ((j - low) / (high - low)).clamp(0, 1)
            w = w * (g + (1 - g) / s)
    a = positions[:, None] * w
    C, S = (torch.cat([x, x], dim=-1).expand(len(h), H, N, D) * m for x in (a.cos(), a.sin()))
    mask = torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight

    def rot(u: Tensor) -> Tensor:
        first, second = u.chunk(2, dim=-1)
        return u * C + torch.cat([-second, first], dim=-1) * S

    for layer in range(layers):
        p = {
            key.removeprefix(f"model.layers.{layer}."): value
            for key, value in weights.items()
            if key.startswith(f"model.layers.{layer}.")
        }
        x = norm(h, p["input_layernorm.weight"])
        q, k, v = ((x @ p[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (H, D)).transpose(1, 2) for name in "qkv")
        A = (rot(q) @ rot(k).transpose(-1, -2) / math.sqrt(D) + mask).softmax(dim=-1)
        h = h + (A @ v).transpose(1, 2).flatten(2) @ p["self_attn.o_proj.weight"].T
        x = norm(h, p["post_attention_layernorm.weight"])
        gated = F.silu(x @ p["mlp.gate_proj.weight"].T) * (x @ p["mlp.up_proj.weight"].T)
        mlp = gated @ p["mlp.down_proj.weight"].T
        gate = F.silu(mlp @ p["pe.x_proj.weight"].T)
        scale = p["post_attention_linear.weight"].sum(dim=1)[:, None, None]
        U, Dn = p["pe.up_proj.weight"], p["pe.down_proj.weight"]
        states = []
        for E in (C, S):
            E1 = E + scale * (A @ E)
            inner = torch.einsum("ih,bhnd->bnid", U, E1) * gate[..., None]
            states.append(E1 + torch.einsum("hi,bnid->bhnd", Dn, inner))
        C, S = states
        h = h + mlp
    return norm(h, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def doubled(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.double() for name, weight in weights.items()}


@pytest.mark.parametrize("name", ["adape", "adape_mid"])
def test_the_literal_formulas_are_those_of_recorded_models(name):
    config, weights, recorded = released(name)
    assert relative_error(literal(config, doubled(weights), recorded["input_ids"]), recorded["logits"].double()) < 1e-6


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 4.0}], ids=str)
@pytest.mark.parametrize("longest", [16, 128])
def test_tape_with_scaled_frequencies(scaling, longest):
    config, weights, recorded = released("adape_mid")
    config |= {"rope_scaling": scaling, "max_position_embeddings": longest}
    expected = literal(config, doubled(weights), recorded["input_ids"])
    actual = load_official(config, weights)(recorded["input_ids"]).logits
    assert relative_error(actual, expected) < 1e-5
    assert (relative_error(actual, recorded["logits"]) < 1e-5) == (scaling["type"] == "dynamic" and longest == 128)


def adayarn(longest: int, original: int) -> tuple[dict, dict[str, Tensor], Tensor]:
    config, weights, recorded = released("adape_mid")
    config |= {
        "rpe_type": "adayarn",
        "rope_scaling": None,
        "max_position_embeddings": longest,
        "original_max_position_embeddings": original,
    }
    trained = torch.tensor([1.1, 0.08, 0.013, 0.0007])
    return config, weights | {"model.rotary_emb.inv_freq": trained}, recorded["input_ids"]


@pytest.mark.parametrize(
    ("longest", "original"), [(128, 32), (128, 24), (128, 23), (50, 16), (100, 7), (32, 32), (16, 32)]
)
def test_adayarn(longest, original):
    """Shorter and longer than the original length of the model, which need not divide the longest."""
    config, weights, input_ids = adayarn(longest, original)
    model = load_official(config, weights)
    double = {name: weight.requires_grad_() for name, weight in doubled(weights).items()}
    expected = literal(config, double, input_ids)
    actual = model(input_ids).logits
    assert relative_error(actual, expected) < 1e-5
    loss = actual.square().mean()
    loss.backward()
    expected.square().mean().backward()
    frequencies = double["model.rotary_emb.inv_freq"]
    shift = model.model.encoding.frequency_shift
    torch.testing.assert_close(shift.grad.double(), frequencies.grad * frequencies.detach(), rtol=1e-3, atol=1e-7)
    for name, parameter in model.named_parameters():
        if ".encoding." not in name:
            assert relative_error(parameter.grad, double[name].grad) < 1e-4, name


def test_adayarn_without_training_is_tape_with_dynamic_yarn():
    config, weights, input_ids = adayarn(128, 16)
    base = 10000.0 ** (-torch.arange(4) / 4)
    model = load_official(config, weights | {"model.rotary_emb.inv_freq": base})
    assert model.model.encoding.frequency_shift.abs().max() < 1e-6
    assert model.config.rope_parameters["rope_type"] == "dynamic_yarn"
    with torch.no_grad():
        before = model(input_ids).logits
        model.model.encoding.frequency_shift.zero_()
        torch.testing.assert_close(model(input_ids).logits, before, rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    config, weights, _ = adayarn(128, 16)
    without = {key: value for key, value in config.items() if key != "original_max_position_embeddings"}
    with pytest.raises(ValueError, match="original_max_position_embeddings: missing"):
        load_official(without, weights)
    with pytest.raises(ValueError, match=r"rope_scaling\.type='linear': rpe_type='adayarn'"):
        load_official(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}, weights)
    for bad in ([1.0, -0.1, 0.01, 0.001], [1.0, torch.nan, 0.01, 0.001], [1.0, 0.1]):
        with pytest.raises(ValueError, match=r"inv_freq.*4 positive frequencies"):
            load_official(config, weights | {"model.rotary_emb.inv_freq": torch.tensor(bad)})
    del weights["model.rotary_emb.inv_freq"]
    with pytest.raises(ValueError, match=r"missing weights.*frequency_shift"):
        load_official(config, weights)
    config, weights, _ = released("adatensor")
    narrow = {"model.layers.0.pe.up_projs.1.weight": torch.zeros(7, 4)}
    with pytest.raises(ValueError, match=r"parts of model\.layers\.0\.encoding\.up have the shapes"):
        load_official(config, weights | narrow)
    del weights["model.layers.0.pe.up_projs.1.weight"]
    with pytest.raises(ValueError, match=r"misshapen weights.*encoding\.up"):
        load_official(config, weights)
    config, weights, _ = released("adavector")
    with pytest.raises(ValueError, match="misshapen weights"):
        load_official(config | {"rpe_type": "adape"}, weights)
