"""What every task provides: seeded training samples, a tokenizer and a score."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

IGNORED_LABEL = -100
"""Label of a token that carries no loss, as everywhere in transformers."""

TaskType = TypeVar("TaskType", bound="Task")


@dataclass(frozen=True)
class Task(abc.ABC):
    """A task is a frozen dataclass: its fields are its options, its methods make data and scores.

    Options that only matter when scoring are listed in `evaluation_options`; they may be changed after training.
    """

    evaluation_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_options(cls: type[TaskType], options: Mapping[str, Any]) -> TaskType:
        """Builds the task, refusing options that it does not have.

        Raises:
            ValueError: an unknown option, or a value out of range; the message names it.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"task.{unknown[0]} is not an option of {cls.__name__}; the options are {known}")
        return cls(**options)

    def with_evaluation_options(self: TaskType, options: Mapping[str, Any]) -> TaskType:
        """The same task with other `evaluation_options`.

        Raises:
            ValueError: an option that training depends on, or that does not exist.
        """
        fixed = sorted(set(options) - set(self.evaluation_options))
        if fixed:
            allowed = list(self.evaluation_options)
            raise ValueError(f"task.{fixed[0]} cannot be changed for an evaluation; only {allowed} can")
        return replace(self, **options)

    @abc.abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A fresh tokenizer of the task; it pads on the left, as generation needs."""

    def check(self) -> None:  # noqa: B027 - most tasks have refused everything by now
        """Refuses what cannot work and only the data show; called before anything is written.

        Raises:
            ValueError, FileNotFoundError: the data cannot be read or do not fit; the message says which and why.
        """

    @property
    def longest_scored(self) -> int | None:
        """Most tokens that a model has to read at once in `score`; `None` where that is not known before."""
        return None

    @abc.abstractmethod
    def training_dataset(self, seed: int, size: int) -> Dataset:
        """`size` training samples, sample `i` being a function of `(seed, i)` alone.

        A sample is a dict of two int64 arrays of the same length [T]: `input_ids` and `labels`, the latter being
        `IGNORED_LABEL` where the token carries no loss. Labels are not shifted: the model does that.
        """

    @abc.abstractmethod
    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """Facts about those training samples worth keeping with the run, as plain JSON values."""

    @abc.abstractmethod
    def score(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 256,
        trained: Task | None = None,
    ) -> dict[str, Any]:
        """Scores a causal language model.

        Args:
            model: anything with `generate` and `device` as in transformers.
            tokenizer: the tokenizer that it was trained with.
            batch_size: prompts decoded together.
            trained: the task as it was trained, where its options differ from this one's; default: this one.

        Returns:
            Metrics as plain JSON values.
        """

    @abc.abstractmethod
    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """The model's answer to one prompt in the task's everyday notation.

        Raises:
            ValueError: `prompt` is not a question of this task.
        """


class SampledDataset(Dataset, abc.ABC):
    """Training samples made when asked for; see `Task.training_dataset`.

    Attributes:
        seed: seed of the samples.
        size: how many there are.
    """

    seed: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of a dataset of {self.size}")
        return self.sample(index)

    @abc.abstractmethod
    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`, which is in range."""


class BatchedDataset(SampledDataset):
    """Samples made a batch at a time, and drawn again where they hit an evaluation sample."""

    @abc.abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Many samples at once; the data loader prefers this method."""

    @abc.abstractmethod
    def count_redrawn(self, index: np.ndarray) -> int:
        """How many of these samples first hit an evaluation sample and were drawn again."""

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """See `SampledDataset.sample`."""
        return self.__getitems__([index])[0]

    def summary(self, chunk: int) -> dict[str, Any]:
        """`samples` and `redrawn`, counted in chunks of so many samples."""
        starts = range(0, self.size, chunk)
        redrawn = sum(self.count_redrawn(np.arange(start, min(start + chunk, self.size))) for start in starts)
        return {"samples": self.size, "redrawn": redrawn}


def are_among(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which of `values` `[B]` are among `known`, which is sorted and may be far longer; bool `[B]`."""
    places = np.searchsorted(known, values)
    found = places < len(known)
    found[found] = known[places[found]] == values[found]
    return found


class RightPaddingCollator:
    """Stacks samples of unequal length, padding on the right.

    There is no attention mask: no token of a causal model looks at the padding behind it, and masks cost time.

    Args:
        pad_token_id: token put behind the shorter rows; their labels are `IGNORED_LABEL` there.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels`, int64 [B, T]."""
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        shape = (len(samples), int(lengths.max()))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for row, sample in enumerate(samples):
            input_ids[row, : lengths[row]] = sample["input_ids"]
            labels[row, : lengths[row]] = sample["labels"]
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
