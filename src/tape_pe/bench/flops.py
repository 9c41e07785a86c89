"""Floating-point operations, counted as `torch.utils.flop_counter` does: two for each multiplication and addition of a
matrix product, attention in full even where it is causal, and nothing else.

Nothing is computed: models are built and run on fake tensors, so that a large one costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, baddbmm_flop, register_flop_formula

from tape_pe.bench.options import Shape
from tape_pe.bench.variants import forced_backend
from tape_pe.models import TapeLMForCausalLM

Size = Sequence[int]


def _attention(query: Size, key: Size, value: Size, state: Size | None, *_: Any, **__: Any) -> int:
    """Scores, then averages of values and states."""
    batch, heads, queries, channels = query
    return 2 * batch * heads * queries * key[2] * (channels + value[3] + (state[3] if state else 0))


def _attention_backward(query: Size, key: Size, value: Size, state: Size | None, with_state_grad: bool) -> int:
    """The scores again; gradients of weights and values, of states if they need any, of queries and of keys."""
    batch, heads, queries, channels = query
    averages = 2 * value[3] + ((1 + with_state_grad) * state[3] if state else 0)
    return 2 * batch * heads * queries * key[2] * (3 * channels + averages)


def _blockwise_backward(*arguments: Any, **_: Any) -> int:
    query, key, value, state = arguments[2:6]
    return _attention_backward(query, key, value, state, with_state_grad=arguments[-2])


def _triton_backward(*arguments: Any, **_: Any) -> int:
    query, key, value, state = arguments[2:6]
    return _attention_backward(query, key, value, state, with_state_grad=arguments[-1])


FORMULAS: dict[str, Callable[..., int]] = {
    "blockwise_attention": _attention,
    "blockwise_attention_backward": _blockwise_backward,
    "triton_attention": _attention,
    "triton_attention_backward": _triton_backward,
}
"""Formulas of this library's own operators, by name; without one, an operator counts nothing."""

for _name, _formula in FORMULAS.items():
    register_flop_formula(getattr(torch.ops.tape_pe, _name))(_formula)

# torch counts these, but not where they write in place.
register_flop_formula(torch.ops.aten.addmm_, get_raw=True)(addmm_flop)
register_flop_formula(torch.ops.aten.baddbmm_, get_raw=True)(baddbmm_flop)


class Count(NamedTuple):
    """What a decoder costs.

    Attributes:
        forward: floating-point operations of a forward pass.
        both: those of a forward and a backward pass.
        parameters: number of parameters.
    """

    forward: int
    both: int
    parameters: int


def count_flops(function: Callable[[], Any]) -> int:
    """Floating-point operations of a call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@cache
def count(shape: Shape, encoding: str) -> Count:
    """Operations and parameters of a decoder.

    They are those of any backend, but counted on one of this library's: torch has no formula for its own on CPUs.
    """
    with forced_backend("blockwise"):
        try:
            with FakeTensorMode():
                return _count(shape, encoding)
        except DataDependentOutputException:  # an encoding that looks at its tokens has to be run
            return _count(shape, encoding)


def _count(shape: Shape, encoding: str) -> Count:
    with torch.random.fork_rng(devices=[]):
        model = TapeLMForCausalLM(shape.config(encoding))
    tokens = torch.zeros(shape.batch_size, shape.length, dtype=torch.long)
    # With gradients on, attention is one operator with a formula; without, products of its causal blocks.
    forward = count_flops(lambda: model(tokens, use_cache=False))
    both = count_flops(lambda: model(tokens, use_cache=False).logits.sum().backward())
    return Count(forward, both, sum(parameter.numel() for parameter in model.parameters()))
