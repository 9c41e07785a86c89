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
