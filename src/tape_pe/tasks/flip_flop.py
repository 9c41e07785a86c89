"""Flip-flop language modelling (Liu et al., NeurIPS 2023, arXiv 2306.00946): a bit that is written, ignored and read.

    w 1 i 0 i 1 r 1 w 0 i 1 r 0

A bit follows each instruction. `w` writes it, `i` means nothing, and behind `r` stands the bit last written: that is
what is asked. The first instruction writes and the last one reads; of the others a share ignores, and the rest
writes or reads with equal probability. With few ignored instructions (dense) a model must not be distracted by the many
old bits, with many (sparse) it must look far back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tape_pe.tasks.sequences import SequenceTask, Size

_WORDS = ["w", "i", "r", "0", "1"]
_WRITE, _IGNORE, _READ, _ZERO = range(4)


@dataclass(frozen=True)
class FlipFlop(SequenceTask):
    """Options of the flip-flop task.

    Args:
        length: instructions of a training sample, each with its bit.
        ignore_percent: how many of a hundred instructions are ignored in training.
        eval_lengths: instructions of evaluation samples; default: 1, 2 and 4 times `length`.
        eval_ignore_percents: percentages in evaluation.

    The score is the accuracy of reads; one minus it is the published error rate. Samples are in range where they are no
    longer than trained and have the trained percentage.
    """

    length: int = 32
    ignore_percent: int = 80
    eval_lengths: list[int] | None = None
    eval_ignore_percents: tuple[int, ...] | list[int] = (80, 98, 10)

    evaluation_options: ClassVar[tuple[str, ...]] = (
        *SequenceTask.evaluation_options, "eval_lengths", "eval_ignore_percents",
    )  # fmt: skip
    asks_end: ClassVar[bool] = False
    headline: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers(length=3)
        for name, values, least, most in (
            ("ignore_percent", [self.ignore_percent], 0, 99),
            ("eval_lengths", self.eval_lengths or [], 3, 2**31),
            ("eval_ignore_percents", self.eval_ignore_percents, 0, 99),
        ):
            if any(isinstance(v, bool) or not isinstance(v, int) or not least <= v <= most for v in values):
                raise ValueError(f"task.{name}={getattr(self, name)!r}: integers in {least}..{most} are needed")

    def words(self) -> list[str]:
        return _WORDS

    def training_sizes(self) -> list[Size]:
        return [(self.length, self.ignore_percent)]

    def evaluation_sizes(self) -> list[Size]:
        lengths = self.eval_lengths or [self.length, 2 * self.length, 4 * self.length]
        return [(length, percent) for percent in self.eval_ignore_percents for length in lengths]

    def number_of_samples(self, size: Size) -> float:
        """The bits of ignored and written instructions are free: at least half of them, nearly always."""
        return 2.0 ** min(size[0] // 2, 100)

    def describe(self, size: Size) -> str:
        return f"{size[0]} instructions, {size[1]} % ignored"

    def is_in_range(self, size: Size) -> bool:
        return size[0] <= self.length and size[1] == self.ignore_percent

    def is_trainable(self, size: Size) -> bool:
        """Whatever the percentage: the same samples come with all of them, some more often."""
        return size[0] == self.length

    def random_numbers(self, size: Size) -> int:
        return 2 * size[0]

    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        length, percent = size
        chance = (bits[:, :length] % np.uint64(200)).astype(np.int64)
        instructions = np.where(chance < 2 * percent, _IGNORE, np.where(chance % 2, _WRITE, _READ))
        instructions[:, 0], instructions[:, -1] = _WRITE, _READ
        data = (bits[:, length:] >> np.uint64(63)).astype(np.int64)
        last_write = np.maximum.accumulate(np.where(instructions == _WRITE, np.arange(length), 0), axis=1)
        reads = instructions == _READ
        data = np.where(reads, np.take_along_axis(data, last_write, axis=1), data) + _ZERO
        tokens = np.stack([instructions, data], axis=2).reshape(len(bits), 2 * length)
        answers = np.stack([np.full_like(data, -1), np.where(reads, data, -1)], axis=2).reshape(tokens.shape)
        return tokens, answers
