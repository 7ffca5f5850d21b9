"""Runs tests with the lowest versions of dependencies that ``pyproject.toml`` allows, in an environment for that alone.

``python tools/lowest.py`` runs those of store, messages, columns and commands; arguments replace them, as in pytest.
``LIBRMQ_VENV`` names the environment, by default ``.venv-lowest`` in the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
EXTRAS = ("arrow", "bloom", "cli", "compression", "fast", "metrics", "redis", "remote", "report", "sql")
"""What is installed at its lowest: each extra for users but those of Spark, Java and gRPC."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "httpx", "tzdata", "pandas<3")
TESTS = ("tests/store", "tests/message", "tests/columns", "tests/diagnosis")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)")


def lowest() -> list[str]:
    """Return a pin of each dependency of librmq and its extras at the lowest version that is allowed."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    found = (_REQUIREMENT.match(line) for line in wanted)
    return sorted({f"{name[1]}=={name[2]}" for name in found if name})


def main(arguments: list[str]) -> int:
    """Make the environment, install and test; return pytest's exit status."""
    folder = Path(os.environ.get("LIBRMQ_VENV", CHECKOUT / ".venv-lowest")).absolute()
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = lowest()
    print(*pins, sep="\n", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "lowest.txt"
    constraints.write_text("\n".join(pins) + "\n", "utf-8")
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(constraints),
    ]
    subprocess.run([*pip, "--editable", f"{CHECKOUT}[{','.join(EXTRAS)}]", *TOOLS], check=True)
    words = arguments or [
        *TESTS,
        "-q",
        "-m",
        "not slow and not spark and not bench and not servers",
    ]
    pytest = [str(python), "-P", "-m", "pytest", "-o", "filterwarnings=default", *words]
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT / "examples"), "LIBRMQ_CORE": "off"}
    return subprocess.run(pytest, cwd=CHECKOUT, env=variables).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
