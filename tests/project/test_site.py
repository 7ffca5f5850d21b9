"""The site of the documentation: every page has a place in it, and its check finds what is broken."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import librmq
from librmq.config import Config
from librmq.consumer import TrackType
from librmq.store import GetStatus
from tests.reference import CHECKOUT


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("website")


def navigation() -> list[str]:
    text = (CHECKOUT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    return re.findall(r"- (?:.*: )?(\S+\.md)$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_once(website: ModuleType) -> None:
    pages = {page.relative_to(CHECKOUT / "docs").as_posix() for page in (CHECKOUT / "docs").rglob("*.md")}
    pages |= {f"project/{Path(name).stem.lower()}.md" for name in website.PROJECT_PAGES}
    pages |= {f"reference/{room}.md" for room in ("librmq", *website.ROOMS)}
    assert sorted(navigation()) == sorted(pages)


def test_the_reference_describes_what_is_exported(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    assert "::: librmq.store.MessageStore" in pages["reference/store.md"]
    assert "| [`Broker`](broker.md#librmq.broker.Broker) |" in pages["reference/librmq.md"]
    assert [name for name in vars(librmq)["__all__"] if f"[`{name}`]" not in pages["reference/librmq.md"]] == []


def test_a_function_in_a_module_of_its_name_is_shown(website: ModuleType) -> None:
    lines = dict(website.reference_pages())["reference/spark.md"].splitlines()
    assert "::: librmq.spark.session.session" in lines
    assert "::: librmq.spark.session" not in lines


def subclasses(of: type) -> set[type]:
    below: set[type] = set(of.__subclasses__())
    return {of}.union(*map(subclasses, below))


def test_the_reference_shows_every_name_and_setting(website: ModuleType) -> None:
    """Settings of classes that no package exports are keywords, and stand on a page."""
    lines = "\n".join(text for _, text in website.reference_pages()).splitlines()
    shown = {line.removeprefix("::: ") for line in lines if line.startswith("::: ")}
    rooms = [importlib.import_module(f"librmq.{room}") for room in website.ROOMS]
    paths = {website.path_of(f"{room.__name__}.{name}", getattr(room, name)) for room in rooms for name in room.__all__}
    assert paths <= shown
    whole = lines[lines.index("::: librmq.config.StoreConfig") + 1 :][:2]
    assert whole == ["    options:", "      show_if_no_docstring: true"]
    exported = {name for room in rooms for name in room.__all__}
    pages = " ".join(page.read_text("utf-8") for page in (CHECKOUT / "docs").rglob("*.md"))
    private = [each for each in subclasses(Config) if each.__name__ not in exported | {"NamedConfig"}]
    fields = {name for each in private if each.__module__.startswith("librmq.") for name in each.__annotations__}
    assert sorted(name for name in fields if name not in pages) == []


def undescribed(kind: type) -> list[str]:
    """Return the settings or members in a class's body that no docstring follows."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = []
    for node, following in itertools.zip_longest(body.body, body.body[1:]):
        names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if names and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            found += [f"{kind.__name__}.{ast.unparse(name)}" for name in names]
    return found


def test_the_reference_says_what_each_setting_and_status_means(website: ModuleType) -> None:
    rooms = [importlib.import_module(f"librmq.{room}") for room in website.ROOMS]
    exported = [getattr(room, name) for room in rooms for name in room.__all__]
    settings = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, Config)}
    kinds: list[type] = [*settings, GetStatus, TrackType]
    assert [name for kind in kinds for name in undescribed(kind) if "__" not in name] == []


def test_members_of_enums_are_shown_with_the_names_of_librmq(website: ModuleType) -> None:
    (text,) = (text for name, text in website.reference_pages() if name == "reference/librmq.md")
    assert "::: librmq.ConsumeFrom\n    options:\n      show_if_no_docstring: true" in text


def test_docstrings_become_markdown(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    assert [name for name, text in pages.items() if re.search(r"^ *::$|::$", text, re.MULTILINE)] == []


def test_nested_lists_are_nested_on_the_site(website: ModuleType) -> None:
    """The generator nests what is indented by four spaces; GitHub nests it by two as well."""
    pages = [*(CHECKOUT / "docs").rglob("*.md"), *(CHECKOUT / name for name in website.PROJECT_PAGES)]
    texts = {path.name: re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S) for path in pages}
    assert {name for name, text in texts.items() if re.search(r"^ {1,3}(?:[-*]|\d+\.) ", text, re.MULTILINE)} == set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("with `--until` and `a`", "with `--until`{.whole} and `a`"),
        ("`librmq lag --every 10s --format jsonl`", "`librmq lag --every 10s --format jsonl`"),
        ("```console\n`a-b`\n```\n", "```console\n`a-b`\n```\n"),
    ],
)
def test_short_options_are_not_cut_at_the_end_of_a_line(
    website: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    docs = tmp_path / "from"
    docs.mkdir()
    (docs / "index.md").write_text(text, "utf-8")
    monkeypatch.setattr(website, "DOCS", docs)
    website.Stage(tmp_path / "to").fill()
    assert (tmp_path / "to" / "docs" / "index.md").read_text("utf-8") == shown


def test_bars_in_code_of_tables_are_bare(website: ModuleType, tmp_path: Path) -> None:
    website.Stage(tmp_path).fill()
    text = (tmp_path / "docs" / "from" / "java.md").read_text("utf-8")
    assert '`subscribe(topic, "a || b")`' in text
    assert "\\|" not in text


@pytest.mark.thorough
def test_links_to_tests_lead_to_their_lines(website: ModuleType, tmp_path: Path) -> None:
    stage = website.Stage(tmp_path)
    stage.fill()
    text = (tmp_path / "docs" / "guarantees.md").read_text("utf-8")
    found = re.search(r"\(source/tests/crash/test_kill\.py\.md#__codelineno-0-(\d+)\)", text)
    assert found is not None
    page = (tmp_path / "docs" / "source" / "tests" / "crash" / "test_kill.py.md").read_text("utf-8")
    assert "def test_" in page.partition("\n```")[2].splitlines()[int(found[1])]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html">x</a>', "there is no other.html"),
        ('<a href="#nowhere">x</a>', "#nowhere names a heading that is not there"),
        ('<img src="https://example.org/x.svg">', "a browser would load https://example.org/x.svg"),
        ('<script src="//example.org/x.js"></script>', "a browser would load //example.org/x.js"),
        ('<pre class="mermaid">x</pre>', "a browser would load https://unpkg.com/mermaid"),
    ],
)
def test_a_broken_page_is_found(website: ModuleType, tmp_path: Path, body: str, fault: str) -> None:
    (tmp_path / "index.html").write_text(f'<a href="#here" id="here">{body}</a>', "utf-8")
    (wrong,) = website.check(tmp_path)[0]
    assert fault in wrong


def test_links_to_elsewhere_are_listed(website: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.org/">x</a><a href="index.html">y</a>', "utf-8")
    assert website.check(tmp_path) == ([], ["https://example.org/"])


def test_pictures_are_as_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    pictures = importlib.import_module("pictures")
    drawn = CHECKOUT / "docs" / "pictures"
    monkeypatch.setattr(pictures, "TARGET", tmp_path)
    pictures.main()
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == {
        path.name: path.read_text("utf-8") for path in drawn.iterdir()
    }
