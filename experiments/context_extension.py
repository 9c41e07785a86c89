"""Context extension in small: one RoPE model trained on short texts, extended to four times its length in every way.

    OMP_NUM_THREADS=1 python experiments/context_extension.py

trains the base model on the sources of Python's standard library (some fifteen minutes on one core), fine-tunes it with
each method and seed (1.5 to 3 minutes each), and appends a line for each to `results/context_extension.jsonl`:
perplexity of held-out sources at 1/4 to 4 times the base's length, and passkey retrieval where a prompt fits. `none`
and `none_linear` are the untrained base, the latter with its positions divided by four; there is nothing random about
them, so they have one seed.

What is finished is not done again: an interrupted run goes on where it stopped. Two processes may work side by side on
different methods or seeds once the base is there, each with an `--output` of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from tape_pe.finetuning.finetune import finetune
from tape_pe.finetuning.methods import config_changes
from tape_pe.finetuning.options import METHODS, TAPE_METHODS, FinetuneOptions
from tape_pe.language.pretrained import load_base, load_causal_lm, load_tokenizer
from tape_pe.language.text import read_texts
from tape_pe.results import Result, append_line, git_revision, library_versions, whole_lines

UNTRAINED = {"none": "none", "none_linear": "linear"}
"""Ways to use the base as it is, and their frequency rules."""

EXTENSION = 4
"""How many times its length the base is extended to."""

LENGTHS = (0.25, 0.5, 1, 2, 4)
"""Where perplexity is measured, in units of the base's length."""


@dataclass(frozen=True)
class Base:
    """The base model and its training.

    Attributes:
        length: tokens of a sample.
        hidden_size: width.
        num_hidden_layers: depth.
        vocab_size: tokens of the tokenizer.
        data_tokens: tokens of text to choose samples from.
        max_steps: optimizer steps.
        batch_size: samples per step.
        learning_rate: constant after the warm-up.
        warmup_steps: steps of the warm-up.
    """

    length: int = 128
    hidden_size: int = 192
    num_hidden_layers: int = 4
    vocab_size: int = 2048
    data_tokens: int = 6_000_000
    max_steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 100


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning, the same for all methods.

    Attributes:
        max_steps: optimizer steps.
        batch_size: samples per step, of four times the base's length.
        learning_rate: constant after the warm-up.
        warmup_steps: steps of the warm-up.
        data_tokens: tokens of text to choose samples from.
    """

    max_steps: int = 40
    batch_size: int = 4
    learning_rate: float = 2e-4
    warmup_steps: int = 10
    data_tokens: int = 2_000_000


@dataclass(frozen=True)
class Measuring:
    """What is measured.

    Attributes:
        tokens: of held-out text, for perplexity.
        passkey_seeds: prompts per length.
        batch_size: windows or prompts read together.
    """

    tokens: int = 8_192
    passkey_seeds: int = 20
    batch_size: int = 8


def main(words: Sequence[str] | None = None) -> None:
    """Reads the command line and does what is not done yet."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/context_extension.jsonl"), help="Result lines.")
    parser.add_argument("--work", type=Path, default=Path("runs/context_extension"), help="Folder of models.")
    parser.add_argument("--methods", type=str, nargs="+", default=[*UNTRAINED, *METHODS], help="Methods to run.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Seeds of each method.")
    parser.add_class_arguments(Base, "base")
    parser.add_class_arguments(Tuning, "tuning")
    parser.add_class_arguments(Measuring, "measuring")
    namespace = parser.parse_args(None if words is None else list(words))
    base, tuning = Base(**namespace.base.as_dict()), Tuning(**namespace.tuning.as_dict())
    measuring = Measuring(**namespace.measuring.as_dict())
    for method in namespace.methods:
        if method not in (*UNTRAINED, *METHODS):
            parser.error(f"methods has {method!r}; they are {', '.join((*UNTRAINED, *METHODS))}")
    settings = {"base": asdict(base), "measuring": asdict(measuring)}
    folder = train_base(base, namespace.work)
    for seed in namespace.seeds:
        for method in namespace.methods:
            if method in UNTRAINED and seed != namespace.seeds[0]:
                continue
            wanted = settings if method in UNTRAINED else {**settings, "tuning": asdict(tuning)}
            if is_finished(namespace.output, method, seed, wanted):
                continue
            print(f"--- {method}, seed {seed}", flush=True)
            line = run(method, seed, folder, namespace.work, base, tuning, measuring)
            line = Result(**{**line, "config": {**line["config"], **wanted}})
            namespace.output.parent.mkdir(parents=True, exist_ok=True)
            append_line(namespace.output, line)
            print(json.dumps({name: line.metrics[name] for name in ("perplexity", "passkey")}), flush=True)


def is_finished(output: Path, method: str, seed: int, wanted: dict[str, Any]) -> bool:
    """Whether there is a line of that method, seed and settings."""
    return any(
        line["config"]["model"]["method"] == method
        and (method in UNTRAINED or line["seed"] == seed)
        and all(line["config"].get(name) == value for name, value in wanted.items())
        for line in _lines(output)
    )


def _lines(output: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, whole_lines(output).splitlines())


def train_base(base: Base, work: Path) -> Path:
    """The base's folder; it is trained first if need be."""
    start, folder = work / "start", work / "base"
    if not (start / "model.safetensors").is_file():
        tokenizer = train_tokenizer(base.vocab_size)
        set_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=base.hidden_size,
            intermediate_size=base.hidden_size * 11 // 4,
            num_hidden_layers=base.num_hidden_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=base.length,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
        tokenizer.save_pretrained(start)
        LlamaForCausalLM(config).save_pretrained(start)
    options = FinetuneOptions(
        model=str(start),
        length=base.length,
        method="full",
        output_dir=str(folder),
        data_tokens=base.data_tokens,
        rope="none",
        max_steps=base.max_steps,
        batch_size=base.batch_size,
        accumulation=1,
        learning_rate=base.learning_rate,
        warmup_steps=base.warmup_steps,
        eval_blocks=64,
        save_steps=100,
    )
    result = finetune(options, resume=True)
    print(f"base: held-out loss {result['metrics']['held_out_loss']:.4f}, {result['train_seconds']:.0f} s", flush=True)
    return folder


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of Python sources, in which every digit is a token."""
    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator(read_texts("python-stdlib"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def run(
    method: str, seed: int, base_folder: Path, work: Path, base: Base, tuning: Tuning, measuring: Measuring
) -> dict[str, Any]:
    """Fine-tunes, if the method does, and measures.

    Returns:
        The fields of the result line.
    """
    length = EXTENSION * base.length
    options = FinetuneOptions(
        model=str(base_folder),
        length=length,
        method="full" if method in UNTRAINED else method,
        rope=UNTRAINED.get(method),
        output_dir=str(work / f"{method}-{seed}"),
        data_tokens=tuning.data_tokens,
        max_steps=tuning.max_steps,
        batch_size=tuning.batch_size,
        accumulation=1,
        learning_rate=tuning.learning_rate,
        warmup_steps=tuning.warmup_steps,
        eval_blocks=16,
        seed=seed,
        save_steps=50,
    )
    changes = config_changes(options, AutoConfig.from_pretrained(base_folder))
    result: dict[str, Any] = {
        "git_revision": git_revision(), "versions": library_versions(), "parameters": 0, "steps": 0, "tokens": 0,
        "train_seconds": 0.0, "loss_curve": [], "metrics": {},
    }  # fmt: skip
    if method in UNTRAINED:
        model = load_base(str(base_folder), config_changes=changes).eval()
        tokenizer = load_tokenizer(str(base_folder))
    else:
        result = finetune(options, resume=True)
        model, tokenizer = load_causal_lm(options.folder)
    started = time.perf_counter()
    measured = {
        "perplexity": measure_perplexity(model, tokenizer, base, measuring),
        "passkey": measure_passkey(model, tokenizer, base, measuring),
    }
    encoding = "tape" if method in TAPE_METHODS else "rope"
    return {
        **{name: result[name] for name in ("git_revision", "versions", "parameters", "steps", "tokens")},
        **{name: result[name] for name in ("train_seconds", "loss_curve")},
        "name": f"{method}-{seed}",
        "task": "context_extension",
        "config": {"model": {"method": method, "encoding": encoding, **changes}},
        "seed": seed,
        "eval_seconds": time.perf_counter() - started,
        "metrics": {**result["metrics"], **measured},
    }


def measure_perplexity(model: Any, tokenizer: Any, base: Base, measuring: Measuring) -> dict[str, float]:
    """Perplexity of held-out sources by window length; windows overlap by half."""
    from tape_pe.language.measure import token_stream
    from tape_pe.language.perplexity import perplexity

    ids = token_stream(tokenizer, read_texts("python-stdlib", split="test"), measuring.tokens)
    lengths = [int(base.length * share) for share in LENGTHS]
    return {
        str(length): perplexity(
            model, ids, length=length, stride=length // 2, batch_size=measuring.batch_size, progress=sys.stderr.isatty()
        ).perplexity
        for length in lengths
    }


def measure_passkey(model: Any, tokenizer: Any, base: Base, measuring: Measuring) -> dict[str, dict[str, float]]:
    """Both passkey scores by prompt length, for the lengths that a prompt fits into."""
    from tape_pe.tasks.passkey import NEW_TOKENS, PasskeyPrompts, answer_prompts

    maker, scores = PasskeyPrompts(tokenizer), {}
    for share in LENGTHS:
        length = int(base.length * share) - NEW_TOKENS  # the answer has to fit as well
        if length < maker.shortest():
            continue
        prompts = [maker.from_seed(length, None, seed) for seed in range(measuring.passkey_seeds)]
        answers = answer_prompts(model, tokenizer, prompts, batch_size=measuring.batch_size)
        scores[str(length)] = {
            "exact_match": sum(answer.exact_match for answer in answers) / len(answers),
            "first_number": sum(answer.first_number for answer in answers) / len(answers),
        }
    return scores


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
