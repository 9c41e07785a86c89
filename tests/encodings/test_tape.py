"""TAPE as an encoding: its options, its start, and what its layers compute."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.rope import Rope, RopeLayer, RopeOptions
from tape_pe.encodings.tape import Tape, TapeLayer, TapeOptions
from tape_pe.ops import positional_attention, reference

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)


def draw(batch: int = 2, tokens: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"state": (2, tokens, 8), "averaged_state": (4, tokens, 8)}
    shapes |= dict.fromkeys(("mlp_input", "mlp_output"), (tokens, 32))
    return {name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()}


def trained(options: TapeOptions) -> TapeLayer:
    """A layer none of whose weights are zero."""
    layer = Tape.layer(SIZES, options, 0)
    assert isinstance(layer, TapeLayer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.3, generator=generator)
    return layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_size": 0}, "encoding_options.position_size=0: at least 1"),
        ({"position_size": -3}, "encoding_options.position_size=-3: at least 1"),
        ({"head_mixing": "half"}, "encoding_options.head_mixing='half': allowed values are full, diagonal"),
        ({"state_norm": "layer"}, "encoding_options.state_norm='layer': allowed values are none, rms"),
        ({"gate_input": "tokens"}, "encoding_options.gate_input='tokens': allowed values are mlp_output, mlp_input"),
        (
            {"gate": "tokens"},
            "encoding_options.gate='tokens': encoding='tape' has trainable_frequencies",
        ),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"encoding_options\.") as caught:
        TapeOptions.from_dict("tape", options)
    assert message in str(caught.value)


ALL_OPTIONS = [
    TapeOptions(
        position_size=size,
        update_attention=attention,
        update_mlp=mlp,
        head_mixing=mixing,
        state_norm=norm,
        gate_input=gate,
    )
    for size, attention, mlp, mixing, norm, gate in itertools.product(
        (None, 5), (True, False), (True, False), ("full", "diagonal"), ("none", "rms"), ("mlp_output", "mlp_input")
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fresh_layer_is_rope_bit_for_bit(dtype: torch.dtype) -> None:
    positions = Tokens(torch.arange(7)[None], 7)
    tensors = {name: x.to(dtype) for name, x in draw().items()}
    query, key, value = (torch.randn(2, h, 7, 8, dtype=dtype) for h in (4, 2, 2))
    for options in ALL_OPTIONS:
        if options.state_norm == "rms":
            continue
        state = Tape(SIZES, options).start(positions, dtype)
        assert torch.equal(state, Rope(SIZES, RopeOptions()).start(positions, dtype))
        layer = Tape.layer(SIZES, options, 0).to(dtype)
        rotated = layer.rotate(query, key, state)
        expected = RopeLayer().rotate(query, key, state)
        assert all(torch.equal(a, b) for a, b in zip(rotated, expected, strict=True))
        averaged = positional_attention(*rotated, value, state).averaged_state if layer.averages_state else None
        new = layer(state, averaged, tensors["mlp_input"], tensors["mlp_output"])
        assert new.dtype == dtype
        assert torch.equal(new, state.expand_as(new))


def test_a_fresh_layer_with_rms_norm_is_rope_to_rounding() -> None:
    options, tensors = TapeOptions(state_norm="rms"), draw()
    state = Tape(SIZES, options).start(Tokens(torch.arange(7)[None], 7))
    new = Tape.layer(SIZES, options, 0)(state, tensors["averaged_state"], tensors["mlp_input"], tensors["mlp_output"])
    torch.testing.assert_close(new, state.expand_as(new), rtol=0, atol=3e-7)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda o: "-".join(str(x) for x in vars(o).values()))
def test_layers_compute_the_reference_update(options: TapeOptions) -> None:
    if not (options.update_attention or options.update_mlp):
        layer = Tape.layer(SIZES, options, 0)
        assert type(layer) is RopeLayer, "nothing to update"
        return
    layer, tensors = trained(options), draw()
    assert layer.averages_state == options.update_attention
    gate = None
    if options.update_mlp:
        gate = F.silu(tensors[options.gate_input] @ layer.gate_proj.weight.T)
    expected = reference.contextualize(
        tensors["state"],
        tensors["averaged_state"],
        gate,
        mix=layer.mix,
        up=layer.up,
        down=layer.down,
        norm=options.state_norm,
    )
    if not options.update_attention:
        tensors["averaged_state"] = None
    torch.testing.assert_close(layer(**tensors), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        (TapeOptions(), {"mix": (2, 4), "gate_proj.weight": (8, 32), "up": (8, 2), "down": (2, 8)}),
        (TapeOptions(head_mixing="diagonal", update_mlp=False), {"mix": (2, 2)}),
        (
            TapeOptions(position_size=3, update_attention=False),
            {"gate_proj.weight": (3, 32), "up": (3, 2), "down": (2, 3)},
        ),
    ],
)
def test_parameters(options: TapeOptions, shapes: dict) -> None:
    layer = Tape.layer(SIZES, options, 0)
    assert {name: tuple(x.shape) for name, x in layer.named_parameters()} == shapes
    assert set(layer.state_dict()) == set(shapes)


def test_start_values() -> None:
    torch.manual_seed(0)
    layer = Tape.layer(SIZES, TapeOptions(position_size=2000), 0)
    assert not layer.mix.any()
    assert not layer.up.any()
    assert layer.down.std().item() == pytest.approx(0.02, rel=0.1)


def test_every_start_value_can_learn() -> None:
    """W_mix and W_up get a gradient at once; W_down and the gate as soon as W_up has moved."""
    layer, tensors = Tape.layer(SIZES, TapeOptions(), 0), draw()
    layer(**tensors).square().sum().backward()
    assert layer.mix.grad.abs().amin() > 0
    assert layer.up.grad.any()
    with torch.no_grad():
        layer.up -= 0.1 * layer.up.grad
    layer.zero_grad()
    layer(**tensors).square().sum().backward()
    assert all(weight.grad.any() for weight in layer.parameters())


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_only_the_last_layer_updates_nothing(layers: int) -> None:
    sizes = EncodingSizes(32, 4, 2, 8, layers, 64, SIZES.rope_parameters, 0.02)
    kinds = [type(Tape.layer(sizes, TapeOptions(), idx)) for idx in range(layers)]
    assert kinds == [TapeLayer] * (layers - 1) + [RopeLayer]


def test_default_position_size_is_four_per_state_head() -> None:
    assert Tape.layer(SIZES, TapeOptions(), 0).up.shape == (8, 2)
