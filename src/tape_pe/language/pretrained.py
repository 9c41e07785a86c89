"""Loads causal language models for use: model folders, hub names, and adapters with the models they belong to."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import tape_pe.models  # noqa: F401 - its models become known to the Auto classes
from tape_pe.convert import TapeConfig, convert, load_adapter
from tape_pe.convert.adapter import CONFIG_FILE
from tape_pe.convert.peft import load_lora
from tape_pe.files import read_json

FINETUNE_FILE = "finetune.json"
PEFT_FILE = "adapter_config.json"
_BASE = "base_model_name_or_path"


def load_causal_lm(
    path_or_name: str | Path, *, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model, in evaluation mode, and its tokenizer.

    Args:
        path_or_name: a model folder, the folder of a `tape_pe` or PEFT adapter, what `tape finetune` wrote, or the name
            of a model on the Hugging Face hub. An adapter is put into the model that it names.
        dtype: precision of the weights.
        attn_implementation: as in transformers, such as `"sdpa"` or `"eager"`; default: the model's own.

    Returns:
        `(model, tokenizer)`. The model of a PEFT adapter is a `PeftModel`. The tokenizer is the adapter folder's own,
        or the base model's where it has none.

    Raises:
        FileNotFoundError: a folder does not exist, or is not one of these.
        ValueError: a file is damaged, the adapter does not fit, or the hub has no such model.
    """
    folder = Path(path_or_name).expanduser()
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    file = adapter_file(folder)
    if file is None:
        name = check_model_place(path_or_name)
        return load_base(name, **how).eval(), load_tokenizer(name)
    own = read_json(folder / FINETUNE_FILE) if (folder / FINETUNE_FILE).is_file() else {}
    base, changes = own.get(_BASE) or _base_of(file), own.get("config", {})
    if not isinstance(base, str) or not base:
        raise ValueError(f"{file} names no base model")
    try:
        name = check_model_place(base)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} names a base model that cannot be used: {error}") from error
    model = load_base(name, config_changes=changes, **how)
    if file.name == CONFIG_FILE:
        load_adapter(model, folder)
    else:
        model = _load_peft(model, folder, own)
    return model.eval(), load_tokenizer(str(folder) if (folder / "tokenizer_config.json").is_file() else name)


def _base_of(file: Path) -> Any:
    """The base model that an adapter's file names, a string if it does."""
    values = read_json(file)
    base = values.get("base")
    return values.get(_BASE) or (base.get("name_or_path") if isinstance(base, dict) else None)


def check_model_place(path_or_name: str | Path) -> str:
    """The path of a model folder, or a hub name, which is not looked up.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without a model.
    """
    text, folder = str(path_or_name), Path(path_or_name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            what = "whose fine-tuning has not finished" if (folder / FINETUNE_FILE).is_file() else "without a model"
            raise FileNotFoundError(f"{text} is a folder {what}: it has no config.json")
        return str(folder)
    if folder.exists() or not text or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"model={text!r} is not a model folder, nor the name of a model on the hub")
    return text


def short_name(path_or_name: str | Path) -> str:
    """What results call a model: the folder's name, that of a suite's run with task and encoding; or the hub name."""
    folder = Path(path_or_name).expanduser()
    if not folder.exists():
        return str(path_or_name)
    parts = folder.resolve().parts
    return "/".join(parts[-3:]) if re.fullmatch(r"seed-\d+", parts[-1]) else parts[-1]


def adapter_file(folder: Path) -> Path | None:
    """The file that makes a folder an adapter's, if it is one."""
    return next((folder / name for name in (CONFIG_FILE, PEFT_FILE) if (folder / name).is_file()), None)


def load_base(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    config_changes: Mapping[str, Any] | None = None,
) -> Any:
    """A model without an adapter, its config changed in some fields before it is built.

    Raises:
        ValueError: it cannot be loaded.
    """
    with _explained(name):
        config = AutoConfig.from_pretrained(name)
        for key, value in (config_changes or {}).items():
            setattr(config.get_text_config(), key, value)
        return AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=attn_implementation
        )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name.

    Raises:
        ValueError: it cannot be loaded.
    """
    with _explained(name):
        return AutoTokenizer.from_pretrained(name)


def check_peft() -> None:
    """Raises ValueError where PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("PEFT is needed for LoRA adapters and is not installed: pip install 'tape-pe[peft]'")


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """PEFT asks transformers for a name that transformers has deprecated, which is nothing to tell a user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _load_peft(model: Any, folder: Path, own: dict[str, Any]) -> Any:
    check_peft()
    from peft import PeftModel

    with _explained(str(folder)), without_peft_warnings():
        if own.get("method") != "tape_lora":
            return PeftModel.from_pretrained(model, folder)
        # PEFT's files do not say that the base was converted, nor how.
        return load_lora(convert(model, TapeConfig.from_dict(own["options"]["tape"])), folder)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns the libraries' errors of all kinds into a ValueError of one line that names the model."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or repr(error)
        raise ValueError(f"model {name!r} cannot be loaded: {reason}") from error
