"""What readers can rely on in the layout: no import cycles, one meaning per name, a top folder that fits a screen."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.reference import CHECKOUT

LIBRARY = CHECKOUT / "librmq"
MODULES = {".".join(path.relative_to(CHECKOUT).with_suffix("").parts): path for path in LIBRARY.rglob("*.py")}
ROOMS = sorted({name.split(".")[1] for name, path in MODULES.items() if path.parent != LIBRARY})


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(name, ast.parse(path.read_text("utf-8"))) for name, path in sorted(MODULES.items())]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, but not their expressions, which hold neither an import nor a class."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield those of ``modules`` that a module imports, including inside functions and under ``TYPE_CHECKING``."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from modules & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            yield from modules & {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return one import cycle, which begins and ends with the same module, or an empty list if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    modules = {name for name in MODULES if not name.endswith(".__init__")}
    return {name: set(imported(tree, modules)) - {name} for name, tree in trees() if name in modules}


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_of_a_room_import_each_other(room: str, edges: dict[str, set[str]]) -> None:
    """Imports under ``TYPE_CHECKING`` and inside functions count; those of a package's lazy ``__init__`` do not."""
    inside = {name for name in edges if name.startswith(f"librmq.{room}.")}
    assert not circle({name: edges[name] & inside for name in inside})


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for module, tree in trees():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_the_top_fits_on_a_screen() -> None:
    assert len([path for path in LIBRARY.iterdir() if path.name != "__pycache__"]) <= 35


def test_names_of_tests_are_below_60_characters() -> None:
    """What does not fit into the name belongs in the docstring."""
    too_long = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in sorted((CHECKOUT / "tests").rglob("*.py"))
        for name in re.findall(r"\bdef (test_\w+)", path.read_text("utf-8"))
        if len(name) >= 60
    ]
    assert too_long == []
