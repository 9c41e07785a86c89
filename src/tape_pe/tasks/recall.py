"""Multi-query associative recall (Arora et al., arXiv 2312.04927): keys with values, then queries for them.

    k1 v1 k2 v2 ... kn vn  _ _ k2 _ k1 _ ...

Behind the pairs every key stands once more, at a random place, and is to be answered by its value; `_` is filler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tape_pe.tasks.sequences import SequenceTask, Size

_FILLER = 0


@dataclass(frozen=True)
class AssociativeRecall(SequenceTask):
    """Options of associative recall.

    Args:
        vocab_size: number of words, an even number: half of them are keys, half values.
        train_cases: lengths and numbers of pairs of training samples, drawn with equal probability.
        eval_cases: those of evaluation samples.
    """

    vocab_size: int = 8192
    train_cases: Sequence[Sequence[int]] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
    eval_cases: Sequence[Sequence[int]] = (
        (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256),
    )  # fmt: skip

    evaluation_options: ClassVar[tuple[str, ...]] = (*SequenceTask.evaluation_options, "eval_cases")
    aligned: ClassVar[bool] = True
    headline: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers(vocab_size=4)
        if self.vocab_size % 2:
            raise ValueError(f"task.vocab_size={self.vocab_size}: an even number is needed")
        for name in ("train_cases", "eval_cases"):
            for case in getattr(self, name):
                if len(case) != 2 or not all(isinstance(number, int) for number in case):
                    raise ValueError(f"task.{name}: {case!r} is not a length and a number of pairs")
                length, pairs = case
                if not 1 <= pairs <= min(self.vocab_size // 2, length // 3):
                    raise ValueError(
                        f"task.{name}: {list(case)} has {pairs} pairs: 1 to a third of its length, no more than the "
                        f"{self.vocab_size // 2} keys, are needed"
                    )
            if not getattr(self, name):
                raise ValueError(f"task.{name}=[]: at least one case is needed")

    def words(self) -> list[str]:
        half = self.vocab_size // 2
        return ["_", *(f"k{n}" for n in range(half)), *(f"v{n}" for n in range(half))]

    def training_sizes(self) -> list[Size]:
        return [(length, pairs) for length, pairs in self.train_cases]

    def evaluation_sizes(self) -> list[Size]:
        return [(length, pairs) for length, pairs in self.eval_cases]

    def describe(self, size: Size) -> str:
        return f"{size[0]} tokens, {size[1]} pairs"

    def is_in_range(self, size: Size) -> bool:
        return any(size[0] <= length and size[1] <= pairs for length, pairs in self.train_cases)

    def number_of_samples(self, size: Size) -> float:
        """Keys in order, a value for each, and a place for each query."""
        (length, pairs), half = size, self.vocab_size // 2
        number = math.perm(half, pairs) * half**pairs * math.perm(length - 2 * pairs, pairs)
        return float(min(number, 2**100))

    def random_numbers(self, size: Size) -> int:
        """For the order of keys, the values, and the places of queries."""
        return self.vocab_size // 2 + size[1] + (size[0] - 2 * size[1])

    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (length, pairs), half, rows = size, self.vocab_size // 2, np.arange(len(bits))[:, None]
        for_keys, for_values, for_places = np.split(bits, [half, half + pairs], axis=1)
        # The `pairs` smallest of random numbers are a random choice, in random order.
        keys = 1 + np.argsort(for_keys, axis=1)[:, :pairs]
        values = 1 + half + (for_values % np.uint64(half)).astype(np.int64)
        places = 2 * pairs + np.argsort(for_places, axis=1)[:, :pairs]
        tokens = np.full((len(bits), length), _FILLER)
        answers = np.full((len(bits), length), -1)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        tokens[rows, places], answers[rows, places] = keys, values
        return tokens, answers
