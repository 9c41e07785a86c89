"""Tokenizers of synthetic tasks: one token per character, or one per word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer whose tokens are `<pad>` (id 0), `<eos>` (id 1) and then `characters` in their order.

    It adds no special tokens by itself and pads on the left. A character outside `characters` is an error when
    encoding, never silently replaced.

    Raises:
        ValueError: `characters` is empty or holds a character twice.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ValueError(f"characters is {characters!r}; it must hold at least one character, each only once")
    return _tokenizer(list(characters), pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"), decoders.Fuse())


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """The same with one token per word; white space stands between words, and is no token.

    Raises:
        ValueError: `words` is empty, holds a word twice, or one that is empty or has white space in it.
    """
    if not words or len(set(words)) != len(words) or any(word.split() != [word] for word in words):
        raise ValueError(f"words is {list(words)!r}; it must hold words without white space, each only once")
    return _tokenizer(words, pre_tokenizers.WhitespaceSplit(), None)


def _tokenizer(tokens: Sequence[str], pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([PAD, EOS, *tokens])}))
    backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
