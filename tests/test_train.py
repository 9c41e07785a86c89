"""Training: reproducible, resumable, interruptible."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tape_pe.evaluate import evaluate
from tape_pe.options import ModelOptions, load_options, training_arguments
from tape_pe.tasks.base import RightPaddingCollator
from tape_pe.train import RunTrainer, TrainingInterruptedError, build_model, train


def record(run: Path) -> dict:
    return json.loads((run / "training.json").read_text())


def weights(run: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(run).state_dict()


def assert_same_run(one: Path, other: Path) -> None:
    assert record(one)["loss_curve"] == record(other)["loss_curve"]
    assert record(one)["tokens"] == record(other)["tokens"]
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def keep_checkpoint_only(run: Path, checkpoint: str) -> None:
    """Makes the folder look as if training had been killed after that checkpoint."""
    for path in run.iterdir():
        if path.name not in ("config.yaml", checkpoint):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_run_folder(make_options):
    options = make_options(report_to="tensorboard")
    run = train(options)
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "checkpoint-10", "checkpoint-20", "tensorboard", "config.json", "model.safetensors"} <= names
    assert {name for name in names if name.startswith(".")} == {".lock"}, "no temporary files are left"
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert load_options(run) == options
    training = record(run)
    assert training["steps"] == 20
    assert [step for step, _ in training["loss_curve"]] == [4, 8, 12, 16, 20]
    assert training["loss_curve"][0][1] > training["loss_curve"][-1][1]
    dataset = options.task.training_dataset(3, 160)
    assert training["tokens"] == sum(len(sample["input_ids"]) for sample in dataset)
    assert training["seed"] == 3
    assert training["data"]["samples"] == 160
    assert training["train_seconds"] > 0
    model = AutoModelForCausalLM.from_pretrained(run)
    assert type(model).__name__ == "TapeLMForCausalLM"
    assert training["parameters"] == sum(p.numel() for p in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert model.config.vocab_size == len(tokenizer) == 14
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_seed_defines_weights_and_data(make_options):
    tokenizer = make_options().task.tokenizer()
    same = [build_model(make_options().model, tokenizer, seed=5).state_dict() for _ in range(2)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    other = build_model(make_options().model, tokenizer, seed=6).state_dict()
    assert any(not torch.equal(same[0][name], other[name]) for name in other)
    runs = [train(make_options(name, seed=seed, max_steps=4)) for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert_same_run(runs[0], runs[1])
    assert record(runs[0])["loss_curve"] != record(runs[2])["loss_curve"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_resumed_run_equals_uninterrupted_run(make_options, accumulation):
    straight = train(make_options("straight", gradient_accumulation_steps=accumulation))
    options = make_options("resumed", gradient_accumulation_steps=accumulation)
    run = train(options)
    # Step 10 lies inside an interval of the loss curve, whose points are at multiples of 4.
    keep_checkpoint_only(run, "checkpoint-10")
    before = json.loads((run / "checkpoint-10" / "progress.json").read_text())["train_seconds"]
    assert train(options, resume=True) == run
    assert_same_run(straight, run)
    assert record(run)["train_seconds"] > before, "parts are added up"


@pytest.mark.parametrize("encoding", ["randomized", "abacus"])
def test_encodings_that_draw_positions_draw_the_same_after_resuming(make_options, encoding):
    model = dataclasses.replace(make_options().model, encoding=encoding)
    straight = train(dataclasses.replace(make_options("straight"), model=model))
    options = dataclasses.replace(make_options("resumed"), model=model)
    run = train(options)
    keep_checkpoint_only(run, "checkpoint-10")
    train(options, resume=True)
    assert_same_run(straight, run)
    assert options.task.score(AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run))


def test_resume_from_a_given_checkpoint(make_options):
    straight = train(make_options("straight", save_steps=5))
    options = make_options("run", save_steps=5)
    run = train(options)
    train(options, resume=run / "checkpoint-5")
    assert_same_run(straight, run)
    with pytest.raises(FileNotFoundError, match="checkpoint-7"):
        train(options, resume=run / "checkpoint-7")
    other = make_options("other", save_steps=5)
    other = dataclasses.replace(other, model=dataclasses.replace(other.model, encoding="nope"))
    with pytest.raises(ValueError, match=r"model.encoding is 'nope'"):
        train(other, resume=run / "checkpoint-5")


def test_finished_run_can_be_made_longer(make_options):
    run = train(make_options(max_steps=4, lr_scheduler_type="constant", save_steps=4))
    finished = (run / "training.json").stat().st_mtime_ns
    train(make_options(max_steps=4, lr_scheduler_type="constant", save_steps=4), resume=True)
    assert (run / "training.json").stat().st_mtime_ns == finished, "nothing is left to do"
    train(make_options(max_steps=8, lr_scheduler_type="constant", save_steps=4), resume=True)
    straight = train(make_options("straight", max_steps=8, lr_scheduler_type="constant", save_steps=4))
    assert_same_run(straight, run)


def test_killed_between_last_checkpoint_and_final_files(make_options):
    straight = train(make_options("straight"))
    run = train(make_options())
    keep_checkpoint_only(run, "checkpoint-20")
    (run / ".partial-abc").mkdir()
    train(make_options(), resume=True)
    assert_same_run(straight, run)
    assert not (run / ".partial-abc").exists()


def test_killed_while_saving_leaves_no_checkpoint(make_options, monkeypatch):
    def fail(*_):
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "_save_rng_state", fail)
        with pytest.raises(OSError, match="disk is full"):
            train(make_options())
    run = Path(make_options().output_dir)
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.yaml"]
    straight = train(make_options("straight"))
    assert_same_run(straight, train(make_options(), resume=True))


def test_existing_folders_are_not_overwritten(make_options, tmp_path):
    options = make_options(max_steps=2)
    run = train(options)
    (run / "note.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "data").symlink_to(elsewhere)
    with pytest.raises(FileExistsError, match=r"holds a run already; use --resume or --overwrite"):
        train(options)
    with pytest.raises(ValueError, match=r"training.learning_rate is 0.1; the run to resume has 0.01"):
        train(make_options(max_steps=2, learning_rate=0.1), resume=True)
    wider = dataclasses.replace(options, model=dataclasses.replace(options.model, hidden_size=32))
    with pytest.raises(ValueError, match=r"model.hidden_size is 32; the run to resume has 16"):
        train(wider, resume=True)
    assert (run / "note.txt").exists()
    train(options, overwrite=True)
    assert not (run / "note.txt").exists()
    assert not (run / "data").is_symlink()
    assert elsewhere.is_dir()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match="not a run's"):
        train(dataclasses.replace(options, output_dir=str(other)), overwrite=True)


def test_nan_loss_names_the_step(make_options):
    with pytest.raises(FloatingPointError, match=r"loss is nan at step [2-9]"):
        train(make_options(learning_rate=1e30, warmup_steps=0, max_grad_norm=0))


def test_a_run_can_start_from_the_weights_of_another(make_options, tmp_path):
    first = train(make_options("first", max_steps=4))
    start = weights(first)

    def second(**changes):
        options = make_options("second", max_steps=1, learning_rate=0.0)
        model = dataclasses.replace(options.model, **{"init_from": str(first), **changes})
        return dataclasses.replace(options, model=model)

    model = build_model(second(max_position_embeddings=64).model, second().task.tokenizer(), seed=9)
    assert model.config.max_position_embeddings == 64
    for found in (model.state_dict(), weights(train(second()))):  # the learning rate is 0
        assert all(torch.equal(found[name], value) for name, value in start.items())
    for changes, message in (
        ({"num_attention_heads": 4}, r"model.num_attention_heads=4: must be as in model.init_from="),
        ({"encoding": "rope"}, r"model.encoding='rope': must be as in"),
        ({"encoding_options": {"position_size": 5}}, r"model.encoding_options=.*position_size=5"),
        ({"init_from": str(tmp_path)}, r"model.init_from=.*: the folder of a finished run"),
        ({"init_from": str(tmp_path / "second")}, r"model.init_from=.*: must not be output_dir"),
    ):
        with pytest.raises(ValueError, match=message):
            train(second(**changes), overwrite=True)
    (first / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="a file of weights is damaged"):
        train(second(), overwrite=True)
    assert (tmp_path / "second" / "training.json").is_file(), "nothing was deleted"


def test_accumulated_gradient_equals_that_of_the_full_batch(make_options, tmp_path):
    """Rows of unequal length: the mean over micro-batches would weigh short sums too much."""

    def gradients(batch: int, accumulation: int) -> dict[str, torch.Tensor]:
        options = make_options(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1,
            optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0,
            save_strategy="no",
        )  # fmt: skip
        tokenizer = options.task.tokenizer()
        model = build_model(options.model, tokenizer, seed=0)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        trainer = RunTrainer(
            model=model,
            args=training_arguments(options),
            train_dataset=options.task.training_dataset(0, 12),
            data_collator=RightPaddingCollator(tokenizer.pad_token_id),
            processing_class=tokenizer,
        )
        trainer.train()
        return {name: start[name] - value for name, value in model.state_dict().items()}

    full = gradients(12, 1)
    for batch, accumulation in ((1, 12), (4, 3), (6, 2)):
        parts = gradients(batch, accumulation)
        for name, value in full.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}, {accumulation} parts")
    assert max(value.abs().max() for value in full.values()) > 1e-2


def test_padding_on_the_right_needs_no_attention_mask(make_options):
    options = make_options()
    tokenizer = options.task.tokenizer()
    model = build_model(options.model, tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = RightPaddingCollator(tokenizer.pad_token_id)(options.task.training_dataset(0, 16).__getitems__(range(16)))
    mask = (batch["input_ids"] != tokenizer.pad_token_id).long()
    assert mask.min() == 0
    torch.testing.assert_close(model(**batch).loss, model(**batch, attention_mask=mask).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_with_a_checkpoint_and_the_resumed_run_is_the_same(make_options, monkeypatch, number):
    original = RunTrainer.end_step

    def end_step(self, step):
        original(self, step)
        if step == 5:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "end_step", end_step)
        with pytest.raises(TrainingInterruptedError, match=r"stopped after step 5.*checkpoint-5") as caught:
            train(make_options())
    assert signal.getsignal(number) is handler, "handlers are put back"
    run = Path(make_options().output_dir)
    assert caught.value.checkpoint == run / "checkpoint-5"
    train(make_options(), resume=True)
    assert_same_run(train(make_options("straight")), run)


@pytest.mark.slow
def test_ctrl_c_on_the_command_line(make_options, tmp_path):
    options = make_options("run", max_steps=250, logging_steps=7, save_steps=1000)
    run = Path(options.output_dir)
    run.mkdir()
    options.save(run)
    config = tmp_path / "small.yaml"
    shutil.move(run / "config.yaml", config)
    command = [sys.executable, "-m", "tape_pe.cli", "train", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    assert "loss" in line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"Go on with: tape train {run} --resume" in errors
    assert "Traceback" not in errors
    assert not (run / "training.json").exists()
    train(options, resume=True)
    assert_same_run(train(dataclasses.replace(options, output_dir=str(tmp_path / "straight"))), run)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"max_steps": -1}, r"training.max_steps is -1; it must be at least 1"),
        ({"learning_rat": 1}, r"training.learning_rat is not an option"),
        ({"output_dir": "x"}, r"training.output_dir is not an option"),
        ({"lr_scheduler_type": "cosin"}, r"training.lr_scheduler_type is 'cosin'; it must be one of .*'cosine'"),
        ({"learning_rate": "fast"}, r"training.learning_rate is 'fast'"),
        ({"learning_rate": float("nan")}, r"training.learning_rate is nan"),
        ({"seed": -1}, r"training.seed is -1"),
        ({"seed": 2**40}, r"training.seed is .* below 2\*\*32"),
        ({"adam_beta2": 1.0}, r"training.adam_beta2 is 1.0"),
        ({"report_to": "paper"}, r"training.report_to is 'paper'; it must be one of .*tensorboard"),
        ({"bf16": True, "fp16": True}, r"training.bf16 and training.fp16"),
    ],
)
def test_training_options_are_checked_before_anything_is_written(make_options, training, message):
    options = make_options(**training)
    with pytest.raises(ValueError, match=message):
        train(options)
    assert not Path(options.output_dir).exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"encoding": "sinusoid"}, r"encoding='sinusoid': known encodings are .*tape"),
        ({"head_dim": 3}, r"head_dim=3"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3"),
        ({"hidden_size": 15}, r"hidden_size=15"),
        ({"encoding_options": {"size": 3}}, r"encoding_options.size=3"),
    ],
)
def test_model_options_are_checked_before_anything_is_written(make_options, model, message):
    options = dataclasses.replace(
        make_options(), model=dataclasses.replace(ModelOptions(num_attention_heads=4), **model)
    )
    with pytest.raises(ValueError, match=message):
        train(options)
    assert not Path(options.output_dir).exists()


def test_a_finished_run_that_goes_on_is_unfinished_again(make_options, monkeypatch):
    run = train(make_options(max_steps=4, save_steps=2))
    assert (run / "training.json").is_file()

    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tape_pe.train.RunTrainer.training_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(make_options(max_steps=8, save_steps=2), resume=True)
    with pytest.raises(FileNotFoundError, match="has not finished training"):
        evaluate(run)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("save_strategy", "best"),
        ("lr_scheduler_kwargs", {"foo": 1}),
        ("optim", "adamw_bnb_8bit"),
        ("adam_epsilon", -1.0),
        ("dataloader_num_workers", -1),
    ],
)
def test_training_that_cannot_work_is_refused_before_it_starts(make_options, option, value):
    options = make_options(**{option: value})
    with pytest.raises(ValueError, match="training"):
        train(options)
    assert not (Path(options.output_dir) / "config.yaml").exists()


def test_damaged_or_later_checkpoints_are_refused(make_options):
    run = train(make_options(max_steps=4, save_steps=4))
    (run / "training.json").unlink()
    with pytest.raises(ValueError, match=r"training.max_steps is 2; .*checkpoint-4 has 4 steps already"):
        train(make_options(max_steps=2, save_steps=4), resume=True)
    state = run / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:50])
    with pytest.raises(ValueError, match=r"checkpoint-4, which is damaged"):
        train(make_options(max_steps=8, save_steps=4), resume=True)
