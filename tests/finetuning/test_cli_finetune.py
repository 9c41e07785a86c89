"""`tape finetune`: its options, its output and what it refuses."""

import json

import pytest

from tape_pe.cli import main
from tape_pe.results import read_results

SHORT = [
    *("--max_steps", "2", "--batch_size", "2", "--accumulation", "1", "--warmup_steps", "1"),
    *("--eval_blocks", "2", "--progress", "false"),
]


@pytest.mark.parametrize("method", ["tape", "longlora"])
def test_one_pass(base_folder, text_file, tmp_path, monkeypatch, capsys, method):
    monkeypatch.chdir(tmp_path)
    command = ["finetune", str(base_folder), "--method", method, "--length", "64", "--data", str(text_file), *SHORT]
    own = ["--tape.position_size", "3"] if method == "tape" else ["--lora_rank", "3", "--also_train", ""]
    assert main([*command, *own]) == 0
    output = capsys.readouterr().out
    assert "whole model" in output
    assert "held-out loss: " in output
    (folder,) = (tmp_path / "runs" / "finetune").iterdir()
    assert folder.name == f"{base_folder.name}-{method}-64"
    options = read_results(folder)[0].config["finetune"]
    if method == "tape":
        assert options["tape"] == {"position_size": 3}
    else:
        assert (options["lora_rank"], options["also_train"]) == (3, [])
        assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] is None
    assert main([*command, *own]) == 2
    assert "holds a run already; use --resume" in capsys.readouterr().err
    assert main([*command, *own, "--resume"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length", "1"], "length=1: it must be an integer of at least 2"),
        (["--length", "64", "--method", "magic"], "method='magic': it must be one of tape, lora"),
        (["--length", "64", "--data", "./none"], "data='./none': does not exist"),
        (
            ["--length", "64", "--tape.position_sizes", "3"],
            "tape.position_sizes is not an option; the options are",
        ),
        (["--length", "long"], '"length": Expected a'),
        ([], "length"),
    ],
)
def test_refusals(base_folder, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", str(base_folder), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
