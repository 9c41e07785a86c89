"""Two calls of `scaled_dot_product_attention`, one for the values and one for the states.

A single call with the wide value `[v | z]` would be cheaper, but where the widths of key and value differ, torch on CPU
silently takes its math path and builds the whole N x N matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tape_pe.ops.inputs import AttentionInputs
from tape_pe.ops.masks import dense_mask


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`. With segments or a bias, torch needs an `[B, 1 | H, Nq, Nk]` mask."""
    query, key, value, state, segment_ids, _, causal, scale = inputs
    bias = inputs.materialized_bias()
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask: Tensor | None = None
    dead: Tensor | None = None
    # torch aligns a causal mask at the top left; a single last query sees everything and needs none.
    is_causal = False
    if causal and num_queries > 1:  # not a comparison's value, which compilers keep as a symbol
        is_causal = True
    if segment_ids is not None or bias is not None or (is_causal and num_queries != num_keys):
        mask = dense_mask(num_queries, num_keys, segment_ids=segment_ids, causal=causal, device=query.device)
        is_causal = False
        if bias is not None:
            mask = bias.to(query.dtype).masked_fill(~mask, -torch.inf)
        # Rows without a key see all of them and are zeroed afterwards, so that no kernel meets a row of -inf.
        dead = (
            ~mask.any(dim=-1, keepdim=True) if bias is None else mask.detach().amax(dim=-1, keepdim=True) == -torch.inf
        )
        mask = mask | dead if bias is None else mask.masked_fill(dead, 0.0)
    # Not `enable_gqa=(comparison)`: where a compiler traces shapes as symbols, that is no bool.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}

    def call(values: Tensor) -> Tensor:
        averaged = F.scaled_dot_product_attention(
            query,
            key,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            **grouped,
        )
        return averaged if dead is None else averaged.masked_fill(dead, 0.0)

    return call(value), None if state is None else call(state)
