"""What tasks share whose samples are drawn by size and scored in one pass: every answer is a labelled token.

A subclass says which sizes there are and draws samples of one size; everything else is here: sample `i` of a training
set is a function of `(seed, i)`, evaluation samples are the same for every run and are kept out of training, and
scoring compares the most probable token with the label wherever there is one. Where all labels of a sample are right
so is a greedy continuation, so the share of such samples is greedy exact match.
"""

from __future__ import annotations

import abc
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
from tape_pe.tasks.tokenizers import EOS, PAD, word_tokenizer

Size = tuple[int, ...]
"""A sample's size: its length first (in the task's own unit), then whatever else the task varies."""

# Streams of random numbers, kept apart by their first key.
_TRAINING, _EVALUATION, _HASH = 1, 2, 3
# Of more different samples of a size, the ten millions of a long training meet an evaluation sample by chance of 1e-10.
_SURELY_APART = 2.0**64
# Logits of one forward pass: 256 MB in fp32.
_LOGITS = 1 << 26


@dataclass(frozen=True)
class SequenceTask(Task):
    """Options that all of these tasks have.

    Args:
        rows_per_size: evaluation samples of each size, all different (all there are, where these are fewer).
        eval_seed: seed of the evaluation samples, which are the same for every run.

    Evaluation samples are never trained on, except where a size has so few different ones that they would be used up:
    they are kept out of training if they are at most a quarter of these. `score` counts both kinds.

    Attributes:
        aligned: whether each token of the input has its own answer, at its own place. Otherwise answers follow the
            question and are read themselves while the next one is given, as in generation.
        asks_end: whether the end of a written answer is asked as well.
        headline: which accuracy counts, of `"token"`s or of whole `"sequence"`s.
    """

    rows_per_size: int = 200
    eval_seed: int = 0

    evaluation_options: ClassVar[tuple[str, ...]] = ("rows_per_size", "eval_seed")
    aligned: ClassVar[bool] = False
    asks_end: ClassVar[bool] = True
    headline: ClassVar[str] = "sequence"

    def __post_init__(self) -> None:
        self.check_integers(rows_per_size=1, eval_seed=0)

    def check_integers(self, **least: int) -> None:
        """Raises a ValueError unless these options are integers of at least so much."""
        for name, bound in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not bound <= value < 2**63:
                raise ValueError(f"task.{name}={value!r}: an integer of at least {bound} is needed")

    @abc.abstractmethod
    def words(self) -> list[str]:
        """The vocabulary, without padding and end of sequence."""

    @abc.abstractmethod
    def training_sizes(self) -> list[Size]:
        """Sizes of training samples, equally probable."""

    @abc.abstractmethod
    def evaluation_sizes(self) -> list[Size]:
        """Sizes of evaluation samples."""

    @abc.abstractmethod
    def number_of_samples(self, size: Size) -> float:
        """How many different samples of a size there are, or fewer."""

    @abc.abstractmethod
    def random_numbers(self, size: Size) -> int:
        """How many random numbers a sample of a size takes."""

    @abc.abstractmethod
    def draw(self, size: Size, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples of a size.

        Args:
            size: one of the sizes above.
            bits: uint64 `[B, random_numbers(size)]`.

        Returns:
            Tokens, as indices of `words`, int64 `[B, T]`; and answers, `[B, T]`: for an aligned task what is to be
            said at each token, otherwise the tokens to be written there; -1 where nothing is asked.
        """

    def describe(self, size: Size) -> str:
        """A size as people read it."""
        return str(size[0])

    def is_in_range(self, size: Size) -> bool:
        """Whether samples of a size are no harder than those trained on: here, no longer."""
        return size[0] <= max(size[0] for size in self.training_sizes())

    def is_trainable(self, size: Size) -> bool:
        """Whether a sample of an evaluation size could be drawn for training."""
        return size in self.training_sizes()

    @property
    def longest_scored(self) -> int:
        """See `Task.longest_scored`: the longest evaluation sample with its end of sequence."""
        zeros = {size: np.zeros((1, self.random_numbers(size)), np.uint64) for size in self.evaluation_sizes()}
        return max(self.encode(*self.draw(size, bits))[0].shape[1] for size, bits in zeros.items())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """One token per word."""
        return word_tokenizer(self.words())

    def encode(self, tokens: np.ndarray, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels of drawn samples, as models take them: a label is predicted at the token before it.

        Args:
            tokens: as `draw` returns them, `[B, T]`.
            answers: likewise.

        Returns:
            `input_ids` and `labels`, int64 `[B, T + 1]`: an end of sequence is added.
        """
        first = len((PAD, EOS))
        end = np.full((len(tokens), 1), first - 1)
        nothing = np.full((len(tokens), 1), IGNORED_LABEL)
        labels = np.where(answers >= 0, answers + first, IGNORED_LABEL)
        labels = np.hstack([nothing, labels] if self.aligned else [labels, end if self.asks_end else nothing])
        return np.hstack([tokens + first, end]), labels

    def training_dataset(self, seed: int, size: int) -> SequenceDataset:
        """See `Task.training_dataset`; the loss is on the answers only."""
        return SequenceDataset(self, seed, size)

    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """`samples` and `redrawn`: how many of them first hit an evaluation sample and were drawn again."""
        return self.training_dataset(seed, size).summary(chunk=4096)

    def evaluation_rows(self, size: Size) -> tuple[np.ndarray, np.ndarray]:
        """The different evaluation samples of a size, as `draw` returns them, `[R, T]`."""
        count = int(min(self.rows_per_size, self.number_of_samples(size)))
        tokens = answers = None
        drawn = 0
        while tokens is None or len(tokens) < count:
            index = np.arange(drawn, drawn + 2 * count)
            drawn += len(index)
            bits = random_bits(_EVALUATION, self.eval_seed, *size, index, slots=self.random_numbers(size))
            fresh = self.draw(size, bits)
            if tokens is not None and answers is not None:
                fresh = np.vstack([tokens, fresh[0]]), np.vstack([answers, fresh[1]])
            kept = np.sort(np.unique(fresh[0], axis=0, return_index=True)[1])
            tokens, answers = fresh[0][kept], fresh[1][kept]
        assert answers is not None
        return tokens[:count], answers[:count]

    @cached_property
    def held_out(self) -> np.ndarray:
        """Fingerprints of the evaluation samples that training never draws, uint64, sorted."""
        held_out = [np.zeros(0, np.uint64)]
        for size in self.evaluation_sizes():
            enough = 4 * self.rows_per_size <= self.number_of_samples(size) <= _SURELY_APART
            if enough and self.is_trainable(size):
                held_out.append(_fingerprints(self.evaluation_rows(size)[0]))
        return np.sort(np.concatenate(held_out))

    def is_held_out(self, size: Size, tokens: np.ndarray) -> np.ndarray:
        """Which samples of a training size must not be trained on, `[B]`."""
        if self.number_of_samples(size) > _SURELY_APART:
            return np.zeros(len(tokens), dtype=bool)
        return are_among(_fingerprints(tokens), self.held_out)

    @torch.inference_mode()
    def score(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 256, trained: Task | None = None
    ) -> dict[str, Any]:
        """Compares the most probable token with the label, wherever there is one.

        Returns:
            `accuracy_in_range` and `accuracy_out_of_range` (means over sizes, the latter of those harder than trained;
            `None` where there are none) of what counts in this task, tokens or whole samples; `accuracy` (mean over all
            sizes); by size, `sizes`, `token_accuracy` and `sequence_accuracy`, in 0..1; `trained_size`, the longest
            trained; `rows`, evaluation samples by size; `overlap_rows`, those of all sizes that training could draw as
            well.
        """
        trained = trained if isinstance(trained, SequenceTask) else self
        sizes = self.evaluation_sizes()
        tokens_right, rows_right, rows, overlap = [], [], [], 0
        for size in tqdm(sizes, desc=type(self).__name__, unit="size", disable=None):
            drawn = self.evaluation_rows(size)
            right, asked = _right_and_asked(model, *self.encode(*drawn), batch_size)
            tokens_right.append(float(right.sum() / asked.sum()))
            rows_right.append(float((right == asked).mean()))
            rows.append(len(asked))
            if trained.is_trainable(size) and trained.number_of_samples(size) <= _SURELY_APART:
                overlap += int((~trained.is_held_out(size, drawn[0])).sum())
        counted = np.array(tokens_right if self.headline == "token" else rows_right)
        inside = np.array([trained.is_in_range(size) for size in sizes])
        return {
            "accuracy": float(counted.mean()),
            "accuracy_in_range": float(counted[inside].mean()) if inside.any() else None,
            "accuracy_out_of_range": None if inside.all() else float(counted[~inside].mean()),
            "sizes": [list(size) for size in sizes],
            "size_names": [self.describe(size) for size in sizes],
            "token_accuracy": tokens_right,
            "sequence_accuracy": rows_right,
            "trained_size": max(size[0] for size in trained.training_sizes()),
            "rows": rows,
            "overlap_rows": overlap,
        }

    @torch.inference_mode()
    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """What the model says at each word of an aligned task's prompt, or writes behind another task's.

        Raises:
            ValueError: `prompt` is empty or has a word that the task does not know.
        """
        words, known = prompt.split(), set(self.words())
        if not words or not set(words) <= known:
            unknown = next((word for word in words if word not in known), "")
            raise ValueError(f"prompt={prompt!r}: {unknown!r} is not a word of this task, such as {self.words()[0]!r}")
        inputs = tokenizer(" ".join(words), return_tensors="pt").to(model.device)
        if self.aligned:
            said = model(input_ids=inputs["input_ids"]).logits[0].argmax(dim=-1)
        else:
            most = len(words) + 1 if self.asks_end else 1
            output = model.generate(**inputs, max_new_tokens=most, do_sample=False, num_beams=1)
            said = output[0, len(words) :]
        return str(tokenizer.decode(said, skip_special_tokens=True))


class SequenceDataset(BatchedDataset):
    """Training samples of a `SequenceTask`, made when asked for, a batch at a time; see `Task.training_dataset`."""

    def __init__(self, task: SequenceTask, seed: int, size: int) -> None:
        self.task, self.seed, self.size = task, seed, size
        self._sizes = task.training_sizes()

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Many samples at once; the data loader prefers this method."""
        index = np.asarray(indices)
        samples: list[dict[str, np.ndarray]] = [{} for _ in index]
        for size, places in self._by_size(index):
            drawn, attempt = self._draw(size, index[places], attempt=0), 1
            while len(redraw := np.flatnonzero(self.task.is_held_out(size, drawn[0]))):
                for present, fresh in zip(drawn, self._draw(size, index[places][redraw], attempt), strict=True):
                    present[redraw] = fresh
                attempt += 1
            for place, input_ids, labels in zip(places, *self.task.encode(*drawn), strict=True):
                samples[place] = {"input_ids": input_ids, "labels": labels}
        return samples

    def count_redrawn(self, index: np.ndarray) -> int:
        """How many of these samples first hit an evaluation sample and were drawn again."""
        total = 0
        for size, places in self._by_size(index):
            if self.task.number_of_samples(size) <= _SURELY_APART:
                tokens, _ = self._draw(size, index[places], attempt=0)
                total += int(self.task.is_held_out(size, tokens).sum())
        return total

    def _by_size(self, index: np.ndarray) -> list[tuple[Size, np.ndarray]]:
        """The sizes of these samples, each with the places in `index` that have it."""
        chosen = random_bits(_TRAINING, self.seed, index, slots=1)[:, 0] % np.uint64(len(self._sizes))
        return [(self._sizes[number], np.flatnonzero(chosen == number)) for number in np.unique(chosen).astype(int)]

    def _draw(self, size: Size, index: np.ndarray, attempt: int) -> tuple[np.ndarray, np.ndarray]:
        slots = self.task.random_numbers(size)
        return self.task.draw(size, random_bits(_TRAINING, self.seed, index, attempt, slots=slots))


def spread_lengths(least: int, trained: int, most: int, *, inside: int = 4, outside: int = 8) -> list[Size]:
    """Sizes to evaluate: some lengths up to the longest trained one, and some beyond it, up to `most`.

    Args:
        least: the shortest length.
        trained: the longest trained one.
        most: the longest one to evaluate.
        inside: how many lengths in `least`..`trained`, at most.
        outside: how many in `trained + 1`..`most`, at most.
    """
    lengths = set(np.linspace(least, min(trained, most), inside).round().astype(int).tolist())
    if most > trained:
        step = (most - trained) / outside
        lengths |= set(np.ceil(trained + step * np.arange(1, outside + 1)).astype(int).tolist())
    return [(length,) for length in sorted(lengths)]


def _fingerprints(tokens: np.ndarray) -> np.ndarray:
    """A 64-bit linear hash of each row and of its length, uint64 `[B]`."""
    weights = random_bits(_HASH, np.arange(tokens.shape[1]), slots=1)[:, 0]
    return ((tokens.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)


def _right_and_asked(
    model: Any, input_ids: np.ndarray, labels: np.ndarray, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many labels each row has, and how many of them are the model's most probable tokens; int64 `[B]` each."""
    batch_size = max(1, min(batch_size, _LOGITS // (input_ids.shape[1] * model.config.vocab_size)))
    right, asked = [], []
    for start in range(0, len(input_ids), batch_size):
        batch = torch.from_numpy(input_ids[start : start + batch_size]).to(model.device)
        said = model(input_ids=batch, use_cache=False).logits[:, :-1].argmax(dim=-1).cpu().numpy()
        wanted = labels[start : start + batch_size, 1:]
        right.append(((said == wanted) & (wanted != IGNORED_LABEL)).sum(axis=1))
        asked.append((wanted != IGNORED_LABEL).sum(axis=1))
    return np.concatenate(right), np.concatenate(asked)
