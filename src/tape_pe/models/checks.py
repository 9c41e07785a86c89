"""Checks of what `forward` is given. Each error names the argument, its value and the rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tape_pe.models.cache import TapeCache


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> None:
    """`input_ids` `[B, N]` of integers, or `inputs_embeds` `[B, N, hidden_size]`."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids and inputs_embeds: exactly one of them is needed")
    if input_ids is not None:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has the shape {tuple(input_ids.shape)}: two axes [B, N] are needed")
        if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids has the dtype {input_ids.dtype}: integers are needed")
    if inputs_embeds is not None and (inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != hidden_size):
        raise ValueError(f"inputs_embeds has the shape {tuple(inputs_embeds.shape)}: [B, N, {hidden_size}] is needed")


def check_cache(cache: Any, batch_size: int | None = None) -> None:
    """A `TapeCache` or `None`; with `batch_size`, one that holds as many rows."""
    if cache is None:
        return
    if not isinstance(cache, TapeCache):
        raise ValueError(f"cache={type(cache).__name__}: a TapeCache is needed, which holds position states as well")
    if batch_size is not None and cache.get_seq_length():
        rows = cache.layers[0].keys.shape[0]
        if rows != batch_size:
            raise ValueError(f"cache holds {rows} rows: the batch has {batch_size}")


def check_layout(
    shape: tuple[int, int],
    past: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    seq_idx: Tensor | None,
) -> None:
    """Shapes and dtypes of what says where `shape` = `(B, N)` new tokens stand, after `past` cached ones."""
    batch_size, num_tokens = shape
    for name, tensor in (("position_ids", position_ids), ("document_ids", document_ids), ("seq_idx", seq_idx)):
        if tensor is None:
            continue
        if tensor.shape not in ((batch_size, num_tokens), (1, num_tokens)):
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: {(batch_size, num_tokens)} is needed")
        if tensor.is_floating_point() and (name != "position_ids" or tensor.dtype.itemsize < 4):
            rule = "half precision cannot tell far positions apart" if name == "position_ids" else "integers are needed"
            raise ValueError(f"{name} has the dtype {tensor.dtype}: {rule}")
    if attention_mask is None:
        return
    if attention_mask.shape not in ((batch_size, num_tokens), (batch_size, past + num_tokens)):
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}: a padding mask of the shape "
            f"{(batch_size, num_tokens)}, or with the cached tokens {(batch_size, past + num_tokens)}, is needed"
        )
    # Looking at values costs a synchronisation on a GPU, for a kind of mask that is rare.
    if (
        attention_mask.is_floating_point()
        and not torch.compiler.is_compiling()
        and attention_mask.device.type != "meta"
        and bool((attention_mask < 0).any())
    ):
        raise ValueError("attention_mask holds negative numbers: 1 for real tokens and 0 for padding are needed")


def check_labels(labels: Tensor, shape: torch.Size | None, logits_to_keep: int | Tensor) -> None:
    """`labels` of the shape `(B, N)` of the tokens, and logits for all of them."""
    if shape is not None and labels.shape != shape:
        raise ValueError(f"labels has the shape {tuple(labels.shape)}: that of the tokens, {tuple(shape)}, is needed")
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError(f"logits_to_keep={logits_to_keep}: labels need all logits")
