"""Measurements of language models at several lengths: each is a line in a file as soon as it is finished, done once."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from tape_pe.language.perplexity import perplexity, windows
from tape_pe.language.text import token_blocks
from tape_pe.results import Measurement, append_line, git_revision, library_versions, read_measurements
from tape_pe.tasks.passkey import NEW_TOKENS, PasskeyPrompts, PasskeyTexts, answer_prompts


def measure_perplexity(
    model: Any,
    token_ids: Tensor | Sequence[int],
    *,
    name: str,
    lengths: Sequence[int],
    stride: int,
    output: Path,
    batch_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> list[Measurement]:
    """Perplexity of one text at several window lengths.

    Args:
        model: a causal language model.
        token_ids: `[N]` the text.
        name: what the lines call the model.
        lengths: window lengths, each a line.
        stride: tokens scored in each window but the first.
        output: file of JSON lines. What it holds already of this model, text, length and stride is not done again.
        batch_size: windows read together; changes no score.
        settings: further facts to keep with the lines, such as where the text is from.
        progress: whether to show progress bars.

    Returns:
        A measurement per length, in their order; the metrics are the fields of `Perplexity` and `nll`, per token.

    Raises:
        ValueError: an argument is out of range; nothing has been measured then.
        FloatingPointError: the likelihood of a token is not finite.
    """
    ids = torch.as_tensor(token_ids)
    check_counts(lengths=lengths, batch_size=batch_size)
    for length in lengths:
        windows(len(ids), length, stride)
    text = hashlib.sha256(ids.to(torch.int64).cpu().numpy().tobytes()).hexdigest()[:16]
    common = {**(settings or {}), "text": text, "text_tokens": len(ids), "stride": stride}
    lines = _Lines("perplexity", name, model, output, common)
    measured = []
    for length in lengths:
        if (line := lines.find(length=length)) is None:
            warn_beyond_trained(model, length)
            started = time.perf_counter()
            found = perplexity(model, ids, length=length, stride=stride, batch_size=batch_size, progress=progress)
            metrics = {**found._asdict(), "nll": found.nll_sum / found.tokens}
            line = lines.append(time.perf_counter() - started, metrics, length=length)
        measured.append(line)
    return measured


def measure_passkey(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    lengths: Sequence[int],
    output: Path,
    depths: Sequence[float] | None = None,
    seeds: int = 20,
    texts: PasskeyTexts | None = None,
    batch_size: int = 1,
    progress: bool = False,
) -> list[Measurement]:
    """Passkey retrieval at several prompt lengths and depths.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        name: what the lines call the model.
        lengths: prompt lengths, in tokens.
        output: file of JSON lines. What it holds already of this model, length, depth, seeds and texts is not done
            again.
        depths: where the key is, from 0 (beginning) to 1 (end); each pair of length and depth is a line. By default
            every seed draws a depth, and each length is a line.
        seeds: prompts for each line, of seeds 0, 1, ...
        texts: the words of the prompts.
        batch_size: prompts answered together.
        progress: whether to show a progress bar.

    Returns:
        A measurement per length and depth. Its metrics are the shares `exact_match` and `first_number`, see
        `tape_pe.tasks.passkey.Answer`, and the single `answers`.

    Raises:
        ValueError: an argument is out of range, or a prompt cannot fit; nothing has been measured then.
    """
    check_passkey(lengths=lengths, depths=depths, seeds=seeds, batch_size=batch_size)
    maker = PasskeyPrompts(tokenizer, texts)
    for seed in range(seeds):
        maker.check_length(min(lengths), maker.key_of(seed))
    lines = _Lines("passkey", name, model, output, {"seeds": seeds, "texts": asdict(maker.texts)})
    places: list[float | None] = [None] if depths is None else [*depths]
    cells = [(length, depth) for length in lengths for depth in places]
    measured = []
    with tqdm(total=len(cells) * seeds, desc="passkey", unit="prompt", disable=None if progress else True) as bar:
        for length, depth in cells:
            line = lines.find(length=length, depth=depth)
            if line is not None:
                bar.update(seeds)
            else:
                warn_beyond_trained(model, length + NEW_TOKENS)
                started = time.perf_counter()
                prompts = [maker.from_seed(length, depth, seed) for seed in range(seeds)]
                answers = answer_prompts(model, tokenizer, prompts, batch_size=batch_size, progress=bar)
                metrics = {
                    "exact_match": sum(answer.exact_match for answer in answers) / seeds,
                    "first_number": sum(answer.first_number for answer in answers) / seeds,
                    "answers": [
                        {"key": prompt.key, "depth": round(prompt.depth, 4), **answer._asdict()}
                        for prompt, answer in zip(prompts, answers, strict=True)
                    ],
                }
                line = lines.append(time.perf_counter() - started, metrics, length=length, depth=depth)
            measured.append(line)
    return measured


def token_stream(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_tokens: int | None = None) -> Tensor:
    """Documents as one row of tokens, `[N]`, the way they follow each other in training; see `token_blocks`.

    Args:
        tokenizer: must have an EOS token.
        texts: the documents.
        max_tokens: stop after so many tokens; default: read all.

    Raises:
        ValueError: the tokenizer has no EOS token, or the documents have no tokens.
    """
    tokens = chain.from_iterable(token_blocks(texts, tokenizer, 1))
    ids = list(islice(tokens, max_tokens))
    if not ids:
        raise ValueError("data holds no text")
    return torch.tensor(ids)


def check_passkey(
    *, lengths: Sequence[int], depths: Sequence[float] | None = None, seeds: int = 20, batch_size: int = 1
) -> None:
    """What `measure_passkey` refuses without knowing the tokenizer; its arguments and errors."""
    check_counts(lengths=lengths, seeds=seeds, batch_size=batch_size)
    if depths is not None and (not len(depths) or any(not 0 <= depth <= 1 for depth in depths)):
        raise ValueError(f"depths={list(depths)}: it must hold numbers from 0 to 1")


def check_counts(**values: int | Sequence[int]) -> None:
    """Raises ValueError unless each value is a positive integer, or some of them, each only once."""
    for name, value in values.items():
        several = list(value) if isinstance(value, Sequence) else [value]
        if not several or len(set(several)) < len(several) or any(type(one) is not int or one < 1 for one in several):
            rule = "hold positive integers, each only once" if isinstance(value, Sequence) else "be a positive integer"
            raise ValueError(f"{name}={value}: it must {rule}")


def warn_beyond_trained(model: Any, length: int) -> None:
    """Warns that a model was not made for so many tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        warnings.warn(f"{length} tokens are more than max_position_embeddings={longest} of the model", stacklevel=3)


# Fields of a config that change no score: where the model is from, how it is stored and run.
_NO_SCORE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def weights_fingerprint(model: Any) -> str:
    """A digest of a model's config and weights, from at most 8191 evenly chosen numbers of each tensor.

    The config belongs to it because the same weights with another frequency rule, say, are another model.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NO_SCORE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        step = max(1, tensor.numel() // 4096)
        chosen = tensor.detach().flatten()[::step].double().cpu()
        digest.update(f"{name} {list(tensor.shape)}".encode() + chosen.numpy().tobytes())
    return digest.hexdigest()[:16]


class _Lines:
    """The file of measurements of one task and model."""

    def __init__(self, task: str, name: str, model: Any, output: Path, settings: Mapping[str, Any]) -> None:
        self.task, self.name, self.output = task, name, Path(output)
        if self.output.is_dir():
            raise ValueError(f"output is a folder: {output}; name the file of JSON lines to write")
        dtype = str(model.dtype).removeprefix("torch.")
        self.settings = {**settings, "dtype": dtype, "weights": weights_fingerprint(model)}
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.present = [line for line in read_measurements(self.output) if (line.task, line.model) == (task, name)]
        self.facts = {"git_revision": git_revision(), "versions": library_versions()}

    def find(self, **settings: Any) -> Measurement | None:
        """The line of these settings, if it is there already."""
        wanted = {**self.settings, **settings}
        return next((line for line in reversed(self.present) if line.settings == wanted), None)

    def append(self, seconds: float, metrics: dict[str, Any], **settings: Any) -> Measurement:
        """Writes a line."""
        values = {**self.facts, "parameters": self.parameters, "seconds": seconds, "metrics": metrics}
        line = Measurement(self.task, self.name, {**self.settings, **settings}, **values)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.output, line)
        return line
