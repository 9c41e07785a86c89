"""Suites: what is planned, what each run leaves, and what failures, interruptions and changed files come to."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tape_pe.cli import main
from tape_pe.files import sole_user
from tape_pe.language.text import Texts
from tape_pe.models import TapeLMForCausalLM
from tape_pe.options import load_options
from tape_pe.results import read_results
from tape_pe.suite import Failure, finished_results, load_suite, plan, run_suite
from tape_pe.suite.estimate import estimate_seconds
from tape_pe.tasks.base import Task
from tape_pe.tasks.copying import Copy
from tape_pe.tasks.state_tracking import StateTracking
from tape_pe.train import build_config, check_run

CONFIGS = Path(__file__).parents[2] / "configs" / "suites"
SMALL = {
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "training": {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"},
    "encodings": {"tape": {}, "rope": None, "wide": {"encoding": "rope", "intermediate_size": 48}},
    "tasks": {
        "copy": {"task": {"max_length": 4, "rows_per_size": 3}},
        "z60": {
            "task": {"name": "state_tracking", "group": "Z60", "max_length": 4, "rows_per_size": 3},
            "training": {"max_steps": 1},
            "encodings": ["rope"],
        },
    },
    "seeds": [3, 5],
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a small suite with changes, and returns its file."""
    monkeypatch.chdir(tmp_path)

    def write(**changes) -> Path:
        path = Path("small.yaml")
        path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
        return path

    return write


def test_plan_has_every_combination_once_with_seeds_slowest(write) -> None:
    runs = plan(load_suite(write()))
    names = ["copy/tape", "copy/rope", "copy/wide", "z60/rope"]
    assert [run.name for run in runs] == [f"{name}/seed-{seed}" for seed in (3, 5) for name in names]
    wide, z60 = runs[2].options, runs[3].options
    assert (wide.model.encoding, wide.model.intermediate_size, wide.training["seed"]) == ("rope", 48, 3)
    assert (z60.task_name, z60.task.group, z60.training["max_steps"]) == ("state_tracking", "Z60", 1)
    assert wide.output_dir == "runs/small/copy/wide/seed-3"
    for run in runs:
        model = TapeLMForCausalLM(build_config(run.options.model, run.options.task.tokenizer()))
        assert run.parameters == model.num_parameters()


def test_data_of_a_task_are_read_once_for_all_its_runs(write, monkeypatch) -> None:
    checked = []
    monkeypatch.setattr(Task, "check", lambda task: checked.append(type(task)))
    plan(load_suite(write()))
    assert checked == [Copy, StateTracking]


def test_parameters_are_matched_by_the_width_of_the_mlp(write) -> None:
    encodings = {"tape": {}, "rope": {}, "wide": {"encoding": "rope", "intermediate_size": 99}, "t5": {}}
    suite = load_suite(write(encodings=encodings, match_parameters="rope"))
    runs = {run.name: run for run in plan(suite)}
    target = runs["copy/rope/seed-3"].parameters
    assert runs["copy/wide/seed-3"].parameters == target
    one_unit = 3 * 16 * 2
    assert all(abs(run.parameters - target) <= one_unit / 2 for name, run in runs.items() if name.startswith("copy"))
    assert runs["copy/tape/seed-3"].options.model.intermediate_size < 32
    assert runs["copy/rope/seed-3"].options.model.intermediate_size == 32


def test_a_suite_runs_once_and_writes_a_line_per_run(write, capsys) -> None:
    path = write()
    assert main(["suite", str(path), "--seeds", "3"]) == 0
    assert "copy/tape/seed-3: accuracy" in capsys.readouterr().out
    folder = Path("runs/small")
    lines = {result.name: result for result in read_results(folder)}
    assert sorted(lines) == [f"{name}/seed-3" for name in ("copy/rope", "copy/tape", "copy/wide", "z60/rope")]
    assert lines["copy/tape/seed-3"].steps == 2
    assert lines["z60/rope/seed-3"].config["task"]["group"] == "Z60"
    assert lines["copy/tape/seed-3"].metrics == read_results(folder / "copy/tape/seed-3")[-1].metrics
    assert (folder / "site" / "index.html").is_file()
    before = (folder / "results.jsonl").read_text()
    modified = (folder / "copy/tape/seed-3/training.json").stat().st_mtime_ns

    assert main(["suite", str(path)]) == 0
    assert "8 runs, 4 of them finished" in capsys.readouterr().out
    after = (folder / "results.jsonl").read_text()
    assert after.startswith(before)
    assert len(read_results(folder)) == 8
    assert (folder / "copy/tape/seed-3/training.json").stat().st_mtime_ns == modified
    assert not (folder / "failures.jsonl").exists()


def test_lines_alone_tell_what_has_finished(write) -> None:
    path = write(encodings={"rope": {}}, tasks={"copy": SMALL["tasks"]["copy"]}, seeds=[1])
    suite = load_suite(path)
    runs = plan(suite)
    first, _ = run_suite(suite, runs)
    elsewhere = load_suite(
        write(), encodings={"rope": {}}, tasks={"copy": SMALL["tasks"]["copy"]}, seeds=[1], output_dir="b"
    )
    Path("b").mkdir()
    Path("b/results.jsonl").write_text(Path("runs/small/results.jsonl").read_text() + '{"name": "torn')
    assert finished_results(elsewhere, plan(elsewhere)) == {first[0].name: first[0]}
    # And a run folder alone does so too, where the suite was killed before it wrote the line.
    Path("runs/small/results.jsonl").unlink()
    assert main(["evaluate", "runs/small/copy/rope/seed-1", "--task.rows_per_size", "2"]) == 0  # of no interest here
    assert len(read_results(Path("runs/small/copy/rope/seed-1"))) == 2
    assert run_suite(suite, runs) == (first, [])
    assert read_results(Path("runs/small")) == first


def test_a_failed_run_is_reported_and_the_others_go_on(write, capsys) -> None:
    bad = {"task": {"name": "copy", "max_length": 4}, "training": {"learning_rate": 1e30, "max_steps": 4}}
    path = write(encodings={"rope": {}}, tasks={"bad": bad, **SMALL["tasks"]}, seeds=[1])
    assert main(["suite", str(path)]) == 1
    assert "bad/rope/seed-1: FAILED" in capsys.readouterr().out
    folder = Path("runs/small")
    failure = Failure(**json.loads((folder / "failures.jsonl").read_text()))
    assert failure.exit_code in (1, 2)
    assert "its batch is saved in" in failure.message
    assert {result.name for result in read_results(folder)} == {"copy/rope/seed-1", "z60/rope/seed-1"}


def test_an_interrupted_suite_saves_and_goes_on(write) -> None:
    training = {"max_steps": 4000, "per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 500}
    path = write(encodings={"rope": {}}, tasks={"copy": SMALL["tasks"]["copy"]}, seeds=[1], training=training)
    command = [sys.executable, "-m", "tape_pe.cli", "suite", str(path)]
    source = str(Path(__file__).parents[2] / "src")
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, stderr=subprocess.PIPE, text=True)
    run = Path("runs/small/copy/rope/seed-1")
    deadline = time.monotonic() + 120
    while not (run / "config.yaml").is_file():
        assert process.poll() is None, "the suite ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped with 0 of 1 runs finished" in error
    checkpoint = max(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    assert 0 < int(checkpoint.name.rpartition("-")[2]) < 4000
    assert not Path("runs/small/failures.jsonl").exists()
    assert check_run(load_options(run), resume=True) == checkpoint  # what the next attempt goes on from
    assert main(["suite", str(path)]) == 0
    assert read_results(Path("runs/small"))[0].steps == 4000


def test_a_changed_suite_does_not_mix_with_the_old_lines(write, capsys) -> None:
    only = {"tasks": {"copy": SMALL["tasks"]["copy"]}, "encodings": {"rope": {}}, "seeds": [1]}
    assert main(["suite", str(write(**only))]) == 0
    capsys.readouterr()
    for change, value in (("learning_rate", 0.5), ("max_steps", 1), ("max_steps", 3)):
        assert main(["suite", str(write(**only, training={**SMALL["training"], change: value}))]) == 2
        assert f"training.{change} is {value}" in capsys.readouterr().err
    assert len(read_results(Path("runs/small"))) == 1


def test_seeds_restrict_a_call_and_not_the_suite(write, capsys) -> None:
    path = write(tasks={"copy": SMALL["tasks"]["copy"]}, encodings={"rope": {}})
    assert main(["suite", str(path), "--seeds", "5"]) == 0
    assert [line.seed for line in read_results(Path("runs/small"))] == [5]
    assert list(load_suite(Path("runs/small")).seeds) == [3, 5]
    assert main(["suite", str(path), "--seeds", "7"]) == 2
    assert "seeds=7: the suite has 3, 5" in capsys.readouterr().err


def test_a_folder_has_one_user_at_a_time(write, capsys) -> None:
    path = write(tasks={"copy": SMALL["tasks"]["copy"]}, encodings={"rope": {}}, seeds=[3])
    with sole_user(Path("runs/small")):
        assert main(["suite", str(path)]) == 2
    assert "runs/small is in use" in capsys.readouterr().err
    with sole_user(Path("runs/small/copy/rope/seed-3")):  # a run that goes on after its suite was killed
        assert main(["suite", str(path)]) == 1
    assert "seed-3 is in use" in capsys.readouterr().out
    assert main(["suite", str(path)]) == 0


def test_dry_run_shows_the_plan_and_writes_nothing(write, capsys) -> None:
    assert main(["suite", str(write()), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "copy/tape/seed-3" in output
    assert "8 runs, 0 finished; about" in output
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds=[]"),
        ({"seeds": [1, 1]}, "seeds=[1, 1]"),
        ({"sedes": [1]}, "sedes is not a key"),
        ({"encodings": {}}, "encodings={}"),
        ({"encodings": {"rope": {}, "ropes": {}}}, "encoding='ropes'"),
        ({"encodings": {"a/b": {"encoding": "rope"}}}, "encodings='a/b'"),
        ({"encodings": {"rope": {"width": 3}}}, "model.width"),
        ({"tasks": {"copie": {"task": {}}}}, "copie"),
        ({"tasks": {"copy": {"task": {"length": 3}}}}, "task.length"),
        ({"tasks": {"copy": {"tsak": {}}}}, "tasks.copy.tsak is not a key"),
        ({"tasks": {"copy": {"task": {}, "encodings": ["alibi"]}}}, "tasks.copy.encodings='alibi'"),
        ({"tasks": {"copy": {"task": {}, "overrides": {"alibi": {}}}}}, "tasks.copy.overrides='alibi'"),
        ({"tasks": {"copy": {"task": {}, "overrides": {"rope": {"width": 3}}}}}, "model.width"),
        ({"encodings": {"rope": {}, "learned": {"max_position_embeddings": 9}}}, "reads at most 9 tokens"),
        ({"tasks": {"copy": {"task": {}, "encodings": []}}}, "tasks.copy.encodings=[]"),
        ({"tasks": {"copy": {"task": {}, "encodings": ["rope", "rope"]}}}, "different labels"),
        ({"tasks": {"site": {"task": {"name": "copy"}}}}, "tasks='site'"),
        ({"encodings": ["rope", "rope"]}, "encodings=['rope', 'rope']: different labels"),
        ({"encodings": {"r" * 101: {"encoding": "rope"}}}, "a label is a folder's name"),
        ({"seeds": [0.5]}, "seeds=[0.5]"),
        ({"seeds": 3}, "seeds=3"),
        ({"output_dir": 5}, "output_dir=5"),
        ({"name": ["a"]}, "name=['a']"),
        ({"launcher": 'python "'}, "launcher='python \"'"),
        ({"launcher": "no-such-program"}, "'no-such-program' is not a program"),
        ({"match_parameters": ["rope"]}, "match_parameters=['rope']"),
        ({"model": {**SMALL["model"], "hidden_size": "a"}}, "hidden_size"),
        ({"training": {"max_steps": 2.5}}, "training.max_steps is 2.5"),
        ({"match_parameters": "alibi"}, "match_parameters='alibi'"),
        ({"processes": 0}, "processes=0"),
        ({"training": {"max_steps": 2, "learning_rate": -1}}, "learning_rate"),
    ],
)
def test_bad_suites_are_refused_before_work(write, capsys, changes: dict, message: str) -> None:
    assert main(["suite", str(write(**changes))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_a_launcher_starts_the_processes_of_each_run_and_interrupted_ones_go_on(write, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launcher = f"{sys.executable} -m torch.distributed.run --nproc_per_node 2"
    training = {**SMALL["training"], "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    suite = {"encodings": {"tape": {}}, "seeds": [3], "tasks": {"copy": SMALL["tasks"]["copy"]}, "training": training}
    assert main(["suite", str(write(launcher=launcher, **suite))]) == 0
    folder, run = Path("runs/small"), Path("runs/small/copy/tape/seed-3")
    (whole,) = read_results(folder)
    shutil.rmtree(run / "checkpoint-4")
    for path in (folder / "results.jsonl", run / "results.jsonl", run / "training.json"):
        path.unlink()
    assert main(["suite", str(write(launcher=launcher, **suite))]) == 0
    assert json.loads((run / "checkpoint-4/progress.json").read_text())["samples_per_step"] == 8
    (resumed,) = read_results(folder)
    assert (resumed.loss_curve, resumed.metrics) == (whole.loss_curve, whole.metrics)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_suites_can_be_planned(path: Path, tmp_path, monkeypatch) -> None:
    texts = Texts(lambda place: ((f"text {number} " * 100, number) for number in range(100)))
    monkeypatch.setattr("tape_pe.language.text._hub_texts", lambda *_: texts)
    suite = load_suite(path, output_dir=str(tmp_path))
    runs = plan(suite)
    assert len(runs) >= len(suite.seeds) * len(suite.tasks)
    if suite.flops_per_second:
        assert all(seconds > 1 for seconds in estimate_seconds(suite, runs, {}).values())
