"""What MkDocs cannot do for the documentation by itself: code beside equations, formulas, and files of the repository.

MkDocs calls the functions `on_...` (`hooks:` in mkdocs.yml). A line of its own in a page is replaced if it is

    !code tape_pe.ops.reference.rotate "a, b = " "return"

by the lines of that function from the first after its docstring that contains the one text to the next that contains
the other, with their numbers; without the texts by the whole definition. `!code examples/FILE.py:main` does so for
other files. A name or a text that is gone is an error, so nothing shown here can be stale.

    !include README.md "In Python"

is replaced by that section of a file, without its heading; without a heading by the whole file, and by a block of code
unless it is Markdown.
"""

from __future__ import annotations

import ast
import html
import itertools
import json
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
PACKAGE = SOURCES / "tape_pe"
SERVED = ("configs/*.yaml", "examples/*.py", "experiments/*.py", "results/*.jsonl")
"""Files of the repository that pages may link to; they are copied to `repository/` in the site."""

INTERNAL = ("tape_pe.cli.", "tape_pe.ops.backends.triton.")
"""Modules that the reference leaves out: the commands explain themselves, and kernels have no Python signatures."""

_DIRECTIVE = re.compile(r'^!(code|include) (\S+)((?: "[^"\n]*")*)$', re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


# --- pages ---------------------------------------------------------------------------------------------------------


def module_file(name: str) -> Path | None:
    """The file of a module of the package, if there is such a module."""
    path = SOURCES.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


class Lines(NamedTuple):
    """Lines of a definition.

    Attributes:
        path: its file.
        number: of the first line.
        text: the lines.
        documented: the innermost definition around them, or else the module, that the reference has; `None` outside the
            package.
    """

    path: Path
    number: int
    text: str
    documented: str | None


def code_lines(symbol: str, first: str | None = None, last: str | None = None) -> Lines:
    """Lines of a definition.

    Args:
        symbol: where a function or class is defined, such as `tape_pe.ops.reference.rotate` or `examples/FILE.py:main`.
        first: what the first line, below the docstring, contains; default: from the beginning of the definition.
        last: what the last line contains, which may be the first; default: to the end of the definition.

    Raises:
        ValueError: there is no such definition, or no such line in it.
    """
    path, names, documented = _split(symbol)
    text = path.read_text(encoding="utf-8")
    body: Any = ast.parse(text).body
    node, module = None, documented
    for depth, name in enumerate(names, start=1):
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if node is None:
            raise ValueError(f"symbol={symbol!r}: {path} defines no {name}")
        body = node.body
        if module and ast.get_docstring(node) and not any(part.startswith("_") for part in names[:depth]):
            documented = ".".join([module, *names[:depth]])
    if node is None:
        raise ValueError(f"symbol={symbol!r}: a function or class is needed, this is a module")
    start, end = node.lineno, node.end_lineno
    lines = text.splitlines()
    if first is not None:
        start = body[0].end_lineno + 1 if ast.get_docstring(node) else start
        start = _line_with(first, lines, start, end, symbol)
    if last is not None:
        end = _line_with(last, lines, start, end, symbol)
    return Lines(path, start, textwrap.dedent("\n".join(lines[start - 1 : end])), documented)


def _split(symbol: str) -> tuple[Path, list[str], str | None]:
    """The file of a symbol, its names in there, and the module if the package has it."""
    file, colon, name = symbol.partition(":")
    if colon:
        return ROOT / file, name.split("."), None
    words = symbol.split(".")
    for count in range(len(words), 0, -1):
        module = ".".join(words[:count])
        if (path := module_file(module)) is not None:
            return path, words[count:], module
    raise ValueError(f"symbol={symbol!r}: there is no such module")


def _line_with(text: str, lines: list[str], start: int, end: int, symbol: str) -> int:
    for number in range(start, end + 1):
        if text in lines[number - 1]:
            return number
    raise ValueError(f"symbol={symbol!r}: no line from {start} to {end} contains {text!r}")


def section(path: Path, heading: str | None = None) -> str:
    """The text of a Markdown file below a heading of level 2, or all of it.

    Raises:
        ValueError: there is no such file or heading.
    """
    if not path.is_file():
        raise ValueError(f"path={path}: there is no such file")
    text = path.read_text(encoding="utf-8")
    if heading is None:
        return text
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"heading={heading!r}: {path} has no such section")
    return found[1].strip()


def expand(markdown: str, page: str) -> str:
    """A page with its directives carried out, and links to files of the repository led to where the site has them.

    Args:
        markdown: the text of the page.
        page: its path in `docs/`.
    """
    markdown = relink(markdown, "docs/" + page, page)

    def replaced(match: re.Match[str]) -> str:
        words = re.findall(r'"([^"]*)"', match[3])
        if match[1] == "include":
            text = section(ROOT / match[2], *words)
            kind = Path(match[2]).suffix.removeprefix(".")
            return relink(text, match[2], page) if kind == "md" else f"```{kind}\n{text.strip()}\n```"
        path, number, text, documented = code_lines(match[2], *words)
        title = f"{path.relative_to(ROOT).as_posix()}, line {number}"
        link = f"[`{match[2].removeprefix('tape_pe.')}`][{documented}]{{ .source }}" if documented else ""
        return f'``` {{ .python title="{title}" linenums="{number}" }}\n{text}\n```\n\n{link}'

    return _DIRECTIVE.sub(replaced, markdown)


def relink(markdown: str, source: str, page: str) -> str:
    """Relative links of a file of the repository, `source`, as they have to be in a page of `docs/`.

    What the site does not have becomes text. Links to what does not exist stay, and MkDocs refuses them.
    """
    modules = {module for names in api_modules() for module in names}
    served = {path.relative_to(ROOT).as_posix() for pattern in SERVED for path in ROOT.glob(pattern)}

    def replaced(match: re.Match[str]) -> str:
        label, (target, mark, anchor) = match[1], match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path.startswith("docs/"):
            where = path.removeprefix("docs/")
        elif path == "results/README.md":
            where = "results.md"
        elif path in served:
            where = "repository/" + path
        elif (module := path.removeprefix("src/").removesuffix(".py").replace("/", ".")) in modules:
            return f"[{label}][{module}]"
        else:
            return label if (ROOT / path).exists() else match[0]
        return f"[{label}]({posixpath.relpath(where, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return _LINK.sub(replaced, markdown)


def formulas(page: str) -> str:
    """HTML whose formulas, as `pymdownx.arithmatex` leaves them, are MathML, which browsers draw without scripts."""
    from latex2mathml.converter import convert

    def replaced(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        made = convert(html.unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{made}</div>' if display == "block" else made

    return _FORMULA.sub(replaced, page)


# --- the reference of the API --------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """The pages of the reference, one per public package or module below `tape_pe`, path to text."""
    pages = {}
    rows = []
    for modules in api_modules():
        name = modules[0].removeprefix("tape_pe.")
        summary = first_sentence(modules[0])
        pages[f"api/{name}.md"] = f"# tape_pe.{name}\n\n" + "\n".join(map(reference, modules))
        rows.append(f"| [`tape_pe.{name}`]({name}.md) | {summary} |")
    top = "\n".join(f"* [`tape_pe.{name}`][{symbol}]" for name, symbol in exported().items())
    table = "\n".join(["| package | |", "|---|---|", *rows])
    pages["api/index.md"] = f"# API reference\n\nWhat `import tape_pe` gives:\n\n{top}\n\n## Packages\n\n{table}\n"
    return dict(sorted(pages.items()))


def api_modules() -> list[list[str]]:
    """The public modules below `tape_pe`, a list for each page of the reference."""
    found = [path for path in sorted(PACKAGE.iterdir()) if not path.name.startswith("_")]
    names = [path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()]
    return [public_modules(f"tape_pe.{name}") for name in names]


def reference(module: str) -> str:
    """The directive that documents what a module itself defines; what it imports is documented where it is defined."""
    path = module_file(module)
    assert path is not None
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node, after in itertools.pairwise(body):  # values count if a string after them explains them
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names.append(getattr(target, "id", "_"))
    public = [name for name in names if not name.startswith("_")]
    return f"::: {module}\n    options:\n      members: {json.dumps(public)}\n"


def public_modules(name: str) -> list[str]:
    """A package and its modules, without internal ones."""
    folder = SOURCES.joinpath(*name.split("."))
    if not folder.is_dir():
        return [name]
    inner = [path for path in sorted(folder.iterdir()) if not path.name.startswith("_")]
    if f"{name}." in INTERNAL:
        inner = []
    found = [path.stem for path in inner if path.suffix == ".py" or (path / "__init__.py").is_file()]
    return [name, *(module for child in found for module in public_modules(f"{name}.{child}"))]


def first_sentence(module: str) -> str:
    """How the docstring of a module begins."""
    path = module_file(module)
    assert path is not None
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", doc.partition("\n\n")[0].replace("\n", " "))[0].replace("|", r"\|")


def exported() -> dict[str, str]:
    """The public names of `tape_pe` itself, and where each is defined."""
    return {name: defined_at("tape_pe", name) for name in imports("tape_pe")}


def defined_at(module: str, name: str) -> str:
    """The full name of a definition that `module` imports, perhaps by way of other packages."""
    source = imports(module).get(name)
    return f"{module}.{name}" if source is None else defined_at(source, name)


def imports(module: str) -> dict[str, str]:
    """What a module imports from this package: name to module."""
    path = module_file(module)
    assert path is not None
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").startswith("tape_pe")]
    return {alias.name: str(node.module) for node in ours for alias in node.names}


# --- what MkDocs calls ---------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Puts the reference into the navigation."""
    names = [path for path in api_pages() if path != "api/index.md"]
    config.nav.append({"API reference": [{"Overview": "api/index.md"}, *({Path(p).stem: p} for p in names)]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the reference, and the files that pages link to."""
    from mkdocs.structure.files import File

    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for pattern in SERVED:
        for path in sorted(ROOT.glob(pattern)):
            uri = "repository/" + path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """See `expand`."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    try:
        return expand(markdown, page.file.src_uri)
    except ValueError as error:
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri}: {error}") from error


def external_resources(page: str) -> list[str]:
    """What an HTML page would fetch from elsewhere when it is opened; links to follow do not count."""
    tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page)
    found = [re.search(r'\b(?:src|href)=["\']?((?:https?:)?//[^"\'\s>]+)', tag) for tag in tags]
    return [match[1] for match in found if match]


def on_post_build(config: Any) -> None:
    """Refuses a site that does not work without a network."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := external_resources(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path}: fetches {', '.join(found)}")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """See `formulas`."""
    return formulas(html)
