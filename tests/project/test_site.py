"""The site of the documentation: every page has a place in it, and its check finds what is broken."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import librmq
from librmq.config import Config
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


def subclasses(of: type) -> set[type]:
    below: set[type] = set(of.__subclasses__())
    return {of}.union(*map(subclasses, below))


def test_the_reference_shows_every_name_and_setting(website: ModuleType) -> None:
    """Settings of classes that no package exports are keywords, and stand on a page."""
    lines = "\n".join(text for _, text in website.reference_pages()).splitlines()
    shown = {line.removeprefix("::: ") for line in lines if line.startswith("::: ")}
    rooms = [importlib.import_module(f"librmq.{room}") for room in website.ROOMS]
    assert {f"{room.__name__}.{name}" for room in rooms for name in room.__all__} <= shown
    whole = lines[lines.index("::: librmq.config.StoreConfig") + 1 :][:2]
    assert whole == ["    options:", "      show_if_no_docstring: true"]
    exported = {name for room in rooms for name in room.__all__}
    pages = " ".join(page.read_text("utf-8") for page in (CHECKOUT / "docs").rglob("*.md"))
    private = [each for each in subclasses(Config) if each.__name__ not in exported | {"NamedConfig"}]
    fields = {name for each in private if each.__module__.startswith("librmq.") for name in each.__annotations__}
    assert sorted(name for name in fields if name not in pages) == []


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
