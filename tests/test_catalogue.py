"""What encodings say of themselves, what is measured of them, and `tape encodings`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tape_pe.catalogue import encoding_facts, facts_table, option_facts
from tape_pe.cli import main
from tape_pe.encodings import ENCODINGS, Encoding, EncodingOptions, LayerEncoding, get_encoding, register_encoding
from tape_pe.encodings.tape import TapeOptions
from tape_pe.ops.backends import BACKENDS, describe_bias_cost


@dataclass(frozen=True)
class TableOptions(EncodingOptions):
    """Options of a table.

    Attributes:
        size: how many rows;
            it has to be given.
    """

    size: int | None = None


class TableLayer(LayerEncoding):
    def bias(self, query, key, tokens):
        return query.new_zeros(1, query.shape[1], query.shape[2], key.shape[2])


class Table(Encoding):
    """Adds a row per position
    of a table.

    More about it.
    """

    options_class = TableOptions
    layer_class = TableLayer
    example_options = {"size": 10}  # noqa: RUF012  (annotated in the parent)

    def __init__(self, sizes, options):
        super().__init__(sizes, options)
        self.rows = nn.Embedding(options.size, sizes.hidden_size)

    @classmethod
    def check(cls, sizes, options):
        if options.size is None:
            raise ValueError("encoding_options.size=None: a number of rows is needed")

    def embed(self, tokens):
        return self.rows(tokens.new_position_ids)

    def bias(self, tokens, dtype=torch.float32):
        return torch.zeros(tokens.num_new, tokens.position_ids.shape[1], dtype=dtype)


@pytest.fixture
def table() -> Iterator[None]:
    register_encoding("table", Table)
    yield
    del ENCODINGS["table"]


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_say_what_they_are(name):
    kind = get_encoding(name)
    for attribute in ("summary", "paper", "extrapolates", "cost"):
        value = vars(kind).get(attribute)
        assert isinstance(value, str), f"{kind.__name__} has no {attribute} of its own"
        assert value, f"{attribute} of {kind.__name__} is empty"
    assert kind.summary.endswith(".")
    facts = encoding_facts(name)
    assert all(option.description for option in facts.options), "every option is explained in its class's docstring"


def test_facts_of_tape_and_rope():
    tape, rope = encoding_facts("tape"), encoding_facts("rope")
    # Eleven of twelve layers update: W_mix 12 x 12, gate 48 x 768, up 48 x 12 and down 12 x 48.
    assert tape.parameters == 11 * (12 * 12 + 48 * 768 + 2 * 48 * 12)
    assert tape.cached_state == 64 + 10 * 12 * 64  # layer 0 reads one table for all heads
    assert (rope.parameters, rope.cached_state, rope.shared_bias, rope.layer_bias) == (0, 0, None, None)
    assert "caches 7,744 numbers" in tape.whole_cost
    small = encoding_facts("tape", {"update_mlp": False})
    assert small.parameters == 11 * 12 * 12
    assert small.measured_with == {"update_mlp": False}


def test_facts_of_an_encoding_of_your_own(table):
    facts = encoding_facts("table")
    assert facts.summary == "Adds a row per position of a table."
    assert (facts.parameters, facts.measured_with) == (7680, {"size": 10})
    assert (facts.shared_bias, facts.layer_bias) == ("[N, N]", "[12, N, N]")
    assert facts.whole_cost == "additive bias [N, N], built once; additive bias [12, N, N] in each layer"
    assert facts.options[0].description == "how many rows; it has to be given."
    assert "(measured with" in facts_table([facts])


def test_options_have_the_descriptions_of_their_parents():
    facts = {option.name: option for option in option_facts(TapeOptions)}
    assert facts["trainable_frequencies"].description.startswith("whether the frequencies")
    assert (facts["position_size"].type, facts["position_size"].default) == ("int | None", None)
    assert facts["head_mixing"].type == "Literal['full', 'diagonal']"


def test_table_keeps_to_its_width():
    lines = facts_table([encoding_facts(name) for name in ("tape", "rope", "nope")], width=110).splitlines()
    assert max(map(len, lines)) <= 110
    assert [line.split()[0] for line in lines if line[:1].strip()][2:5] == ["tape", "rope", "nope"]


def test_command_prints_a_table_of_all(capsys):
    assert main(["encodings"]) == 0
    output = capsys.readouterr().out
    first_words = [line.split()[0] for line in output.splitlines() if line[:1].strip()]
    assert first_words[2:-2] == list(ENCODINGS)
    assert "arXiv" in output


def test_command_explains_one(capsys):
    assert main(["encodings", "tape", "--encoding_options.head_mixing", "diagonal"]) == 0
    output = " ".join(capsys.readouterr().out.split())  # lines are as long as the terminal is wide
    assert "head_mixing: Literal['full', 'diagonal'] = 'full'" in output
    assert "with head_mixing=diagonal" in output
    assert "parameters: 418,308" in output


def test_command_prints_json(capsys):
    assert main(["encodings", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [fact["name"] for fact in facts] == list(ENCODINGS)
    assert main(["encodings", "tape", "rope", "tape", "--json"]) == 0
    tape, rope = json.loads(capsys.readouterr().out)
    assert (tape["name"], rope["name"]) == ("tape", "rope")
    assert tape["options"][1]["name"] == "position_size"
    assert rope["parameters"] == 0


def test_command_draws(tmp_path, capsys, table, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["encodings", "rope", "--picture", "deep/one.html", "--length", "9"]) == 0
    assert capsys.readouterr().out == "deep/one.html\n"
    monkeypatch.setattr("tape_pe.report.pattern_page.ENCODINGS", ["rope", "table"])  # drawing takes its time
    assert main(["encodings", "--picture", "all.html", "--length", "5"]) == 0
    left_out, path = capsys.readouterr().out.splitlines()
    assert left_out == "left out table: encoding_options.size=None: a number of rows is needed"
    assert path == "all.html"
    assert "9 positions" in (tmp_path / "deep/one.html").read_text()
    assert main(["encodings", "table", "--picture", "t.html", "--length=5", "--encoding_options", '{"size": 5}']) == 0


def test_command_draws_a_model(tmp_path, capsys, make_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model("tape").save_pretrained("model")
    assert main(["encodings", "--model", "model", "--picture", "page.html", "--length", "7"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "7 random tokens" in page
    assert "layer 2" in page
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    message = refused(capsys, "--model", "llama", "--picture", "other.html")
    assert "model is llama, a llama; it must be a tape_lm" in message
    message = refused(capsys, "--model", "model", "--picture", "other.html", "--text", "1+1=")
    assert "text is '1+1='; model model has no tokenizer" in message
    from tape_pe.tasks.tokenizers import character_tokenizer

    character_tokenizer("0123456789+=").save_pretrained("model")
    assert main(["encodings", "--model", "model", "--picture", "page.html", "--text", "1+1="]) == 0
    assert "reads &#39;1+1=&#39;" in (tmp_path / "page.html").read_text()
    message = refused(capsys, "--model", "model", "--picture", "other.html", "--text", "1-1")
    assert "text is '1-1'; the tokenizer of model does not know it" in message
    assert not (tmp_path / "other.html").exists()


def refused(capsys, *arguments: str) -> str:
    """The one line that the command prints when it refuses its input."""
    capsys.readouterr()
    assert main(["encodings", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("tape: error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spiral"], "encoding='spiral': known encodings are tape, rope, nope"),
        (["spiral", "--picture", "x.html"], "encoding='spiral': known encodings are"),
        (["rope", "--encoding_options.colour", "red"], "encoding_options.colour='red': encoding='rope' has trainable"),
        (["tape", "--encoding_options.head_mixing", "half"], "head_mixing='half': allowed values are full, diagonal"),
        (["rope", "--picture", "x.html", "--encoding_options", '{"log_scale": 1}'], "log_scale=1: a length above 1"),
        (["rope", "tape", "--encoding_options.log_scale", "9"], "needs the name of one encoding, there are 2"),
        (["--encoding_options.log_scale", "9"], "needs the name of one encoding, there are 0"),
        (["--picture", "x.html", "--length", "1"], "length is 1; it must be 2 to 2048 positions"),
        (["--picture", "x.html", "--length", "far"], "\"length\": Expected a <class 'int'>. Got value: far"),
        (["--picture", "."], "output is a folder: ."),
        (["--length", "9"], "length is 9; it needs --picture"),
        (["--text", "1+1"], "text is '1+1'; it needs --model"),
        (["--model", "."], "model is '.'; it needs --picture"),
        (["--model", ".", "--picture", "x.html"], "model is .; it must be a folder with a model's config.json"),
        (["rope", "--model", ".", "--picture", "x.html"], "it has an encoding of its own, rope cannot be named"),
        (["--json", "--picture", "x.html"], "json and picture are both set"),
        (["--lenght", "9"], "lenght is not an option; the options are"),
    ],
)
def test_command_refuses(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_info_states_the_cost_of_biases(capsys, monkeypatch):
    monkeypatch.delenv("TAPE_BACKEND", raising=False)
    assert main(["info"]) == 0
    assert "additive biases: " in capsys.readouterr().out
    assert [name for name, backend in BACKENDS.items() if not backend.materializes_bias] == ["flex"]
    assert describe_bias_cost("cpu").startswith("blockwise needs the whole [H, N, N] bias in memory")
    assert describe_bias_cost("cuda").startswith("sdpa needs the whole")
    monkeypatch.setenv("TAPE_BACKEND", "flex")
    assert describe_bias_cost("cuda").startswith("flex computes them where they are needed")


@pytest.mark.parametrize(
    ("name", "shared", "layer", "in_place"),
    [
        ("alibi", "[12, N, N]", None, "always"),
        ("t5", "[12, N, N]", None, "always"),
        ("fire", None, "[12, N, N]", "inference"),
        ("cope", None, "[12, N, N]", "never"),
        ("rope", None, None, None),
    ],
)
def test_facts_say_which_biases_are_built_and_when(name, shared, layer, in_place):
    facts = encoding_facts(name)
    assert (facts.shared_bias, facts.layer_bias, facts.in_place) == (shared, layer, in_place)
    assert ("no bias on a backend that computes it in place" in facts.whole_cost) == (
        in_place in ("always", "inference")
    )
    assert ("in place, except in training" in facts.whole_cost) == (in_place == "inference")
