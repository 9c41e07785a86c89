"""State tracking: the running product of elements of a finite group.

The word problem of Liu et al. (arXiv 2210.10749) and Merrill et al. (arXiv 2404.08819):

    tokens   g1   g2      g3         ...
    answers  g1   g1 g2   g1 g2 g3   ...

Permutations are written as the images of 0, 1, 2, ...; the product `a b` applies a first. S5 and A5 are not solvable:
no fixed number of layers of a plain transformer tracks them at every length, as far as is known. Z60 is the control,
commutative and as large as A5.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from tape_pe.tasks.sequences import SequenceTask, Size, spread_lengths

GroupName = Literal["S3", "S5", "A5", "Z60"]


class Group(NamedTuple):
    """A finite group.

    Attributes:
        names: of its elements.
        products: element numbers, `products[a, b]` is `a b`, int64 `[n, n]`.
    """

    names: list[str]
    products: np.ndarray


@cache
def group(name: GroupName) -> Group:
    """The symmetric group S3 or S5, the alternating group A5, or the cyclic group Z60."""
    degree = int(name[1:])
    if name.startswith("Z"):
        numbers = np.arange(degree)
        return Group([str(n) for n in numbers], (numbers[:, None] + numbers) % degree)
    elements = [p for p in itertools.permutations(range(degree)) if name.startswith("S") or _is_even(p)]
    number = {element: index for index, element in enumerate(elements)}
    products = [[number[tuple(b[i] for i in a)] for b in elements] for a in elements]
    return Group(["".join(map(str, element)) for element in elements], np.array(products))


def _is_even(permutation: tuple[int, ...]) -> bool:
    pairs = itertools.combinations(permutation, 2)
    return sum(first > second for first, second in pairs) % 2 == 0


@dataclass(frozen=True)
class StateTracking(SequenceTask):
    """Options of the state tracking task.

    Args:
        group: S3, S5, A5 or Z60.
        max_length: training samples have 2..`max_length` elements.
        eval_max_length: evaluation goes to so many; default: four times `max_length`.
    """

    group: GroupName = "S3"
    max_length: int = 16
    eval_max_length: int | None = None

    evaluation_options: ClassVar[tuple[str, ...]] = (*SequenceTask.evaluation_options, "eval_max_length")
    aligned: ClassVar[bool] = True
    headline: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in get_args(GroupName):
            raise ValueError(f"task.group={self.group!r}: one of {', '.join(get_args(GroupName))} is needed")
        self.check_integers(max_length=2, **({} if self.eval_max_length is None else {"eval_max_length": 2}))

    def words(self) -> list[str]:
        return group(self.group).names

    def training_sizes(self) -> list[Size]:
        return [(length,) for length in range(2, self.max_length + 1)]

    def evaluation_sizes(self) -> list[Size]:
        return spread_lengths(2, self.max_length, self.eval_max_length or 4 * self.max_length)

    def number_of_samples(self, size: Size) -> float:
        return float(len(self.words())) ** min(size[0], 100)

    def random_numbers(self, size: Size) -> int:
        return size[0]

    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        products = group(self.group).products
        tokens = (bits % np.uint64(len(products))).astype(np.int64)
        answers = tokens.copy()
        for step in range(1, size[0]):
            answers[:, step] = products[answers[:, step - 1], tokens[:, step]]
        return tokens, answers
