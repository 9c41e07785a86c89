"""The checks that every encoding must pass, for the library's own and for those that you register.

    import pytest
    from tape_pe.testing import ENCODING_CHECKS

    @pytest.mark.parametrize("check", ENCODING_CHECKS.values(), ids=ENCODING_CHECKS.keys())
    def test_my_encoding(check):
        check("my_encoding", {"my_option": 3})

Each check builds small decoders with random weights everywhere (at the zero start of some encodings everything looks
right) and raises an AssertionError that says what differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tape_pe.models import TapeLMConfig, TapeLMForCausalLM

VOCAB_SIZE = 37
EncodingCheck = Callable[[str, Mapping[str, Any] | None], None]
ENCODING_CHECKS: dict[str, EncodingCheck] = {}
"""All checks by name; each is called with an encoding's name and its options."""


def encoding_check(function: EncodingCheck) -> EncodingCheck:
    """Adds a check to `ENCODING_CHECKS`, under its function's name."""
    ENCODING_CHECKS[function.__name__] = function
    return function


def small_decoder(
    encoding: str, options: Mapping[str, Any] | None = None, *, num_key_value_heads: int = 2, seed: int = 0
) -> TapeLMForCausalLM:
    """A decoder of three layers and four heads in evaluation mode, every parameter random and none of them zero."""
    config = TapeLMConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=64,
        pad_token_id=0,
        encoding=encoding,
        encoding_options=dict(options or {}),
    )
    model = TapeLMForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed_tokens" in name else 0.2))
    return model.eval()


def _tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def _assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    error = (actual - expected).abs().max().item()
    allowed = tolerance * max(1.0, expected.abs().max().item())
    assert error <= allowed, f"{what}: differs by {error:.2e}, allowed are {allowed:.2e}"


@encoding_check
def cached_decoding_equals_the_full_forward(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """In chunks of 1, 3 and 7 tokens, for every number of key/value heads."""
    tokens = _tokens(2, 20)
    for kv_heads in (4, 2, 1):
        model = small_decoder(encoding, options, num_key_value_heads=kv_heads)
        with torch.no_grad():
            expected = model(tokens).logits
            for size in (1, 3, 7):
                cache, logits = None, []
                for chunk in tokens.split(size, dim=1):
                    outputs = model(chunk, cache=cache, use_cache=True)
                    cache = outputs.cache
                    logits.append(outputs.logits)
                _assert_close(torch.cat(logits, dim=1), expected, f"chunks of {size}, {kv_heads} key/value heads")


@encoding_check
def beam_search_is_the_same_with_and_without_cache(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Three beams."""
    model, prompt = small_decoder(encoding, options), _tokens(2, 7)
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    cached, plain = (model.generate(prompt, attention_mask=mask, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, plain), f"beams differ: {cached.tolist()} and {plain.tolist()}"


@encoding_check
def padding_changes_nothing(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Left- and right-padded rows equal the row alone."""
    model, tokens, length = small_decoder(encoding, options), _tokens(2, 13), 9
    with torch.no_grad():
        alone = model(tokens[:1, :length]).logits
        for side, columns in (("left", slice(-length, None)), ("right", slice(0, length))):
            padded, mask = tokens.clone(), torch.ones_like(tokens)
            padded[0], mask[0] = 0, 0
            padded[0, columns], mask[0, columns] = tokens[0, :length], 1
            logits = model(padded, attention_mask=mask).logits
            assert torch.isfinite(logits).all(), f"{side} padding: not finite"
            _assert_close(logits[:1, columns], alone, f"{side} padding")


@encoding_check
def packed_documents_are_apart(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Packed documents equal separate ones, and the first has exactly no influence on the second."""
    model, tokens, cut = small_decoder(encoding, options), _tokens(1, 17), 7
    documents = (torch.arange(17) >= cut).long()[None]
    with torch.no_grad():
        packed = model(tokens, document_ids=documents).logits
        separate = torch.cat([model(tokens[:, :cut]).logits, model(tokens[:, cut:]).logits], dim=1)
        _assert_close(packed, separate, "packed documents")
        changed = tokens.clone()
        changed[:, :cut] = changed[:, :cut] % (VOCAB_SIZE - 1) + 1
        leaked = (model(changed, document_ids=documents).logits - packed)[:, cut:].abs().max().item()
    assert leaked == 0.0, f"document 1 changes document 2 by {leaked:.2e}"


@encoding_check
def later_tokens_change_nothing(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Causality, and independence of batch rows."""
    model, tokens = small_decoder(encoding, options), _tokens(2, 12)
    changed = tokens.clone()
    changed[0, 8:] = changed[0, 8:] % (VOCAB_SIZE - 1) + 1
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    _assert_close(after[0, :8], before[0, :8], "a later token", 1e-6)
    _assert_close(after[1], before[1], "another row", 1e-6)
    assert (after[0, 8:] - before[0, 8:]).abs().max() > 1e-3, "the changed tokens change nothing at all"


@encoding_check
def checkpointing_keeps_gradients(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Activation checkpointing in both modes; every parameter has a gradient."""
    tokens, expected = _tokens(2, 11), {}
    for use_reentrant in (None, True, False):
        model = small_decoder(encoding, options).train()
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(0)  # encodings may draw positions in training
        model(tokens, labels=tokens).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient with use_reentrant={use_reentrant}"
            if use_reentrant is None:
                expected[name] = parameter.grad
            else:
                _assert_close(parameter.grad, expected[name], f"gradient of {name}, use_reentrant={use_reentrant}")


@encoding_check
def compiles_without_graph_breaks(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """`torch.compile(fullgraph=True)` traces one graph and computes the same, at two lengths."""
    model = small_decoder(encoding, options)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for length in (9, 14):
            tokens = _tokens(2, length)
            _assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits, f"compiled, length {length}")


@encoding_check
def saving_and_loading_is_exact(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """Through `AutoModelForCausalLM`, to the last bit."""
    model, tokens = small_decoder(encoding, options), _tokens(1, 10)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert loaded.config.encoding_options == model.config.encoding_options
        assert torch.equal(loaded(tokens).logits, model(tokens).logits), "the loaded model computes something else"


@encoding_check
def half_precision_tells_positions_apart(encoding: str, options: Mapping[str, Any] | None = None) -> None:
    """In bfloat16, outputs stay near those of fp32, also where positions start late."""
    model, tokens = small_decoder(encoding, options), _tokens(1, 24)
    with torch.no_grad():
        expected = model(tokens).logits
        logits = model.to(torch.bfloat16)(tokens).logits.float()
    error = ((logits - expected).norm() / expected.norm()).item()
    assert error < 0.1, f"bfloat16: relative error {error:.2e}"
