"""The two commands of a checkout, ``demo`` and ``check``, and the environment that both run in.

Needs nothing but Python 3.11 and its standard library. Where there is no POSIX shell:
``python tools/project.py check``.

The environment is ``.venv`` in the checkout (``LIBRMQ_VENV`` names another place). A stamp inside it says
what it was made for; while that is still so, nothing is installed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
DEMO = CHECKOUT / "examples" / "demo_store.py"
DEMO_ON_SPARK = CHECKOUT / "examples" / "demo_spark.py"
STAMP = "librmq-stamp.json"

DEMO_EXTRAS = frozenset({"arrow", "cli", "compression", "jvm", "report", "spark"})
CHECK_EXTRAS = DEMO_EXTRAS | {"bloom", "dev", "metrics", "redis", "sql", "test"}

IN_PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup")
"""A process a core; of a pytest option that is given twice the latter counts, as in ``./check -n 0``."""
LEFT_OUT = "not bench"
LEFT_OUT_QUICK = "not bench and not slow and not spark"

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


class Refused(Exception):
    """What is missing, and what to do about it, in a sentence."""


def say(text: str) -> None:
    print(text, flush=True)


class Environment:
    """A virtual environment with librmq in it, from the checkout or from a built wheel."""

    def __init__(self, folder: Path, wheel: Path | None) -> None:
        self.folder = folder
        self.wheel = wheel
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / ("python.exe" if os.name == "nt" else "python")

    def prepare(self, extras: frozenset[str]) -> None:
        """Make the environment, or bring it up to date; quick when it already has what is asked for."""
        stamp = self._read_stamp()
        basis = self._basis()
        pyproject = hashlib.sha256((CHECKOUT / "pyproject.toml").read_bytes()).hexdigest()
        same = stamp is not None and stamp.get("basis") == basis and self.python.exists()
        installed = frozenset(stamp["extras"]) if stamp and same and stamp["pyproject"] == pyproject else frozenset()
        if extras <= installed:
            say(f"environment {self.folder}: up to date")
            return
        if not same:
            self._make()
        extras |= installed
        # Until pip is through, the stamp promises nothing but that the folder is ours.
        self._write_stamp({"basis": basis, "pyproject": pyproject, "extras": []})
        self._install(extras)
        self._write_stamp({"basis": basis, "pyproject": pyproject, "extras": sorted(extras)})

    def variables(self) -> dict[str, str]:
        """What programs run with: this environment first, and no ``librmq`` from the current folder.

        What the examples share is found in their folder.
        """
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = str(self.bin) + os.pathsep + variables.get("PATH", os.defpath)
        variables["PYTHONSAFEPATH"] = "1"
        variables["PYTHONPATH"] = str(CHECKOUT / "examples")
        variables.pop("LIBRMQ_EXPECT_WHEEL", None)
        if self.wheel is not None:
            variables["LIBRMQ_EXPECT_WHEEL"] = "1"
        return variables

    def run(self, command: Sequence[str | Path], folder: Path = CHECKOUT) -> int:
        """Run a program of this environment in ``folder``; its exit status."""
        words = [str(word) for word in command]
        return subprocess.run(words, cwd=folder, env=self.variables(), stdin=subprocess.DEVNULL).returncode

    def _basis(self) -> dict[str, str]:
        """What can't be changed in an environment: another one must be made."""
        source = "checkout" if self.wheel is None else hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        return {"python": f"{sys.version} {sys.base_prefix}", "checkout": str(CHECKOUT), "source": source}

    def _read_stamp(self) -> dict[str, Any] | None:
        try:
            stamp = json.loads((self.folder / STAMP).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return stamp if isinstance(stamp, dict) else None

    def _write_stamp(self, stamp: dict[str, Any]) -> None:
        (self.folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")

    def _make(self) -> None:
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / STAMP).exists():
            raise Refused(
                f"{self.folder} was not made by this command: move it away, "
                "or name another folder with LIBRMQ_VENV=/path, and run this again."
            )
        say(f"environment {self.folder}: making it with Python {sys.version.split()[0]}")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_stamp({})
        except OSError as error:
            raise Refused(
                f"{self.folder} can't be written ({error.strerror}): "
                "name another folder with LIBRMQ_VENV=/path, and run this again."
            ) from error
        # The Python below this one, which may run in the very environment that is made anew.
        python = getattr(sys, "_base_executable", sys.executable)
        made = subprocess.run(
            [python, "-m", "venv", str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode:
            print(made.stdout, file=sys.stderr)
            raise Refused(
                f"{python} can't make an environment: install its venv module "
                "(Debian, Ubuntu: apt install python3-venv), or name another Python with PYTHON=/path/to/it."
            )

    def _install(self, extras: frozenset[str]) -> None:
        names = ",".join(sorted(extras))
        target = [f"{self.wheel}[{names}]"] if self.wheel else ["--editable", f"{CHECKOUT}[{names}]"]
        say(f"installing librmq[{names}] from {self.wheel or 'the checkout'} (the first time takes a minute)")
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        with subprocess.Popen(
            [*pip, "--progress-bar", "off", *target],
            cwd=CHECKOUT,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip())
                words = line.split()
                if words and words[0] == "Downloading":
                    say(f"  downloading {words[1].rpartition('/')[2]} {' '.join(words[2:])}")
                elif line.startswith("Installing collected packages"):
                    say(f"  installing {line.count(',') + 1} packages")
        if process.returncode:
            print("\n".join(lines[-20:]), file=sys.stderr)
            if any(sign in line for line in lines for sign in OFFLINE_SIGNS):
                raise Refused(OFFLINE_HINT)
            raise Refused("pip failed; its last lines stand above.")


def environment(wheel: Path | None = None) -> Environment:
    folder = os.environ.get("LIBRMQ_VENV")
    return Environment(Path(folder).absolute() if folder else CHECKOUT / ".venv", wheel)


def demo(arguments: Sequence[str]) -> int:
    """Run the examples that show the main job, then the same on Spark; the exit status."""
    for script in (DEMO, DEMO_ON_SPARK):
        if not script.exists():
            raise Refused(f"{script.relative_to(CHECKOUT)} is missing: this checkout is not whole; get it again.")
    place = environment()
    place.prepare(DEMO_EXTRAS)
    say("")
    status = place.run([place.python, DEMO, *arguments], Path.cwd())
    return status or place.run([place.python, DEMO_ON_SPARK, *arguments], Path.cwd())


def check(arguments: Sequence[str]) -> int:
    """Run the steps one after the other, all of them even when one fails; 0 if none did."""
    parser = argparse.ArgumentParser(
        prog="check",
        description="Style, types, layers, tests. What is not listed here is passed on to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow or spark")
    parser.add_argument(
        "--wheel",
        metavar="FILE",
        default=os.environ.get("LIBRMQ_WHEEL"),
        help="test this built wheel instead of the checkout (also: LIBRMQ_WHEEL)",
    )
    options, passed_on = parser.parse_known_args(arguments)
    wheel = Path(options.wheel).absolute() if options.wheel else None
    if wheel is not None and not wheel.is_file():
        raise Refused(f"there is no wheel {wheel}: build one with `python -m build`.")

    place = environment(wheel)
    place.prepare(CHECK_EXTRAS)
    python: tuple[str | Path, ...] = (place.python, "-P", "-m")
    typed = ["pytest_librmq.py"] + [
        name for name in ("librmq", "tests", "examples", "benchmarks", "tools") if any(CHECKOUT.glob(f"{name}/**/*.py"))
    ]
    marks = LEFT_OUT_QUICK if options.quick else LEFT_OUT
    steps: tuple[tuple[str, tuple[str | Path, ...]], ...] = (
        ("ruff check", (*python, "ruff", "check", ".")),
        ("ruff format", (*python, "ruff", "format", "--check", ".")),
        ("mypy", (*python, "mypy", *typed)),
        ("import-linter", (place.bin / "lint-imports", "--no-logo")),
        ("pytest", (*python, "pytest", *IN_PARALLEL, "-m", marks, *passed_on)),
    )
    failed = []
    begin = time.monotonic()
    for number, (name, command) in enumerate(steps, 1):
        title = f"[{number}/{len(steps)}] {name}"
        say(f"\n{title}")
        step_begin = time.monotonic()
        if place.run(command):
            failed.append(name)
        say(f"{title}: {'FAILED' if name in failed else 'ok'}, {time.monotonic() - step_begin:.0f} s")
    outcome = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    say(f"\ncheck: {outcome}, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    commands = {"demo": demo, "check": check}
    if not arguments or arguments[0] not in commands:
        print("usage: project.py {demo,check} …", file=sys.stderr)
        return 2
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
