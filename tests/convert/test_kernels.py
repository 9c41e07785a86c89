"""With sdpa, converted models attend by this package's kernels, with transformers' caches and masks of every kind."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.convert.pretrained import small_model, small_tape_model, tokens
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

import tape_pe
from tape_pe.convert import attention as converted
from tape_pe.models.cache import TapeCache, TapeCacheLayer

# Plain, two tables with windows, partial rotary.
pytestmark = pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi"])
NEW = 20


@pytest.fixture
def model(model_type):
    return small_tape_model(model_type, attention="sdpa")


@pytest.fixture
def calls(monkeypatch):
    """How often this package's attention is called, and transformers' sdpa."""
    monkeypatch.delenv("TAPE_BACKEND", raising=False)  # which may name sdpa itself
    counts = {"own": 0, "sdpa": 0}
    own, sdpa = converted.positional_attention, converted.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def count(name, function):
        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(converted, "positional_attention", count("own", own))
    monkeypatch.setitem(converted.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", count("sdpa", sdpa))
    return counts


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("how", ["plain", "left", "right", "packed", "decoding", "static"])
@torch.no_grad()
def test_one_pass_per_layer(model, calls, how):
    """Of four layers, those that average states (the last of each table does not) go through this package once."""
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    if how in ("left", "right"):
        mask[0, slice(0, 5) if how == "left" else slice(7, 12)] = 0
        model(ids, attention_mask=mask)
    elif how == "packed":
        model(ids[:1], position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]), use_cache=False)
    elif how == "static":
        model(ids, cache=StaticCache(config=model.config, max_cache_len=20))
    elif how == "decoding":
        mask[0, :5] = 0
        cache = model(ids, attention_mask=mask).cache
        calls.update(own=0, sdpa=0)
        model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), cache=cache)
    else:
        model(ids)
    averaging = sum(layer.tape is not None for layer in model.base_model.layers)
    assert averaging >= 2
    assert calls == {"own": averaging, "sdpa": 4 - averaging}


@pytest.mark.parametrize("name", ["backend", "dropout"])
def test_the_models_own_path(model, calls, name, monkeypatch):
    averaging = sum(layer.tape is not None for layer in model.base_model.layers)
    if name == "backend":
        monkeypatch.setenv("TAPE_BACKEND", "sdpa")
        model(tokens(2, 12))
        assert calls == {"own": 0, "sdpa": 4 + averaging}
    else:
        for layer in model.base_model.layers:
            layer.self_attn.attention_dropout = 0.5
        model.train()(tokens(2, 12))
        assert calls == {"own": 0, "sdpa": 4}


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_start_equals_the_base_with_padding(model_type, side):
    base, ids = small_model(model_type, attention="sdpa"), tokens(3, 24)
    mask = torch.ones_like(ids)
    for row, length in ((0, 9), (1, 1)):
        mask[row, slice(0, length) if side == "left" else slice(24 - length, 24)] = 0
    expected = base(ids, attention_mask=mask).logits
    actual = tape_pe.convert(base)(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_start_equals_the_base_with_packing_and_given_masks(model_type):
    base = small_model(model_type, attention="sdpa")
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": t.tolist()} for t in tokens(3, 7)])
    ids, positions = batch["input_ids"], batch["position_ids"]
    prefix = (torch.ones(21, 21).tril() + (torch.arange(21) < 6) > 0)[None, None]
    masks = {"full_attention": prefix, "sliding_attention": prefix} if model_type == "gemma3_text" else prefix

    def run(model):
        return [
            model(ids, position_ids=positions, use_cache=False).logits,
            model(ids, attention_mask=masks, use_cache=False).logits,
        ]

    expected = run(base)
    for actual, logits in zip(run(tape_pe.convert(base)), expected, strict=True):
        torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_gradients_are_those_of_eager(model, kind):
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    options = {"attention_mask": mask}
    if kind == "packed":
        options = {"position_ids": torch.tensor([[*range(8), *range(12)]]).expand(2, -1)}
    else:
        mask[0, slice(0, 6) if kind == "left" else slice(14, 20)] = 0
    labels = ids.masked_fill(mask.cumsum(dim=1) * mask <= 1, -100)  # nor the first real token, predicted by padding
    gradients = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(ids, labels=labels, use_cache=False, **options).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@torch.no_grad()
def test_steps_with_every_cache_equal_the_full_forward(model, padded):
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, : 5 * padded] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    full = model(ids, attention_mask=mask, position_ids=positions).logits
    caches = [
        DynamicCache(),
        DynamicCache(config=model.config),
        TapeCache(),
        StaticCache(config=model.config, max_cache_len=44),
    ]
    for cache in caches:
        ends = [11, *range(12, 36), 40]
        steps = [
            model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end], cache=cache
            ).logits
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        real = mask.bool()
        torch.testing.assert_close(torch.cat(steps, dim=1)[real], full[real], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_every_way_of_generating(model, model_type):
    ids = tokens(1, 9)
    expected = generate(model, ids, use_cache=False)
    assistant = small_tape_model(model_type, seed=5, attention="sdpa")
    ways = [
        {},
        {"cache_implementation": "static"},
        {"assistant_model": assistant},
        {"assistant_model": model},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_early_exit": 2},
        {"prefill_chunk_size": 4},
    ]
    for options in ways:
        assert torch.equal(generate(model, ids, **options), expected), options
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        assert torch.equal(generate(model, ids, **options), generate(model, ids, use_cache=False, **options)), options


@torch.no_grad()
def test_cache_layers_keep_states_apart(model, model_type):
    """As a layer of this package does: in place, one head where all share a table, none where nobody averages them."""
    cache = DynamicCache(config=model.config)
    model(tokens(2, 9), cache=cache)
    for index, layer in enumerate(model.base_model.layers):
        held = cache.layers[index]
        assert isinstance(held, TapeCacheLayer) == (not held.is_sliding)
        if held.is_sliding:
            assert held.values.shape[-1] == 16 + 16 * (layer.tape is not None)
        elif layer.tape is None:
            assert held.states is None
        else:
            assert held.states.shape[1] == (1 if layer is first_of_table(model, index) else 2)


def first_of_table(model, index):
    layers = model.base_model.layers
    return next(layer for layer in layers if layer.tape_slot == layers[index].tape_slot)


@torch.no_grad()
def test_cache_crop_reorder_select_and_copy(model, model_type):
    if model_type == "gemma3_text":
        pytest.skip("sliding caches cannot be cropped")
    ids, more = tokens(2, 20), tokens(2, 30, seed=8)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    twins = [cache, copy.deepcopy(cache)]
    texts = [more[:, :15], more[:, 15:]]
    logits = [[], []]
    for column in range(15):
        for index in range(2):
            logits[index].append(model(texts[index][:, column : column + 1], cache=twins[index]).logits)
    for index in range(2):
        full = model(torch.cat([ids.flip(0)[:, :12], texts[index]], dim=1)).logits[:, 12:]
        torch.testing.assert_close(torch.cat(logits[index], dim=1), full, rtol=1e-5, atol=1e-5)


class Offloading(DynamicCache):
    """Says that it offloads, as needs an accelerator, and keeps everything where it is."""

    def update(self, *args, **kwargs):
        self.offloading = False
        try:
            return super().update(*args, **kwargs)
        finally:
            self.offloading = True


@torch.no_grad()
def test_what_is_offloaded_holds_values_and_states_together(model):
    ids = tokens(2, 20)
    cache = Offloading(config=model.config)
    cache.offloading = True
    steps = [model(chunk, cache=cache).logits for chunk in ids.split([8, 1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(layer, TapeCacheLayer) for layer in cache.layers)


@torch.no_grad()
def test_compiled_with_a_padding_mask(model):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
