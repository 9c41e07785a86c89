"""lm-evaluation-harness with adapters: its model `tape` is its model `hf`, loaded by `tape_pe.language.pretrained`.

    tape lm-eval --model_args pretrained=FOLDER --tasks arc_easy
    lm_eval.simple_evaluate(model="tape", model_args={"pretrained": FOLDER}, tasks=[...])    # after this import

The harness has no plug-ins: it knows `tape` once this module is imported, which `tape lm-eval` does.
Needs `pip install 'tape-pe[eval]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from tape_pe.evaluate import check_device
from tape_pe.language.pretrained import load_causal_lm


@register_model("tape")
class TapeHarnessModel(HFLM):
    """A causal language model, with or without an adapter.

    Args:
        pretrained: a model folder, adapter folder or hub name, or a model that is loaded already.
        dtype: precision, such as `"bfloat16"`.
        device: where to run, such as `"cpu"`; default: the GPU if there is one.
        attn_implementation: as in transformers.
        tokenizer: the tokenizer; default: the one that belongs to the folder.
        **options: further options of `HFLM`, such as `batch_size`, `max_length` or `add_bos_token`.

    Raises:
        ValueError: `dtype` is not the name of a floating-point type.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        dtype: str | torch.dtype = "float32",
        device: str | None = None,
        attn_implementation: str | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        model: Any = pretrained
        if isinstance(pretrained, str):
            precision = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
                raise ValueError(f"dtype={dtype!r}: it must be a floating-point type, such as float32 or bfloat16")
            model, own_tokenizer = load_causal_lm(pretrained, dtype=precision, attn_implementation=attn_implementation)
            model, tokenizer = model.to(check_device(device)), tokenizer or own_tokenizer
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        self.pretrained = pretrained if isinstance(pretrained, str) else model.name_or_path


def main(words: Sequence[str]) -> None:
    """The harness's own command line, with `tape` as the model where none is named."""
    words = list(words)
    runs = not words or words[0] == "run" or words[0].startswith("--")
    if runs and "--help" not in words and not any(word.partition("=")[0] in ("--model", "-M") for word in words):
        words += ["--model", "tape"]
        if not torch.cuda.is_available() and not any(word.partition("=")[0] == "--device" for word in words):
            words += ["--device", "cpu"]  # the harness would take cuda:0
    before = sys.argv
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
