"""Writes ``api.txt``: the names, signatures and rows that a version promises, as `docs/release.md` says.

Names are those of each ``__all__``; what they are is read from the source, so no extra is needed. With ``--since TAG``
it prints what breaks callers of that version instead.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from row_types import ROW_TYPES

import generated

CHECKOUT = Path(__file__).resolve().parent.parent
API = CHECKOUT / "api.txt"
HEAD = """\
# What a version of librmq promises: written by `python tools/api.py`.
"""
SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *("init", "call", "iter", "aiter", "next", "anext", "len", "contains", "getitem"),
        *("enter", "aenter", "await"),
    )
)
"""The special methods that callers use; those of each class, such as ``__repr__``, are not listed."""
_KEYWORDS = re.compile(r"Unpack\[(\w+)\]")


def promised() -> dict[str, list[str]]:
    """Return each module that has an ``__all__``, with the names in it; one with an underscore promises nothing."""
    names = {}
    for path in sorted((CHECKOUT / "librmq").rglob("*.py")):
        module = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
        if "._" in module:
            continue
        source = path.read_text("utf-8")
        if "__all__" in source and (exports := _exports(ast.parse(source))):
            names[module] = sorted(exports)
    return names


def _exports(tree: ast.Module) -> list[str]:
    """Return the ``__all__`` of a module: literal, or what it exports lazily."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports":
            return [name for names in ast.literal_eval(node.args[1]).values() for name in names]
    return []


def find(package: Any, path: str) -> Any:
    """Return what a name of librmq stands for; the import itself where that is another package's."""
    item = _target(package[path.removeprefix("librmq.")])
    # griffe lets a module win over what its package imports from it by the same name.
    return _target(item[item.name]) if not item.is_alias and item.is_module else item


class Listing:
    """The lines of the file: a class has its public members below it, those that it inherits within librmq too."""

    def __init__(self) -> None:
        """Read the source of the whole package."""
        self._package: Any = griffe.load("librmq", search_paths=[CHECKOUT], allow_inspection=False)
        self._names = promised()
        self._homes: dict[str, str] = {}
        for module, names in self._names.items():  # the deepest package that promises an object is its home
            for name in names:
                path = _path(find(self._package, f"{module}.{name}"))
                self._homes[path] = max(self._homes.get(path, ""), f"{module}.{name}", key=lambda home: home.count("."))

    def lines(self) -> Iterator[str]:
        """Yield what modules promise, then the keywords that their signatures name."""
        keywords: dict[str, Any] = {}
        for module, names in self._names.items():
            yield f"\n{module}"
            for name in names:
                promise = find(self._package, f"{module}.{name}")
                home = self._homes[_path(promise)]
                lines = [f"{name} = {home}"] if home != f"{module}.{name}" else [*self._lines_of(name, promise)]
                for line in lines:
                    yield f"    {line}"
                    for kind in _KEYWORDS.findall(line):
                        keywords.setdefault(kind, self._keywords(promise, kind))
        for kind in sorted(keywords):
            yield f"\n{kind}"
            yield from (f"    {line}" for line in self._members(keywords[kind]))

    def _keywords(self, user: Any, kind: str) -> Any:
        """Return the class of keywords that a signature of a promised name has."""
        for scope in (user, *(user.mro() if user.is_class else ())):
            try:
                return find(self._package, scope.resolve(kind))
            except (griffe.NameResolutionError, KeyError):
                continue
        raise LookupError(f"{user.path} takes Unpack[{kind}], which is found neither there nor in a base")

    def _lines_of(self, name: str, promise: Any) -> Iterator[str]:
        if promise.is_alias:
            yield f"{name} = {promise.target_path}"
        elif promise.is_class:
            bases = [base for base in map(self._base, promise.bases) if base]
            yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
            yield from (f"    {line}" for line in self._members(promise))
        else:
            yield _line(name, promise)

    def _base(self, base: Any) -> str:
        """Return a base class as callers know it, or nothing for one of librmq that is not promised."""
        path = getattr(base, "canonical_path", str(base))
        if not path.startswith("librmq."):
            return str(base)
        try:
            return str(base) if _path(find(self._package, path)) in self._homes else ""
        except KeyError:
            return ""

    def _members(self, kind: Any) -> Iterator[str]:
        for name, member in sorted(kind.all_members.items()):
            if name in SPECIAL or not name.startswith("_"):
                yield from self._lines_of(name, _target(member))


def _target(item: Any) -> Any:
    """Return what an import or an inherited member stands for; itself where that is another package's."""
    try:
        return item.final_target if item.is_alias else item
    except griffe.AliasResolutionError:
        return item


def _path(item: Any) -> str:
    return str(item.target_path if item.is_alias else item.path)


def _line(name: str, item: Any) -> str:
    """Return a function, a property or a value with what a type checker knows of it."""
    if item.is_function:
        words = [word for word in ("async", "classmethod", "staticmethod") if word in item.labels]
        words += ["overloaded"] * bool(item.overloads if hasattr(item, "overloads") else ())
        return " ".join([*words, "def", item.signature(return_type=True, name=name)])
    kind = f": {item.annotation}" if item.annotation else ""
    if "property" in item.labels:
        return f"property {name}{kind}{' (writable)' if 'writable' in item.labels else ''}"
    value = f" = {item.value}" if item.value is not None and "instance-attribute" not in item.labels else ""
    return f"{name}{kind}{value}"


def command_lines() -> Iterator[str]:
    """Yield each command with its arguments, then the fields of the JSON lines that it prints."""
    parser_of = importlib.import_module("librmq.cli._main").parser_of
    for name, command in sorted(importlib.import_module("librmq.cli._syntax").COMMANDS.items()):
        yield f"\nlibrmq {name}"
        for action in generated.listed_arguments(parser_of(command)):
            yield f"    {' '.join([*action.option_strings, generated.values_of(action)])}".rstrip()
        for form in ROW_TYPES.get(name, ()):
            schema = generated.row_schema([form])
            yield "    row"
            for field, kind in schema["properties"].items():
                yield f"        {field}{'' if field in schema['required'] else '?'}: {_kind_of(kind)}"


def _kind_of(schema: generated.Schema) -> str:
    if "anyOf" in schema:
        return " | ".join(map(_kind_of, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    return f"[{_kind_of(schema['items'])}]" if "items" in schema else str(schema.get("type", "any"))


def api() -> str:
    """Return the text of the file."""
    return "\n".join([HEAD.rstrip(), *Listing().lines(), *command_lines(), ""])


def broken_since(tag: str) -> Iterator[str]:
    """Yield what breaks callers of the names that a tagged version promised."""
    command = ["git", "show", f"{tag}:{API.name}"]
    written = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    old = griffe.load_git("librmq", ref=tag, repo=CHECKOUT, allow_inspection=False)
    new = griffe.load("librmq", search_paths=[CHECKOUT], allow_inspection=False)
    module = ""
    for line in written.splitlines():
        module = line or module if line.startswith("librmq") and " " not in line else "" if not line else module
        promise = re.match(r"    (?:async |overloaded )*(?:class |def |property )?(\w+)", line)
        if module and promise:
            path = f"{module}.{promise[1]}"
            try:
                before, after = find(old, path), find(new, path)
            except KeyError:
                yield f"{path}: it was removed"
                continue
            if not before.is_alias and not after.is_alias:
                for breakage in griffe.find_breaking_changes(before, after):
                    member = breakage.obj.path.removeprefix(after.path).removeprefix(before.path)
                    yield " ".join(f"{path}{member}: {breakage.kind.value} {breakage.details}".split())


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="api.py", description="Writes what a version promises to api.txt.")
    parser.add_argument("--since", metavar="TAG", help="print what breaks callers of that version, and write nothing")
    options = parser.parse_args(arguments)
    if options.since:
        print(*broken_since(options.since), sep="\n")
    else:
        API.write_text(api(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
