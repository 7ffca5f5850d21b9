"""Installs the compiled core from its source distribution, with and without a C compiler, and checks what librmq says.

``python tools/core_sdist.py``; without a C compiler only the latter. It needs the packages build, Cython and
setuptools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
ABSENT: Final = "pure Python, because librmq-core is not installed, or was installed without a C compiler"
COMPILER: Final = os.environ.get("CC", "cc")


def run(*command: str | Path, **variables: str) -> str:
    """Run a program with further variables; return what it prints."""
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def state(folder: Path) -> str:
    """Return which code librmq runs if only ``folder`` has packages."""
    path = os.pathsep.join((str(CHECKOUT), str(folder)))
    program = "from librmq.runtime.core import CORE_STATE; print(CORE_STATE)"
    return run(sys.executable, "-S", "-P", "-c", program, PYTHONPATH=path, LIBRMQ_CORE="on")


def main() -> int:
    """Build, install, and compare what librmq says; return the exit status."""
    status = 0
    with tempfile.TemporaryDirectory(prefix="librmq-core-") as name:
        scratch = Path(name)
        source = shutil.copytree(CHECKOUT / "core", scratch / "core", ignore=shutil.ignore_patterns("build", "*.c"))
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", scratch / "dist", source)
        (made,) = (scratch / "dist").iterdir()
        cases = [("without a C compiler", "/bin/false", ABSENT)]
        if shutil.which(COMPILER):
            cases.append(("with a C compiler", COMPILER, "compiled core"))
        for case, compiler, expected in cases:
            folder = scratch / case
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
            run(*pip, "--no-deps", "--no-build-isolation", "--target", folder, made, CC=compiler)
            found = state(folder)
            print(f"installed {case}: {found}")
            status |= found != expected
    return status


if __name__ == "__main__":
    sys.exit(main())
