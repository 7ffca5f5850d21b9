"""Installs packages by uv, in a small part of the time that pip needs, or by pip where uv lacks a setting of pip."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Run = Callable[[Sequence[str | Path]], tuple[int, str]]
"""Runs a command, and returns its exit status and output."""

QUIET_PIP = ("--disable-pip-version-check", "--no-input")
_AS_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
"""Settings of pip, whose values are words, and the options of uv that mean the same."""
_NO_MATTER = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "cert",  # SSL_CERT_FILE names it for uv
        "default-timeout",
        "disable-pip-version-check",
        "no-cache-dir",
        "no-compile",
        "no-input",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "timeout",
        "verbose",
    }
)


class Uv:
    """The installer uv for one environment, with the package indexes that pip is set to."""

    def __init__(self, program: str | Path, python: Path, indexes: Sequence[str], certificate: str | None) -> None:
        self.program = program
        self.python = python
        self.indexes = indexes
        self.variables = {"SSL_CERT_FILE": certificate} if certificate else {}
        """Variables that its commands need."""

    def install(self, target: Sequence[str | Path]) -> list[str | Path]:
        """Return the command that installs ``target``; of all indexes the best version counts, as for pip."""
        best = ("--index-strategy", "unsafe-best-match")
        return [self.program, "pip", "install", "--python", self.python, *best, *self.indexes, *target]

    def build(self, source: Path, into: Path) -> list[str | Path]:
        """Return the command that builds a wheel."""
        best = ("--index-strategy", "unsafe-best-match")
        return [self.program, "build", "--wheel", "--python", self.python, *best, *self.indexes, "-o", into, source]


def serves_others() -> bool:
    """Return whether this Python has a pip that installs in other environments (22.3 or later)."""
    try:
        found = re.match(r"(\d+)\.(\d+)", version("pip"))
    except PackageNotFoundError:
        return False
    return found is not None and (int(found[1]), int(found[2])) >= (22, 3)


def pip_for(python: Path, *, own: bool) -> list[str | Path]:
    """Return the command of the pip that installs in the environment of ``python``: its own, or this Python's."""
    return [python, "-m", "pip"] if own else [sys.executable, "-m", "pip", "--python", python]


def find_uv(python: Path, run: Run, *, own_pip: bool) -> Uv | None:
    """Return uv for the environment of ``python``, installed there if it is not on the path; None where pip must do."""
    pip = pip_for(python, own=own_pip)
    status, printed = run([python if own_pip else sys.executable, "-m", "pip", "config", "list"])
    settings = pip_settings(printed) if status == 0 else None
    indexes = None if settings is None else uv_indexes(settings)
    if settings is None or indexes is None:
        return None
    program: str | Path | None = shutil.which("uv")
    if program is None:
        program = python.with_name(f"uv{python.suffix}")
        if not program.exists():
            run([*pip, "install", *QUIET_PIP, "--quiet", "--no-compile", "--only-binary", "uv", "uv"])
        if not program.exists():
            return None
    return Uv(program, python, indexes, settings.get("cert"))


def pip_settings(printed: str) -> dict[str, str] | None:
    """Return the settings that ``pip config list`` printed, without the names of their sections.

    None means that a setting is of a command of its own, such as ``wheel.find-links``: uv has no such thing.
    """
    settings = {}
    for line in printed.splitlines():
        if found := re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(['\"].*['\"])", line.strip()):
            settings[found[2]] = str(ast.literal_eval(found[3]))
        elif "=" in line and not line.startswith("WARNING"):
            return None
    return settings


def uv_indexes(settings: dict[str, str]) -> list[str] | None:
    """Return the options for uv that have the effect of pip's settings; None if there is one without an equal."""
    options: list[str] = []
    for name, value in settings.items():
        if name in _AS_UV:
            for word in value.split():
                options += [_AS_UV[name], word]
        elif name == "no-index":
            options += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
        elif name not in _NO_MATTER:
            return None
    return options
