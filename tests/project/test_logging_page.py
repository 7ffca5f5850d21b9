"""``docs/logging.md`` lists every log line of librmq."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parents[2]
_LEVELS: Final = ("debug", "info", "warning", "error", "exception", "log")
_WRITES: Final = re.compile(r"log\.(debug|info|warning|error|exception|log)\(")
_FIELD: Final = re.compile(r"%\((\w+)\)[.\d]*[sdfr]")


class Line(NamedTuple):
    """A log line: its logger, its level (``LOG`` if chosen at run time), its text and its additional fields."""

    logger: str
    level: str
    text: str
    fields: frozenset[str]


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the string constants of a module by name."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(str(text))):
                found[name] = text
            case ast.AnnAssign(target=ast.Name(name), value=ast.Constant(str(text))):
                found[name] = text
    return found


def _calls() -> Iterator[Line]:
    """Yield the log line of each call in librmq that writes one."""
    for path in sorted((_ROOT / "librmq").rglob("*.py")):
        relative = path.relative_to(_ROOT / "librmq")
        if relative.name == "event_log.py":
            continue
        text = path.read_text("utf-8")
        if not _WRITES.search(text):
            continue  # parsing takes a hundred times as long
        tree = ast.parse(text)
        texts = _constants(tree)
        logger = f"librmq.{relative.parts[0]}"
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            match call:
                case ast.Call(func=ast.Name("EventLog"), args=[ast.Constant(str(logger))]):
                    break
        for call in calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in _LEVELS:
                continue
            if not re.search(r"\b_?log$", ast.unparse(call.func.value)):
                continue
            first = call.args[1 if call.func.attr == "log" else 0]
            text = texts[first.id] if isinstance(first, ast.Name) else ast.literal_eval(first)
            names = {word.arg for word in call.keywords if word.arg} - {"exc_info", *_FIELD.findall(text)}
            more = frozenset(name for name in names if not name.startswith("_"))
            level = {"exception": "ERROR"}.get(call.func.attr, call.func.attr.upper())
            yield Line(logger, level, _FIELD.sub(lambda field: f"{{{field[1].lstrip('_')}}}", text), more)


def _rows() -> Iterator[Line]:
    """Yield the log lines that the page lists."""
    logger = ""
    for line in (_ROOT / "docs/logging.md").read_text("utf-8").splitlines():
        if line.startswith("### `"):
            logger = line.strip("# `")
        cells = [cell.strip() for cell in line.split(" | ")]
        if logger and line.startswith("| ") and len(cells) == 3 and cells[1].startswith("`"):
            text = cells[1].strip("` ").replace("%", "%%")
            also = cells[2].partition(" Also: ")[2]
            yield Line(logger, cells[0].strip("| "), text, frozenset(re.findall(r"`(\w+)`", also)))


def test_the_page_lists_every_line() -> None:
    """The page writes a level that is chosen at run time with an ``or``."""
    written = {line._replace(level="LOG") if " or " in line.level else line for line in _rows()}
    called = set(_calls())
    assert called - written == set(), "lines that the page lacks"
    assert written - called == set(), "lines that no code writes"


def test_every_logger_has_named_fields() -> None:
    """A plain logger would write lines without named fields, which the page does not cover."""
    plain = [path for path in (_ROOT / "librmq").rglob("*.py") if "getLogger(" in path.read_text("utf-8")]
    assert [path.name for path in plain] == ["event_log.py"]
