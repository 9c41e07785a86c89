"""Encodings by name: an encoding is one file and one line here."""

from __future__ import annotations

from tape_pe.encodings.alibi import Alibi
from tape_pe.encodings.base import Encoding
from tape_pe.encodings.cope import Cope
from tape_pe.encodings.fire import Fire
from tape_pe.encodings.nope import NoPE
from tape_pe.encodings.rope import Rope
from tape_pe.encodings.t5 import T5
from tape_pe.encodings.tape import Tape

ENCODINGS: dict[str, type[Encoding]] = {
    "tape": Tape,
    "rope": Rope,
    "nope": NoPE,
    "alibi": Alibi,
    "t5": T5,
    "fire": Fire,
    "cope": Cope,
}


def get_encoding(name: str) -> type[Encoding]:
    """The encoding registered as `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r}: known encodings are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
