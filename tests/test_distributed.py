"""Training in several processes, and training that is killed: the same curve as one process that nothing disturbs."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tape_pe.models import TapeLMForCausalLM
from tape_pe.options import RunOptions
from tape_pe.tasks.base import IGNORED_LABEL
from tape_pe.tasks.language_modelling import LanguageModelling
from tape_pe.train import train

CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"

START = """
import json, os, signal
from tape_pe import train as training
from tape_pe.options import RunOptions
from tape_pe.trainer import RunTrainer
"""

# accelerate turns FSDP2 on for accelerators only, torch also has it for CPUs: here it is turned on by hand.
SHARDED = """
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

def create(self, original=RunTrainer.create_accelerator_and_postprocess):
    original(self)
    config = json.loads(os.environ["FSDP_CONFIG"])
    self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=config["fsdp_version"],
        auto_wrap_policy=config["fsdp_auto_wrap_policy"].lower(),
        transformer_cls_names_to_wrap=[config["fsdp_transformer_layer_cls_to_wrap"]],
        reshard_after_forward=config["fsdp_reshard_after_forward"],
        state_dict_type=config["fsdp_state_dict_type"],
        cpu_ram_efficient_loading=config["fsdp_cpu_ram_efficient_loading"],
    )
    self.is_fsdp_enabled = True

def end_step(self, step, original=RunTrainer.end_step):
    assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())
    assert type(self.model.model.layers[0]).__name__ == "FSDPDecoderLayer"
    original(self, step)

AcceleratorState.is_fsdp2 = property(lambda self: True)
RunTrainer.create_accelerator_and_postprocess = create
RunTrainer.end_step = end_step
"""


def launch(options: RunOptions, processes: int, changes: str = "", resume: bool = False) -> list[tuple[int, str]]:
    """Trains in new processes, as a launcher would start them; returns exit code and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = (
        f"{START}{changes}\ntraining.train(RunOptions.from_sections(json.loads(os.environ['RUN'])), resume={resume})"
    )
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
        "RUN": json.dumps(options.sections()), "ACCELERATE_USE_CPU": "true",
        "FSDP_CONFIG": json.dumps(yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())["fsdp_config"]),
    }  # fmt: skip
    children = []
    for rank in range(processes):
        if processes > 1:
            environment.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", source],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=dict(environment),
            )
        )
    try:
        outputs = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, output) for child, output in zip(children, outputs, strict=True)]


def assert_succeeded(results: list[tuple[int, str]]) -> None:
    for code, output in results:
        assert code == 0, output


def curve(run: Path) -> torch.Tensor:
    return torch.tensor(json.loads((run / "training.json").read_text())["loss_curve"], dtype=torch.float64)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return TapeLMForCausalLM.from_pretrained(run).state_dict()


def assert_same_run(one: Path, other: Path, *, exact: bool = False) -> None:
    rtol, atol = (0, 0) if exact else (1e-5, 1e-5)
    torch.testing.assert_close(curve(one), curve(other), rtol=rtol, atol=atol)
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=atol * 10, msg=name)


def only_checkpoint(run: Path, copy: Path, step: int) -> None:
    """A run folder as if training had been killed after that step."""
    shutil.copytree(run / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    shutil.copy(run / "config.yaml", copy)


def with_folder(options: RunOptions, run: Path) -> RunOptions:
    return dataclasses.replace(options, output_dir=str(run))


SHORT = {"max_steps": 8, "save_steps": 4, "logging_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_like_one_and_one_goes_on_from_two(make_options, tmp_path, kind):
    changes = SHARDED if kind == "fsdp2" else ""
    one = make_options("one", per_device_train_batch_size=16, **SHORT)
    two = make_options("two", per_device_train_batch_size=4, gradient_accumulation_steps=2, **SHORT)
    straight, run = train(one), Path(two.output_dir)
    assert_succeeded(launch(two, 2, changes))
    assert_same_run(straight, run)
    start = curve(run)[0, 1]
    assert curve(run)[-1, 1] < start - 0.1, "it learned"
    moved = [value.abs().max() for name, value in weights(run).items() if ".encoding." in name]
    assert moved
    assert min(moved) > 0, "TAPE's weights, zero at first, trained"

    only_checkpoint(run, tmp_path / "on-in-one", 4)
    train(with_folder(one, tmp_path / "on-in-one"), resume=True)
    assert_same_run(straight, tmp_path / "on-in-one")
    only_checkpoint(straight, tmp_path / "on-in-two", 4)
    assert_succeeded(launch(with_folder(two, tmp_path / "on-in-two"), 2, changes, resume=True))
    assert_same_run(straight, tmp_path / "on-in-two")


def test_resuming_with_other_samples_per_step_is_refused(make_options):
    train(make_options(per_device_train_batch_size=8, **SHORT))
    (Path(make_options().output_dir) / "training.json").unlink()
    with pytest.raises(ValueError, match=r"samples per step=4: .* was written with 8"):
        train(make_options(per_device_train_batch_size=4, **SHORT), resume=True)


def test_processes_that_would_each_train_alone_are_refused(make_options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2: .*ACCELERATE_USE_CPU=true"):
        train(make_options())


KILL = """
def kill(name):
    original = getattr({where}, name)
    def changed(*arguments, **named):
        if {when}:
            original(*arguments, **named) if {after} else None
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)
    setattr({where}, name, changed)
kill({name!r})
"""
# Moments of saving the second checkpoint: when the weights are written, and when only the renaming is left.
AT_SAVE = "arguments[0].state.global_step == 8"
MOMENTS = {
    "weights": KILL.format(where="RunTrainer", name="save_model", when=AT_SAVE, after=True),
    "everything": "import tape_pe.trainer\n"
    + KILL.format(
        where="tape_pe.trainer", name="write_json", when="arguments[1].get('steps') == 8", after=True
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "processes"), [*((moment, 1) for moment in MOMENTS), ("weights", 2)])
def test_killed_while_saving(make_options, moment, processes):
    sizes = {**SHORT, "max_steps": 12}
    straight = train(make_options("straight", per_device_train_batch_size=16, **sizes))
    killed = make_options("killed", per_device_train_batch_size=16 // processes, **sizes)
    run = Path(killed.output_dir)
    codes = [code for code, _ in launch(killed, processes, MOMENTS[moment])]
    assert codes[0] == -signal.SIGKILL
    assert 0 not in codes, "no process thinks that it has finished"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    assert list(run.glob(".partial-*/checkpoint-8/model.safetensors")), "it was being written"
    train(with_folder(make_options("one", per_device_train_batch_size=16, **sizes), run), resume=True)
    assert_same_run(straight, run, exact=processes == 1)
    assert [path.name for path in run.glob(".*")] == [".lock"], "no temporary files are left"


IN_PLACE = "str(arguments[1]).endswith('killed/model.safetensors')"
# Moments of saving the final model: when one of its files has its place, and when only `training.json` is missing.
FINAL_MOMENTS = {
    "one file": KILL.format(where="os", name="replace", when=IN_PLACE, after=True),
    "all but one": KILL.format(
        where="training", name="write_json", when="arguments[0].name == 'training.json'", after=False
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("moment", FINAL_MOMENTS)
def test_killed_while_saving_the_final_model(make_options, moment):
    straight = train(make_options("straight", per_device_train_batch_size=16, **SHORT))
    options = make_options("killed", per_device_train_batch_size=16, **SHORT)
    run = Path(options.output_dir)
    assert launch(options, 1, FINAL_MOMENTS[moment])[0][0] == -signal.SIGKILL
    assert (run / "model.safetensors").exists()
    assert not (run / "training.json").exists(), "it has not finished"
    train(options, resume=True)
    assert_same_run(straight, run, exact=True)
    assert [path.name for path in run.glob(".*")] == [".lock"], "no temporary files are left"


def test_a_checkpoint_of_the_same_name_is_replaced_whole(make_options, monkeypatch):
    """Resumed from an earlier checkpoint, a run comes to a later one again; killed then, it has one or the other."""
    options = make_options(per_device_train_batch_size=16, **SHORT)
    run = train(options)
    deleted: list[Path] = []
    original = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, *a, **k: (deleted.append(Path(path)), original(path, *a, **k)))
    train(options, resume=run / "checkpoint-4")
    assert deleted
    assert not [path for path in deleted if path.parent == run and path.name.startswith("checkpoint-")]


def test_nonfinite_loss_keeps_its_batch(make_options, monkeypatch):
    options = make_options(gradient_accumulation_steps=2, per_device_train_batch_size=3, **SHORT)
    original = TapeLMForCausalLM.forward
    calls: list[int] = []

    @functools.wraps(original)  # Trainer looks at the signature
    def forward(self, *arguments, **named):
        outputs = original(self, *arguments, **named)
        calls.append(1)
        outputs.loss = outputs.loss * (float("nan") if len(calls) == 6 else 1)
        return outputs

    monkeypatch.setattr(TapeLMForCausalLM, "forward", forward)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3; .*nonfinite-step-3.safetensors"):
        train(options)
    saved = load_file(Path(options.output_dir) / "nonfinite-step-3.safetensors")
    assert sorted(saved) == ["0.input_ids", "0.labels", "1.input_ids", "1.labels"]
    dataset = options.task.training_dataset(3, 48)
    for number in range(6):
        batch, row = divmod(number, 3)
        sample = dataset[12 + number]
        size = len(sample["input_ids"])
        assert saved[f"{batch}.input_ids"][row, :size].tolist() == sample["input_ids"].tolist()
        assert saved[f"{batch}.labels"][row, :size].tolist() == sample["labels"].tolist()
        assert (saved[f"{batch}.labels"][row, size:] == IGNORED_LABEL).all()


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_nonfinite_gradients_keep_their_batch(make_options, monkeypatch, max_grad_norm):
    from tape_pe import train as training

    calls: list[int] = []

    def build_model(*arguments, original=training.build_model, **named):
        model = original(*arguments, **named)

        def hook(gradient):
            calls.append(1)
            return gradient * (float("inf") if len(calls) == 3 else 1)

        model.lm_head.weight.register_hook(hook)
        return model

    monkeypatch.setattr(training, "build_model", build_model)
    options = make_options(max_grad_norm=max_grad_norm, **SHORT)
    with pytest.raises(FloatingPointError, match=r"norm of the gradients is (nan|inf) at step \d"):
        train(options)
    assert len(list(Path(options.output_dir).glob("nonfinite-step-*.safetensors"))) == 1


ONE_BAD_PROCESS = """
import functools
from tape_pe.models import TapeLMForCausalLM
original, calls = TapeLMForCausalLM.forward, []
@functools.wraps(original)
def forward(self, *arguments, **named):
    outputs = original(self, *arguments, **named)
    calls.append(1)
    outputs.loss = outputs.loss * (float("nan") if len(calls) == 3 and os.environ["RANK"] == "1" else 1)
    return outputs
TapeLMForCausalLM.forward = forward
"""


@pytest.mark.slow
def test_all_processes_stop_at_one_nonfinite_loss(make_options):
    options = make_options(**SHORT)
    for rank, (code, output) in enumerate(launch(options, 2, ONE_BAD_PROCESS)):
        assert code == 1
        assert f"at step 3; its batch is saved in {options.output_dir}/nonfinite-step-3-process-{rank}." in output
        saved = load_file(Path(options.output_dir) / f"nonfinite-step-3-process-{rank}.safetensors")
        first = options.task.training_dataset(3, 128)[32 + 8 * rank]["input_ids"]
        assert saved["0.input_ids"][0, : len(first)].tolist() == first.tolist()


ONE_SIGNALLED_PROCESS = """
def end_step(self, step, original=RunTrainer.end_step):
    original(self, step)
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
RunTrainer.end_step = end_step
"""


@pytest.mark.slow
def test_all_processes_stop_at_one_signal(make_options):
    options = make_options(**SHORT)
    for code, output in launch(options, 2, ONE_SIGNALLED_PROCESS):
        assert code == 1
        assert "TrainingInterruptedError: stopped after step 3" in output
    assert (Path(options.output_dir) / "checkpoint-3" / "progress.json").is_file()


@pytest.fixture
def streaming(make_options, tmp_path):
    """Options of a run on text that is streamed, several times over."""
    lines = [json.dumps({"text": f"{number} is a number. " * (1 + number % 9)}) for number in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = str(tmp_path / "text.jsonl")
    task = LanguageModelling(data=data, eval_data=data, streaming=True, length=16, eval_tokens=64, eval_factors=(1,))

    def make(name: str, **training) -> RunOptions:
        options = make_options(name, **SHORT, **training)
        return dataclasses.replace(options, task=task, task_name="language_modelling")

    return make


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_run_goes_on_where_it_stopped(streaming, tmp_path, workers):
    options = streaming("straight", dataloader_num_workers=workers, gradient_accumulation_steps=2)
    straight = train(options)
    only_checkpoint(straight, tmp_path / "resumed", 4)
    train(with_folder(options, tmp_path / "resumed"), resume=True)
    assert_same_run(straight, tmp_path / "resumed", exact=True)


@pytest.mark.slow
def test_streamed_run_of_two_processes_goes_on_where_it_stopped(streaming, tmp_path):
    options = streaming("straight")
    assert_succeeded(launch(options, 2))
    run = Path(options.output_dir)
    only_checkpoint(run, tmp_path / "resumed", 4)
    assert_succeeded(launch(with_folder(options, tmp_path / "resumed"), 2, resume=True))
    assert_same_run(run, tmp_path / "resumed", exact=True)
    only_checkpoint(run, tmp_path / "alone", 4)
    alone = streaming("alone", per_device_train_batch_size=16)
    with pytest.raises(ValueError, match=r"as many processes as before"):
        train(alone, resume=True)
