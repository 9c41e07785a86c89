"""The `tape` command: one pass through it, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from tests.cli.refusals import refused
from tests.report.suites import TASKS, write_suite

from tape_pe.cli import main
from tape_pe.options import load_options
from tape_pe.results import read_results
from tape_pe.train import train

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = """
model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
task: {name: addition, max_digits: 2, pairs_per_cell: 3}
training: {max_steps: 4, per_device_train_batch_size: 8, save_strategy: "no", disable_tqdm: true, seed: 1}
"""


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    return "small.yaml"


def test_train_evaluate_generate_report(config, capsys):
    flags = ["--model.hidden_size", "24", "--model.encoding_options.position_size", "5", "--training.max_steps=6"]
    assert main(["train", config, *flags]) == 0
    assert "Next: tape evaluate runs/small" in capsys.readouterr().out
    run = Path("runs/small")
    options = load_options(run)
    assert (options.model.hidden_size, options.model.intermediate_size) == (24, 32)
    assert options.model.encoding_options == {"position_size": 5}
    assert (options.training["max_steps"], options.training["seed"]) == (6, 1)
    assert json.loads((run / "training.json").read_text())["steps"] == 6
    assert main(["train", str(run), "--resume"]) == 0
    assert main(["train", config, *flags, "--resume"]) == 0
    capsys.readouterr()

    assert main(["evaluate", str(run), "--task.pairs_per_cell", "2", "--task.eval_max_digits", "3"]) == 0
    assert "exact_match: 0." in capsys.readouterr().out
    metrics = read_results(run)[0].metrics
    assert main(["evaluate", "--batch_size", "64", str(run), "--task.pairs_per_cell", "2"]) == 0  # in any order
    capsys.readouterr()
    assert (metrics["pairs_per_cell"], len(metrics["grid"])) == (2, 3)
    assert main(["generate", str(run), "12+34="]) == 0
    assert len(capsys.readouterr().out.strip()) <= 4
    assert main(["report", str(run), "--output", "page.html"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:2] == ["Run", "Encoding"]  # the table, then the page's path
    assert printed[-1] == "page.html"
    assert Path("page.html").read_text().lower().startswith("<!doctype html>")

    assert "holds a run already; use --resume or --overwrite" in refused(capsys, "train", config)
    message = refused(capsys, "train", config, *flags, "--resume", "--model.hidden_size", "32")
    assert "model.hidden_size is 32; the run to resume has 24" in message
    assert "checkpoint is nowhere" in refused(capsys, "train", config, *flags, "--resume", "--checkpoint", "nowhere")
    assert "prompt is '12'; it must be two numbers" in refused(capsys, "generate", str(run), "12")
    assert "task.max_digits is not an option; the options are task.eval_max_digits" in refused(
        capsys, "evaluate", str(run), "--task.max_digits", "3"
    )
    assert "task.pairs_per_cell is 0" in refused(capsys, "evaluate", str(run), "--task.pairs_per_cell", "0")
    assert "batch_size is 0; it must be at least 1" in refused(capsys, "evaluate", str(run), "--batch_size", "0")
    assert "device is 'abacus'" in refused(capsys, "evaluate", str(run), "--device", "abacus")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.hidden_sizes", "3"], "model.hidden_sizes is not an option; the options are model.hidden_size,"),
        (["--model.hidden_size", "wide"], "\"model.hidden_size\": Expected a <class 'int'>. Got value: wide"),
        (["--model.hidden_size", "33"], "hidden_size=33: not a multiple of num_attention_heads=2"),
        (["--model.head_dim", "5"], "head_dim=5"),
        (["--model.num_key_value_heads", "3"], "num_key_value_heads=3: must divide num_attention_heads=2"),
        (["--model.encoding", "sinusoid"], "encoding='sinusoid': known encodings are tape,"),
        (["--model.encoding_options.size", "3"], "encoding_options.size=3"),
        (["--task.max_digits", "0"], "task.max_digits is 0; it must be an integer of at least 1"),
        (["--task.max_digits", "two"], "\"task.max_digits\": Expected a <class 'int'>. Got value: two"),
        (["--task.name", "subtraction"], "task.name is 'subtraction'; it must be one of ['addition', "),
        (["--training.max_steps", "0"], "training.max_steps is 0; it must be at least 1"),
        (["--training.max_stepz", "9"], "training.max_stepz is not an option; the nearest ones are training.max_steps"),
        (["--training.lr_scheduler_type", "cosin"], "training.lr_scheduler_type is 'cosin'; it must be one of"),
        (["--training.optim", "newton"], "training.optim is 'newton'; it must be one of ['adamw_torch',"),
        (["--training.bf16", "maybe"], "\"training.bf16\": Expected a <class 'bool'>. Got value: maybe"),
        (["--resume", "--overwrite"], "resume and overwrite are both set"),
        (["--checkpoint", "x"], "checkpoint is x; it needs --resume"),
        (["--output_dir", "small.yaml"], "output_dir is small.yaml, which is a file"),
    ],
)
def test_bad_flags_are_refused_before_any_work(config, capsys, flags, message):
    assert message in refused(capsys, "train", config, *flags)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [[", "bad.yaml is not YAML"),
        ("model: {hidden_size: 8, hidden_size: 16}", "the key 'hidden_size' stands twice"),
        ("- 1", "bad.yaml does not hold options"),
        ("", "bad.yaml does not hold options"),
        ("modell: {hidden_size: 3}", "modell.hidden_size is not an option; the options are"),
        ("model: {hidden_sizes: 3}", "model.hidden_sizes is not an option; the options are model.hidden_size,"),
        ("model: {hidden_size: wide}", '"model.hidden_size"'),
        ("task: {name: subtraction}", "task.name is 'subtraction'; it must be one of ['addition', "),
        ("model: {}", "training.max_steps is -1; it must be at least 1"),
    ],
)
def test_bad_files_are_refused_before_any_work(config, capsys, text, message):
    Path("bad.yaml").write_text(text)
    assert message in refused(capsys, "train", "bad.yaml")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.yaml"], "missing.yaml is not a file"),
        (["train", "."], "config.yaml is not a file"),
        (["evaluate", "."], ". is not a run folder: it has no config.yaml"),
        (["evaluate"], "arguments are required"),
        (["generate", ".", "1+1="], ". is a folder without a model: it has no config.json"),
        (["report", "nowhere"], "nowhere"),
        (["fly"], "invalid choice: 'fly' (choose from"),
        ([], "command"),
    ],
)
def test_bad_commands_are_refused(config, capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_report_of_a_suite(tmp_path, capsys):
    folder = write_suite(tmp_path / "suite", tasks={"s3": TASKS["s3"]}, seeds=[0, 1])
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:2] == ["Task", "Score"]
    assert "6 of 6 runs have finished" in printed
    assert printed[-1] == str(folder / "site" / "index.html")
    assert (folder / "site" / "s3.html").is_file()
    assert main(["report", str(folder), "--output", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "index.html").is_file()
    assert "the folder of a suite" in refused(capsys, "report", str(folder), str(tmp_path))
    assert "something other than a site" in refused(
        capsys, "report", str(folder), "--output", str(folder / "suite.yaml")
    )


def test_unfinished_run_is_not_evaluated(config, capsys):
    main(["train", config])
    Path("runs/small/training.json").unlink()
    message = refused(capsys, "evaluate", "runs/small")
    assert "has not finished training; go on with `tape train runs/small --resume`" in message


def test_nan_loss_exits_with_1(config, capsys):
    flags = ["--training.learning_rate", "1e30", "--training.max_grad_norm", "0", "--training.max_steps", "9"]
    assert main(["train", config, *flags]) == 1
    assert "loss is nan at step" in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    for arguments, words in (
        (["--help"], ["train", "evaluate", "generate", "report", "info", "import-official"]),
        (["train", "--help"], ["--model.hidden_size", "--task.max_digits", "--training.learning_rate", "--resume"]),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        output = capsys.readouterr().out
        assert all(word in output for word in words)


def test_info(capsys):
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert "torch: " in output
    assert "threads: " in output
    assert ": chosen (" in output


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"model", "task", "training"} == set(yaml.safe_load(path.read_text()))
    # Everything else is accepted: only this last flag is refused.
    message = refused(capsys, "train", str(path), "--training.max_steps", "0")
    assert "training.max_steps is 0" in message


def test_python_and_command_line_agree(config, make_options):
    """The same options give the same run, whichever way they come in."""
    main(["train", config])
    options = load_options(Path("runs/small"))
    run = train(make_options("other").__class__("other", options.model, "addition", options.task, {
        "max_steps": 4, "per_device_train_batch_size": 8, "save_strategy": "no", "seed": 1, "disable_tqdm": True,
    }))  # fmt: skip
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (Path("runs/small"), run))
    assert one["loss_curve"] == other["loss_curve"]
    assert one["tokens"] == other["tokens"]
