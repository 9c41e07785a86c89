"""Language modelling on local text: perplexity at lengths below and beyond the one that was trained.

By default the text is the sources of the running Python's standard library, which every machine has. The tokenizer has
one token per byte, or is byte-pair encoding trained on the same text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tape_pe.language.generate import GREEDY, padding_id
from tape_pe.language.perplexity import perplexity
from tape_pe.language.stream import TokenStream
from tape_pe.language.text import STDLIB, has_splits, read_texts, token_blocks
from tape_pe.tasks.base import SampledDataset, Task
from tape_pe.tasks.counter import random_bits
from tape_pe.tasks.tokenizers import bpe_tokenizer, byte_tokenizer

TokenizerKind = Literal["byte", "bpe"]
_TRAINING = 1
_READ_AT_ONCE = 64  # less than so many tokens at the end of a text are not read


@dataclass(frozen=True)
class LanguageModelling(Task):
    """Options of language modelling.

    Args:
        data: texts to train on, see `tape_pe.language.text.read_texts`.
        eval_data: texts to score; default: `data`, where it has splits.
        tokens: `"byte"` for one token per byte, `"bpe"` for byte-pair encoding.
        vocab_size: of byte-pair encoding, at least 512.
        length: tokens of a training sample.
        train_tokens: of so many tokens samples are cut, at random places.
        streaming: read and tokenize `data` while training instead, all of it in its order: for texts too many to hold.
            Samples then are blocks that follow each other, see `tape_pe.language.stream`; `train_tokens` has no effect.
        eval_split: the split of `eval_data` to score, where it has splits.
        eval_tokens: scored tokens, from the beginning of `eval_data`.
        eval_factors: lengths to score, in units of `length`. Windows move on by half of what the model reads.
    """

    data: str = STDLIB
    eval_data: str | None = None
    eval_split: str = "test"
    tokens: TokenizerKind = "byte"
    vocab_size: int = 2048
    length: int = 256
    train_tokens: int = 4_000_000
    streaming: bool = False
    eval_tokens: int = 32_768
    eval_factors: Sequence[float] = (0.125, 0.25, 0.5, 1, 2, 4)

    evaluation_options: ClassVar[tuple[str, ...]] = ("eval_data", "eval_split", "eval_tokens", "eval_factors")

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 512), ("length", 8), ("train_tokens", self.length), ("eval_tokens", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"task.{name}={value!r}: an integer of at least {least} is needed")
        if self.tokens not in get_args(TokenizerKind):
            raise ValueError(f"task.tokens={self.tokens!r}: one of {', '.join(get_args(TokenizerKind))} is needed")
        if not self.eval_factors or not all(factor * self.length >= 2 for factor in self.eval_factors):
            raise ValueError(f"task.eval_factors={self.eval_factors!r}: lengths of at least 2 tokens are needed")
        if self.longest_scored > self.eval_tokens:
            raise ValueError(
                f"task.eval_tokens={self.eval_tokens}: at least the longest length, {self.longest_scored}, is needed"
            )
        if self.eval_data is None and not has_splits(self.data):
            raise ValueError(f"task.eval_data=None: {self.data!r} has no splits, so texts to score are needed")

    @property
    def eval_lengths(self) -> list[int]:
        """Lengths to score, in tokens."""
        return sorted({round(factor * self.length) for factor in self.eval_factors})

    @property
    def longest_scored(self) -> int:
        """See `Task.longest_scored`."""
        return max(self.eval_lengths)

    def check(self) -> None:
        """See `Task.check`: the texts to train on and to score are there, and long enough."""
        tokenizer = self.tokenizer()
        self._training_tokens(tokenizer, self.length)
        self._scored_tokens(tokenizer, self.longest_scored)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, whose first tokens are `<pad>` and `<eos>`; byte-pair encoding is trained, once per task."""
        return copy.deepcopy(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return byte_tokenizer() if self.tokens == "byte" else bpe_tokenizer(read_texts(self.data), self.vocab_size)

    @cached_property
    def training_tokens(self) -> np.ndarray:
        """The tokens that samples are cut from, at most `train_tokens`, uint16 or uint32 `[N]`.

        Raises:
            ValueError: the texts have fewer tokens than one sample.
        """
        return self._training_tokens(self.tokenizer(), self.train_tokens)

    def training_dataset(self, seed: int, size: int) -> TextDataset | TokenStream:
        """See `Task.training_dataset`; every token but a sample's first carries loss. A stream depends on no seed."""
        if self.streaming:
            return TokenStream(read_texts(self.data, pieces=True), self.tokenizer(), self.length)
        return TextDataset(self.training_tokens, self.length, seed, size)

    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """`samples`, and the `distinct_tokens` that they are cut from, where they are not streamed."""
        if self.streaming:
            return {"samples": size}
        return {"samples": size, "distinct_tokens": len(self.training_tokens)}

    def score(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 256, trained: Task | None = None
    ) -> dict[str, Any]:
        """Perplexity by sliding windows; every token but the first is scored exactly once.

        Returns:
            `lengths`, and for each `perplexity_by_length` and `bits_per_byte_by_length`; `perplexity` and
            `bits_per_byte` at the trained length and `perplexity_longest` at the longest one (`None` for the former
            where it is not among them); `trained_length`, `tokens` and `bytes` scored.
        """
        trained = trained if isinstance(trained, LanguageModelling) else self
        tokens = self._scored_tokens(tokenizer, self.eval_tokens)
        size = len(tokenizer.decode(tokens[1:].tolist(), skip_special_tokens=True).encode())
        ids = torch.from_numpy(tokens.astype(np.int64))
        by_length, bits = [], []
        for length in self.eval_lengths:
            rows = max(1, batch_size * self.length // (8 * length))
            found = perplexity(model, ids, length=length, stride=length // 2, batch_size=rows, progress=True)
            by_length.append(found.perplexity)
            bits.append(found.nll_sum / math.log(2) / size)
        here = self.eval_lengths.index(trained.length) if trained.length in self.eval_lengths else None
        return {
            "perplexity": None if here is None else by_length[here],
            "perplexity_longest": by_length[-1],
            "bits_per_byte": None if here is None else bits[here],
            "lengths": self.eval_lengths,
            "perplexity_by_length": by_length,
            "bits_per_byte_by_length": bits,
            "trained_length": trained.length,
            "tokens": len(tokens) - 1,
            "bytes": size,
        }

    def _training_tokens(self, tokenizer: PreTrainedTokenizerBase, count: int) -> np.ndarray:
        return _first_tokens("data", self.data, "train", tokenizer, count, least=self.length)

    def _scored_tokens(self, tokenizer: PreTrainedTokenizerBase, count: int) -> np.ndarray:
        name, data = ("data", self.data) if self.eval_data is None else ("eval_data", self.eval_data)
        return _first_tokens(name, data, self.eval_split, tokenizer, count, least=self.longest_scored)

    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """How the model goes on with a text, greedily, for at most 64 tokens.

        Raises:
            ValueError: `prompt` is empty.
        """
        if not prompt:
            raise ValueError("prompt='': some text is needed")
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=64, num_beams=1, pad_token_id=padding_id(tokenizer), **GREEDY)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class TextDataset(SampledDataset):
    """Pieces of a long text, cut at random places."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int, size: int) -> None:
        self.tokens, self.length, self.seed, self.size = tokens, length, seed, size

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """See `SampledDataset.sample`."""
        bits = random_bits(_TRAINING, self.seed, index, slots=1)[0, 0]
        start = int(bits % np.uint64(len(self.tokens) - self.length + 1))
        piece = self.tokens[start : start + self.length].astype(np.int64)
        return {"input_ids": piece, "labels": piece.copy()}


def _first_tokens(
    name: str, data: str, split: str, tokenizer: PreTrainedTokenizerBase, count: int, *, least: int
) -> np.ndarray:
    """The first `count` tokens of a text collection, or all; ValueError, naming the option, for less than `least`."""
    blocks = token_blocks(read_texts(data, split=split), tokenizer, _READ_AT_ONCE)
    found = list(islice(blocks, math.ceil(count / _READ_AT_ONCE)))
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    tokens = np.array(found, dtype=dtype).reshape(-1)[:count]
    if len(tokens) < least:
        raise ValueError(
            f"task.{name}={data!r}: has {len(tokens)} tokens; at least {least}, the longest length, are needed"
        )
    return tokens
