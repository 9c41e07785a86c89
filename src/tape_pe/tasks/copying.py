"""Copying and reversing a string, trained on short strings and tested on longer ones.

copy      a c b > a c b <eos>
reverse   a c b > b c a <eos>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tape_pe.tasks.sequences import SequenceTask, Size, spread_lengths


@dataclass(frozen=True)
class Copy(SequenceTask):
    """Options of copying.

    Args:
        symbols: number of different symbols.
        max_length: training strings have 1..`max_length` symbols.
        eval_max_length: evaluation goes to so many; default: twice `max_length`.

    The score is the share of strings that are written entirely right, with the end of sequence.
    """

    symbols: int = 26
    max_length: int = 20
    eval_max_length: int | None = None

    evaluation_options: ClassVar[tuple[str, ...]] = (*SequenceTask.evaluation_options, "eval_max_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers(symbols=2, max_length=1, **({} if self.eval_max_length is None else {"eval_max_length": 1}))

    def words(self) -> list[str]:
        return [">", *(f"s{n}" for n in range(self.symbols))]

    def training_sizes(self) -> list[Size]:
        return [(length,) for length in range(1, self.max_length + 1)]

    def evaluation_sizes(self) -> list[Size]:
        return spread_lengths(1, self.max_length, self.eval_max_length or 2 * self.max_length)

    def number_of_samples(self, size: Size) -> float:
        return float(self.symbols) ** min(size[0], 100)

    def random_numbers(self, size: Size) -> int:
        return size[0]

    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        string = 1 + (bits % np.uint64(self.symbols)).astype(np.int64)
        tokens = np.hstack([string, np.zeros((len(bits), 1), np.int64), self.written(string)])
        answers = tokens.copy()
        answers[:, : size[0] + 1] = -1
        return tokens, answers

    def written(self, string: np.ndarray) -> np.ndarray:
        """What has to be written behind a string `[B, n]`."""
        return string


@dataclass(frozen=True)
class Reverse(Copy):
    """Options of reversing; see `Copy`."""

    def written(self, string: np.ndarray) -> np.ndarray:
        """What has to be written behind a string `[B, n]`."""
        return string[:, ::-1]
