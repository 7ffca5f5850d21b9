"""The lines of librmq that a run of the tests with coverage did not reach: all in a file, the least covered printed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

SHOWN = 20
"""Number of modules that are printed."""


class Module(NamedTuple):
    """The lines of a module that have statements, and those among them that were not reached."""

    name: str
    statements: int
    missing: tuple[int, ...]

    @property
    def covered(self) -> float:
        """Share of the statements that were reached, in percent."""
        return 100 * (1 - len(self.missing) / self.statements) if self.statements else 100.0


def ranges(lines: Iterable[int]) -> str:
    """Return lines in ascending order as text: ``3-5, 9``."""
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def listing(modules: Iterable[Module]) -> Iterator[str]:
    """Yield a line for each module that was not reached as a whole, the least covered first."""
    for module in sorted(modules, key=lambda module: (module.covered, module.name)):
        if module.missing:
            yield f"{module.covered:5.1f} %  {module.name}: {ranges(module.missing)}"


def shortened(line: str, width: int = 118) -> str:
    """Return a line that fits; an ellipsis stands for the rest."""
    return line if len(line) <= width else line[: width - 2].rpartition(",")[0] + ", …"


def measured(data: Path) -> list[Module]:
    """Return what coverage measured."""
    import coverage

    origin = importlib.util.find_spec("librmq")
    folder = str(Path(str(origin and origin.origin)).parent) + os.sep
    found = coverage.Coverage(data_file=str(data))
    found.load()
    modules = []
    for file in sorted(found.get_data().measured_files()):
        _, statements, _, missing, _ = found.analysis2(file)
        modules.append(Module(file.removeprefix(folder), len(statements), tuple(missing)))
    return modules


def main(data: Path, report: Path) -> int:
    """Write the listing, and print its beginning."""
    modules = measured(data)
    lines = list(listing(modules))
    statements = sum(module.statements for module in modules)
    missing = sum(len(module.missing) for module in modules)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{missing:,} of {statements:,} statements were not reached; the least covered modules:")
    for line in lines[:SHOWN]:
        print(f"  {shortened(line)}")
    print(f"All lines that no test reached: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
