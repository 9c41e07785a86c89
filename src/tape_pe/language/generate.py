"""What models write: one prompt, greedily or by sampling, shown while it is written; and many prompts together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer, set_seed

GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""Arguments of `generate` that always take the likeliest token, whatever the model's own defaults are."""


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that fills rows behind their end: padding, or EOS for tokenizers without."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def continue_greedily(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """What a model writes behind prompts that it reads together, padded on the left where they are shorter.

    Args:
        model: anything with `generate` and `device` as in transformers.
        tokenizer: says which token fills rows.
        prompts: token ids of the prompts.
        max_new_tokens: most tokens to write; those behind a row's end of sequence are padding.
    """
    longest = max(map(len, prompts))
    fill = padding_id(tokenizer)
    rows = [[fill] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_new_tokens,
            num_beams=1,
            use_cache=True,
            pad_token_id=fill,
            **GREEDY,
        )
    return output[:, longest:].tolist()


@dataclass(frozen=True)
class SamplingOptions:
    """How text is chosen.

    Attributes:
        max_new_tokens: most tokens to write.
        temperature: 0 always takes the likeliest token; above 0, tokens are drawn.
        top_p: draw from the likeliest tokens that together have this probability; needs a temperature above 0.
        num_beams: beams of a beam search; with more than one, the text is shown when it is finished.
        seed: seed of the drawing.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    num_beams: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("num_beams", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**32:
                raise ValueError(f"{name}={value!r}: it must be an integer of at least {least}, below 2**32")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: it must be 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: it must be above 0 and at most 1")
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p={self.top_p}: it needs a temperature above 0, otherwise nothing is drawn")


def generate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: SamplingOptions | None = None,
    *,
    chat: bool = False,
    stream: bool = False,
) -> str:
    """What a model writes after a prompt.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompt: the text to go on from.
        options: how; default: the likeliest tokens.
        chat: put the prompt into the tokenizer's chat template, as a user's message.
        stream: print words to the terminal as they come; with beams, when all are there.

    Raises:
        ValueError: the prompt has no tokens, or there is no chat template.
    """
    options = options or SamplingOptions()
    if chat and not tokenizer.chat_template:
        raise ValueError("chat=True: the tokenizer has no chat template")
    if chat:
        message = [{"role": "user", "content": prompt}]
        template = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        inputs = tokenizer.apply_chat_template(message, **template)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    input_ids = inputs["input_ids"].to(model.device)
    if input_ids.shape[1] == 0:
        raise ValueError(f"prompt={prompt!r}: it must hold at least one token")
    known = model.get_input_embeddings().num_embeddings
    if (largest := int(input_ids.max())) >= known:
        raise ValueError(f"prompt={prompt!r}: it has the token {largest}; the model knows 0..{known - 1}")
    one_by_one = stream and options.num_beams == 1
    drawing = GREEDY
    if options.temperature > 0:
        drawing = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    set_seed(options.seed)
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=options.max_new_tokens,
            num_beams=options.num_beams,
            use_cache=True,
            pad_token_id=padding_id(tokenizer),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if one_by_one else None,
            **drawing,
        )
    text = str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
    if stream and not one_by_one:
        print(text)
    return text
