"""Encodings by name: an encoding is one file and one line here."""

from __future__ import annotations

from tape_pe.encodings.abacus import Abacus
from tape_pe.encodings.alibi import Alibi
from tape_pe.encodings.base import Encoding
from tape_pe.encodings.cope import Cope
from tape_pe.encodings.fire import Fire
from tape_pe.encodings.learned import Learned
from tape_pe.encodings.nope import NoPE
from tape_pe.encodings.randomized import Randomized
from tape_pe.encodings.rope import Rope
from tape_pe.encodings.sinusoidal import Sinusoidal
from tape_pe.encodings.t5 import T5
from tape_pe.encodings.tape import Tape
from tape_pe.encodings.xpos import Xpos

ENCODINGS: dict[str, type[Encoding]] = {
    "tape": Tape,
    "rope": Rope,
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "alibi": Alibi,
    "t5": T5,
    "fire": Fire,
    "xpos": Xpos,
    "randomized": Randomized,
    "cope": Cope,
    "abacus": Abacus,
}


def register_encoding(name: str, encoding: type[Encoding]) -> None:
    """Makes an encoding of your own known by name, as `encoding` of a config, to the decoder and to the `tape` command.

    Check it with `tape_pe.testing`.

    Raises:
        ValueError: the name is taken.
        TypeError: `encoding` is not a subclass of `Encoding`.
    """
    if name in ENCODINGS:
        raise ValueError(f"encoding={name!r}: the name is taken by {ENCODINGS[name].__name__}")
    if not (isinstance(encoding, type) and issubclass(encoding, Encoding)):
        raise TypeError(f"encoding={encoding!r}: a subclass of Encoding is needed")
    ENCODINGS[name] = encoding


def get_encoding(name: str) -> type[Encoding]:
    """The encoding registered as `name`.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r}: known encodings are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
