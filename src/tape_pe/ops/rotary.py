"""Start state and rotation: RoPE (Su et al., arXiv 2104.09864) in the half-split convention of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALING_RULES = ("default", "linear", "dynamic")


def inverse_frequencies(
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    position_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Angular frequencies theta^(-2j/D), j < D/2, in radians per position, with a frequency rule applied.

    Args:
        head_dim: D, even.
        theta: the base.
        scaling: a frequency rule in the form of Hugging Face's `rope_parameters`. `{"rope_type": "linear",
            "factor": f}` divides positions by f. `{"rope_type": "dynamic", "factor": f,
            "original_max_position_embeddings": L}` raises the base to `theta * (f N / L - (f - 1))^(D / (D - 2))` once
            the length N exceeds L. `None` or `"default"`: none.
        position_ids: for `"dynamic"` alone: N is their maximum plus one.
        device: device of the result.

    Returns:
        `[D / 2]` in fp64 (fp32 on devices without it).

    Raises:
        ValueError: `head_dim` is not positive and even, `theta` is not positive, or the rule is unknown or incomplete.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary encodings need a positive even head_dim")
    if theta <= 0:
        raise ValueError(f"theta={theta}: the base must be positive")
    scaling = check_scaling(scaling)
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    rule = scaling.get("rope_type", "default")
    if rule == "dynamic":
        if position_ids is None:
            raise ValueError("position_ids=None: the dynamic rule depends on the length and needs them")
        if head_dim == 2:
            raise ValueError("head_dim=2: the dynamic rule raises the base, which a single frequency does not have")
        length = scaling["original_max_position_embeddings"]
        factor = scaling["factor"]
        ratio = (position_ids.max().to(dtype) + 1) / length
        base = theta * (factor * ratio.clamp(min=1.0) - (factor - 1)) ** (head_dim / (head_dim - 2))
        return base**-exponents
    frequencies = theta**-exponents
    return frequencies / scaling["factor"] if rule == "linear" else frequencies


def check_scaling(scaling: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checks a frequency rule and returns it (an empty one for `None`).

    Raises:
        ValueError: unknown `rope_type`, or a missing or non-positive parameter of the rule.
    """
    if scaling is None:
        return {}
    rule = scaling.get("rope_type", "default")
    if rule not in SCALING_RULES:
        raise ValueError(f"rope_type={rule!r}: known frequency rules are {', '.join(SCALING_RULES)}")
    needed = {"default": (), "linear": ("factor",), "dynamic": ("factor", "original_max_position_embeddings")}[rule]
    for name in needed:
        value = scaling.get(name)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{name}={value!r}: rope_type={rule!r} needs a positive number")
    return scaling


def rotary_state(
    position_ids: Tensor,
    head_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The start state of RoPE and TAPE: packed `[cos | sin]` of the phases position * frequency, in radians.

    Phases are computed in fp64 (fp32 on devices without it) whatever `dtype`: in bf16, positions 256 and 257 would be
    the same number.

    Args:
        position_ids: `[B, N]`, integers (or reals).
        head_dim: D, even.
        theta: base of the frequencies.
        scaling: frequency rule, see `inverse_frequencies`.
        dtype: dtype of the result.

    Returns:
        `[B, 1, N, D]`: one table for all heads.

    Raises:
        ValueError: see `inverse_frequencies`.
    """
    frequencies = inverse_frequencies(
        head_dim, theta=theta, scaling=scaling, position_ids=position_ids, device=position_ids.device
    )
    phases = position_ids[:, None, :, None].to(frequencies.dtype) * frequencies
    return torch.cat([phases.cos(), phases.sin()], dim=-1).to(dtype)


def rotate(u: Tensor, state: Tensor) -> Tensor:
    """Rotates (and scales) channel pairs by a state: the complex product (a, b), (c, s) -> (ac - bs, as + bc).

    Args:
        u: queries or keys, `[B, H, N, D]`; pair j is channels (j, j + D/2).
        state: packed `[c | s]`, `[B | 1, Hs, N, D]`, Hs dividing H; head h uses head `h // (H / Hs)` of the state.

    Returns:
        `[B, H, N, D]` in the dtype of `u`.
    """
    state = state.to(u.dtype)
    heads, state_heads = u.shape[1], state.shape[1]
    grouped = 1 < state_heads < heads
    if grouped:
        u, state = u.unflatten(1, (state_heads, heads // state_heads)), state.unsqueeze(2)
    a, b = u.chunk(2, dim=-1)
    c, s = state.chunk(2, dim=-1)
    rotated = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return rotated.flatten(1, 2) if grouped else rotated
