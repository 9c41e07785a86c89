"""Cached decoding is the full forward, however the cache is filled, cut, reordered and filled again."""

from __future__ import annotations

import copy

import pytest
import torch

from tape_pe.models import TapeCache

TOLERANCE = 1e-5


def decode(model, input_ids, cache, chunk, **kwargs):
    """Logits of `input_ids`, given `chunk` tokens at a time to a cache."""
    with torch.no_grad():
        pieces = [model(piece, cache=cache, use_cache=True, **kwargs).logits for piece in input_ids.split(chunk, dim=1)]
    return torch.cat(pieces, dim=1)


def assert_close(actual, expected):
    scale = max(1.0, float(expected.abs().max()))
    assert (actual - expected).abs().max() <= TOLERANCE * scale


@pytest.fixture
def full(make_tokens):
    """Logits of the full forward without a cache."""

    def compute(model, input_ids, **kwargs):
        with torch.no_grad():
            out = model(input_ids, use_cache=False, **kwargs)
        assert out.cache is None
        return out.logits

    return compute


def test_weights_are_felt(make_model, make_tokens):
    """The random weights of the other tests move states far from where they start, else they would test nothing."""
    states = make_model("tape", 2)(make_tokens(2, 12), output_position_states=True).position_states
    for state in states[1:]:
        assert (state - states[0]).abs().mean() > 0.1


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_chunks(any_model, make_tokens, full, chunk):
    input_ids = make_tokens(2, 20)
    assert_close(decode(any_model, input_ids, TapeCache(), chunk), full(any_model, input_ids))


def test_chunks_longer_than_an_attention_block(model, make_tokens, full):
    input_ids = make_tokens(1, 300)
    cache = TapeCache()
    actual = torch.cat([decode(model, input_ids[:, :290], cache, 145), decode(model, input_ids[:, 290:], cache, 1)], 1)
    assert_close(actual, full(model, input_ids))


def test_cache_is_returned_and_continued(model, make_tokens, full):
    input_ids = make_tokens(2, 11)
    expected = full(model, input_ids)
    with torch.no_grad():
        first = model(input_ids[:, :6])  # use_cache is the default of the config
        assert isinstance(first.cache, TapeCache)
        assert first.cache.get_seq_length() == 6
        second = model(input_ids[:, 6:], cache=first.cache)
    assert second.cache is first.cache
    assert second.cache.get_seq_length() == 11
    assert_close(second.logits, expected[:, 6:])


def test_cache_holds_the_states_that_layers_average(make_model, make_tokens):
    model = make_model("tape", 2)
    with torch.no_grad():
        out = model(make_tokens(2, 5), output_position_states=True)
    *updating, last = out.cache.layers
    for layer, state in zip(updating, out.position_states, strict=False):
        assert torch.equal(layer.states.expand_as(state), state)
    assert last.states is None, "the last layer updates nothing and must not cache states"
    assert out.cache.layers[0].states.shape == (1, 1, 5, 8), "the start state is one table for all rows and heads"


def test_tokens_are_not_copied_each_time(make_model, make_tokens):
    """Keys, values, states and facts: a few allocations for hundreds of tokens, and at most twice the memory."""
    model, input_ids = make_model("tape", 2), make_tokens(2, 300)
    mask = torch.ones(2, 300, dtype=torch.long)
    cache, addresses = TapeCache(), {}
    with torch.no_grad():
        for end in range(1, 301):
            model(input_ids[:, end - 1 : end], attention_mask=mask[:, :end], cache=cache, logits_to_keep=1)
            layer = cache.layers[1]
            held = [layer.keys, layer.values, layer.states, cache.position_ids, cache.segment_ids, cache.input_ids]
            for index, tensor in enumerate(held):
                addresses.setdefault(index, set()).add(tensor.data_ptr())
                if end > 1:
                    assert tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
    assert len(addresses) == 6
    assert all(len(seen) <= 10 for seen in addresses.values())


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_copies_go_on_alone(any_model, make_tokens, full, make_copy):
    """One prompt, three continuations, token by token in turn, one of them after a cut."""
    prompt, *others = (make_tokens(2, length, seed=length) for length in (9, 20, 21, 22))
    cache = TapeCache()
    decode(any_model, prompt, cache, 4)
    caches = [cache, make_copy(cache), make_copy(cache)]
    caches[2].crop(-2)
    kept = [9, 9, 7]
    logits = [[], [], []]
    for column in range(20):
        for index in range(3):
            logits[index].append(decode(any_model, others[index][:, column : column + 1], caches[index], 1))
    for index in range(3):
        text = torch.cat([prompt[:, : kept[index]], others[index][:, :20]], dim=1)
        assert caches[index].get_seq_length() == kept[index] + 20
        assert_close(torch.cat(logits[index], dim=1), full(any_model, text)[:, kept[index] :])


def test_tensors_that_were_handed_out_stay(make_model, make_tokens):
    model, cache = make_model("tape", 2), TapeCache()
    decode(model, make_tokens(2, 12), cache, 5)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.states)]
    held = [t for t in [*held, cache.position_ids, cache.input_ids] if t is not None]
    before = [tensor.clone() for tensor in held]
    twin = copy.copy(cache)
    cache.crop(-4)
    decode(model, make_tokens(2, 30, seed=1), cache, 1)
    decode(model, make_tokens(2, 3, seed=2), twin, 1)
    for tensor, expected in zip(held, before, strict=True):
        assert torch.equal(tensor, expected)


def test_one_table_serves_all_rows_until_their_positions_differ(make_model, make_tokens, full):
    model, input_ids = make_model("tape", 2), make_tokens(3, 30)
    cache = TapeCache()
    first = decode(model, input_ids[:, :20], cache, 1)
    assert cache.layers[0].states.shape == (1, 1, 20, 8)
    assert cache.position_ids.shape == (1, 20)
    positions = torch.arange(20, 30) + torch.tensor([[0], [3], [5]])
    with torch.no_grad():
        rest = model(input_ids[:, 20:], position_ids=positions, cache=cache).logits
    assert cache.layers[0].states.shape == (3, 1, 30, 8)
    assert_close(torch.cat([first, rest], dim=1)[:1], full(model, input_ids[:1]))
    joined = torch.cat([torch.arange(20).expand(3, -1), positions], dim=1)
    assert_close(rest, full(model, input_ids, position_ids=joined)[:, 20:])


def test_a_refusal_leaves_no_trace(make_model, make_tokens, full):
    model, input_ids = make_model("learned", 2, max_position_embeddings=12), make_tokens(1, 12)
    cache = TapeCache()
    decode(model, input_ids[:, :10], cache, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="12"):
            model(make_tokens(1, 5, seed=1), cache=cache)
    assert_close(decode(model, input_ids[:, 10:], cache, 1), full(model, input_ids)[:, 10:])


def test_gradients_after_a_prompt_without_them(make_model, make_tokens):
    """A prompt is read and continued without gradients, then trained on: nothing that autograd keeps is written to."""
    model, input_ids, cache = make_model("tape", 2).train(), make_tokens(1, 9), TapeCache()
    decode(model, input_ids[:, :5], cache, 1)
    first = model(input_ids[:, 5:7], cache=cache).logits.sum()
    second = model(input_ids[:, 7:], cache=cache).logits.sum()
    (first + second).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cut", [1, 4, 10])
def test_crop(any_model, make_tokens, full, cut):
    input_ids, other = make_tokens(2, 10), make_tokens(2, 6, seed=1)
    cache = TapeCache()
    decode(any_model, input_ids, cache, 10)
    cache.crop(-cut)
    assert cache.get_seq_length() == 10 - cut
    actual = decode(any_model, other, cache, 2)
    assert_close(actual, full(any_model, torch.cat([input_ids[:, : 10 - cut], other], dim=1))[:, 10 - cut :])


def test_crop_of_padded_rows(model, make_tokens, full):
    input_ids, other = make_tokens(2, 10), make_tokens(2, 3, seed=1)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    for cut in (2, 10):
        cache = TapeCache()
        with torch.no_grad():
            model(input_ids, attention_mask=mask, cache=cache)
        cache.crop(-cut)
        actual = decode(model, other, cache, 1)
        for row, start in ((0, 0), (1, min(4, 10 - cut))):
            alone = torch.cat([input_ids[row : row + 1, start : 10 - cut], other[row : row + 1]], dim=1)
            assert_close(actual[row], full(model, alone)[0, -3:])


def test_crop_refuses_an_absolute_length(make_model, make_tokens):
    cache = make_model("tape", 2)(make_tokens(1, 4)).cache
    with pytest.raises(ValueError, match="2"):
        cache.crop(2)


def test_reset(any_model, make_tokens, full):
    cache = TapeCache()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        any_model(make_tokens(2, 4, seed=3), attention_mask=mask, cache=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    input_ids = make_tokens(3, 9)
    assert_close(decode(any_model, input_ids, cache, 4), full(any_model, input_ids))


ROW_CHANGES = {
    "reorder_cache": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("change", list(ROW_CHANGES))
def test_rows_change_places(any_model, make_tokens, full, change, padded):
    input_ids = make_tokens(3, 7)
    mask = torch.ones(3, 7, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
        mask[2, :1] = 0
    apply, rows = ROW_CHANGES[change]
    cache = TapeCache()
    with torch.no_grad():
        any_model(input_ids, attention_mask=mask if padded else None, cache=cache)
    apply(cache)
    more = make_tokens(len(rows), 4, seed=5)
    actual = decode(any_model, more, cache, 2)
    for row, source in enumerate(rows):
        alone = torch.cat([input_ids[source, mask[source] != 0], more[row]])[None]
        assert_close(actual[row], full(any_model, alone)[0, -4:])


@pytest.mark.parametrize("give_mask", ["never again", "new tokens", "all tokens"])
def test_cache_remembers_padding(model, make_tokens, full, give_mask):
    input_ids = make_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    cache = TapeCache()
    with torch.no_grad():
        model(input_ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        masks = {"never again": None, "new tokens": mask[:, 8:], "all tokens": mask}
        actual = model(input_ids[:, 8:], attention_mask=masks[give_mask], cache=cache).logits
    assert_close(actual[0], full(model, input_ids[:1])[0, 8:])
    assert_close(actual[1], full(model, input_ids[1:, 5:])[0, 3:])


def test_padding_between_cached_and_new_tokens(model, make_tokens, full):
    """A conversation whose turns are padded on the right: padding in the middle of a row is skipped over."""
    input_ids = make_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:6] = 0
    mask[1, 9:] = 0
    cache = TapeCache()
    with torch.no_grad():
        model(input_ids[:, :6], attention_mask=mask[:, :6], cache=cache)
        actual = model(input_ids[:, 6:], attention_mask=mask[:, 6:], cache=cache).logits
    for row in range(2):
        real = mask[row] != 0
        alone = full(model, input_ids[row : row + 1, real])[0]
        new = mask[row, 6:] != 0
        assert_close(actual[row, new], alone[-int(new.sum()) :])


def test_a_mask_that_comes_late(model, make_tokens, full):
    """No mask for the first tokens, padding among the later ones."""
    input_ids = make_tokens(2, 8)
    cache = TapeCache()
    with torch.no_grad():
        model(input_ids[:, :4], cache=cache)
        actual = model(input_ids[:, 4:], attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), cache=cache).logits
    assert_close(actual[0], full(model, input_ids[:1])[0, 4:])
    alone = torch.cat([input_ids[1:, :4], input_ids[1:, 6:]], dim=1)
    assert_close(actual[1, 2:], full(model, alone)[0, 4:])


def test_position_ids_of_new_tokens(model, make_tokens, full):
    """Given positions are taken as they are, offset and gaps included."""
    input_ids = make_tokens(2, 10)
    position_ids = torch.tensor([[3, 4, 7, 8, 9, 20, 21, 22, 30, 31]])
    expected = full(model, input_ids, position_ids=position_ids)
    cache = TapeCache()
    with torch.no_grad():
        first = model(input_ids[:, :6], position_ids=position_ids[:, :6], cache=cache).logits
        rest = model(input_ids[:, 6:], position_ids=position_ids[:, 6:], cache=cache).logits
    assert_close(torch.cat([first, rest], dim=1), expected)


def test_gradients_pass_through_a_cache(make_model, make_tokens):
    """A cache filled while gradients are on can be used in training: its gradients reach the cached tokens."""
    model = make_model("tape", 2).train()
    input_ids = make_tokens(1, 6)
    cache = model(input_ids[:, :3], use_cache=True).cache
    model(input_ids[:, 3:], cache=cache).logits.sum().backward()
    split = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(input_ids).logits[:, 3:].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(split[name], parameter.grad, rtol=1e-4, atol=1e-4)
