"""Abacus: places of digits against a loop over tokens, and what training draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tape_pe.encodings import EncodingSizes, Tokens
from tape_pe.encodings.abacus import Abacus, AbacusOptions, places_in_numbers
from tape_pe.models import TapeCache
from tape_pe.options import ModelOptions
from tape_pe.tasks import Addition
from tape_pe.tasks.tokenizers import character_tokenizer
from tape_pe.train import build_config, build_model

SIZES = EncodingSizes(32, 4, 2, 8, 3, 64, {"rope_type": "default", "rope_theta": 10000.0}, 0.02)
DIGITS = list(range(10))
# 12+345=6789, with 10 for the signs.
EQUATION = [1, 2, 10, 3, 4, 5, 10, 6, 7, 8, 9]
PLACES = [1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]


def build(**options: object) -> Abacus:
    parsed = Abacus.options_class.from_dict("abacus", {"digit_token_ids": DIGITS, **options})
    Abacus.check(SIZES, parsed)
    return Abacus(SIZES, parsed)


def tokens_of(*rows: list[int], num_new: int | None = None) -> Tokens:
    ids = torch.tensor(rows)
    return Tokens(torch.arange(ids.shape[1])[None], num_new or ids.shape[1], input_ids=ids)


def literal(is_digit: list[bool], segments: list[int]) -> list[int]:
    """Token by token."""
    places, count, previous = [], 0, None
    for digit, segment in zip(is_digit, segments, strict=True):
        if segment < 0:
            places.append(0)
            continue
        count = count + 1 if digit and (segment == previous or not count) else int(digit)
        previous = segment
        places.append(count)
    return places


def test_places_of_an_equation() -> None:
    is_digit = torch.tensor([[token < 10 for token in EQUATION]])
    assert places_in_numbers(is_digit).tolist() == [PLACES]
    assert literal(is_digit[0].tolist(), [0] * 11) == PLACES


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 30), st.booleans())
def test_places_of_random_rows(seed: int, length: int, has_segments: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_digit = torch.rand(3, length, generator=generator) < 0.7
    segments = (torch.rand(3, length, generator=generator) < 0.2).long().cumsum(dim=1)
    segments = segments.where(torch.rand(3, length, generator=generator) < 0.7, -1)
    actual = places_in_numbers(is_digit, segments if has_segments else None)
    for row in range(3):
        labels = segments[row].tolist() if has_segments else [0] * length
        assert actual[row].tolist() == literal(is_digit[row].tolist(), labels)


def test_rows_of_the_places_are_added() -> None:
    encoding = build(max_digits=4, max_offset=3).eval()
    weight = encoding.digit_embeddings.weight
    assert weight.shape == (1 + 4 + 3, 32)
    added = encoding.embed(tokens_of(EQUATION, EQUATION[::-1]))
    assert torch.equal(added[0], weight[PLACES])
    assert torch.equal(added[1], weight[[1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    assert torch.equal(encoding.embed(tokens_of(EQUATION, num_new=3)), added[:1, -3:]), "cached digits count"


def test_training_draws_one_offset_per_row() -> None:
    encoding = build(max_offset=5, max_digits=4)
    weight = encoding.digit_embeddings.weight.detach()
    places, seen = torch.tensor(PLACES), set()
    torch.manual_seed(0)
    for _ in range(40):
        added = encoding.embed(tokens_of(EQUATION, EQUATION))
        for row in added:
            offset = next(k for k in range(6) if torch.equal(row[0], weight[1 + k]))
            assert torch.equal(row, weight[torch.where(places > 0, places + offset, 0)])
            seen.add(offset)
    assert seen == set(range(6))
    torch.manual_seed(7)
    first = encoding.embed(tokens_of(EQUATION, EQUATION))
    torch.manual_seed(7)
    assert torch.equal(encoding.embed(tokens_of(EQUATION, EQUATION)), first)
    without = build(max_offset=0)
    assert torch.equal(without.embed(tokens_of(EQUATION))[0], without.digit_embeddings.weight[PLACES])


@pytest.mark.parametrize("training", [False, True])
def test_longer_numbers_are_refused(training: bool) -> None:
    encoding = build(max_digits=3).train(training)
    with pytest.raises(ValueError, match="a number of 4 digits: encoding='abacus' has max_digits=3"):
        encoding.embed(tokens_of(EQUATION))


def test_embeddings_without_ids_are_refused(make_model, make_tokens) -> None:
    """In the cache as well, as the number may have begun there."""
    model, input_ids = make_model("abacus"), make_tokens(1, 4)
    embeds = model.get_input_embeddings()(input_ids)
    with pytest.raises(ValueError, match="inputs_embeds: encoding='abacus' reads the numbers in input_ids"):
        model(inputs_embeds=embeds)
    cache = model(input_ids).cache
    with pytest.raises(ValueError, match="inputs_embeds: encoding='abacus'"):
        model(inputs_embeds=embeds, cache=cache)
    more = model(input_ids, cache=cache).logits
    expected = model(torch.cat([input_ids, input_ids], dim=1)).logits[:, 4:]
    torch.testing.assert_close(more, expected, rtol=1e-5, atol=1e-5)


def test_cached_tokens_of_another_offset_are_refused(make_model, make_tokens) -> None:
    model = make_model("abacus").train()
    cache = TapeCache()
    model(make_tokens(1, 4), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cache: encoding='abacus' draws an offset anew"):
        model(make_tokens(1, 1), cache=cache)
    model.eval()(make_tokens(1, 1), cache=cache)


def test_compiled_graphs_refuse_longer_numbers(make_model) -> None:
    torch._dynamo.reset()
    model = make_model("abacus", encoding_options={"max_digits": 3}, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        short = torch.tensor([[5, 6, 7, 1, 8]])
        torch.testing.assert_close(compiled(short, use_cache=False).logits, model(short).logits)
        with pytest.raises(IndexError):
            compiled(torch.tensor([[5, 6, 7, 8, 1]]), use_cache=False)
    torch._dynamo.reset()


def test_base() -> None:
    tokens = tokens_of(EQUATION)
    assert build().start(tokens) is None
    state = build(base="rope").start(tokens)
    assert state.shape == (1, 1, 11, 8)
    query = torch.randn(1, 4, 11, 8)
    for base, moves in (("nope", False), ("rope", True)):
        layer = Abacus.layer(SIZES, AbacusOptions(DIGITS, base=base), 0)
        rotated, _ = layer.rotate(query, query[:, :2], state)
        assert torch.equal(rotated, query) != moves


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digit_token_ids": None}, "digit_token_ids=None: encoding='abacus' needs the ids"),
        ({"digit_token_ids": []}, r"digit_token_ids=\[\]: distinct token ids"),
        ({"digit_token_ids": [3, 3]}, r"digit_token_ids=\[3, 3\]: distinct token ids"),
        ({"digit_token_ids": [3, -1]}, r"digit_token_ids=\[3, -1\]: distinct token ids"),
        ({"digit_token_ids": ["3"]}, r"digit_token_ids=\['3'\]: distinct token ids"),
        ({"digit_token_ids": "0123"}, "digit_token_ids='0123': list"),
        ({"max_digits": 0}, "max_digits=0: at least 1"),
        ({"max_offset": -1}, "max_offset=-1: at least 0"),
        ({"base": "tape"}, "base='tape': allowed values are nope, rope"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"encoding_options.{message}"):
        build(**options)


def test_training_runs_fill_in_the_digits_of_their_tokenizer() -> None:
    tokenizer, model = Addition().tokenizer(), ModelOptions(encoding="abacus", encoding_options={"max_digits": 20})
    config = build_config(model, tokenizer)
    assert config.encoding_options == {
        "max_digits": 20,
        "digit_token_ids": [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"],
    }
    assert model.encoding_options == {"max_digits": 20}
    given = ModelOptions(encoding="abacus", encoding_options={"digit_token_ids": [4, 5]})
    assert build_config(given, tokenizer).encoding_options == {"digit_token_ids": [4, 5]}
    assert build_config(ModelOptions(encoding="rope"), tokenizer).encoding_options == {}
    with pytest.raises(ValueError, match=r"model: encoding_options.digit_token_ids=None: the tokenizer has .* '8'"):
        build_config(model, character_tokenizer("01234567+="))


def test_places_in_the_addition_task() -> None:
    model = build_model(ModelOptions(32, 48, 1, 4, encoding="abacus"), Addition().tokenizer(), seed=0).eval()
    input_ids = Addition().tokenizer()("12+345=6789", return_tensors="pt").input_ids
    hidden = model(input_ids, output_hidden_states=True).hidden_states[0]
    added = hidden - model.get_input_embeddings()(input_ids)
    torch.testing.assert_close(added[0], model.model.encoding.digit_embeddings.weight[PLACES], rtol=0, atol=1e-6)
