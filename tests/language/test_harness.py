"""lm-evaluation-harness runs our models: from Python and from its own command line, on a local task."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tape_pe.cli import main
from tape_pe.language.pretrained import load_causal_lm

TASKS = Path(__file__).parents[1] / "data" / "lm_eval"
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'tape-pe[eval]'"
)


@pytest.fixture
def at_tasks(monkeypatch, tmp_path):
    """The folder of the tasks' data is the working folder; caches go elsewhere, and nothing is looked up."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@needs_lm_eval
def test_python(llama_folder, at_tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import tape_pe.language.harness  # noqa: F401  (registers the model)

    output = lm_eval.simple_evaluate(
        model="tape",
        model_args={"pretrained": str(llama_folder)},
        device="cpu",
        tasks=["capitals", "capitals_written"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    model, tokenizer = load_causal_lm(str(llama_folder))
    right = 0
    for sample in output["samples"]["capitals"]:
        prompt = tokenizer(f"The capital of {sample['doc']['country']} is").input_ids
        scores = []
        for choice in sample["doc"]["choices"]:
            ids = torch.tensor([prompt + tokenizer(f" {choice}", add_special_tokens=False).input_ids])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum().item())
        found = [pair[0][0] for pair in sample["resps"]]
        assert found == pytest.approx(scores, abs=1e-4)
        right += scores[0] > scores[1]
    assert output["results"]["capitals"]["acc,none"] == right / 4
    assert output["results"]["capitals_written"]["exact_match,none"] == 0


@needs_lm_eval
def test_command_line(llama_folder, at_tasks, capsys):
    arguments = ["--model_args", f"pretrained={llama_folder},dtype=float32", "--device", "cpu"]
    arguments += ["--include_path", str(TASKS), "--tasks", "capitals"]
    assert main(["lm-eval", *arguments]) == 0
    output = capsys.readouterr().out
    assert "tape (" in output
    assert "|capitals|" in output


@needs_lm_eval
def test_a_model_that_is_loaded_already(make_model, passkey_tokenizer):
    from tape_pe.language.harness import TapeHarnessModel

    model = make_model("tape", vocab_size=len(passkey_tokenizer))
    harness = TapeHarnessModel(model, tokenizer=passkey_tokenizer)
    assert harness.model is model
    assert harness.max_length == 512


@needs_lm_eval
@pytest.mark.parametrize("dtype", ["int8", "float31", "nn"])
def test_refuses_what_is_no_precision(llama_folder, dtype):
    from tape_pe.language.harness import TapeHarnessModel

    with pytest.raises(ValueError, match=f"dtype='{dtype}': it must be a floating-point type"):
        TapeHarnessModel(str(llama_folder), dtype=dtype)


def test_says_how_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tape_pe.language.harness", None)
    assert main(["lm-eval", "--tasks", "capitals"]) == 2
    assert "pip install 'tape-pe[eval]'" in capsys.readouterr().err
