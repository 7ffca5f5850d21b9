"""Tables of the documentation that come from the code: ``<!-- generated: commands -->`` in a page becomes one.

The others are ``log lines``, ``metrics``, ``history events``, ``anomalies``, ``rows`` for the JSON lines of commands,
``settings librmq.TimerConfig`` for the fields of a class, ``format librmq.consumequeue`` for the files that a module
draws in its docstring, and those of ``facts``. Such a table stands up to ``<!-- end -->``, where ``python
tools/generated.py`` writes it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import html
import importlib
import inspect
import io
import json
import re
import tempfile
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import facts
from row_types import ROW_TYPES

LIBRARY = Path(__file__).resolve().parent.parent / "librmq"
_MARK = re.compile(
    r"^<!-- generated: ([A-Za-z ]+?)(?: (librmq\.[\w.]+))? -->$(?:\n((?:(?!<!-- generated)[\s\S])*?)^<!-- end -->$)?",
    re.MULTILINE,
)
_DRAWING = re.compile(r"(?:^    .*\n(?:\n+(?=    ))?)+", re.MULTILINE)
_WRITES = re.compile(r"\b_?log\.(debug|info|warning|error|exception|log)$")
_FIELD = re.compile(r"%\(_?(\w+)\)[.\d]*[sdfr]")
_SHOWN = re.compile(r"{(\w+)}")
_COLOUR = re.compile(r"(?:\x1b\[(\d+)m)?(.*?)(?:\x1b\[0m)?")
_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" xml:space="preserve">
<title>The screen of librmq demo</title>
<style>
text {{ font: 20px SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #24292f; white-space: pre }}
.c1 {{ font-weight: bold }}
.c36 {{ fill: #0950a0 }}
</style>
<rect x="1" y="1" width="{inner_width}" height="{inner_height}" rx="8" fill="white" stroke="#d0d7de"/>
{rows}
</svg>
"""
VALUES: dict[int | str | None, str] = {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} [{} ...]"}
"""How the values of an argument are written, by its ``nargs``."""
WORDLESS_LINES = {
    "{recovery}": "{path}: recovered in … s, because it was not closed: the log ends at …",
    "{refusal}": "{path}: message refused: …",
    "{broker}: {differences}": "{broker}: instances of group {group} differ on …",
    "{path}: {error}": "…/offsets.json: {error}",
}
"""Lines that have no words of their own: a part to search for, from the value."""


def _text_of(tree: ast.Module, name: str) -> str:
    """Return the text that a module, or the one from which it imports the name, gives to a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return str(node.value.value)
        elif isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            path = LIBRARY.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            return _text_of(ast.parse(path.read_text("utf-8")), name)
    raise LookupError(f"{name} is no constant text")


def log_lines() -> Iterator[tuple[str, str, str, str]]:
    """Yield the logger, the level, the text and further fields of each log line of librmq."""
    for path in sorted(LIBRARY.rglob("*.py")):
        source = path.read_text("utf-8")
        if path.name == "event_log.py" or "log." not in source:
            continue
        tree = ast.parse(source)
        logger = re.search(r'EventLog\("([\w.]+)"', source)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (written := _WRITES.search(ast.unparse(call.func))):
                first = call.args[written[1] == "log"]
                text = _text_of(tree, first.id) if isinstance(first, ast.Name) else ast.literal_eval(first)
                line = _FIELD.sub(r"{\1}", text).replace("%%", "%")
                line = WORDLESS_LINES.get(line, line)
                names = {word.arg for word in call.keywords if word.arg} - {"exc_info", *_SHOWN.findall(line)}
                more = sorted(name for name in names if not name.startswith("_"))
                level = {"exception": "ERROR", "log": "by case"}.get(written[1], written[1].upper())
                name = logger[1] if logger else f"librmq.{path.relative_to(LIBRARY).parts[0]}"
                yield name, level, line, ", ".join(more)


def log_tables() -> str:
    """Return a section for each logger."""
    parts, lines = [], sorted(set(log_lines()))
    for logger in dict.fromkeys(line[0] for line in lines):
        rows = [(level, f"`` {text} ``", more) for name, level, text, more in lines if name == logger]
        parts.append(f"### `{logger}`\n\n{facts.table(('level', 'line', 'fields that are not in the text'), rows)}")
    return "\n\n".join(parts)


def values_of(action: argparse.Action) -> str:
    """Return what an argument takes, as the help of argparse shows it."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar or " | ".join(action.choices or [action.dest.upper()])
    return f"[{' '.join(metavar)}]" if isinstance(metavar, tuple) else VALUES[action.nargs].replace("{}", metavar)


def common_options() -> dict[str, str]:
    """Return the names, by the texts of their help, of options that the page of the commands describes once for all."""
    options = importlib.import_module("librmq.cli._options")
    shared = (
        options.CONFIG,
        options.AS_RECOVERED,
        options.STORAGE_OPTIONS,
        options.ROUTE,
        *options.SECURED,
        *options.CHANGES,
    )
    return {option.settings["help"]: option.names[0] for option in (*shared, *options.LISTED)}


def listed_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command without those that it only knows in order to refuse them."""
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]


def command_tables() -> str:
    """Return a section for each command: its arguments, and a line with those that other commands have too."""
    arguments, shared, parts = importlib.import_module("librmq.cli._main"), common_options(), []
    for command in importlib.import_module("librmq.cli._syntax").COMMANDS.values():
        parser, rows = arguments.parser_of(command), []
        for action in listed_arguments(parser):
            if action.help not in shared and "-h" not in action.option_strings:
                names = f"{', '.join(action.option_strings)} {values_of(action)}".strip()
                rows.append((f"`{names}`", (action.help or "").replace("%%", "%")))
        text = f"{' '.join(parser.description.split())}\n\n    librmq {command.name} {command.example}".rstrip()
        common = ", ".join(f"`{shared[action.help]}`" for action in parser._actions if action.help in shared)
        parts += [f"### librmq {command.name}", text]
        parts += [facts.table(("argument", "meaning"), rows)] * bool(rows) + [f"Common options: {common}."] * bool(
            common
        )
    return "\n\n".join(parts)


_JSON_TYPES = {"int": "integer", "num": "number", "str": "string", "bool": "boolean", "obj": "object"}
_KINDS = {int: "int", float: "num", str: "str", bool: "bool", dict: "obj", tuple: "[any]", list: "[any]"}
Schema = dict[str, typing.Any]


def row_schema(forms: Sequence[str]) -> Schema:
    """Return the JSON Schema of the rows that `row_types` describes by these forms."""
    schemas = [_form_schema(form.split()) for form in forms]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _form_schema(words: list[str]) -> Schema:
    properties: dict[str, Schema] = {}
    optional = set()
    for word in words:
        name, _, kind = word.partition(":")
        if kind:
            properties[name.removesuffix("?")] = _kind_schema(kind)
            optional |= {name.removesuffix("?")} if name.endswith("?") else set()
        elif word != "...":
            module, _, name = word.rpartition(".")
            hints = typing.get_type_hints(getattr(importlib.import_module(module), name))
            properties |= {field: _hint_schema(hint) for field, hint in hints.items()}
    required = [name for name in properties if name not in optional]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    return schema if "..." in words else {**schema, "additionalProperties": False}


def _kind_schema(kind: str) -> Schema:
    if kind.endswith("?"):
        return {"anyOf": [_kind_schema(kind[:-1]), {"type": "null"}]}
    if kind.startswith("["):
        return {"type": "array", "items": _kind_schema(kind[1:-1])}
    return {} if kind == "any" else {"type": _JSON_TYPES[kind]}


def _hint_schema(hint: object) -> Schema:
    """Return the schema of a field of a class."""
    if hint is None or hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_hint_schema(argument) for argument in arguments]}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _hint_schema(arguments[0])}
    return _kind_schema(next((word for kind, word in _KINDS.items() if kind is (origin or hint)), "any"))


def row_schemas() -> str:
    """Return a section for each command with the JSON Schema of its rows."""
    parts = []
    for name, forms in sorted(ROW_TYPES.items()):
        schema = json.dumps(row_schema(forms))
        parts.append(f"### {name}\n\n```json\n{schema}\n```")
    return "\n\n".join(parts)


def metrics_table() -> str:
    """Return the table of the metrics."""
    metrics = importlib.import_module("librmq.metrics").METRICS.items()
    rows = [(f"`{name}`", one.kind, ", ".join(one.labels), one.meaning) for name, one in metrics]
    return facts.table(("name", "kind", "labels", "meaning"), rows)


def events_table() -> str:
    """Return the table of the events of a history: what each means, and its fields."""
    rows = []
    for name, event in importlib.import_module("librmq.testing.histories.events").EVENTS.items():
        words = {field: f"`{field}` ({', '.join(f'`{word}`' for word in event.words[field])})" for field in event.words}
        required, optional = (
            ", ".join(words.get(field, f"`{field}`") for field in fields) for fields in (event.required, event.optional)
        )
        rows.append((f"`{name}`", event.meaning, required, optional))
    return facts.table(("event", "meaning", "fields", "optional"), rows)


def anomalies_table() -> str:
    """Return the table of the anomalies of a history."""
    kinds = importlib.import_module("librmq.testing.histories.anomalies").KINDS.items()
    return facts.table(("anomaly", "it is one when"), [(f"`{kind}`", rule) for kind, rule in kinds])


def settings_table(path: str) -> str:
    """Return the fields of a class, with their defaults and the docstrings below them."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    body = next(node for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    defaults = {field.name: default_of(field) for field in getattr(kind, "__dataclass_fields__", {}).values()}
    rows = []
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            default = defaults.get(ast.unparse(node.target), "")
            text = " ".join(ast.literal_eval(after.value).split())
            rows.append((f"`{ast.unparse(node.target)}`", f"`{default}`" * bool(default), text.replace("``", "`")))
    if typing.is_typeddict(kind):  # its docstrings name the defaults
        return facts.table(("setting", "meaning"), [(name, text) for name, _, text in rows])
    return facts.table(("setting", "default", "meaning"), rows)


def default_of(field: dataclasses.Field[typing.Any]) -> str:
    """Return the default of a field as the page shows it, or the call that makes it; empty for none."""
    factory: typing.Any = field.default_factory
    if factory is not dataclasses.MISSING:
        return f"{factory.__name__}()"
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    return f"{value:,}" if type(value) is int else str(getattr(value, "__name__", value))


def format_text(path: str) -> str:
    """Return what a module of a format says below the first line of its docstring."""
    text = inspect.getdoc(importlib.import_module(path)) or ""
    text = re.sub(r"::$", ":", text.partition("\n\n")[2].removeprefix("::\n\n"), flags=re.MULTILINE)
    return _DRAWING.sub(lambda drawing: f"```text\n{textwrap.dedent(drawing[0]).strip()}\n```\n", f"{text}\n")


def fill(markdown: str, *, written: bool = False) -> str:
    """Return a page with its tables, in place of their marks; ``written``, with those that stand in it up to date."""
    tables = {"commands": command_tables, "log lines": log_tables, "metrics": metrics_table, "rows": row_schemas}
    tables |= {"history events": events_table, "anomalies": anomalies_table}
    of_path = {"settings": settings_table, "format": format_text}

    def fill_mark(mark: re.Match[str]) -> str:
        table = of_path[mark[1]](mark[2]) if mark[2] else (tables | facts.TABLES)[mark[1]]()
        return f"{mark[0].partition(chr(10))[0]}\n\n{table}\n\n<!-- end -->" if written else table

    return _MARK.sub(fill_mark, markdown)


def pages() -> list[Path]:
    """Return the pages in which tables stand."""
    paths = (facts.CHECKOUT / "README.md", *sorted((facts.CHECKOUT / "docs").rglob("*.md")))
    return [path for path in paths if "<!-- generated: " in path.read_text("utf-8")]


def llms() -> str:
    """Return the site's ``llms.txt``, for programs that read documentation: each page with its first sentence."""
    docs = facts.CHECKOUT / "docs"
    lines = []
    for path in sorted(docs.rglob("*.md"), key=lambda path: (path.name != "index.md", path.as_posix())):
        title, _, text = path.read_text("utf-8").partition("\n")
        paragraph = " ".join(text.strip().partition("\n\n")[0].split())
        sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).partition(". ")[0].rstrip(".:")
        place = path.relative_to(docs).with_suffix(".html").as_posix()  # as mkdocs.yml says by use_directory_urls
        lines.append(f"- [{title.lstrip('# ')}]({place}): {sentence}.")
    return "\n".join(["# librmq", "", "## Pages", "", *lines, ""])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def demo_screen() -> str:
    """Run the demo of a shop, and return its screen with the colours of a terminal."""
    demo = importlib.import_module("librmq.cli._demo")
    screen = _Terminal()
    with tempfile.TemporaryDirectory() as folder:
        demo.tell_shop(demo.Screen(screen), folder, demo.PAGE)
    return screen.getvalue()


def drawn(screen: str) -> str:
    """Return a picture of a terminal's screen, the same for the same text; its rows are those of the screen."""
    colours = [_COLOUR.fullmatch(line) for line in screen.splitlines()]
    rows = [(match[1] or "0", match[2]) for match in colours if match]
    texts = [
        f'<text class="c{colour}" x="20" y="{32 + 24 * row}" textLength="{12 * len(text)}">{html.escape(text)}</text>'
        for row, (colour, text) in enumerate(rows)
    ]
    width, height = 40 + 12 * max(len(text) for _, text in rows), 32 + 24 * len(rows)
    frame = {"width": width, "height": height, "inner_width": width - 2, "inner_height": height - 2}
    return _PICTURE.format(**frame, rows="\n".join(texts))


def main() -> None:
    """Write all tables into the README and the pages, and the picture of the demo that the README shows."""
    (facts.CHECKOUT / "docs" / "pictures" / "demo.svg").write_text(drawn(demo_screen()), "utf-8")
    for path in pages():
        path.write_text(fill(path.read_text("utf-8"), written=True), "utf-8")


if __name__ == "__main__":
    main()
