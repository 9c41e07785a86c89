"""`tape inspect` and `tape stability` on runs, own and pretrained models, and what they refuse before any work."""

from pathlib import Path

import pytest
import torch
from tests.cli.refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

import tape_pe
from tape_pe.cli import main
from tape_pe.convert.layers import PositionUpdate
from tape_pe.train import train


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(make_options) -> str:
    """The folder of a short run of the addition task."""
    return str(train(make_options(max_steps=2, save_strategy="no")))


@pytest.fixture
def adapter(llama_folder, tmp_path) -> Path:
    """The folder of an adapter with TAPE weights that are not zero."""
    model = tape_pe.convert(AutoModelForCausalLM.from_pretrained(llama_folder))
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionUpdate):
                for parameter in module.parameters():
                    parameter.copy_(0.3 * torch.randn_like(parameter))
    tape_pe.freeze_base(model)
    return tape_pe.save_adapter(model, tmp_path / "adapter")


def test_inspect_a_run(run, capsys):
    assert main(["inspect", run, "--text", "12+34="]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "inspect.html"
    header = next(line for line in lines if line.startswith("Layer"))
    assert header.split("  ")[0] == "Layer"
    assert "States to RoPE" in header
    page = Path("inspect.html").read_text(encoding="utf-8")
    assert "reading 6 tokens: &#39;12+34=&#39;" in page
    assert "encoding tape, 2 layers, 2 heads" in page


def test_inspect_an_adapter(adapter, capsys):
    command = ["inspect", str(adapter), "--text", "The grass is green.", "--output", "out/page.html"]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out/page.html"
    page = Path("out/page.html").read_text(encoding="utf-8")
    assert "llama with TAPE, 2 layers, 4 heads" in page
    assert "Where tokens moved" in page


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("nope", "There are no states to show: the encoding nope gives a token no state"),
        ("rope", "States of the encoding rope never change"),
        ("tape", "the weights of TAPE are still where they started, or off"),
    ],
)
def test_models_without_moved_states_say_why(encoding, reason, make_config, llama_folder, capsys):
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    tape_pe.TapeLMForCausalLM(make_config(encoding, vocab_size=len(tokenizer))).save_pretrained("model")
    tokenizer.save_pretrained("model")
    assert main(["inspect", "model", "--text", "The grass is green."]) == 0
    assert reason in capsys.readouterr().out
    assert reason in Path("inspect.html").read_text(encoding="utf-8")


def test_a_model_without_tape_shows_its_attention(llama_folder, capsys):
    assert main(["inspect", str(llama_folder), "--text", "The grass is green."]) == 0
    output = capsys.readouterr().out
    assert "this llama is not converted" in output
    assert "Attention distance" in output
    assert "Phase moved" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--text", ""], "text='': some text is needed"),
        (["RUN", "--text", "  "], "text='  ': some text is needed"),
        (["RUN", "--text", "12+x="], "text='12+x=': the tokenizer does not know 'x'"),
        (["RUN", "--text", "1"], "text='1': has 1 tokens; 2 to max_tokens=256 are needed"),
        (["RUN", "--text", "12+34=", "--max_tokens", "5"], "has 6 tokens; 2 to max_tokens=5 are needed"),
        (["RUN", "--text", "1+2=", "--max_tokens", "1"], "max_tokens=1: it must be 2 to 1024"),
        (["RUN", "--text", "1+2=", "--output", "."], "output is a folder: .; name the HTML file to write"),
        (["RUN", "--text", "1+2=", "--dtype", "int8"], "dtype='int8': it must be one of float32,"),
        (["RUN", "--text", "1+2=", "--device", "abacus"], "device is 'abacus'"),
        (["RUN", "--text", "1+2=", "--texts", "3"], "texts is not an option"),
        (["RUN"], "text"),
        (["./nowhere", "--text", "1+2="], "model='./nowhere' is not a model folder"),
    ],
)
def test_inspect_refuses(run, capsys, arguments, message):
    words = [run if argument == "RUN" else argument for argument in arguments]
    assert message in refused(capsys, "inspect", *words)
    assert not Path("inspect.html").exists()


def test_stability(llama_folder, adapter, capsys):
    for index in range(3):
        Path(f"text{index}.txt").write_text(f"The grass is green {index} times. " * 4)
    command = ["stability", str(llama_folder), str(adapter), "--data", ".", "--texts", "2", "--length", "12"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 texts of 12 tokens, float32; in front: 3 BOS; layers from 1"
    rows = [line.split() for line in lines if line.startswith(("tiny-llama", "adapter"))]
    assert len(rows) == 8  # two measures, two ways, two models
    assert [row[-2:] for row in rows if row[0] == "tiny-llama"][2:] == [["\u2013", "\u2013"]] * 2
    shifted = [float(row[-1]) for row in rows if "ids" in row and row[0] == "adapter"]
    assert max(shifted) < 1e-2
    assert min(float(row[-1]) for row in rows if "front" in row and row[0] == "adapter") > 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL", "--texts", "0"], "texts=0: it must be 1 to 4096"),
        (["MODEL", "--length", "1"], "length=1: it must be 2 to 1024"),
        (["MODEL", "--data", "./nowhere"], "data='./nowhere': does not exist"),
        (["MODEL", "--data", "short.txt"], "texts=16: only 0 texts have 128 tokens"),
        (["./nowhere", "--data", "short.txt"], "model='./nowhere' is not a model folder"),
        (["MODEL", "--seeds", "1"], "seeds is not an option"),
    ],
)
def test_stability_refuses(llama_folder, capsys, arguments, message):
    Path("short.txt").write_text("Short.")
    words = [str(llama_folder) if argument == "MODEL" else argument for argument in arguments]
    assert message in refused(capsys, "stability", *words)
