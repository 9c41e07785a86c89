"""What a decoder layer of transformers becomes: a subclass of its own class that carries two streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tape_pe.convert.attention import IMPLEMENTATION, LayerStates
from tape_pe.convert.form import RotaryForm
from tape_pe.encodings.tape import TapeLayer
from tape_pe.ops import contextualize


class PositionUpdate(TapeLayer):
    """The weights of one layer, and the update of its states in fp32 whatever the model's dtype."""

    def forward(
        self, state: Tensor | None, averaged_state: Tensor | None, mlp_input: Tensor, mlp_output: Tensor
    ) -> Tensor:
        """The new state `[B, Hkv, N, Dr]` in the dtype of `state`; arguments as in `tape_pe.encodings.tape`."""
        assert state is not None
        gate = None
        if self.up is not None:
            content = mlp_output if self.gate_input == "mlp_output" else mlp_input
            gate = F.silu(self.gate_proj(content.to(self.gate_proj.weight.dtype))).to(state.dtype)
        mix, up, down = (None if w is None else w.to(state.dtype) for w in (self.mix, self.up, self.down))
        averaged_state = None if averaged_state is None else averaged_state.to(state.dtype)
        return contextualize(state, averaged_state, gate, mix=mix, up=up, down=down, norm=self.state_norm)


class TapeMixin(nn.Module):
    """What the mixins share: pickling, by the two classes that a class of `tape_class` is made from."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_instance, type(self).__bases__, *reduced[2:]


class TapeMLP(TapeMixin):
    """Mixin of an MLP that keeps what it read and wrote until its layer takes it."""

    seen: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(hidden_states, *args, **kwargs)
        self.seen = (hidden_states, output)
        return output

    def take(self) -> tuple[Tensor, Tensor]:
        """Input and output of the last call, `[B, N, hidden_size]`."""
        assert self.seen is not None
        seen, self.seen = self.seen, None
        return seen


class TapeRotaryEmbedding(TapeMixin):
    """Mixin of a model's table of cosines and sines: always computed in fp32, from fp32 frequencies."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return super().forward(x.new_empty(0, dtype=wide), *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TapeRotaryEmbedding:
        """Moves, but never rounds: `.half()` would leave frequencies wrong for all but the first positions."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != before[name].dtype and not before[name].is_meta:
                setattr(self, name, nn.Buffer(before[name].to(buffer.device), persistent=False))
        return self


class TapeDecoderLayer(TapeMixin):
    """Mixin of a decoder layer that reads and updates a position state next to its tokens.

    Between layers travels one flat tuple `(hidden_states, *deltas)`, one delta `[B, Hkv, N, Dr]` per rotary table of
    the model (Gemma 3 has two), each the *difference* of the states from their start in the model's dtype, so that the
    start stays exact in fp32. Flat, because checkpointing, offloading and hooks look for tensors at the top level.

    Attributes:
        tape: the layer's weights; `None` where no later layer reads the new state.
        tape_form: how the layer rotates; `None` for a layer without rotary positions, which hands states on.
        tape_slot: which of the deltas is this layer's.
        tape_keeps: for each delta, whether a later layer reads it.
    """

    mlp: TapeMLP
    tape: PositionUpdate | None
    tape_form: RotaryForm | None
    tape_slot: int
    tape_keeps: tuple[bool, ...]

    def __call__(self, hidden_states: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        streams = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*streams, *args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        *deltas: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor | None, ...]:
        slots = list(deltas) if deltas else [None] * len(self.tape_keeps)
        if self.tape_form is None:
            output = super().forward(hidden_states, position_embeddings=position_embeddings, cache=cache, **kwargs)
        else:
            start = self.tape_form.start(*position_embeddings)
            delta = slots[self.tape_slot]
            state = start if delta is None else start + delta
            averages = self.tape is not None and self.tape.averages_state
            states = LayerStates(state, self.tape_form, averages, cache)
            width = position_embeddings[0].shape[-1]
            unrotated = hidden_states.new_ones(1, 1, width), hidden_states.new_zeros(1, 1, width)
            output = super().forward(
                hidden_states,
                position_embeddings=unrotated,
                cache=states,
                tape=states,
                **kwargs,
            )
            if self.tape is not None:
                new = self.tape(state, states.averaged, *self.mlp.take())
                slots[self.tape_slot] = (new - start).to(hidden_states.dtype)
        if self._is_last():
            return output
        return output, *(slot if keep else None for slot, keep in zip(slots, self.tape_keeps, strict=True))

    def _is_last(self) -> bool:
        """Whether nobody reads the states behind this layer, or the decoder stops here (an early exit)."""
        attention: Any = self.self_attn
        config = getattr(attention.config, "base", attention.config)
        return not any(self.tape_keeps) or attention.layer_idx + 1 >= config.num_hidden_layers


@cache
def tape_class(mixin: Any, base: Any) -> Any:
    """The subclass of `base` with `mixin` in front, one for each pair."""
    # The name stays: `device_map` and FSDP find the layers that belong together by it.
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "tape_base": base})


def _new_instance(mixin: Any, base: Any) -> Any:
    cls = tape_class(mixin, base)
    return cls.__new__(cls)


def add_mixin(module: nn.Module, mixin: type) -> None:
    """Makes a module an instance of its class with `mixin` in front."""
    base: Any = type(module)
    set_class(module, tape_class(mixin, base))


def set_class(module: nn.Module, cls: Any) -> None:
    """Changes the class of a module; hooks of accelerate that hold the old class's `forward` get the new one's."""
    module.__class__ = cls
    if "_old_forward" in module.__dict__:
        module._old_forward = cls.forward.__get__(module)


def set_config(model: nn.Module, config: Any) -> None:
    """Gives a model another config object, in all of its modules that have the present one."""
    present = model.config
    for module in model.modules():
        found: Any = module.__dict__.get("config")
        if found is present:
            module.config = config
        elif getattr(found, "base", None) is present:  # a `private_config`
            found.base = config


def private_config(config: Any) -> Any:
    """A view of a model's config for one attention layer, which sends it to this package's attention function.

    The model's config stays as it is, so that masks and `set_attn_implementation` work; `base` leads back to it.
    """
    view = copy.copy(config)
    view.__dict__["_attn_implementation_internal"] = IMPLEMENTATION
    view.__dict__["base"] = config
    return view
