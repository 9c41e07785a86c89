"""Perplexity of long texts by sliding windows: every token but the first is scored exactly once."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

_LOSS_ROWS = 1024  # positions whose logits are turned into losses at once


class Perplexity(NamedTuple):
    """A model's perplexity on a text.

    Attributes:
        nll_sum: sum of the negative log-likelihoods of the scored tokens, in nats.
        tokens: number of scored tokens, one less than the text has.
        perplexity: `exp(nll_sum / tokens)`.
    """

    nll_sum: float
    tokens: int
    perplexity: float


class Window(NamedTuple):
    """One window: the model reads tokens `start` to `end - 1`, and the last `scored` of them are scored."""

    start: int
    end: int
    scored: int


def windows(num_tokens: int, length: int, stride: int) -> list[Window]:
    """The windows over a text, at multiples of `stride`; the last may be shorter than `length`.

    A token is scored in the first window that holds it, so it sees at least `length - stride` tokens before it, or all
    that there are.

    Args:
        num_tokens: N, tokens of the text.
        length: tokens that the model reads at once, at most N.
        stride: tokens from one window's start to the next one's, less than `length`.

    Raises:
        ValueError: a number is out of range.
    """
    if length < 2:
        raise ValueError(f"length={length}: it must be at least 2, so that there is a token to predict")
    if not 1 <= stride < length:
        raise ValueError(f"stride={stride}: it must be 1 to {length - 1}, less than the length, {length}")
    if num_tokens < length:
        raise ValueError(f"length={length}: the text has only {num_tokens} tokens")
    found = [Window(0, length, length - 1)]
    while found[-1].end < num_tokens:
        start, end = found[-1].start + stride, min(found[-1].end + stride, num_tokens)
        found.append(Window(start, end, end - found[-1].end))
    return found


def perplexity(
    model: Any,
    token_ids: Tensor | Sequence[int],
    *,
    length: int,
    stride: int,
    batch_size: int = 1,
    progress: bool = False,
) -> Perplexity:
    """Scores a text with a causal language model; see `windows` for what each token sees.

    Args:
        model: any causal language model of transformers; it runs in evaluation mode and is left as it was.
        token_ids: `[N]` the text.
        length: tokens that the model reads at once.
        stride: tokens scored in each window but the first. Smaller ones give more context and take longer.
        batch_size: windows read together.
        progress: whether to show a progress bar.

    Raises:
        ValueError: an argument is out of range; the message names it.
        FloatingPointError: the likelihood of a token is not finite.
    """
    ids = torch.as_tensor(token_ids)
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(f"token_ids has shape {list(ids.shape)} and dtype {ids.dtype}: it must be integers [N]")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: it must be at least 1")
    plan = windows(len(ids), length, stride)
    vocab_size = model.get_input_embeddings().num_embeddings
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token_ids go from {int(ids.min())} to {int(ids.max())}: the model knows 0..{vocab_size - 1}")
    was_training, total = model.training, 0.0
    model.eval()
    try:
        with torch.inference_mode(), tqdm(total=len(ids) - 1, unit="token", disable=None if progress else True) as bar:
            bar.set_description(f"perplexity at {length}")
            for batch in _batches(plan, batch_size):
                rows = torch.stack([ids[window.start : window.end] for window in batch]).to(model.device)
                total += nll_sum(model, rows, batch[0].scored)
                bar.update(sum(window.scored for window in batch))
    finally:
        model.train(was_training)
    tokens = len(ids) - 1
    if not total / tokens < math.log(sys.float_info.max):
        raise FloatingPointError(f"the mean negative log-likelihood at length {length} is {total / tokens}")
    return Perplexity(total, tokens, math.exp(total / tokens))


def _batches(plan: Sequence[Window], batch_size: int) -> list[list[Window]]:
    """Neighbouring windows of the same size, so that no row needs padding."""
    batches = []
    for _, group in groupby(plan, key=lambda window: (window.end - window.start, window.scored)):
        alike = list(group)
        batches += [alike[first : first + batch_size] for first in range(0, len(alike), batch_size)]
    return batches


def nll_sum(model: Any, rows: Tensor, scored: int) -> float:
    """Summed negative log-likelihood of the last tokens of rows, in nats, added up in fp64.

    Args:
        model: as in `perplexity`, in the mode that it is in.
        rows: `[B, N]` token ids, int64, on the model's device.
        scored: how many tokens of each row, at most N - 1. Their logits alone are computed where the model can do so,
            and few are turned into fp32 at once, since vocabularies are large.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrappers hide the signature
    fewer = "logits_to_keep" in inspect.signature(inner.forward).parameters
    logits = model(input_ids=rows, use_cache=False, **({"logits_to_keep": scored + 1} if fewer else {})).logits
    logits, targets = logits[:, -scored - 1 : -1], rows[:, -scored:]
    total = 0.0
    for part, wanted in zip(logits.split(_LOSS_ROWS, dim=1), targets.split(_LOSS_ROWS, dim=1), strict=True):
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), wanted.flatten(), reduction="none")
        total += losses.sum(dtype=torch.float64).item()
    return total
