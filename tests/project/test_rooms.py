"""What readers can rely on in the layout: no modules of a room import each other in a circle."""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import grimp


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
