"""Tokenizers of tasks: one token per character, per word or per byte, or byte-pair encoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
_BPE_CHARACTERS = 4_000_000
"""Of so much text byte-pair encoding learns its merges."""


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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The same with one token per byte of the text's UTF-8 form."""
    return bpe_tokenizer([], len(pre_tokenizers.ByteLevel.alphabet()) + 2)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The same with byte-pair encoding, trained on the first four million characters of `texts`.

    Args:
        texts: what to learn merges from.
        vocab_size: most tokens of the vocabulary; without merges there are 258.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_beginning(texts, _BPE_CHARACTERS), trainer)
    return _wrapped(backend)


def leading_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens that a tokenizer puts before every text, such as BOS; `text` is any text that it knows."""
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(text)["input_ids"])
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _beginning(texts: Iterable[str], characters: int) -> Iterable[str]:
    """Texts until they have so many characters."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _tokenizer(tokens: Sequence[str], pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([PAD, EOS, *tokens])}))
    backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    return _wrapped(backend, model_input_names=["input_ids", "attention_mask"])


def _wrapped(backend: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **options,
    )
