"""Break the library in one place at a time, and check that a test fails.

From the root of the checkout::

    python -m tests.mutation store.recovery              # 40 mutants of a room, the same ones each time
    python -m tests.mutation --sample 0 filter.reduction     # all mutants of a module
    python -m tests.mutation --list message              # the planned mutants

Mutants are found in the syntax tree of each function, so they do not depend on how a line is written: a condition that
always or never holds, a comparison that is off by one or reversed, an ``and`` or ``or`` without one of its parts, or a
call that is left out. Each mutant is made in a copy of the checkout, where the tests of its room run until one fails.

The command prints the mutants that survive; some of them change nothing visible. It exits with status 1 if fewer than
``--least`` percent are killed. It is not part of the test run: each mutant takes seconds, or a minute if it survives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from tests.reference import CHECKOUT, reference

TESTS = {
    "filter": ("tests/filter", "tests/golden/test_filter.py", "tests/store/test_message_filters.py"),
    "store": ("tests/store", "tests/crash"),
    "files": ("tests/files", "tests/crash/test_disk_flushes.py", "tests/crash/test_parts.py", "tests/store"),
    "commitlog": ("tests/test_commitlog.py", "tests/store", "tests/crash"),
    "consumequeue": ("tests/test_consumequeue.py", "tests/test_consumequeue_machine.py", "tests/store", "tests/crash"),
    "consumequeue_ext": ("tests/test_consumequeue_ext.py", "tests/test_consumequeue_machine.py", "tests/crash"),
    "delay": ("tests/test_delay.py", "tests/scheduling", "tests/crash/test_pending.py"),
    "txn": ("tests/test_txn.py", "tests/scheduling", "tests/crash/test_pending.py"),
    "dedup": ("tests/idempotence",),
    "message": ("tests/message", "tests/golden/test_encoding.py"),
    "java": ("tests/java", "tests/filter", "tests/message", "tests/golden/test_encoding.py"),
}
"""Tests that detect mutants, by room, the quickest and best first. Other rooms use the test folder of their name."""
LEFT_OUT = "not slow and not spark"
SECONDS = 600
"""A mutant whose tests take longer than this counts as detected: its code never ends."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """A module that is broken in one place, with its changed source."""

    name: str
    module: Path
    source: str


def modules(word: str) -> dict[str, Path]:
    """Return the modules of a room, or a single module, by their dotted names within librmq."""
    package = CHECKOUT / "librmq"
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}
    return {name: path for name, path in paths.items() if f"{name}.".startswith(f"{word}.")}


def mutants(word: str) -> Iterator[Mutant]:
    """Yield the mutants of a room or module."""
    for name, path in modules(word).items():
        yield from _of_module(path, name)


def _of_module(path: Path, module: str) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text("utf-8"))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        body = function.body
        for number, node in enumerate(_nodes(function)):
            for what, broken in _broken(node):
                # Replace the function's body with a copy in which one node differs.
                swap = _Swap(node, broken)
                function.body = [cast("ast.stmt", swap.visit(statement)) for statement in body]
                name = f"{module}.{function.name} {number}: {what}: {' '.join(ast.unparse(node).split())[:90]}"
                yield Mutant(name, path, ast.unparse(ast.fix_missing_locations(tree)))
                function.body = body


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, except those of nested functions, which are visited separately."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _broken(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield possible replacements of a node, with their descriptions."""
    if isinstance(node, ast.If | ast.IfExp):
        for value in (True, False):
            yield f"always {value}", _with(node, test=ast.Constant(value))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield "turned", _with(node, ops=[TURNED[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            values = [value for number, value in enumerate(node.values) if number != left_out]
            yield f"without part {left_out}", _with(node, values=values) if len(values) > 1 else values[0]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "left out", ast.Pass()
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        yield "turned", _with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class _Swap(ast.NodeTransformer):
    """Copy the path to one node, and put another node in its place."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return self.new
        changed = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(changed, name, [self.visit(one) if isinstance(one, ast.AST) else one for one in value])
            elif isinstance(value, ast.AST):
                setattr(changed, name, self.visit(value))
        return changed


def is_told(mutant: Mutant, folder: Path) -> bool:
    """Make the mutant in this copy of the checkout, and return whether a test fails."""
    path = folder / mutant.module.relative_to(CHECKOUT)
    intact = path.read_text("utf-8")
    path.write_text(mutant.source, "utf-8")
    room = mutant.name.partition(".")[0].partition(" ")[0]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LIBRMQ_GOLDEN": str(reference().folder),
        "HYPOTHESIS_PROFILE": "ci",
    }
    try:
        for tests in TESTS.get(room, (f"tests/{room}",)):
            command = [
                sys.executable,
                "-P",
                "-m",
                "pytest",
                "-x",
                "-q",
                "-n",
                "0",
                "-m",
                LEFT_OUT,
                tests,
            ]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS)
            if done.returncode:
                return True
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(intact, "utf-8")


def main(arguments: list[str]) -> int:
    """Make mutants, and print those that survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="See that tests notice mistakes.")
    parser.add_argument("module", help="a room or module of librmq: store.recovery, filter.reduction, …")
    parser.add_argument("--sample", type=int, default=40, help="this many at random, always the same; 0: all")
    parser.add_argument("--least", type=int, default=80, help="status 1 if fewer percent are killed")
    parser.add_argument("--list", action="store_true", help="print the mutants, and make none")
    options = parser.parse_args(arguments)
    found = list(mutants(options.module))
    if options.sample and len(found) > options.sample:
        found = random.Random(0).sample(found, options.sample)
    if not found:
        parser.error(f"no module of librmq is called {options.module}")
    if options.list:
        print("\n".join(mutant.name for mutant in found))
        return 0
    told = 0
    with tempfile.TemporaryDirectory(prefix="librmq-mutation-") as scratch:
        folder = Path(scratch)
        for part in ("librmq", "tests", "examples"):
            shutil.copytree(CHECKOUT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "pytest_librmq.py"):
            shutil.copy(CHECKOUT / part, folder)
        for number, mutant in enumerate(found, 1):
            if is_told(mutant, folder):
                told += 1
            else:
                print(f"lives: {mutant.name}", flush=True)
            if number % 10 == 0:
                print(f"{told} of {number} told …", flush=True)
    print(f"{told} of {len(found)} told")
    return 0 if 100 * told >= options.least * len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
