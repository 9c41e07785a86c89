"""Learned positions: a row per position, and none beyond."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.learned import Learned
from tape_pe.models import TapeCache, TapeLMForCausalLM

SIZES = EncodingSizes(32, 4, 2, 8, 3, 16, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)
BEYOND = "encoding='learned' has max_position_embeddings=16"


def test_rows_are_those_of_the_positions() -> None:
    encoding = Learned(SIZES, Learned.options_class())
    positions = torch.tensor([[3, 0, 15], [15, 15, 2]])
    added = encoding.embed(Tokens(positions, 3))
    for row in range(2):
        for column in range(3):
            assert torch.equal(added[row, column], encoding.position_embeddings.weight[positions[row, column]])
    assert torch.equal(encoding.embed(Tokens(positions, 2)), added[:, 1:])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 16], f"position_ids hold 16: {BEYOND}"),
        ([900, 3], f"position_ids hold 900: {BEYOND}"),
        ([-1, 3], f"position_ids hold -1: {BEYOND} positions, from 0 on"),
        ([0.0, 1.0], f"position_ids has the dtype torch.float32: {BEYOND} rows, which need integers"),
    ],
    ids=str,
)
def test_other_positions_are_refused(positions: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Learned(SIZES, Learned.options_class()).embed(Tokens(torch.tensor([positions]), 2))


def test_padding_has_no_position() -> None:
    """Rows padded to more than the bound, with positions that count on."""
    encoding = Learned(SIZES, Learned.options_class())
    segments = torch.tensor([[0] * 16 + [-1] * 4])
    added = encoding.embed(Tokens(torch.arange(20)[None], 20, segments))
    assert torch.equal(added[0, :16], encoding.position_embeddings.weight)
    with pytest.raises(ValueError, match=BEYOND):
        encoding.embed(Tokens(torch.arange(20)[None], 20, segments.roll(1, dims=1)))


def test_documents_may_fill_a_longer_row(make_model, make_tokens) -> None:
    model, input_ids = make_model("learned", max_position_embeddings=16), make_tokens(1, 24)
    packed = model(input_ids, document_ids=torch.tensor([[0] * 10 + [1] * 14])).logits
    torch.testing.assert_close(packed[:, 10:], model(input_ids[:, 10:]).logits, rtol=1e-5, atol=1e-5)


def test_text_beyond_the_bound_is_refused_and_leaves_the_cache_alone(make_model, make_tokens) -> None:
    model, input_ids = make_model("learned", max_position_embeddings=16), make_tokens(2, 16)
    with pytest.raises(ValueError, match=BEYOND):
        model(make_tokens(2, 17))
    expected = model(input_ids, use_cache=False).logits
    cache = TapeCache()
    with torch.no_grad():
        model(input_ids[:, :14], cache=cache)
        for given in ({}, {"document_ids": torch.full((2, 3), 7), "position_ids": torch.tensor([[16, 17, 18]])}):
            with pytest.raises(ValueError, match=BEYOND):
                model(make_tokens(2, 3), cache=cache, **given)
            assert cache.get_seq_length() == cache.position_ids.shape[1] == cache.input_ids.shape[1] == 14
            assert cache.segment_ids is None
        torch.testing.assert_close(model(input_ids[:, 14:], cache=cache).logits, expected[:, 14:], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=BEYOND):
        model.generate(input_ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_compiled_graphs_check_the_length(make_model, make_tokens) -> None:
    torch._dynamo.reset()
    model = make_model("learned", max_position_embeddings=16, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for length in (9, 16):
            input_ids = make_tokens(2, length)
            torch.testing.assert_close(compiled(input_ids, use_cache=False).logits, model(input_ids).logits)
        with pytest.raises(RuntimeError, match=BEYOND):
            compiled(make_tokens(2, 17), use_cache=False)
        with pytest.raises(IndexError):
            compiled(make_tokens(1, 2), position_ids=torch.tensor([[3, 16]]), use_cache=False)
    torch._dynamo.reset()


def test_start_weights_are_random_and_loading_keeps_trained_ones(make_config, randomize, tmp_path) -> None:
    torch.manual_seed(0)
    model = TapeLMForCausalLM(make_config("learned", initializer_range=0.05))
    weight = model.model.encoding.position_embeddings.weight
    assert weight.shape == (512, 32)
    assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.encoding.position_embeddings.weight, weight)
    before = weight.clone()
    model.resize_token_embeddings(70)
    assert torch.equal(model.model.encoding.position_embeddings.weight, before)
