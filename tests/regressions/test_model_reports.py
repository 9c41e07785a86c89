"""Faults that users reported elsewhere, as tests of the decoder. Each is named after its report."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tape_pe.models import TapeCache, TapeLMConfig, TapeLMForCausalLM


@pytest.fixture
def model(make_model, encoding, kv_heads):
    """A decoder of every encoding, with as many and with fewer key/value heads."""
    return make_model(encoding, kv_heads)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_transformers_43082_chunked_prefill(model, make_tokens, chunk):
    """Prefill in chunks equals one pass."""
    input_ids, cache = make_tokens(2, 21), TapeCache()
    with torch.no_grad():
        expected = model(input_ids).logits
        actual = torch.cat([model(piece, cache=cache).logits for piece in input_ids.split(chunk, dim=1)], dim=1)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["tape", "rope"])
def test_gpt_neox_1003_half_precision_tables(make_model, name):
    """Length 2048, 32 channels, `.half()`: the error of cos and sin was 0.78 at position 1857."""
    model = make_model(name, head_dim=32).half()
    with torch.no_grad():
        state = model(torch.ones(1, 2048, dtype=torch.long), output_position_states=True).position_states[0][0, 0]
    frequencies = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    phases = torch.arange(2048, dtype=torch.float64)[:, None] * frequencies
    assert (state.double() - torch.cat([phases.cos(), phases.sin()], dim=-1)).abs().max() <= 1e-3


@pytest.mark.parametrize("name", ["tape", "rope"])
def test_rotary_embedding_torch_45_odd_head_dim(name):
    """The error names head_dim, before anything is built."""
    with pytest.raises(ValueError, match="head_dim=7"):
        TapeLMConfig(hidden_size=28, num_attention_heads=4, head_dim=7, encoding=name)


def test_rotary_embedding_torch_38_three_lengths_compiled(make_model, make_tokens):
    """A length that went through `.item()` broke the graph."""
    torch._dynamo.reset()
    model = make_model("tape", num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 8, 13):
        input_ids = make_tokens(1, length)
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(input_ids, use_cache=False).logits, model(input_ids).logits, rtol=1e-5, atol=1e-5
            )
    torch._dynamo.reset()


def test_transformers_4499_output_attentions_and_cache(model, make_tokens):
    """Neither ever changes logits, together or alone, in one pass or step by step."""
    input_ids = make_tokens(2, 8)
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
        for use_cache in (False, True):
            for output_attentions in (False, True):
                out = model(input_ids, use_cache=use_cache, output_attentions=output_attentions)
                assert torch.equal(out.logits, expected)
        steps = []
        for output_attentions in (False, True):
            cache = TapeCache()
            columns = input_ids.split(1, dim=1)
            steps.append([model(ids, cache=cache, output_attentions=output_attentions).logits for ids in columns])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_fla_837_packed_equals_padded(model, make_tokens, gradients):
    """Two documents in one row, or in two padded ones: the same logits, loss and gradients."""
    a, b = make_tokens(1, 7), make_tokens(1, 4, seed=1)
    packed = torch.cat([a, b], dim=1)
    padded = torch.cat([a, torch.nn.functional.pad(b, (0, 3))])
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    one = model(packed, document_ids=torch.tensor([[0] * 7 + [1] * 4]), labels=packed)
    two = model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100))
    torch.testing.assert_close(one.logits[0, :7], two.logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.logits[0, 7:], two.logits[1, :4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.loss, two.loss)
    expected = gradients(model, two.loss)
    for name, grad in gradients(model, one.loss).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


def test_fla_892_slack_beyond_the_last_document(model, make_tokens, token_embeddings):
    """A buffer longer than its documents: slack gives a gradient of exactly nothing, not NaN, and takes no part."""
    input_ids = make_tokens(1, 10)
    embeddings = token_embeddings(model)
    bounds = torch.tensor([0, 4, 7], dtype=torch.int32)
    labels = input_ids.clone()
    labels[:, 7:] = -100
    out = model(input_ids, cu_seq_lens_q=bounds, labels=labels)
    out.loss.backward()
    assert (embeddings[0].grad[:, 7:] == 0).all()
    assert embeddings[0].grad[:, :7].isfinite().all()
    alone = model(input_ids[:, :7], cu_seq_lens_q=bounds, labels=input_ids[:, :7])
    torch.testing.assert_close(out.loss, alone.loss)
    torch.testing.assert_close(out.logits[:, :7], alone.logits, rtol=1e-5, atol=1e-5)


def test_pytorch_103749_transformers_38690_fully_masked_rows(model, make_tokens, layer_outputs):
    """A row that may see nothing stays finite in every layer, in both streams, with every backend."""
    input_ids = make_tokens(2, 6)
    mask = torch.tensor([[0] * 6, [1] * 6])
    for backend in ("blockwise", "sdpa", "reference"):
        with pytest.MonkeyPatch.context() as patch, layer_outputs(model) as layers:
            patch.setenv("TAPE_BACKEND", backend)
            assert model(input_ids, attention_mask=mask).logits.isfinite().all()
        assert len(layers) == 3
        for hidden_states, state in layers:
            assert hidden_states.isfinite().all()
            assert state is None or state.isfinite().all()


def test_transformers_19045_cached_steps(model, make_tokens):
    """Step t with a cache is row t of the full forward."""
    input_ids, cache = make_tokens(1, 12), TapeCache()
    with torch.no_grad():
        expected = model(input_ids).logits
        for t in range(12):
            step = model(input_ids[:, t : t + 1], cache=cache).logits
            assert (step[:, 0] - expected[:, t]).abs().max() <= 1e-5 * expected.abs().max(), t


def test_x_transformers_187_one_query_many_keys(model, make_tokens):
    """One query with n cached keys is the last row: its mask is aligned at the bottom right, for every backend."""
    input_ids = make_tokens(1, 9)
    for backend in ("blockwise", "sdpa", "reference"):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setenv("TAPE_BACKEND", backend)
            expected = model(input_ids).logits[:, -1:]
            actual = model(input_ids[:, 8:], cache=model(input_ids[:, :8]).cache).logits
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


class TestReleasedTapeCode:
    """Faults of the code released with the paper."""

    def test_last_token_leaks_into_no_earlier_state(self, model, make_tokens, layer_outputs):
        """Its fork for arithmetic averages states over all tokens, future ones too."""
        input_ids = make_tokens(1, 9)
        other = input_ids.clone()
        other[0, -1] = other[0, -1] % 60 + 1
        streams = []
        for ids in (input_ids, other):
            with layer_outputs(model) as layers:
                model(ids)
            streams.append(layers)
        for (hidden, state), (other_hidden, other_state) in zip(*streams, strict=True):
            assert torch.equal(hidden[:, :-1], other_hidden[:, :-1])
            assert not torch.equal(hidden[:, -1], other_hidden[:, -1])
            if state is not None:
                assert torch.equal(state[..., :-1, :], other_state[..., :-1, :])

    def test_trained_model_survives_resizing(self, make_model, make_tokens):
        """Resizing initialised all position weights again."""
        model, input_ids = make_model("tape"), make_tokens(1, 9)
        expected = model(input_ids).logits
        position_weights = {n: p.clone() for n, p in model.named_parameters() if ".encoding." in n}
        assert position_weights
        assert all(weight.abs().sum() > 0 for weight in position_weights.values())
        for size in (64, 100, 61):
            model.resize_token_embeddings(size)
            for name, parameter in model.named_parameters():
                if name in position_weights:
                    assert torch.equal(parameter, position_weights[name]), name
        torch.testing.assert_close(model(input_ids).logits, expected)

    def test_input_of_one_token(self, model, gradients):
        input_ids = torch.tensor([[5]])
        out = model(input_ids)
        assert out.logits.shape == (1, 1, 61)
        assert out.logits.isfinite().all()
        assert model.generate(input_ids, max_new_tokens=3, pad_token_id=0).shape == (1, 4)

    def test_reload_is_not_a_plain_llama(self, make_model, make_tokens, tmp_path):
        """Its checkpoints named themselves Llama, so the Auto classes loaded them without positions."""
        model, input_ids = make_model("tape"), make_tokens(1, 9)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is TapeLMForCausalLM
        assert not isinstance(loaded, LlamaForCausalLM)
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
