"""Prompts and answers of SCROLLS have exactly their tokens; answers are as likely as the model says."""

from __future__ import annotations

import pytest
import torch

from tape_pe.tasks.scrolls_data import Example
from tape_pe.tasks.scrolls_prompts import PromptMaker, log_likelihoods
from tape_pe.tasks.tokenizers import byte_tokenizer, leading_tokens

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.mark.parametrize("truncation", ["end", "middle"])
@pytest.mark.parametrize("document", ["", "short", "größer " * 40, "0123456789" * 600])
def test_only_the_document_is_cut(truncation, document):
    maker = PromptMaker(TOKENIZER, truncation, 20)
    example = Example("x", "Who?\n\n", document, ())
    fixed, size = len("Who?\n\n\n\nAnswer:"), len(document.encode())
    for length in (fixed + 1, fixed + 2, fixed + 41, fixed + size - 1, fixed + size, fixed + size + 1):
        if length <= fixed:
            continue
        ids, cut = maker.prompt(example, length)
        text = TOKENIZER.decode(ids).encode()
        assert cut == (fixed + size > length)
        assert len(ids) == min(length, fixed + size)
        room = length - fixed
        kept = document.encode()
        if cut and truncation == "end":
            kept = kept[:room]
        elif cut:
            kept = kept[: room - room // 2] + kept[size - room // 2 :]
        assert text == f"Who?\n\n{kept.decode(errors='replace')}\n\nAnswer:".encode()


def test_what_the_tokenizer_puts_before_texts_is_put_before_prompts(passkey_tokenizer):
    assert leading_tokens(passkey_tokenizer, "Answer:") == [passkey_tokenizer.bos_token_id]
    assert leading_tokens(TOKENIZER, "Answer:") == []
    ids, _ = PromptMaker(passkey_tokenizer, "end", 20).prompt(Example("x", "", "The grass is green.", ()), 100)
    assert ids[0] == passkey_tokenizer.bos_token_id
    assert ids.count(passkey_tokenizer.bos_token_id) == 1


def test_long_documents_are_not_tokenised_whole(monkeypatch):
    """What is kept of them is the same all the same."""
    document = " ".join(f"word{n}" for n in range(20_000))
    for truncation in ("end", "middle"):
        maker, example = PromptMaker(TOKENIZER, truncation, 20), Example("x", "Who?\n\n", document, ())
        seen = []
        tokenise = maker._ids
        maker._ids = lambda text, tokenise=tokenise, seen=seen: seen.append(len(text)) or tokenise(text)
        ids, cut = maker.prompt(example, 200)
        assert cut
        assert max(seen) < len(document) / 10
        monkeypatch.setattr("tape_pe.tasks.scrolls_prompts._CHARACTERS", 10**9)
        assert maker.prompt(example, 200) == (ids, True)
        assert max(seen) == len(document)
        monkeypatch.undo()


def test_answers_end_unless_they_are_cut():
    maker = PromptMaker(TOKENIZER, "end", 6)
    assert maker.answer("four") == ([*TOKENIZER(" four")["input_ids"], EOS], False)
    assert maker.answer("seven") == (TOKENIZER(" seven")["input_ids"], True)
    assert maker.answer("") == ([*TOKENIZER(" ")["input_ids"], EOS], False)


def test_log_likelihoods_are_those_of_each_answer_alone(make_model):
    model = make_model("tape", vocab_size=len(TOKENIZER)).double()
    prompt = TOKENIZER("Who ate it?\n\nAnswer:")["input_ids"]
    answers = [[*TOKENIZER(text)["input_ids"], EOS] for text in (" he", " a long answer", " we", " nobody")]
    expected = []
    for answer in answers:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].detach().log_softmax(-1)
        expected.append(sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)))
    for rows in (1, 3, 4):
        assert log_likelihoods(model, prompt, answers, rows) == pytest.approx(expected, abs=1e-4)
