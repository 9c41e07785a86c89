"""How much attention and states change when a text is moved: the published stability test.

A text of N tokens is read twice: as it is, at positions 0 to N - 1, and moved in one of two ways,

    front    three tokens stand in front of it (BOS; EOS where the tokenizer has no BOS), at positions 0 to 2
    shift    its position ids start at 3, and nothing else changes

For each layer, A being its attention weights, z the state that it reads and P[i, j] = sum_p Re(z[i, p] conj(z[j, p])),
both restricted to the N tokens of the text (which is why rows of A' sum to less than 1 with `front`):

    attention    mean over texts, heads and queries i of sum_j |A'[i, j] - A[i, j]|
    states       mean over texts and heads of ||P' - P|| / ||P||, Frobenius norms over pairs with j <= i

An encoding that is relative has 0 for `shift`, but for rounding: the states of other positions are other numbers, which
fp32 rounds by 6e-8 and bf16 by 4e-3. TAPE's states are rounded again in every layer, RoPE's only once. With `front`,
the first layer's states only stand at other positions; its attention differs by what goes to the added tokens.

The published test (Zhu et al., arXiv 2501.00712) has labels and figures, no formulas. Rows are not divided by what is
left of their sum, because the published first layer, which RoPE's positions alone cannot change, differs by 0.09.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tape_pe.analysis.capture import capture
from tape_pe.analysis.positions import attention_difference, inner_products, relative_difference

MOVED = 3
"""How many tokens are put in front, and what position ids start at."""


class Difference(NamedTuple):
    """What changed, layer by layer.

    Attributes:
        attention: mean sum of absolute differences of a query's attention weights.
        states: relative difference of inner products of states; `None` for layers without states.
    """

    attention: list[float]
    states: list[float | None]


class Stability(NamedTuple):
    """Both parts of the test."""

    front: Difference
    shift: Difference


def front_token(tokenizer: Any) -> tuple[int, str]:
    """The token to put in front, and whether it is `"BOS"` or, where the tokenizer has none, `"EOS"`.

    Raises:
        ValueError: it has neither.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id, "BOS"
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id, "EOS"
    raise ValueError("tokenizer has neither a BOS nor an EOS token; one is needed, to stand in front of texts")


def measure_stability(
    model: Any, rows: Tensor | Sequence[Sequence[int]], token: int, *, batch_size: int = 8
) -> Stability:
    """Runs the test; see this module's docstring for what is measured.

    Args:
        model: a causal language model that `capture` can read, in evaluation mode; its dtype is the precision measured.
        rows: `[texts, N]` token ids.
        token: the token to put in front.
        batch_size: texts read together.

    Raises:
        ValueError: there is no text, or the model does not hand out attention weights.
    """
    rows = torch.as_tensor(rows)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"rows has shape {list(rows.shape)}: [texts, N] with at least one text is needed")
    length = rows.shape[1]
    found: dict[str, list[Tensor]] = {"front": [], "shift": []}
    for batch in rows.to(model.device).split(batch_size):
        plain = capture(model, batch)
        added = torch.cat([batch.new_full((len(batch), MOVED), token), batch], dim=1)
        shifted = torch.arange(MOVED, MOVED + length, device=batch.device)[None]
        for name, moved in (("front", capture(model, added)), ("shift", capture(model, batch, shifted))):
            found[name].append(torch.stack([_differences(new, old) for new, old in zip(moved, plain, strict=True)]))
    differences = []
    for parts in found.values():
        means = torch.cat(parts, dim=-1).mean(dim=-1)  # [layers, 2]
        states = [None if value.isnan() else float(value) for value in means[:, 1]]
        differences.append(Difference(means[:, 0].tolist(), states))
    return Stability(*differences)


def _differences(moved: Any, plain: Any) -> Tensor:
    """Both measures of every text, `[2, B]` fp64; NaN where there is no state. A moved text is longer in front."""
    length = plain.attention.shape[-1]
    kept = moved.attention[..., -length:, -length:].double()
    attention = attention_difference(kept, plain.attention.double()).mean(dim=1)
    if plain.state is None:
        return torch.stack([attention, torch.full_like(attention, torch.nan)])
    products = [inner_products(view.state[..., -length:, :].double()) for view in (moved, plain)]
    return torch.stack([attention, relative_difference(*products).mean(dim=1)])


def first_tokens(tokenizer: Any, texts: Iterable[str], count: int, length: int) -> Tensor:
    """The first `length` tokens of each of the first `count` texts that have so many: `[count, length]`.

    Special tokens that the tokenizer adds by itself are left out.

    Raises:
        ValueError: fewer texts are long enough, or the tokenizer does not know a word, as those of tasks may.
    """
    rows: list[list[int]] = []
    for text in texts:
        # Long texts need not be read to their end: hardly a tokenizer has tokens of so many characters.
        if len(text) > (most := 32 * length):  # between words: a tokenizer of words knows whole ones alone
            text = re.sub(r"\S+\Z", "", text[:most]) or text[:most]
        try:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(f"text={text[:40]!r}: the tokenizer does not know all of it ({error})") from error
        rows += [ids[:length]] if len(ids) >= length else []
        if len(rows) == count:
            return torch.tensor(rows)
    raise ValueError(f"texts={count}: only {len(rows)} texts have {length} tokens")
