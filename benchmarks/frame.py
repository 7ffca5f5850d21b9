"""The frame of all benchmarks: a table of cases, a runner that times them in turns, and the table of results.

A case has a run of librmq and, where something else does comparable work, a run of its peer. Cases with the same setup
are measured together: in every round all of their runs follow one another, each in an empty folder, in an order that
rotates from round to round. The first round is a warm-up and dropped. A ratio is the median of the rounds' ratios, so
that a slow period of the machine slows both sides; the rates next to it depend on the machine.

Where both codes are measured, the rows are those of the compiled core, and a second process measures the same cases
without it: `Row.pure`.

A setup is a generator function that yields what its runs need. A run is a generator function too: its clock starts at
the first ``yield``, and stops at the second, which yields the units of work (messages, bytes) that were done. What
follows is closing and checking. A run that measures by other means returns its figure, or several by name, of which a
`Part` picks one.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from librmq.runtime.compiled_core import CORE

IS_COMPILED: Final = CORE.state == "compiled core"
"""Whether this process measures the compiled core."""
CHECKOUT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = CHECKOUT / "benchmarks" / "results.json"
TABLES: Final = CHECKOUT / "benchmarks" / "results"
NO_BREAK: Final = "\N{NO-BREAK SPACE}"
SIZES: Final = {"128 B": 128, "1 KiB": 1024}
"""Sizes of bodies."""
TIMES: Final = {"s": 1.0, "ms": 1e3, "µs": 1e6}
"""Units of time, with their number in a second."""

Timed = Generator[Any, None, None]
Run = Callable[[Any, Path], "Timed | float | Mapping[str, float]"]
Setup = Callable[["Bench"], Iterator[Any]]


class AbsentError(Exception):
    """Raised by a setup when a program that it needs is not installed."""


@contextmanager
def started_server(kind: str) -> Iterator[Any]:
    """Start a PostgreSQL or a Redis on this machine, which ends with the block."""
    from tests.idempotence.servers import STARTERS, Absent

    try:
        with STARTERS[kind.lower()]() as server:
            yield server
    except Absent:
        raise AbsentError(f"a {kind} server") from None


@contextmanager
def program(call: str, *words: object, is_killed: bool = False, **variables: str) -> Iterator[Any]:
    """Start ``call``, such as ``share.sender``, in a process of its own, which ends with its input or is killed."""
    # The checkout is the last place to import from, so that the installed librmq is measured.
    path = f"import sys; sys.path.append({str(CHECKOUT)!r})"
    code = f"{path}; from benchmarks import {call.partition('.')[0]}; {call}(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], env={**os.environ, **variables},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if is_killed:
            process.kill()
        process.communicate()


@dataclass(frozen=True)
class Bench:
    """Scale and folder of the measurement."""

    rounds: int
    """Number of rounds after the warm-up."""
    scratch: Path
    """A folder on the measured file system."""
    scale: float = 1.0
    """Share of the full number of messages."""
    warm_up: int = 1
    """Number of rounds that are dropped."""

    def count(self, full: int) -> int:
        """Return ``full`` at this scale, at least one."""
        return max(int(full * self.scale), 1)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Create an empty folder, and delete it at the end."""
        path = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path)


def with_server(bench: Bench, kind: str) -> Iterator[tuple[Bench, str]]:
    """Yield the scale and the address of a server on this machine."""
    with started_server(kind) as server:
        yield bench, server.url


@dataclass(frozen=True)
class Target:
    """The required figure and the aim; upper bounds if ``at_most``."""

    least: float | None = None
    reach: float | None = None
    at_most: bool = False
    pure: Target | None = None
    """Those of Python code, without the compiled core, if they differ."""

    def of_code(self) -> Target:
        """Return the target of the code that runs here."""
        return self if IS_COMPILED or self.pure is None else self.pure


@dataclass(frozen=True)
class Part:
    """One of the figures of a run that returns several."""

    run: Run
    name: str


def no_setup(bench: Bench) -> Iterator[Bench]:
    """Yield the scale and the folder alone."""
    yield bench


def from_setup(figure: Any, _: Path) -> Any:
    """Run nothing: the setup has measured what takes too long for each round."""
    return figure


@dataclass(frozen=True)
class Case:
    """A row of a benchmark: what is measured, against what, and what is required."""

    name: str
    run: Run | Part
    detail: str = ""
    peer: Run | Part | None = None
    against: str = ""
    target: Target | Callable[[float], Target] = Target()
    """A function returns it for the figure of the peer, where a limit depends on the machine."""
    unit: str = "msg/s"
    """The unit of both runs: units of work a second, or a time, which is that of one unit of work."""
    setup: Setup = no_setup
    """Cases share runs and rounds if their setup is the same object."""
    limit: bool = False
    """The peer is a limit of the machine or librmq itself, and no other library."""
    is_cost: bool = False
    """State how many units of the peer's work one of librmq's costs."""
    cpu: bool = False
    """Count processor time of this process, and of those that it has started, instead of time."""
    figure: Callable[[Sequence[float]], float] = statistics.median
    needs: tuple[str, ...] = ()
    """Modules without which the case is left out."""


@dataclass(frozen=True)
class Row:
    name: str
    detail: str
    against: str
    measured: float
    unit: str
    """The unit of ``measured`` and of the bounds: × for a ratio."""
    least: float | None = None
    reach: float | None = None
    at_most: bool = False
    low: float | None = None
    """The smallest figure of the rounds."""
    high: float | None = None
    ours: str = ""
    other: str = ""
    less: bool = False
    """Less is better."""
    limit: bool = False
    pure: Row | None = None
    """The same row of Python code, without the compiled core."""

    @property
    def verdict(self) -> str:
        """``reached``, ``met``, ``missed``, ``short`` (of an aim without a requirement), or nothing."""

        def within(bound: float) -> bool:
            return self.measured <= bound if self.at_most else self.measured >= bound

        if self.least is not None and not within(self.least):
            return "missed"
        if self.reach is not None:
            return "reached" if within(self.reach) else "met" if self.least is not None else "short"
        return "met" if self.least is not None else ""

    @property
    def has_peer(self) -> bool:
        """Whether another library does the same work."""
        return self.unit == "×" and not self.limit

    @property
    def lost(self) -> bool:
        """Whether that library is better."""
        return self.has_peer and (self.measured > 1 if self.less else self.measured < 1)


def title(row: Row | Case) -> str:
    """Return name, detail and peer in one line."""
    detail = f", {row.detail}" if row.detail else ""
    return f"{row.name}{detail}, against {row.against}" if row.against else f"{row.name}{detail}"


# --------------------------------------------------------------------------------------------------------- measurement


def measure(cases: Sequence[Case], bench: Bench) -> tuple[list[Row], set[str]]:
    """Measure the cases; return their rows, and the packages and programs that are absent."""
    rows, absent = dict[Case, Row](), set[str]()
    groups: dict[Setup, list[Case]] = {}
    for case in cases:
        # An imported module can have no spec: kombu puts one in its place that loads its parts later.
        missing = [name for name in case.needs if name not in sys.modules and importlib.util.find_spec(name) is None]
        absent.update(missing)
        if not missing:
            groups.setdefault(case.setup, []).append(case)
    for setup, group in groups.items():
        print(f"measuring {group[0].name} …", file=sys.stderr, flush=True)
        try:
            with contextmanager(setup)(bench) as context:
                figures = interleave(group, context, bench)
        except AbsentError as error:
            absent.add(str(error))
            continue
        rows |= {case: _row(case, figures) for case in group}
    return [rows[case] for case in cases if case in rows], absent


Figures = dict[tuple[Run, bool], list[Any]]


def interleave(cases: Sequence[Case], context: Any, bench: Bench) -> Figures:
    """Return the figures of each run, a figure for each round."""
    runs = list(dict.fromkeys(_key(case, run) for case in cases for run in (case.run, case.peer) if run is not None))
    figures: Figures = {key: [] for key in runs}
    for number in range(bench.warm_up + bench.rounds):
        shift = number % len(runs)
        for run, cpu in runs[shift:] + runs[:shift]:
            with bench.folder() as folder:
                gc.collect()
                os.sync()  # what the run before has left for the disk is written before this one
                figure = _timed(run(context, folder), processor_seconds if cpu else time.perf_counter)
            if number >= bench.warm_up:
                figures[run, cpu].append(figure)
    return figures


def _key(case: Case, run: Run | Part) -> tuple[Run, bool]:
    return (run.run if isinstance(run, Part) else run), case.cpu


_seen: dict[tuple[int, str], float] = {}
"""By process below a child of this one, and the time of its start, its processor time when it was last seen."""


def processor_seconds() -> float:
    """Return the processor time of this process and of all below it, to which Spark belongs; where /proc shows them.

    Spark's daemon of Python workers waits for none of them, so nothing has the time of one that ended: what was last
    seen of it counts.
    """
    times, children = dict[int, tuple[str, float]](), dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ends
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            process = int(path.parent.name)
            times[process] = fields[19], sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            children.setdefault(int(fields[1]), []).append(process)
    ended, own = os.times(), children.get(os.getpid(), ())
    below = [process for child in own for process in children.get(child, ())]
    while below:
        process = below.pop()
        begun, seconds = times[process]
        _seen[process, begun] = seconds
        below += children.get(process, ())
    living = sum(times[process][1] for process in own)
    return time.process_time() + ended.children_user + ended.children_system + living + sum(_seen.values())


def _timed(work: Timed | float | Mapping[str, float], clock: Callable[[], float]) -> Any:
    if not isinstance(work, Generator):
        return work
    next(work)
    begin = clock()
    units = next(work)
    seconds = clock() - begin
    for _ in work:
        raise RuntimeError("a run yields twice: at the start and at the end of what is timed")
    return units, seconds


def _values(case: Case, run: Run | Part, figures: Figures) -> list[float]:
    rounds = figures[_key(case, run)]
    if isinstance(run, Part):
        return [figure[run.name] for figure in rounds]
    if not isinstance(rounds[0], tuple):
        return rounds
    if case.unit in TIMES:
        return [TIMES[case.unit] * seconds / units for units, seconds in rounds]
    return [units / max(seconds, 1e-9) for units, seconds in rounds]


def _row(case: Case, figures: Figures) -> Row:
    ours, target = _values(case, case.run, figures), case.target
    values, unit, texts = ours, case.unit, ("", "")
    others = [] if case.peer is None else _values(case, case.peer, figures)
    if callable(target):
        target = target(statistics.median(others))
    target = target.of_code()
    if others:
        values = [b / a if case.is_cost else a / b for a, b in zip(ours, others, strict=True)]
        texts = rate(statistics.median(ours), unit), rate(statistics.median(others), unit)
        unit = "×"
    less = target.at_most or case.is_cost or case.unit in TIMES
    return Row(
        case.name, case.detail, case.against, case.figure(values), unit, target.least, target.reach, target.at_most,
        min(values), max(values), *texts, less, case.limit,
    )  # fmt: skip


def print_rows(subject: str, titles: Sequence[str], rounds: int, scale: float) -> None:
    """Print the rows of cases with these titles as JSON, for `with_python`."""
    cases = importlib.import_module(f"benchmarks.{subject}").CASES
    with tempfile.TemporaryDirectory(prefix="librmq-benchmark-") as scratch:
        rows, _ = measure([case for case in cases if title(case) in titles], Bench(rounds, Path(scratch), scale))
    print(json.dumps(list(map(asdict, rows))))


def with_python(subject: str, rows: Sequence[Row], bench: Bench) -> list[Row]:
    """Measure the same cases without the compiled core, and return the rows with what they are then."""
    titles = list(map(title, rows))
    code = f"from benchmarks import frame; frame.print_rows({subject!r}, {titles!r}, {bench.rounds}, {bench.scale})"
    pure = {title(row): row for row in map(_row_of, json.loads(last_line(code, LIBRMQ_CORE="off")))}
    return [replace(row, pure=pure.get(title(row))) for row in rows]


def last_line(code: str, *words: object, **variables: str) -> str:
    """Return the last line that Python code prints in a process of its own.

    The checkout comes last on its path, because an installed librmq may be the one to measure.

    Raises:
        RuntimeError: The process has failed; the error has what it wrote.
    """
    code = f"import sys; sys.path.append({str(CHECKOUT)!r})\n{code}"
    command, inherited = [sys.executable, "-P", "-c", code, *map(str, words)], {**os.environ, **variables}
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a process has ended with status {done.returncode}: {code}\n{done.stderr}")
    return done.stdout.splitlines()[-1]


# -------------------------------------------------------------------------------------------------------------- figures


def digits(value: float) -> str:
    """Return a number with three digits, or with all that stand before its point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(value: float, unit: str) -> str:
    """Format ``value`` in ``unit`` with a prefix: ``187k msg/s``, ``1.2 GB/s``, ``130 ms``."""
    if unit == "s" and value < 1:
        return quantity(digits(value * 1000), "ms")
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            number = digits(value / factor)
            return quantity(number, f"{prefix}{unit}") if unit[0] == "B" else quantity(f"{number}{prefix}", unit)
    return quantity(digits(value), unit)


def quantity(number: str, unit: str) -> str:
    """Return a number and its unit, which stay on one line."""
    return f"{number}{unit}" if unit.startswith(("×", "/", f"M{NO_BREAK}")) else f"{number}{NO_BREAK}{unit}"


def number(value: float) -> str:
    """Return a measured number with its digits that count."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3}f}"


# ------------------------------------------------------------------------------------------------------------ the table

TITLES: Final = (
    "path", "case", "against", "measured", "rounds", "required", "aim", "result", "librmq", "the other", "in Python",
    "required of it", "its result", "librmq in Python",
)  # fmt: skip
KEY: Final = """\
"Measured" is the median of the rounds, and "rounds" their range. The result is "met" or "missed" for what is
required, "reached" for the aim, and "short" for an aim that is not reached where nothing is required.
"""


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table, without what Python code does unless that was measured."""

    def bound(value: float | None) -> str:
        sign = f"≤{NO_BREAK}" if row.at_most else ""
        return "" if value is None else f"{sign}{quantity(digits(value), row.unit)}"

    spread = "" if row.low is None or row.high is None else f"{number(row.low)}–{number(row.high)}"
    measured, pure = quantity(number(row.measured), row.unit), ("", "", "", "")
    if row.pure is not None:
        of_pure = cells(row.pure)
        pure = of_pure[3], of_pure[5], of_pure[7], of_pure[8]
    return (
        row.name, row.detail, row.against, measured, spread, bound(row.least), bound(row.reach), row.verdict,
        row.ours, row.other, *pure,
    )  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, without the columns that have nothing in them."""
    columns = zip(TITLES, ["---"] * len(TITLES), *map(cells, rows), strict=True)
    lines = zip(*(column for column in columns if any(column[2:])), strict=True)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shortcomings(rows: Sequence[Row]) -> str:
    """Return sentences about missed figures, and about faster peers if there are peers."""
    missed = [row for row in rows if row.verdict == "missed"]
    in_python = [row.pure for row in rows if row.pure is not None and row.pure.verdict == "missed"]
    lost = [row for row in rows if row.lost]
    lines = ["Every required figure was reached in this run." if rows else "Nothing was measured in this run."]
    if missed or in_python:
        lines = ["Required and not reached in this run:\n"]
        lines += [f"- {title(row)}: {cells(row)[3]} where {cells(row)[5]} is required." for row in missed]
        lines += [f"- {title(row)}, in Python: {cells(row)[3]} where {cells(row)[5]} is required." for row in in_python]
    if lost:
        lines.append("\nHere something else is faster than librmq:\n")
        lines += [f"- {title(row)}: librmq has {row.ours}, the other {row.other} ({cells(row)[3]})." for row in lost]
    elif any(row.has_peer for row in rows):
        lines.append("\nNo peer was faster in this run.")
    return "\n".join(lines)


def page(subject: str, rows: Sequence[Row], measured_on: str) -> str:
    return f"""\
# Results of benchmarks.{subject}

Written by `python -m benchmarks.{subject} --write`. [Performance](../../docs/performance.md) says what was measured, and how.

{markdown(rows)}

{KEY}
{shortcomings(rows)}

Measured on: {measured_on}.
"""  # noqa: E501


# ---------------------------------------------------------------------------------------------------------- the results


def recorded() -> dict[str, tuple[list[Row], str]]:
    """Return the recorded rows of each subject, and what they were measured on."""
    subjects = json.loads(RESULTS.read_text("utf-8"))
    return {name: (list(map(_row_of, part["rows"])), part["measured_on"]) for name, part in subjects.items()}


def _row_of(fields: Mapping[str, Any]) -> Row:
    pure = fields.get("pure")
    return Row(**{**fields, "pure": None if pure is None else Row(**pure)})


def record(subject: str, rows: Sequence[Row], measured_on: str) -> None:
    """Put a subject's rows into the file of results, and write its page and its picture."""
    from benchmarks import plots

    results = recorded() if RESULTS.exists() else {}
    results[subject] = list(rows), measured_on
    subjects = {
        name: {"measured_on": place, "rows": list(map(asdict, part))} for name, (part, place) in sorted(results.items())
    }
    text = json.dumps(subjects, ensure_ascii=False).replace('{"', '\n{"')  # a row a line
    RESULTS.write_text(f"{text.strip()}\n", "utf-8")
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{subject}.md").write_text(page(subject, rows, measured_on), "utf-8")
    plots.draw(subject, rows)


def machine(scratch: Path) -> str:
    """Return processor, memory, system, file system of ``scratch``, Python and load."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30) if hasattr(os, "sysconf") else 0
    kind = "an unknown file system"
    if sys.platform == "linux":
        command = ["df", "--output=fstype", str(scratch)]
        kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return "; ".join(
        (
            f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
            f"{platform.system()} {platform.release()}",
            f"files on {kind}",
            f"{platform.python_implementation()} {platform.python_version()}",
            *([f"load average {os.getloadavg()[0]:.1f}"] if hasattr(os, "getloadavg") else []),
        )
    )


def commit() -> str:
    """Return the commit of the checkout, and whether files differ from it; empty without git."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions(modules: Sequence[str]) -> str:
    """Return names and versions of the packages that have these modules."""
    packages = importlib.metadata.packages_distributions()
    names = sorted({name for module in modules for name in packages.get(module, ())})
    return ", ".join([*(f"{name} {importlib.metadata.version(name)}" for name in names), _SQLITE])


_SQLITE: Final = f"SQLite {sqlite3.sqlite_version}"


def main(subject: str, description: str | None, cases: Sequence[Case], *, both: bool = False) -> None:
    """Measure the cases of a subject as a command, show their table, and record it if that is wanted.

    With ``both`` a process with the compiled core also measures the Python code.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{subject}", description=(description or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that count (5)")
    parser.add_argument("--rows", metavar="A,B", help="only the rows whose names have one of these words in them")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the messages: a trial, not a measurement")
    parser.add_argument("--write", action="store_true", help="record everything, measured at full size")
    options = parser.parse_args()
    words = options.rows.split(",") if options.rows else [""]
    if unknown := [word for word in words if not any(word in case.name for case in cases)]:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        parser.error(f"no such rows: {', '.join(unknown)}; there are: {names}")
    if options.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    if options.write and (options.quick or options.rows or options.rounds < 5):
        parser.error("--write: the results are of all rows at full size, from at least five rounds")
    logging.getLogger("librmq").setLevel(logging.CRITICAL)  # what runs do on purpose would break up the lines
    with tempfile.TemporaryDirectory(prefix="librmq-benchmark-") as scratch:
        bench = Bench(options.rounds, Path(scratch), 0.05 if options.quick else 1.0)
        used = versions(["librmq", "numpy", *(module for case in cases for module in case.needs)])
        code = CORE.state.partition(",")[0]
        if both and IS_COMPILED:
            code = "compiled core, and Python code beside it"
        at_commit = [f"commit {name}"] if (name := commit()) else []
        measured_on = "; ".join([machine(bench.scratch), code, *at_commit, used, f"rounds: {bench.rounds}"])
        rows, absent = measure([case for case in cases if any(word in case.name for word in words)], bench)
        if both and IS_COMPILED:
            rows = with_python(subject, rows, bench)
    if absent:
        measured_on += f"; not installed and left out: {', '.join(sorted(absent))}"
    print(f"{markdown(rows)}\n\n{shortcomings(rows)}\n\nMeasured on: {measured_on}.")
    if options.write:
        record(subject, rows, measured_on)
