"""`generate` and caches of transformers with converted models."""

from __future__ import annotations

import pytest
import torch
from tests.convert.pretrained import KINDS, small_model, small_tape_model, tokens
from transformers import DynamicCache, StaticCache

import tape_pe

pytestmark = pytest.mark.parametrize("model_type", KINDS)
NEW = 14


def generate(model, ids, **options):
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=options.pop("do_sample", False), eos_token_id=None, **options
    )


def greedy_without_cache(model, ids):
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.no_grad()
def test_greedy_with_cache_is_greedy_without(model_type):
    model, ids = small_tape_model(model_type), tokens(2, 9)
    assert torch.equal(generate(model, ids), greedy_without_cache(model, ids))


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@torch.no_grad()
def test_caches(model_type, implementation):
    model, ids = small_tape_model(model_type), tokens(2, 9)
    assert torch.equal(generate(model, ids, cache_implementation=implementation), greedy_without_cache(model, ids))


@torch.no_grad()
def test_sampling_and_beams_with_and_without_cache(model_type):
    model, ids = small_tape_model(model_type), tokens(2, 9)
    for options in ({"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(generate(model, ids, use_cache=use_cache, **options))
        assert torch.equal(*texts), options


@torch.no_grad()
def test_assisted_generation_gives_greedy_text(model_type):
    model, ids = small_tape_model(model_type), tokens(1, 9)
    for assistant in (small_model(model_type, seed=5), small_tape_model(model_type, seed=0)):
        assert torch.equal(generate(model, ids, assistant_model=assistant), greedy_without_cache(model, ids))
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=2), greedy_without_cache(model, ids))


@torch.no_grad()
def test_an_early_exit_can_draft(model_type):
    model, ids = small_tape_model(model_type), tokens(1, 9)
    assert torch.equal(generate(model, ids, assistant_early_exit=2), greedy_without_cache(model, ids))


@torch.no_grad()
def test_rows_padded_on_the_left_give_their_own_text(model_type):
    model = small_tape_model(model_type)
    short, long = tokens(1, 5), tokens(1, 11, seed=3)
    batch = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], dim=1), long])
    mask = (batch != 0).long()
    together = generate(model, batch, attention_mask=mask)
    assert torch.equal(together[:1, 11:], generate(model, short)[:, 5:])
    assert torch.equal(together[1:, 11:], generate(model, long)[:, 11:])


@torch.no_grad()
def test_static_cache_steps_equal_the_full_forward(model_type):
    model, ids = small_tape_model(model_type), tokens(2, 20)
    cache = StaticCache(config=model.config, max_cache_len=24)
    full = model(ids).logits
    steps = [model(chunk, cache=cache).logits for chunk in ids.split([8, 1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_cache_crop_and_reorder(model_type):
    if model_type == "gemma3_text":
        pytest.skip("sliding caches cannot be cropped")
    model, ids = small_tape_model(model_type), tokens(2, 20)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0]))
    step = model(ids.flip(0)[:, 12:], cache=cache).logits
    torch.testing.assert_close(step, model(ids.flip(0)).logits[:, 12:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_unconverted_start_generates_the_base_models_text(model_type):
    base, ids = small_model(model_type), tokens(2, 9)
    before = generate(base, ids)
    assert torch.equal(generate(tape_pe.convert(base), ids), before)
