"""Plant a bug in a module as it is imported, and look whether the history of a program shows it.

::

    python -m tests.mutation.planted              # the table: part, name, program, anomaly
    python -m tests.mutation.planted NAME         # plant one bug, run its program, and print the anomalies
    python -m tests.mutation.planted NAME 60      # plant one bug, and simulate weeks until one fails, or for 60 s

``planted.toml`` has the bugs, ``programs.py`` the programs. No file is changed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "librmq"


class Edit(NamedTuple):
    """A change of one module."""

    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The name of the module."""
        return "librmq." + self.file.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """Return the source of the module with the change.

        Raises:
            LookupError: The old text is not there, or more than once.
        """
        text = (PACKAGE / self.file).read_text("utf-8")
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
    """Loads a module with its change."""

    edit: Edit

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self.edit.source(), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules that are changed."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits = {edit.module: edit for edit in edits}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        edit = self.edits.get(fullname)
        if edit is None:
            return None
        loader = _Planted(fullname, str(PACKAGE / edit.file))
        loader.edit = edit
        return spec_from_file_location(fullname, PACKAGE / edit.file, loader=loader)


def plant(bug: Bug) -> None:
    """Plant a bug in this process, which has not imported librmq yet."""
    sys.meta_path.insert(0, _Finder(bug.edits))
    logging.disable(logging.CRITICAL)


def run_program(bug: Bug) -> list[str]:
    """Run the program of a planted bug; return the kinds of anomalies."""
    from tests.mutation.programs import anomalies_of

    anomalies = anomalies_of(bug.program)
    for edit in bug.edits:
        assert edit.module in sys.modules, f"the program {bug.program} does not use {edit.module}"
    return anomalies


def simulate(seconds: float) -> str:
    """Simulate weeks with the planted bug until one fails; return when, and by what."""
    from tests.simulation.world import World

    begin_s, week = time.process_time(), 0
    while (spent_s := time.process_time() - begin_s) < seconds:
        try:
            World(f"planted {week}", over_share=week % 4 == 3).run()
        except Exception as error:
            spent_s = time.process_time() - begin_s
            return f"found in week {week} after {spent_s:.0f} s: {' '.join(str(error).splitlines()[:2])}"
        week += 1
    return f"not found in {week} weeks of {spent_s:.0f} s"


if __name__ == "__main__":
    for bug in BUGS:
        if not sys.argv[1:]:
            print(f"{bug.part:8}  {bug.name:22}  {bug.program:20}  {bug.anomaly:15}  {bug.what}")
        elif bug.name == sys.argv[1]:
            plant(bug)
            print(simulate(float(sys.argv[2])) if sys.argv[2:] else json.dumps(run_program(bug)))
