"""The environment of ``demo`` and ``check``: created once, and updated when necessary.

It is ``.venv`` in the checkout (``LIBRMQ_VENV`` names another place). A stamp inside it records what it was created
for; while that has not changed, nothing is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packages import QUIET_PIP, Uv, find_uv, pip_for, serves_others
from programs import REDRAW_SECONDS, result_of, run_here, watch
from screen import Screen, Step, seconds_text

if os.name == "posix":
    import fcntl

CHECKOUT = Path(__file__).resolve().parent.parent
CORE = CHECKOUT / "core"
STAMP = "librmq-stamp.json"
SHORT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options of Spark's Java: a session that ends within minutes takes half the time without Java's second compiler, and
an eighth less where Java does not verify classes."""

OFFLINE_SIGNS = (
    "No matching distribution",
    "Could not find a version",
    "NewConnectionError",
    "ConnectTimeout",
    "ConnectionError",
    "ProxyError",
    "Temporary failure in name resolution",
    "Max retries exceeded",
)
OFFLINE_HINT = (
    "pip could not get a package: name a mirror with PIP_INDEX_URL=https://…/simple, "
    "or a folder of wheels with PIP_NO_INDEX=1 PIP_FIND_LINKS=/path, and run this again."
)


STORED_WHEELS = "[bdist_wheel]\ncompression = stored\n"
"""Settings of setuptools: to compress what is unpacked at once takes 20 s for PySpark, which comes as a source."""


class Refused(Exception):
    """A sentence that says what is missing and what to do about it."""


def project_table() -> dict[str, Any]:
    """Return what ``pyproject.toml`` says about librmq: requirements, extras."""
    found: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def requirements(extras: Iterable[str]) -> list[str]:
    """Return what librmq and its extras require, once each."""
    project = project_table()
    of_extras = (word for extra in sorted(extras) for word in project["optional-dependencies"][extra])
    return [*dict.fromkeys([*project["dependencies"], *of_extras])]


def digest(files: Iterable[Path]) -> str:
    """Return the hash of what the files hold."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@contextmanager
def alone_in_checkout(step: Step) -> Iterator[None]:
    """Wait until no other command of this checkout installs packages, and keep others waiting meanwhile."""
    if os.name != "posix":
        yield
        return
    # The folder itself is locked: a file in the environment would be removed with it.
    lock = os.open(CHECKOUT, os.O_RDONLY)
    try:
        waits = False
        while not _can_lock(lock):
            if not waits:
                step.screen.line("Another command of this checkout installs packages: this one waits for its end.")
                step.show("waiting for another command")
                waits = True
            time.sleep(REDRAW_SECONDS)
            step.draw()
        if waits:
            step.show("")
        yield
    finally:
        os.close(lock)


def _can_lock(folder: int) -> bool:
    """Lock an open folder; return False if another process has locked it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


class Environment:
    """A virtual environment with librmq in it, from the checkout or from a built wheel."""

    def __init__(self, folder: Path, wheel: Path | None = None) -> None:
        self.folder = folder
        self.wheel = wheel
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")
        self.logs = folder / "log"

    def prepare(self, extras: frozenset[str], screen: Screen) -> None:
        """Create or update the environment; quick if it is complete.

        Raises:
            Refused: The folder cannot be created, or a package cannot be installed.
        """
        with Step(screen, "packages") as step, alone_in_checkout(step):
            stamp = self._read_stamp()
            core, pyproject = self._sources()
            installed = self._extras_in(stamp)
            if extras <= installed:
                step.finish(f"up to date in {self.folder}")
                return
            has_core = stamp.get("core") == core
            if not self._is_current(stamp) and not self._leave_packages(stamp):
                self._make(step)
                has_core = False
            extras |= installed
            new: dict[str, Any] = {"basis": self._basis(), "pyproject": pyproject}
            # Until the packages are there, the stamp only records that the folder is ours, and has the core.
            self._write_stamp({**new, "extras": [], **({"core": core} if has_core else {})})
            wants_core = "test" in extras and not has_core  # the demo runs the Python code
            has_core |= self._install(extras, step, with_core=wants_core, has_librmq=bool(installed))
            self._write_stamp({**new, "extras": sorted(extras), **({"core": core} if has_core else {})})

    def extras(self) -> frozenset[str]:
        """Return the extras whose packages are installed here, as the checkout now asks for them."""
        return self._extras_in(self._read_stamp())

    def has(self, package: str) -> bool:
        """Return whether a package is installed here, without importing it."""
        libraries = ("lib/python*/site-packages", "Lib/site-packages")
        return any(path for library in libraries for path in self.folder.glob(f"{library}/{package}/__init__.py"))

    def variables(self) -> dict[str, str]:
        """Return the variables for programs: this environment comes first, and no ``librmq`` from the current folder.

        Shared modules of the examples are found in their folder.
        """
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = str(self.bin) + os.pathsep + variables.get("PATH", os.defpath)
        variables["PYTHONSAFEPATH"] = "1"
        variables["PYTHONPATH"] = str(CHECKOUT / "examples")
        variables.pop("LIBRMQ_EXPECT_WHEEL", None)
        variables.setdefault("SPARK_SUBMIT_OPTS", SHORT_JAVA)
        variables.setdefault("LIBRMQ_CORE", "off")  # the tests are of the Python code, unless the caller asks
        # Without bytecode every process would compile each module again, and pytest would rewrite it.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.wheel is not None:
            variables["LIBRMQ_EXPECT_WHEEL"] = "1"
        return variables

    def run(self, command: Sequence[str | Path], folder: Path = CHECKOUT) -> int:
        """Run a program of this environment in ``folder``, on the caller's terminal; return its exit status."""
        return run_here(command, folder=folder, variables=self.variables())

    def _sources(self) -> tuple[str, str]:
        """Return the hash of the compiled core's sources, and that of all that decides which packages are needed."""
        of_core = sorted(path for ending in ("pyx", "h", "py", "toml") for path in CORE.glob(f"*.{ending}"))
        return digest(of_core), digest([CHECKOUT / "pyproject.toml", *of_core])

    def _basis(self) -> dict[str, str]:
        """Return the fixed properties of an environment: if they differ, another one must be made."""
        source = "checkout" if self.wheel is None else digest([self.wheel])
        return {"python": f"{sys.version} {sys.base_prefix}", "checkout": str(CHECKOUT), "source": source}

    def _is_current(self, stamp: Mapping[str, Any]) -> bool:
        """Return whether the environment was made as it would be now."""
        return stamp.get("basis") == self._basis() and self.python.exists()

    def _extras_in(self, stamp: Mapping[str, Any]) -> frozenset[str]:
        """Return the extras of a stamp if they are still installed as the checkout asks for them."""
        is_same = self._is_current(stamp) and stamp["pyproject"] == self._sources()[1]
        return frozenset(stamp["extras"]) if is_same else frozenset()

    def _leave_packages(self, stamp: Mapping[str, Any]) -> bool:
        """Uninstall librmq alone if the environment is of the same Python; return whether the packages can stay."""
        of_same_python = stamp.get("basis", {}).get("python") == self._basis()["python"]
        if not of_same_python or not self.python.exists():
            return False
        return self.run([self.python, "-m", "pip", "uninstall", "--quiet", "--yes", "librmq"]) == 0

    def _read_stamp(self) -> dict[str, Any]:
        try:
            stamp = json.loads((self.folder / STAMP).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def _write_stamp(self, stamp: Mapping[str, Any]) -> None:
        (self.folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")

    def _make(self, step: Step) -> None:
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / STAMP).exists():
            raise Refused(
                f"{self.folder} was not made by this command: move it away, "
                "or name another folder with LIBRMQ_VENV=/path, and run this again."
            )
        step.show(f"making {self.folder} with Python {sys.version.split()[0]}")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_stamp({})
        except OSError as error:
            raise Refused(
                f"{self.folder} can't be written ({error.strerror}): "
                "name another folder with LIBRMQ_VENV=/path, and run this again."
            ) from error
        # The base Python, because this one may run in the environment that is being replaced.
        python: str = getattr(sys, "_base_executable", sys.executable)
        # To unpack Python's own pip and compile it takes seconds.
        without = ["--without-pip"] if serves_others() else []
        command = [python, "-m", "venv", *without, str(self.folder)]
        status, printed = watch(command, step, folder=CHECKOUT, variables=os.environ)
        if status:
            step.screen.line(printed)
            raise Refused(
                f"{python} can't make an environment: install its venv module "
                "(Debian, Ubuntu: apt install python3-venv), or name another Python with PYTHON=/path/to/it."
            )

    def _install(self, extras: frozenset[str], step: Step, *, with_core: bool, has_librmq: bool) -> bool:
        """Install librmq with its extras, and the compiled core if it is wanted; return whether the core was built."""
        step.screen.line(f"Installing what librmq needs in {self.folder}.")
        # Pip downloads to this folder, so that the progress of a large file can be shown.
        with TemporaryDirectory(prefix="tmp-", dir=self.folder, ignore_cleanup_errors=True) as scratch:
            return self._install_by(Path(scratch), extras, step, with_core=with_core, has_librmq=has_librmq)

    def _install_by(
        self, scratch: Path, extras: frozenset[str], step: Step, *, with_core: bool, has_librmq: bool
    ) -> bool:
        """Install as :meth:`_install` says, with a folder for temporary files."""
        (scratch / "setuptools.cfg").write_text(STORED_WHEELS, "utf-8")
        variables = {"DIST_EXTRA_CONFIG": str(scratch / "setuptools.cfg"), **self.variables(), "TMPDIR": str(scratch)}
        progress = Installing(step, scratch)

        def run(command: Sequence[str | Path], **more: str) -> tuple[int, str]:
            return watch(command, step, folder=CHECKOUT, variables={**variables, **more}, look=progress.look)

        step.show("looking for uv")
        own_pip = self._has_pip()
        if not own_pip and not serves_others():  # such as in an environment whose first installation was interrupted
            watch([self.python, "-m", "ensurepip"], step, folder=CHECKOUT, variables=variables)
            own_pip = self._has_pip()
        uv = find_uv(
            self.python, lambda command: watch(command, step, folder=CHECKOUT, variables=variables), own_pip=own_pip
        )
        with ThreadPoolExecutor(1) as beside:  # the compiler keeps one core busy, and the installer another
            build = beside.submit(self._build_core, scratch / "core", uv, own_pip=own_pip) if with_core else None
            status, printed = (1, "")
            if uv:
                for command in self._commands_of_uv(uv, extras, has_librmq=has_librmq, own_pip=own_pip):
                    status, printed = run(command, **uv.variables)
                    progress.next()
                    if status:
                        break
            if status:  # pip's messages are those that a user knows
                # To install librmq again would take it away from programs that run meanwhile.
                target = requirements(extras) if has_librmq else self._librmq(extras)
                status, printed = run([*self._pip_install(own_pip=own_pip), "--progress-bar", "off", *target])
            own_pip = own_pip or self._has_pip()
            if status == 0 and not own_pip:
                watch([self.python, "-m", "ensurepip"], step, folder=CHECKOUT, variables=variables)
            if build and not build.done():
                step.show("building the compiled core")
            lacking = result_of(build, step) if build else None
        if build and status == 0:
            if not lacking:
                built: list[str | Path] = [
                    "--no-deps",
                    "--force-reinstall",
                    "--no-index",
                    "--find-links",
                    scratch / "core",
                ]
                lacking = self._core_of([*self._pip_install(own_pip=self._has_pip()), *built, "librmq-core"])
            step.screen.line(f"The compiled core is {f'skipped: {lacking}' if lacking else 'built and installed'}.")
        if status:
            step.screen.line("\n".join(printed.splitlines()[-20:]))
            raise Refused(
                OFFLINE_HINT
                if any(sign in printed for sign in OFFLINE_SIGNS)
                else "pip failed; its last lines stand above."
            )
        step.finish(progress.summary())
        return lacking == ""

    def _librmq(self, extras: Iterable[str]) -> list[str | Path]:
        """Return what to tell an installer so that it installs librmq with these extras."""
        names = ",".join(sorted(extras))
        return [f"{self.wheel}[{names}]"] if self.wheel else ["--editable", f"{CHECKOUT}[{names}]"]

    def _has_pip(self) -> bool:
        """Return whether a pip works here; an interrupted installation leaves a part of one."""
        version: list[str | Path] = [self.python, "-m", "pip", "--version"]
        return self.has("pip") and watch(version, None, folder=CHECKOUT, variables=self.variables())[0] == 0

    def _pip_install(self, *, own_pip: bool) -> list[str | Path]:
        """Return the command by which pip installs here."""
        # Bytecode is compiled on first use, because most modules of the packages are never imported.
        return [*pip_for(self.python, own=own_pip), "install", *QUIET_PIP, "--no-compile"]

    def _commands_of_uv(
        self, uv: Uv, extras: frozenset[str], *, has_librmq: bool, own_pip: bool
    ) -> Iterator[list[str | Path]]:
        """Return the commands by which uv installs librmq, or only what ``extras`` require if librmq is there."""
        if "spark" in extras and not self.has("pyspark"):
            # To learn what PySpark requires, uv downloads its source of 430 MB, and again to build it where the index
            # forbids to keep files. An installed PySpark names its requirements itself.
            yield uv.install(["--no-deps", *requirements(extras)])
        if has_librmq:
            yield uv.install(requirements(extras))
        else:
            own = ["pip"] if not own_pip and "--no-index" not in uv.indexes else []
            yield uv.install([*self._librmq(extras), *own])

    def _build_core(self, into: Path, uv: Uv | None, *, own_pip: bool) -> str:
        """Build a wheel of the compiled core, which librmq can do without; return why there is none, or nothing."""
        if not CORE.is_dir() or shutil.which(os.environ.get("CC", "cc")) is None:
            return "there is no C compiler"
        if uv and not self._core_of(uv.build(CORE, into), **uv.variables):
            return ""
        pip = pip_for(self.python, own=own_pip)
        return self._core_of([*pip, "wheel", *QUIET_PIP, "--no-deps", "--wheel-dir", into, CORE])

    def _core_of(self, command: Sequence[str | Path], **more: str) -> str:
        """Run a command that builds or installs the core; return why it failed, or nothing."""
        status, printed = watch(command, None, folder=CHECKOUT, variables={**self.variables(), **more})
        if status == 0:
            return ""
        self.logs.mkdir(exist_ok=True)
        (self.logs / "core.txt").write_text(printed, "utf-8")
        return f"it could not be built, {self.logs / 'core.txt'} says why"


class Installing:
    """Reads the progress of pip or uv from the output of one command after the other."""

    _DOWNLOAD = re.compile(r"^ *Downloading (\S+) \(([\d.]+) ?(bytes|[kKMG]i?B)\)$", re.MULTILINE)
    _DOWNLOADED = re.compile(r"^ *Downloaded ", re.MULTILINE)
    _BUILDING = re.compile(r"^ *Building (\S+)(?:==\S+$| @ )", re.MULTILINE)
    _SOURCE = re.compile(r"^ *Building (\S+)==\S+$", re.MULTILINE)
    _BUILT = re.compile(r"^ *Built ", re.MULTILINE)
    _CHOSEN_BY_UV = re.compile(r"^Resolved ", re.MULTILINE)
    _PREPARED_BY_UV = re.compile(r"^Prepared ", re.MULTILINE)
    _INSTALLED_BY_UV = re.compile(r"^Installed (\d+) packages? in", re.MULTILINE)
    _UNITS = {"bytes": 1e-6, "kB": 1e-3, "KiB": 1e-3, "MB": 1.0, "MiB": 1.05, "GB": 1e3, "GiB": 1.07e3}  # noqa: RUF012

    def __init__(self, step: Step, scratch: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = step
        self.scratch = scratch
        self.downloads: list[tuple[str, float]] = []
        """Names and sizes in MB; uv tells those of large files alone."""
        self.sources: list[str] = []
        """Packages that uv got as a source, whose size it does not tell."""
        self.download_seconds = 0.0
        self.packages = 0
        self._before: tuple[list[tuple[str, float]], list[str], int] = ([], [], 0)
        self._clock = clock
        self._looked = clock()
        self._downloads = False

    def next(self) -> None:
        """Start to read the output of another command."""
        self._before = (self.downloads, self.sources, self.packages)
        self._downloads = False

    def look(self, printed: str) -> None:
        """Show the installer's current action, and add up the time of downloads."""
        since, self._looked = self._looked, self._clock()
        if self._downloads:
            self.download_seconds += self._looked - since
        downloads, sources, packages = self._before
        in_this = [
            (name.rpartition("/")[2], float(size) * self._UNITS[unit])
            for name, size, unit in self._DOWNLOAD.findall(printed)
        ]
        self.downloads = downloads + in_this
        self.sources = sources + self._SOURCE.findall(printed)
        downloaded = len(self._DOWNLOADED.findall(printed))
        builds = len(self._BUILDING.findall(printed)) > len(self._BUILT.findall(printed))
        gets = bool(self._CHOSEN_BY_UV.search(printed)) and not self._PREPARED_BY_UV.search(printed)
        last = printed.rstrip().rpartition("\n")[2].strip()
        of_file = bool(in_this) and (last.startswith("Downloading") or downloaded in range(1, len(in_this)))
        self._downloads = of_file or (gets and not builds)
        if installed := self._INSTALLED_BY_UV.search(printed):
            self.packages = packages + int(installed[1])
        elif last.startswith("Installing collected packages"):
            self.packages = packages + last.count(",") + 1
            self.step.show(f"installing {self.packages} packages")
        elif of_file:
            name, size = self.downloads[-1]
            fetched = self._fetched(name) if last.endswith("B)") else 0
            self.step.show(
                f"downloading {name} ({size:.0f} MB); {self._so_far()}",
                fetched / size if fetched and size and self.step.screen.live else None,
            )
        elif self._downloads:
            self.step.show(f"downloading; {self._so_far()}")
        elif builds or last.startswith(("Building", "Preparing metadata")):
            self.step.show(f"building a package; {self._so_far()}")
        elif last.startswith("Prepared"):
            self.step.show("installing")
        else:
            self.step.show(f"choosing versions; {self._so_far()}")

    def summary(self) -> str:
        """Return what was done, with the time of downloads apart."""
        in_time = f" in {seconds_text(self.download_seconds)}" if self.downloads or self.sources else ""
        return f"{self.packages} packages installed, {self._so_far()}{in_time}"

    def _so_far(self) -> str:
        size = sum(size for _, size in self.downloads)
        of_sources = f" and the source of {', '.join(self.sources)}" if self.sources else ""
        return f"{len(self.downloads)} files downloaded, {size:.0f} MB{of_sources}"

    def _fetched(self, name: str) -> float:
        """Return how many MB of a file were downloaded."""
        try:
            return sum(path.stat().st_size for path in self.scratch.glob(f"*/{name}")) / 1e6
        except OSError:  # pip has moved it
            return 0.0
