"""`generate` with a cache writes what it writes without one, for every way of decoding."""

from __future__ import annotations

import pytest
import torch
from transformers import set_seed

from tape_pe.models import TapeCache

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "beams, three answers": {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
    "sampling, three answers": {"do_sample": True, "num_return_sequences": 3},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.5},
}


@pytest.fixture
def generate():
    """Generates 8 tokens with a fixed seed; returns all of them, the prompt included. Never writes padding, which is 0:
    `generate` would take it for padding when the text is given to it again."""

    def run(model, input_ids=None, **kwargs):
        set_seed(0)
        kwargs = {"max_new_tokens": 8, "pad_token_id": 0, "suppress_tokens": [0], "do_sample": False, **kwargs}
        return model.generate(input_ids, **kwargs)

    return run


@pytest.mark.parametrize("mode", list(MODES))
def test_with_and_without_cache(model, make_tokens, generate, mode):
    input_ids = make_tokens(2, 5)
    cached = generate(model, input_ids, use_cache=True, **MODES[mode])
    assert cached.shape == (2 * MODES[mode].get("num_return_sequences", 1), 13)
    assert torch.equal(cached, generate(model, input_ids, use_cache=False, **MODES[mode]))


def test_options(any_model, make_tokens, generate):
    input_ids = make_tokens(2, 5)
    expected = generate(any_model, input_ids, use_cache=False)
    assert torch.equal(generate(any_model, input_ids), expected)


def test_greedy_is_argmax(model, make_tokens, generate):
    """Against a loop of our own, so that a fault shared by both of `generate`'s ways would show."""
    input_ids = make_tokens(2, 5)
    expected = input_ids
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:, 1:].argmax(dim=-1) + 1], dim=1)
    assert torch.equal(generate(model, input_ids), expected)


def test_prompt_of_one_token(model, generate):
    input_ids = torch.tensor([[7]])
    assert torch.equal(generate(model, input_ids), generate(model, input_ids, use_cache=False))


@pytest.mark.parametrize("prefill_chunk_size", [1, 3])
def test_chunked_prefill(model, make_tokens, generate, prefill_chunk_size):
    input_ids = make_tokens(1, 8)
    chunked = generate(model, input_ids, prefill_chunk_size=prefill_chunk_size)
    assert torch.equal(chunked, generate(model, input_ids, use_cache=False))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_left_padded_rows_write_their_own_text(model, make_tokens, generate, mode, use_cache):
    input_ids = make_tokens(3, 7)
    mask = torch.ones_like(input_ids)
    mask[0, :4] = 0
    mask[2, :6] = 0
    input_ids = input_ids.masked_fill(mask == 0, 0)
    together = generate(model, input_ids, attention_mask=mask, use_cache=use_cache, **MODES[mode])
    for row in range(3):
        alone = generate(model, input_ids[row : row + 1, mask[row] != 0], use_cache=use_cache, **MODES[mode])
        assert torch.equal(together[row, 7:], alone[0, -8:])


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_cache_is_returned_and_continued(model, make_tokens, generate, mode):
    first = generate(model, make_tokens(2, 5), return_dict_in_generate=True, **MODES[mode])
    assert isinstance(first.cache, TapeCache)
    assert first.cache.get_seq_length() == 12, "the last token has been written, not read"
    more = torch.cat([first.sequences, make_tokens(2, 4, seed=3)], dim=1)
    continued = generate(model, more, cache=first.cache, **MODES[mode])
    assert torch.equal(continued, generate(model, more, use_cache=False, **MODES[mode]))


def test_own_cache_is_filled(make_model, make_tokens, generate):
    cache = TapeCache()
    generate(make_model("tape"), make_tokens(1, 5), cache=cache)
    assert cache.get_seq_length() == 12


def test_assistant_model(model, make_model, make_tokens, generate):
    """The assistant guesses wrong most of the time, so the cache is cropped again and again."""
    input_ids = make_tokens(1, 5)
    expected = generate(model, input_ids, use_cache=False, max_new_tokens=20)
    for assistant in (model, make_model("rope", 2, num_hidden_layers=1)):
        assisted = generate(model, input_ids, assistant_model=assistant, max_new_tokens=20)
        assert torch.equal(assisted, expected)


def test_prompt_lookup(model, make_tokens, generate):
    input_ids = make_tokens(1, 4).repeat(1, 3)
    looked_up = generate(model, input_ids, prompt_lookup_num_tokens=3, max_new_tokens=16)
    assert torch.equal(looked_up, generate(model, input_ids, use_cache=False, max_new_tokens=16))


def test_inputs_embeds(model, make_tokens, generate):
    input_ids = make_tokens(2, 5)
    inputs_embeds = model.get_input_embeddings()(input_ids)
    if model.config.encoding == "abacus":  # it reads digits
        with pytest.raises(ValueError, match="inputs_embeds: encoding='abacus'"):
            generate(model, inputs_embeds=inputs_embeds)
        return
    new = generate(model, inputs_embeds=inputs_embeds)
    assert torch.equal(new, generate(model, input_ids)[:, 5:])


def test_eos_ends_a_row(model, make_tokens, generate):
    input_ids = make_tokens(2, 5)
    free = generate(model, input_ids)
    stopped = generate(model, input_ids, eos_token_id=int(free[0, 7]))
    length = int((free[0, 5:] == free[0, 7]).nonzero()[0]) + 1
    assert torch.equal(stopped[0, : 5 + length], free[0, : 5 + length])
    assert (stopped[0, 5 + length :] == 0).all()


def test_documents_in_the_prompt(model, make_tokens, generate):
    """A packed prompt goes on with its last document, with and without a cache and a mask."""
    input_ids = make_tokens(2, 9)
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0] * 5 + [4] * 4])
    for kwargs in (
        {},
        {"use_cache": False},
        {"prefill_chunk_size": 2},
        {"attention_mask": torch.ones_like(input_ids)},
        {"num_beams": 2},
    ):
        together = generate(model, input_ids, document_ids=document_ids, **kwargs)
        kwargs.pop("attention_mask", None)
        for row, start in enumerate((6, 5)):
            alone = generate(model, input_ids[row : row + 1, start:], **kwargs)
            assert torch.equal(together[row, 9:], alone[0, -8:])


def test_generation_in_training_mode_with_checkpointing(make_model, make_tokens, generate):
    """Samples drawn in the middle of a training run; the cache stays on, as nothing needs gradients."""
    model = make_model("tape", 2)
    expected = generate(model, make_tokens(2, 5))
    model.train()
    model.activation_checkpointing_enable()
    assert torch.equal(generate(model, make_tokens(2, 5)), expected)


def test_documents_count_their_own_positions(make_model, make_tokens, generate, monkeypatch):
    """Encodings that see absolute positions must find the documents of a packed prompt at 0, as `forward` does."""
    model = make_model("rope")
    seen = []
    start = model.model.encoding.start
    monkeypatch.setattr(
        model.model.encoding,
        "start",
        lambda tokens, *args: seen.append(tokens.new_position_ids.tolist()) or start(tokens, *args),
    )
    document_ids = torch.tensor([[3, 3, 3, 5, 5]])
    generate(model, make_tokens(1, 5), document_ids=document_ids, max_new_tokens=3)
    assert seen == [[[0, 1, 2, 0, 1]], [[2]], [[3]]]


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded", "sliding_window"])
def test_other_caches_are_refused(make_model, make_tokens, generate, implementation):
    with pytest.raises(ValueError, match=f"cache_implementation='?{implementation}"):
        generate(make_model("tape"), make_tokens(1, 3), cache_implementation=implementation)
