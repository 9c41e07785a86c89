"""The documentation says what is so: its code runs, its commands exist, and what it shows and links to is there."""

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from tape_pe.cli import COMMANDS, _parser, main
from tape_pe.cli.runs import expand_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# Options that make every training of the tutorials a matter of seconds.
SHORT = (
    "--training.max_steps 2 --training.save_steps 2 --training.per_device_train_batch_size 4 --training.warmup_steps 0"
)
SMALL = "--model.hidden_size 16 --model.intermediate_size 16 --model.num_hidden_layers 2 --task.max_digits 1"


@pytest.fixture(scope="module")
def site():
    """`scripts/docs_site.py`, which MkDocs calls."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def blocks(site, page, language):
    text = site.expand((DOCS / page).read_text(encoding="utf-8"), page)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(site, page):
    """The words of each `tape` command of a page."""
    lines = "".join(blocks(site, page, "sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("tape ")]


def pages_with(fence):
    names = [page for page in PAGES if fence in (DOCS / page).read_text(encoding="utf-8")]
    assert names
    return names


@pytest.mark.parametrize("page", ["index.md", *pages_with("```python\n")])
def test_python_runs(site, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page}
    found = blocks(site, page, "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.slow
def test_training_commands_run(site, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    found = commands(site, "tutorials/train.md")
    assert {words[0] for words in found} == {"train", "evaluate", "generate", "report", "encodings", "suite"}
    for words in found:
        shorter = {"train": f"{SHORT} {SMALL}", "evaluate": "--task.pairs_per_cell 1", "suite": "--dry-run"}
        more = shorter.get(words[0], "")
        assert main([*words, *more.split()]) == 0, words
    assert (tmp_path / "runs" / "report.html").is_file()


@pytest.mark.parametrize("page", [page for page in pages_with("```sh\n") if page != "tutorials/train.md"])
def test_commands_parse(site, page, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands(site, page)
    assert found
    for words in found:
        assert words[0] in COMMANDS
        words = ["train", *expand_config(words[1:])] if words[0] == "train" else words
        _parser(words)[0].parse_args(words)


@pytest.mark.parametrize("page", PAGES)
def test_references_are_defined(site, page):
    for name in re.findall(r"\]\[(tape_pe[\w.]*)\]", site.expand((DOCS / page).read_text(encoding="utf-8"), page)):
        words = name.split(".")
        count = next(n for n in range(len(words), 0, -1) if site.module_file(".".join(words[:n])))
        found = importlib.import_module(".".join(words[:count]))
        for word in words[count:]:
            found = getattr(found, word)


def test_code_is_cut_by_what_it_says(site):
    found = site.code_lines("tape_pe.ops.reference.rotate", "a, b", "c, s")
    assert found.text == "a, b = u.chunk(2, dim=-1)\nc, s = state.chunk(2, dim=-1)"
    assert found.path.read_text(encoding="utf-8").splitlines()[found.number - 1].strip() == found.text.splitlines()[0]
    assert found.documented == "tape_pe.ops.reference.rotate"
    assert site.code_lines("tape_pe.ops.contextualize._Update.forward").documented == "tape_pe.ops.contextualize"
    assert site.code_lines("examples/01_add_an_encoding.py:main").text.startswith("def main():")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tape_pe.ops.reference.nothing",), "defines no nothing"),
        (("nowhere.rotate",), "no such module"),
        (("tape_pe.ops.reference",), "a function or class is needed"),
        (("tape_pe.ops.reference.rotate", "not there"), "contains 'not there'"),
        (("tape_pe.ops.reference.rotate", "return", "a, b ="), "contains 'a, b ='"),
    ],
)
def test_what_is_gone_is_an_error(site, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        site.code_lines(*words)


def test_missing_sections_are_errors(site):
    with pytest.raises(ValueError, match="no such section"):
        site.expand('!include README.md "No such heading"', "index.md")
    with pytest.raises(ValueError, match="no such file"):
        site.expand("!include NOWHERE.md", "index.md")


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        ("[a](../results/bench.jsonl)", "docs/performance.md", "performance.md", "[a](repository/results/bench.jsonl)"),
        ("[a](../../configs/debug.yaml)", "docs/t/x.md", "t/x.md", "[a](../repository/configs/debug.yaml)"),
        ("[a](results/README.md#x)", "README.md", "index.md", "[a](results.md#x)"),
        ("[a](docs/performance.md)", "README.md", "t/x.md", "[a](../performance.md)"),
        ("[a](src/tape_pe/ops)", "README.md", "index.md", "[a][tape_pe.ops]"),
        ("[a](src/tape_pe/ops/reference.py)", "README.md", "index.md", "[a][tape_pe.ops.reference]"),
        ("[a](benchmarks)", "README.md", "index.md", "a"),
        ("[a](nowhere.md)", "README.md", "index.md", "[a](nowhere.md)"),
        ("[a](https://example.org/x.md)", "README.md", "index.md", "[a](https://example.org/x.md)"),
        ("[a](#here)", "README.md", "index.md", "[a](#here)"),
    ],
)
def test_links_are_led_to_the_site(site, link, source, page, expected):
    assert site.relink(link, source, page) == expected


def test_the_reference_has_every_public_module(site):
    text = "".join(site.api_pages().values())
    for path in (ROOT / "src" / "tape_pe").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        internal = module == "tape_pe" or "._" in module or module.startswith(site.INTERNAL)
        assert (f"::: {module}\n" in text) != internal, module
    assert "_normalized" not in text
    assert "[`tape_pe.convert`][tape_pe.convert.engine.convert]" in text


def test_pages_fetch_nothing(site):
    own = '<script src="../a.js"></script><link href="style.css"><a href="https://example.org/">'
    assert site.external_resources(own) == []
    for tag in (
        '<script src="https://a.org/x.js">',
        "<link rel=x href=//a.org/x.js>",
        '<img alt="" src="http://a.org/x.js">',
    ):
        assert len(site.external_resources(own + tag)) == 1


def test_formulas_become_mathml(site):
    pytest.importorskip("latex2mathml")
    made = site.formulas(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>')
    assert made.startswith("<p><math")
    assert "arithmatex" not in made
    assert 'display="block"' in site.formulas('<div class="arithmatex">\\[\nz\n\\]</div>')
