"""Released models whose positions are drawn, or that no recorded model covers: replayed, or recomputed literally."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tape_pe.encodings import LayerEncoding
from tape_pe.models.official import load_official
from tape_pe.ops import rotate

DATA = Path(__file__).parents[1] / "data" / "parity"


def released(name: str) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """Config, weights and everything recorded of a released model."""
    recorded = load_file(DATA / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in recorded.items() if key.startswith("weights/")}
    return json.loads((DATA / f"{name}.config.json").read_text()), weights, recorded


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


class Replayed(LayerEncoding):
    """Rotates by a recorded table instead of the state."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        half = cos.shape[-1] // 2
        assert torch.equal(cos[..., :half], cos[..., half:])
        self.table = torch.cat([cos[..., :half], sin[..., :half]], dim=-1)

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return rotate(query, self.table), rotate(key, self.table)


def test_randrope_with_the_recorded_draws() -> None:
    """The released model draws positions in every layer; ours once per forward. Everything else is the same."""
    config, weights, recorded = released("randrope")
    model = load_official(config, weights)
    assert model.model.encoding.bound == 2 * config["max_position_embeddings"]
    for idx, layer in enumerate(model.model.layers):
        layer.encoding = Replayed(recorded[f"layer{idx}/rope_cos"], recorded[f"layer{idx}/rope_sin"])
    outputs = model(recorded["input_ids"], output_hidden_states=True)
    assert relative_error(outputs.logits, recorded["logits"]) < 1e-5
    for idx in range(config["num_hidden_layers"] - 1):
        assert relative_error(outputs.hidden_states[idx + 1], recorded[f"layer{idx}/hidden"]) < 1e-5
    outputs.logits.square().mean().backward()
    compared = set()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, recorded[f"grads/{name}"]) < 1e-4, name
        compared.add(f"grads/{name}")
    assert compared == {key for key in recorded if key.startswith("grads/") and "inv_freq" not in key}


def test_recorded_draws_are_among_those_that_ours_can_make() -> None:
    """Sorted, distinct and below the bound, read off the recorded phases."""
    config, _, recorded = released("randrope")
    slow = 10000.0 ** (-4 / 8)  # of channel pair 2, which turns less than once
    for idx in range(config["num_hidden_layers"]):
        cos, sin = (recorded[f"layer{idx}/rope_{part}"][0, 0, :, 2] for part in ("cos", "sin"))
        positions = torch.atan2(sin, cos) / slow
        positions = positions.where(positions >= -0.5, positions + 2 * math.pi / slow)
        assert (positions - positions.round()).abs().max() < 1e-3
        assert (positions.round().diff() >= 1).all()
        assert 0 <= positions.round().min() <= positions.round().max() < 2 * config["max_position_embeddings"]


def literal_logits(config: dict, weights: dict[str, Tensor], input_ids: Tensor, *, decays: bool) -> Tensor:
    """The released decoder with rope, or with xpos if it `decays`, written from its description, in fp64."""
    weights = {name: weight.double() for name, weight in weights.items()}
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    length, head_dim = input_ids.shape[1], config["hidden_size"] // heads
    half = head_dim // 2

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def turn(u: Tensor, sign: int) -> Tensor:
        turned = torch.empty_like(u)
        for n in range(length):
            for j in range(half):
                phase = n * 10000.0 ** (-2 * j / head_dim)
                zeta = (2 * j + 0.4 * head_dim) / (1.4 * head_dim) if decays else 1.0
                scale = zeta ** (sign * (n - config["max_position_embeddings"] // 2) / 2048)
                a, b = u[..., n, j], u[..., n, j + half]
                turned[..., n, j] = scale * (a * math.cos(phase) - b * math.sin(phase))
                turned[..., n, j + half] = scale * (a * math.sin(phase) + b * math.cos(phase))
        return turned

    x = weights["model.embed_tokens.weight"][input_ids]
    for idx in range(config["num_hidden_layers"]):
        layer = f"model.layers.{idx}"
        read = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (read @ weights[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        scores = turn(q, 1) @ turn(k, -1).mT / math.sqrt(head_dim)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        attended = (scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        x = x + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
        read = norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        x = x + (F.silu(read @ gate) * (read @ up)) @ down
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def test_xpos_against_its_description() -> None:
    """There is no recorded model. The same lines without the decay give the recorded rope model's logits."""
    config, weights, recorded = released("rope")
    ids = recorded["input_ids"]
    assert relative_error(literal_logits(config, weights, ids, decays=False), recorded["logits"]) < 1e-5
    for bound in (128, 4096):
        config |= {"rpe_type": "xpos", "max_position_embeddings": bound}
        model = load_official(config, weights)
        expected = literal_logits(config, weights, ids, decays=True)
        assert relative_error(model.double()(ids).logits, expected) < 1e-10
        assert relative_error(model.float()(ids).logits, expected) < 1e-5
        assert relative_error(expected, recorded["logits"]) > 1e-4, "the decay is felt"


def test_what_the_loaded_models_are() -> None:
    for rpe_type, encoding in (("sincos", "sinusoidal"), ("xpos", "xpos"), ("randrope", "randomized")):
        config, weights, recorded = released("rope")
        model = load_official(config | {"rpe_type": rpe_type}, weights)
        assert model.config.encoding == encoding
        assert not model.training
        assert torch.equal(model(recorded["input_ids"]).logits, model(recorded["input_ids"]).logits)
