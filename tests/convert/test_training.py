"""Training converted models with the tools of transformers and accelerate."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from tests.convert.pretrained import small_model, small_tape_model, tokens, trained
from transformers import Trainer, TrainingArguments

import tape_pe


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def only_position_weights(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".tape." in name)
    return model


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=3,
        disable_tqdm=True,
        **options,
    )


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_trainer_with_and_without_checkpointing_trains_the_same(tmp_path):
    histories = []
    for options in ({}, {"activation_checkpointing": True}, {"activation_checkpointing": True, "use_reentrant": True}):
        reentrant = options.pop("use_reentrant", False)
        if options:
            options["activation_checkpointing_kwargs"] = {"use_reentrant": reentrant}
        model = only_position_weights(tape_pe.convert(small_model("llama")))
        if reentrant:
            model.enable_input_require_grads()
        histories.append(losses(Trainer(model, arguments(tmp_path, **options), train_dataset=Rows(tokens(16, 12)))))
    assert len(histories[0]) == 4
    for history in histories[1:]:
        assert history == pytest.approx(histories[0], rel=1e-5)


def test_only_what_is_not_frozen_moves(tmp_path):
    model = only_position_weights(tape_pe.convert(small_model("llama")))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses(Trainer(model, arguments(tmp_path), train_dataset=Rows(tokens(16, 12))))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".tape." in name}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_autocast_changes_gradients_by_rounding_only(kind, attention):
    found = []
    for enabled in (False, True):
        model = small_tape_model(kind, attention=attention).train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(tokens(2, 20), labels=tokens(2, 20)).loss
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for name, p in model.named_parameters() if ".tape." in name]))
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()


@torch.no_grad()
def test_offloaded_layers(tmp_path):
    model, ids = small_tape_model("llama"), tokens(2, 12)
    expected = model(ids).logits
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    options = {"main_device": "cpu", "force_hooks": True}
    base = dispatch_model(small_model("llama"), device_map, offload_dir=str(tmp_path / "base"), **options)
    converted_after = trained(tape_pe.convert(base))
    torch.testing.assert_close(converted_after(ids).logits, expected)
    converted_before = dispatch_model(model, device_map, offload_dir=str(tmp_path / "converted"), **options)
    torch.testing.assert_close(converted_before(ids).logits, expected)
    text = converted_before.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(text, small_tape_model("llama").generate(ids, max_new_tokens=5, do_sample=False))


SCRIPT = """
    import json, sys
    from transformers import Trainer
    from tests.convert.test_training import Rows, arguments, losses, only_position_weights
    from tests.convert.pretrained import small_model, tokens
    import tape_pe

    model = only_position_weights(tape_pe.convert(small_model("llama")))
    options = arguments(sys.argv[1], use_cpu=True, ddp_find_unused_parameters=False, dataloader_drop_last=True)
    options.per_device_train_batch_size = 4 // options.world_size
    trainer = Trainer(model, options, train_dataset=Rows(tokens(32, 12)))
    history = losses(trainer)
    if trainer.is_world_process_zero():
        json.dump([options.world_size, history], open(sys.argv[2], "w"))
    trainer.accelerator.end_training()  # a process group that is left to the interpreter's end can abort there
"""


@pytest.mark.slow
def test_two_processes_train_as_one_and_no_parameter_is_unused(tmp_path):
    import json

    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    histories = []
    for processes in (1, 2):
        # `accelerate launch --cpu --num_processes 2` starts one process, unless there is mpirun.
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        launch += [str(script), str(tmp_path / "out"), str(tmp_path / f"{processes}.json")]
        result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr[-3000:]
        world_size, history = json.loads((tmp_path / f"{processes}.json").read_text())
        assert world_size == processes
        histories.append(history)
    assert len(histories[0]) == 4
    assert histories[1] == pytest.approx(histories[0], abs=1e-4)
