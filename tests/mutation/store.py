"""Leave out every flush of a store, and every check of its recovery, one at a time, and see that a crash tells.

From the root of the checkout: ``python -m tests.mutation.store [word …]`` (only mutants whose name holds a word).
Flushes are found in the code: each call of `FLUSHES` that is a statement, and each mark by which a flush knows what it
has to take along. Checks are listed by what stands there. Each is left out in a copy of ``librmq``, in which images of
crashes are then checked until one fails. Prints killed of all; status 1 where one lives. Takes some minutes.
"""

# ruff: noqa: E501 (a check a line)

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.reference import CHECKOUT

IMAGES = 6_000
"""So many images may a mutant survive."""
MODULES = (
    "checkpoint",
    "closedstate",
    "commitlog",
    "consumequeue",
    "consumequeueext",
    "files",
    "indexfile",
    "keyindex",
    "mappedfile",
    "recovery",
    "retention",
    "store",
)
FLUSHES = ("flush", "flush_folder", "_flush_folder", "_flush_folders", "reach", "mark_dirty", "mark_found", "lower")
MARKS = ("_dirty", "_folder_dirty", "_changed_folders", "unflushed")


class Mutant(NamedTuple):
    """One thing left out: in ``module``, the characters from ``begin`` to ``end`` read ``after``."""

    name: str
    module: str
    begin: int
    end: int
    after: str


def mutants() -> list[Mutant]:
    found = [mutant for module in MODULES for mutant in _flushes(module)]
    return found + [_check(*check) for check in CHECKS]


def _source(module: str) -> str:
    return (CHECKOUT / "librmq" / f"{module}.py").read_text("utf-8")


def _flushes(module: str) -> Iterator[Mutant]:
    source = _source(module)
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(line: int, column: int) -> int:  # columns count bytes
        text = source[lines[line - 1] : lines[line]]
        return lines[line - 1] + len(text.encode()[:column].decode())

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or (module, function.name) in LEFT:
            continue
        for node in _statements(function):
            if _is_flush(node):
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
                text = " ".join(source[begin:end].split())
                yield Mutant(f"{module}.{function.name}: {text}", module, begin, end, "pass")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, not those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _is_flush(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute):
            on = called.value
            adds = called.attr in ("add", "update") and isinstance(on, ast.Attribute) and on.attr in MARKS
            return called.attr in FLUSHES or adds
        return isinstance(called, ast.Name) and called.id == "make_folders"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        is_true = isinstance(node.value, ast.Constant) and node.value.value is True
        return is_true and node.targets[0].attr in MARKS
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr in MARKS


def _check(name: str, module: str, before: str, after: str) -> Mutant:
    source = _source(module)
    if source.count(before) != 1:
        raise SystemExit(f"{name}: {before!r} stands {source.count(before)} times in {module}")
    begin = source.index(before)
    return Mutant(f"{module}: {name}", module, begin, begin + len(before), after)


LEFT: set[tuple[str, str]] = set()
"""Functions whose flushes are not looked at here."""

# fmt: off
CHECKS: Sequence[tuple[str, str, str, str]] = (
    ("an exit was unclean", "recovery", "    clean = not has_abort(files, path)\n    cuts", "    clean = True\n    cuts"),
)
# fmt: on


def killer(mutant: Mutant, copy: Path, images: int) -> str | None:
    """What tells that ``mutant`` is in ``copy``, None if nothing does."""
    path = copy / "librmq" / f"{mutant.module}.py"
    original = path.read_text("utf-8")
    path.write_text(original[: mutant.begin] + mutant.after + original[mutant.end :], "utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.crash.runs", str(images)]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        return (done.stdout + done.stderr) or "?" if done.returncode else None
    except subprocess.TimeoutExpired:
        return "it did not come to an end"
    finally:
        path.write_text(original, "utf-8")


def alive(chosen: Sequence[Mutant], images: int = IMAGES) -> list[Mutant]:
    """Those that survive so many images."""
    found = []
    with tempfile.TemporaryDirectory(prefix="librmq-mutation-") as folder:
        copy = Path(folder)
        for part in ("librmq", "tests"):
            shutil.copytree(CHECKOUT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in chosen:
            told = killer(mutant, copy, images)
            if told is None:
                found.append(mutant)
            print(f"{mutant.name}: {'ALIVE' if told is None else told.splitlines()[0][:100]}", flush=True)
    return found


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    left = alive(chosen)
    print(f"{len(chosen) - len(left)} of {len(chosen)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
