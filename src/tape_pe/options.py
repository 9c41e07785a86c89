"""Options of a run: `model`, `task` and `training` sections, the same in Python, in YAML and as command-line flags."""

from __future__ import annotations

import enum
import importlib.util
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tape_pe.files import write_text
from tape_pe.tasks import Task, make_task

CONFIG_FILE = "config.yaml"

FIXED_TRAINING_FIELDS = {
    "include_num_input_tokens_seen": "non_padding",
    # Samples are random already; in their own order sample i is the same whatever the batch size.
    "train_sampling_strategy": "sequential",
}
"""Fields of `TrainingArguments` that a run sets by itself."""

HIDDEN_TRAINING_FIELDS = frozenset(FIXED_TRAINING_FIELDS) | {
    "output_dir", "num_train_epochs", "parallelism_config", "accelerator_config", "resume_from_checkpoint",
    "restore_callback_states_from_checkpoint", "save_only_model", "load_best_model_at_end", "enable_jit_checkpoint",
    "auto_find_batch_size", "ignore_data_skip", "data_seed", "do_train", "do_eval", "do_predict", "eval_strategy",
    "eval_on_start", "push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "label_names", "label_smoothing_factor", "length_column_name",
    "include_for_metrics", "remove_unused_columns",
}  # fmt: skip
"""Fields that have no place in a run's `training` section: set by the run, or meaningless for it."""


@dataclass(frozen=True)
class ModelOptions:
    """Size and encoding of the model; names are those of `TapeLMConfig`, which checks them.

    Args:
        hidden_size: width of the token stream.
        intermediate_size: width of the MLP.
        num_hidden_layers: number of decoder layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads; default: as many as query heads.
        head_dim: width of a head, an even number; default: `hidden_size / num_attention_heads`.
        hidden_act: activation of the MLP.
        max_position_embeddings: longest sequence that the model is meant for.
        initializer_range: standard deviation of the initial weights.
        rms_norm_eps: epsilon of the normalisations.
        tie_word_embeddings: whether the output layer shares the embedding's weights.
        rope_parameters: as in transformers, for example `{"rope_type": "default", "rope_theta": 10000.0}`.
        encoding: name of the positional encoding.
        encoding_options: options of that encoding.
        init_from: folder of a finished run, or of a saved decoder, whose weights training starts from; default: new
            ones, drawn by the seed. Sizes and encoding have to be that model's; only `rope_parameters`,
            `max_position_embeddings` and `initializer_range` may differ.
    """

    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    encoding: str = "tape"
    encoding_options: dict[str, Any] | None = None
    init_from: str | None = None

    @classmethod
    def from_section(cls, values: dict[str, Any]) -> ModelOptions:
        """The options of a `model` section.

        Raises:
            ValueError: a key is not an option; the message names it.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"model.{unknown[0]} is not an option; the options are {known}")
        return cls(**values)


@dataclass(frozen=True)
class RunOptions:
    """Everything that defines a run.

    Attributes:
        output_dir: the run folder.
        model: size and encoding of the model.
        task_name: registered name of the task.
        task: the task.
        training: fields of `transformers.TrainingArguments`; `training["seed"]` seeds both weights and data.
    """

    output_dir: str
    model: ModelOptions
    task_name: str
    task: Task
    training: dict[str, Any] = field(default_factory=dict)

    def sections(self) -> dict[str, Any]:
        """The options as plain values, in the layout of the YAML files."""
        return {
            "output_dir": self.output_dir,
            "model": asdict(self.model),
            "task": {"name": self.task_name, **asdict(self.task)},
            "training": dict(self.training),
        }

    @classmethod
    def from_sections(cls, sections: dict[str, Any]) -> RunOptions:
        """The inverse of `sections`.

        Raises:
            ValueError: unknown or missing keys, or values that an option refuses.
        """
        unknown = sorted(set(sections) - {"output_dir", "model", "task", "training"})
        if unknown:
            raise ValueError(f"{unknown[0]} is not a section; there are output_dir, model, task and training")
        model = ModelOptions.from_section(sections.get("model", {}))
        task = dict(sections.get("task", {}))
        name = task.pop("name", "addition")
        output_dir = sections.get("output_dir")
        if not output_dir:
            raise ValueError("output_dir is not set; it must name the run folder")
        return cls(str(output_dir), model, name, make_task(name, **task), dict(sections.get("training", {})))

    def to_yaml(self) -> str:
        """The options as a configuration file has them."""
        return yaml.safe_dump(self.sections(), sort_keys=False)

    def save(self, run: Path) -> None:
        """Writes the options to the run folder's `config.yaml`."""
        write_text(run / CONFIG_FILE, self.to_yaml())


def load_options(run: Path) -> RunOptions:
    """Reads the options of a run folder, whose place may have changed since.

    Raises:
        FileNotFoundError: `run` is not a run folder.
        ValueError: its `config.yaml` is not a run's.
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no {CONFIG_FILE}")
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        if missing := {"model", "task", "training"} - set(sections):
            raise ValueError(f"{path} is not a run's configuration: it lacks {', '.join(sorted(missing))}")
        return RunOptions.from_sections({**sections, "output_dir": str(run)})
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a run's configuration: {error}") from error


def training_arguments(options: RunOptions, *, elsewhere: bool = False) -> TrainingArguments:
    """Builds the `TrainingArguments` of a run, checking them first.

    Args:
        options: the run's options.
        elsewhere: whether the run is for another machine, so that this one need not have what it asks for.

    Raises:
        ValueError: a field that is unknown, belongs to the run itself, or is out of range; the message names it.
    """
    training = options.training
    known = {f.name for f in fields(TrainingArguments)} - HIDDEN_TRAINING_FIELDS
    unknown = sorted(set(training) - known)
    if unknown:
        raise ValueError(f"training.{unknown[0]} is not an option; see `tape train --help` for those that are")
    _check_ranges(training)
    _check_choices(training)
    _check_reports(training.get("report_to"))
    if not torch.cuda.is_available():
        training = {**training, "dataloader_pin_memory": False}
    if elsewhere and not torch.accelerator.is_available():
        training = {**training, "use_cpu": True}
    try:
        return TrainingArguments(**training, **FIXED_TRAINING_FIELDS, output_dir=options.output_dir)
    except (ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"training: {error}") from error


def _check_ranges(training: dict[str, Any]) -> None:
    """Numbers that would only fail, or do nonsense, after work has started."""
    least = {
        "max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 0,
        "logging_steps": 0, "learning_rate": 0, "weight_decay": 0, "warmup_steps": 0, "max_grad_norm": 0, "seed": 0,
    }  # fmt: skip
    for name, bound in least.items():
        value = training.get(name, -1 if name == "max_steps" else bound)
        whole = name in ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "seed")
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= bound:
            kind = " and an integer" if whole else ""
            raise ValueError(f"training.{name} is {value!r}; it must be at least {bound}{kind}")
    if training.get("seed", 0) >= 2**32:
        raise ValueError(f"training.seed is {training['seed']}; it must be below 2**32")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= training.get(name, 0.9) < 1:
            raise ValueError(f"training.{name} is {training[name]}; it must be in [0, 1)")
    if training.get("save_strategy", "steps") not in ("no", "steps", "epoch"):
        raise ValueError(f"training.save_strategy is {training['save_strategy']!r}; it must be no, steps or epoch")
    if training.get("bf16") and training.get("fp16"):
        raise ValueError("training.bf16 and training.fp16 are both true; at most one can be")


def _check_choices(training: dict[str, Any]) -> None:
    """Names that `TrainingArguments` takes from an enumeration; its own message does not say which field is meant."""
    for name, hint in typing.get_type_hints(TrainingArguments).items():
        for choice in (hint, *typing.get_args(hint)):
            value = training.get(name)
            if isinstance(choice, type) and issubclass(choice, enum.Enum) and isinstance(value, str):
                allowed = [member.value for member in choice]
                if value not in allowed and value != "":
                    raise ValueError(f"training.{name} is {value!r}; it must be one of {allowed}")


def _check_reports(report_to: str | list[str] | None) -> None:
    """`report_to` names trackers that exist; TensorBoard, which a run writes by itself, must be installed."""
    allowed = sorted(["none", "all", *INTEGRATION_TO_CALLBACK])
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in names:
        if name not in allowed:
            raise ValueError(f"training.report_to is {name!r}; it must be one of {allowed}")
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "training.report_to is tensorboard, which is not installed: pip install 'tape-pe[tensorboard]'"
        )
