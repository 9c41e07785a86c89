"""A real pretrained model loads, writes sense with its cache, and scores as it should."""

from __future__ import annotations

import math

import pytest
import torch

from tape_pe.language.generate import SamplingOptions, generate_text
from tape_pe.language.perplexity import perplexity
from tape_pe.tasks.passkey import PasskeyPrompts, answer_prompts

pytestmark = pytest.mark.real
TEXT = (
    "The Moon is the only natural satellite of the Earth. It orbits the planet at an average distance of about "
    "384,400 kilometres and always shows the same face to it. Its gravity is the main cause of the tides of the sea."
)


def test_writes_sense(smollm2):
    assert generate_text(*smollm2, "The capital of France is", SamplingOptions(6)).startswith(" Paris")


def test_cache_changes_nothing(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        whole = model(ids).logits
        first = model(ids[:, :20], use_cache=True)
        rest = model(ids[:, 20:], cache=first.cache).logits
    assert (rest - whole[:, 20:]).abs().max() <= 1e-3


def test_perplexity(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[0]
    found = perplexity(model, ids, length=len(ids), stride=8)
    with torch.inference_mode():
        loss = model(ids[None], labels=ids[None]).loss.item()
    assert found.tokens == len(ids) - 1
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert 2 < found.perplexity < 30
    less_context = perplexity(model, ids, length=16, stride=8)
    assert less_context.tokens == found.tokens
    assert less_context.perplexity > found.perplexity
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    assert perplexity(model, shuffled, length=len(ids), stride=8).perplexity > 20 * found.perplexity


def test_finds_the_passkey(smollm2):
    model, tokenizer = smollm2
    prompts = PasskeyPrompts(tokenizer)
    asked = [prompts.from_seed(256, depth, seed) for seed, depth in enumerate((0.0, 0.5, 1.0, None))]
    answers = answer_prompts(model, tokenizer, asked, batch_size=2)
    assert all(answer.exact_match and answer.first_number for answer in answers)
