"""Puts TAPE into the layers of a decoder, and takes it out."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tape_pe.convert.config import TapeConfig, layer_sizes
from tape_pe.convert.layers import (
    PositionUpdate,
    TapeDecoderLayer,
    TapeMLP,
    TapeRotaryEmbedding,
    add_mixin,
    private_config,
    set_class,
)
from tape_pe.convert.structure import LayerPlan, Structure


def install_layers(structure: Structure, config: TapeConfig) -> None:
    """Changes the classes of layers, MLPs and rotary table, and adds the weights at their start values."""
    decoder: Any = structure.decoder
    for index, plan in enumerate(structure.layers):
        layer: Any = plan.layer
        layer.tape = _position_update(plan, config, decoder.config)
        layer.tape_form = plan.form
        layer.tape_slot = structure.tables.index(plan.table) if plan.form is not None else 0
        layer.tape_keeps = structure.read_after(index)
        add_mixin(layer, TapeDecoderLayer)
        if plan.form is not None:
            layer.self_attn.config = private_config(decoder.config)
        if layer.tape is not None:
            add_mixin(layer.mlp, TapeMLP)
    add_mixin(decoder.rotary_emb, TapeRotaryEmbedding)


def uninstall_layers(decoder: PreTrainedModel) -> None:
    """Undoes `install_layers`; the weights are lost."""
    for module in decoder.modules():
        if isinstance(module, TapeDecoderLayer):
            attention: Any = module.self_attn
            attention.config = decoder.config
            del module.tape, module.tape_form, module.tape_slot, module.tape_keeps
        if isinstance(module, (TapeDecoderLayer, TapeMLP, TapeRotaryEmbedding)):
            cls: Any = type(module)
            set_class(module, cls.tape_base)


def _position_update(plan: LayerPlan, config: TapeConfig, model_config: Any) -> PositionUpdate | None:
    if plan.form is None or not plan.updates or not (config.update_attention or config.update_mlp):
        return None
    sizes = layer_sizes(model_config, plan.form.heads, plan.form.kv_heads, plan.form.rotary_dim)
    tape = PositionUpdate(sizes, config)
    like = next(p for p in plan.layer.parameters() if p.is_floating_point())
    device = getattr(getattr(plan.layer, "_hf_hook", None), "execution_device", None)
    # Weights of half precision would round small steps away, so these are fp32, as adapters are in PEFT.
    dtype = torch.promote_types(like.dtype, torch.float32)
    return tape.to(like.device if device is None else device, dtype).train(plan.layer.training)
