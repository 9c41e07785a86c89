"""Encodings by name: an encoding is one file and one line here."""

from __future__ import annotations

from tape_pe.encodings.abacus import Abacus
from tape_pe.encodings.base import Encoding
from tape_pe.encodings.learned import Learned
from tape_pe.encodings.nope import NoPE
from tape_pe.encodings.randomized import Randomized
from tape_pe.encodings.rope import Rope
from tape_pe.encodings.sinusoidal import Sinusoidal
from tape_pe.encodings.tape import Tape
from tape_pe.encodings.xpos import Xpos

ENCODINGS: dict[str, type[Encoding]] = {
    "tape": Tape,
    "rope": Rope,
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "xpos": Xpos,
    "randomized": Randomized,
    "abacus": Abacus,
}


def get_encoding(name: str) -> type[Encoding]:
    """The encoding registered as `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r}: known encodings are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
