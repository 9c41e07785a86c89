"""Options of `tape finetune`: the same in Python and as command-line flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tape_pe.convert import TapeConfig
from tape_pe.convert.freeze import BASE_GROUPS
from tape_pe.convert.rules import RULES
from tape_pe.files import read_json
from tape_pe.language.pretrained import FINETUNE_FILE, adapter_file, check_model_place, check_peft, short_name
from tape_pe.language.text import STDLIB, read_texts

METHODS = ("tape", "lora", "longlora", "theta", "full", "tape_lora")
PEFT_METHODS = ("lora", "longlora", "theta", "tape_lora")
TAPE_METHODS = ("tape", "tape_lora")
ROPE_RULES = (*RULES, "none")
FREE_ON_RESUME = frozenset({"output_dir", "save_steps", "logging_steps", "progress"})
"""Options that may differ when a run is resumed."""


@dataclass(frozen=True)
class FinetuneOptions:
    """Extension of a pretrained model to longer texts. The defaults are the published recipe for a 7B model
    (Zhu et al., arXiv 2501.00712); small models want a learning rate near 2e-4.

    Attributes:
        model: a model folder, or the name of a model on the Hugging Face hub; no adapter.
        length: tokens of a training sample, and the length that the model is meant for afterwards.
        method: `"tape"` puts TAPE in and trains it; `"lora"` trains low-rank changes of the attention's projections;
            `"longlora"` is the same with shifted sparse attention in training (arXiv 2309.12307); `"theta"` the same
            with a larger base of the rotary frequencies; `"full"` trains everything; `"tape_lora"` is TAPE and LoRA
            together.
        output_dir: folder to write to; default: `runs/finetune/MODEL-METHOD-LENGTH`.
        data: texts to train on, see `tape_pe.language.text.read_texts`.
        split: split of a data set to train on.
        text_field: field of a data set or of JSON lines that holds the text.
        data_tokens: tokens of text to read, whose blocks are then shuffled; default: as many as training needs. A text
            that is shorter is repeated, in another order each time.
        eval_data: texts to measure the held-out loss on; default: `eval_split` of a data set, or the first blocks of
            files, which are then not trained on.
        eval_split: split of a data set to measure the held-out loss on.
        eval_blocks: samples to measure the held-out loss on; 0 measures none.
        rope: frequency rule, `"linear"`, `"ntk"`, `"yarn"` or `"none"`; default: `"none"` for `theta`, else `"linear"`
            where `factor` is above 1.
        factor: how much the rule stretches; default: `length` in units of the longest text that the model is made for.
        rope_theta: base of the rotary frequencies with the method `theta`.
        also_train: what is trained beside the method's own weights: `"embed"`, the embeddings and the output layer,
            and `"norm"`, the norms; `full` trains them in any case.
        lora_rank: rank of the changes with LoRA.
        lora_alpha: their scale, in units of 1 / rank.
        tape: options of `tape_pe.TapeConfig` but `rope`, for `tape` and `tape_lora`.
        max_steps: optimizer steps.
        batch_size: samples that a device reads at once.
        accumulation: batches of a device that make a step.
        learning_rate: constant after the warm-up.
        warmup_steps: steps in which the learning rate rises to that; default: a twentieth of `max_steps`.
        weight_decay: of AdamW.
        max_grad_norm: largest norm of the gradient; 0 does not limit it.
        bf16: whether to compute in bfloat16; weights stay in float32.
        activation_checkpointing: whether to compute activations anew in the backward pass, which saves memory.
        seed: of new weights and of the order of samples.
        save_steps: steps between checkpoints; 0 writes none.
        logging_steps: steps between points of the loss curve.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    model: str
    length: int
    method: str = "tape"
    output_dir: str | None = None
    data: str = STDLIB
    split: str = "train"
    text_field: str = "text"
    data_tokens: int | None = None
    eval_data: str | None = None
    eval_split: str = "test"
    eval_blocks: int = 32
    rope: str | None = None
    factor: float | None = None
    rope_theta: float = 1e6
    also_train: tuple[str, ...] = ("embed", "norm")
    lora_rank: int = 8
    lora_alpha: float = 16.0
    tape: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 1000
    batch_size: int = 8
    accumulation: int = 8
    learning_rate: float = 2e-5
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    bf16: bool = False
    activation_checkpointing: bool = False
    seed: int = 0
    save_steps: int = 500
    logging_steps: int = 10
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value, whole = getattr(self, name), _TYPES[name].startswith("int")
            if value is None and "None" in _TYPES[name]:
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= least:
                kind = "an integer of at least" if whole else "a number of at least"
                raise ValueError(f"{name}={value!r}: it must be {kind} {least}")
            if value == float("inf"):
                raise ValueError(f"{name}={value!r}: it must be finite")
        for name, allowed in (("method", METHODS), ("rope", (*ROPE_RULES, None))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(choice for choice in allowed if choice)
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be one of {choices}")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed}: it must be below 2**32")
        if self.rope == "none" and self.factor is not None:
            raise ValueError(f"factor={self.factor}: it needs a rule, and rope is 'none'")
        if self.method == "longlora" and self.length % 4:
            raise ValueError(f"length={self.length}: longlora has four groups, so it must be a multiple of 4")
        object.__setattr__(self, "also_train", tuple(self.also_train))
        object.__setattr__(self, "tape", dict(self.tape))
        for group in self.also_train:
            if group not in BASE_GROUPS:
                raise ValueError(f"also_train has {group!r}: it can have {', '.join(BASE_GROUPS)}")

    @property
    def folder(self) -> Path:
        """Where the run is written to."""
        name = short_name(self.model).replace("/", "--")
        default = Path("runs") / "finetune" / f"{name}-{self.method}-{self.length}"
        return Path(self.output_dir) if self.output_dir else default

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "also_train": list(self.also_train), "tape": dict(self.tape)}


_TYPES = {f.name: str(f.type) for f in fields(FinetuneOptions)}
_LEAST: dict[str, float] = {
    "length": 2, "data_tokens": 2, "eval_blocks": 0, "factor": 1, "rope_theta": 1, "lora_rank": 1, "lora_alpha": 0,
    "max_steps": 1, "batch_size": 1, "accumulation": 1, "learning_rate": 0, "warmup_steps": 0, "weight_decay": 0,
    "max_grad_norm": 0, "seed": 0, "save_steps": 0, "logging_steps": 1,
}  # fmt: skip


def check_finetune(options: FinetuneOptions, *, resume: bool = False) -> None:
    """Everything that `finetune` refuses, found out before any work; loads no model and writes nothing.

    Raises:
        ValueError: options that do not fit together, a missing library, or a run that is not the one to resume.
        FileNotFoundError: the model or the data do not exist.
        FileExistsError: the output folder is in use, and `resume` is not set.
    """
    place = Path(options.model).expanduser()
    if (file := adapter_file(place)) is not None:
        raise ValueError(f"model={options.model!r}: holds an adapter ({file.name}); it must be a whole model")
    check_model_place(options.model)
    if options.method in TAPE_METHODS:
        if "rope" in options.tape:
            raise ValueError(f"tape.rope={options.tape['rope']!r}: the options rope and factor say it")
        TapeConfig.from_dict(options.tape)
    elif options.tape:
        raise ValueError(f"tape={dict(options.tape)}: the method {options.method} has no such options")
    if options.method in PEFT_METHODS:
        check_peft()
    read_texts(options.data, split=options.split, text_field=options.text_field)
    if options.eval_data is not None:
        read_texts(options.eval_data, split=options.eval_split, text_field=options.text_field)
    _check_folder(options, resume)


def _check_folder(options: FinetuneOptions, resume: bool) -> None:
    folder = options.folder
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"output_dir={folder}: a file; it must name a folder")
    if not folder.is_dir() or not any(not path.name.startswith(".") for path in folder.iterdir()):
        return
    file = folder / FINETUNE_FILE
    if not file.is_file():
        raise FileExistsError(f"output_dir={folder}: holds other files; choose another folder")
    if not resume:
        raise FileExistsError(f"output_dir={folder}: holds a run already; use --resume, or another folder")
    before, now = read_json(file).get("options", {}), options.to_dict()
    for name in now:
        if name not in FREE_ON_RESUME and before.get(name) != now[name]:
            raise ValueError(f"{name}={now[name]!r}: the run to resume has {before.get(name)!r} in {folder}")
