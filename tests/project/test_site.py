"""The site of the documentation: every page has a place in it, and its check finds what is broken."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import librmq
from librmq import errors
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


@pytest.mark.parametrize("name", ["spark.session"])
def test_a_name_in_a_module_of_its_name_is_shown(website: ModuleType, name: str) -> None:
    importlib.import_module(f"librmq.{name}")
    room, _, last = name.partition(".")
    lines = dict(website.reference_pages())[f"reference/{room}.md"].splitlines()
    assert f"::: librmq.{name}.{last}" in lines
    assert f"::: librmq.{name}" not in lines


def test_a_package_of_many_names_begins_with_an_overview(website: ModuleType) -> None:
    """Constants have the text below them, not that of their type."""
    pages = dict(website.reference_pages())
    consumers = pages["reference/consumer.md"]
    rows = re.findall(r"^\| \[`(\w+)`\]\(#([\w.]+)\) \| [A-Z].+ \|$", consumers, re.MULTILINE)
    assert [name for name, _ in rows] == importlib.import_module("librmq.consumer").__all__
    assert [path for _, path in rows] == re.findall("^::: (.+)$", consumers, re.MULTILINE)
    shown = pages["reference/filter.md"]
    assert "| [`SQL92`](#librmq.filter.SQL92) | Type of a subscription by an SQL92 expression. |" in shown
    assert "| [`Registrations`](#librmq.filter.Registrations) | All groups' filters." in shown
    assert "| [`critical`](#librmq.runtime.critical) | The critical block" in pages["reference/runtime.md"]
    assert "| [`" not in pages["reference/spark.md"]


def test_a_class_of_many_methods_begins_with_an_overview(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    assert "::: librmq.store.MessageStore\n    options:\n      summary: true\n" in pages["reference/store.md"]
    assert "::: librmq.listener.DownstreamDown\n\n" in pages["reference/listener.md"]


def subclasses(of: type) -> set[type]:
    below: set[type] = set(of.__subclasses__())
    return {of}.union(*map(subclasses, below))


def test_the_reference_shows_every_name_and_setting(website: ModuleType) -> None:
    """Settings of classes that no package exports are keywords, and stand on a page."""
    lines = "\n".join(text for _, text in website.reference_pages()).splitlines()
    listed = [line.removeprefix("::: ") for line in lines if line.startswith("::: ")]
    shown = set(listed)
    assert len(listed) == len(shown)
    rooms = [importlib.import_module(f"librmq.{room}") for room in website.ROOMS]
    paths = {website.path_of(f"{room.__name__}.{name}") for room in rooms for name in room.__all__}
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


def test_the_reference_describes_settings_statuses_and_fields(website: ModuleType) -> None:
    rooms = [importlib.import_module(f"librmq.{room}") for room in website.ROOMS]
    exported = [getattr(room, name) for room in (librmq, *rooms) for name in room.__all__]
    kinds = {kind for kind in exported if isinstance(kind, type) and website.is_shown_whole(kind)}
    assert [name for kind in kinds for name in undescribed(kind) if "._" not in name] == []


def test_the_tree_of_errors_has_every_error(website: ModuleType) -> None:
    """Each row has its place below its base, and names the base outside of librmq."""
    dict(website.reference_pages())  # imports what defines errors
    drawn, above = {}, dict[int, str]()
    for line in (errors.__doc__ or "").splitlines():
        if row := re.match(r"    ([ │├└─]*)([A-Z]\w+Error)\b(?:.* \((\w+)\)$)?", line):
            depth = len(row[1]) // 4
            above[depth] = row[2]
            drawn[row[2]] = {name for name in (above.get(depth - 1), row[3]) if name}
    kinds = {kind for kind in subclasses(errors.RmqError) if kind.__module__.startswith("librmq.")}
    bases = {kind.__name__: {base.__name__ for base in kind.__bases__} - {"Exception"} for kind in kinds}
    assert drawn == {name: of for name, of in bases.items() if re.fullmatch("[A-Z].*Error", name)}


def test_members_of_enums_are_shown_with_the_names_of_librmq(website: ModuleType) -> None:
    (text,) = (text for name, text in website.reference_pages() if name == "reference/librmq.md")
    assert "::: librmq.ConsumeFrom\n    options:\n      show_if_no_docstring: true" in text


def test_fields_of_results_are_shown(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    whole = "\n    options:\n      show_if_no_docstring: true"
    assert f"::: librmq.client.TransactionResult{whole}" in pages["reference/client.md"]
    assert f"::: librmq.files.Damage{whole}" in pages["reference/files.md"]


def test_pages_named_in_docstrings_become_links(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    assert "[Duplicates](../dedup.md)" in pages["reference/dedup.md"]
    assert [name for name, text in pages.items() if "docs/" in text] == []


PACKAGE = '''
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated
from librmq.config import Between, Seconds
_LONGEST_S = 60.0
def _made(): ...
ALL = {"a": _made()}
class Opened:
    size: int = 3
    def __init__(self, *_: object) -> None: ...
    def read(self, timeout: float = _LONGEST_S) -> None:
        """Read.

        Raises:
            SomeError: It fails.
        """
class Made:
    """Made by `Opened.read`, which `make` calls, or `shown.errors.SomeError`; `nothing` and ``Opened`` stay code."""
    def make(self): ...
    def __init__(self, topic: str, **settings: int) -> None:
        self.topic = topic
        self.failed = 0
@dataclass
class Result:
    place: Annotated[int, "from 0"] = field(init=False)
    found: Counter[str] = field(default_factory=Counter)
@dataclass
class Settings:
    size: Annotated[int | None, Between(1 << 8, 1 << 12)] = 4 << 8
    """Bytes of a file."""
    count: Annotated[int, Between(-1)] = 5
    """Most files."""
    pause_s: Annotated[float, Seconds(0.5, _LONGEST_S)] = 1
    """Pause after
    a failure."""
    plain: int = 1 + 1
    """No limits."""
'''


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The package as the reference reads it."""
    import griffe

    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    monkeypatch.syspath_prepend(tmp_path)
    reference = importlib.import_module("reference")
    folder = tmp_path / "shown"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE, "utf-8")
    (folder / "errors.py").write_text("class SomeError(Exception): ...", "utf-8")
    extensions = griffe.load_extensions("dataclasses", reference.Reference())
    yield griffe.load("shown", search_paths=[tmp_path], extensions=extensions, docstring_parser="google")
    sys.modules.pop("shown", None)


@pytest.mark.slow  # the quick check has no griffe
def test_the_reference_shows_what_readers_can_use(package: Any) -> None:
    assert [name for name, kind in package.classes.items() if "__init__" in kind.members] == ["Made"]
    assert str(package["Opened.read"].parameters["timeout"].default) == "60.0"
    assert package["ALL"].value is None
    assert package["Opened.size"].labels == set()
    made = {name: str(each.annotation) for name, each in package["Made"].attributes.items()}
    assert made == {"topic": "str", "failed": "int"}
    assert package["Made.__init__"].parameters["settings"].default is None
    assert str(package["Result.place"].annotation) == "int"
    assert package["Result.place"].value is None
    assert str(package["Result.found"].value) == "Counter()"
    (raised,) = package["Opened.read"].docstring.parsed[1].value
    assert raised.annotation.canonical_path == "shown.errors.SomeError"


@pytest.mark.slow
def test_the_reference_shows_the_limits_of_settings(package: Any) -> None:
    settings = package["Settings"].attributes
    assert {name: setting.docstring.value for name, setting in settings.items()} == {
        "size": "Bytes of a file. Default: 1,024. Allowed: 256 to 4,096.",
        "count": "Most files. Allowed: at least -1.",
        "pause_s": "Pause after\na failure. Allowed: 0.5 to 60 seconds.",
        "plain": "No limits.",
    }
    assert str(settings["size"].annotation) == "int | None"


@pytest.mark.slow
def test_names_in_docstrings_lead_to_their_descriptions(package: Any) -> None:
    """An optional link that leads nowhere becomes code."""
    text = package["Made"].docstring.value
    assert re.findall(r'<autoref optional identifier="([\w.]+)"><code>([\w.]+)</code></autoref>', text) == [
        ("shown.Opened.read", "Opened.read"),
        ("shown.Made.make", "make"),
        ("shown.errors.SomeError", "shown.errors.SomeError"),
    ]
    assert text.endswith("`nothing` and ``Opened`` stay code.")


def test_docstrings_become_markdown(website: ModuleType) -> None:
    pages = dict(website.reference_pages())
    assert [name for name, text in pages.items() if re.search(r"^ *::$|::$", text, re.MULTILINE)] == []


def faulty_items(source: str) -> list[str]:
    """Return the lines of arguments and errors in docstrings that are not ``name: Text``; the reference drops them."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    found = []
    for text in texts:
        for section in re.findall(r"^(?:Args|Raises):\n((?: {4}.*\n?)+)", text, re.MULTILINE):
            items = [line for line in section.splitlines() if not line.startswith(" " * 5)]
            found += [item.strip() for item in items if not re.match(r" +\*{0,2}[\w.]+: [^a-z]", item)]
    return found


def test_every_line_of_a_docstring_is_on_the_site() -> None:
    modules = sorted((CHECKOUT / "librmq").rglob("*.py"))
    faulty = {path.relative_to(CHECKOUT).as_posix(): faulty_items(path.read_text("utf-8")) for path in modules}
    assert {path: items for path, items in faulty.items() if items} == {}


@pytest.mark.parametrize(
    "item", ["ConfigError: it is wrong.", "ConfigError, StoreError: One is wrong.", "is too long."]
)
def test_a_faulty_item_of_a_docstring_is_found(item: str) -> None:
    assert faulty_items(f'"""Do it.\n\nRaises:\n    OSError: It fails,\n        or not.\n    {item}\n"""') == [item]


def test_nested_lists_are_nested_on_the_site(website: ModuleType) -> None:
    """The generator nests what is indented by four spaces; GitHub nests it by two as well."""
    pages = [*(CHECKOUT / "docs").rglob("*.md"), *(CHECKOUT / name for name in website.PROJECT_PAGES)]
    texts = {path.name: re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S) for path in pages}
    assert {name for name, text in texts.items() if re.search(r"^ {1,3}(?:[-*]|\d+\.) ", text, re.MULTILINE)} == set()


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<p><code>lag --every 10s</code></p>", '<p><code>lag <span class="whole">--every</span> 10s</code></p>'),
        ("<p>every 10 s, <code>10 s</code></p>", "<p>every 10\N{NO-BREAK SPACE}s, <code>10 s</code></p>"),
        ("<p>show --limit 10</p>", '<p>show <span class="whole">--limit</span> 10</p>'),
        ("<td>0.45–1,047, 2</td>", '<td><span class="whole">0.45–1,047</span>, 2</td>'),
        ("<td>10 starts</td>", "<td>10 starts</td>"),
        ("(default: <code>None</code>\n)\n", "(default: <code>None</code>)\n"),
        (
            "<td><code>queue_offset=1 a_b</code></td>",
            '<td><code><span class="name">queue_<wbr>offset=1</span> a_b</code></td>',
        ),
        (
            f"<th><code>{'Key' * 10}</code></th>",
            f'<th><code><span class="long">{"<wbr>".join(["Key"] * 10)}</span></code></th>',
        ),
        (
            "<td><code>queues-with-two-owners</code></td>",
            '<td><code><span class="name">queues-with-two-owners</span></code></td>',
        ),
        (
            "<td><code>message_logic.py</code></td>",
            '<td><code><span class="name">message_<wbr>logic.py</span></code></td>',
        ),
        ("<td>x</td><p><code>a.b</code></p>", "<td>x</td><p><code>a.b</code></p>"),
        ("<td><pre><code>a.b --c 1 s</code></pre></td>", "<td><pre><code>a.b --c 1 s</code></pre></td>"),
    ],
)
def test_lines_break_where_a_reader_expects(website: ModuleType, page: str, shown: str) -> None:
    assert website.with_breaks(page) == shown


def table(*headings: str) -> str:
    cells = "".join(f'<td style="text-align: right;">{number}</td>' for number, _ in enumerate(headings))
    row = f"<tr>\n{cells}\n</tr>"
    return f"<table>\n<tr>{''.join(f'<th>{each}</th>' for each in headings)}</tr>\n{row}\n{row}</table>"


def test_cells_of_a_table_of_many_columns_name_their_column(website: ModuleType) -> None:
    wide = website.with_headings(table("path", "<code>a</code> &amp; b", 'a "c"', "d", "e"))
    assert re.findall('data-heading="(.*?)" style="text-align: right;">(.)<', wide) == [
        *[("path", "0"), ("a &amp; b", "1"), ("a &quot;c&quot;", "2"), ("d", "3"), ("e", "4")] * 2
    ]
    assert '<table data-columns="5">' in wide
    narrow = table("a", "b", "c", "d")
    assert website.with_headings(f"{narrow}<p>x</p>{narrow}") == f"{narrow}<p>x</p>{narrow}"


def test_the_changelog_shows_versions_without_brackets(website: ModuleType) -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-11-21\n\nThe first.\n"
    assert website.with_bare_versions(text) == "# Changelog\n\n## 0.1.0 - 2026-11-21\n\nThe first.\n"
    assert website.with_bare_versions("## [Unreleased]\n\n- A change.\n") == "## Unreleased\n\n- A change.\n"


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
    assert page.startswith(website.UNSEARCHED)


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


@pytest.mark.parametrize(("link", "faults"), [("/a/b.html", 0), ("/", 0), ("/b.html", 1), ("a/b.html", 1), ("#x", 1)])
def test_links_of_the_page_for_no_page_begin_at_the_root(
    website: ModuleType, tmp_path: Path, link: str, faults: int
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("index.html", "a/b.html"):
        (tmp_path / name).touch()
    (tmp_path / "404.html").write_text(f'<a href="{link}">x</a>', "utf-8")
    assert len(website.check(tmp_path)[0]) == faults


def test_the_page_for_no_page_leads_to_pages_of_the_site(website: ModuleType, tmp_path: Path) -> None:
    """It lists the section How to, which a section of another name would empty."""
    website.Stage(tmp_path).fill()
    settings = (tmp_path / "mkdocs.yml").read_text("utf-8")
    folder = re.search(r"^  custom_dir: (.+)$", settings, re.MULTILINE)
    assert folder is not None
    page = Path(folder[1], "404.html").read_text("utf-8")
    linked = re.findall(r"'([\w/-]+)\.html' \| url", page)
    assert {"index", "troubleshooting"} <= set(linked)
    assert [name for name in linked if not (tmp_path / "docs" / f"{name}.md").is_file()] == []
    sections = re.findall(r'section\.title == "([^"]+)"', page)
    assert [name for name in sections if f"\n  - {name}:\n" not in settings] == []


def test_links_to_elsewhere_are_listed(website: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.org/">x</a><a href="index.html">y</a>', "utf-8")
    assert website.check(tmp_path) == ([], ["https://example.org/"])
