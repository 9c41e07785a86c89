"""A tokenizer with one token per character."""

from __future__ import annotations

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
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
