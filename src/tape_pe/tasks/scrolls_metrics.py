"""The metrics of the SCROLLS benchmark, as pure functions of texts.

Shaham et al., SCROLLS: Standardized CompaRison Over Long Language Sequences (EMNLP 2022, arXiv 2201.03533). The
definitions are those of the benchmark's evaluator, `metrics/scrolls.py` of the data set `tau/scrolls`:

* Several gold outputs of one example are references; every metric takes the best of them, ROUGE-1, ROUGE-2 and ROUGE-L
  each its own best one.
* Exact match and F1 are SQuAD's (version 1.1), on normalized answers. So an empty prediction for an empty reference
  matches exactly, but has F1 0, for no word is common.
* ROUGE is the F-measure of `rouge_score` without stemming, over the whole text. (The evaluator puts sentences on lines
  of their own, which only ROUGE-Lsum would notice, and that is not scored.) Its words are runs of a-z and 0-9.
* Means over examples are taken first, and the geometric mean of the three means is the score of a summary data set: one
  of them being 0 makes it 0.
* Scores are in 0..100. The evaluator rounds them to four decimals; here they are not rounded.
"""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

Dataset = Literal["qasper", "contract_nli", "narrative_qa", "quality", "qmsum", "summ_screen_fd", "gov_report"]
DATASETS: tuple[str, ...] = get_args(Dataset)
"""The data sets, by the benchmark's names."""

METRICS: dict[str, str] = {
    "qasper": "f1",
    "narrative_qa": "f1",
    "contract_nli": "exact_match",
    "quality": "exact_match",
    "qmsum": "rouge",
    "summ_screen_fd": "rouge",
    "gov_report": "rouge",
}
"""The metric of each data set."""

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, then no articles, single blanks between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 if both have the same normal form, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def f1(prediction: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalized words, repeated ones counted as often as common."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(reference).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def rouge(prediction: str, reference: str) -> dict[str, float]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), in 0..1, by `ROUGE_TYPES`.

    Raises:
        ValueError: `rouge_score` is not installed.
    """
    scores = _rouge_scorer().score(reference, prediction)
    return {name: float(scores[name].fmeasure) for name in ROUGE_TYPES}


def check_metric(dataset: str) -> None:
    """Raises ValueError where a data set's metric cannot be computed here."""
    if METRICS[dataset] == "rouge" and importlib.util.find_spec("rouge_score") is None:
        raise ValueError(f"task.dataset={dataset!r}: ROUGE needs rouge-score: pip install 'tape-pe[eval]'")


def score_predictions(
    dataset: str, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The scores of a data set, all in 0..100.

    Args:
        dataset: one of `DATASETS`.
        predictions: one text per example.
        references: the gold outputs of each example, at least one.

    Returns:
        `scrolls_score`, the benchmark's score, and what it is made of: `f1`, `exact_match`, or `rouge1`, `rouge2` and
        `rougeL`, whose geometric mean it is.

    Raises:
        ValueError: there are no predictions, not as many as examples, or an example has no reference; an unknown data
            set; or `rouge_score` is needed and not installed.
    """
    if dataset not in METRICS:
        raise ValueError(f"dataset={dataset!r}: one of {', '.join(DATASETS)} is needed")
    check_metric(dataset)
    if not predictions or len(predictions) != len(references) or not all(references):
        raise ValueError(
            f"predictions: {len(predictions)} for {len(references)} examples: one for each, which must have references"
        )
    if METRICS[dataset] == "rouge":
        means = _mean_of_best(rouge, predictions, references)
        return {"scrolls_score": (means["rouge1"] * means["rouge2"] * means["rougeL"]) ** (1 / 3), **means}
    name = METRICS[dataset]
    metric = f1 if name == "f1" else exact_match
    means = _mean_of_best(lambda prediction, reference: {name: metric(prediction, reference)}, predictions, references)
    return {"scrolls_score": means[name], **means}


def _mean_of_best(
    metric: Callable[[str, str], dict[str, float]], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """For each name of the metric, 100 times the mean over examples of the best over references."""
    scored = [
        [metric(prediction, reference) for reference in choices]
        for prediction, choices in zip(predictions, references, strict=True)
    ]
    return {name: 100 * sum(max(s[name] for s in scores) for scores in scored) / len(scored) for name in scored[0][0]}


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_TYPES), use_stemmer=False)
