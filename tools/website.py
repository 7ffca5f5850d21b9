"""The site: the pages of ``docs/`` with the tables that come from the code, and further pages.

``python tools/website.py site`` writes the pages into a folder and builds them by Zensical. MkDocs reads the same
configuration, and has this module as its hook. A link to a file of the checkout (a test, an example) leads to a page
that shows the file.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import generated
from librmq.errors import MissingExtraError

CHECKOUT = Path(__file__).resolve().parent.parent
DOCS = CHECKOUT / "docs"
PROJECT_PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
WIDTH = 96
"""Columns of code that fit into a window of 1,280 pixels."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The head of a page that the search leaves out: code that other pages link to."""
LANGUAGES = {".py": "python", ".mjs": "javascript", ".json": "json", ".ipynb": "json"}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+\.\w+|LICENSE)((?:#[^)\s]*)?)\)")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_TEST = re.compile(r"\[`(test_\w+)`\]\(")
"""The name of a test, which may be broken after its underscores."""
_VERSION = re.compile(r"^## \[(.+?)\]", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the site its pages."""
    for name, text in pages().items():
        if (file := files.get_file_from_path(name)) is not None:
            files.remove(file)
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the text of each page by its name in the site."""
    origins = [*DOCS.rglob("*.md"), *(CHECKOUT / name for name in PROJECT_PAGES)]
    origins += (CHECKOUT / "benchmarks" / "results").glob("*.md")
    names = {path: place_of(path) for path in origins}
    texts = {}
    sources: dict[Path, str] = {}
    for path, name in names.items():
        text = _VERSION.sub(r"## \1", generated.fill(path.read_text("utf-8")))  # a changelog's
        parts = (
            shrunk(part) if part.startswith("```") else relinked(part, path, name, sources)
            for part in _FENCE.split(text)
        )  # fmt: skip
        texts[name] = "".join(parts)
    for path, name in sources.items():
        if path not in names:
            texts[name] = (
                f"# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}\n````\n"
            )
    return {**texts, **dict(reference()), "llms.txt": generated.llms()}


def place_of(path: Path) -> str:
    """Return the name of the page that shows a file of the checkout."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path.name in PROJECT_PAGES:
        return f"project/{path.stem.lower()}.md"
    return f"source/{path.relative_to(CHECKOUT).as_posix().removesuffix('.md')}.md"


def shrunk(block: str) -> str:
    """Return a block of code; a drawing that is wider than the page gets smaller letters."""
    is_wide = block.startswith("```text") and max(map(len, block.splitlines())) > WIDTH
    return f'<div class="drawing" markdown>\n\n{block}\n\n</div>' if is_wide else block


def relinked(text: str, origin: Path, name: str, sources: dict[Path, str]) -> str:
    """Return text of a page whose links lead to pages of the site; those of other files go to ``sources``."""

    def relink(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(origin.parent / link[1]))
        if "://" in link[1] or not path.is_file():
            return link[0]
        place = place_of(path)
        if not path.is_relative_to(DOCS):
            sources[path] = place
        return f"]({os.path.relpath(place, PurePosixPath(name).parent)}{link[2]})"

    # GitHub wants bars in the code of a table escaped, and MkDocs would show the escape.
    bare = _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)
    return _TEST.sub(lambda name: f"[<code>{name[1].replace('_', '&#95;<wbr>')}</code>](", _LINK.sub(relink, bare))


def reference() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each page of the reference: what a package exports, described by mkdocstrings.

    The page of librmq itself describes only what no package exports, and has links to the others.
    """
    names = re.findall(r"reference/(\w+)\.md", (CHECKOUT / "mkdocs.yml").read_text("utf-8"))
    modules = {name: importlib.import_module("librmq" if name == "librmq" else f"librmq.{name}") for name in names}
    top = modules.pop("librmq")
    described: set[int] = set()
    for name, module in modules.items():
        described |= {id(export) for export in exports_of(module)}
        yield f"reference/{name}.md", page(module.__name__, module.__all__)
    exports = {name: getattr(top, name) for name in top.__all__}
    links = [
        f"- [`{name}`][{f'{value.__module__}.{name}' if id(value) in described else f'librmq.{name}'}]"
        for name, value in exports.items()
    ]
    own = [name for name, value in exports.items() if id(value) not in described]
    yield "reference/librmq.md", "\n".join([page("librmq", own), "## All names", "", *links, ""])


def exports_of(module: ModuleType) -> Iterator[object]:
    """Yield what a package exports, but for what takes a missing extra: mkdocstrings reads its source alone."""
    for name in module.__all__:
        with suppress(MissingExtraError):
            yield getattr(module, name)


def page(module: str, names: list[str]) -> str:
    """Return a page that describes names of a package."""
    return f"# {module}\n\n::: {module}\n    options:\n      members: [{', '.join(names)}]\n"


def write(folder: Path) -> None:
    """Write the site's pages, pictures and configuration into an empty folder, from which Zensical builds it."""
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.md"))
    for name, text in pages().items():
        path = folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    settings = (CHECKOUT / "mkdocs.yml").read_text("utf-8").replace("hooks: [tools/website.py]\n", "")
    (folder / "mkdocs.yml").write_text(settings.replace("paths: [.]", f"paths: [{CHECKOUT}]"), "utf-8")


def main() -> int:
    """Build the site in the folder that the command line names; return the exit status."""
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder)
        status = subprocess.call([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder)
        if not status:
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(folder / "site", target)
    return status


if __name__ == "__main__":
    sys.exit(main())
