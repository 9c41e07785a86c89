"""The stability test against its definition, and its committed results against the published pattern."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tape_pe.analysis import measure_stability
from tape_pe.analysis.stability import MOVED, first_tokens, front_token
from tape_pe.report.stability import PRECISIONS, PUBLISHED, published_table, ratios
from tape_pe.tasks.tokenizers import character_tokenizer, word_tokenizer

RESULTS = Path(__file__).parents[2] / "results" / "stability.jsonl"


def literal(model, row, moved_row, positions, layer):
    """Both measures of one text, from the model's own outputs, number by number."""
    how = {"output_attentions": True, "output_position_states": True}
    plain = model(row[None], **how)
    moved = model(moved_row[None], position_ids=positions[None], **how)
    extra, length = len(moved_row) - len(row), len(row)
    attention, products = [], []
    for head in range(4):
        a, b = plain.attentions[layer][0, head], moved.attentions[layer][0, head, extra:, extra:]
        attention.append(sum(abs(float(b[i, j] - a[i, j])) for i in range(length) for j in range(length)) / length)
    for head in range(2):
        e, f = plain.position_states[layer][0, head], moved.position_states[layer][0, head, extra:]
        pairs = [(float(e[i] @ e[j]), float(f[i] @ f[j])) for i in range(length) for j in range(i + 1)]
        products.append((sum((y - x) ** 2 for x, y in pairs) / sum(x**2 for x, _ in pairs)) ** 0.5)
    return sum(attention) / 4, sum(products) / 2


@torch.no_grad()
@pytest.mark.parametrize("structure", ["rotary", "unstructured"])
def test_against_the_definition(make_model, make_tokens, structure):
    model = make_model("tape", encoding_options={"structure": structure}).double()
    rows = make_tokens(3, 7)
    found = measure_stability(model, rows, 5, batch_size=2)
    for layer in range(3):
        front = [
            literal(model, row, torch.cat([torch.full((MOVED,), 5), row]), torch.arange(7 + MOVED), layer)
            for row in rows
        ]
        shift = [literal(model, row, row, torch.arange(7) + MOVED, layer) for row in rows]
        for part, expected in ((found.front, front), (found.shift, shift)):
            means = torch.tensor(expected, dtype=torch.float64).mean(dim=0).tolist()
            assert [part.attention[layer], part.states[layer]] == pytest.approx(means, rel=1e-6, abs=1e-12)


def test_relative_encodings_do_not_notice_a_shift(make_model, make_tokens):
    rows = make_tokens(2, 16)
    for encoding in ("rope", "tape", "alibi", "nope"):
        found = measure_stability(make_model(encoding).double(), rows, 1).shift
        assert max(found.attention) < 1e-12
        assert all(value is None or value < 1e-12 for value in found.states)
        assert (found.states[0] is None) == (encoding in ("alibi", "nope"))
    assert max(measure_stability(make_model("sinusoidal").double(), rows, 1).shift.attention) > 1e-2


@torch.no_grad()
def test_in_the_first_layer_only_what_goes_to_added_tokens_is_missing(make_model, make_tokens):
    model = make_model("tape").double()
    rows = make_tokens(1, 9)
    added = torch.cat([torch.full((1, MOVED), 4), rows], dim=1)
    to_added = model(added, output_attentions=True).attentions[0][..., MOVED:, :MOVED].sum(-1).mean()
    found = measure_stability(model, rows, 4).front
    assert found.attention[0] == pytest.approx(float(to_added))
    assert found.states[0] < 1e-12
    assert min(found.states[1:]) > 1e-4


def test_refused_rows(make_model):
    with pytest.raises(ValueError, match="rows has shape"):
        measure_stability(make_model("tape"), torch.zeros(0, 4, dtype=torch.long), 1)


def test_front_token(passkey_tokenizer):
    assert front_token(passkey_tokenizer) == (passkey_tokenizer.bos_token_id, "BOS")
    tokenizer = character_tokenizer("ab")
    assert front_token(tokenizer) == (tokenizer.eos_token_id, "EOS")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        front_token(tokenizer)


def test_first_tokens(llama_folder):
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    texts = ["12345678 and more", "123", "87654321"]
    rows = first_tokens(tokenizer, texts, 2, 8)
    assert tokenizer.batch_decode(rows) == ["12345678", "87654321"]
    words = word_tokenizer(["a", "long-word"])
    assert words.batch_decode(first_tokens(words, ["long-word " * 50], 1, 2)) == ["long-word long-word"]
    with pytest.raises(ValueError, match="texts=3: only 2 texts have 8 tokens"):
        first_tokens(tokenizer, texts, 3, 8)
    with pytest.raises(ValueError, match="text='abc': the tokenizer does not know all of it"):
        first_tokens(character_tokenizer("ab"), ["abc"], 1, 2)


def lines():
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_committed_attention_of_tape_is_as_stable_as_that_of_rope(precision):
    assert max(ratios(lines(), "attention", precision)["tape"]) <= 2


@pytest.mark.parametrize("measure", ["attention", "states"])
def test_committed_differences_have_the_published_pattern(measure):
    found = ratios(lines(), measure, "bfloat16_start")
    assert max(found["tape"]) <= 2
    assert min(found["tape_without_equivariance"][1:]) >= 5


@pytest.mark.parametrize("measure", ["attention", "states"])
def test_committed_differences_without_equivariance_are_no_rounding(measure):
    for line in lines():
        assert len(line["metrics"]["float32"]["shift"][measure]) == 8
        if line["name"] != "tape_without_equivariance":
            assert max(line["metrics"]["float32"]["shift"][measure]) < 5e-6  # fp32 rounding
    assert min(ratios(lines(), measure, "float32")["tape_without_equivariance"][1:]) >= 5
    assert min(ratios(lines(), "states", "bfloat16")["tape_without_equivariance"][1:]) > 2


def test_committed_lines_are_of_the_same_seeds_and_texts():
    seeds = {}
    for line in lines():
        seeds.setdefault(line["name"], set()).add(line["seed"])
        assert line["metrics"]["texts"] == 64
        assert line["config"]["length"] == 128
    assert set(seeds) == set(PUBLISHED["attention"]["shift"])
    assert len(set(map(frozenset, seeds.values()))) == 1


def test_ratios_and_table():
    def line(name, seed, value):
        part = {"attention": [value] * 8, "states": [value] * 8}
        return {"name": name, "seed": seed, "metrics": {p: {"front": part, "shift": part} for p in PRECISIONS}}

    scales = dict(zip(PUBLISHED["states"]["shift"], (0.01, 0.02, 0.2), strict=True))
    made = [line(name, seed, scale * (seed + 1)) for seed in range(3) for name, scale in scales.items()]
    found = ratios(made, "states", "float32")
    assert found["tape"] == pytest.approx([2.0] * 8)
    assert found["tape_without_equivariance"] == pytest.approx([10.0] * 8)
    table = published_table(made, "attention")
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows[0][1:] == ["rope", "published", "8.93", "8.51", "12.29", "11.46"]
    assert rows[1][1:] == ["rope", "ours, float32", "2", "2", "2", "2"]
    assert rows[2][2] == "ours, float32, start bfloat16"
    assert len(rows) == 24
