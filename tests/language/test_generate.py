"""Text from pretrained models: greedy, drawn and by beams, as transformers itself decodes."""

import copy

import pytest
import torch

from tape_pe.language.generate import SamplingOptions, generate_text
from tape_pe.language.pretrained import load_causal_lm


@pytest.fixture
def llama(llama_folder):
    return load_causal_lm(str(llama_folder))


def test_greedy_takes_the_likeliest_tokens(llama, capsys):
    model, tokenizer = llama
    ids = tokenizer("The grass", return_tensors="pt").input_ids
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    start = tokenizer("The grass", return_tensors="pt").input_ids.shape[1]
    text = generate_text(model, tokenizer, "The grass", SamplingOptions(max_new_tokens=6), stream=True)
    assert text == tokenizer.decode(ids[0, start:], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == text.strip()


def test_drawing_depends_on_the_seed_alone(llama):
    def drawn(seed):
        return generate_text(*llama, "The grass", SamplingOptions(max_new_tokens=12, temperature=1.0, seed=seed))

    assert drawn(0) == drawn(0)
    assert len({drawn(seed) for seed in range(5)}) > 1


def test_nothing_but_the_likeliest_is_drawn_from_a_tiny_nucleus(llama):
    greedy = generate_text(*llama, "The sky", SamplingOptions(max_new_tokens=8))
    assert generate_text(*llama, "The sky", SamplingOptions(8, temperature=1.0, top_p=1e-6, seed=4)) == greedy


def test_beams_are_shown_at_the_end(llama, capsys):
    text = generate_text(*llama, "The sky", SamplingOptions(max_new_tokens=5, num_beams=3), stream=True)
    assert capsys.readouterr().out == text + "\n"


def test_tokens_that_the_model_does_not_know_are_refused(llama):
    model, tokenizer = copy.deepcopy(llama)
    tokenizer.add_tokens(["grassland"])
    with pytest.raises(ValueError, match=f"it has the token {len(tokenizer) - 1}; the model knows 0.."):
        generate_text(model, tokenizer, "grassland")


def test_chat_template(llama):
    model, tokenizer = llama
    with pytest.raises(ValueError, match="chat=True: the tokenizer has no chat template"):
        generate_text(model, tokenizer, "The sky", chat=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }} is"
    options = SamplingOptions(max_new_tokens=5)
    plain = tokenizer("The sky is", add_special_tokens=False, return_tensors="pt").input_ids
    expected = model.generate(plain, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, plain.shape[1] :]
    text = generate_text(model, tokenizer, "The sky", options, chat=True)
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: it must be an integer of at least 1"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"seed": -1}, "seed=-1"),
        ({"temperature": -0.1}, "temperature=-0.1: it must be 0 or a positive number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0: it must be above 0 and at most 1"),
        ({"top_p": 0.5}, "top_p=0.5: it needs a temperature above 0"),
    ],
)
def test_options_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**changes)
