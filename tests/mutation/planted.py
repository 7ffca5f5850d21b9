"""Plant a bug in a module as it is imported, and look whether the history of a program shows it.

::

    python -m tests.mutation.planted              # the table: part, name, program, anomaly
    python -m tests.mutation.planted NAME         # plant one bug, run its program, and print the anomalies
    python -m tests.mutation.planted NAME 60      # plant one bug, and simulate weeks until one fails, or for 60 s
    python -m tests.mutation.planted NAME inf 24  # the same, for 24 of them

``planted.toml`` has the bugs, ``programs.py`` the programs. No file is changed.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
_SPEC = find_spec("librmq")
assert _SPEC is not None
assert _SPEC.origin is not None
PACKAGE = Path(_SPEC.origin).parent
"""The librmq that is imported later, here or in a fork: a program may count its lines by their folder."""
SHARES = "shares"
"""The program of bugs that only processes which share a store have: the simulation of them."""
WRITERS = "writers"
"""The program of bugs of writers that append to a shared log by themselves: the simulation of them."""
MOST_WORLDS = 500
"""Some twenty are needed for a bug that shows only where a writer dies within its append."""
BROKEN = "broken"
"""The anomaly of all bugs of writers."""


class Edit(NamedTuple):
    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return "librmq." + self.file.removesuffix(".py").replace("/", ".")

    def source(self, before: str | None = None) -> str:
        """Return the source of the module with the change, which follows others in ``before``.

        Raises:
            LookupError: The old text is not there, or more than once.
        """
        text = (PACKAGE / self.file).read_text("utf-8") if before is None else before
        if text.count(self.old) != 1:
            raise LookupError(f"{self.file} has {text.count(self.old)} times the text to change: {self.old!r}")
        return text.replace(self.old, self.new)


class Bug(NamedTuple):
    """A bug to plant, and what finds it."""

    name: str
    part: str
    what: str
    program: str
    """The program whose history shows it; without the bug it has no anomaly."""
    anomaly: str
    edits: tuple[Edit, ...]
    issue: str = ""
    """Where it was reported, if RocketMQ or one of its clients had it."""


BUGS = tuple(
    Bug(**row | {"edits": tuple(Edit(**edit) for edit in row["edits"])})
    for row in tomllib.loads((HERE / "planted.toml").read_text("utf-8"))["bug"]
)


class _Planted(SourceFileLoader):
    """Loads a module whose source is changed."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules that are changed."""

    def __init__(self, sources: Mapping[str, tuple[Path, str]]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._sources:
            return None
        place, source = self._sources[fullname]
        return spec_from_file_location(fullname, place, loader=_Planted(fullname, place, source))


def plant_sources(sources: Mapping[str, tuple[Path, str]]) -> None:
    """Let this process, which has not imported librmq yet, take the sources of modules from here."""
    assert not sources.keys() & sys.modules.keys()
    sys.meta_path.insert(0, _Finder(sources))


def plant(bug: Bug) -> None:
    sources: dict[str, tuple[Path, str]] = {}
    for edit in bug.edits:
        place = PACKAGE / edit.file
        before = sources.get(edit.module, (place, None))[1]
        sources[edit.module] = place, edit.source(before)
    plant_sources(sources)
    logging.disable(logging.CRITICAL)


def run_program(bug: Bug) -> list[str]:
    """Run the program of a planted bug; return the kinds of anomalies, or the lines of what processes have broken."""
    if bug.program == SHARES:
        return simulate_shares(60)[1]
    if bug.program == WRITERS:
        return simulate_writers()
    from tests.mutation.programs import anomalies_of

    anomalies = anomalies_of(bug.program)
    for edit in bug.edits:
        assert edit.module in sys.modules, f"the program {bug.program} does not use {edit.module}"
    return anomalies


def simulate(seconds: float, runs: float = math.inf) -> tuple[str, list[str]]:
    """Simulate half days and weeks with the planted bug until one fails; return when, and the lines of the error."""
    from tests.simulation.world import World

    begin_s, number = time.process_time(), 0
    while (spent_s := time.process_time() - begin_s) < seconds and number < runs:
        try:
            settings: dict[str, Any] = {} if number % 8 == 7 else {"days": 0.5, "steps": 150}
            World(f"planted {number}", over_share=number % 4 == 2).run(**settings)
        except Exception as error:
            spent_s = time.process_time() - begin_s
            return f"found in run {number} after {spent_s:.0f} s", str(error).splitlines()
        number += 1
    return f"not found in {number} runs of {spent_s:.0f} s", []


def simulate_shares(seconds: float) -> tuple[str, list[str]]:
    """Let processes with the planted bug share stores, like `simulate`."""
    from tests.simulation.shares import SharedWorld

    begin_s, number = time.monotonic(), 0  # noqa: TID251 (its processes wait more than they compute)
    while (spent_s := time.monotonic() - begin_s) < seconds:  # noqa: TID251
        with tempfile.TemporaryDirectory(prefix="librmq-shares-") as folder:
            try:
                SharedWorld(f"planted {number}", Path(folder)).run()
            except Exception as error:
                spent_s = time.monotonic() - begin_s  # noqa: TID251
                return f"found in run {number} after {spent_s:.0f} s", str(error).splitlines()
        number += 1
    return f"not found in {number} runs of {spent_s:.0f} s", []


def simulate_writers() -> list[str]:
    """Let writers with the planted bug append to logs until they break a promise; return `BROKEN` and which.

    Which of several it is depends on how far the owner is with its following.
    """
    from tests.simulation.writers import WritersWorld

    for number in range(MOST_WORLDS):
        with tempfile.TemporaryDirectory(prefix="librmq-writers-") as folder:
            try:
                WritersWorld(f"planted {number}", Path(folder)).run()
            except AssertionError as error:
                return [BROKEN, str(error).partition(":")[0]]
            except Exception as error:
                return [BROKEN, type(error).__name__]
    return []


if __name__ == "__main__":
    for bug in BUGS:
        if not sys.argv[1:]:
            print(f"{bug.part:8}  {bug.name:22}  {bug.program:20}  {bug.anomaly:15}  {bug.what}")
        elif bug.name == sys.argv[1]:
            plant(bug)
            if not sys.argv[2:]:
                print(json.dumps(run_program(bug)))
                continue
            when, lines = (simulate_shares if bug.program == SHARES else simulate)(*map(float, sys.argv[2:]))
            print(f"{when}: {' '.join(lines[:3])}" if lines else when)
