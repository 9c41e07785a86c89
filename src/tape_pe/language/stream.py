"""Blocks of tokens from texts too many to tokenize at once: split over processes, and resumed exactly.

Documents keep their order. Of each so many as there are processes, each process reads one; data sets of the hub are
split by files instead, where their number allows it. A process packs its documents into blocks, and begins again when
it has read them all; tokens that fill no block go on into the next pass.

Where the stream stands travels with each block, so that it is right whatever has been read ahead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from tape_pe.files import write_json
from tape_pe.language.text import Texts, document_tokens

POSITION = "stream_position"
"""Key of a sample, and of a batch, that holds the `StreamPosition` behind it."""


@dataclass(frozen=True)
class StreamPosition:
    """Where a process's stream goes on.

    Attributes:
        place: where the texts go on, see `tape_pe.language.text.Reader`.
        documents: documents of all processes before it, in this pass.
        waiting: tokens of earlier documents that have not filled a block.
        blocks: blocks that the document at `place` has given already.
    """

    place: Any = None
    documents: int = 0
    waiting: Sequence[int] = ()
    blocks: int = 0

    def save(self, path: Path) -> None:
        """Writes it to a JSON file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> StreamPosition:
        """Reads what `save` has written.

        Raises:
            ValueError: there is none for this process: others wrote the checkpoint.
        """
        if not path.is_file():
            there = sorted(other.name for other in path.parent.glob("stream-*.json"))
            raise ValueError(f"{path} is missing; streaming goes on in as many processes as before: {there}")
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class TokenStream(IterableDataset):
    """Endless samples `input_ids` and `labels`, int64 `[length]`, each with the `StreamPosition` behind it.

    Args:
        texts: the documents.
        tokenizer: must have an EOS token.
        length: tokens of a block.
    """

    def __init__(self, texts: Texts, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.texts, self.tokenizer, self.length = texts, tokenizer, length
        self.process, self.processes = 0, 1
        self.position = StreamPosition()

    def share(self, process: int, processes: int, position: StreamPosition | None = None) -> TokenStream:
        """The stream of one of several processes, from a position on."""
        stream = TokenStream(self.texts, self.tokenizer, self.length)
        stream.process, stream.processes = process, processes
        if processes > 1 and self.texts.split is not None:
            stream.texts, stream.process, stream.processes = self.texts.split(process, processes), 0, 1
        stream.position = position or self.position
        return stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        position = self.position
        while True:
            whole_pass, found = position.documents == 0, False
            for text, behind in self.texts.read(position.place):
                mine = bool(text) and position.documents % self.processes == self.process
                waiting = list(position.waiting)
                if mine:
                    found = True
                    tokens = waiting + document_tokens(text, self.tokenizer)
                    full = len(tokens) // self.length
                    for block in range(position.blocks, full):
                        piece = np.array(tokens[block * self.length : (block + 1) * self.length], dtype=np.int64)
                        position = replace(position, blocks=block + 1)
                        yield {"input_ids": piece, "labels": piece.copy(), POSITION: position}
                    waiting = tokens[full * self.length :]
                position = StreamPosition(behind, position.documents + bool(text), waiting)
            if whole_pass and not found:
                raise ValueError(
                    f"task.data: has {position.documents} documents, fewer than the {self.processes} processes"
                )
            position = StreamPosition(waiting=position.waiting)


class KeepPosition:
    """A collator that also keeps the position behind the last sample."""

    def __init__(self, collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self.collator(samples), POSITION: samples[-1][POSITION]}
