"""The level `op`: rotation, attention core and position update, of RoPE and TAPE."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tape_pe.bench.options import Shape
from tape_pe.bench.variants import WEIGHT_SCALE, Variant, with_gradients, without_gradients
from tape_pe.ops import contextualize, positional_attention, reference, rotary_state, rotate

Calls = dict[str, Callable[[], Any]]
ROPE, TAPE, EINSUMS = Variant("rope"), Variant("tape"), Variant("einsums")
LAYERS, COLD_BYTES = 12, 256 << 20
"""Caches that decoding goes through in turn: as many as a model has, or fewer that no processor's cache holds."""


class Update(NamedTuple):
    """What a position update reads.

    Attributes:
        state: packed `[c | s]`, `[B, H, N, D]`.
        averaged: its attention average, `[B, H, N, D]`.
        gate: `[B, N, I]`.
        mix: W_mix `[H, H]`.
        up: W_up `[I, H]`.
        down: W_down `[H, I]`.
    """

    state: Tensor
    averaged: Tensor
    gate: Tensor
    mix: Tensor
    up: Tensor
    down: Tensor


def rotation(shape: Shape, phase: str, device: torch.device) -> Calls:
    """Queries and keys, rotated by RoPE's one table or by a state for each head."""
    query, key, _ = _projections(shape, shape.length, shape.length, device)
    table = rotary_state(torch.arange(shape.length, device=device)[None], shape.head_dim, dtype=shape.torch_dtype)
    state = table.expand(shape.batch_size, shape.kv_heads, -1, -1).contiguous().requires_grad_()

    def call(state: Tensor) -> Callable[[], Any]:
        return _phase_call(phase, lambda: (rotate(query, state), rotate(key, state)), [query, key, *_learned(state)])

    return {str(ROPE): call(table), str(TAPE): call(state)}


def attention(shape: Shape, phase: str, device: torch.device, chosen: Sequence[Variant]) -> Calls:
    """The attention core: of RoPE on torch's own function called directly, and on backends; of TAPE on backends.

    A step of decoding reads another cache in every call, as each layer of a model has its own: one that was just read
    would come from the processor's cache, where RoPE's still fits when TAPE's no longer does.
    """
    if phase == "decode":
        return _decoding(shape, device, chosen)
    query, key, value = _projections(shape, shape.length, shape.length, device)
    state = torch.randn_like(value).requires_grad_()

    def call(variant: Variant) -> Callable[[], Any]:
        states = state if variant.encoding == "tape" else None
        return _phase_call(
            phase,
            lambda: _attend(variant, query, key, value, states),
            [query, key, value, *_learned(states)],
        )

    return {str(variant): call(variant) for variant in chosen if variant.encoding in ("rope", "tape")}


def _decoding(shape: Shape, device: torch.device, chosen: Sequence[Variant]) -> Calls:
    """`attention` of one new token."""
    caches: list[tuple[Tensor, Tensor, Tensor]] = []
    while (len(caches) < LAYERS and sum(x.nbytes for cache in caches for x in cache) < COLD_BYTES) or len(caches) < 2:
        _, key, value = _projections(shape, 1, shape.length, device)
        caches.append((key, value, torch.randn_like(value)))
    query, _, _ = _projections(shape, 1, shape.length, device)
    layers = itertools.cycle(caches)

    def call(variant: Variant) -> Callable[[], Any]:
        def step() -> Sequence[Tensor | None]:
            key, value, state = next(layers)
            return _attend(variant, query, key, value, state if variant.encoding == "tape" else None)

        return without_gradients(step)

    return {str(variant): call(variant) for variant in chosen if variant.encoding in ("rope", "tape")}


def _attend(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor, state: Tensor | None
) -> Sequence[Tensor | None]:
    if variant == ("rope", "sdpa"):
        grouped: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        return (F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, **grouped),)
    return positional_attention(query, key, value, state, backend=variant.backend)


def update(shape: Shape, phase: str, device: torch.device) -> Calls:
    """The position update, and the published one beside it. There is no RoPE here, which has none."""
    inputs = update_inputs(shape, device, 1 if phase == "decode" else shape.length)
    calls = {str(TAPE): _phase_call(phase, lambda: (packed_update(inputs),), inputs)}
    if shape.heads == shape.kv_heads:  # the published model has no grouped queries
        tables = full_width(inputs)
        read = [*tables, *inputs[2:]]
        calls[str(EINSUMS)] = _phase_call(phase, lambda: einsum_update(*tables, inputs), read)
    return calls


def update_inputs(shape: Shape, device: torch.device, tokens: int) -> Update:
    """Random inputs, in the layout in which attention and a layer before leave theirs; all take gradients."""
    generator = torch.Generator().manual_seed(0)
    wide = (shape.batch_size, tokens, shape.kv_heads, shape.head_dim)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*sizes, generator=generator) * scale
        return values.to(device, shape.torch_dtype).requires_grad_()

    def token_major(heads: int) -> Tensor:
        return random(*wide[:2], heads, wide[3]).detach().transpose(1, 2).requires_grad_()

    return Update(
        token_major(shape.kv_heads),
        token_major(shape.heads),
        random(*wide[:2], shape.position_size),
        random(shape.kv_heads, shape.heads, scale=WEIGHT_SCALE),
        random(shape.position_size, shape.kv_heads, scale=WEIGHT_SCALE),
        random(shape.kv_heads, shape.position_size, scale=WEIGHT_SCALE),
    )


def packed_update(inputs: Update) -> Tensor:
    """The update as this library computes it."""
    return contextualize(*inputs[:3], mix=inputs.mix, up=inputs.up, down=inputs.down)


def full_width(inputs: Update) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosine and sine tables `[B, H, N, D]` of the state, then of its average: both halves of the channels are equal,
    as in the usual tables that are multiplied with whole queries and keys."""
    tables = []
    for packed in inputs[:2]:
        for half in packed.detach().chunk(2, dim=-1):
            tables.append(torch.cat([half, half], dim=-1).requires_grad_())
    return tuple(tables)  # type: ignore[return-value]


def einsum_update(
    cosines: Tensor, sines: Tensor, averaged_cosines: Tensor, averaged_sines: Tensor, inputs: Update
) -> tuple[Tensor, Tensor]:
    """The update of the equations, e2 = e1 + W_down diag(g) W_up e1 with e1 = e + W_mix A e, on whole tables: the
    yardstick. As published, cosines and sines are carried apart, each with an `[N, I, D]` intermediate."""

    def updated(table: Tensor, averaged: Tensor) -> Tensor:
        return reference.contextualize(table, averaged, inputs.gate, mix=inputs.mix, up=inputs.up, down=inputs.down)

    return updated(cosines, averaged_cosines), updated(sines, averaged_sines)


def _projections(shape: Shape, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as projections leave them, token-major in memory; cached keys are head-major."""
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        values = torch.randn(shape.batch_size, tokens, heads, shape.head_dim, generator=generator)
        values = values.to(device, shape.torch_dtype).transpose(1, 2)
        return (values.contiguous() if queries != keys else values).requires_grad_()

    return random(queries, shape.heads), random(keys, shape.kv_heads), random(keys, shape.kv_heads)


def _learned(state: Tensor | None) -> list[Tensor]:
    return [] if state is None else [state]


def _phase_call(
    phase: str, function: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]
) -> Callable[[], Any]:
    return with_gradients(function, inputs) if phase == "forward+backward" else without_gradients(function)
