"""Official clients from their registries, each in its own folder, which all runs of a checkout share.

A client that is installed in librmq's environment is used directly. pip and npm fetch the others once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tests.programs import Process

HERE = Path(__file__).parent
PYTHON = "rocketmq-python-client"
PYTHON_VERSIONS = ("5.1.2", "5.0.9")
CLASSIC = "rocketmq"
CLASSIC_VERSION = "0.4.4"
NODE = "rocketmq-client-nodejs"
NODE_VERSION = "1.0.8"
_FETCH_S = 300
_RUN_S = 240


@dataclass(frozen=True)
class OfficialClient:
    """How to run a script with one version of a client."""

    command: tuple[str, ...]
    variables: dict[str, str]

    def started(self, *words: object, home: Path) -> Process[str]:
        """Start a script, which may write below ``home``."""
        return Process(
            [*self.command, *map(str, words)],
            cwd=home,
            env={**os.environ, **self.variables, "HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, home: Path) -> str:
        """Run a script to its end; return what it printed."""
        with self.started(*words, home=home) as process:
            try:
                out, said = process.communicate(timeout=_RUN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, said + out
        return out


def installed_version() -> str | None:
    """Return the version of the Python client in librmq's environment; None if it is not installed."""
    try:
        return metadata.version(PYTHON)
    except metadata.PackageNotFoundError:
        return None


def python_client(version: str, cache: Path) -> OfficialClient:
    """Return the client for Python, fetching it if it is not installed; skip the test if that fails."""
    beside = installed_version()
    if beside == version:
        return OfficialClient((sys.executable,), {})
    folder = cache / f"python-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if beside is not None:
        words.append("--no-deps")  # this version needs the same packages as the other
    _fetched(folder, [*words, "--no-compile", f"{PYTHON}=={version}", "--target"], f"{PYTHON} {version}")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return OfficialClient((sys.executable,), {"PYTHONPATH": path})


def classic_client(cache: Path) -> OfficialClient:
    """Return the 4.x client for Python, fetching it if necessary; skip the test if that fails."""
    folder = cache / f"classic-{CLASSIC_VERSION}"
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    _fetched(
        folder, [*words, "--no-compile", f"{CLASSIC}=={CLASSIC_VERSION}", "--target"], f"{CLASSIC} {CLASSIC_VERSION}"
    )
    return OfficialClient((sys.executable,), {"PYTHONPATH": str(folder)})


def node_client(cache: Path) -> OfficialClient:
    """Return the client for Node, fetching it with npm; skip the test without Node or the registry."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs Node and npm (Debian, Ubuntu: apt install nodejs npm)")
    folder = cache / f"node-{NODE_VERSION}"
    words = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"{NODE}@{NODE_VERSION}", "--prefix"]
    _fetched(folder, words, f"{NODE} {NODE_VERSION}")
    return OfficialClient((node,), {"NODE_PATH": str(folder / "node_modules")})


def _fetched(folder: Path, words: Sequence[str], name: str) -> None:
    """Fetch a client into a folder, which appears only when it is complete."""
    if folder.is_dir():
        return
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        done = subprocess.run([*words, str(part)], capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} could not be fetched in {_FETCH_S} s")
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        shutil.rmtree(part, ignore_errors=True)
        pytest.skip(f"{name} could not be fetched: {last:.200}")
    try:
        part.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(part, ignore_errors=True)
