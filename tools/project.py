"""The commands of a checkout: ``demo``, ``check``, ``site`` and ``release``.

Needs only Python 3.11 and its standard library. Without a POSIX shell, run ``python tools/project.py check``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # with PYTHONSAFEPATH it is not there

from environment import CHECKOUT, Environment, Refused, project_table
from programs import Beside, result_of, run_command, watch
from screen import Screen, Step, seconds_text

DEMO = CHECKOUT / "examples" / "demo_store.py"
DEMO_ON_SPARK = CHECKOUT / "examples" / "demo_spark.py"
SITE = CHECKOUT / "tools" / "website.py"
RELEASE = CHECKOUT / "tools" / "release.py"
DEMO_REPORT = CHECKOUT / "examples" / "demo_report.py"

QUICK_EXTRAS = frozenset(
    "arrow bloom cli compression dev fast grpc metrics redis remote report sql test".split()  # noqa: SIM905 (a line)
)
CHECK_EXTRAS = QUICK_EXTRAS | {"docs", "jvm", "spark", "test-spark"}
SITE_EXTRAS = (QUICK_EXTRAS - {"test"}) | {"docs"}
SMALL_DEMO_EXTRAS = frozenset({"cli", "report"})
DEMO_EXTRAS = frozenset({"arrow", "cli", "compression", "jvm", "report", "spark"})

IN_PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup", "--no-loadscope-reorder")
"""One process for each core; the latter of two equal pytest options counts, as in ``./check -n 0``."""
LEFT_OUT = "not bench"
LEFT_OUT_QUICK = "not bench and not slow and not spark and not thorough"
UNCOVERED_SHOWN = 22
"""The heading and 20 modules."""
WITHOUT_SPARK = ("--allow-subclassing-any", "--allow-untyped-decorators", "--no-warn-unused-ignores")
"""What mypy must let pass where PySpark and its types are not installed."""


@dataclass(frozen=True)
class Program:
    """A program that a check runs, and the output line that it belongs to."""

    step: str
    name: str
    command: tuple[str | Path, ...]


def demo(arguments: Sequence[str]) -> int:
    """Show stores and a report, then the same stores on Spark unless small; return the exit status."""
    is_small = "--small" in arguments
    arguments = [word for word in arguments if word != "--small"]
    for script in (DEMO, DEMO_REPORT, DEMO_ON_SPARK):
        if not script.exists():
            raise Refused(f"{script.relative_to(CHECKOUT)} is missing: this checkout is not whole; get it again.")

    def run_scripts(*scripts: Path) -> int:
        screen.line()
        statuses = (place.run([place.python, script, *arguments], Path.cwd()) for script in scripts)
        return next((status for status in statuses if status), 0)

    screen = Screen()
    place = environment()
    place.prepare(SMALL_DEMO_EXTRAS, screen)
    if is_small:
        return run_scripts(DEMO, DEMO_REPORT)
    if place.extras() >= DEMO_EXTRAS:
        return run_scripts(DEMO, DEMO_REPORT, DEMO_ON_SPARK)
    screen.line("Spark (450 MB) is installed meanwhile.")
    with Beside(packages_command(DEMO_EXTRAS, screen), screen, packages_variables()) as installing:
        if status := run_scripts(DEMO):
            return status
        screen.line()
        not_installed = installing.wait()  # before the report, which would import packages that are half installed
    if not_installed:
        if run_scripts(DEMO_REPORT):
            screen.line(f"A package may be half installed: delete {place.folder}, and run this again.")
        screen.line("The part on Spark is left out: its installation failed, for the reason printed before the report.")
        return not_installed
    return run_scripts(DEMO_REPORT, DEMO_ON_SPARK)


def packages_command(extras: Iterable[str], screen: Screen) -> list[str | Path]:
    """Return the command that adds packages to the environment, which redraws its line if this screen does."""
    return [sys.executable, Path(__file__).resolve(), "packages", *(["--live"] if screen.live else []), *sorted(extras)]


def packages_variables() -> dict[str, str]:
    """Return the variables for a program whose output is shown on this terminal, but does not go to it."""
    return {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": str(shutil.get_terminal_size().columns)}


def packages(arguments: Sequence[str]) -> int:
    """Add the packages of the extras that are named to the environment, for ``demo``; return the exit status."""
    extras = frozenset(arguments) - {"--live"}
    if unknown := extras - project_table()["optional-dependencies"].keys():
        raise Refused(f"pyproject.toml has no extra {', '.join(sorted(unknown))}: name one that it has.")
    environment().prepare(extras, Screen(live="--live" in arguments or None))
    return 0


def check(arguments: Sequence[str]) -> int:
    """Run all steps one after the other, even if one fails; return 0 if none did."""
    options, passed_on = parser().parse_known_args(arguments)
    wheel = Path(options.wheel).absolute() if options.wheel else None
    if wheel is not None and not wheel.is_file():
        raise Refused(f"there is no wheel {wheel}: build one with `python -m build`.")
    paths = test_paths(passed_on)
    only_quick = options.quick or options.lint or options.fix or (paths and not any("spark" in path for path in paths))

    begin = time.monotonic()
    screen = Screen()
    place = environment(wheel)
    place.prepare(QUICK_EXTRAS if only_quick else CHECK_EXTRAS, screen)
    if options.fix:
        fix(place)
    programs = [] if paths else linters(place)
    tested = not (options.lint or options.fix)
    if not paths and not only_quick:
        programs.append(Program("site", "strict build, links", (place.python, SITE, place.folder / "site")))
    # Types and site keep one core busy, and tests leave cores partly idle, so both run in parallel.
    beside = [program for program in programs if program.step in ("types", "site") and tested]
    with ThreadPoolExecutor(1) as background:
        failed = show(place, screen, [program for program in programs if program not in beside])
        types = {program: background.submit(run, place, None, program) for program in beside}
        if tested:
            words = pytest_words(passed_on, quick=options.quick, keep_going=options.keep_going)
            if options.coverage:
                words += ["--cov", "--cov-report="]
            if not run_tests(place, screen, words, shown_by_pytest=bool(passed_on)):
                failed.append("tests")
            if options.coverage:
                list_uncovered(place, screen)
        failed += show(place, screen, beside, types)
    outcome = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    screen.line(f"\ncheck: {outcome}, {seconds_text(time.monotonic() - begin)}")
    return 1 if failed else 0


def site(arguments: Sequence[str]) -> int:
    """Build the site of the documentation in a folder, by default ``site``; return the exit status."""
    place = environment()
    place.prepare(SITE_EXTRAS, Screen())
    target = Path(arguments[0] if arguments else CHECKOUT / "site").absolute()
    return place.run([place.python, SITE, target])


def release(arguments: Sequence[str]) -> int:
    """Cut a release, or check one; return the exit status."""
    place = environment()
    if not {"--help", "-h"} & set(arguments):
        place.prepare(QUICK_EXTRAS, Screen())
    return place.run([place.python if place.python.exists() else sys.executable, RELEASE, *arguments])


def test_paths(words: Sequence[str]) -> list[str]:
    """Separate files, folders and tests from pytest's options and their values."""
    paths = {word: Path(word.partition("::")[0]) for word in words}
    return [word for word, path in paths.items() if path.parts[:1] == ("tests",) and (CHECKOUT / path).exists()]


def pytest_words(passed_on: Sequence[str], *, quick: bool, keep_going: bool) -> list[str]:
    """Return pytest's arguments: which tests, in how many processes, and when to stop."""
    words = [*IN_PARALLEL, "-m", LEFT_OUT_QUICK if quick else LEFT_OUT]
    paths = test_paths(passed_on)
    if paths and all(".py" in path for path in paths):
        words += ["-n", "0"]
    if quick and not keep_going:
        words.append("-x")
    return [*words, *passed_on]


def list_uncovered(place: Environment, screen: Screen) -> None:
    """Keep the list of lines that no test reached, the least covered module first, and show its beginning."""
    _, printed = watch([place.python, "-m", "coverage", "report"], None, folder=CHECKOUT, variables=place.variables())
    listing = place.logs / "uncovered.txt"
    listing.write_text(printed, "utf-8")
    for line in printed.splitlines()[:UNCOVERED_SHOWN]:
        screen.line(line[:118])
    screen.line(f"All lines that no test reached: {listing}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of ``check``."""
    made = argparse.ArgumentParser(
        prog="check",
        usage="check [--quick | --lint | --fix] [--keep-going] [--coverage] [--wheel FILE] [TEST …] [PYTEST OPTION …]",
        description="Style, types, layers, site and tests of this checkout, in an environment of its own.",
        epilog="Files, folders and tests that are named are run alone, in the way of pytest: "
        "./check tests/project/test_project.py -k commands",
        allow_abbrev=False,
    )
    one = made.add_mutually_exclusive_group()
    one.add_argument(
        "--quick", action="store_true", help="leave out slow tests and Spark; end at the first failing test"
    )
    one.add_argument("--lint", action="store_true", help="style, types and layers only")
    one.add_argument("--fix", action="store_true", help="let ruff mend and format the files, then --lint")
    made.add_argument("--keep-going", action="store_true", help="with --quick: continue after a failing test")
    made.add_argument("--coverage", action="store_true", help="list the lines of librmq that no test reached")
    made.add_argument(
        "--wheel",
        metavar="FILE",
        default=os.environ.get("LIBRMQ_WHEEL"),
        help="test this built wheel instead of the checkout (also: LIBRMQ_WHEEL)",
    )
    return made


def environment(wheel: Path | None = None) -> Environment:
    """Return the environment that ``LIBRMQ_VENV`` names, or the checkout's own."""
    folder = os.environ.get("LIBRMQ_VENV")
    return Environment(Path(folder).absolute() if folder else CHECKOUT / ".venv", wheel)


def fix(place: Environment) -> None:
    """Let ruff fix and format the files."""
    for words in (("check", "--fix", "--quiet", "."), ("format", "--quiet", ".")):
        place.run([place.python, "-P", "-m", "ruff", *words])


def linters(place: Environment) -> list[Program]:
    """Return the programs that check the code without running it."""
    python: tuple[str | Path, ...] = (place.python, "-P", "-m")
    typed = ["pytest_librmq.py"] + [
        name for name in ("librmq", "tests", "examples", "benchmarks", "tools") if any(CHECKOUT.glob(f"{name}/**/*.py"))
    ]
    lenient = () if place.has("pyspark") else WITHOUT_SPARK
    return [
        Program("style", "ruff check", (*python, "ruff", "check", ".")),
        Program("style", "ruff format", (*python, "ruff", "format", "--check", ".")),
        Program("layers", "import-linter", (place.bin / "lint-imports", "--no-logo")),
        Program("types", "mypy", (*python, "mypy", *lenient, *typed)),
    ]


def show(
    place: Environment,
    screen: Screen,
    programs: Sequence[Program],
    under_way: Mapping[Program, Future[tuple[int, str]]] | None = None,
) -> list[str]:
    """Run programs, or wait for running ones, with a line for each step; return the names of failed steps."""
    failed = []
    for name in dict.fromkeys(program.step for program in programs):
        of_step = [program for program in programs if program.step == name]
        with Step(screen, name) as step:
            step.finish(", ".join(program.name for program in of_step))
            found = [
                (program, *(result_of(under_way[program], step) if under_way else run(place, step, program)))
                for program in of_step
            ]
            faults = [(program.name, printed) for program, status, printed in found if status]
            if faults:
                step.finish(", ".join(fault for fault, _ in faults), failed=True)
                failed.append(name)
        for fault, printed in faults:
            screen.line(printed.rstrip())
            if fault.startswith("ruff"):
                screen.line("./check --fix mends what can be mended by itself.")
    return failed


def run(place: Environment, step: Step | None, program: Program) -> tuple[int, str]:
    """Run one program; return its exit status and output."""
    return watch(program.command, step, folder=CHECKOUT, variables=place.variables())


def run_tests(place: Environment, screen: Screen, words: Sequence[str], *, shown_by_pytest: bool) -> bool:
    """Run pytest, with a bar or with its own output; return whether all tests passed."""
    command: list[str | Path] = [place.python, "-P", "-m", "pytest", *words]
    if shown_by_pytest:
        return place.run(command) == 0
    with Step(screen, "tests") as step:
        progress = Testing(step)
        status, printed = watch(command, step, folder=CHECKOUT, variables=place.variables(), look=progress.look)
        place.logs.mkdir(exist_ok=True)
        log = place.logs / "tests.txt"
        log.write_text(printed, "utf-8")
        step.finish(progress.summary(printed), failed=status != 0)
    if status == 0:
        for line in re.findall(r"^skipped \d+: .*$", printed, re.MULTILINE):
            screen.line(line)
    else:
        screen.line(progress.failures(printed))
        screen.line(f"All that pytest printed: {log}")
        if first := progress.first_failing(printed):
            screen.line(f"One of them alone: ./check {shlex.quote(first)}")
    return status == 0


class Testing:
    """Reads pytest's progress from its output."""

    _TOTAL = re.compile(r"\[(\d+) items\]|^collected (\d+) items(?: / (\d+) deselected)?", re.MULTILINE)
    _RESULTS = re.compile(r"^(?:tests/\S+ )?([.sxXFER]+)(?: *\[ *\d+%\])?$", re.MULTILINE)
    _SUMMARY = re.compile(r"^=+ (.* in [\d.]+s(?: \([\d:]+\))?) =+$", re.MULTILINE)

    def __init__(self, step: Step) -> None:
        self.step = step

    def look(self, printed: str) -> None:
        """Show how many tests have finished."""
        total = self._TOTAL.search(printed)
        if total is None:
            self.step.show("looking for tests")
            return
        wanted = int(total[1] or total[2]) - int(total[3] or 0)
        results = "".join(self._RESULTS.findall(printed, total.end()))
        failed = results.count("F") + results.count("E")
        told = f"{len(results):,} of {wanted:,}" + (f", {failed} failed" if failed else "")
        self.step.show(told, len(results) / max(1, wanted))

    def summary(self, printed: str) -> str:
        """Return pytest's last line, without the time."""
        found = self._SUMMARY.findall(printed)
        return found[-1].rpartition(" in ")[0] if found else "pytest did not come to its end"

    def first_failing(self, printed: str) -> str | None:
        """Return the first failed test that pytest names, without its group; None if it names none."""
        found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", printed, re.MULTILINE)
        return re.sub(r"@[^\]]*$", "", found[1]) if found else None

    def failures(self, printed: str) -> str:
        """Return pytest's output about failing tests, or its last lines if no test failed."""
        begin = re.search(r"^=+ (FAILURES|ERRORS) =+$", printed, re.MULTILINE)
        return printed[begin.start() :].rstrip() if begin else "\n".join(printed.splitlines()[-60:])


def main(arguments: Sequence[str]) -> int:
    """Run a command; return its exit status."""
    commands = {"demo": demo, "check": check, "site": site, "release": release, "packages": packages}
    if not arguments or arguments[0] not in commands:
        print("usage: project.py {demo,check,site,release} …", file=sys.stderr)
        return 2
    try:
        return run_command("librmq", lambda: commands[arguments[0]](arguments[1:]))
    except Refused as refusal:
        print(f"librmq: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
