"""The trainer of all runs: whole checkpoints, an exact loss curve, and orderly stops, in one process or in many."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast_object_list, reduce
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from tape_pe.files import staging_folder, write_json
from tape_pe.language.stream import POSITION, KeepPosition, StreamPosition, TokenStream
from tape_pe.sharded import load_optimizer_state, load_weights, whole_optimizer_state
from tape_pe.signals import on_first_signal

PROGRESS_FILE = "progress.json"


def samples_per_step(arguments: TrainingArguments) -> int:
    """Samples of an optimizer step, of all processes together."""
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def check_processes(arguments: TrainingArguments, *, can_shard: bool = True) -> None:
    """Raises ValueError where processes that were started together would each train alone, or not shard as asked.

    Args:
        arguments: of the training.
        can_shard: whether what is trained may be sharded at all.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != arguments.world_size:
        raise ValueError(
            f"WORLD_SIZE={started}: the processes would not train together; without GPUs set ACCELERATE_USE_CPU=true"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    if not can_shard:
        raise ValueError("ACCELERATE_USE_FSDP='true': every process keeps the whole model here; use ddp.yaml")
    if arguments.world_size > 1 and arguments.device.type == "cpu":
        raise ValueError("ACCELERATE_USE_FSDP='true': accelerate shards on accelerators only; use ddp.yaml on CPUs")


def check_checkpoint(checkpoint: Path, max_steps: int, samples: int | None, *, prefix: str = "") -> None:
    """Refuses to go on from a checkpoint that does not fit.

    Args:
        checkpoint: its folder.
        max_steps: where the training that goes on from it ends.
        samples: its samples per step; `None` where they are not known here.
        prefix: of the options' names in messages.

    Raises:
        ValueError: it is damaged, beyond that end, or of training with another number of samples per step.
    """
    try:
        progress = json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))
        steps, before = progress["steps"], progress.get("samples_per_step", samples)
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint is {checkpoint}, which is damaged ({error!r}); give another one") from error
    if steps > max_steps:
        raise ValueError(f"{prefix}max_steps is {max_steps}; {checkpoint} has {steps} steps already")
    if samples is not None and samples != before:
        raise ValueError(
            f"samples per step={samples}: {checkpoint} was written with {before}; "
            f"batch size x accumulation x processes must be as many"
        )


class TrainingInterruptedError(Exception):
    """Training was asked to stop by a signal, and saved a checkpoint.

    Attributes:
        checkpoint: folder of that checkpoint.
        step: optimizer steps done.
    """

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; the state is saved in {checkpoint}")
        self.checkpoint, self.step = checkpoint, step


class RunTrainer(Trainer):
    """`Trainer` with checkpoints that appear whole, and a loss curve and a clock that survive an interruption.

    Its own log forgets the steps between the last line and the checkpoint; the loss curve does not. A checkpoint has
    the same form whether one process wrote it, several with whole models (DDP), or several with shards (FSDP2, where
    `fsdp_state_dict_type` is `FULL_STATE_DICT`), and any of them go on from it. Where samples are streamed, as many
    processes must go on as wrote it, each with the block that followed.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._loss_curve: list[list[float]] = []
        self._interval_loss, self._interval_steps = 0.0, 0
        self._seconds_before, self._started = 0.0, 0.0
        self._staging: Path | None = None
        self._step_batches: list[Mapping[str, Any]] = []
        self._stream_position: StreamPosition | None = None
        self.add_callback(_StepCounter(self))
        if isinstance(self.train_dataset, TokenStream):
            self.args.ignore_data_skip = True  # the stream itself starts where it had stopped

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """See `Trainer.train`."""
        if isinstance(resume_from_checkpoint, str):
            saved = json.loads((Path(resume_from_checkpoint) / PROGRESS_FILE).read_text(encoding="utf-8"))
            self._loss_curve, self._seconds_before = saved["loss_curve"], saved["train_seconds"]
            self._interval_loss, self._interval_steps = saved["interval_loss"], saved["interval_steps"]
            if isinstance(self.train_dataset, TokenStream):
                self._stream_position = StreamPosition.load(self._stream_file(Path(resume_from_checkpoint)))
        self._started = time.perf_counter()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def progress(self) -> dict[str, Any]:
        """`steps`, non-padding `tokens`, `train_seconds` and the `loss_curve` of `[step, mean loss]` so far."""
        return {
            "steps": self.state.global_step,
            "tokens": int(self.state.num_input_tokens_seen),
            "train_seconds": self._seconds_before + time.perf_counter() - self._started,
            "loss_curve": self._loss_curve,
        }

    def get_train_dataloader(self) -> DataLoader:
        """See `Trainer.get_train_dataloader`; a stream splits itself over the processes."""
        dataset = self.train_dataset
        if not isinstance(dataset, TokenStream):
            return super().get_train_dataloader()
        if self.args.dataloader_num_workers > 1:
            raise ValueError(
                f"dataloader_num_workers={self.args.dataloader_num_workers}: at most 1 can be used with streaming"
            )
        return DataLoader(
            dataset.share(self.args.process_index, self.args.world_size, self._stream_position),
            batch_size=self.args.train_batch_size,
            collate_fn=KeepPosition(self.data_collator),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`; raises FloatingPointError as soon as a loss is not finite."""
        self._stream_position = inputs.pop(POSITION, self._stream_position)
        self._step_batches.append(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        value = (loss if self.args.world_size == 1 else self.accelerator.reduce(loss.detach(), "mean")).item()
        if not math.isfinite(value):
            self._stop_nonfinite("training loss", value)
        self._interval_loss += value
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        # The scaler of fp16 expects infinite gradients: it leaves those steps out and lowers the scale.
        if norm is not None and self.accelerator.scaler is None:
            value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            if not math.isfinite(value):
                self._stop_nonfinite("norm of the gradients", value)
        return norm

    def _stop_nonfinite(self, what: str, value: float) -> NoReturn:
        """Saves the micro-batches of this process's step so far and raises FloatingPointError; all processes do."""
        step = self.state.global_step + 1
        process = f"-process-{self.args.process_index}" if self.args.world_size > 1 else ""
        path = Path(str(self.args.output_dir)) / f"nonfinite-step-{step}{process}.safetensors"
        tensors = {
            f"{number}.{name}": tensor.detach().cpu().contiguous()
            for number, batch in enumerate(self._step_batches)
            for name, tensor in batch.items()
            if isinstance(tensor, Tensor)
        }
        save_file(tensors, path)
        self.accelerator.wait_for_everyone()  # else the launcher may end a process that is still writing
        raise FloatingPointError(f"the {what} is {value} at step {step}; its batch is saved in {path}")

    def end_step(self, step: int) -> None:
        """Counts a step, and adds a point to the loss curve every `logging_steps` and at the last step."""
        self._step_batches = []
        self._interval_steps += 1
        if step % max(1, int(self.state.logging_steps)) == 0 or step == self.state.max_steps:
            self._loss_curve.append([step, self._interval_loss / self._interval_steps])
            self._interval_loss, self._interval_steps = 0.0, 0

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        writes = self.args.should_save
        with staging_folder(run) if writes else nullcontext() as staging:
            # Every process has files for the checkpoint, and the first one's folder takes them all.
            self._staging = Path(broadcast_object_list([str(staging)])[0])
            super()._save_checkpoint(model, trial)
            if self._stream_position is not None:
                self._stream_position.save(self._stream_file(self._staging / name))
            self.accelerator.wait_for_everyone()
            if writes:
                state = {
                    **self.progress(),
                    "interval_loss": self._interval_loss,
                    "interval_steps": self._interval_steps,
                    "samples_per_step": samples_per_step(self.args),
                }
                write_json(self._staging / name / PROGRESS_FILE, state)
                if (run / name).exists():  # moved, since what is being deleted would look like a checkpoint
                    os.replace(run / name, self._staging / f"old-{name}")
                os.replace(self._staging / name, run / name)
        self._staging = None
        if writes:
            rotate_checkpoints(str(run), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _stream_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"stream-{self.args.process_index}-of-{self.args.world_size}.json"

    @property
    def _whole_checkpoints(self) -> bool:
        """Whether the model is sharded, and its checkpoints hold whole tensors."""
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        return plugin is not None and "FULL_STATE_DICT" in str(plugin.state_dict_type)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._whole_checkpoints:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_optimizer_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._whole_checkpoints:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._issue_warnings_after_load(load_weights(self.model, Path(resume_from_checkpoint)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._whole_checkpoints or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_optimizer_state(self.model, self.optimizer, Path(checkpoint) / OPTIMIZER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


class _StepCounter(TrainerCallback):
    """Tells the trainer that an optimizer step is complete, before its checkpoint is written."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.trainer.end_step(state.global_step)


class StopOnSignal(TrainerCallback):
    """Turns the first SIGINT or SIGTERM into a checkpoint and an orderly stop; a second one acts as usual.

    A context manager: the signals are caught inside it only, and only in the main thread.
    """

    def __init__(self) -> None:
        self.received = False
        self._caught = on_first_signal(self._receive)

    def __enter__(self) -> StopOnSignal:
        self._caught.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._caught.__exit__(*error)

    def _receive(self) -> None:
        self.received = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Saves and stops if a signal has come, to whichever process: all must stop after the same step."""
        received = self.received
        if args.world_size > 1:
            received = bool(reduce(torch.tensor(float(received), device=args.device), "sum").item())
        if received:
            control.should_save = True
            control.should_training_stop = True
