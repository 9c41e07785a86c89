"""Prompts and answers of SCROLLS as tokens, and how likely a model finds answers.

    query + empty line + document, cut to fit + "\\n\\nAnswer:" + " " + output + end of sequence

Only the document is cut, never the query before it, nor what follows it: at its end, as the benchmark's baselines do,
or in its middle. Parts are tokenised one by one and joined as tokens, so that lengths are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tape_pe.tasks.scrolls_data import Example
from tape_pe.tasks.tokenizers import leading_tokens

Truncation = Literal["end", "middle"]

ANSWER = "\n\nAnswer:"
"""Stands between document and output."""

_CHARACTERS = 16  # so many characters have more than one token; of longer texts not everything is tokenised


class PromptMaker:
    """Makes prompts and answers of exactly known numbers of tokens.

    Args:
        tokenizer: what it puts before every text, such as a BOS token, is put before a prompt.
        truncation: which part of a long document goes.
        output_tokens: most tokens of an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, truncation: Truncation, output_tokens: int) -> None:
        self.tokenizer, self.truncation, self.output_tokens = tokenizer, truncation, output_tokens
        self._leading, self._trailing = leading_tokens(tokenizer, ANSWER), self._ids(ANSWER)

    def _ids(self, text: str) -> list[int]:
        # verbose would warn of texts longer than the model's length, which are cut here
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def check(self, examples: Sequence[Example], length: int) -> None:
        """Raises ValueError unless every query fits into `length` tokens with an output and one token of document."""
        for query, example_id in {example.query: example.id for example in examples}.items():
            fixed = len(self._leading) + len(self._ids(query)) + len(self._trailing)
            if (least := fixed + 1 + self.output_tokens) > length:
                raise ValueError(
                    f"length={length}: example {example_id!r} asks with {fixed} tokens, so that with an output of "
                    f"{self.output_tokens} (max_new_tokens) at least {least} are needed"
                )

    def prompt(self, example: Example, length: int) -> tuple[list[int], bool]:
        """A prompt of at most `length` tokens, and whether the document was cut for it."""
        before = [*self._leading, *self._ids(example.query)]
        document, cut = self._document(example.document, length - len(before) - len(self._trailing))
        return [*before, *document, *self._trailing], cut

    def answer(self, output: str) -> tuple[list[int], bool]:
        """The tokens of an output and its end of sequence; and whether it was cut, then without end of sequence."""
        ids = [*self._ids(f" {output}"), self.tokenizer.eos_token_id]
        return ids[: self.output_tokens], len(ids) > self.output_tokens

    def _document(self, text: str, room: int) -> tuple[list[int], bool]:
        """At most `room` tokens of a document, and whether that is less than all."""
        enough = _CHARACTERS * room
        ids: list[int] = []
        if len(text) > 2 * enough:  # tokenising it all would cost most of the time
            first, last = self._ids(text[:enough]), self._ids(text[-enough:])
            ids = first + last if min(len(first), len(last)) >= room else []
        ids = ids or self._ids(text)
        if len(ids) <= room:
            return ids, False
        after = room // 2 if self.truncation == "middle" else 0
        return ids[: room - after] + ids[len(ids) - after :], True


@torch.inference_mode()
def log_likelihoods(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """Log-likelihood of each answer behind a prompt, in nats; float64 `[A]`.

    Args:
        model: a causal language model of transformers' form.
        prompt: its token ids, at least one.
        answers: token ids of the answers, at least one each.
        rows: answers that are read together.
    """
    found = []
    for start in range(0, len(answers), rows):
        batch = answers[start : start + rows]
        longest = max(map(len, batch))
        # Padded on the right with a token that nothing before it sees, so that no mask is needed.
        padded = torch.tensor([[*prompt, *answer, *[prompt[0]] * (longest - len(answer))] for answer in batch])
        padded = padded.to(model.device)
        logits = model(input_ids=padded, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, padded[:, -longest:, None])[..., 0]
        found += [float(row[: len(answer)].double().sum()) for row, answer in zip(chosen, batch, strict=True)]
    return np.array(found)
