"""Evaluation of finished runs."""

import json
from pathlib import Path

import pytest

from tape_pe.evaluate import evaluate, load_run
from tape_pe.results import read_results
from tape_pe.train import train


@pytest.fixture
def run(make_options) -> Path:
    return train(make_options(max_steps=4, save_strategy="no"))


def test_result_line(run, make_options):
    result = evaluate(run)
    assert read_results(run) == [result]
    training = json.loads((run / "training.json").read_text())
    assert (result.name, result.task, result.seed, result.encoding) == ("run", "addition", 3, "tape")
    for name in ("steps", "tokens", "train_seconds", "loss_curve", "parameters", "versions", "git_revision"):
        assert getattr(result, name) == training[name], name
    assert result.steps == 4
    assert result.config["model"]["hidden_size"] == 16
    assert result.config["task"] == {
        "name": "addition", "max_digits": 2, "eval_max_digits": 3, "pairs_per_cell": 4, "eval_seed": 0,
    }  # fmt: skip
    assert result.config["training"]["learning_rate"] == 1e-2
    assert result.config["data"] == {"samples": 32, "redrawn": training["data"]["redrawn"]}
    assert result.metrics["trained_digits"] == 2
    assert len(result.metrics["grid"]) == 3
    assert result.eval_seconds > 0


def test_evaluations_are_appended_and_repeatable(run):
    first = evaluate(run, batch_size=5)
    second = evaluate(run, task_options={"pairs_per_cell": 6, "eval_max_digits": 4})
    assert [line.metrics for line in read_results(run)] == [first.metrics, second.metrics]
    assert evaluate(run, batch_size=64).metrics == first.metrics, "batches change nothing"
    assert len(second.metrics["grid"]) == 4
    assert second.config["evaluation"]["pairs_per_cell"] == 6
    assert second.config["task"]["pairs_per_cell"] == 4
    # Four cells are in range; only the first four pairs of each were kept out of training.
    assert (second.metrics["held_out_pairs"], second.metrics["overlap_pairs"]) == (16, 8)


def test_a_moved_run_can_be_evaluated(run, tmp_path):
    moved = run.rename(tmp_path / "elsewhere")
    assert evaluate(moved).name == "elsewhere"
    assert load_run(moved)[0].output_dir == str(moved)


def test_what_cannot_be_evaluated(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        evaluate(tmp_path)
    with pytest.raises(ValueError, match="batch_size is 0"):
        evaluate(run, batch_size=0)
    with pytest.raises(ValueError, match=r"task.pairs_per_cell is 0"):
        evaluate(run, task_options={"pairs_per_cell": 0})
    with pytest.raises(ValueError, match=r"task.max_digits cannot be changed"):
        evaluate(run, task_options={"max_digits": 3})
    with pytest.raises(ValueError, match=r"device is 'tpu9'"):
        evaluate(run, device="tpu9")
    assert not (run / "results.jsonl").exists()
    (run / "training.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has not finished training; go on with `tape train .*run --resume`"):
        evaluate(run)


def test_damaged_weights_are_named(run):
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="a file of weights is damaged"):
        evaluate(run)


def test_an_unknown_backend_is_refused_before_work(run, make_options, monkeypatch):
    monkeypatch.setenv("TAPE_BACKEND", "abacus")
    with pytest.raises(ValueError, match="TAPE_BACKEND='abacus': known backends"):
        evaluate(run)
    options = make_options("other")
    with pytest.raises(ValueError, match="TAPE_BACKEND='abacus': known backends"):
        train(options)
    assert not Path(options.output_dir).exists()
