"""Builds the site of the documentation: stages ``docs/`` with a reference made from docstrings, then checks the pages.

The staged copy differs from ``docs/`` in its links. A link to a file of the checkout (a test, an example) leads
to a page that shows the file, and a link that names a test leads to the line of the test.
"""

from __future__ import annotations

import ast
import enum
import functools
import html.parser
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

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
WITHOUT_NAVIGATION = "---\nhide:\n  - navigation\n---\n\n"
WIDE_PAGES = {"guarantees.md": WIDE, "formats.md": WITHOUT_NAVIGATION, "logging.md": WITHOUT_NAVIGATION}
LANGUAGES = {".py": "python", ".mjs": "javascript", ".json": "json", ".ipynb": "json"}
WHOLE = ("    options:", "      show_if_no_docstring: true")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_SHORT_CODE = re.compile(r"(?<!`)(`[^`\n]{1,24}`)(?!`)")
_LITERAL = re.compile(r"^ *::\n|(?<=:):$", re.MULTILINE)
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
            self._write(name, WIDE_PAGES.get(name, "") + page.read_text("utf-8"), page)
        for page in (CHECKOUT / name for name in PROJECT_PAGES):
            self._write(self.place_of(page), page.read_text("utf-8"), page)
        for page in RESULTS.glob("*.md"):
            self._write(self.place_of(page), f"{WIDE}{page.read_text('utf-8')}", page)
        for name, text in reference_pages():
            self._write(name, text)
        for path, name in self.sources.items():
            code = path.read_text("utf-8")
            fence = "`" * (3 + max(map(len, re.findall("`+", code)), default=0))
            title = path.relative_to(CHECKOUT).as_posix()
            language = LANGUAGES.get(path.suffix, "text")
            self._write(name, f'# {title}\n\n{fence} {{.{language} linenums="1"}}\n{code}\n{fence}\n')
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
            text = "".join(part if part.startswith("```") else self._prose(part, name, origin) for part in parts)
        target = self.pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    def _prose(self, text: str, name: str, origin: Path) -> str:
        return _SHORT_CODE.sub(unbroken, self._relinked(text, name, origin))

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
                label = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
            relative = os.path.relpath(place, str(PurePosixPath(name).parent)).replace(os.sep, "/")
            return f"[{label}]({relative}{'#' + anchor if anchor else ''})"

        return _LINK.sub(relink, text)


def with_bars(code: re.Match[str]) -> str:
    """Return code of a table's cell with bare bars: GitHub wants them escaped, the generator would show the escape."""
    return code[0].replace("\\|", "|")


def unbroken(code: re.Match[str]) -> str:
    """Return short code with a hyphen with a class: a browser would cut ``--until`` after its hyphens."""
    return f"{code[1]}{{.whole}}" if "-" in code[1] else code[1]


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
        lines = [f"# librmq.{room}", "", *_LITERAL.sub("", module.__doc__ or "").splitlines(), ""]
        for name in module.__all__:
            value = getattr(module, name)
            path = path_of(f"librmq.{room}.{name}", value)
            if callable(value) and value.__doc__:
                rendered.setdefault(id(value), f"{room}.md#{path}")
            lines += [f"::: {path}", *(WHOLE if is_shown_whole(value) else ()), ""]
        yield f"reference/{room}.md", "\n".join(lines)
    yield "reference/librmq.md", "\n".join(names_of_the_top(rendered))


def path_of(path: str, value: object) -> str:
    """Return the path by which the reference finds a value, also if a module has the same one."""
    return path if sys.modules.get(path, value) is value else f"{path}.{path.rpartition('.')[2]}"


def is_shown_whole(value: object) -> bool:
    """Return whether the reference shows members without a docstring too: of settings, of enums, and constants."""
    settings: type = importlib.import_module("librmq.config").Config
    return issubclass(value, (settings, enum.Enum)) if isinstance(value, type) else not callable(value)


def names_of_the_top(rendered: dict[int, str]) -> list[str]:
    """Return the page of the names that ``librmq`` itself exports, each with a link to its description."""
    librmq = importlib.import_module("librmq")
    rows, described = [], []
    for name in librmq.__all__:
        value = getattr(librmq, name)
        first = (getattr(value, "__doc__", None) or "").partition("\n")[0].replace("|", "\\|")
        if id(value) not in rendered:
            described += [f"::: librmq.{name}", *(WHOLE if is_shown_whole(value) else ()), ""]
        rows.append(f"| [`{name}`]({rendered.get(id(value), f'#librmq.{name}')}) | {first} |")
    head = ["# librmq", "", "What applications use: `from librmq import Broker, Producer`.", ""]
    return [*head, "| name | |", "|---|---|", *rows, "", *described]


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
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    wrong, elsewhere = [], set()
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for target in sorted(page.links | page.loads):
            parts = urlsplit(target)
            if parts.scheme in ("data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                elsewhere.add(target)
                if target in page.loads:
                    wrong.append(f"{name}: a browser would load {target}: bundle it")
                continue
            other = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
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
    wrong, elsewhere = check(target)
    for fault in wrong:
        print(fault)
    print(f"{sum(1 for _ in target.rglob('*.html'))} pages in {target}; {len(elsewhere)} links to elsewhere:")
    for link in elsewhere:
        print(f"  {link}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).absolute()))
