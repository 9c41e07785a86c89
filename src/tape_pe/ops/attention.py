"""Attention that averages values and position states with the same weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tape_pe.ops.backends import select_backend
from tape_pe.ops.bias import Bias, PairBias, materialized
from tape_pe.ops.inputs import AttentionInputs


class AttentionResult(NamedTuple):
    """What `positional_attention` returns.

    Attributes:
        output: attention average of the values, `[B, H, Nq, Dv]`.
        averaged_state: attention average of the states per query head, `[B, H, Nq, Ds]`; `None` without states.
    """

    output: Tensor
    averaged_state: Tensor | None


def positional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> AttentionResult:
    """One attention for tokens and positions: `A [v | z]` with `A = softmax(q k^T * scale + bias + mask)`.

    The queries are the last Nq of the Nk keys (so that a single new query sees all cached keys). Rows that may see no
    key are zero, and so are their gradients.

    Args:
        query: already rotated, `[B, H, Nq, D]`.
        key: already rotated, `[B, Hkv, Nk, D]`, Hkv dividing H: query head h reads key/value head `h // (H / Hkv)`.
        value: `[B, Hkv, Nk, Dv]`.
        state: position states of the keys, `[B | 1, Hkv | 1, Nk, Ds]`, or `None`.
        segment_ids: `[B, Nk]`, from `make_segment_ids`: equal ids see each other, -1 is padding.
        bias: added to the scores, broadcastable to `[B, H, Nq, Nk]`: a tensor, or a `PairBias`, which backends that can
            compute it in place never hold as a whole.
        causal: whether a query sees no later key.
        scale: factor of the scores, `D ** -0.5` if `None`.
        backend: `"reference"`, `"sdpa"`, `"blockwise"` or another one of `tape info`; `None` takes the environment
            variable `TAPE_BACKEND`, and without it the fastest one available for the device.

    Returns:
        `output`, `[B, H, Nq, Dv]`, and `averaged_state`, `[B, H, Nq, Ds]` or `None`, in the dtype of `value`.

    Raises:
        ValueError: shapes disagree, or the backend is unknown or not available (the message says why).
    """
    _check_shapes(query, key, value, state, segment_ids, bias)
    if state is not None:
        batch, kv_heads = key.shape[:2]
        state = state.to(value.dtype).expand(batch, kv_heads, -1, -1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chosen = select_backend(query.device, backend)
    inputs = AttentionInputs(query, key, value, state, segment_ids, bias, causal, scale)
    return AttentionResult(*chosen.attention(inputs))


def prepare_bias(bias: Bias | None, device: torch.device) -> Bias | None:
    """For a bias that several calls share: materializes it now, once, if the backend would do so in every call.

    Args:
        bias: as in `positional_attention`.
        device: device of the queries.
    """
    return materialized(bias) if select_backend(device).materializes_bias else bias


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, segment_ids: Tensor | None, bias: Bias | None
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("state", state)):
        if tensor is not None and tensor.ndim != 4:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}: four axes [B, heads, N, channels] are needed"
            )
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads: not a multiple of the {kv_heads} heads of key")
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(f"key has the shape {tuple(key.shape)}: query {tuple(query.shape)} needs the same B and D")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value has the shape {tuple(value.shape)}: key {tuple(key.shape)} needs the same B, Hkv and N"
        )
    if num_queries == 0:
        raise ValueError("query has 0 tokens: at least one is needed")
    if num_queries > num_keys:
        raise ValueError(f"query has {num_queries} tokens: more than the {num_keys} of key, of which they are the last")
    if not query.is_floating_point():
        raise ValueError(f"query has the dtype {query.dtype}: floating-point numbers are needed")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}: not equal"
        )
    if state is not None and (
        state.shape[0] not in (1, batch) or state.shape[1] not in (1, kv_heads) or state.shape[2] != num_keys
    ):
        raise ValueError(
            f"state has the shape {tuple(state.shape)}: [{batch} or 1, {kv_heads} or 1, {num_keys}, channels] is needed"
        )
    if segment_ids is not None and (segment_ids.shape != (batch, num_keys) or segment_ids.dtype.is_floating_point):
        raise ValueError(
            f"segment_ids has the shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}: "
            f"integers of the shape {(batch, num_keys)} are needed"
        )
    if bias is not None:
        _check_bias(bias, (batch, heads, num_queries, num_keys))


def _check_bias(bias: Bias, shape: tuple[int, ...]) -> None:
    """Only growing to `shape` is broadcasting here: a larger bias must not make the result larger."""
    fits = len(bias.shape) <= len(shape) and all(
        n in (1, full) for n, full in zip(reversed(bias.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"bias has the shape {tuple(bias.shape)}: not broadcastable to {shape}")
    if not isinstance(bias, PairBias) and not bias.dtype.is_floating_point:
        raise ValueError(f"bias has the dtype {bias.dtype}: it is added to the scores and must be floating point")
