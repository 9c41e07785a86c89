"""Faults that users of neighbouring software reported about long-context evaluation. Each is named after its report."""

from __future__ import annotations

import pytest

from tape_pe.language.perplexity import perplexity
from tape_pe.tasks.passkey import PasskeyPrompts, PasskeyTexts, first_number


@pytest.mark.parametrize("batch_size", [1, 4])
def test_transformers_30975_18887_strided_perplexity(make_model, make_tokens, batch_size):
    """N=20, window 10, stride 5: exactly 19 tokens are scored, each once, whatever the windows overlap."""
    model, ids = make_model("rope"), make_tokens(20)
    scored = perplexity(model, ids, length=10, stride=5, batch_size=batch_size)
    assert scored.tokens == 19
    losses = []
    for target in range(1, 20):
        start = 0 if target < 10 else 5 if target < 15 else 10
        logits = model(ids[None, start:target]).logits[0, -1].double()
        losses.append((logits.logsumexp(0) - logits[ids[target]]).item())
    assert scored.nll_sum == pytest.approx(sum(losses), rel=1e-5)


@pytest.mark.parametrize("length", [0, 1, 20, -5])
def test_lm_evaluation_harness_2963_prompt_too_short(passkey_tokenizer, length):
    """A length that the fixed words alone exceed was looked for for ever."""
    prompts = PasskeyPrompts(passkey_tokenizer, PasskeyTexts())
    with pytest.raises(ValueError, match=rf"length={length}: a prompt .* takes \d+ tokens without any filler"):
        prompts.make(length, depth=0.5, key=123)


@pytest.mark.parametrize(
    ("text", "right"),
    [("The key is 123.", True), ("123", True), (" 123\n456", True), ("91234", False), ("1234", False), ("", False)],
)
def test_needle_in_a_haystack_39_substrings_are_not_answers(text, right):
    """Key 123: a number that only contains it is wrong."""
    assert (first_number(text) == "123") is right
