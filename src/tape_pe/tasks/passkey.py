"""Passkey retrieval: a number hidden in filler text, asked for at the end of a prompt of an exact number of tokens.

After Mohtashami and Jaggi (arXiv 2305.16300). Prompts are made for the model's own tokenizer: the fixed parts are
tokenised one by one and joined as tokens, so a prompt has exactly the length that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from tape_pe.language.generate import continue_greedily
from tape_pe.tasks.counter import random_bits
from tape_pe.tasks.tokenizers import leading_tokens

LARGEST_KEY = 50_000
NEW_TOKENS = 10
"""The first number has to begin within this many new tokens."""
_KEY, _DEPTH = 11, 12  # streams of random numbers
_ATTEMPTS = 1000


@dataclass(frozen=True)
class PasskeyTexts:
    """The words of a prompt, in their order; `{key}` stands for the number. They are joined as they are.

    The defaults are the published words, part by part on lines of their own. Layout matters: with blanks instead of
    line ends, SmolLM2-135M-Instruct answered none of 12 prompts whose key stood right before the question.

    Attributes:
        introduction: the beginning, which says what is wanted.
        filler: sentences that are repeated until the prompt has its length.
        key_sentence: the sentence that holds the number, put between two sentences of the filler.
        question: the end of the prompt.
        answer: what the model should write next.
    """

    introduction: str = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there.\n"
    )
    filler: str = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    key_sentence: str = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    question: str = "\nWhat is the pass key? The pass key is"
    answer: str = " {key}"

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            with_key = name in ("key_sentence", "answer")
            if with_key is not ("{key}" in (text := getattr(self, name))):
                rule = "must hold {key}" if with_key else "must not hold {key}"
                raise ValueError(f"texts.{name}={text!r}: it {rule}")
        if not self.filler.strip():
            raise ValueError(f"texts.filler={self.filler!r}: it must hold words")

    def mention(self, number: int) -> bool:
        """Whether the digits of `number` occur in the words around the key, also where two fillers meet."""
        return any(str(number) in text for text in (self.introduction, 2 * self.filler, self.question))


class Prompt(NamedTuple):
    """One question.

    Attributes:
        input_ids: the whole prompt, of exactly the length that was asked for.
        answer_ids: the tokens that should follow.
        key: the number.
        depth: share of the filler that stands before the key.
    """

    input_ids: list[int]
    answer_ids: list[int]
    key: int
    depth: float


class Answer(NamedTuple):
    """What a model answered.

    Attributes:
        text: its new tokens, as text.
        exact_match: whether it began with the answer's tokens, and not with a longer number.
        first_number: whether the first run of digits in `NEW_TOKENS` new tokens is the key.
    """

    text: str
    exact_match: bool
    first_number: bool


class PasskeyPrompts:
    """Makes prompts for a tokenizer.

    Args:
        tokenizer: the model's tokenizer. What it puts before every text, such as a BOS token, is put before a prompt.
        texts: the words.

    Raises:
        ValueError: the tokenizer does not know the words, or joins the question's last letters with the answer's first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: PasskeyTexts | None = None) -> None:
        self.tokenizer, self.texts = tokenizer, texts or PasskeyTexts()
        sentences = re.split(r"(?<=[.!?\n])(?=\s)", self.texts.filler)
        self._sentences = [ids for sentence in sentences if (ids := self._ids(sentence))]
        self._introduction = leading_tokens(tokenizer, self.texts.filler) + self._ids(self.texts.introduction)
        self._question = self._ids(self.texts.question)
        self._answer(LARGEST_KEY)
        if not self._sentences:
            raise ValueError(f"texts.filler={self.texts.filler!r}: the tokenizer makes no tokens of it")

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(f"texts: the tokenizer does not know {text!r}: {error}") from error

    def shortest(self, key: int = LARGEST_KEY) -> int:
        """Tokens of a prompt without any filler."""
        return len(self._introduction) + len(self._key_sentence(key)) + len(self._question)

    @property
    def most_new_tokens(self) -> int:
        """Tokens that are written behind a prompt, at most."""
        return _new_tokens(self._answer(LARGEST_KEY))

    def check_length(self, length: int, key: int = LARGEST_KEY) -> None:
        """Raises ValueError if no prompt of `length` tokens can hold the key."""
        if length < (least := self.shortest(key)):
            raise ValueError(f"length={length}: a prompt with key {key} takes {least} tokens without any filler")

    def make(self, length: int, depth: float, key: int) -> Prompt:
        """A prompt of exactly `length` tokens.

        Args:
            length: its tokens.
            depth: where the key is, from 0 (before all filler) to 1 (behind it); moved to the nearest end of a
                sentence.
            key: the number, which must not occur in the filler.

        Raises:
            ValueError: the prompt cannot fit, or an argument is out of range.
        """
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth}: it must be from 0 to 1")
        if key < 0 or self.texts.mention(key):
            raise ValueError(f"key={key}: it must be a number that the words around it do not hold")
        self.check_length(length, key)
        room = length - self.shortest(key)
        filler, ends = self._filler(room)
        before = min(ends, key=lambda end: abs(end - depth * room))
        ids = self._introduction + filler[:before] + self._key_sentence(key) + filler[before:] + self._question
        return Prompt(ids, self._answer(key), key, before / room if room else 0.0)

    def from_seed(self, length: int, depth: float | None, seed: int) -> Prompt:
        """The prompt of a seed, which draws the key from 1..50000 and, where `depth` is `None`, the depth.

        The same seed has the same key and depth at every length.

        Raises:
            ValueError: the prompt cannot fit, or the filler holds nearly every number.
        """
        if depth is None:
            depth = int(random_bits(_DEPTH, seed, slots=1)[0, 0]) / 2**64
        return self.make(length, depth, self.key_of(seed))

    def key_of(self, seed: int) -> int:
        """The key of a seed: the first number drawn that does not occur in the words around it."""
        for number in random_bits(_KEY, seed, slots=_ATTEMPTS)[0]:
            if not self.texts.mention(key := 1 + int(number) % LARGEST_KEY):
                return key
        raise ValueError(f"texts.filler holds each of {_ATTEMPTS} keys that were drawn; it must hold fewer numbers")

    def _key_sentence(self, key: int) -> list[int]:
        return self._ids(self.texts.key_sentence.replace("{key}", str(key)))

    def _answer(self, key: int) -> list[int]:
        whole = self._ids(self.texts.question + self.texts.answer.replace("{key}", str(key)))
        if whole[: len(self._question)] != self._question:
            raise ValueError(
                f"texts.question={self.texts.question!r}: the tokenizer joins its end with the answer, "
                f"{self.texts.answer!r}: move blanks from the one to the other"
            )
        return whole[len(self._question) :]

    def _filler(self, room: int) -> tuple[list[int], list[int]]:
        """`room` tokens of filler, the last sentence cut where it does not fit, and the places between sentences."""
        filler: list[int] = []
        ends = [0]
        while len(filler) < room:
            filler += self._sentences[(len(ends) - 1) % len(self._sentences)]
            ends.append(min(len(filler), room))
        return filler[:room], ends


def first_number(text: str) -> str | None:
    """The first run of digits in a text."""
    match = re.search(r"[0-9]+", text)
    return match[0] if match else None


def answer_prompts(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    progress: tqdm | None = None,
) -> list[Answer]:
    """Lets a model answer prompts, greedily, and scores the answers by both protocols.

    Args:
        model: anything with `generate` and `device` as in transformers.
        tokenizer: the tokenizer that the prompts were made with.
        prompts: all of one length.
        batch_size: prompts answered together.
        progress: a bar to move on, by one for each prompt.
    """
    answers = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        longest = max(_new_tokens(prompt.answer_ids) for prompt in batch)
        written = continue_greedily(model, tokenizer, [prompt.input_ids for prompt in batch], longest)
        for prompt, new in zip(batch, written, strict=True):
            answers.append(score(tokenizer, prompt, new))
        if progress is not None:
            progress.update(len(batch))
    return answers


def _new_tokens(answer_ids: Sequence[int]) -> int:
    """How many tokens to write where `answer_ids` are expected: one more shows whether the number ends there."""
    return max(NEW_TOKENS, 1 + len(answer_ids))


def score(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, new_ids: Sequence[int]) -> Answer:
    """Scores the tokens that a model wrote behind a prompt."""
    key, expected = str(prompt.key), prompt.answer_ids
    whole = tokenizer.decode(new_ids, skip_special_tokens=True)
    text = tokenizer.decode(new_ids[:NEW_TOKENS], skip_special_tokens=True)
    exact = list(new_ids[: len(expected)]) == expected and first_number(whole) == key
    return Answer(text, exact, first_number(text) == key)
