"""What readers can rely on in the layout: no import cycles, one meaning per name, a top folder that fits a screen."""

from __future__ import annotations

import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import grimp

from tests.reference import CHECKOUT

LIBRARY = CHECKOUT / "librmq"


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return one import cycle, which begins and ends with the same module, or an empty list if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_of_a_room_import_each_other() -> None:
    """Imports under ``TYPE_CHECKING`` and inside functions count; those of a package's lazy ``__init__`` do not."""
    graph = grimp.build_graph("librmq", cache_dir=None)
    rooms = defaultdict[str, dict[str, set[str]]](dict)
    for name in graph.modules:
        room = ".".join(name.split(".")[:2])
        if not graph.find_children(name):
            imported = graph.find_modules_directly_imported_by(name)
            rooms[room][name] = {other for other in imported if other.startswith(f"{room}.")} - {name}
    assert len(rooms) > 15
    packages = {name for name in graph.modules if graph.find_children(name)}
    circles = [circle({name: to - packages for name, to in edges.items()}) for edges in rooms.values()]
    assert not any(circles), circles


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    commands_of_django = LIBRARY / "integrations" / "django" / "management" / "commands"  # each has a class Command
    for path in LIBRARY.rglob("*.py"):
        if path.parent == commands_of_django:
            continue
        for name in re.findall(r"^ *class ([^_\W]\w*)[(:]", path.read_text("utf-8"), re.MULTILINE):
            places[name].append(path.name)
    assert len(places) > 500
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_the_top_fits_on_a_screen() -> None:
    assert len([path for path in LIBRARY.iterdir() if path.name != "__pycache__"]) <= 36


def test_names_of_tests_are_below_60_characters() -> None:
    """What does not fit into the name belongs in the docstring."""
    too_long = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in sorted((CHECKOUT / "tests").rglob("*.py"))
        for name in re.findall(r"\bdef (test_\w+)", path.read_text("utf-8"))
        if len(name) >= 60
    ]
    assert too_long == []
