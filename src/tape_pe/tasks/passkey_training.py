"""Passkey retrieval for models trained from scratch: short words, one token per character, prompts of many lengths.

    the grass is green. the sky is blue. key 4711. the sun is yellow. the grass ... key? 4711<eos>

Prompts and scores are those of `tape_pe.tasks.passkey`, with these words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from tape_pe.tasks.base import IGNORED_LABEL, SampledDataset, Task
from tape_pe.tasks.counter import random_bits
from tape_pe.tasks.passkey import LARGEST_KEY, PasskeyPrompts, PasskeyTexts, answer_prompts
from tape_pe.tasks.tokenizers import character_tokenizer

_TRAINING = 1

SHORT_TEXTS = PasskeyTexts(
    introduction="",
    filler=" the grass is green. the sky is blue. the sun is yellow. here we go. there and back again.",
    key_sentence=" key {key}.",
    question=" key?",
    answer=" {key}",
)


@dataclass(frozen=True)
class Passkey(Task):
    """Options of passkey retrieval.

    Args:
        length: training prompts have up to so many tokens, which are characters; all lengths that can hold a key are
            equally probable.
        eval_lengths: lengths of evaluation prompts; default: 1/2, 1, 2 and 4 times `length`.
        seeds: evaluation prompts of each length; each draws a key and a depth, and no such key is trained on.
        texts: the words.
    """

    length: int = 128
    eval_lengths: list[int] | None = None
    seeds: int = 50
    texts: PasskeyTexts = field(default=SHORT_TEXTS)

    evaluation_options: ClassVar[tuple[str, ...]] = ("eval_lengths", "seeds")

    def __post_init__(self) -> None:
        if not isinstance(self.texts, PasskeyTexts):
            object.__setattr__(self, "texts", PasskeyTexts(**self.texts))
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or not 1 <= self.seeds <= LARGEST_KEY // 2:
            raise ValueError(f"task.seeds={self.seeds!r}: an integer in 1..{LARGEST_KEY // 2} is needed")
        least = self.prompts.shortest()
        for name, lengths in (("length", [self.length]), ("eval_lengths", self.eval_lengths or [])):
            if any(isinstance(length, bool) or not isinstance(length, int) or length < least for length in lengths):
                raise ValueError(
                    f"task.{name}={getattr(self, name)!r}: integers of at least {least}, a prompt's least, are needed"
                )

    @property
    def tested_lengths(self) -> list[int]:
        """Lengths of evaluation prompts."""
        least = max(self.length // 2, self.prompts.shortest())
        return self.eval_lengths or [least, self.length, 2 * self.length, 4 * self.length]

    @property
    def longest_scored(self) -> int:
        """See `Task.longest_scored`: the longest prompt, and what is written behind it."""
        return max(self.tested_lengths) + self.prompts.most_new_tokens

    @cached_property
    def prompts(self) -> PasskeyPrompts:
        """Makes prompts of these words."""
        return PasskeyPrompts(self.tokenizer(), self.texts)

    @cached_property
    def held_out(self) -> frozenset[int]:
        """Keys that are never trained on."""
        return frozenset(self.prompts.key_of(seed) for seed in range(self.seeds))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """One token for each character of the words, and for the digits."""
        characters = set("".join(asdict(self.texts).values()).replace("{key}", "")) | set("0123456789")
        return character_tokenizer("".join(sorted(characters)))

    def training_dataset(self, seed: int, size: int) -> PasskeyDataset:
        """See `Task.training_dataset`; the loss is on the key's digits and the end of sequence only."""
        return PasskeyDataset(self, seed, size)

    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """`samples`, and the keys that were kept out of them for the evaluation."""
        return {"samples": size, "held_out_keys": len(self.held_out)}

    def score(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 256, trained: Task | None = None
    ) -> dict[str, Any]:
        """Both protocols of `tape_pe.tasks.passkey`, for each length.

        Returns:
            `exact_match_in_range` and `exact_match_out_of_range` (means over lengths, the latter of those longer than
            trained; `None` where there are none) and `exact_match` (over all); by length, `lengths`,
            `exact_match_by_length` and `first_number_by_length`, in 0..1; `trained_length`, `seeds`.
        """
        trained = trained if isinstance(trained, Passkey) else self
        lengths, prompts = self.tested_lengths, PasskeyPrompts(tokenizer, self.texts)
        exact, first = [], []
        with tqdm(total=len(lengths) * self.seeds, desc="passkey", unit="prompt", disable=None) as progress:
            for length in lengths:
                questions = [prompts.from_seed(length, None, seed) for seed in range(self.seeds)]
                answers = answer_prompts(model, tokenizer, questions, batch_size=batch_size, progress=progress)
                exact.append(float(np.mean([answer.exact_match for answer in answers])))
                first.append(float(np.mean([answer.first_number for answer in answers])))
        inside = np.array([length <= trained.length for length in lengths])
        return {
            "exact_match": float(np.mean(exact)),
            "exact_match_in_range": float(np.array(exact)[inside].mean()) if inside.any() else None,
            "exact_match_out_of_range": None if inside.all() else float(np.array(exact)[~inside].mean()),
            "lengths": lengths,
            "exact_match_by_length": exact,
            "first_number_by_length": first,
            "trained_length": trained.length,
            "seeds": self.seeds,
        }

    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """What the model writes behind a prompt.

        Raises:
            ValueError: `prompt` is empty or has characters that the words do not have.
        """
        unknown = sorted(set(prompt) - set(tokenizer.get_vocab()))
        if not prompt or unknown:
            raise ValueError(f"prompt={prompt!r}: only characters of the task's words can be read, not {unknown}")
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False, num_beams=1)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class PasskeyDataset(SampledDataset):
    """Training prompts with their answers, made when asked for; see `Task.training_dataset`."""

    def __init__(self, task: Passkey, seed: int, size: int) -> None:
        self.task, self.seed, self.size = task, seed, size
        self._eos = task.tokenizer().eos_token_id

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """See `SampledDataset.sample`."""
        numbers = random_bits(_TRAINING, self.seed, index, slots=64)[0].tolist()
        lengths, depth, keys = numbers[0], numbers[1], [1 + number % LARGEST_KEY for number in numbers[2:]]
        key = next(key for key in keys if key not in self.task.held_out and not self.task.texts.mention(key))
        least = self.task.prompts.shortest()
        prompt = self.task.prompts.make(least + lengths % (self.task.length - least + 1), depth / 2**64, key)
        answer: Sequence[int] = [*prompt.answer_ids, self._eos]
        input_ids = np.array([*prompt.input_ids, *answer], dtype=np.int64)
        labels = input_ids.copy()
        labels[: len(prompt.input_ids)] = IGNORED_LABEL
        return {"input_ids": input_ids, "labels": labels}
