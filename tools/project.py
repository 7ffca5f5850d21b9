"""The commands of a checkout: ``demo``, ``check`` and ``site``, in an environment that uv installs.

Needs only Python 3.11 and its standard library. Without a POSIX shell, run ``python tools/project.py check``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

CHECKOUT = Path(__file__).resolve().parent.parent
CORE = CHECKOUT / "core"
EXAMPLES = CHECKOUT / "examples"
VENV = Path(os.environ.get("LIBRMQ_VENV") or CHECKOUT / ".venv").absolute()
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
BASE = getattr(sys, "_base_executable", sys.executable)
"""The Python that makes the environment; this one may run in an environment that is being replaced."""
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "librmq-stamp.json"
"""What the environment was made for; while that has not changed, nothing is installed."""
LOGS = VENV / "log"

SMALL_DEMO_EXTRAS = frozenset({"cli", "console", "report"})
DEMO_EXTRAS = SMALL_DEMO_EXTRAS | {"arrow", "compression", "jvm", "spark"}
QUICK_EXTRAS = frozenset(
    {"arrow", "bloom", "cli", "compression", "console", "cron", "dev", "fast", "grpc"}
    | {"metrics", "redis", "remote", "report", "sql", "test"}
)
CHECK_EXTRAS = QUICK_EXTRAS | {"docs", "jvm", "spark", "test-spark"}
SITE_EXTRAS = (QUICK_EXTRAS - {"test"}) | {"docs"}

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
IN_PARALLEL = ("-n", str(min(CORES + 1, 8)), "--dist", "loadgroup", "--no-loadscope-reorder")
"""One process more than there are cores, because tests also wait: for programs, for flushes, for a poll to end.

The latter of two equal pytest options counts, as in ``./check -n 0``.
"""
WITHOUT_SPARK = ("--allow-subclassing-any", "--allow-untyped-decorators", "--no-warn-unused-ignores")
"""What mypy must let pass where PySpark and its types are not installed."""
QUICK_TYPES = ("pytest_librmq.py", "librmq", "examples", "benchmarks", "tools")
"""What mypy checks with ``--quick``: all but the tests, which take it a third of its time."""
SHORT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options of Spark's Java: a session that ends within minutes takes half the time without Java's second compiler, and
an eighth less where Java does not verify classes."""
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip that say where packages come from, and the variables by which uv takes them."""
Words = Sequence[str | Path]


class Refused(Exception):
    """A sentence that says what is missing and what to do about it."""


# --- programs


def run(command: Words, folder: Path = CHECKOUT, more: Mapping[str, str] | None = None) -> int:
    """Run a program of the environment on the caller's terminal; return its exit status.

    At Ctrl-C, which reaches it too, it has time to end.
    """
    with subprocess.Popen([str(word) for word in command], cwd=folder, env={**variables(), **(more or {})}) as process:
        try:
            return process.wait()
        except BaseException as end:
            if not isinstance(end, KeyboardInterrupt):
                process.terminate()
            process.wait()
            raise


def variables() -> dict[str, str]:
    """Return the variables for programs: this environment comes first, and no ``librmq`` from the current folder."""
    chosen = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "LIBRMQ_EXPECT_WHEEL")}
    chosen["VIRTUAL_ENV"] = str(VENV)
    chosen["PATH"] = str(BIN) + os.pathsep + chosen.get("PATH", os.defpath)
    chosen["PYTHONSAFEPATH"] = "1"
    chosen["PYTHONPATH"] = f"{EXAMPLES}{os.pathsep}{CHECKOUT / 'tools'}"  # programs of each share modules
    chosen.setdefault("SPARK_SUBMIT_OPTS", SHORT_JAVA)
    # Without bytecode every process would compile each module again, and pytest would rewrite it.
    chosen.pop("PYTHONDONTWRITEBYTECODE", None)
    if read_stamp().get("basis", {}).get("source", "checkout") != "checkout":
        chosen["LIBRMQ_EXPECT_WHEEL"] = "1"
    return chosen


class Beside:
    """A program that runs while others do, and prints when it is waited for. A context manager, which ends it."""

    def __init__(self, name: str, command: Words) -> None:
        LOGS.mkdir(exist_ok=True)
        self._log = LOGS / f"{name}.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                cwd=CHECKOUT,
                env={**variables(), "PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def join(self) -> None:
        """Wait for its end, and print nothing."""
        self._process.wait()

    def wait(self) -> int:
        """Print what the program has printed, and prints until its end; return its exit status."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            while True:
                has_ended = self._process.poll() is not None
                print(log.read(), end="", flush=True)
                if has_ended:
                    return self._process.returncode
                time.sleep(0.2)


# --- the environment


def prepare(extras: frozenset[str], wheel: Path | None = None) -> None:
    """Create or update the environment; quick if it is complete.

    Raises:
        Refused: The folder cannot be created, or a package cannot be installed.
    """
    with alone_in_checkout():
        stamp = read_stamp()
        python = f"{sys.version} {sys.base_prefix}"
        source = "checkout" if wheel is None else digest(wheel)
        has_compiler = shutil.which(os.environ.get("CC", "cc")) is not None
        sources = sorted(path for path in CORE.glob("*.*") if path.is_file())  # a build leaves folders beside them
        core = f"{digest(*sources)} {has_compiler}" if wheel is None else ""
        basis = {"python": python, "checkout": str(CHECKOUT), "source": source, "core": core}
        project = hashlib.sha256(repr(project_table()).encode()).hexdigest()
        is_same = PYTHON.exists() and (stamp.get("basis"), stamp.get("project")) == (basis, project)
        installed = frozenset(stamp["extras"] if is_same else ())
        if extras <= installed:
            return
        if stamp.get("basis", {}).get("python") != python or not PYTHON.exists():
            make()
            stamp = {}
        extras |= project_table()["optional-dependencies"].keys() & frozenset(stamp.get("extras", ()))
        # Until the packages are there, the stamp only records that the folder is ours.
        write_stamp({"basis": {"python": python}})
        print(f"Installing what librmq needs in {VENV}", flush=True)
        if "spark" in extras and not has("pyspark"):
            # To learn what PySpark requires, uv would download its source of 430 MB, and again to build it.
            install(["--no-deps", *requirements(extras)])
        librmq: list[str | Path] = [wheel] if wheel else ["--editable", CHECKOUT]
        # To install librmq again would take it away from programs that run meanwhile.
        install([*([] if installed else librmq), *requirements(extras)], () if installed else ("librmq",))
        has_core = has("librmq/runtime/_core.*") if wheel else any(CHECKOUT.glob("librmq/runtime/_core.*"))
        if not installed and not has_core:  # the build has said why, but uv shows that only with --verbose
            print(
                "librmq runs in pure Python here: its compiled core takes a C compiler and Python's headers.",
                flush=True,
            )
        write_stamp({"basis": basis, "project": project, "extras": sorted(extras)})


def project_table() -> dict[str, Any]:
    """Return what ``pyproject.toml`` says about librmq: requirements, extras."""
    table: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def requirements(extras: Iterable[str]) -> list[str]:
    """Return what librmq and its extras require, once each."""
    project = project_table()
    of_extras = (line for extra in sorted(extras) for line in project["optional-dependencies"][extra])
    return list(dict.fromkeys([*project["dependencies"], *of_extras]))


def digest(*files: Path) -> str:
    """Return the hash of what the files contain."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def read_stamp() -> dict[str, Any]:
    """Return the stamp of the environment, empty without one."""
    try:
        stamp = json.loads(STAMP.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: Mapping[str, Any]) -> None:
    """Replace the stamp of the environment."""
    STAMP.write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")


@contextmanager
def alone_in_checkout() -> Iterator[None]:
    """Wait until no other command of this checkout installs packages, and keep others waiting meanwhile."""
    if os.name == "nt":
        yield
        return
    import fcntl

    # The folder itself is locked: a file in the environment would be removed with it.
    lock = os.open(CHECKOUT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another command of this checkout installs packages: this one waits for its end.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(lock)


def make() -> None:
    """Make an empty environment in place of the one that is there."""
    other = "name another folder with LIBRMQ_VENV=/path, and run this again."
    if VENV.exists() and any(VENV.iterdir()) and not STAMP.exists():
        raise Refused(f"{VENV} was not made by this command: move it away, or {other}")
    print(f"Making {VENV} with Python {sys.version.split()[0]}", flush=True)
    try:
        shutil.rmtree(VENV, ignore_errors=True)
        VENV.mkdir(parents=True, exist_ok=True)
        write_stamp({})
    except OSError as error:
        raise Refused(f"{VENV} can't be written ({error.strerror}): {other}") from error
    if run([BASE, "-m", "venv", "--without-pip", VENV]):
        raise Refused(
            f"{BASE} can't make an environment: install its venv module "
            "(Debian, Ubuntu: apt install python3-venv), or name another Python with PYTHON=/path/to/it."
        )
    if subprocess.run([*pip(), "--version"], capture_output=True, check=False).returncode:  # earlier than 22.3, or none
        run([PYTHON, "-m", "ensurepip"])


def has(package: str) -> bool:
    """Return whether a package is installed in the environment, without importing it."""
    return any(path for folder in ("lib/python*", "Lib") for path in VENV.glob(f"{folder}/site-packages/{package}"))


def pip() -> list[str | Path]:
    """Return the command of pip for the environment: of the Python that made it, until it has its own.

    To unpack Python's own copy takes seconds.
    """
    return [PYTHON, "-m", "pip"] if has("pip") else [BASE, "-m", "pip", "--python", PYTHON]


def install(target: Words, *again: Sequence[str]) -> None:
    """Install packages by uv, or by pip where uv can't; ``again`` names those that are replaced if they are there."""
    by_pip = [*pip(), "install", "--disable-pip-version-check", "--no-compile"]
    (VENV / "setuptools.cfg").write_text("[bdist_wheel]\ncompression = stored\n")  # PySpark comes as a source
    # The compiled core is built where it can be, whatever the caller runs: that is chosen at each start.
    more = {"DIST_EXTRA_CONFIG": str(VENV / "setuptools.cfg"), "LIBRMQ_CORE": "", **uv_variables()}
    uv = shutil.which("uv", path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None and run([*by_pip, "--quiet", "--only-binary", "uv", "uv"]) == 0:
        uv = shutil.which("uv", path=BIN)
    words = [*(f"--reinstall-package={name}" for names in again for name in names), *([] if has("pip") else ["pip"])]
    if uv is None or run([uv, "pip", "install", "--python", PYTHON, *words, *target], more=more):
        print("Without uv: by pip", flush=True)
        if run([*by_pip, *target], more=more):
            raise Refused(
                "pip could not install the packages, for the reason above. If it is the network: name a mirror with "
                "PIP_INDEX_URL=https://…/simple, or a folder of wheels with PIP_NO_INDEX=1 PIP_FIND_LINKS=/path, "
                "and run this again."
            )


def uv_variables() -> dict[str, str]:
    """Return the variables that let uv take packages from where pip is set to take them."""
    words = [*pip(), "config", "list"]
    lines = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
    settings = (re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)=(['\"].*['\"])", line.strip()) for line in lines)
    values = {found[1]: str(ast.literal_eval(found[2])) for found in settings if found}
    chosen = {variable: values[name] for name, variable in UV_VARIABLES.items() if name in values}
    if "UV_FIND_LINKS" in chosen:
        chosen["UV_FIND_LINKS"] = ",".join(chosen["UV_FIND_LINKS"].split())
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **chosen}  # of all indexes the best version counts, as for pip


# --- commands


def demo(arguments: Sequence[str]) -> int:
    """Tell the story of a shop, at its end on Spark unless small, or show a broker's store; return the exit status."""
    words = argparse.ArgumentParser(prog="demo", description="librmq at work in a shop, and on Spark.")
    kind = words.add_mutually_exclusive_group()
    kind.add_argument("--small", action="store_true", help="leave out Spark (450 MB)")
    kind.add_argument("--store", action="store_true", help="the long look at a broker's directory instead")
    words.add_argument("folder", nargs="?", default="demo-output", help="the folder to make (demo-output)")
    chosen = words.parse_args(arguments)
    folder: str = chosen.folder

    def show(*parts: Words) -> int:
        statuses = (run([PYTHON, "-P", *part], Path.cwd()) for part in parts)
        return next((status for status in statuses if status), 0)

    store, broker, report = ((EXAMPLES / f"demo_{name}.py", folder) for name in ("store", "broker", "report"))
    shop = ("-m", "librmq", "demo", "--keep", folder)
    prepare(SMALL_DEMO_EXTRAS)
    if chosen.store:
        return show(store)
    if chosen.small:
        return show(shop, broker, (*report, "--small"))
    if frozenset(read_stamp()["extras"]) >= DEMO_EXTRAS:
        return show(shop, broker, report)
    print("Spark (450 MB) is installed meanwhile.", flush=True)
    with Beside("packages", [sys.executable, Path(__file__).resolve(), "packages"]) as installing:
        if status := show(shop, broker):
            return status
        if status := installing.wait():  # before the report, which would import packages that are half installed
            show((*report, "--small"))
            print("The part on Spark is left out: its installation failed, for the reason printed above.")
            return status
    return show(report)


def packages(_: Sequence[str]) -> int:
    """Install what the whole demo needs."""
    prepare(DEMO_EXTRAS)
    return 0


def site(arguments: Sequence[str]) -> int:
    """Build the site of the documentation in a folder, by default ``site``; return the exit status."""
    prepare(SITE_EXTRAS)
    return run(site_command(Path(arguments[0] if arguments else CHECKOUT / "site").absolute()))


def site_command(target: Path) -> Words:
    """Return the command that builds the site."""
    return [PYTHON, "-P", "-m", "website", target]


def check(arguments: Sequence[str]) -> int:
    """Run all steps one after the other, even if one fails; return 0 if none did."""
    options, words = parser().parse_known_args(arguments)
    wheel = Path(options.wheel).absolute() if options.wheel else None
    if wheel is not None and not wheel.is_file():
        raise Refused(f"there is no wheel {wheel}: build one with `python -m build`.")
    begin = time.monotonic()
    os.environ.setdefault("LIBRMQ_CORE", "off")  # the tests are of the Python code, unless the caller asks
    paths = [word for word in words if word.startswith("tests") and Path(CHECKOUT, word.partition("::")[0]).exists()]
    is_linted = options.lint or options.fix
    is_quick = options.quick or is_linted or (paths and not any("spark" in path for path in paths))
    prepare(QUICK_EXTRAS if is_quick else CHECK_EXTRAS, wheel)
    failed = []

    def step(name: str, *command: str | Path) -> None:
        print(f"\n== {name}", flush=True)
        if run(command):
            failed.append(name)

    python = (PYTHON, "-P", "-m")
    if options.fix:
        run([*python, "ruff", "check", "--fix", "--quiet", "."])
        run([*python, "ruff", "format", "--quiet", "."])
        run([*python, "generated"])
    with ExitStack() as running:
        # Types and site keep one core busy, and tests leave cores partly idle.
        programs: dict[str, Beside] = {}

        def beside(name: str, *command: str | Path) -> Beside:
            return running.enter_context(Beside(name, command))

        if not paths:
            without_spark = () if "spark" in read_stamp()["extras"] else WITHOUT_SPARK
            checked = QUICK_TYPES if options.quick else ()
            programs["types"] = beside("types", *python, "mypy", *without_spark, *checked)
            is_new = not any(CHECKOUT.glob("tests/*/__pycache__"))
            if is_new and not is_linted:  # else each process of the tests would compile all, with pytest's assertions
                compiling = beside("compiling", *python, "pytest", "-n", "0", "--collect-only")
            step("style (./check --fix repairs most of it)", *python, "ruff", "check", ".")
            step("format", *python, "ruff", "format", "--check", ".")
            step("layers", BIN / "lint-imports", "--no-logo")
            step("spelling", *python, "spelling")
            if is_new and not is_linted:
                compiling.join()
            if not is_quick:
                programs["site"] = beside("site", *site_command(VENV / "site"))
        if not is_linted:
            step("tests", *python, "pytest", *pytest_words(words, paths, options))
            programs |= {"coverage": beside("coverage", *python, "coverage", "report")} if options.coverage else {}
        for name, program in programs.items():
            print(f"\n== {name}", flush=True)
            failed += [name] if program.wait() else []
    outcome = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    print(f"\ncheck: {outcome}, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def pytest_words(words: Sequence[str], paths: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return pytest's arguments: which tests, in how many processes, and when to stop."""
    chosen = [*IN_PARALLEL, *(["-m", "not slow and not spark"] if options.quick else [])]
    chosen += ["-n", "0"] if paths and all(".py" in path for path in paths) else []
    chosen += ["-x"] if options.quick and not options.keep_going else []
    chosen += ["--cov", "--cov-report="] if options.coverage else []
    return [*chosen, *(words or ["-q"])]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of ``check``."""
    made = argparse.ArgumentParser(
        prog="check",
        usage="check [--quick | --lint | --fix] [--keep-going] [--coverage] [--wheel FILE] [TEST …] [PYTEST OPTION …]",
        description="Style, types, layers, site and tests of this checkout, in an environment of its own.",
        epilog="Files, folders and tests that are named are run alone: ./check tests/project/test_docs.py -k links",
        allow_abbrev=False,
    )
    kind = made.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="leave out slow tests and Spark; end at the first failure")
    kind.add_argument("--lint", action="store_true", help="style, types and layers only")
    kind.add_argument(
        "--fix",
        action="store_true",
        help="let ruff repair and format the files, write the tables of pages, then --lint",
    )
    made.add_argument("--keep-going", action="store_true", help="with --quick: continue after a failing test")
    made.add_argument("--coverage", action="store_true", help="list the lines of librmq that no test reached")
    wheel = "test this built wheel instead of the checkout (also: LIBRMQ_WHEEL)"
    made.add_argument("--wheel", metavar="FILE", default=os.environ.get("LIBRMQ_WHEEL"), help=wheel)
    return made


def end(number: int, _: object) -> NoReturn:
    """End the command, and the programs that it runs, at a signal that reaches it alone."""
    sys.exit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Run a command; return its exit status."""
    commands = {"demo": demo, "check": check, "site": site, "packages": packages}
    if not arguments or arguments[0] not in commands:
        print("usage: project.py {demo,check,site} …", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # programs print what this terminal may lack
    try:
        return commands[arguments[0]](arguments[1:])
    except Refused as refusal:
        print(f"librmq: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("librmq: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
