"""Adapters that tests damage, and models that have to stay as they are."""

from __future__ import annotations

import hashlib
import json

import torch
from safetensors.torch import load_file, save_file
from tests.convert.pretrained import tokens

from tape_pe.convert.adapter import CONFIG_FILE, WEIGHTS_FILE


@torch.no_grad()
def logits(model):
    """Of fixed tokens."""
    return model(tokens(2, 12)).logits


def snapshot(model):
    """All that a failed load has to leave as it was."""
    values = {name: (id(p), p.detach().clone(), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    return type(model), type(model.config), model.config.to_dict(), model.model.rotary_emb, values, logits(model)


def assert_unchanged(model, before):
    """The model is what it was when `snapshot` was taken."""
    after = snapshot(model)
    assert after[:4] == before[:4]
    assert after[4].keys() == before[4].keys()
    for name, (identity, value, *rest) in before[4].items():
        assert after[4][name][0] == identity
        assert torch.equal(after[4][name][1], value)
        assert list(after[4][name][2:]) == rest
    assert torch.equal(after[5], before[5])


def change_weights(folder, change):
    """Edits the weights of an adapter and makes its hash fit again."""
    path = folder / WEIGHTS_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    seal(folder)


def change_config(folder, change):
    """Edits the JSON file of an adapter."""
    path = folder / CONFIG_FILE
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def seal(folder):
    """Makes the hash of an adapter fit its weights, whatever they are."""
    digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    change_config(folder, lambda values: values.update(sha256=digest))
