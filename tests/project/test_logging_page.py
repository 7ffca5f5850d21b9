"""``docs/logging.md`` explains log lines that exist; the site adds all others, and other tables, from the code."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from tests.reference import CHECKOUT


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("generated")


def test_the_lines_of_the_page_exist(generated: ModuleType) -> None:
    page = (CHECKOUT / "docs" / "logging.md").read_text("utf-8").partition("## Lines that need action")[2]
    rows = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    texts = [*generated.WORDLESS_LINES, *(text for _, _, text, _ in generated.log_lines())]
    patterns = {row: ".*".join(map(re.escape, row.split("…"))) for row in rows}
    assert len(rows) > 30
    assert [row for row, pattern in patterns.items() if not any(re.match(pattern, text) for text in texts)] == []


def test_lines_without_words_show_what_to_search(generated: ModuleType) -> None:
    values = generated.WORDLESS_LINES.values()
    assert sorted(text for _, _, text, _ in set(generated.log_lines()) if text in values) == sorted(values)
    source = "".join(path.read_text("utf-8") for path in (CHECKOUT / "librmq").rglob("*.py"))
    parts = [part.strip(" :/") for text in values for part in re.split(r"{\w+}|…", text)]
    assert [part for part in parts if part not in source] == []


def test_every_argument_has_a_value_and_a_meaning(generated: ModuleType) -> None:
    tables = generated.command_tables()
    assert re.findall(r"^\| `[^`]* ` .*|^\| .*\|  \|$", tables, re.MULTILINE) == []
    sections = {part.partition("\n")[0]: part for part in tables.split("### librmq ")}
    assert "Common options: `--config`, `--dry-run`, `--format`, `-o`." in sections["recover"]
    assert "`--dry-run`" not in sections["load"] + sections["serve"]
    assert "| `--tls [CERT KEY]` |" in sections["serve"]
    assert "| `--format parquet \\| csv \\| jsonl` |" in sections["export"]
    assert "| `-o, --out FILE` |" not in sections["show"]


def test_a_setting_shows_its_default(generated: ModuleType) -> None:
    assert "| `files` | `DiskFiles()` |" in generated.settings_table("librmq.consumer.ConsumerConfig")
    keywords = generated.settings_table("librmq.columns.ReaderKeywords")
    assert keywords.startswith("| setting | meaning |")
    reads = {name: keywords.partition(f"| `{name}` |")[2].partition("\n")[0] for name in ("view", "processes", "mode")}
    assert all("Default: " in text for text in reads.values())


def test_every_table_of_a_page_is_made(generated: ModuleType) -> None:
    pages = [page.read_text("utf-8") for page in (CHECKOUT / "docs").rglob("*.md")]
    filled = [generated.fill(page) for page in pages if "<!-- generated: " in page]
    assert len(filled) >= 3
    assert [page for page in filled if "<!-- generated: " in page] == []
    assert any("| `lag` | gauge | topic, group |" in page for page in filled)
    assert any("### librmq show" in page and "| `--grep REGEX` |" in page for page in filled)


def test_every_logger_has_named_fields() -> None:
    """A plain logger would write lines without named fields, which the page does not cover."""
    plain = [path for path in (CHECKOUT / "librmq").rglob("*.py") if "getLogger(" in path.read_text("utf-8")]
    assert [path.name for path in plain] == ["event_log.py"]
