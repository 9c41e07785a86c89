"""Training runs on `transformers.Trainer`: seeded, resumable from any checkpoint, safe to interrupt.

A run folder holds `config.yaml` (the resolved options), `checkpoint-*/`, `tensorboard/` where asked for and, when
training has finished, the model and tokenizer files and `training.json` (what the result line needs).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Set
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from tape_pe.encodings import get_encoding
from tape_pe.files import remove_staging_folders, sole_user, staging_folder, write_json
from tape_pe.models import TapeLMConfig, TapeLMForCausalLM
from tape_pe.ops.backends import select_backend
from tape_pe.options import CONFIG_FILE, ModelOptions, RunOptions, load_options, training_arguments
from tape_pe.results import git_revision, library_versions
from tape_pe.tasks.base import RightPaddingCollator, Task
from tape_pe.trainer import (
    PROGRESS_FILE,
    RunTrainer,
    StopOnSignal,
    TrainingInterruptedError,
    check_checkpoint,
    check_processes,
    samples_per_step,
)

__all__ = [
    "FREE_ON_RESUME", "PROGRESS_FILE", "TRAINING_FILE", "RunTrainer", "StopOnSignal", "TrainingInterruptedError",
    "build_config", "build_model", "check_run", "check_same_run", "train",
]  # fmt: skip

TRAINING_FILE = "training.json"

FREE_ON_RESUME = frozenset({
    "max_steps", "save_steps", "save_total_limit", "save_strategy", "report_to", "run_name", "disable_tqdm",
    "log_level", "logging_first_step", "dataloader_num_workers", "dataloader_pin_memory",
})  # fmt: skip
"""`training` options that may differ when a run is resumed. `max_steps` is one of them, so that a run can be extended;
where the learning rate depends on it, the extended run is not the one that would have been longer from its start."""


BATCH_FIELDS = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})
"""`training` options that may differ as well, if a step has as many samples as before: then so may the processes."""


def build_config(options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> TapeLMConfig:
    """The model's configuration.

    Raises:
        ValueError: an unknown encoding or option, or sizes that do not fit together; the message names the key.
    """
    try:
        values = asdict(options)
        del values["init_from"]
        values["encoding_options"] = get_encoding(options.encoding).options_for(
            tokenizer, options.encoding_options or {}
        )
        return TapeLMConfig(
            **values,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from error


def build_model(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, seed: int) -> TapeLMForCausalLM:
    """A model with new weights, which `seed` defines, or with those of `options.init_from`.

    Raises:
        ValueError: see `build_config`; or the weights cannot be read, or are of another model.
    """
    config = build_config(options, tokenizer)
    set_seed(seed)
    if options.init_from is None:
        return TapeLMForCausalLM(config)
    _check_same_model(options.init_from, config)
    return TapeLMForCausalLM.from_pretrained(options.init_from, config=config)


def _check_same_model(folder: str, config: TapeLMConfig) -> None:
    """Raises ValueError unless a folder holds a model that differs from `config` in nothing that its weights fix."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"model.init_from={folder!r}: the folder of a finished run or of a saved model is needed")
    other = AutoConfig.from_pretrained(folder)
    if not isinstance(other, TapeLMConfig):
        raise ValueError(f"model.init_from={folder!r}: a model of this package is needed, not {other.model_type}")
    free = {"init_from", "encoding_options", "rope_parameters", "max_position_embeddings", "initializer_range"}
    fixed = ["vocab_size", *(f.name for f in fields(ModelOptions) if f.name not in free)]
    pairs = {name: (getattr(config, name), getattr(other, name)) for name in fixed}
    pairs["encoding_options"] = (config.parsed_encoding_options(), other.parsed_encoding_options())
    for name, (here, there) in pairs.items():
        if here != there:
            raise ValueError(f"model.{name}={here!r}: must be as in model.init_from={folder!r}, {there!r}")


def train(options: RunOptions, *, resume: bool | str | os.PathLike[str] = False, overwrite: bool = False) -> Path:
    """Trains a model and returns the run folder.

    SIGINT and SIGTERM end it after the current step, with a checkpoint; a second one ends it at once.

    Args:
        options: what to train, on what, and how.
        resume: go on from the run folder's last checkpoint (`True`) or from the one given. Starts from the
            beginning where there is none yet; does nothing where training has finished.
        overwrite: delete what the run folder holds of an earlier run.

    Raises:
        ValueError: options that cannot work; nothing has been written then.
        FileExistsError: the folder holds a run, and neither `resume` nor `overwrite` is set; or another process trains
            in it.
        FileNotFoundError: the checkpoint to resume from does not exist.
        TrainingInterruptedError: a signal stopped it; resume to go on.
        FloatingPointError: the loss or the gradients became infinite or NaN; the message names the step, and the
            file in the run folder that the batch is saved in (`0.input_ids`, `0.labels`, and so on for each micro-batch
            of the step so far; one file for each process).
    """
    checkpoint = check_run(options, resume=resume, overwrite=overwrite)
    arguments = training_arguments(options)
    run = Path(options.output_dir)
    if resume is True and _finished_steps(run) >= arguments.max_steps:
        return run
    processes = PartialState()
    processes.wait_for_everyone()  # no process checks what another has written already
    with sole_user(run) if arguments.should_save else nullcontext():
        if arguments.should_save:
            _prepare(run, overwrite)
        processes.wait_for_everyone()
        _train(options, arguments, checkpoint)
    return run


def _prepare(run: Path, overwrite: bool) -> None:
    """Removes what interrupted writes left, or everything that an earlier run did."""
    remove_staging_folders(run)
    for path in [path for path in run.iterdir() if not path.name.startswith(".")] if overwrite else []:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _train(options: RunOptions, arguments: TrainingArguments, checkpoint: Path | None) -> None:
    """Trains in the run's folder, from a checkpoint on if one is given; see `train`."""
    run, processes = Path(options.output_dir), PartialState()
    tokenizer = options.task.tokenizer()
    model = build_model(options.model, tokenizer, arguments.seed)
    size = arguments.max_steps * samples_per_step(arguments)
    try:
        trainer = RunTrainer(
            model=model,
            args=arguments,
            train_dataset=options.task.training_dataset(arguments.seed, size),
            data_collator=RightPaddingCollator(tokenizer.pad_token_id),
            processing_class=tokenizer,
            callbacks=_tensorboard_callbacks(arguments, run),
        )
        trainer.create_optimizer_and_scheduler(arguments.max_steps)
        trainer.get_train_dataloader()
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"training: {error}") from error
    if arguments.should_save:
        (run / TRAINING_FILE).unlink(missing_ok=True)  # of a finished run that now goes on
        options.save(run)
    with StopOnSignal() as stop:
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        step = trainer.state.global_step
        if step < arguments.max_steps:
            raise TrainingInterruptedError(run / f"{PREFIX_CHECKPOINT_DIR}-{step}", step)
        weights = trainer.accelerator.get_state_dict(trainer.model)  # of all processes, where they are sharded
        if arguments.should_save:
            facts = {"seed": arguments.seed, "data": options.task.training_summary(arguments.seed, size)}
            _save_final(run, trainer.model, weights, tokenizer, {**trainer.progress(), **facts})
        processes.wait_for_everyone()


def check_run(
    options: RunOptions,
    *,
    resume: bool | str | os.PathLike[str] = False,
    overwrite: bool = False,
    elsewhere: bool = False,
    check_task: bool = True,
) -> Path | None:
    """Everything that `train` refuses, found out before any work; writes nothing.

    Args:
        options: see `train`.
        resume: see `train`.
        overwrite: see `train`.
        elsewhere: whether a launcher will start the run, so that its devices and processes are not this process's.
        check_task: whether to read the task's data too; not needed again for the same task.

    Returns:
        The checkpoint that training would go on from, if any.

    Raises:
        ValueError, FileExistsError, FileNotFoundError: see `train`.
    """
    arguments = training_arguments(options, elsewhere=elsewhere)
    select_backend(arguments.device)
    if not elsewhere:
        check_processes(arguments)
    if check_task:
        options.task.check()
    run, tokenizer = Path(options.output_dir), options.task.tokenizer()
    _check_lengths(build_config(options.model, tokenizer), options.task)
    if options.model.init_from is not None:
        if Path(options.model.init_from).resolve() == run.resolve():
            raise ValueError(f"model.init_from={options.model.init_from!r}: must not be output_dir")
        build_model(options.model, tokenizer, seed=0)
    if resume and overwrite:
        raise ValueError("resume and overwrite are both set; at most one can be")
    if run.exists() and not run.is_dir():
        raise FileExistsError(f"output_dir is {run}, which is a file; it must name a folder")
    if run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir()):
        if not (run / CONFIG_FILE).is_file():
            raise FileExistsError(f"output_dir is {run}, which holds files that are not a run's; choose another folder")
        if not resume and not overwrite:
            raise FileExistsError(f"output_dir is {run}, which holds a run already; use --resume or --overwrite")
        if resume:
            check_same_run(load_options(run), options, free=FREE_ON_RESUME | BATCH_FIELDS)
    if isinstance(resume, (str, os.PathLike)):
        if not (Path(resume) / PROGRESS_FILE).is_file():
            raise FileNotFoundError(f"checkpoint is {resume}, which is not a checkpoint of a run")
        if (Path(resume).parent / CONFIG_FILE).is_file():
            check_same_run(load_options(Path(resume).parent), options, free=FREE_ON_RESUME | BATCH_FIELDS)
        found: str | os.PathLike[str] | None = resume
    else:
        found = get_last_checkpoint(str(run)) if resume and run.is_dir() else None
    if found is None:
        return None
    samples = None if elsewhere else samples_per_step(arguments)
    check_checkpoint(Path(found), arguments.max_steps, samples, prefix="training.")
    return Path(found)


def _check_lengths(config: TapeLMConfig, task: Task) -> None:
    """Raises ValueError where the task scores longer texts than the encoding can read."""
    encoding = get_encoding(config.encoding)
    limit = encoding.longest_text(config.encoding_sizes(), config.parsed_encoding_options())
    longest = task.longest_scored
    if limit is not None and longest is not None and longest > limit:
        raise ValueError(
            f"model.encoding={config.encoding!r}: with max_position_embeddings={config.max_position_embeddings} and "
            f"these options it reads at most {limit} tokens; the longest text that the task scores has {longest}"
        )


def check_same_run(old: RunOptions, new: RunOptions, *, free: Set[str] = FREE_ON_RESUME) -> None:
    """Raises ValueError where a resumed run would not be the run that was begun; `free` training options may differ."""
    before, after = (json.loads(json.dumps(options.sections())) for options in (old, new))  # as files have them
    defaults = {f.name: f.default for f in fields(TrainingArguments)}
    for sections in (before, after):
        sections["training"] = {**defaults, **sections["training"]}
    for section in ("model", "task", "training"):
        for key in before[section]:
            was, now = before[section].get(key), after[section].get(key)
            if was != now and not (section == "training" and key in free):
                raise ValueError(f"{section}.{key} is {now!r}; the run to resume has {was!r} in {old.output_dir}")


def _finished_steps(run: Path) -> int:
    """Steps of the finished training in `run`, 0 if it has not finished."""
    path = run / TRAINING_FILE
    return int(json.loads(path.read_text(encoding="utf-8"))["steps"]) if path.is_file() else 0


def _save_final(
    run: Path,
    model: PreTrainedModel,
    weights: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    progress: dict[str, Any],
) -> None:
    """Puts model, tokenizer and `training.json` into the run folder; the latter, written last, means "finished"."""
    with staging_folder(run) as staging:
        model.save_pretrained(staging, state_dict=weights)
        tokenizer.save_pretrained(staging)
        for path in staging.iterdir():
            os.replace(path, run / path.name)
    values = {
        **progress,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "git_revision": git_revision(),
        "versions": library_versions(),
    }
    write_json(run / TRAINING_FILE, values)


def _tensorboard_callbacks(arguments: TrainingArguments, run: Path) -> list[TrainerCallback]:
    """TensorBoard logs go to the run's own folder, which `TrainingArguments` has no field for."""
    if "tensorboard" not in arguments.report_to:
        return []
    arguments.report_to = [name for name in arguments.report_to if name != "tensorboard"]
    if not arguments.should_save:
        return []
    from torch.utils.tensorboard import SummaryWriter

    return [TensorBoardCallback(SummaryWriter(log_dir=str(run / "tensorboard")))]
