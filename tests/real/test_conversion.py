"""TAPE in a real pretrained model: exact at the start, trained on a little text, saved, loaded, generating."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

import tape_pe
from tape_pe.convert.layers import PositionUpdate
from tape_pe.language.pretrained import load_causal_lm
from tape_pe.language.text import read_texts, token_blocks

pytestmark = pytest.mark.real


class Blocks(torch.utils.data.Dataset):
    def __init__(self, tokenizer, count, length):
        blocks = token_blocks(read_texts("python-stdlib"), tokenizer, length)
        self.rows = [torch.tensor(next(blocks)) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@pytest.fixture(scope="module")
def before(smollm2):
    """Logits of the model on a text, in eager attention, before anything is done to it."""
    model, tokenizer = smollm2
    model.set_attn_implementation("eager")
    ids = tokenizer("A rotary encoding turns queries and keys by an angle that", return_tensors="pt").input_ids
    with torch.inference_mode():
        return ids, model(ids).logits


@pytest.fixture(scope="module")
def adapted(smollm2, before, tmp_path_factory):
    """The model after conversion, a check that nothing moved, and 20 steps of training."""
    model, tokenizer = smollm2
    ids, logits = before
    tape_pe.convert(model)
    with torch.inference_mode():
        assert (model(ids).logits - logits).abs().max().item() == 0.0
    tape_pe.freeze_base(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained <= 250_000
    data = Blocks(tokenizer, 20, 128)
    arguments = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("trainer")),
        max_steps=20,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        warmup_steps=4,
        report_to="none",
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        seed=0,
    )
    losses = []
    model.eval()
    for step in range(2):
        with torch.inference_mode():
            losses.append(torch.stack([model(row[None], labels=row[None]).loss for row in data.rows]).mean().item())
        if step == 0:
            Trainer(model, arguments, train_dataset=data).train()
            model.eval()
    assert losses[1] < losses[0]
    moved = [m for m in model.modules() if isinstance(m, PositionUpdate)]
    assert len(moved) == 29
    assert all(m.mix.abs().max() > 0 and m.up.abs().max() > 0 for m in moved)
    return model


def test_cached_generation_is_the_full_forward(adapted, before):
    ids = before[0]
    with torch.inference_mode():
        full = adapted(ids).logits
        first = adapted(ids[:, :5], use_cache=True)
        rest = [first.logits]
        cache = first.cache
        for token in ids[:, 5:].split(1, dim=1):
            outputs = adapted(token, cache=cache)
            cache = outputs.cache
            rest.append(outputs.logits)
    assert (torch.cat(rest, dim=1) - full).abs().max().item() <= 1e-4
    assert (full - before[1]).abs().max().item() > 1e-3


def test_rows_padded_on_the_left_write_their_own_text(adapted, smollm2):
    tokenizer = smollm2[1]
    prompts = [
        "The capital of France is",
        "Water boils at a temperature of one hundred degrees, which is",
    ]
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    together = adapted.generate(**batch, **options)[:, batch.input_ids.shape[1] :]
    for row, prompt in zip(together, prompts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert torch.equal(row, adapted.generate(ids, **options)[0, ids.shape[1] :])


def test_the_adapter_is_small_and_gives_the_same_model(adapted, before, smollm2_folder, tmp_path):
    tape_pe.save_adapter(adapted, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size <= 1_000_000
    base, _ = load_causal_lm(str(smollm2_folder), attn_implementation="eager")
    tape_pe.load_adapter(base, tmp_path)
    with torch.inference_mode():
        assert torch.equal(base(before[0]).logits, adapted(before[0]).logits)
