"""Fine-tunes a pretrained model to longer texts, with one of several methods, and measures what that did.

The output folder holds `finetune.json` (base model, changes of its config, options), `checkpoint-*/` while training,
and when it has finished the adapter or model, the tokenizer and the line in `results.jsonl`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, PreTrainedTokenizerBase, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from tape_pe.convert import trainable_parameters
from tape_pe.files import read_json, remove_staging_folders, sole_user, staging_folder, write_json
from tape_pe.finetuning.methods import build_model, config_changes, save_model
from tape_pe.finetuning.options import TAPE_METHODS, FinetuneOptions, check_finetune
from tape_pe.language.perplexity import nll_sum
from tape_pe.language.pretrained import FINETUNE_FILE, load_tokenizer
from tape_pe.language.text import has_splits, read_texts, token_blocks
from tape_pe.results import RESULTS_FILE, Result, append_result, git_revision, library_versions, read_results
from tape_pe.trainer import (
    RunTrainer,
    StopOnSignal,
    TrainingInterruptedError,
    check_checkpoint,
    check_processes,
    samples_per_step,
)

WEIGHTS_FILE = "trained.safetensors"
FACTS_FILE = "facts.json"


def finetune(options: FinetuneOptions, *, resume: bool = False) -> dict[str, Any]:
    """Fine-tunes a model as the options say; `tape_pe.language.pretrained.load_causal_lm` loads the result.

    SIGINT and SIGTERM end it after the current step, with a checkpoint; a second one ends it at once.

    Args:
        options: what to train, on what, and how.
        resume: go on from the output folder's last checkpoint. Starts from the beginning where there is none yet; does
            nothing where training has finished.

    Returns:
        The fields of the `tape_pe.results.Result` that was appended to the folder's `results.jsonl`. Its metrics are
        `train_loss` (mean over the last tenth of the loss curve), `held_out_loss_before` and `held_out_loss`, in nats
        per token, and `trained`, the parameters that were trained, by kind.

    Raises:
        ValueError, FileNotFoundError: options that cannot work.
        FileExistsError: the output folder holds a run, and `resume` is not set; or another process trains in it.
        TrainingInterruptedError: a signal stopped it; resume to go on.
        FloatingPointError: the loss became infinite or NaN; the message names the step.
    """
    check_finetune(options, resume=resume)
    folder = options.folder
    if resume and (folder / RESULTS_FILE).is_file():
        return asdict(read_results(folder)[-1])
    arguments = _training_arguments(options)
    check_processes(arguments, can_shard=False)
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if checkpoint is not None:
        check_checkpoint(Path(checkpoint), options.max_steps, samples_per_step(arguments))
    tokenizer = load_tokenizer(options.model)
    changes = config_changes(options, AutoConfig.from_pretrained(options.model))
    train_blocks, eval_blocks = _read_blocks(options, tokenizer, arguments.world_size)
    set_seed(options.seed)
    model = build_model(options, changes)
    _check_vocabulary(options, model, train_blocks.blocks, eval_blocks)
    trainer = FinetuneTrainer(
        model=model,
        args=arguments,
        train_dataset=train_blocks,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.accelerator.wait_for_everyone()  # every process has looked at the folder before one writes to it
    with sole_user(folder) if arguments.should_save else nullcontext():
        if arguments.should_save:
            prepare_folder(options, changes)
        result = _train(trainer, options, changes, eval_blocks, checkpoint)
        if arguments.should_save:
            _finish(options, model, tokenizer, result)
        trainer.accelerator.wait_for_everyone()
    return asdict(result)


def _train(
    trainer: FinetuneTrainer,
    options: FinetuneOptions,
    changes: dict[str, Any],
    eval_blocks: Tensor,
    checkpoint: str | None,
) -> Result:
    """Trains, from a checkpoint on if one is given, and measures before and behind."""
    trainable = trainable_parameters(trainer.model)
    if trainer.args.should_save:
        print(trainable, flush=True)
    started = time.perf_counter()
    if checkpoint is None:
        trainer.facts["held_out_loss_before"] = held_out_loss(trainer.model, eval_blocks, options.batch_size)
    eval_seconds = time.perf_counter() - started
    with StopOnSignal() as stop:
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=checkpoint)
    step = trainer.state.global_step
    if step < options.max_steps:
        raise TrainingInterruptedError(options.folder / f"{PREFIX_CHECKPOINT_DIR}-{step}", step)
    started = time.perf_counter()
    after = held_out_loss(trainer.model, eval_blocks, options.batch_size)
    progress = trainer.progress()
    return Result(
        name=options.folder.resolve().name,
        task="finetune",
        config={
            "model": {
                "name": options.model,
                "encoding": "tape" if options.method in TAPE_METHODS else "rope",
                **changes,
            },
            "finetune": options.to_dict(),
        },
        seed=options.seed,
        git_revision=git_revision(),
        versions=library_versions(),
        parameters=trainable.trained,
        steps=progress["steps"],
        tokens=progress["tokens"],
        train_seconds=progress["train_seconds"],
        eval_seconds=eval_seconds + time.perf_counter() - started,
        loss_curve=progress["loss_curve"],
        metrics={
            "train_loss": _recent(progress["loss_curve"]),
            "held_out_loss_before": trainer.facts["held_out_loss_before"],
            "held_out_loss": after,
            "trained": trainable.to_dict(),
        },
    )


def held_out_loss(model: Any, blocks: Tensor, batch_size: int) -> float | None:
    """Mean negative log-likelihood of blocks `[n, N]` in evaluation mode, nats per token; `None` without blocks."""
    if not len(blocks):
        return None
    was_training, total = model.training, 0.0
    model.eval()
    with torch.inference_mode():
        for rows in blocks.split(batch_size):
            total += nll_sum(model, rows.to(model.device, torch.int64), rows.shape[1] - 1)
    model.train(was_training)
    return total / (len(blocks) * (blocks.shape[1] - 1))


class BlockDataset(Dataset):
    """Blocks of tokens, shuffled; in another order each time that they are gone through.

    Args:
        blocks: `[n, N]` the samples, of any integer dtype.
        size: number of samples to give, which may be more than n.
        seed: of the orders.
    """

    def __init__(self, blocks: Tensor, size: int, seed: int) -> None:
        self.blocks = blocks
        generator = torch.Generator().manual_seed(seed)
        rounds = [torch.randperm(len(blocks), generator=generator) for _ in range(-(-size // len(blocks)))]
        self.order = torch.cat(rounds)[:size]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[N]`; the model shifts the labels."""
        row = self.blocks[self.order[index]].to(torch.int64)
        return {"input_ids": row, "labels": row}


class FinetuneTrainer(RunTrainer):
    """`RunTrainer` whose checkpoints hold what is trained, not the model that it is part of.

    Attributes:
        facts: further values that a checkpoint keeps, for the result.
    """

    facts: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        self.facts = {}
        super().__init__(**options)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        trained = {name: p.detach().contiguous() for name, p in self._trained().items()}
        save_file(trained, folder / WEIGHTS_FILE)
        write_json(folder / FACTS_FILE, self.facts)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        saved, trained = load_file(folder / WEIGHTS_FILE), self._trained()
        if saved.keys() != trained.keys():
            raise ValueError(f"{folder} holds other weights than those that are trained")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])
        self.facts.update(read_json(folder / FACTS_FILE))

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.accelerator.unwrap_model(self.model).named_parameters() if p.requires_grad}


def _training_arguments(options: FinetuneOptions) -> TrainingArguments:
    """The options in `Trainer`'s words."""
    try:
        return TrainingArguments(
            output_dir=str(options.folder),
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=options.max_steps // 20 if options.warmup_steps is None else options.warmup_steps,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            bf16=options.bf16,
            activation_checkpointing=options.activation_checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": False} if options.activation_checkpointing else None,
            seed=options.seed,
            save_strategy="steps" if options.save_steps else "no",
            save_steps=options.save_steps or options.max_steps,
            save_total_limit=1,
            logging_steps=options.logging_steps,
            disable_tqdm=not options.progress,
            report_to="none",
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            include_num_input_tokens_seen="all",
            train_sampling_strategy="sequential",  # the samples are shuffled
            ddp_find_unused_parameters=False,
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"training: {error}") from error


def _read_blocks(
    options: FinetuneOptions, tokenizer: PreTrainedTokenizerBase, processes: int
) -> tuple[BlockDataset, Tensor]:
    """What is trained on, and the held-out blocks.

    Raises:
        ValueError: there is too little text.
    """
    size = options.max_steps * options.batch_size * options.accumulation * processes
    needed = size if options.data_tokens is None else -(-options.data_tokens // options.length)
    own_part = options.eval_data is None and not has_splits(options.data)
    texts = read_texts(options.data, split=options.split, text_field=options.text_field)
    blocks = token_blocks(texts, tokenizer, options.length)
    held_out = _stack(blocks, options.eval_blocks if own_part else 0, options.length)
    if not own_part and options.eval_blocks:
        name = options.eval_data or options.data
        texts = read_texts(name, split=options.eval_split, text_field=options.text_field)
        held_out = _stack(token_blocks(texts, tokenizer, options.length), options.eval_blocks, options.length)
        if not len(held_out):
            raise ValueError(f"eval_data={name!r}: has fewer than length={options.length} tokens")
    trained_on = _stack(blocks, needed, options.length)
    if not len(trained_on):
        raise ValueError(
            f"data={options.data!r}: has too little text: no block of {options.length} tokens to train on"
            + (f" behind eval_blocks={options.eval_blocks} to measure on" if own_part else "")
        )
    return BlockDataset(trained_on, size, options.seed), held_out


def _check_vocabulary(options: FinetuneOptions, model: Any, *blocks: Tensor) -> None:
    """Raises ValueError where the tokenizer made tokens that the model has no embedding for."""
    known = model.get_input_embeddings().num_embeddings
    largest = max(int(block.max()) for block in blocks if len(block))
    if largest >= known:
        raise ValueError(
            f"model is {options.model!r}, whose tokenizer made the token {largest} of the data; the model knows "
            f"0..{known - 1}"
        )


def _stack(blocks: Iterator[list[int]], count: int, length: int) -> Tensor:
    """The next blocks, at most `count`, as int32 `[n, N]`."""
    rows = [torch.tensor(block, dtype=torch.int32) for block in itertools.islice(blocks, count)]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.int32)


def prepare_folder(options: FinetuneOptions, changes: dict[str, Any]) -> None:
    """Makes the output folder and writes its `finetune.json`, which says what the folder is for.

    Args:
        options: the run.
        changes: fields of the base's config that the run changes, from `tape_pe.finetuning.methods.config_changes`.
    """
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_staging_folders(folder)
    place = Path(options.model).expanduser()
    base = os.path.abspath(place) if place.exists() else options.model
    values = {
        "method": options.method,
        "base_model_name_or_path": base,
        "config": changes,
        "options": options.to_dict(),
    }
    write_json(folder / FINETUNE_FILE, values)


def _finish(options: FinetuneOptions, model: Any, tokenizer: PreTrainedTokenizerBase, result: Result) -> None:
    """Puts model and tokenizer into the folder, and then the result line, which means "finished"."""
    folder = options.folder
    with staging_folder(folder) as staging:
        save_model(model, options, staging)
        tokenizer.save_pretrained(staging)
        for path in staging.iterdir():
            os.replace(path, folder / path.name)
    append_result(folder, result)
    for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)


def _recent(loss_curve: list[list[float]]) -> float:
    """Mean of the last tenth of a loss curve."""
    values = [loss for _, loss in loss_curve[-max(1, len(loss_curve) // 10) :]]
    return sum(values) / len(values)
