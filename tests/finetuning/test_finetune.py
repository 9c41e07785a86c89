"""Whole fine-tuning runs: their results, interruptions, several processes, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tape_pe.files import sole_user
from tape_pe.finetuning.finetune import BlockDataset, FinetuneTrainer, finetune, held_out_loss
from tape_pe.finetuning.options import METHODS, FinetuneOptions, check_finetune
from tape_pe.language.pretrained import FINETUNE_FILE, load_causal_lm, load_tokenizer
from tape_pe.language.text import read_texts, token_blocks
from tape_pe.results import read_results
from tape_pe.train import TrainingInterruptedError

SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("method", METHODS)
def test_result_and_output(make_finetune, text_file, method):
    options = make_finetune(method)
    result = finetune(options)
    folder, metrics = options.folder, result["metrics"]
    assert read_results(folder)[0].metrics == metrics
    assert (result["task"], result["steps"], result["tokens"]) == ("finetune", 3, 3 * 4 * 64)
    assert result["config"]["model"]["rope_parameters"]["rope_type"] == ("default" if method == "theta" else "linear")
    assert result["config"]["finetune"] == json.loads((folder / FINETUNE_FILE).read_text())["options"]
    assert [step for step, _ in result["loss_curve"]] == [1, 2, 3]
    assert metrics["train_loss"] == result["loss_curve"][-1][1]
    assert metrics["held_out_loss"] < metrics["held_out_loss_before"]
    assert result["parameters"] == sum(group["parameters"] for group in metrics["trained"]["groups"])
    assert not list(folder.glob("checkpoint-*"))

    model, tokenizer = load_causal_lm(folder)
    blocks = list(token_blocks(read_texts(str(text_file)), tokenizer, 64))[:4]
    assert held_out_loss(model, torch.tensor(blocks), 2) == metrics["held_out_loss"]
    assert finetune(options, resume=True) == result  # nothing left to do
    with pytest.raises(FileExistsError, match="holds a run already; use --resume"):
        finetune(options)


def interrupting(training_step):
    """That step, with Ctrl-C in the middle of the second one."""
    sent = []

    def step(trainer, *arguments, **named):
        if trainer.state.global_step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return training_step(trainer, *arguments, **named)

    return step


def weights(folder):
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_has_the_same_weights(make_finetune, monkeypatch, method):
    whole = make_finetune(method, "whole")
    expected = finetune(whole)
    options = make_finetune(method, "parts")
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTrainer, "training_step", interrupting(FinetuneTrainer.training_step))
        with pytest.raises(TrainingInterruptedError, match="stopped after step 2"):
            finetune(options)
    assert [path.name for path in options.folder.iterdir() if path.is_dir()] == ["checkpoint-2"]
    with pytest.raises(FileNotFoundError, match="fine-tuning has not finished"):
        load_causal_lm(options.folder)
    for changes, message in (
        ({"lora_rank": 4}, "lora_rank=4: the run to resume has 8"),
        ({"also_train": ("norm",)}, r"also_train=\['norm'\]: the run to resume has"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune(replace(options, **changes), resume=True)
    result = finetune(options, resume=True)
    assert result["loss_curve"] == expected["loss_curve"]
    assert result["metrics"] == expected["metrics"]
    parts, whole = weights(options.folder), weights(whole.folder)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("method", ["lora", "tape"])
def test_checkpointing_and_bf16(make_finetune, method):
    one = finetune(make_finetune(method, "one"))
    other = finetune(make_finetune(method, "other", activation_checkpointing=True))
    assert other["loss_curve"] == one["loss_curve"]
    rounded = finetune(make_finetune(method, "rounded", bf16=True))
    assert rounded["loss_curve"] != one["loss_curve"]
    assert rounded["metrics"]["held_out_loss"] == pytest.approx(one["metrics"]["held_out_loss"], rel=1e-2)


def test_accumulation_makes_no_difference(make_finetune):
    one = finetune(make_finetune("full", "one"))
    other = finetune(make_finetune("full", "other", batch_size=4, accumulation=1))
    losses = ([loss for _, loss in result["loss_curve"]] for result in (one, other))
    assert next(losses) == pytest.approx(next(losses), rel=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_same_curve(make_finetune):
    one = finetune(make_finetune("lora", "one", batch_size=4, accumulation=1))
    options = make_finetune("lora", "two", batch_size=2, accumulation=1)
    flags = {
        **{name: getattr(options, name) for name in ("data", "output_dir", "method", "length", "max_steps")},
        **{name: getattr(options, name) for name in ("batch_size", "accumulation", "learning_rate", "warmup_steps")},
        **{name: getattr(options, name) for name in ("eval_blocks", "logging_steps")},
        "save_steps": 2,
        "progress": "false",
    }
    # `accelerate launch --cpu --num_processes 2` starts one process, unless there is mpirun.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--module"]
    command += ["tape_pe.cli", "finetune", options.model, *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole model") == 1  # the first process speaks for both
    (two,) = read_results(options.folder)
    assert (two.tokens, two.steps) == (one["tokens"], 3)
    assert [loss for _, loss in two.loss_curve] == pytest.approx([loss for _, loss in one["loss_curve"]], rel=1e-5)
    assert two.metrics["held_out_loss"] == pytest.approx(one["metrics"]["held_out_loss"], rel=1e-5)


def test_shards_are_refused(make_finetune, monkeypatch):
    options = make_finetune("lora")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP='true': every process keeps the whole model here"):
        finetune(options)
    assert not options.folder.exists()


def test_checkpoints_that_do_not_fit_and_folders_in_use_are_refused(make_finetune, monkeypatch):
    options = make_finetune("lora")
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneTrainer, "training_step", interrupting(FinetuneTrainer.training_step))
        with pytest.raises(TrainingInterruptedError):
            finetune(options)
    with sole_user(options.folder), pytest.raises(FileExistsError, match="is in use: another process writes to it"):
        finetune(options, resume=True)
    path = options.folder / "checkpoint-2" / "progress.json"
    progress = json.loads(path.read_text())
    path.write_text(json.dumps({**progress, "samples_per_step": 8}))
    with pytest.raises(ValueError, match=r"samples per step=4: .*checkpoint-2 was written with 8; .* x processes"):
        finetune(options, resume=True)
    path.write_text("{")
    with pytest.raises(ValueError, match="checkpoint-2, which is damaged"):
        finetune(options, resume=True)
    path.write_text(json.dumps(progress))
    assert finetune(options, resume=True)["steps"] == 3


def test_short_texts_are_repeated_in_other_orders():
    data = BlockDataset(torch.arange(5)[:, None], 12, seed=3)
    seen = [int(data[i]["input_ids"]) for i in range(len(data))]
    assert len(seen) == 12
    assert sorted(seen[:5]) == sorted(seen[5:10]) == [0, 1, 2, 3, 4]
    assert seen[:5] != seen[5:10]
    assert seen != [int(row["input_ids"]) for row in BlockDataset(torch.arange(5)[:, None], 12, seed=4)]


def test_held_out_blocks_are_not_trained_on(make_finetune, monkeypatch):
    kept = {}
    monkeypatch.setattr(FinetuneTrainer, "train", lambda trainer, **_: kept.update(data=trainer.train_dataset))
    options = make_finetune("full", eval_blocks=4, data_tokens=64 * 20)
    with pytest.raises(TrainingInterruptedError):
        finetune(options)
    _, tokenizer = load_causal_lm(options.model)
    blocks = list(token_blocks(read_texts(options.data), tokenizer, 64))
    assert kept["data"].blocks.tolist() == blocks[4:24]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length=1: it must be an integer of at least 2"),
        ({"method": "magic"}, "method='magic': it must be one of tape, lora, longlora, theta, full, tape_lora"),
        ({"method": "longlora", "length": 66}, "length=66: longlora has four groups"),
        ({"rope": "dynamic"}, "rope='dynamic': it must be one of linear, ntk, yarn, none"),
        ({"rope": "none", "factor": 2.0}, "factor=2.0: it needs a rule"),
        ({"factor": 0.5}, "factor=0.5: it must be a number of at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": float("inf")}, "learning_rate=inf: it must be finite"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296: it must be below"),
        ({"also_train": ("head",)}, "also_train has 'head': it can have embed, norm"),
    ],
)
def test_values_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        FinetuneOptions(**{"model": "m", "length": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "/none"}, FileNotFoundError, "'/none' is not a model folder"),
        ({"data": "/none"}, FileNotFoundError, "data='/none': does not exist"),
        ({"eval_data": "/none"}, FileNotFoundError, "data='/none': does not exist"),
        ({"tape": {"position_size": 4}}, ValueError, "tape={'position_size': 4}: the method lora has no such"),
        ({"method": "tape", "tape": {"size": 4}}, ValueError, "tape.size=4: known options are"),
        ({"method": "tape", "tape": {"rope": {}}}, ValueError, "tape.rope={}: the options rope and factor"),
        ({"method": "tape", "tape": {"position_size": -1}}, ValueError, "position_size=-1"),
    ],
)
def test_refused_before_any_work(make_finetune, changes, error, message):
    options = replace(make_finetune("lora"), **changes)
    with pytest.raises(error, match=message):
        check_finetune(options)
    assert not options.folder.exists()


def test_generation_defaults_that_transformers_does_not_write_are_kept(make_finetune, base_folder, tmp_path):
    base = shutil.copytree(base_folder, tmp_path / "base")
    (base / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": false}')
    options = make_finetune("full", model=str(base))
    finetune(options)
    model, _ = load_causal_lm(options.folder)
    assert (model.generation_config.temperature, model.generation_config.do_sample) == (0.5, False)


def test_tokens_that_the_model_does_not_know_are_refused(make_finetune, base_folder, tmp_path):
    base = shutil.copytree(base_folder, tmp_path / "base")
    tokenizer = load_tokenizer(str(base))
    tokenizer.add_tokens(["def f"])
    tokenizer.save_pretrained(base)
    with pytest.raises(ValueError, match=r"tokenizer made the token 300 of the data; the model knows 0..299"):
        finetune(make_finetune("tape", model=str(base)))


def test_nothing_to_train_is_refused(make_finetune):
    nothing = {"update_attention": False, "update_mlp": False}
    with pytest.raises(ValueError, match="there is nothing to train"):
        finetune(make_finetune("tape", tape=nothing, also_train=()))


def test_adapters_and_foreign_folders_are_refused(make_finetune, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter"):
        check_finetune(make_finetune("lora", model=str(tmp_path / "adapter")))
    options = make_finetune("lora", "foreign")
    options.folder.mkdir()
    (options.folder / "notes.txt").write_text("")
    with pytest.raises(FileExistsError, match="holds other files; choose another folder"):
        check_finetune(options, resume=True)
    with pytest.raises(FileExistsError, match="a file; it must"):
        check_finetune(replace(options, output_dir=str(options.folder / "notes.txt")))


def test_too_little_text(make_finetune, tmp_path):
    (tmp_path / "short.txt").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"too little text: no block of 64 tokens .* behind eval_blocks=4"):
        finetune(make_finetune("lora", data=str(tmp_path / "short.txt")))
    with pytest.raises(ValueError, match=r"eval_data=.*fewer than length=64 tokens"):
        finetune(make_finetune("lora", eval_data=str(tmp_path / "short.txt")))


def test_a_loss_that_is_not_finite_stops_the_run(make_finetune):
    with pytest.raises(FloatingPointError, match="the training loss is nan at step"):
        finetune(make_finetune("full", learning_rate=1e30, max_grad_norm=0.0, max_steps=6))
