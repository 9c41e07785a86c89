"""Addition with reversed digits: `rev(a)+rev(b)=rev(a+b)` and end of sequence, one token per character.

The least significant digit comes first, so every digit of the sum follows from what was read and written before it.
Operand lengths are uniform in 1..`max_digits`; testing goes to `eval_max_digits`, longer than anything trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from tape_pe.tasks.base import IGNORED_LABEL, BatchedDataset, Task, are_among
from tape_pe.tasks.counter import random_bits
from tape_pe.tasks.tokenizers import character_tokenizer

CHARACTERS = "0123456789+="
# Streams of random numbers, kept apart by their first key.
_TRAINING, _EVALUATION, _HASH = 1, 2, 3


@dataclass(frozen=True)
class Addition(Task):
    """Options of the addition task.

    Args:
        max_digits: training operands have 1..`max_digits` digits.
        eval_max_digits: evaluation operands have 1..`eval_max_digits` digits; default: twice `max_digits`.
        pairs_per_cell: distinct evaluation pairs for each pair of lengths (all of them where there are fewer).
        eval_seed: seed of the evaluation pairs, which are the same for every run.

    Evaluation pairs are never trained on, except in cells so small that they would be used up: a cell keeps its
    evaluation pairs out of training if these are at most a quarter of its pairs. `score` counts both kinds.
    """

    max_digits: int = 8
    eval_max_digits: int | None = None
    pairs_per_cell: int = 100
    eval_seed: int = 0

    evaluation_options: ClassVar[tuple[str, ...]] = ("eval_max_digits", "pairs_per_cell", "eval_seed")

    def __post_init__(self) -> None:
        for name, least in (("max_digits", 1), ("eval_max_digits", 1), ("pairs_per_cell", 1), ("eval_seed", 0)):
            value = getattr(self, name)
            if value is None and name == "eval_max_digits":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise ValueError(f"task.{name} is {value!r}; it must be an integer of at least {least}")

    @property
    def grid_digits(self) -> int:
        """Side of the evaluation grid, in digits."""
        return self.eval_max_digits or 2 * self.max_digits

    @property
    def longest_scored(self) -> int:
        """See `Task.longest_scored`: two operands, their sum, which has a digit more, two signs and the end."""
        return 3 * self.grid_digits + 4

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The character tokenizer: digits, `+` and `=`."""
        return character_tokenizer(CHARACTERS)

    def training_dataset(self, seed: int, size: int) -> AdditionDataset:
        """See `Task.training_dataset`; the loss is on the sum's digits and on the end of sequence only."""
        return AdditionDataset(self, seed, size)

    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """`samples` and `redrawn`: how many of them first hit an evaluation pair and were drawn again."""
        return self.training_dataset(seed, size).summary(chunk=65536)

    def evaluation_pairs(self, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
        """The distinct evaluation pairs of a cell; with more `pairs_per_cell` the first ones stay the same.

        Returns:
            Digits of both operands, least significant first, int64 [P, n] and [P, m].
        """
        count = min(self.pairs_per_cell, _cell_size(n, m))
        pairs = np.zeros((0, n + m), dtype=np.int64)
        drawn = 0
        while len(pairs) < count:
            index = np.arange(drawn, drawn + 4 * count)
            drawn += len(index)
            bits = random_bits(_EVALUATION, self.eval_seed, n, m, index, slots=n + m)
            lengths = np.full(len(index), n), np.full(len(index), m)
            fresh = np.hstack([_digits(bits[:, :n], lengths[0]), _digits(bits[:, n:], lengths[1])])
            pairs = np.vstack([pairs, fresh])
            pairs = pairs[np.sort(np.unique(pairs, axis=0, return_index=True)[1])]
        return pairs[:count, :n], pairs[:count, n:]

    @cached_property
    def held_out(self) -> np.ndarray:
        """Sorted fingerprints of the evaluation pairs that training never draws, uint64."""
        return np.sort(
            np.concatenate([np.zeros(0, np.uint64), *self._fingerprints(self.max_digits, only_held_out=True)])
        )

    def _fingerprints(self, side: int, only_held_out: bool) -> list[np.ndarray]:
        cells = [(n, m) for n in range(1, side + 1) for m in range(1, side + 1)]
        if only_held_out:
            cells = [(n, m) for n, m in cells if 4 * self.pairs_per_cell <= _cell_size(n, m)]
        return [_pair_fingerprint(*self.evaluation_pairs(n, m)) for n, m in cells]

    def score(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 256, trained: Task | None = None
    ) -> dict[str, Any]:
        """Greedy exact match of the whole sum with its end of sequence, for every pair of operand lengths.

        A sum that is too long, too short or not ended is wrong.

        Returns:
            `exact_match` (mean over the grid's cells), `exact_match_in_range` (cells that both operands were trained
            on), `exact_match_out_of_range` (the others; `None` where there are none), all in 0..1; `grid` (row n-1,
            column m-1: operands of n and m digits), `trained_digits`, `pairs_per_cell`, `overlap_pairs` (evaluation
            pairs that training could draw as well) and `held_out_pairs` (in range, and kept out of training).
        """
        trained = trained if isinstance(trained, Addition) else self
        side = self.grid_digits
        problems = [
            (n, m, *problem) for n in range(1, side + 1) for m in range(1, side + 1) for problem in self._texts(n, m)
        ]
        # Rows of a batch decode together until the longest sum ends: put equal lengths side by side.
        problems.sort(key=lambda problem: (max(problem[:2]), min(problem[:2])))
        right, total = np.zeros((side, side)), np.zeros((side, side))
        with tqdm(total=len(problems), desc="addition", unit="pair", disable=None) as progress:
            for start in range(0, len(problems), batch_size):
                batch = problems[start : start + batch_size]
                matches = _exact_matches(model, tokenizer, [p[2] for p in batch], [p[3] for p in batch])
                for (n, m, _, _), match in zip(batch, matches, strict=True):
                    right[n - 1, m - 1] += match
                    total[n - 1, m - 1] += 1
                progress.update(len(batch))
        grid = right / total
        inside = np.zeros((side, side), dtype=bool)
        inside[: trained.max_digits, : trained.max_digits] = True
        in_range = np.concatenate(self._fingerprints(min(side, trained.max_digits), only_held_out=False))
        held_out = int(are_among(in_range, trained.held_out).sum())
        return {
            "exact_match": float(grid.mean()),
            "exact_match_in_range": float(grid[inside].mean()),
            "exact_match_out_of_range": None if inside.all() else float(grid[~inside].mean()),
            "grid": grid.tolist(),
            "trained_digits": trained.max_digits,
            "pairs_per_cell": self.pairs_per_cell,
            "overlap_pairs": len(in_range) - held_out,
            "held_out_pairs": held_out,
        }

    def _texts(self, n: int, m: int) -> list[tuple[str, str]]:
        """Prompt `rev(a)+rev(b)=` and sum `rev(a+b)` of each evaluation pair of a cell."""
        a, b = self.evaluation_pairs(n, m)
        sums, lengths = _add(a, b, np.full(len(a), n), np.full(len(b), m))
        rows = zip(a, b, sums, lengths, strict=True)
        return [(f"{_text(x)}+{_text(y)}=", _text(z[:length])) for x, y, z, length in rows]

    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """What the model takes for the sum: `"123+45="` gives `"168"` if it is right.

        Raises:
            ValueError: `prompt` is not two numbers with a plus sign between them.
        """
        match = re.fullmatch(r"\s*(0|[1-9][0-9]*)\s*\+\s*(0|[1-9][0-9]*)\s*=?\s*", prompt)
        if match is None:
            raise ValueError(f"prompt is {prompt!r}; it must be two numbers without leading zeros, such as '123+45='")
        a, b = match.groups()
        limit = max(len(a), len(b)) + 2
        new_tokens = _generate(model, tokenizer, [f"{a[::-1]}+{b[::-1]}="], limit)[0].tolist()
        if tokenizer.eos_token_id in new_tokens:
            new_tokens = new_tokens[: new_tokens.index(tokenizer.eos_token_id)]
        return str(tokenizer.decode(new_tokens, skip_special_tokens=True))[::-1]


class AdditionDataset(BatchedDataset):
    """Training samples of the addition task, made when asked for, a batch at a time; see `Task.training_dataset`."""

    def __init__(self, task: Addition, seed: int, size: int) -> None:
        self.task, self.seed, self.size = task, seed, size
        tokenizer = task.tokenizer()
        self._ids = np.array(tokenizer.convert_tokens_to_ids(list(CHARACTERS)))
        self._eos = np.array([tokenizer.eos_token_id])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Many samples at once; the data loader prefers this method."""
        a, b, n, m = self.operands(np.asarray(indices))
        sums, lengths = _add(a, b, n, m)
        plus, equals = self._ids[10:11], self._ids[11:12]
        a, b, sums = self._ids[a], self._ids[b], self._ids[sums]
        samples = []
        for row in range(len(a)):
            prompt = (a[row, : n[row]], plus, b[row, : m[row]], equals)
            input_ids = np.concatenate((*prompt, sums[row, : lengths[row]], self._eos))
            labels = input_ids.copy()
            labels[: n[row] + m[row] + 2] = IGNORED_LABEL
            samples.append({"input_ids": input_ids, "labels": labels})
        return samples

    def operands(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Digits (least significant first, zeros behind the last one) and lengths of the samples' operands.

        Args:
            index: sample numbers, int64 [B].

        Returns:
            Digits a and b, int64 [B, max_digits], and lengths n and m, int64 [B].
        """
        lengths = random_bits(_TRAINING, self.seed, index, slots=2) % np.uint64(self.task.max_digits)
        n, m = (lengths.astype(np.int64) + 1).T
        a, b = self._draw(index, n, m, attempt=1)
        redraw = np.flatnonzero(self._is_held_out(a, b, n, m))
        attempt = 2
        while len(redraw):
            a[redraw], b[redraw] = self._draw(index[redraw], n[redraw], m[redraw], attempt)
            redraw = redraw[self._is_held_out(a[redraw], b[redraw], n[redraw], m[redraw])]
            attempt += 1
        return a, b, n, m

    def count_redrawn(self, index: np.ndarray) -> int:
        """How many of these samples first hit an evaluation pair and were drawn again."""
        lengths = random_bits(_TRAINING, self.seed, index, slots=2) % np.uint64(self.task.max_digits)
        n, m = (lengths.astype(np.int64) + 1).T
        return int(self._is_held_out(*self._draw(index, n, m, attempt=1), n, m).sum())

    def _draw(self, index: np.ndarray, n: np.ndarray, m: np.ndarray, attempt: int) -> tuple[np.ndarray, np.ndarray]:
        width = self.task.max_digits
        bits = random_bits(_TRAINING, self.seed, index, attempt, slots=2 * width)
        return _digits(bits[:, :width], n), _digits(bits[:, width:], m)

    def _is_held_out(self, a: np.ndarray, b: np.ndarray, n: np.ndarray, m: np.ndarray) -> np.ndarray:
        return are_among(_pair_fingerprint(a, b, n, m), self.task.held_out)


def _cell_size(n: int, m: int) -> int:
    """Number of pairs of an n-digit and an m-digit number."""
    return (10 if n == 1 else 9 * 10 ** (n - 1)) * (10 if m == 1 else 9 * 10 ** (m - 1))


def _digits(bits: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Uniform numbers of exactly these lengths, least significant digit first, zeros behind; int64 [B, W]."""
    column, last = np.arange(bits.shape[1]), lengths[:, None] - 1
    digits = (bits % np.uint64(10)).astype(np.int64)
    leading = 1 + (bits % np.uint64(9)).astype(np.int64)
    digits = np.where((column == last) & (last > 0), leading, digits)
    return np.where(column <= last, digits, 0)


def _add(a: np.ndarray, b: np.ndarray, n: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Digits of the sums, int64 [B, W + 1], and their lengths, int64 [B]."""
    width = max(a.shape[1], b.shape[1])
    sums = np.zeros((len(a), width + 1), dtype=np.int64)
    sums[:, : a.shape[1]] += a
    sums[:, : b.shape[1]] += b
    for column in range(width):
        sums[:, column + 1] += sums[:, column] // 10
        sums[:, column] %= 10
    longer = np.maximum(n, m)
    return sums, longer + (np.take_along_axis(sums, longer[:, None], axis=1)[:, 0] > 0)


def _pair_fingerprint(
    a: np.ndarray, b: np.ndarray, n: np.ndarray | None = None, m: np.ndarray | None = None
) -> np.ndarray:
    """A 64-bit linear hash of each pair, the same whatever the number of zeros behind the digits; uint64 [B]."""
    total = np.zeros(len(a), dtype=np.uint64)
    for operand, (digits, lengths) in enumerate(((a, n), (b, m))):
        lengths = np.full(len(digits), digits.shape[1]) if lengths is None else lengths
        columns = np.hstack([lengths[:, None], digits]).astype(np.uint64)
        weights = random_bits(_HASH, operand, np.arange(columns.shape[1]), slots=1)[:, 0]
        total += (columns * weights).sum(axis=1, dtype=np.uint64)
    return total


def _text(digits: np.ndarray) -> str:
    return "".join(map(str, digits))


def _generate(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int) -> torch.Tensor:
    """Greedy continuations of at most `limit` tokens, padded behind the end of sequence; int64 [B, <= limit]."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=limit,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return output[:, inputs["input_ids"].shape[1] :].cpu()


def _exact_matches(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str], answers: list[str]
) -> list[bool]:
    """Whether each answer with its end of sequence is what the model writes first."""
    expected = [[*tokenizer(answer)["input_ids"], tokenizer.eos_token_id] for answer in answers]
    new_tokens = _generate(model, tokenizer, prompts, max(map(len, expected))).tolist()
    return [row[: len(right)] == right for row, right in zip(new_tokens, expected, strict=True)]
