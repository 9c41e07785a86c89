"""A model, its tokenizer and a text, checked together before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tape_pe.convert.classes import is_converted
from tape_pe.evaluate import check_device, load_run
from tape_pe.language.pretrained import load_causal_lm
from tape_pe.models import TapeLMConfig
from tape_pe.options import CONFIG_FILE

LONGEST = 1024
"""Tokens; pictures of more have no room for them, and attention is kept whole."""


def load_model(place: str, dtype: torch.dtype = torch.float32, device: str | None = None) -> tuple[Any, Any]:
    """A run's model, or any other that `tape_pe.language.pretrained.load_causal_lm` knows, and its tokenizer.

    Args:
        place: run folder, model folder, adapter folder or hub name.
        dtype: precision of the weights.
        device: where it goes; default: the GPU if there is one, else the CPU.

    Raises:
        FileNotFoundError, ValueError: there is no such model, or it cannot be loaded.
    """
    target = check_device(device)
    if (Path(place).expanduser() / CONFIG_FILE).is_file():
        _, model, tokenizer, _ = load_run(Path(place).expanduser(), device)
        return model.to(dtype), tokenizer
    model, tokenizer = load_causal_lm(place, dtype=dtype)
    return model.to(target).eval(), tokenizer


def check_text(text: str, max_tokens: int) -> None:
    """What is wrong with a text whatever the model.

    Raises:
        ValueError: it is empty, or `max_tokens` is out of range.
    """
    if not text.strip():
        raise ValueError(f"text={text!r}: some text is needed")
    if not 2 <= max_tokens <= LONGEST:
        raise ValueError(f"max_tokens={max_tokens}: it must be 2 to {LONGEST}")


def read_tokens(tokenizer: Any, text: str, max_tokens: int, vocab_size: int) -> Tensor:
    """The tokens of a text, int64 `[1, N]`.

    Raises:
        ValueError: the tokenizer does not know a word, or there are too few or too many tokens.
    """
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    try:
        ids = tokenizer(text, verbose=False)["input_ids"]
    except Exception as error:  # the tokenizers library raises nothing narrower
        word = _unknown_word(tokenizer, text)
        what = str(error) if word is None else repr(word)
        raise ValueError(f"text={shown}: the tokenizer does not know {what}") from error
    if not 2 <= len(ids) <= max_tokens:
        raise ValueError(f"text={shown}: has {len(ids)} tokens; 2 to max_tokens={max_tokens} are needed")
    if max(ids) >= vocab_size:
        raise ValueError(f"text={shown}: has the token {max(ids)}; the model knows 0..{vocab_size - 1}")
    return torch.tensor([ids])


def _unknown_word(tokenizer: Any, text: str) -> str | None:
    """The first word that a tokenizer of whole words or characters does not have."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return None
    known = tokenizer.get_vocab()
    return next((word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text) if word not in known), None)


def token_texts(tokenizer: Any, input_ids: Tensor) -> list[str]:
    """The tokens of `[1, N]` as people read them: blanks and line ends are shown as signs."""
    texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in input_ids[0].tolist()]
    return [text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u21e5") or "\u2205" for text in texts]


def describe(model: Any) -> str:
    """Encoding and sizes, in a few words."""
    config = model.config
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(config, TapeLMConfig):
        kind = f"encoding {config.encoding}"
        kind += f" with {config.encoding_options}" if config.encoding_options else ""
    else:
        kind = f"{config.model_type.removeprefix('tape_')}{' with TAPE' if is_converted(model) else ''}"
    shared = "" if kv_heads == heads else f" on {kv_heads} key/value heads"
    return f"{kind}, {layers} layers, {heads} heads{shared}"


def why_no_states(model: Any, has_states: bool) -> str:
    """Why a page has no moved states."""
    config = model.config
    if isinstance(config, TapeLMConfig):
        name = f"the encoding {config.encoding}"
        if config.encoding == "tape":
            return "No state differs from the start state: the weights of TAPE are still where they started, or off."
        if has_states:
            return f"States of {name} never change: every layer reads the start state, so there is nothing to compare."
        return f"There are no states to show: {name} gives a token no state that layers could read and change."
    if is_converted(model):
        return "No state differs from the start state: the weights of TAPE are still zero, as after conversion."
    return f"There are no states to show: this {config.model_type} is not converted, its positions never change."
