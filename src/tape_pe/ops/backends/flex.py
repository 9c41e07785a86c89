"""torch's flex_attention: values and states in one call, masks and biases computed in the kernel, never N x N.

torch compiles a kernel for each kind of bias, mask and dtype at its first use; another length makes it compile once
more, for all lengths. On a CPU the compiled kernel has no backward pass, so the backend runs on CUDA alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from tape_pe.ops.backends import sdpa
from tape_pe.ops.bias import PairBias, TensorBias
from tape_pe.ops.inputs import AttentionInputs

BLOCK = 128
"""Queries and keys of a block, which is computed as a whole or skipped."""
MIN_CHANNELS = 16
"""The kernels multiply tiles of at least so many channels."""
RECOMPILE_LIMIT = 64
"""Kernels that may be compiled; torch's own limit of 8 is soon reached by masks, biases, dtypes and gradients."""


def unavailable(device: torch.device) -> str | None:
    """Why it cannot run on `device`, or `None`."""
    if device.type == "cuda":
        return None
    reason = ", where the compiled flex_attention has no backward pass" if device.type == "cpu" else ""
    return f"runs on cuda, not on {device.type}{reason}"


def attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """See `tape_pe.ops.positional_attention`.

    What the kernels cannot do, or not well, goes to `sdpa`, which materializes a bias: less than a block of queries
    (cached decoding; `[H, Nq, Nk]` is linear in Nk then), heads of less than 16 channels, and fp64.
    """
    query, value = inputs.query, inputs.value
    too_narrow = min(query.shape[3], value.shape[3]) < MIN_CHANNELS
    if query.shape[2] < BLOCK or too_narrow or query.dtype == torch.float64:
        return sdpa.attention(inputs)
    if torch.compiler.is_compiling():
        return attend(*prepare(inputs))
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        return _compiled()(*prepare(inputs))


@functools.cache
def _compiled() -> Callable[[AttentionInputs, Tensor], tuple[Tensor, Tensor | None]]:
    return torch.compile(attend, fullgraph=True)


def prepare(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor]:
    """What has to be computed before the kernel is called, which reads no tensors that are yet to be computed.

    Args:
        inputs: as in `attention`.

    Returns:
        The inputs with a bias that the kernel can compute, and which of the keys the queries are, `[Nq]`: a tensor,
        since kernels cannot read a number that a compiler derives from symbolic sizes, such as Nk - Nq (pytorch issue
        182606).
    """
    bias, num_queries, num_keys = inputs.bias, inputs.query.shape[2], inputs.key.shape[2]
    if isinstance(bias, PairBias) and torch.is_grad_enabled() and not bias.gathers_gradients:
        bias = bias.materialize()
    if isinstance(bias, Tensor):
        bias = TensorBias(bias)
    columns = torch.arange(num_keys - num_queries, num_keys, device=inputs.query.device)
    return inputs._replace(bias=bias), columns


def attend(inputs: AttentionInputs, columns: Tensor) -> tuple[Tensor, Tensor | None]:
    """`attention`, to be compiled: called as it is, flex_attention builds all scores.

    Args:
        inputs: from `prepare`.
        columns: likewise.
    """
    query, key, value, state, _, bias, _, scale = inputs
    assert not isinstance(bias, Tensor)

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if bias is None else score + bias.at(batch, head, query, key)

    output = flex_attention(
        query,
        key,
        value if state is None else torch.cat([value, state], dim=-1),
        score_mod=None if bias is None else add_bias,
        block_mask=make_block_mask(inputs, columns),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    if state is None:
        return output, None
    return output[..., : value.shape[3]], output[..., value.shape[3] :]


def make_block_mask(inputs: AttentionInputs, columns: Tensor) -> BlockMask:
    """Who sees whom, by pairs of tokens and by pairs of blocks.

    `create_block_mask` would evaluate all N x N pairs. Here blocks are classified by their first and last token and
    their smallest and largest segment id: some blocks in which nobody sees anybody are computed nevertheless where
    ids do not ascend, which costs time and changes nothing.
    """
    segment_ids, causal = inputs.segment_ids, inputs.causal
    num_queries, num_keys = inputs.query.shape[2], inputs.key.shape[2]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = query if num_queries == num_keys else columns[query]
        seen = key <= column if causal else key >= 0
        if segment_ids is not None:
            ids = segment_ids[batch, key]
            seen = seen & (segment_ids[batch, column] == ids) & (ids >= 0)
        return seen

    query_first, key_first = columns[::BLOCK, None], torch.arange(0, num_keys, BLOCK, device=columns.device)
    query_last, key_last = query_first + BLOCK - 1, key_first + BLOCK - 1
    inside = (query_last < num_keys) & (key_last < num_keys)
    some = key_first <= query_last if causal else torch.ones_like(inside)
    whole = inside & (key_last <= query_first) if causal else inside
    some, whole = some[None, None], whole[None, None]  # [1, 1, blocks of queries, blocks of keys]
    if segment_ids is not None:
        query_ids = segment_ids[:, num_keys - num_queries :]
        query_least, query_most, query_alike = (x[:, None, :, None] for x in _block_ids(query_ids))
        key_least, key_most, key_alike = (x[:, None, None, :] for x in _block_ids(segment_ids))
        some = some & (query_least <= key_most) & (key_least <= query_most)
        whole = whole & query_alike & key_alike & (query_most == key_most)
    return BlockMask.from_kv_blocks(
        *_in_order(some & ~whole),
        *_in_order(some & whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(num_queries, num_keys),
    )


def _block_ids(segment_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest and the largest id of each block's real tokens, and whether all its tokens are real and have one id.

    Args:
        segment_ids: `[B, N]`.

    Returns:
        Three `[B, blocks]`; blocks of padding alone have a smallest id above all others.
    """
    blocks = pad(segment_ids, (0, -segment_ids.shape[1] % BLOCK), value=-1).unflatten(1, (-1, BLOCK))
    most = blocks.amax(dim=-1)
    least = blocks.where(blocks >= 0, torch.iinfo(blocks.dtype).max).amin(dim=-1)
    return least, most, (most >= 0) & (blocks.amin(dim=-1) == most)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys are set, and the indices of all, those first."""
    numbers = blocks.to(torch.int32)
    return numbers.sum(dim=-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
