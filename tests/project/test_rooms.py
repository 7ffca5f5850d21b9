"""The listing of a room shows its face and its inside: modules that no other room imports begin with an underscore."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

from tests.reference import CHECKOUT

LIBRARY = CHECKOUT / "librmq"
MODULES, NAMES = 86, 375
"""The most modules that other rooms import from, and names that they import from these. They may only go down."""
LOADED_BY_NAME = (
    "librmq.cli.commands.",  # one module for each group of commands
    "librmq.integrations.django.apps",  # Django's own names, from here on
    "librmq.integrations.django.management.commands.",
    "librmq.integrations.django.models",
    "librmq.integrations.kombu",  # an application imports it to make kombu know librmq://
    "librmq.testing.plugin",  # pytest_librmq imports it
)


def room_of(module: str) -> str:
    """Return the package directly below ``librmq`` that a module belongs to, or nothing for a module beside them."""
    name = module.split(".")[1] if "." in module else ""
    return name if (LIBRARY / name / "__init__.py").is_file() and name else ""


def is_package(module: str) -> bool:
    return (LIBRARY.parent / module.replace(".", "/")).is_dir()


@cache
def imports() -> list[tuple[str, str, str]]:
    """Return each module of librmq with each module that it imports, and the name that it imports from that."""
    names = {}
    imported = []
    for path in LIBRARY.rglob("*.py"):
        parts = path.relative_to(CHECKOUT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "librmq":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    imported.append((name, inner if inner in names else node.module, alias.name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                imported.append((name, node.value, ""))
    return imported


def test_a_room_imports_only_the_faces_of_others() -> None:
    inside = {
        (name, imported)
        for name, imported, _ in imports()
        if imported.rpartition(".")[2].startswith("_") and room_of(imported) not in ("", room_of(name))
    }
    assert inside == set(), "move what they share into a module without underscore"


def test_inner_modules_begin_with_an_underscore() -> None:
    users = defaultdict(set)
    for name, imported, _ in imports():
        users[imported].add(room_of(name))
    shown = {
        module
        for module, rooms in users.items()
        if room_of(module)
        and rooms == {room_of(module)}
        and not module.rpartition(".")[2].startswith("_")
        and not is_package(module)
        and not module.startswith(LOADED_BY_NAME)
    }
    assert shown == set(), "no other room imports them"


def test_less_crosses_between_rooms() -> None:
    """What a package promises is imported through it and does not count: `__init__` shows it in one look."""
    crossing = {
        (imported, name)
        for importer, imported, name in imports()
        if name
        and room_of(imported) not in ("", room_of(importer))
        and not (is_package(imported) or is_package(importer))
    }
    advice = "import through the package of the room, or move the code to where it is used"
    assert len({module for module, _ in crossing}) <= MODULES, advice
    assert len(crossing) <= NAMES, advice
