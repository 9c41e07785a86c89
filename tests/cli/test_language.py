"""The commands for language models, on a tiny pretrained model, and what they refuse before any work."""

from pathlib import Path

import pytest
from tests.cli.refusals import refused

from tape_pe.cli import main
from tape_pe.results import read_measurements
from tape_pe.train import train


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The grass is green. The sky is blue. " * 20)


def test_generate(llama_folder, capsys):
    assert main(["generate", str(llama_folder), "The grass", "--max_new_tokens", "4"]) == 0
    greedy = capsys.readouterr().out
    assert greedy.strip()
    drawn = ["--max_new_tokens", "4", "--temperature", "0.9", "--top_p", "0.8", "--seed", "3"]
    assert main(["generate", str(llama_folder), "The grass", *drawn]) == 0
    assert main(["generate", str(llama_folder), "The grass", "--num_beams", "2", "--dtype", "bfloat16"]) == 0


def test_generate_serves_runs_too(make_options, capsys):
    run = str(train(make_options(max_steps=2, save_strategy="no")))
    capsys.readouterr()
    assert main(["generate", run, "1+2="]) == 0
    assert capsys.readouterr().out.endswith("\n")
    message = refused(capsys, "generate", run, "1+2=", "--temperature", "0.5")
    assert "temperature=0.5: " in message
    assert "is a run, whose task decodes" in message


def test_perplexity_is_resumed(llama_folder, capsys):
    command = ["perplexity", str(llama_folder), "--data", "text.txt", "--stride", "8", "--max_tokens", "100"]
    assert main([*command, "--lengths", "16,32"]) == 0
    assert main([*command, "--lengths", "16,32,64", "--batch_size", "2"]) == 0
    lines = read_measurements(Path("runs/perplexity/tiny-llama.jsonl"))
    assert [line.settings["length"] for line in lines] == [16, 32, 64]
    assert {line.metrics["tokens"] for line in lines} == {99}
    assert capsys.readouterr().out.splitlines()[-1] == "runs/perplexity/tiny-llama.jsonl"


def test_passkey_writes_lines_and_a_page(llama_folder, passkey_tokenizer, capsys):
    command = ["passkey", str(llama_folder), "--lengths", "150,300", "--depths", "0,1", "--seeds", "2"]
    assert main([*command, "--batch_size", "2", "--output", "out/keys.jsonl"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-2:] == ["out/keys.jsonl", "out/keys.html"]
    assert "tape: warning: 310 tokens are more than max_position_embeddings=256 of the model" in output.err
    assert len(read_measurements(Path("out/keys.jsonl"))) == 4
    assert "<!doctype html>" in Path("out/keys.html").read_text().lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "MODEL", "x", "--top_p", "0.5"], "top_p=0.5: it needs a temperature above 0"),
        (["generate", "MODEL", "x", "--dtype", "int8"], "dtype='int8': it must be one of float32,"),
        (["generate", "MODEL", "x", "--device", "abacus"], "device is 'abacus'"),
        (["generate", "MODEL", "x", "--chat"], "chat=True: the tokenizer has no chat template"),
        (["generate", "MODEL", "x", "--top_q", "0.5"], "top_q is not an option"),
        (["perplexity", "MODEL", "--data", "text.txt", "--lengths", "16,x"], "'16,x'"),
        (["perplexity", "MODEL", "--data", "text.txt", "--lengths", "16"], "stride=256: it must be 1 to 15"),
        (["perplexity", "MODEL", "--data", "text.txt", "--lengths", "0"], "lengths=[0]: it must hold positive"),
        (["perplexity", "MODEL", "--data", "text.txt", "--lengths", "9999"], "length=9999: the text has only"),
        (["perplexity", "MODEL", "--lengths", "16"], "data"),
        (["passkey", "MODEL", "--lengths", "20"], "length=20: a prompt with key"),
        (
            ["passkey", "MODEL", "--lengths", "500", "--depths", "2"],
            "depths=[2.0]: it must hold numbers from 0 to 1",
        ),
        (["passkey", "MODEL", "--lengths", "500", "--seeds", "0"], "seeds=0"),
        (["passkey", "MODEL", "--lengths", "500", "--texts.answer", "x"], "texts.answer='x': it must hold {key}"),
    ],
)
def test_refused_before_any_work(llama_folder, capsys, arguments, message):
    words = [str(llama_folder) if argument == "MODEL" else argument for argument in arguments]
    assert message in refused(capsys, *words)
    assert not Path("runs").exists()
