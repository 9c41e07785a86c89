"""Every registered encoding passes every check of `tape_pe.testing`; a wrong one fails them."""

import pytest
import torch

from tape_pe.encodings import ENCODINGS, Encoding, LayerEncoding, register_encoding
from tape_pe.testing import ENCODING_CHECKS


@pytest.mark.parametrize("check", ENCODING_CHECKS.values(), ids=ENCODING_CHECKS.keys())
def test_encodings(check, encoding, encoding_options):
    check(encoding, encoding_options)


@pytest.fixture
def registered():
    """Registers encodings for one test."""
    names = []

    def register(name, encoding):
        register_encoding(name, encoding)
        names.append(name)

    yield register
    for name in names:
        del ENCODINGS[name]


class ColumnBias(LayerEncoding):
    """Wrong on purpose: counts columns instead of positions."""

    def bias(self, query, key, tokens):
        return -0.02 * torch.arange(key.shape[2]).to(query.dtype) ** 2


class ColumnEncoding(Encoding):
    layer_class = ColumnBias


class FutureLayer(LayerEncoding):
    """Wrong on purpose: rotates by what the whole row holds."""

    def rotate(self, query, key, state):
        return query * (1 + query.mean(dim=2, keepdim=True)), key


class FutureEncoding(Encoding):
    layer_class = FutureLayer


def test_wrong_encodings_fail(registered):
    registered("column", ColumnEncoding)
    with pytest.raises(AssertionError, match="padding"):
        ENCODING_CHECKS["padding_changes_nothing"]("column")
    registered("future", FutureEncoding)
    with pytest.raises(AssertionError, match="later token"):
        ENCODING_CHECKS["later_tokens_change_nothing"]("future")
    with pytest.raises(AssertionError, match="chunks of 1"):
        ENCODING_CHECKS["cached_decoding_equals_the_full_forward"]("future")
    with pytest.raises(AssertionError, match="packed documents"):
        ENCODING_CHECKS["packed_documents_are_apart"]("future")


def test_names_are_taken_once(registered):
    with pytest.raises(ValueError, match=r"encoding='rope'.*taken"):
        register_encoding("rope", ColumnEncoding)
    with pytest.raises(TypeError, match="Encoding"):
        register_encoding("thing", ColumnBias)
