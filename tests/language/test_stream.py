"""Streamed text: split over processes, and resumed with the very block that followed."""

import json
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tape_pe.language.stream import POSITION, StreamPosition, TokenStream
from tape_pe.language.text import Texts, document_tokens, read_texts

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, and `<eos>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(params=["jsonl", "folder", "pieces", "dataset"])
def texts(request, tmp_path, monkeypatch):
    """Eleven documents of different lengths, one of them empty where that is possible."""
    documents = [f"{number} " + "word " * (number * 7 % 23) for number in range(11)]
    if request.param == "jsonl":
        lines = [json.dumps({"text": text}) for text in [*documents[:4], "", *documents[4:]]]
        (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
        return read_texts(str(tmp_path / "a.jsonl"))
    if request.param == "folder":
        for number, text in enumerate(documents):
            (tmp_path / f"{number:02}.txt").write_text(text)
        return read_texts(str(tmp_path))
    if request.param == "pieces":
        monkeypatch.setattr("tape_pe.language.text._PIECE", 40)
        (tmp_path / "a.txt").write_text("\n".join(documents))
        return read_texts(str(tmp_path / "a.txt"), pieces=True)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    return read_texts("someone/texts")


def ids(samples):
    return [sample["input_ids"].tolist() for sample in samples]


def one_pass(stream: TokenStream, tokenizer) -> list[int]:
    """The tokens of a stream's first pass over its documents, those that fill no block included."""
    documents = [text for text, _ in stream.texts.read(None) if text]
    mine = documents[stream.process :: stream.processes]
    return [token for text in mine for token in document_tokens(text, tokenizer)]


@pytest.mark.parametrize("processes", [1, 2])
def test_resumes_with_the_block_that_followed(texts, tokenizer, tmp_path, processes):
    stream = TokenStream(texts, tokenizer, LENGTH)
    for process in range(processes):
        samples = list(islice(stream.share(process, processes), 90))  # several passes
        assert samples[-1][POSITION].place != samples[0][POSITION].place
        for count in (1, 2, 17, 40, 71):
            samples[count - 1][POSITION].save(tmp_path / "stream.json")
            position = StreamPosition.load(tmp_path / "stream.json")
            resumed = list(islice(stream.share(process, processes, position), 90 - count))
            assert ids(resumed) == ids(samples[count:]), (process, count)


def test_processes_share_all_documents(texts, tokenizer):
    whole = TokenStream(texts, tokenizer, LENGTH)
    shares = [whole.share(process, 2) for process in range(2)]
    passes = [one_pass(share, tokenizer) for share in shares]
    for share, tokens in zip(shares, passes, strict=True):
        blocks = len(tokens) // LENGTH
        assert [token for block in ids(islice(share, blocks)) for token in block] == tokens[: blocks * LENGTH]

    def documents(tokens: list[int]) -> list[str]:
        return tokenizer.decode(tokens).split("<eos>")[:-1]

    first, second = map(documents, passes)
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted(documents(one_pass(whole, tokenizer)))


def test_reads_on_only_what_follows(tmp_path, tokenizer):
    """Resuming tokenizes one document again, not all that came before."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n}"}) for n in range(100)))
    texts = read_texts(str(tmp_path / "a.jsonl"))
    position = list(islice(TokenStream(texts, tokenizer, LENGTH), 40))[-1][POSITION]
    read: list[str] = []

    def watched(place):
        for text, behind in texts.read(place):
            read.append(text)
            yield text, behind

    next(iter(TokenStream(Texts(watched), tokenizer, LENGTH).share(0, 1, position)))
    assert len(read) <= 3


def test_refusals(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one document")
    stream = TokenStream(read_texts(str(tmp_path / "a.txt")), tokenizer, LENGTH)
    with pytest.raises(ValueError, match="has 1 documents, fewer than the 2 processes"):
        next(iter(stream.share(1, 2)))
    StreamPosition().save(tmp_path / "stream-0-of-2.json")
    with pytest.raises(ValueError, match=r"as many processes as before: \['stream-0-of-2.json'\]"):
        StreamPosition.load(tmp_path / "stream-0-of-1.json")
