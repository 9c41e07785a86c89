"""Documents from every kind of place, and blocks that lose no token."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from tape_pe.language.text import has_splits, read_texts, token_blocks
from tape_pe.tasks.tokenizers import character_tokenizer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first", "body": "x"}\n\n{"text": ""}\n{"text": "also first"}\n')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.py").write_text("third = 3")
    (tmp_path / "c" / "picture.png").write_bytes(b"\xff")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "e.txt").write_text("never")
    return tmp_path


def test_files_and_folders(folder):
    assert list(read_texts(str(folder / "b.txt"))) == ["second"]
    assert list(read_texts(str(folder / "a.jsonl"))) == ["first", "also first"]
    with pytest.raises(ValueError, match=r"text_field='body': no text in .*a.jsonl, line 3.*'text'"):
        list(read_texts(str(folder / "a.jsonl"), text_field="body"))
    texts = read_texts(str(folder))
    assert list(texts) == list(texts) == ["first", "also first", "second", "third = 3"]
    assert not has_splits(str(folder))


def test_standard_library():
    train, test = (set(read_texts("python-stdlib", split=split)) for split in ("train", "test"))
    assert len(train & test) < 5  # nearly empty files may be the same
    assert 10 < len(train) / len(test) < 40
    assert any("class OrderedDict" in text for text in train | test)
    assert has_splits("python-stdlib")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "holds no text"),
        ("empty.jsonl", "\n", "holds no text"),
        ("bad.jsonl", "{", "bad.jsonl, line 1: not JSON"),
        ("list.jsonl", "[1]", "text_field='text': no text in .*line 1; it has no fields"),
        ("other.jsonl", '{"words": "x"}', "text_field='text': .* the fields are 'words'"),
        ("number.jsonl", '{"text": 3}', "text_field='text': no text"),
        ("data.csv", "a,b", r"a file must end in one of .txt"),
        ("latin.txt", b"\xe9", "latin.txt is not UTF-8"),
    ],
)
def test_unusable_files_are_refused_at_once(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_texts(str(tmp_path / name))


def test_missing_places_are_refused(tmp_path):
    for name in (str(tmp_path / "none"), "none.txt", "./none", "a/b/c", ""):
        with pytest.raises((FileNotFoundError, ValueError), match="data="):
            read_texts(name)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no text"):
        read_texts(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="split='validation': python-stdlib has train and test"):
        read_texts("python-stdlib", split="validation")


class Rows(list):
    """Stands for a data set that is read from its beginning."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_data_sets(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        if options["split"] == "none":
            raise ValueError("no such split\nand more")
        return Rows([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __spec__=object()))
    assert list(read_texts("someone/texts:small", split="test")) == ["one", "two"]
    assert asked[0] == (("someone/texts", "small"), {"split": "test", "streaming": True})
    with pytest.raises(ValueError, match=r"text_field='body': .* someone/texts; the fields are 'text'"):
        read_texts("someone/texts", text_field="body")
    with pytest.raises(ValueError, match=r"split 'none' cannot be read: no such split$"):
        read_texts("someone/texts", split="none")


def test_data_sets_need_their_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data='someone/texts'.*pip install 'tape-pe\[lm\]'"):
        read_texts("someone/texts")


@pytest.mark.parametrize("length", [1, 4, 7, 100])
def test_packed_blocks_lose_nothing_but_the_end(length):
    tokenizer, documents = character_tokenizer("abc"), ["abcab", "", "c", "abcabcabcabc"]
    blocks = list(token_blocks(documents, tokenizer, length))
    assert all(len(block) == length for block in blocks)
    whole = tokenizer.encode("<eos>".join(filter(None, documents)) + "<eos>")
    assert list(itertools.chain(*blocks)) == whole[: len(whole) // length * length]


def test_separate_blocks_hold_one_document_each():
    tokenizer = character_tokenizer("abc")
    blocks = list(token_blocks(["aaaaa", "bb", "cccc"], tokenizer, 3, documents="separate"))
    assert [tokenizer.decode(block) for block in blocks] == ["aaa", "aa<eos>", "bb<eos>", "ccc"]


def test_blocks_are_made_on_demand():
    tokenizer = character_tokenizer("abc")
    blocks = token_blocks(itertools.repeat("abc"), tokenizer, 8)
    assert len(list(itertools.islice(blocks, 5))) == 5


def test_bad_arguments_of_blocks():
    tokenizer = character_tokenizer("abc")
    for options, message in (
        ({"length": 0}, "length=0: it must be at least 1"),
        ({"length": 2, "documents": "mixed"}, "documents='mixed': it must be one of packed, separate"),
    ):
        with pytest.raises(ValueError, match=message):
            token_blocks(["abc"], tokenizer, **options)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer has no EOS token"):
        token_blocks(["abc"], tokenizer, 2)


def test_records_keep_every_character(tmp_path):
    text = "line one\nline two\u2028still, \u00e9"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}))
    assert list(read_texts(str(tmp_path / "x.jsonl"))) == [text]
