"""Shifted sparse attention against a dense mask that is written down from its definition."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tape_pe.finetuning.longlora import SHIFTED_SPARSE, register, shifted_sparse_attention


def dense(query, key, value, groups):
    """The definition, token by token: j is seen from i if it is not later and both are in one group of that head."""
    heads, length = query.shape[1:3]
    size = length // groups
    allowed = torch.zeros(heads, length, length, dtype=torch.bool)
    for head in range(heads):
        shift = size // 2 if head >= heads // 2 and groups > 1 else 0
        for i in range(length):
            for j in range(i + 1):
                allowed[head, i, j] = (i - shift) // size == (j - shift) // size
    key, value = (states.repeat_interleave(heads // key.shape[1], dim=1) for states in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "groups"),
    [
        (4, 4, 32, 4),
        (4, 2, 32, 4),
        (3, 1, 12, 4),
        (6, 2, 20, 4),
        (2, 1, 4, 4),
        (4, 2, 16, 2),
        (4, 2, 16, 1),
        (1, 1, 8, 4),
    ],
)
def test_equals_a_dense_mask(heads, kv_heads, length, groups):
    torch.manual_seed(0)
    query = torch.randn(2, heads, length, 6, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = shifted_sparse_attention(query, key, value, groups=groups)
    reference = dense(query, key, value, groups)
    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((result * weights).sum(), (query, key, value)) for result in (out, reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_group_is_full_attention():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 10, 8, dtype=torch.float64) for _ in range(3))
    full = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(shifted_sparse_attention(query, key, value, groups=1), full, rtol=1e-12, atol=1e-12)


def test_length_that_groups_do_not_divide():
    states = torch.randn(1, 2, 10, 4)
    with pytest.raises(ValueError, match="groups=4: it must divide the sequence length, 10"):
        shifted_sparse_attention(states, states, states)


@pytest.fixture
def models(base_folder):
    register()
    return [
        AutoModelForCausalLM.from_pretrained(base_folder, attn_implementation=name) for name in ("sdpa", SHIFTED_SPARSE)
    ]


def test_sparse_in_training_only(models):
    full, sparse = models
    tokens = torch.randint(0, 300, (2, 32))
    assert torch.equal(full.eval()(tokens).logits, sparse.eval()(tokens).logits)
    assert torch.equal(*(model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in models))
    first = 32 // 4 // 2  # before the first border, nothing is different
    full, sparse = full.train()(tokens).logits, sparse.train()(tokens).logits
    torch.testing.assert_close(full[:, :first], sparse[:, :first])
    assert not torch.allclose(full, sparse)


def test_training_is_causal(models):
    """The last tokens reach none of the others: in the paper's code they reach the first half group."""
    model = models[1].train()
    embeddings = model.get_input_embeddings()(torch.randint(0, 300, (1, 32))).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    for position in (0, 3, 4, 27, 31):
        (gradient,) = torch.autograd.grad(logits[0, position].sum(), embeddings, retain_graph=True)
        assert not gradient[0, position + 1 :].any()
        assert gradient[0, position].abs().max() > 0


def test_padding_is_refused_in_training(models):
    tokens = torch.randint(0, 300, (1, 8))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask is given"):
        models[1].train()(tokens, attention_mask=mask)
    assert models[1].eval()(tokens, attention_mask=mask).logits.isfinite().all()
