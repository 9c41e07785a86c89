"""Positional encodings, one file each."""

from tape_pe.encodings.base import Encoding, EncodingOptions, EncodingSizes, LayerEncoding, Tokens
from tape_pe.encodings.registry import ENCODINGS, get_encoding, register_encoding

__all__ = [
    "ENCODINGS",
    "Encoding",
    "EncodingOptions",
    "EncodingSizes",
    "LayerEncoding",
    "Tokens",
    "get_encoding",
    "register_encoding",
]
