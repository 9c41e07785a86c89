"""Measurements are lines in a file: each is made once, kept when interrupted, and known by what it depends on."""

import json

import pytest
import torch

from tape_pe.language import measure
from tape_pe.language.measure import measure_passkey, measure_perplexity, token_stream, weights_fingerprint
from tape_pe.language.perplexity import perplexity
from tape_pe.results import read_measurements
from tape_pe.tasks.passkey import PasskeyTexts
from tape_pe.tasks.tokenizers import character_tokenizer

SMALL = PasskeyTexts(introduction="k", filler="abc. de. ", key_sentence="<{key}>", question="?", answer="{key}.")


@pytest.fixture
def tokenizer():
    return character_tokenizer("0123456789abcdek<>?. ")


@pytest.fixture
def model(make_model, tokenizer):
    return make_model("tape", vocab_size=len(tokenizer))


@pytest.fixture
def scored(monkeypatch) -> list[int]:
    """The lengths that were really computed."""
    lengths: list[int] = []

    def counted(*arguments, length, **options):
        lengths.append(length)
        return perplexity(*arguments, length=length, **options)

    monkeypatch.setattr(measure, "perplexity", counted)
    return lengths


def ids_of(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(seed))


def test_finished_lengths_are_skipped(model, tmp_path, scored):
    output = tmp_path / "deep" / "lines.jsonl"
    how = {"name": "m", "stride": 4, "output": output}
    first = measure_perplexity(model, ids_of(), lengths=[8, 16], **how)
    assert read_measurements(output) == first
    assert first[0].metrics["tokens"] == 59
    assert first[0].metrics["perplexity"] == perplexity(model, ids_of(), length=8, stride=4).perplexity
    second = measure_perplexity(model, ids_of(), lengths=[16, 32, 8], batch_size=3, **how)
    assert scored == [8, 16, 32]
    assert [line.settings["length"] for line in second] == [16, 32, 8]
    assert [second[2], second[0]] == first


@pytest.mark.parametrize("change", ["text", "weights", "rope", "stride", "dtype", "name"])
def test_anything_that_changes_a_score_is_measured_again(model, tmp_path, scored, change):
    how = {"name": "m", "stride": 4, "output": tmp_path / "lines.jsonl", "lengths": [8]}
    ids = ids_of()
    measure_perplexity(model, ids, **how)
    if change == "text":
        ids = ids_of(1)
    elif change == "weights":
        with torch.no_grad():
            model.model.norm.weight[0] += 1e-3
    elif change == "rope":
        model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    elif change == "dtype":
        model.double()
    else:
        how[change] = {"stride": 3, "name": "other"}[change]
    measure_perplexity(model, ids, **how)
    assert scored == [8, 8]
    measure_perplexity(model, ids, **how)
    assert scored == [8, 8]


def test_an_interruption_keeps_what_is_finished(model, tmp_path, monkeypatch):
    output = tmp_path / "lines.jsonl"
    how = {"name": "m", "stride": 4, "output": output, "lengths": [8, 16]}

    def interrupted(*arguments, length, **options):
        if length == 16:
            raise KeyboardInterrupt
        return perplexity(*arguments, length=length, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "perplexity", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_perplexity(model, ids_of(), **how)
    assert [line.settings["length"] for line in read_measurements(output)] == [8]
    output.write_text(output.read_text() + '{"task": "perpl')  # and a line that was torn
    assert len(measure_perplexity(model, ids_of(), **how)) == 2
    assert [line.settings["length"] for line in read_measurements(output)] == [8, 16]


def test_passkey_cells(model, tokenizer, tmp_path):
    output = tmp_path / "lines.jsonl"
    how = {"name": "m", "lengths": [20, 40], "seeds": 3, "texts": SMALL, "output": output}
    cells = measure_passkey(model, tokenizer, depths=[0.0, 1.0], **how)
    assert [(c.settings["length"], c.settings["depth"]) for c in cells] == [(20, 0.0), (20, 1.0), (40, 0.0), (40, 1.0)]
    assert all(len(cell.metrics["answers"]) == 3 for cell in cells)
    assert measure_passkey(model, tokenizer, depths=[1.0, 0.0], **how) == [cells[1], cells[0], cells[3], cells[2]]
    assert len(read_measurements(output)) == 4
    drawn = measure_passkey(model, tokenizer, **how)
    assert [cell.settings["depth"] for cell in drawn] == [None, None]
    assert len(read_measurements(output)) == 6


def test_warns_beyond_the_trained_length(make_model, tmp_path):
    model = make_model("rope", max_position_embeddings=16)
    how = {"name": "m", "stride": 4, "output": tmp_path / "lines.jsonl"}
    with pytest.warns(UserWarning, match="32 tokens are more than max_position_embeddings=16"):
        measure_perplexity(model, ids_of(), lengths=[8, 32], **how)


def test_token_stream(passkey_tokenizer):
    bos, eos = passkey_tokenizer.bos_token_id, passkey_tokenizer.eos_token_id
    a, b = (passkey_tokenizer(text, add_special_tokens=False).input_ids for text in ("grass", " sky"))
    assert token_stream(passkey_tokenizer, ["grass", " sky"]).tolist() == [bos, *a, eos, bos, *b, eos]
    assert token_stream(passkey_tokenizer, ["grass"] * 100, max_tokens=7).shape == (7,)
    with pytest.raises(ValueError, match="data holds no text"):
        token_stream(passkey_tokenizer, [])


def test_fingerprint_sees_every_weight(model):
    first = weights_fingerprint(model)
    assert weights_fingerprint(model) == first
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1e-3
        assert weights_fingerprint(model) != first
        first = weights_fingerprint(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, r"lengths=\[\]: it must hold positive integers, each only once"),
        ({"lengths": [8, 8]}, r"lengths=\[8, 8\]: it must hold"),
        ({"lengths": [61]}, "length=61: the text has only 60 tokens"),
        ({"stride": 8}, "stride=8: it must be 1 to 7"),
        ({"batch_size": 0}, "batch_size=0: it must be a positive integer"),
    ],
)
def test_perplexity_refuses(model, tmp_path, changes, message):
    values = {"name": "m", "stride": 4, "lengths": [8], "output": tmp_path / "lines.jsonl", **changes}
    with pytest.raises(ValueError, match=message):
        measure_perplexity(model, ids_of(), **values)
    assert not (tmp_path / "lines.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [40, 5]}, "length=5: a prompt with key"),
        ({"depths": [1.5]}, r"depths=\[1.5\]: it must hold numbers from 0 to 1"),
        ({"depths": []}, r"depths=\[\]"),
        ({"seeds": 0}, "seeds=0: it must be a positive integer"),
    ],
)
def test_passkey_refuses(model, tokenizer, tmp_path, changes, message):
    values = {"name": "m", "lengths": [40], "output": tmp_path / "lines.jsonl", "texts": SMALL, **changes}
    with pytest.raises(ValueError, match=message):
        measure_passkey(model, tokenizer, **values)
    assert not (tmp_path / "lines.jsonl").exists()


def test_refuses_a_file_of_something_else(model, tmp_path):
    output = tmp_path / "lines.jsonl"
    output.write_text(json.dumps({"name": "run"}) + "\n")
    with pytest.raises(ValueError, match="line 1: not a measurement line"):
        measure_perplexity(model, ids_of(), name="m", lengths=[8], stride=4, output=output)
    with pytest.raises(ValueError, match="output is a folder"):
        measure_perplexity(model, ids_of(), name="m", lengths=[8], stride=4, output=tmp_path)
