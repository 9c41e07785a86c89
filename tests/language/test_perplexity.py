"""Perplexity by sliding windows, against scoring one token at a time."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tape_pe.language.perplexity import perplexity, windows


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, initializer_range=0.5, **sizes))


@torch.no_grad()
def one_by_one(model, ids, length, stride) -> list[float]:
    """The definition, literally: each token but the first, in the first window of `length` that holds it."""
    losses = []
    for target in range(1, len(ids)):
        start = 0
        while start + length <= target:
            start += stride
        logits = model(ids[None, start:target]).logits[0, -1].double()
        losses.append((logits.logsumexp(0) - logits[ids[target]]).item())
    return losses


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride"), [(20, 10, 5), (20, 10, 3), (20, 20, 7), (23, 10, 9), (2, 2, 1), (31, 4, 1)]
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_scoring_one_token_at_a_time(llama, make_tokens, num_tokens, length, stride, batch_size):
    ids = make_tokens(num_tokens)
    found = perplexity(llama.eval(), ids, length=length, stride=stride, batch_size=batch_size)
    losses = one_by_one(llama, ids, length, stride)
    assert found.tokens == len(losses) == num_tokens - 1
    assert found.nll_sum == pytest.approx(sum(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


@pytest.mark.parametrize("name", ["tape", "rope"])
def test_own_decoders(make_model, make_tokens, name):
    model, ids = make_model(name), make_tokens(40)
    found = perplexity(model, ids.tolist(), length=16, stride=6, batch_size=2)
    assert found.nll_sum == pytest.approx(sum(one_by_one(model, ids, 16, 6)), rel=1e-5)


@pytest.mark.parametrize("num_tokens", range(4, 40, 5))
@pytest.mark.parametrize(("length", "stride"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_windows_score_every_token_once(num_tokens, length, stride):
    found = windows(num_tokens, length, stride)
    assert [t for w in found for t in range(w.end - w.scored, w.end)] == list(range(1, num_tokens))
    assert all(0 <= w.start < w.end - w.scored and w.end - w.start <= length for w in found)


def test_more_context_never_comes_from_a_larger_stride():
    context = [min(w.end - w.scored - w.start for w in windows(100, 20, stride)[1:]) for stride in (1, 5, 10, 19)]
    assert context == [19, 15, 10, 1]


def test_the_model_is_left_as_it_was(llama, make_tokens):
    llama.config.attention_dropout = 0.5
    first, second = (perplexity(llama.train(), make_tokens(20), length=8, stride=4) for _ in range(2))
    assert first == second, "dropout is off"
    assert llama.training


def test_low_precision_is_summed_in_fp64(llama, make_tokens):
    ids = make_tokens(60)
    exact = perplexity(llama.double(), ids, length=8, stride=2)
    rounded = perplexity(llama.to(torch.bfloat16), ids, length=8, stride=2)
    assert rounded.nll_sum != exact.nll_sum
    assert rounded.nll_sum == pytest.approx(exact.nll_sum, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length=1: it must be at least 2"),
        ({"length": 21}, "length=21: the text has only 20 tokens"),
        ({"stride": 0}, "stride=0: it must be 1 to 9, less than the length, 10"),
        ({"stride": 10}, "stride=10: it must be 1 to 9"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"token_ids": torch.ones(2, 10)}, r"token_ids has shape \[2, 10\] and dtype torch.float32"),
        ({"token_ids": [3, 61] * 10}, "token_ids go from 3 to 61: the model knows 0..60"),
    ],
)
def test_what_is_refused(llama, make_tokens, changes, message):
    values = {"token_ids": make_tokens(20), "length": 10, "stride": 5, **changes}
    with pytest.raises(ValueError, match=message):
        perplexity(llama, values.pop("token_ids"), **values)


def test_a_broken_model_is_an_error(llama, make_tokens):
    with torch.no_grad():
        llama.lm_head.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="log-likelihood at length 10 is nan"):
        perplexity(llama, make_tokens(20), length=10, stride=5)
