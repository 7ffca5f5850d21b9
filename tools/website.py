"""Builds the site of the documentation: stages ``docs/`` with a reference made from docstrings, then checks the pages.

The staged copy differs from ``docs/`` in its links. A link to a file of the checkout (a test, an example) leads
to a page that shows the file, and a link that names a test leads to the line of the test. The built pages say where
their lines may break: long names in tables at their dots and underscores, options and quantities nowhere.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import html.parser
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import generated

CHECKOUT = Path(__file__).resolve().parent.parent
DOCS = CHECKOUT / "docs"
CONFIG = CHECKOUT / "mkdocs.yml"
RESULTS = CHECKOUT / "benchmarks" / "results"
PROJECT_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
ROOMS = (
    *("store", "broker", "client", "consumer", "cluster", "listener", "dedup", "idempotence", "delay", "txn"),
    *("filter", "columns", "spark", "diagnosis", "testing", "metrics", "runtime", "clock", "config", "message"),
    *("commitlog", "consumequeue", "files", "errors"),
)
"""Packages with a page in the reference."""
WIDE = "---\nhide:\n  - navigation\n  - toc\n---\n\n"
"""What leaves the width of the window to a page of wide tables."""
WIDE_PAGES = {"guarantees.md"}
LANGUAGES = {".py": "python", ".mjs": "javascript", ".json": "json", ".ipynb": "json"}
FEW = 4
"""A package with more names, or a class with more methods, gets an overview; a wider table names cells."""
TABLE = ("| name | what it is |", "|---|---|")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_MARKUP = re.compile(r"(<(?:script|style|title|pre|svg)\b.*?</(?:script|style|title|pre|svg)>|<[^>]*>)", re.DOTALL)
_OPENED = re.compile(r"<(/?)(code|td|th)\b")
_JOINT = re.compile(r"(?<=[A-Za-z0-9)}\]])(?!\.[a-z]{1,4}$)(?:[._,=(](?=[A-Za-z{%&\"'])|/(?=\w))|(?<=[a-z])(?=[A-Z])")
_BLANK_BEFORE_BRACKET = re.compile(r"(?<=</code>)\s+(?=\)\s)")
"""What the generator leaves after the default of an argument."""
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_WHOLE = re.compile(r"(?<!\S)--[a-z][a-z-]*|\d[\d.,]*–[\d.,]*\d")
"""An option, or a range of numbers."""
_QUANTITY = re.compile(r"(?<=\d) (?=(?:ns|µs|ms|s|min|h|%|KiB|MiB|GiB|kB|MB|GB)(?!\w))")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The head of a page that the search leaves out: code that other pages link to."""
_CONSTANT = re.compile(r'^(\w+)\b.*\n(?:[ )}\]].*\n)*"""(.*?)(?:"""|$)', re.MULTILINE)
"""A statement of a module that a text follows."""
_LITERAL = re.compile(r"^ *::\n|(?<=:):$", re.MULTILINE)
_PAGE = re.compile(r"``(docs/\S+\.md)``")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


class Stage:
    """A folder with the pages of the site, as the generator reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = folder / "docs"
        self.sources: dict[Path, str] = {}
        """Files of the checkout that pages link to, and their pages."""

    def fill(self) -> None:
        """Write all pages and the generator's settings."""
        shutil.copytree(DOCS, self.pages)
        for page in sorted(DOCS.rglob("*.md")):
            name = page.relative_to(DOCS).as_posix()
            self._write(name, (WIDE if name in WIDE_PAGES else "") + generated.fill(page.read_text("utf-8")), page)
        for page in (CHECKOUT / name for name in PROJECT_PAGES):
            self._write(self.place_of(page), with_bare_versions(page.read_text("utf-8")), page)
        for page in RESULTS.glob("*.md"):
            self._write(self.place_of(page), f"{WIDE}{page.read_text('utf-8')}", page)
        for name, text in reference_pages():
            self._write(name, text)
        for path, name in self.sources.items():
            code = path.read_text("utf-8")
            fence = "`" * (3 + max(map(len, re.findall("`+", code)), default=0))
            title = path.relative_to(CHECKOUT).as_posix()
            language = LANGUAGES.get(path.suffix, "text")
            text = f'# {title}\n\n{fence} {{.{language} linenums="1"}}\n{code}\n{fence}\n'
            self._write(name, f"{UNSEARCHED}{text}")
        packages = Path(str(importlib.import_module("librmq").__file__)).parent.parent
        settings = CONFIG.read_text("utf-8").replace("[PACKAGES]", f"[{str(packages)!r}]")
        settings = settings.replace("TOOLS/", f"{Path(__file__).parent.as_posix()}/")
        (self.folder / "mkdocs.yml").write_text(settings, "utf-8")

    def place_of(self, path: Path) -> str:
        """Return the page in the site that shows a file of the checkout.

        Raises:
            FileNotFoundError: There is no such file, so a link to it is broken.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: a page links to it, and it is not a file")
        if path.is_relative_to(DOCS):
            return path.relative_to(DOCS).as_posix()
        inside = path.relative_to(CHECKOUT)
        if inside.name in PROJECT_PAGES:
            return f"project/{inside.stem.lower()}.md"
        if path.parent == RESULTS:
            return f"performance/{path.name}"
        return self.sources.setdefault(path, f"source/{inside.as_posix()}.md")

    def _write(self, name: str, text: str, origin: Path | None = None) -> None:
        if origin is not None:
            parts = _FENCE.split(_ROW.sub(lambda row: _CODE.sub(with_bars, row[0]), text))
            text = "".join(part if part.startswith("```") else self._relinked(part, name, origin) for part in parts)
        target = self.pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    def _relinked(self, text: str, name: str, origin: Path) -> str:
        def relink(found: re.Match[str]) -> str:
            label, target = found[1], found[2]
            file, _, anchor = target.partition("#")
            if "://" in target or not file:
                return found[0]
            path = Path(os.path.normpath(origin.parent / file))
            place = self.place_of(path)
            if place.startswith("source/") and (line := definitions(path).get(label.strip("`"))):
                anchor = f"__codelineno-0-{line}"
            if label.endswith(".md"):  # where the page's name stands for it, the site shows its title
                label = title_of(path)
            relative = os.path.relpath(place, str(PurePosixPath(name).parent)).replace(os.sep, "/")
            return f"[{label}]({relative}{'#' + anchor if anchor else ''})"

        return _LINK.sub(relink, text)


def with_bars(code: re.Match[str]) -> str:
    """Return code of a table's cell with bare bars: GitHub wants them escaped, the generator would show the escape."""
    return code[0].replace("\\|", "|")


def with_bare_versions(text: str) -> str:
    """Return a changelog without the brackets of its versions, and without the heading of an empty section."""
    return re.sub(r"^## \[(.+?)\]", r"## \1", re.sub(r"^## \[Unreleased\]\s+(?=## )", "", text, flags=re.M), flags=re.M)


def with_headings(page: str) -> str:
    """Return HTML in which each cell of a table of many columns names its column.

    Where such a table is too wide, the style sheet shows each row as a list.
    """

    def name_cells(table: re.Match[str]) -> str:
        headings = [re.sub("<[^>]*>", "", heading).replace('"', "&quot;") for heading in _HEADING.findall(table[0])]
        if len(headings) <= FEW:
            return table[0]
        names = itertools.cycle(headings)
        cells = re.sub(r"<td\b", lambda cell: f'{cell[0]} data-heading="{next(names)}"', table[0])
        return cells.replace("<table>", f'<table data-columns="{len(headings)}">')

    return _TABLE.sub(name_cells, page)


def with_breaks(page: str) -> str:
    """Return HTML that says where lines may break.

    A browser would cut ``--until`` after its hyphens, ``1–2`` after its dash, ``20 s`` at its space, and a long name
    in a narrow cell anywhere.
    """
    inside: set[str] = set()
    parts = _MARKUP.split(_BLANK_BEFORE_BRACKET.sub("", page))
    for place, part in enumerate(parts):
        if tag := _OPENED.match(part):
            (inside.discard if tag[1] else inside.add)("code" if tag[2] == "code" else "cell")
        elif not part.startswith("<") and "code" not in inside:
            part = _WHOLE.sub(r'<span class="whole">\g<0></span>', part)
            parts[place] = _QUANTITY.sub("\N{NO-BREAK SPACE}", part)
        elif not part.startswith("<"):
            parts[place] = re.sub(r"\S+", lambda word: breakable(word[0], "cell" in inside), part)
    return "".join(parts)


def breakable(word: str, in_cell: bool) -> str:
    """Return a word of code as HTML: whole if it is short and has a hyphen, a long name with breaks at its joints.

    In a cell, a word that can break is marked: where there is room, the style sheet keeps it whole, or lets a long one
    break only if it is wider than the cell.
    """
    if "-" in word and len(word) <= (16 if in_cell else 24):
        return f'<span class="whole">{word}</span>'
    if len(word) <= (12 if in_cell else 36):
        return word
    broken = _JOINT.sub(r"\g<0><wbr>", word)
    if not in_cell or (broken == word and "-" not in word):
        return broken
    return f'<span class="{"name" if len(word) <= 29 else "long"}">{broken}</span>'


@functools.cache
def definitions(path: Path) -> dict[str, int]:
    """Return the names of the functions and classes of a Python file, each with its line."""
    if path.suffix != ".py":
        return {}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name: node.lineno for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)}


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each page of the reference, from the names that packages export."""
    rendered: dict[int, str] = {}
    for room in ROOMS:
        module = importlib.import_module(f"librmq.{room}")
        text = _PAGE.sub(page_link, _LITERAL.sub("", module.__doc__ or ""))
        lines = [f"# librmq.{room}", "", *text.splitlines(), ""]
        lines += overview(module) if len(module.__all__) > FEW and room != "errors" else ()  # errors have a tree
        for name in module.__all__:
            value, path = exported(module, name), path_of(f"librmq.{room}.{name}")
            if callable(value) and value.__doc__:
                rendered.setdefault(id(value), f"{room}.md#{path}")
            lines += [f"::: {path}", *options_of(value), ""]
        yield f"reference/{room}.md", "\n".join(lines)
    yield "reference/librmq.md", "\n".join(names_of_the_top(rendered))


def title_of(page: Path) -> str:
    """Return the heading of a page."""
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


def page_link(found: re.Match[str]) -> str:
    """Return the link of a page of the reference to a page that a docstring names by its file."""
    return f"[{title_of(CHECKOUT / found[1])}](../{found[1].removeprefix('docs/')})"


def exported(module: ModuleType, name: str) -> Any:  # noqa: ANN401 of any type
    """Return what a package exports by a name."""
    value = getattr(module, name)
    # A module of that name can stand for it, if its import came before the first use of the lazy name.
    return getattr(value, name) if isinstance(value, ModuleType) else value


def path_of(path: str) -> str:
    """Return the path by which the reference finds a value, also if a module has the same one."""
    return f"{path}.{path.rpartition('.')[2]}" if path in sys.modules else path


def options_of(value: object) -> list[str]:
    """Return the lines with the options by which the reference shows a value."""
    members = vars(value).items() if isinstance(value, type) else ()
    methods = [name for name, member in members if name[0] != "_" and callable(getattr(member, "__func__", member))]
    lines = ["show_if_no_docstring: true"] if is_shown_whole(value) else []
    lines += ["summary: true"] if len(methods) > FEW else []
    return ["    options:", *(f"      {line}" for line in lines)] if lines else []


def is_shown_whole(value: object) -> bool:
    """Return whether the reference shows members without a docstring too: of settings, of enums, and constants."""
    if not isinstance(value, type):
        return not callable(value)
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields") or issubclass(value, enum.Enum)


def names_of_the_top(rendered: dict[int, str]) -> list[str]:
    """Return the page of the names that ``librmq`` itself exports, each with a link to its description."""
    librmq = importlib.import_module("librmq")
    rows, described = [], []
    for name in librmq.__all__:
        value = getattr(librmq, name)
        if id(value) not in rendered:
            described += [f"::: librmq.{name}", *options_of(value), ""]
        rows.append(row_of(name, rendered.get(id(value), f"#librmq.{name}"), value.__doc__))
    head = ["# librmq", "", "What applications use: `from librmq import Broker, Producer`.", ""]
    return [*head, *TABLE, *rows, "", *described]


def overview(module: ModuleType) -> list[str]:
    """Return a table of the names that a package exports, each with a link to its description on the same page."""
    room = CHECKOUT / "librmq" / module.__name__.rpartition(".")[2]
    sources = sorted([*room.parent.glob(f"{room.name}*.py"), *room.rglob("*.py")])
    texts = dict(_CONSTANT.findall("\n".join(path.read_text("utf-8") for path in sources)))
    rows = []
    for name in module.__all__:
        text = texts.get(name) or exported(module, name).__doc__
        rows.append(row_of(name, f"#{path_of(f'{module.__name__}.{name}')}", text))
    return [*TABLE, *rows, ""]


def row_of(name: str, link: str, text: str | None) -> str:
    """Return a row of an overview: a name, and the first line of its text."""
    first = (text or "").partition("\n")[0]
    return f"| [`{name}`]({link}) | {first} |"


class Page(html.parser.HTMLParser):
    """The anchors of a page, its links, and what a browser would load for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag defines and refers to."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("a", "area") and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and "href" in values and values.get("rel") != "canonical":
            self.loads.add(values["href"])
        elif "src" in values:
            self.loads.add(values["src"])
        if "mermaid" in values.get("class", "").split():
            self.loads.add("https://unpkg.com/mermaid")  # the theme would load it from there


def check(site: Path) -> tuple[list[str], list[str]]:
    """Return what is wrong with the pages of a site, and its links to elsewhere."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    wrong, elsewhere = [], set()
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        # A server sends 404.html for addresses of any depth, so its links begin at the root.
        root, folder = (site, site / "any") if name == "404.html" else (Path("/"), path.parent)
        for target in sorted(page.links | page.loads):
            parts = urlsplit(target)
            if parts.scheme in ("data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                elsewhere.add(target)
                if target in page.loads:
                    wrong.append(f"{name}: a browser would load {target}: bundle it")
                continue
            link = unquote(parts.path)
            other = Path(os.path.normpath(root / link[1:] if link[:1] == "/" else folder / link)) if link else path
            other = other / "index.html" if other.is_dir() else other
            if not other.is_file():
                wrong.append(f"{name}: there is no {target}")
            elif parts.fragment and other in pages and unquote(parts.fragment) not in pages[other].anchors:
                wrong.append(f"{name}: {target} names a heading that is not there")
    for sheet in site.rglob("*.css"):
        wrong += [
            f"{sheet.relative_to(site)}: a browser would load {found}: bundle it"
            for found in re.findall(r"(?:url\(|@import )[\"']?(https?://[^\"')]+)", sheet.read_text("utf-8"))
        ]
    return wrong, sorted(elsewhere)


def build(target: Path) -> int:
    """Build the site in ``target``, which is replaced; print what is wrong; return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        stage = Stage(Path(scratch))
        stage.fill()
        command = [sys.executable, "-P", "-m", "zensical", "build", "--strict"]
        done = subprocess.run(
            command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        if done.returncode:
            print(done.stdout)
            return 1
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(scratch) / "site", target)
    for page in target.rglob("*.html"):
        page.write_text(with_breaks(with_headings(page.read_text("utf-8"))), "utf-8")
    wrong, elsewhere = check(target)
    for fault in wrong:
        print(fault)
    print(f"{sum(1 for _ in target.rglob('*.html'))} pages in {target}; {len(elsewhere)} links to elsewhere:")
    for link in elsewhere:
        print(f"  {link}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).absolute()))
