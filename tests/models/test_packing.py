"""Packed documents are what they are alone: logits, states, loss and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tape_pe.models import TapeCache

LENGTHS = (5, 1, 8, 4)
BOUNDS = [slice(0, 5), slice(5, 6), slice(6, 14), slice(14, 18)]
DOCUMENT_IDS = torch.tensor([[0] * 5 + [1] + [2] * 8 + [3] * 4])
COLLATORS = {
    "default": {},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
    "cu_seq_lens": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}


@pytest.fixture
def documents(make_tokens):
    """Token ids of the documents."""
    return [make_tokens(length, seed=length) for length in LENGTHS]


@pytest.fixture
def flatten(documents):
    """The documents as transformers' flattening collator packs them."""

    def collate(**options):
        collator = DataCollatorWithFlattening(**options)
        return collator([{"input_ids": document.tolist()} for document in documents], return_tensors="pt")

    return collate


def packed(documents):
    return torch.cat(documents)[None]


def test_document_ids(any_model, documents, run_row, assert_same):
    for document, bounds in zip(documents, BOUNDS, strict=True):
        together = run_row(any_model, packed(documents), 0, bounds, document_ids=DOCUMENT_IDS)
        assert_same(together, run_row(any_model, document[None]))


@pytest.mark.parametrize("collator", list(COLLATORS))
def test_flattening_collator(model, documents, flatten, run_row, assert_same, collator):
    batch = flatten(**COLLATORS[collator])
    batch.pop("labels")
    for document, bounds in zip(documents, BOUNDS, strict=True):
        together = run_row(model, batch["input_ids"], 0, bounds, **{k: v for k, v in batch.items() if k != "input_ids"})
        assert_same(together, run_row(model, document[None]))


@pytest.mark.parametrize("collator", list(COLLATORS))
def test_loss_and_gradients(model, documents, flatten, gradients, collator):
    """The loss of a packed batch is the mean over the predicted tokens of all documents."""
    batch = flatten(**COLLATORS[collator])
    counts = [length - 1 for length in LENGTHS]
    loss = model(**batch).loss
    actual = gradients(model, loss)
    expected_loss = 0.0
    expected = {name: torch.zeros_like(grad) for name, grad in actual.items()}
    for document, count in zip(documents, counts, strict=True):
        if count == 0:
            continue  # one token predicts nothing
        alone = model(document[None], labels=document[None]).loss * count / sum(counts)
        expected_loss += alone.item()
        for name, grad in gradients(model, alone).items():
            expected[name] += grad
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in actual.items():
        scale = max(1.0, float(expected[name].abs().max()))
        assert (grad - expected[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("how", ["document_ids", "seq_idx", "cu_seq_lens_q", "position_ids"])
def test_first_tokens_are_not_predicted(make_model, documents, how):
    """Labels that are plain token ids, as from a dataset that packs without a collator of its own."""
    model, input_ids = make_model("tape"), packed(documents)
    bounds = {
        "document_ids": DOCUMENT_IDS,
        "seq_idx": DOCUMENT_IDS,
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 14, 18], dtype=torch.int32),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }
    labels = input_ids.clone()
    labels[0, [5, 6, 14]] = -100
    expected = model(input_ids, document_ids=DOCUMENT_IDS, labels=labels).loss
    assert model(input_ids, labels=input_ids, **{how: bounds[how]}).loss.item() == expected.item()


@pytest.mark.parametrize("changed", range(4))
def test_documents_never_touch(any_model, make_tokens, documents, run_row, assert_same, changed):
    """Perturbing one document changes the others by exactly nothing, states included."""
    input_ids = packed(documents)
    other = input_ids.clone()
    other[0, BOUNDS[changed]] = input_ids[0, BOUNDS[changed]] % 60 + 1
    for index, bounds in enumerate(BOUNDS):
        before = run_row(any_model, input_ids, 0, bounds, document_ids=DOCUMENT_IDS)
        after = run_row(any_model, other, 0, bounds, document_ids=DOCUMENT_IDS)
        if index == changed:
            assert not torch.equal(before.logits, after.logits)
        else:
            assert_same(after, before, exactly=True)


def test_documents_never_touch_in_gradients(model, documents, token_embeddings):
    """The loss of one document gives the embeddings of the others a gradient of exactly nothing."""
    embeddings = token_embeddings(model)
    logits = model(packed(documents), document_ids=DOCUMENT_IDS).logits
    logits[:, BOUNDS[2]].square().sum().backward()
    inside = torch.zeros(18, dtype=torch.bool)
    inside[BOUNDS[2]] = True
    assert (embeddings[0].grad[0, ~inside] == 0).all()
    assert (embeddings[0].grad[0, inside] != 0).any(dim=-1).all()


def test_long_documents(model, make_tokens, run_row, assert_same):
    """Documents that begin and end within blocks of the attention."""
    input_ids = make_tokens(1, 330)
    document_ids = torch.tensor([[0] * 100 + [1] * 70 + [2] * 160])
    for bounds in (slice(0, 100), slice(100, 170), slice(170, 330)):
        together = run_row(model, input_ids, 0, bounds, document_ids=document_ids)
        assert_same(together, run_row(model, input_ids[:, bounds]))


def test_documents_with_padding(model, make_tokens, run_row, assert_same):
    input_ids = make_tokens(2, 10)
    document_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1, 0, 0]])
    for row in range(2):
        for document in range(3):
            real = (document_ids[0] == document) & (mask[row] != 0)
            together = run_row(model, input_ids, row, real, attention_mask=mask, document_ids=document_ids)
            assert_same(together, run_row(model, input_ids[row : row + 1, real]))


def test_negative_document_ids_are_padding(make_model, make_tokens, run_row, assert_same):
    model, input_ids = make_model("tape"), make_tokens(1, 7)
    document_ids = torch.tensor([[-1, 0, 0, 0, 1, 1, -1]])
    for bounds in (slice(1, 4), slice(4, 6)):
        together = run_row(model, input_ids, 0, bounds, document_ids=document_ids)
        assert_same(together, run_row(model, input_ids[:, bounds]))


@pytest.mark.parametrize("how", ["seq_idx", "cu_seq_lens_q"])
def test_explicit_documents_with_a_mask(make_model, make_tokens, run_row, assert_same, how):
    """A collator that pads the flattened row: the mask must not make its documents one."""
    model, input_ids = make_model("tape"), make_tokens(1, 8)
    bounds = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), "cu_seq_lens_q": torch.tensor([0, 3, 8])}
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    for columns in (slice(0, 3), slice(3, 6)):
        together = run_row(model, input_ids, 0, columns, attention_mask=mask, **{how: bounds[how]})
        assert_same(together, run_row(model, input_ids[:, columns]))


NOT_PACKED = {
    "offset": [7, 8, 9, 10, 11, 12],
    "gaps": [0, 2, 3, 7, 8, 30],
    "offset and gaps": [5, 6, 20, 21, 40, 90],
    "a gap of one after a run": [0, 1, 2, 4, 5, 6],
    "restart at one": [1, 2, 3, 1, 2, 3],
    "reversed": [5, 4, 3, 2, 1, 0],
    "permuted": [3, 0, 4, 1, 5, 2],
    "zero after an offset": [4, 5, 6, 0, 1, 2],
    "restart and a gap": [0, 1, 0, 1, 2, 5],
}


@pytest.mark.parametrize("position_ids", list(NOT_PACKED.values()), ids=list(NOT_PACKED))
def test_packing_is_never_guessed(make_model, make_tokens, run_row, assert_same, position_ids):
    """Only rows made of nothing but runs 0, 1, 2, ... are packed; other positions are one document."""
    model, input_ids = make_model("tape"), make_tokens(2, 6)
    position_ids = torch.tensor([position_ids])
    one_document = torch.zeros(1, 6, dtype=torch.long)
    expected = run_row(model, input_ids, 1, position_ids=position_ids, document_ids=one_document)
    assert_same(run_row(model, input_ids, 1, position_ids=position_ids), expected)


def test_rows_are_packed_or_not_one_by_one(make_model, make_tokens, run_row, assert_same):
    model, input_ids = make_model("tape"), make_tokens(2, 6)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    first = run_row(model, input_ids, 0, slice(3, None), position_ids=position_ids)
    assert_same(first, run_row(model, input_ids[:1, 3:]))
    assert_same(run_row(model, input_ids, 1, position_ids=position_ids), run_row(model, input_ids[1:]))


@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("how", ["document_ids", "position_ids", "seq_idx", "cu_seq_lens_q"])
def test_decoding_goes_on_with_the_last_document(model, make_tokens, documents, flatten, how, mask):
    collated = flatten(return_seq_idx=True, return_flash_attn_kwargs=True)
    given = {"document_ids": DOCUMENT_IDS, **collated}[how]
    more = make_tokens(1, 4, seed=9)
    cache = TapeCache()
    with torch.no_grad():
        expected = model(torch.cat([documents[-1][None], more], dim=1)).logits[:, 4:]
        model(packed(documents), cache=cache, **{how: given})
        steps = []
        for column in range(4):
            ones = torch.ones(1, 18 + column + 1, dtype=torch.long) if mask else None
            steps.append(model(more[:, column : column + 1], cache=cache, attention_mask=ones).logits)
    assert (torch.cat(steps, dim=1) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_documents_in_chunks(model, documents):
    """A packed prompt given to the cache in chunks that cut documents."""
    input_ids = packed(documents)
    with torch.no_grad():
        expected = model(input_ids, document_ids=DOCUMENT_IDS).logits
        cache = TapeCache()
        pieces = zip(input_ids.split(4, dim=1), DOCUMENT_IDS.split(4, dim=1), strict=True)
        actual = torch.cat([model(ids, document_ids=doc, cache=cache).logits for ids, doc in pieces], dim=1)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
