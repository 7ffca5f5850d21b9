"""The programs in the README and the docs pass strict mypy and pyright, as a user's own programs would."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.test_docs import DOCUMENTS, blocks, name_of
from tests.reference import CHECKOUT
from tests.typing.test_pyright import errors_of_pyright

UNTYPED = ("columns.md", "spark.md", "tutorials/django.md", "howto/celery.md", "howto/django.md")
"""These pages use packages that have no types or may not be installed."""
AS_ON_A_PAGE = """
[[tool.mypy.overrides]]
module = [{modules}]
allow_untyped_defs = true
allow_incomplete_defs = true
allow_untyped_calls = true
allow_untyped_decorators = true
allow_redefinition_new = true
disable_error_code = ["var-annotated", "import-untyped"]"""
"""A short example may leave its own functions and empty lists untyped, reuse a name, and use packages without types.

These are settings of the pages alone, so that librmq itself is taken from the cache of `./check`, which has checked it.
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write the Python of each page to a module, with each line at its place, and each file of a page by its name."""
    folder = tmp_path_factory.mktemp("pages")
    made: dict[str, str] = {}
    for document in [document for document in DOCUMENTS if name_of(document) not in UNTYPED]:
        lines = [""] * len(document.read_text("utf-8").splitlines())
        for block in blocks(document):
            if "from django" in block.text:  # which has no types
                continue
            if block.kind == "python" and block.file is not None:
                made[block.file] = block.text
            elif block.kind == "python":
                shown = block.text.splitlines()
                lines[block.line - 1 : block.line - 1 + len(shown)] = shown
        if any(lines):
            name = name_of(document).removesuffix(".md").lower().replace("-", "_").replace("/", "_")
            made[f"{name}_page.py"] = "\n".join(lines) + "\n"
    for name, text in made.items():
        (folder / name).write_text(text, "utf-8")
    assert len(made) >= 7
    return [folder / name for name in made]


def test_programs_of_pages_pass_mypy_strict(programs: list[Path], tmp_path: Path) -> None:
    settings = (CHECKOUT / "pyproject.toml").read_text("utf-8").replace("$MYPY_CONFIG_FILE_DIR", str(CHECKOUT))
    modules = ", ".join(f'"{program.stem}"' for program in programs)
    (tmp_path / "pyproject.toml").write_text(settings + AS_ON_A_PAGE.format(modules=modules), "utf-8")
    command = [sys.executable, "-P", "-m", "mypy", f"--config-file={tmp_path / 'pyproject.toml'}"]
    done = subprocess.run([*command, *map(str, programs)], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed: pip install 'librmq[dev]'")
def test_programs_of_pages_pass_pyright(programs: list[Path], tmp_path: Path) -> None:
    paths = [str(CHECKOUT), str(programs[0].parent)]  # programs of a page import each other
    assert errors_of_pyright(programs, tmp_path, typeCheckingMode="standard", extraPaths=paths) == []
