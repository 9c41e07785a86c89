"""The SCROLLS benchmark (arXiv 2201.03533) for causal models: seven data sets of long inputs and short outputs.

Prompts and samples are those of `tape_pe.tasks.scrolls_prompts`, scores those of `tape_pe.tasks.scrolls_metrics`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from tape_pe.language.generate import continue_greedily
from tape_pe.tasks.base import IGNORED_LABEL, SampledDataset, Task
from tape_pe.tasks.counter import random_bits
from tape_pe.tasks.scrolls_data import HUB_NAME, SPLITS, Example, has_split, read_examples, split_input
from tape_pe.tasks.scrolls_metrics import DATASETS, check_metric, score_predictions
from tape_pe.tasks.scrolls_metrics import Dataset as DatasetName
from tape_pe.tasks.scrolls_prompts import PromptMaker, Truncation, log_likelihoods
from tape_pe.tasks.tokenizers import bpe_tokenizer, byte_tokenizer

EvaluationSplit = Literal["validation", "test"]

NEW_TOKENS: dict[str, int] = {
    "qasper": 128,
    "contract_nli": 16,
    "narrative_qa": 64,
    "quality": 96,
    "qmsum": 256,
    "summ_screen_fd": 384,
    "gov_report": 768,
}
"""Default of `max_new_tokens`, for vocabularies of usual language models. GovReport's outputs have about 600 tokens on
average, and lm-evaluation-harness recommends 1024 for them; the default leaves room for a document at length 1024."""

_TRAINING = 1
_TOKENS_AT_ONCE = 1 << 16  # tokens of prompts that are read together


@dataclass(frozen=True)
class Scrolls(Task):
    """Options of SCROLLS.

    Args:
        dataset: the data set, by the benchmark's name.
        data: a folder with `DATASET/SPLIT.jsonl`, `SPLIT.jsonl` or `DATASET.zip` in it, such a zip file, or the name of
            a data set on the hub that has these zip files.
        tokens: `"byte"` for one token per byte, `"bpe"` for byte-pair encoding of the training inputs, or the folder or
            hub name of a tokenizer, such as the folder of a run.
        vocab_size: of `"bpe"`, at least 512.
        length: most tokens of a training sample, with its output.
        max_new_tokens: most tokens of an output with its end of sequence, trained on or written; longer ones are cut
            for training. Default: 16 (contract_nli) to 768 (gov_report); bytes need more.
        truncation: which part of a long document goes: its `"end"`, or its `"middle"`.
        eval_split: the split to score.
        eval_length: tokens of an evaluation prompt and its answer; default: `length`.
        eval_examples: score so many examples, evenly spaced; default: all.

    No example is trained on whose id or input is in another split; `training_summary` says how many were dropped.
    """

    dataset: DatasetName = "qasper"
    data: str = HUB_NAME
    tokens: str = "byte"
    vocab_size: int = 2048
    length: int = 1024
    max_new_tokens: int | None = None
    truncation: Truncation = "end"
    eval_split: EvaluationSplit = "validation"
    eval_length: int | None = None
    eval_examples: int | None = None

    evaluation_options: ClassVar[tuple[str, ...]] = ("eval_split", "eval_length", "eval_examples")

    def __post_init__(self) -> None:
        for name, choices in (
            ("dataset", DATASETS),
            ("truncation", get_args(Truncation)),
            ("eval_split", get_args(EvaluationSplit)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"task.{name}={getattr(self, name)!r}: one of {', '.join(choices)} is needed")
        for name, least in (
            ("vocab_size", 512),
            ("length", 8),
            ("max_new_tokens", 2),
            ("eval_length", 8),
            ("eval_examples", 1),
        ):
            value = getattr(self, name)
            optional = name not in ("vocab_size", "length")
            if not (optional and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"task.{name}={value!r}: an integer of at least {least} is needed")
        for name, length in (("length", self.length), ("eval_length", self.scored_length)):
            if self.output_tokens >= length:
                raise ValueError(
                    f"task.{name}={length}: more than the {self.output_tokens} tokens of an output, max_new_tokens, "
                    f"are needed"
                )
        if not self.tokens:
            raise ValueError("task.tokens='': byte, bpe, or the folder or name of a tokenizer is needed")

    @property
    def scored_length(self) -> int:
        """Tokens of an evaluation prompt and its answer."""
        return self.length if self.eval_length is None else self.eval_length

    @property
    def longest_scored(self) -> int:
        """See `Task.longest_scored`: `scored_length`."""
        return self.scored_length

    @property
    def output_tokens(self) -> int:
        """Most tokens of an output with its end of sequence."""
        return NEW_TOKENS[self.dataset] if self.max_new_tokens is None else self.max_new_tokens

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; byte-pair encoding is trained here, others are loaded."""
        if self.tokens == "byte":
            return byte_tokenizer()
        if self.tokens == "bpe":
            return bpe_tokenizer((example.input for example in self.training_split[0]), self.vocab_size)
        from tape_pe.language.pretrained import load_tokenizer  # costs a second

        tokenizer = load_tokenizer(self.tokens)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"task.tokens={self.tokens!r}: a tokenizer with an end of sequence is needed")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "left"
        return tokenizer

    def check(self) -> None:
        """See `Task.check`: reads the data, and refuses queries that are too long and splits that cannot be scored."""
        check_metric(self.dataset)
        prompts = PromptMaker(self.tokenizer(), self.truncation, self.output_tokens)
        prompts.check(self.training_split[0], self.length)
        prompts.check(self.evaluation_examples, self.scored_length)

    @cached_property
    def training_split(self) -> tuple[list[Example], int]:
        """Training examples with outputs whose id and input are in no other split; and how many were dropped for it."""
        ids: set[str] = set()
        inputs: set[bytes] = set()
        for split in SPLITS[1:]:
            if has_split(self.data, self.dataset, split):
                for example in read_examples(self.data, self.dataset, split):
                    ids.add(example.id)
                    inputs.add(_digest(example))
        examples = [example for example in read_examples(self.data, self.dataset, SPLITS[0]) if example.outputs]
        kept = [example for example in examples if example.id not in ids and _digest(example) not in inputs]
        if not kept:
            raise ValueError(f"task.data={self.data!r}: of {len(examples)} training examples none is in no other split")
        return kept, len(examples) - len(kept)

    @cached_property
    def evaluation_examples(self) -> list[Example]:
        """The examples to score, with their outputs."""
        examples = read_examples(self.data, self.dataset, self.eval_split)
        if self.eval_examples is not None and self.eval_examples < len(examples):
            places = np.linspace(0, len(examples) - 1, self.eval_examples).round().astype(int)
            examples = [examples[place] for place in places]
        if missing := [example.id for example in examples if not example.outputs]:
            raise ValueError(
                f"task.eval_split={self.eval_split!r}: example {missing[0]!r} has no output to compare with"
            )
        return examples

    def training_dataset(self, seed: int, size: int) -> ScrollsDataset:
        """See `Task.training_dataset`; the loss is on the output and its end of sequence only.

        Each gold output is a sample. All are taken in random order, then all again in another.
        """
        self.check()
        return ScrollsDataset(self, seed, size)

    def training_summary(self, seed: int, size: int) -> dict[str, Any]:
        """`samples`, the different `gold_outputs` among them, how many of all gold outputs had to be cut
        (`outputs_cut`), and `overlap_dropped`, training examples that are also in another split."""
        dataset = ScrollsDataset(self, seed, size)
        cut = sum(dataset.prompts.answer(output)[1] for _, output in dataset.rows)
        return {
            "samples": size,
            "gold_outputs": min(size, len(dataset.rows)),
            "outputs_cut": cut,
            "overlap_dropped": self.training_split[1],
        }

    def score(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 256, trained: Task | None = None
    ) -> dict[str, Any]:
        """The benchmark's score of greedy answers, and for QuALITY also the accuracy of choosing among the options.

        Returns:
            The scores of `tape_pe.tasks.scrolls_metrics.score_predictions`, in 0..100; `examples` and `references`
            (gold outputs) scored; `inputs_cut`, examples whose document did not fit; `unfinished`, answers without an
            end of sequence; `scored_length` and `trained_length`. For QuALITY also `choice_accuracy`, the share, in
            0..100, of examples whose likeliest option with its end of sequence is a gold output, and
            `choice_accuracy_per_token`, where likelihoods are means over tokens; `choice_examples` counts the examples
            whose options are known and hold a gold output (others are left out).

        Raises:
            ValueError: a query does not fit, outputs are missing, or ROUGE is needed and cannot be computed.
        """
        check_metric(self.dataset)
        trained = trained if isinstance(trained, Scrolls) else self
        maker = PromptMaker(tokenizer, self.truncation, self.output_tokens)
        examples = self.evaluation_examples
        maker.check(examples, self.scored_length)
        room = self.scored_length - self.output_tokens
        prompts, cut = zip(*(maker.prompt(example, room) for example in examples), strict=True)
        answers = self._answers(model, tokenizer, prompts, batch_size)
        texts = [_text(tokenizer, answer) for answer in answers]
        choices = self._choices(model, maker, batch_size) if self.dataset == "quality" else {}
        return {
            **score_predictions(self.dataset, texts, [example.outputs for example in examples]),
            **choices,
            "examples": len(examples),
            "references": sum(len(example.outputs) for example in examples),
            "inputs_cut": sum(cut),
            "unfinished": sum(tokenizer.eos_token_id not in answer for answer in answers),
            "scored_length": self.scored_length,
            "trained_length": trained.length,
        }

    def _answers(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], batch_size: int
    ) -> list[list[int]]:
        """Greedy continuations; prompts of about the same length are read together."""
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
        rows = _rows(batch_size, self.scored_length)
        answers: list[list[int]] = [[] for _ in prompts]
        with tqdm(total=len(prompts), desc=self.dataset, unit="example", disable=None) as progress:
            for start in range(0, len(order), rows):
                batch = order[start : start + rows]
                written = continue_greedily(model, tokenizer, [prompts[i] for i in batch], self.output_tokens)
                for place, answer in zip(batch, written, strict=True):
                    answers[place] = answer
                progress.update(len(batch))
        return answers

    def _choices(self, model: Any, maker: PromptMaker, batch_size: int) -> dict[str, Any]:
        """Accuracy of choosing the likeliest option."""
        right: list[tuple[bool, bool]] = []
        for example in tqdm(self.evaluation_examples, desc="choices", unit="example", disable=None):
            gold = {" ".join(output.split()) for output in example.outputs}
            if not gold & set(example.options):
                continue
            options = [maker.answer(option)[0] for option in example.options]
            prompt, _ = maker.prompt(example, self.scored_length - self.output_tokens)
            sums = log_likelihoods(model, prompt, options, _rows(batch_size, self.scored_length))
            means = sums / np.array([len(option) for option in options])
            right.append((example.options[sums.argmax()] in gold, example.options[means.argmax()] in gold))
        by_sum, by_mean = (100 * np.mean(right, axis=0)).tolist() if right else (None, None)
        return {
            "choice_accuracy": by_sum,
            "choice_accuracy_per_token": by_mean,
            "choice_examples": len(right),
        }

    def answer(self, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """The model's output for an input in the benchmark's form, such as a question, an empty line and a document.

        Raises:
            ValueError: `prompt` is empty, or what it asks does not fit.
        """
        if not prompt.strip():
            raise ValueError(f"prompt={prompt!r}: some text is needed")
        maker = PromptMaker(tokenizer, self.truncation, self.output_tokens)
        query, document, _ = split_input(self.dataset, prompt)
        example = Example("prompt", query, document, ())
        maker.check([example], self.scored_length)
        ids, _ = maker.prompt(example, self.scored_length - self.output_tokens)
        return _text(tokenizer, continue_greedily(model, tokenizer, [ids], self.output_tokens)[0])


class ScrollsDataset(SampledDataset):
    """Training samples, made when asked for; see `Task.training_dataset`."""

    def __init__(self, task: Scrolls, seed: int, size: int) -> None:
        self.length, self.seed, self.size = task.length, seed, size
        self.prompts = PromptMaker(task.tokenizer(), task.truncation, task.output_tokens)
        self.rows = [(example, output) for example in task.training_split[0] for output in example.outputs]
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """See `SampledDataset.sample`."""
        example, output = self.rows[self._row(index)]
        answer, _ = self.prompts.answer(output)
        prompt, _ = self.prompts.prompt(example, self.length - len(answer))
        input_ids = np.array([*prompt, *answer], dtype=np.int64)
        labels = input_ids.copy()
        labels[: len(prompt)] = IGNORED_LABEL
        return {"input_ids": input_ids, "labels": labels}

    def _row(self, index: int) -> int:
        epoch, place = divmod(index, len(self.rows))
        if self._order[0] != epoch:
            numbers = random_bits(_TRAINING, self.seed, epoch, np.arange(len(self.rows)), slots=1)[:, 0]
            self._order = epoch, np.argsort(numbers, kind="stable")
        return int(self._order[1][place])


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of an answer, up to its end of sequence."""
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()


def _digest(example: Example) -> bytes:
    """Stands for an input, which can have hundreds of thousands of characters."""
    return hashlib.sha256(example.input.strip().encode()).digest()


def _rows(batch_size: int, length: int) -> int:
    return max(1, min(batch_size, _TOKENS_AT_ONCE // length))
