"""The state update through one H x H map per token, against its literal twin."""

from __future__ import annotations

import itertools

import pytest
import torch

from tape_pe.ops import contextualize, reference

HEADS = {"own states": (4, 4), "two share": (6, 3), "all share": (4, 1)}


def make(heads: int, kv_heads: int, *, mix: str, shared: bool, dtype: torch.dtype = torch.float64) -> dict:
    """Random arguments, `[B, ..., N, ...]` = `[2, ..., 7, ...]` with D = 8 and I = 5; all of them want gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "state": random(1, 1, 7, 8) if shared else random(2, kv_heads, 7, 8),
        "averaged_state": random(2, heads, 7, 8),
        "gate": random(2, 7, 5),
        "mix": random(kv_heads, {"full": heads, "diagonal": heads // kv_heads}[mix]),
        "up": random(5, kv_heads),
        "down": random(kv_heads, 5),
    }


def solve(function, arguments: dict, norm: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    result = function(**arguments, norm=norm)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = {name: x for name, x in arguments.items() if x is not None}
    grads = torch.autograd.grad(result, list(leaves.values()), direction.to(result.dtype))
    return result, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mix", ["full", "diagonal"])
@pytest.mark.parametrize("heads", HEADS)
def test_equals_reference_with_all_gradients(heads: str, mix: str, shared: bool, norm: str) -> None:
    arguments = make(*HEADS[heads], mix=mix, shared=shared)
    for with_mix, with_gate in itertools.product((True, False), repeat=2):
        if not with_mix and not with_gate:
            continue
        chosen = dict(arguments)
        if not with_mix:
            chosen |= {"mix": None, "averaged_state": None}
        if not with_gate:
            chosen |= {"gate": None, "up": None, "down": None}
        actual, grads = solve(contextualize, chosen, norm)
        expected, expected_grads = solve(reference.contextualize, chosen, norm)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        for name, grad in expected_grads.items():
            # The norm takes away a common scale; with one head the gradient of the gate is then only rounding.
            error = (grads[name] - grad).abs().max()
            assert error <= 1e-10 * max(1.0, grad.abs().max()), name


def test_gradcheck() -> None:
    names = ("state", "averaged_state", "gate", "mix", "up", "down")
    arguments = make(4, 2, mix="full", shared=False)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return contextualize(**dict(zip(names, tensors, strict=True)), norm="rms")

    assert torch.autograd.gradcheck(call, [arguments[name] for name in names])


@pytest.mark.parametrize(("mix", "absent"), [("diagonal", ()), ("full", ("gate", "up", "down")), ("full", ("mix",))])
def test_gradcheck_of_parts_with_a_shared_table(mix: str, absent: tuple[str, ...]) -> None:
    arguments = {k: None if k in absent else x for k, x in make(4, 2, mix=mix, shared=True).items()}
    leaves = [name for name, x in arguments.items() if x is not None]
    if "mix" in absent:
        leaves.remove("averaged_state")

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return contextualize(**(arguments | dict(zip(leaves, tensors, strict=True))))

    assert torch.autograd.gradcheck(call, [arguments[name] for name in leaves])


def test_only_inputs_are_kept_for_backward() -> None:
    arguments = make(4, 2, mix="full", shared=False)
    own = {x.untyped_storage().data_ptr() for x in arguments.values()}
    kept = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        contextualize(**arguments)
    assert kept == own


def test_autocast_rounds_no_states() -> None:
    arguments = make(4, 2, mix="full", shared=False, dtype=torch.float32)
    expected, expected_grads = solve(contextualize, arguments, "none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, grads = solve(contextualize, arguments, "none")
    assert torch.equal(actual, expected)
    for name, grad in expected_grads.items():
        assert torch.equal(grads[name], grad), name


def test_fp32_is_within_1e_5_of_fp64() -> None:
    exact = contextualize(**make(4, 2, mix="full", shared=False), norm="rms")
    single = contextualize(**make(4, 2, mix="full", shared=False, dtype=torch.float32), norm="rms")
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


def test_zero_weights_change_nothing_bit_for_bit() -> None:
    arguments = {name: x.detach().float() for name, x in make(4, 4, mix="full", shared=False).items()}
    arguments["mix"], arguments["up"] = torch.zeros(4, 4), torch.zeros(5, 4)
    assert torch.equal(contextualize(**arguments), arguments["state"])


def test_nothing_to_do_returns_the_state() -> None:
    state = torch.randn(1, 1, 7, 8)
    assert torch.equal(contextualize(state, None, None), state)


def test_shared_start_state_grows_to_all_heads_and_rows() -> None:
    arguments = make(6, 3, mix="full", shared=True)
    assert contextualize(**arguments).shape == (2, 3, 7, 8)


def test_rms_norm_is_one_for_a_start_state_and_bounds_growth() -> None:
    phases = torch.randn(1, 2, 7, 4, dtype=torch.float64)
    state = torch.cat([phases.cos(), phases.sin()], dim=-1)
    torch.testing.assert_close(contextualize(state, None, None, norm="rms"), state, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(contextualize(37.0 * state, None, None, norm="rms"), state, rtol=1e-14, atol=1e-14)


def test_a_half_precision_state_stays_half_precision() -> None:
    arguments = make(4, 2, mix="full", shared=False, dtype=torch.float32)
    exact = contextualize(**arguments)
    arguments["state"] = arguments["state"].detach().bfloat16()
    result = contextualize(**arguments)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, rtol=5e-2, atol=5e-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "layer"}, "norm='layer': known state norms are none, rms"),
        ({"averaged_state": None}, "averaged_state=None: mix needs"),
        ({"up": None}, "up=None or down=None: gate needs both"),
        ({"down": None}, "up=None or down=None: gate needs both"),
        ({"mix": torch.zeros(2, 3, dtype=torch.float64)}, "mix has the shape (2, 3)"),
        ({"down": torch.zeros(2, 4, dtype=torch.float64)}, "down has the shape (2, 4)"),
        ({"gate": torch.zeros(2, 7, 4, dtype=torch.float64)}, "gate has 4 channels: up has 5 rows"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        contextualize(**make(4, 2, mix="full", shared=False) | change)
    assert message in str(caught.value)
