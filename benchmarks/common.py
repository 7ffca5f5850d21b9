"""Common parts of all benchmarks: interleaved runs, ratios within a round, and the table of results.

A benchmark states ratios. Compared variants run one after the other in every round, each in a fresh folder, in an order
that rotates from round to round. The first round is a warm-up and dropped. A ratio is the median of the rounds' ratios,
so a slow period of the machine slows both sides. The absolute rates (medians) next to it depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import charts
from benchmarks.charts import NO_BREAK, digits

CHECKOUT: Final = charts.CHECKOUT

Measure = Callable[["Bench"], "list[Row]"]
"""One part of a benchmark."""

Run = Callable[[Path], float]
"""One run of a variant in an empty folder; returns its rate in units (messages, bytes) a second."""


class Stopwatch:
    """Stopwatch for a ``with`` block, in seconds."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin


@dataclass(frozen=True)
class Bench:
    """Scale and folder of the measurement."""

    rounds: int
    """Number of rounds after the warm-up."""
    scratch: Path
    """A folder on the measured file system."""
    scale: float = 1.0
    """Share of the usual number of messages."""
    absent: set[str] = field(default_factory=set)
    """Packages that a benchmark needs and that are not installed."""

    def count(self, usual: int) -> int:
        """Return ``usual`` at this scale, at least one."""
        return max(int(usual * self.scale), 1)

    def has(self, package: str) -> bool:
        """Return whether ``package`` can be imported, and note it if not."""
        if importlib.util.find_spec(package) is not None:
            return True
        self.absent.add(package)
        return False

    def interleave(self, variants: Mapping[str, Run]) -> dict[str, list[float]]:
        """Return the rates of each variant, one for each round."""
        rates: dict[str, list[float]] = {name: [] for name in variants}
        names = list(variants)
        for number in range(self.rounds + 1):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                with self.folder() as folder:
                    gc.collect()
                    rate = variants[name](folder)
                if number:
                    rates[name].append(rate)
        return rates

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Open an empty folder, and delete it at the end."""
        path = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path)


@dataclass(frozen=True)
class Target:
    """The required figure and the aim; upper bounds if ``at_most``."""

    least: float | None = None
    reach: float | None = None
    at_most: bool = False

    def verdict(self, measured: float) -> str:
        """Return ``reached``, ``met``, ``missed``, ``short`` (of an aim without a requirement), or nothing."""

        def within(bound: float | None) -> bool:
            return bound is not None and (measured <= bound if self.at_most else measured >= bound)

        if self.least is not None and not within(self.least):
            return "missed"
        if self.reach is not None:
            return "reached" if within(self.reach) else "met" if self.least is not None else "short"
        return "met" if self.least is not None else ""


NO_TARGET: Final = Target()


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    path: str
    case: str
    against: str
    measured: float
    unit: str
    """The unit of ``measured`` and of the target: × for a ratio."""
    target: Target = NO_TARGET
    spread: str = ""
    """Least and greatest of the rounds' ratios."""
    ours: str = ""
    other: str = ""
    limit: bool = False
    """Compared with a limit of the machine or with librmq itself, not with a peer."""

    @property
    def has_peer(self) -> bool:
        """Return whether something else does the same work."""
        return self.unit == "×" and not self.limit

    @property
    def lost(self) -> bool:
        """Return whether a peer is better."""
        return self.has_peer and (self.measured > 1 if self.target.at_most else self.measured < 1)


def compare(
    path: str,
    case: str,
    against: str,
    ours: Sequence[float],
    other: Sequence[float],
    target: Target = NO_TARGET,
    *,
    unit: str = "msg/s",
    limit: bool = False,
) -> Row:
    """Make a row from the rates of two variants, round by round; with ``unit`` "s" from their seconds."""
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    return Row(
        path=path,
        case=case,
        against=against,
        measured=statistics.median(ratios),
        unit="×",
        target=target,
        spread=f"{_number(min(ratios))}–{_number(max(ratios))}",
        ours=rate(statistics.median(ours), unit),
        other=rate(statistics.median(other), unit),
        limit=limit,
    )


def cost(
    path: str, against: str, ours: Sequence[float], other: Sequence[float], target: Target = NO_TARGET, *, unit: str
) -> Row:
    """Make a row with the cost of one unit of ours in units of the other, from the rates of both, round by round."""
    costs = [two / one for one, two in zip(ours, other, strict=True)]
    return Row(
        path,
        "",
        against,
        statistics.median(costs),
        "×",
        target,
        f"{min(costs):.2f}–{max(costs):.2f}",
        rate(statistics.median(ours), unit),
        rate(statistics.median(other), "msg/s"),
        limit=True,
    )


def rate(value: float, unit: str) -> str:
    """Format ``value`` in ``unit`` with a prefix: ``187k msg/s``, ``1.2 GB/s``, ``130 ms``."""
    if unit == "s" and value < 1:
        return quantity(digits(value * 1000), "ms")
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            shown = digits(value / factor)
            return quantity(shown, f"{prefix}{unit}") if unit[0] == "B" else quantity(f"{shown}{prefix}", unit)
    return quantity(digits(value), unit)


def quantity(number: str, unit: str) -> str:
    """Return a number and its unit, which stay on one line."""
    return f"{number}{unit}" if unit.startswith(_CLOSE) else f"{number}{NO_BREAK}{unit}"


_CLOSE: Final = ("×", "/", f"M{NO_BREAK}")
"""How units begin that follow their number without a space."""


def _number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3}f}"


# ---------------------------------------------------------------------------------------------------------- the table

_TITLES: Final = ("path", "case", "against", "measured", "rounds", "required", "aim", "", "librmq", "the other")
KEY: Final = """\
"Measured" is the median of the rounds, and "rounds" their range. The result is "met" or "missed" for what is
required, "reached" for the aim, and "short" for an aim that is not reached where nothing is required.
"""


def _cells(row: Row) -> tuple[str, ...]:
    sign = f"≤{NO_BREAK}" if row.target.at_most else ""

    def bound(value: float | None) -> str:
        return "" if value is None else f"{sign}{quantity(digits(value), row.unit)}"

    return (
        row.path,
        row.case,
        row.against,
        quantity(_number(row.measured), row.unit),
        row.spread,
        bound(row.target.least),
        bound(row.target.reach),
        row.target.verdict(row.measured),
        row.ours,
        row.other,
    )


def show(rows: Sequence[Row]) -> None:
    """Print a table, with rich if it is installed, otherwise in plain columns."""
    lines = [_cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(_TITLES, *lines, strict=True)]
        for line in (_TITLES, *lines):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(*_TITLES)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*line, style="red" if line[7] == "missed" else "yellow" if row.lost else None)
    console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, without the columns that have nothing in them."""
    titles = (*_TITLES[:7], "result", *_TITLES[8:])
    columns = zip(titles, ["---"] * len(titles), *map(_cells, rows), strict=True)
    lines = zip(*(column for column in columns if any(column[2:])), strict=True)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shortcomings(rows: Sequence[Row]) -> str:
    """Return sentences about missed figures, and about faster peers if there are peers."""
    missed = [row for row in rows if row.target.verdict(row.measured) == "missed"]
    lost = [row for row in rows if row.lost]
    lines = []
    if missed:
        lines.append("Required and not reached in this run:\n")
        lines += [f"- {_named(row)}: {_cells(row)[3]} where {_cells(row)[5]} is required." for row in missed]
    else:
        lines.append("Every required figure was reached in this run.")
    if lost:
        lines.append("\nHere something else is faster than librmq:\n")
        lines += [f"- {_named(row)}: librmq has {row.ours}, the other {row.other} ({_cells(row)[3]})." for row in lost]
    elif any(row.has_peer for row in rows):
        lines.append("\nNo peer was faster in this run.")
    return "\n".join(lines)


def _named(row: Row) -> str:
    case = f", {row.case}" if row.case else ""
    return f"{row.path}{case}, against {row.against}" if row.against else f"{row.path}{case}"


# -------------------------------------------------------------------------------------------------------- the machine


def machine(scratch: Path) -> str:
    """Return processor, memory, system, file system of ``scratch``, Python and load."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30) if hasattr(os, "sysconf") else 0
    return "; ".join(
        (
            f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB",
            f"{platform.system()} {platform.release()}",
            f"files on {file_system(scratch)}",
            f"{platform.python_implementation()} {platform.python_version()}",
            *([f"load average {os.getloadavg()[0]:.1f}"] if hasattr(os, "getloadavg") else []),
        )
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def file_system(path: Path) -> str:
    """Return the kind of file system of ``path``, from the mount table."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8").splitlines()
    except OSError:
        return "an unknown file system"
    best, kind = "", "an unknown file system"
    resolved = path.resolve()
    for line in mounts:
        _, point, found, *_ = line.split(" ")
        if len(point) >= len(best) and resolved.is_relative_to(point):
            best, kind = point, found
    return kind


def versions(packages: Sequence[str]) -> str:
    """Return names and versions of the installed packages."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


# -------------------------------------------------------------------------------------------------------- the command


def command(
    section: str,
    description: str,
    parts: Mapping[str, Measure],
    packages: Sequence[str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark as a command: measure, show the table, and keep it with its picture if that is wanted.

    ``packages`` are those whose versions matter. Returns 0 whatever the results; exits with 2 for wrong ``arguments``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{section}", description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that count (5)")
    parser.add_argument("--rows", default=",".join(parts), metavar="A,B", help="which of %(default)s")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the messages: a trial, not a measurement")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results, everything and at full size")
    chosen = parser.parse_args(arguments)
    names = chosen.rows.split(",")
    if unknown := sorted(set(names) - set(parts)):
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(parts)}")
    if chosen.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    if chosen.write and (chosen.quick or set(names) != set(parts) or chosen.rounds < 5):
        parser.error("--write: the results are of all rows at full size, from at least five rounds")
    logging.getLogger("librmq").setLevel(logging.ERROR)  # a recovery's warnings would break up the lines
    with tempfile.TemporaryDirectory(prefix="librmq-benchmark-") as scratch:
        bench = Bench(chosen.rounds, Path(scratch), 0.05 if chosen.quick else 1.0)
        place = f"{machine(bench.scratch)}; {versions(packages)}, SQLite {sqlite3.sqlite_version}"
        rows: list[Row] = []
        for name in names:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            rows += parts[name](bench)
    absent = f" Not installed and left out: {', '.join(sorted(bench.absent))}." if bench.absent else ""
    notes = f"{shortcomings(rows)}\n\nMeasured on: {place}; rounds: {bench.rounds}.{absent}"
    show(rows)
    print(f"\n{notes}")
    if chosen.write:
        charts.keep(section, f"{markdown(rows)}\n\n{KEY}\n{notes}")
    return 0
