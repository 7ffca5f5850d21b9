"""Tables of the documentation that come from the code: ``<!-- generated: commands -->`` in a page becomes one.

The others are ``log lines``, ``metrics``, and ``settings librmq.TimerConfig`` for the fields of a class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "librmq"
_MARK = re.compile(r"^<!-- generated: ([a-z ]+?)(?: (librmq\.[\w.]+))? -->$", re.MULTILINE)
_WRITES = re.compile(r"\b_?log\.(debug|info|warning|error|exception|log)$")
BAR = "\\|"
_FIELD = re.compile(r"%\(_?(\w+)\)[.\d]*[sdfr]")
SHARED = {"-h", "--config", "--as-recovered", "--storage-options", "--route", "--access-key", "--secret-key", "--keys"}
SHARED |= {"--tls-ca", "--format", "--limit", "--fail-empty", "--dry-run"}
"""Options that the page of the commands describes once for all."""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in lines)


def log_lines() -> Iterator[tuple[str, str, str, str]]:
    """Yield the logger, the level, the text and further fields of each log line of librmq."""
    for path in sorted(LIBRARY.rglob("*.py")):
        source = path.read_text("utf-8")
        if path.name == "event_log.py" or "log." not in source:
            continue
        texts = dict(re.findall(r'^(\w+)\b.* = \(?\s*"(.*)"\s*\)?$', source, re.MULTILINE))
        logger = re.search(r'EventLog\("([\w.]+)"', source)
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and (written := _WRITES.search(ast.unparse(call.func))):
                first = call.args[written[1] == "log"]
                text = texts[first.id] if isinstance(first, ast.Name) else ast.literal_eval(first)
                names = {word.arg for word in call.keywords if word.arg} - {"exc_info", *_FIELD.findall(text)}
                more = sorted(name for name in names if not name.startswith("_"))
                level = {"exception": "ERROR", "log": "by case"}.get(written[1], written[1].upper())
                name = logger[1] if logger else f"librmq.{path.relative_to(LIBRARY).parts[0]}"
                yield name, level, _FIELD.sub(r"{\1}", text).replace("%%", "%"), ", ".join(more)


def log_tables() -> str:
    """Return a section for each logger."""
    parts, lines = [], sorted(set(log_lines()))
    for logger in dict.fromkeys(line[0] for line in lines):
        rows = [(level, f"`` {text} ``", more) for name, level, text, more in lines if name == logger]
        parts.append(f"### `{logger}`\n\n{table(('level', 'line', 'fields that are not in the text'), rows)}")
    return "\n\n".join(parts)


def command_tables() -> str:
    """Return a section for each command."""
    arguments, parts = importlib.import_module("librmq.cli.main"), []
    for command in importlib.import_module("librmq.cli.syntax").COMMANDS.values():
        parser, rows = arguments.parser_of(command), []
        for action in parser._actions:
            if not SHARED.intersection(action.option_strings) and (command.name == "serve" or action.dest != "tls"):
                value = f" {action.metavar or ', '.join(action.choices or [])}" if action.nargs != 0 else ""
                names = ", ".join(action.option_strings) + value * bool(action.option_strings)
                rows.append((f"`{names or action.metavar}`", (action.help or "").replace("%%", "%")))
        text = f"{' '.join(parser.description.split())}\n\n    librmq {command.name} {command.example}"
        parts.append(f"### librmq {command.name}\n\n{text}\n\n{table(('argument', 'meaning'), rows)}")
    return "\n\n".join(parts)


def metrics_table() -> str:
    """Return the table of the metrics."""
    metrics = importlib.import_module("librmq.metrics").METRICS.items()
    rows = [(f"`{name}`", one.kind, ", ".join(one.labels), one.meaning) for name, one in metrics]
    return table(("name", "kind", "labels", "meaning"), rows)


def settings_table(path: str) -> str:
    """Return the fields of a class, with their defaults and the docstrings below them."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    body = next(node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    defaults = {name: field.default for name, field in getattr(kind, "__dataclass_fields__", {}).items()}
    rows = []
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            default = defaults.get(ast.unparse(node.target), "")
            shown = f"{default:,}" if type(default) is int else str(getattr(default, "__name__", default))
            text = " ".join(ast.literal_eval(after.value).split())
            rows.append((f"`{ast.unparse(node.target)}`", f"`{shown}`" * bool(shown), text.replace("``", "`")))
    return table(("setting", "default", "meaning"), rows)


def fill(markdown: str) -> str:
    """Return a page with its tables."""
    tables = {"commands": command_tables, "log lines": log_tables, "metrics": metrics_table}
    return _MARK.sub(lambda mark: settings_table(mark[2]) if mark[2] else tables[mark[1]](), markdown)
