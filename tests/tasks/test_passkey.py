"""Passkey prompts have exactly their length and one key; answers are scored by two protocols."""

from types import SimpleNamespace

import pytest
import torch

from tape_pe.tasks.passkey import LARGEST_KEY, NEW_TOKENS, PasskeyPrompts, PasskeyTexts, Prompt, answer_prompts, score
from tape_pe.tasks.tokenizers import character_tokenizer

SMALL = PasskeyTexts(introduction="k", filler="abc. de. ", key_sentence="<{key}>", question="?", answer="{key}.")


@pytest.fixture(params=["words", "characters"])
def prompts(request, passkey_tokenizer) -> PasskeyPrompts:
    """For a tokenizer like those of large models, and for one of a small model trained on characters."""
    if request.param == "words":
        return PasskeyPrompts(passkey_tokenizer)
    return PasskeyPrompts(character_tokenizer("0123456789abcdek<>?. "), SMALL)


def oracle(prompts: PasskeyPrompts, change=lambda ids: ids) -> SimpleNamespace:
    """A model that finds the key in the text it reads, and writes the answer and some more words."""

    def generate(input_ids, attention_mask, max_new_tokens, **options):
        assert not options["do_sample"]
        assert attention_mask.shape == input_ids.shape
        rows = []
        for text in prompts.tokenizer.batch_decode(input_ids):
            key = "".join(filter(str.isdigit, text.split("<bos>")[-1]))
            key = key[: len(key) // 2] if "pass" in text else key
            after = change(prompts._answer(int(key))) + prompts._sentences[0] * NEW_TOKENS
            rows.append(after[:max_new_tokens])
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    return SimpleNamespace(generate=generate, device="cpu")


@pytest.mark.parametrize("extra", [0, 1, 2, 5, 7, 8, 9, 40, 41, 500])
@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1])
def test_exact_length_and_one_key(prompts, extra, depth):
    for key in (1, 73, LARGEST_KEY):
        length = prompts.shortest(key) + extra
        prompt = prompts.make(length, depth, key)
        assert len(prompt.input_ids) == length
        text = prompts.tokenizer.decode(prompt.input_ids)
        sentence = prompts.texts.key_sentence.replace("{key}", str(key))
        assert text.count(sentence) == 1
        assert str(key) not in text.replace(sentence, "")
        assert text.endswith(prompts.texts.question)
        assert prompts.texts.introduction in text


def test_whole_text_is_what_the_tokenizer_makes_of_it(passkey_tokenizer):
    """Joined as tokens, but at places where the tokenizer itself would cut."""
    prompts = PasskeyPrompts(passkey_tokenizer)
    filler = len(passkey_tokenizer(prompts.texts.filler, add_special_tokens=False).input_ids)
    ids = prompts.make(prompts.shortest(123) + 3 * filler, 0.5, 123).input_ids
    assert ids[0] == passkey_tokenizer.bos_token_id
    assert passkey_tokenizer(passkey_tokenizer.decode(ids[1:])).input_ids == ids


def test_depth(prompts):
    length = prompts.shortest(7) + 400
    found = [prompts.make(length, depth, 7).depth for depth in (0, 0.25, 0.5, 0.75, 1)]
    assert found[0] == 0
    assert found[-1] == 1
    assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.04)
    sentence = prompts.texts.key_sentence.replace("{key}", "7")
    before = prompts.tokenizer.decode(prompts.make(length, 0.5, 7).input_ids).split(sentence)[0]
    assert before.rstrip().endswith("."), "the key never cuts a sentence of the filler"


def test_seeds_draw_keys_and_depths(prompts):
    length = prompts.shortest() + 300
    drawn = [prompts.from_seed(length, None, seed) for seed in range(40)]
    assert drawn == [prompts.from_seed(length, None, seed) for seed in range(40)]
    assert len({prompt.key for prompt in drawn}) >= 39
    assert all(1 <= prompt.key <= LARGEST_KEY for prompt in drawn)
    depths = sorted(prompt.depth for prompt in drawn)
    assert depths[0] < 0.15
    assert depths[-1] > 0.85
    assert [prompts.from_seed(2 * length, 0.5, seed).key for seed in range(40)] == [prompt.key for prompt in drawn]


def test_key_never_occurs_in_the_filler(passkey_tokenizer):
    texts = PasskeyTexts(filler=" 2. 3 4 5 and 6 7 8 9 0. 1")
    prompts = PasskeyPrompts(passkey_tokenizer, texts)
    keys = [prompts.key_of(seed) for seed in range(200)]
    assert not any(texts.mention(key) for key in keys)
    assert texts.mention(3)
    with pytest.raises(ValueError, match="key=3: it must be a number that the words around it do not hold"):
        prompts.make(500, 0.5, 3)
    assert PasskeyTexts(filler="4 and 1").mention(14), "where two fillers meet"
    every = PasskeyPrompts(passkey_tokenizer, PasskeyTexts(filler=" ".join(map(str, range(LARGEST_KEY + 1)))))
    with pytest.raises(ValueError, match=r"texts.filler holds each of 1000 keys"):
        every.key_of(0)


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_a_model_that_reads_is_right(prompts, batch_size):
    drawn = [prompts.from_seed(prompts.shortest() + 50, None, seed) for seed in range(7)]
    answers = answer_prompts(oracle(prompts), prompts.tokenizer, drawn, batch_size=batch_size)
    assert [(answer.exact_match, answer.first_number) for answer in answers] == [(True, True)] * 7


def test_a_model_that_repeats_the_answer_as_a_longer_number_is_wrong(passkey_tokenizer):
    prompts = PasskeyPrompts(passkey_tokenizer)
    drawn = [prompts.from_seed(prompts.shortest() + 50, None, seed) for seed in range(3)]
    four = passkey_tokenizer("4", add_special_tokens=False).input_ids
    answers = answer_prompts(oracle(prompts, lambda ids: ids + four), passkey_tokenizer, drawn)
    assert not any(answer.exact_match or answer.first_number for answer in answers)


@pytest.mark.parametrize(
    ("text", "exact", "first"),
    [
        (" 123.", True, True),
        (" 123", True, True),
        ("123.", False, True),
        (" The key is 123.", False, True),
        (" 1234", False, False),
        (" 91234", False, False),
        (" one", False, False),
        (" 12", False, False),
        (" 5, then 123", False, False),
        (" 0123", False, False),
        (" 1 2 3", False, False),
        (" 12.3", False, False),
        ("", False, False),
    ],
)
def test_two_protocols(passkey_tokenizer, text, exact, first):
    prompt = PasskeyPrompts(passkey_tokenizer).make(400, 0.5, 123)
    new_ids = passkey_tokenizer(text, add_special_tokens=False).input_ids
    answer = score(passkey_tokenizer, prompt, [*new_ids, passkey_tokenizer.eos_token_id])
    assert (answer.exact_match, answer.first_number) == (exact, first)


def test_a_number_after_ten_tokens_is_too_late(passkey_tokenizer):
    dots = passkey_tokenizer(".", add_special_tokens=False).input_ids * NEW_TOKENS
    digits = passkey_tokenizer("123", add_special_tokens=False).input_ids
    assert not score(passkey_tokenizer, Prompt([], digits, 123, 0.5), dots + digits).first_number
    assert score(passkey_tokenizer, Prompt([], digits, 123, 0.5), dots[:-3] + digits).first_number


def test_own_decoder_answers(make_model):
    tokenizer = character_tokenizer("0123456789abcdek<>?. ")
    prompts = PasskeyPrompts(tokenizer, SMALL)
    drawn = [prompts.from_seed(40, None, seed) for seed in range(3)]
    answers = answer_prompts(make_model("tape", vocab_size=len(tokenizer)), tokenizer, drawn, batch_size=2)
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"key_sentence": "no key"}, r"texts.key_sentence='no key': it must hold \{key\}"),
        ({"answer": ""}, r"texts.answer='': it must hold \{key\}"),
        ({"filler": "a {key}"}, r"texts.filler='a \{key\}': it must not hold \{key\}"),
        ({"filler": " "}, "texts.filler=' ': it must hold words"),
    ],
)
def test_words_that_cannot_work(texts, message):
    with pytest.raises(ValueError, match=message):
        PasskeyTexts(**texts)


def test_words_that_the_tokenizer_cannot_take(passkey_tokenizer):
    with pytest.raises(ValueError, match=r"texts: the tokenizer does not know ' The grass is"):
        PasskeyPrompts(character_tokenizer("0123456789"))
    with pytest.raises(ValueError, match=r"texts.question=.*: the tokenizer joins its end with the answer"):
        PasskeyPrompts(passkey_tokenizer, PasskeyTexts(question=" the pas", answer="s {key}"))


def test_a_prompt_that_cannot_fit_is_refused_at_once():
    """`k<50000>?` takes nine tokens, `k<7>?` five."""
    prompts = PasskeyPrompts(character_tokenizer("0123456789abcdek<>?. "), SMALL)
    assert prompts.tokenizer.decode(prompts.make(9, 0.5, 50000).input_ids) == "k<50000>?"
    assert prompts.tokenizer.decode(prompts.make(5, 0.5, 7).input_ids) == "k<7>?"
    with pytest.raises(ValueError, match="length=8: a prompt with key 50000 takes 9 tokens without any filler"):
        prompts.make(8, 0.5, 50000)
    with pytest.raises(ValueError, match="length=8: a prompt with key 50000 takes 9 tokens"):
        prompts.check_length(8)


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_depth_out_of_range(prompts, depth):
    with pytest.raises(ValueError, match=r"depth=.*: it must be from 0 to 1"):
        prompts.make(1000, depth, 7)
