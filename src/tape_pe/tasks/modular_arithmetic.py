"""Modular arithmetic without brackets (Deletang et al., ICLR 2023, arXiv 2207.02098): `3 + 4 * 2 - 1 = 0` modulo 5.

A product binds more tightly than a sum. Expressions of few numbers are trained on, longer ones tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tape_pe.tasks.sequences import SequenceTask, Size, spread_lengths

_OPERATORS = ["+", "-", "*"]
_EQUALS = "="


@dataclass(frozen=True)
class ModularArithmetic(SequenceTask):
    """Options of modular arithmetic.

    Args:
        modulus: results and numbers are in 0..`modulus` - 1.
        max_numbers: training expressions have 2..`max_numbers` numbers.
        eval_max_numbers: evaluation goes to so many; default: twice `max_numbers`.
    """

    modulus: int = 5
    max_numbers: int = 20
    eval_max_numbers: int | None = None

    evaluation_options: ClassVar[tuple[str, ...]] = (*SequenceTask.evaluation_options, "eval_max_numbers")

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {} if self.eval_max_numbers is None else {"eval_max_numbers": 2}
        self.check_integers(modulus=2, max_numbers=2, **limits)

    def words(self) -> list[str]:
        return [*(str(n) for n in range(self.modulus)), *_OPERATORS, _EQUALS]

    def training_sizes(self) -> list[Size]:
        return [(numbers,) for numbers in range(2, self.max_numbers + 1)]

    def evaluation_sizes(self) -> list[Size]:
        return spread_lengths(2, self.max_numbers, self.eval_max_numbers or 2 * self.max_numbers)

    def number_of_samples(self, size: Size) -> float:
        return float(3 * self.modulus) ** min(size[0] - 1, 40) * self.modulus

    def random_numbers(self, size: Size) -> int:
        return 2 * size[0] - 1

    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = (bits[:, 0::2] % np.uint64(self.modulus)).astype(np.int64)
        operators = (bits[:, 1::2] % np.uint64(3)).astype(np.int64)
        # A sum of terms; `term` is the last one, which a product still changes.
        total, term = np.zeros(len(bits), np.int64), numbers[:, 0]
        for index in range(operators.shape[1]):
            operator, number = operators[:, index], numbers[:, index + 1]
            is_product = operator == _OPERATORS.index("*")
            total = np.where(is_product, total, total + term)
            term = np.where(is_product, term * number, np.where(operator == 0, number, -number)) % self.modulus
        result = (total + term) % self.modulus
        tokens = np.empty((len(bits), 2 * size[0] + 1), np.int64)
        tokens[:, 0:-2:2], tokens[:, 1:-2:2] = numbers, self.modulus + operators
        tokens[:, -2], tokens[:, -1] = self.modulus + len(_OPERATORS), result
        answers = np.full_like(tokens, -1)
        answers[:, -1] = result
        return tokens, answers
