"""SCROLLS metrics against the benchmark's own example, a miniature set worked out by hand, and adversarial texts."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tape_pe.tasks import scrolls_metrics
from tape_pe.tasks.scrolls_data import read_examples
from tape_pe.tasks.scrolls_metrics import DATASETS, exact_match, f1, normalize_answer, rouge, score_predictions

DATA = Path(__file__).parents[1] / "data" / "scrolls"


def share(text: str) -> Fraction:
    return sum((Fraction(part) for part in text.split("+")), Fraction())


# Mean over examples of the best reference, by hand; what was counted is written behind each.
BY_HAND = {
    # p1q1: {bleu, score} and 5 words, 2 common: 4/7; and {bleu}: 2/3, the better one. p1q2 1, p1q3 0.
    "qasper": {"f1": share("2/3 + 1 + 0") / 3},
    # s1q1: {red, red, kite} and {red, kite}: 4/5; and {kite}: 1/2. s1q2: an empty prediction.
    "narrative_qa": {"f1": share("4/5 + 0") / 2},
    # case and full stop do not count; the third is another class
    "contract_nli": {"exact_match": share("1 + 1 + 0") / 3},
    # an article and a full stop do not count
    "quality": {"exact_match": share("1 + 0 + 0") / 3},
    # t1q1: 5 of 5 and 7 words, 3 of 4 and 6 pairs, common subsequence 5. t1q2: the same words on two lines.
    "qmsum": {
        "rouge1": (Fraction(10, 12) + 1) / 2,
        "rouge2": (Fraction(6, 10) + 1) / 2,
        "rougeL": (Fraction(10, 12) + 1) / 2,
    },
    # fd_1: 7 of 7 and 8 words, 4 of 6 and 7 pairs, "mara finds the map". fd_3: an empty prediction.
    "summ_screen_fd": {"rouge1": Fraction(14, 15) / 2, "rouge2": Fraction(8, 13) / 2, "rougeL": Fraction(8, 15) / 2},
    # g_1: 4 of 4 and 5 words, 3 of 3 and 4 pairs, 4 in order. g_2: all words, no pair, one word in order.
    "gov_report": {
        "rouge1": (Fraction(8, 9) + 1) / 2,
        "rouge2": (Fraction(6, 7) + 0) / 2,
        "rougeL": (Fraction(8, 9) + Fraction(1, 3)) / 2,
    },
}


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_miniature_set_has_the_scores_worked_out_by_hand(dataset):
    examples = read_examples(str(DATA), dataset, "validation")
    predictions = json.loads((DATA / "predictions.json").read_text(encoding="utf-8"))[dataset]
    assert set(predictions) == {example.id for example in examples}
    found = score_predictions(
        dataset, [predictions[example.id] for example in examples], [example.outputs for example in examples]
    )
    expected = {name: float(100 * value) for name, value in BY_HAND[dataset].items()}
    product = 1.0
    for value in expected.values():
        product *= value
    assert found == pytest.approx({"scrolls_score": product ** (1 / len(expected)), **expected}, abs=1e-9)


def test_the_example_in_the_benchmarks_documentation():
    """The numbers that `metrics/scrolls.py` of the data set `tau/scrolls` prints, rounded to four decimals."""
    predictions = ["exact match example", "hello there", "general kenobi"]
    references = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]
    for dataset, published in (
        ("gov_report", {"rouge1": 72.2222, "rouge2": 33.3333, "rougeL": 72.2222, "scrolls_score": 55.8136}),
        ("contract_nli", {"exact_match": 33.3333, "scrolls_score": 33.3333}),
        ("narrative_qa", {"f1": 72.2222, "scrolls_score": 72.2222}),
    ):
        found = score_predictions(dataset, predictions, references)
        assert {name: round(value, 4) for name, value in found.items()} == published


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  cat,\n a Dog & an owl.", "cat dog owl"),
        ("theatre, another, Anna", "theatre another anna"),  # articles inside words stay
        ("a.", ""),
        ("A-B", "ab"),  # punctuation goes before articles do
        ("U.S.A.", "usa"),
        ("it's", "its"),
        ("Größe “A” … naïve", "größe “ ” … naïve"),  # punctuation is ASCII's
        ("\t 3.5\u00a0% \r\n", "35"),
        ("", ""),
    ],
)
def test_normal_form_of_answers(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "reference", "matches"),
    [
        ("not mentioned.", "Not mentioned", True),
        ("The answer: Not mentioned", "Not mentioned", False),
        ("Not  \n mentioned", "Not mentioned", True),
        ("Notmentioned", "Not mentioned", False),
        ("Entailment Entailment", "Entailment", False),
        ("(A) The ferry", "The ferry", True),  # without brackets the letter is an article
        ("(B) The ferry", "The ferry", False),
        ("", "", True),
        ("the", "", True),
        ("", "Entailment", False),
        ("straße", "strasse", False),
    ],
)
def test_exact_match(prediction, reference, matches):
    assert exact_match(prediction, reference) == matches
    assert exact_match(reference, prediction) == matches


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("the cat sat", "a cat sat", 1),
        ("cat cat cat cat", "cat", Fraction(2, 5)),  # repeating a word gains nothing
        ("cat cat cat", "cat cat dog", Fraction(2, 3)),
        ("dog bites man", "man bites dog", 1),  # order does not count
        ("1234", "123", 0),
        ("91234", "1234", 0),
        ("", "cat", 0),
        ("cat", "", 0),
        ("", "", 0),  # in SQuAD 1.1 nothing is common, unlike in 2.0
        ("the", "a", 0),
        ("Zoë's café", "zoës CAFÉ!", 1),
        ("cafe", "café", 0),
        ("yes\nno", "yes", Fraction(2, 3)),
    ],
)
def test_f1(prediction, reference, score):
    assert f1(prediction, reference) == pytest.approx(float(score))
    assert f1(reference, prediction) == pytest.approx(float(score))


@pytest.mark.parametrize(
    ("prediction", "reference", "scores"),
    [
        ("one two three", "one two three", (1, 1, 1)),
        ("One,\n\ntwo;\nthree!", "one two three", (1, 1, 1)),
        ("three two one", "one two three", (1, 0, Fraction(1, 3))),
        ("one one one one", "one", (Fraction(2, 5), 0, Fraction(2, 5))),
        ("one", "one", (1, 0, 1)),  # a single word has no pairs
        ("running", "runs", (0, 0, 0)),  # no stemming
        ("the cat", "cat", (Fraction(2, 3), 0, Fraction(2, 3))),  # articles count
        ("a b c d", "b d", (Fraction(2, 3), 0, Fraction(2, 3))),
        ("", "one", (0, 0, 0)),
        ("one", "", (0, 0, 0)),
        ("", "", (0, 0, 0)),
        ("…!?", "…!?", (0, 0, 0)),  # no words
        ("ночь", "ночь", (0, 0, 0)),  # letters are a-z
        ("naïve", "na ve", (1, 1, 1)),
    ],
)
def test_rouge(prediction, reference, scores):
    found = rouge(prediction, reference)
    assert list(found) == ["rouge1", "rouge2", "rougeL"]
    assert list(found.values()) == pytest.approx([float(score) for score in scores])


def test_rouge_of_long_texts_is_what_counting_gives():
    """ROUGE-1, ROUGE-2 and ROUGE-L counted literally on two documents of the miniature set."""
    texts = [example.document for example in read_examples(str(DATA), "gov_report", "validation")]
    first, second = (re.findall("[a-z0-9]+", text.lower()) for text in texts)
    expected = {}
    for n in (1, 2):
        grams = [[tuple(words[i : i + n]) for i in range(len(words) - n + 1)] for words in (first, second)]
        common = sum(min(grams[0].count(gram), grams[1].count(gram)) for gram in set(grams[0]))
        expected[f"rouge{n}"] = 2 * common / (len(grams[0]) + len(grams[1]))
    longest = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            longest[i + 1][j + 1] = longest[i][j] + 1 if a == b else max(longest[i][j + 1], longest[i + 1][j])
    expected["rougeL"] = 2 * longest[-1][-1] / (len(first) + len(second))
    assert len(first) > 30
    assert 0.2 < expected["rougeL"] < expected["rouge1"] < 0.9
    assert rouge(texts[0], texts[1]) == pytest.approx(expected)


def test_each_rouge_takes_its_own_best_reference():
    found = score_predictions("qmsum", ["a b c d"], [["d c b a", "a b x y z"]])
    assert found["rouge1"] == pytest.approx(100)  # of the first, whose ROUGE-2 is 0
    assert found["rouge2"] == pytest.approx(100 * 2 / 7)  # of the second
    assert found["rougeL"] == pytest.approx(100 * 4 / 9)  # likewise


def test_the_geometric_mean_is_of_means_not_the_mean_of_geometric_means():
    found = score_predictions("gov_report", ["a b c", "x"], [["a b c"], ["y"]])
    assert found["scrolls_score"] == pytest.approx(50)
    found = score_predictions("gov_report", ["a b", "a"], [["a b"], ["a"]])
    assert found["scrolls_score"] == pytest.approx((100 * 50 * 100) ** (1 / 3)), "one word has no pairs"
    assert score_predictions("gov_report", ["a", "b"], [["a"], ["b"]])["scrolls_score"] == 0


def test_several_references_and_order_of_references():
    for references in (["wrong", "right answer"], ["right answer", "wrong"], ["right answer"] * 3):
        assert score_predictions("qasper", ["right answer"], [references])["f1"] == 100
        assert score_predictions("quality", ["right answer"], [references])["exact_match"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("squad", ["a"], [["a"]]), "dataset='squad': one of qasper"),
        (("qasper", [], []), "predictions: 0 for 0 examples"),
        (("qasper", ["a"], [["a"], ["b"]]), "predictions: 1 for 2 examples"),
        (("qasper", ["a"], [[]]), "predictions: .*must have references"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        score_predictions(*arguments)


def test_without_rouge_score_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(scrolls_metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"task.dataset='qmsum': ROUGE needs .*'tape-pe\[eval\]'"):
        score_predictions("qmsum", ["a"], [["a"]])
    assert score_predictions("qasper", ["b"], [["b"]])["f1"] == 100
