"""Masks of transformers, as arguments of this package's attention: segments where they say the same, else a bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tape_pe.convert.masks import visibility
from tape_pe.ops import positional_attention

N = 12
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
PADDING = torch.tensor([[0, 0, 0] + [1] * (N - 3), [1] * N], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7 + [2], [0] * 12])


def same_document(ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


MASKS = {  # the mask, whether it is segments, whether later keys may be cut off
    "causal": (CAUSAL.expand(2, 1, N, N), True, True),
    "padding left": (CAUSAL & PADDING[:, None, None], True, True),
    "padding right": (CAUSAL & PADDING.flip(1)[:, None, None], False, True),
    "documents": (CAUSAL & same_document(DOCUMENTS), True, True),
    "window": ((CAUSAL & CAUSAL.tril(-4).logical_not()).expand(2, 1, N, N), False, True),
    "prefix": ((CAUSAL | (torch.arange(N) < 5)).expand(2, 1, N, N), False, False),
    "one token": (PADDING[:, None, None], False, True),
    "last tokens": ((CAUSAL & PADDING[:, None, None])[:, :, -5:], False, True),
    "static cache": (
        torch.cat([CAUSAL[-4:-2], torch.zeros(2, 3, dtype=torch.bool)], 1).expand(2, 1, 2, 15),
        False,
        True,
    ),
    "numbers": (torch.randn(2, 4, N, N, generator=torch.Generator().manual_seed(3)), False, False),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_says_what_the_mask_says(name):
    mask, is_segments, is_causal = MASKS[name]
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = mask.shape[2:]
    query = torch.randn(2, 4, num_queries, 8, dtype=torch.float64, generator=generator)
    key, value, state = torch.randn(3, 2, 4, num_keys, 8, dtype=torch.float64, generator=generator)
    seen = visibility(mask, query.dtype)
    assert (seen.segment_ids is not None) == is_segments
    assert (seen.bias is not None) == (not is_segments)
    assert seen.causal == is_causal
    result = positional_attention(query, key, value, state, **seen._asdict())
    additive = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    for actual, values in zip(result, (value, state), strict=True):
        expected = F.scaled_dot_product_attention(query, key, values, attn_mask=additive.double()).nan_to_num(0.0)
        torch.testing.assert_close(actual, expected)


def test_is_read_once_and_again_after_a_change():
    mask = (CAUSAL & PADDING[:, None, None])[:, :, -5:].clone()
    first = visibility(mask, torch.float32)
    assert visibility(mask, torch.float32) is first
    mask[0, 0, :, 5] = False
    assert (visibility(mask, torch.float32).bias[0, 0, :, 5] == -torch.inf).all()
    assert visibility(mask, torch.float64).bias.dtype == torch.float64
    with torch.inference_mode():
        mask = mask.clone()
        visibility(mask, torch.float32)
        mask[0, 0, :, 6] = False
        assert (visibility(mask, torch.float32).bias[0, 0, :, 6] == -torch.inf).all()
