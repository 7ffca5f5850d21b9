"""pyright, which many editors use, agrees with mypy on user-style code, and on the pages about effects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import librmq
from tests.reference import CHECKOUT


def errors_of_pyright(files: Iterable[Path], folder: Path, **settings: object) -> list[str]:
    """Return the errors that pyright reports for files, checked as a separate project; skip if it can't be set up."""
    config = folder / "pyrightconfig.json"
    include = [os.path.relpath(file, folder) for file in files]
    fixed = {"include": include, "extraPaths": [str(CHECKOUT), str(CHECKOUT / "examples")], "pythonVersion": "3.11"}
    config.write_text(json.dumps(fixed | settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--project",
        str(config),
        "--outputjson",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout.startswith("{"):
        pytest.skip(f"pyright could not be set up: {result.stderr[-200:]}")
    return [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in json.loads(result.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed: pip install 'librmq[dev]'")
def test_pyright_agrees_with_mypy(tmp_path: Path) -> None:
    files = [Path(__file__).with_name(name) for name in ("api.py", "clients.py")]
    for page in ("dedup", "transactions"):
        text = (CHECKOUT / "docs" / f"{page}.md").read_text("utf-8")
        snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        files.append(tmp_path / f"{page}.py")
        files[-1].write_text("\n".join(snippets), "utf-8")
    found = errors_of_pyright(
        files,
        tmp_path,
        typeCheckingMode="standard",
        reportUnnecessaryTypeIgnoreComment="error",
        reportUnusedFunction=False,
    )
    assert found == []


UNTYPED = {
    "librmq.columns": {"StoreDataset", "dataset"},  # a dataset of pyarrow, which has no types
    "librmq.integrations.django": {"LibrmqBackend", "Worker"},  # a backend of Django, which has none either
}
"""Promised names that no annotation completes, because they stand on a class of a package without types."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed: pip install 'librmq[dev]'")
def test_types_of_promised_names_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a version promises has declared types throughout, so that no type checker has to infer any."""
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    promises: dict[str, list[str]] = import_module("api").promised()
    promised = {f"{module}.{name}" for module in promises for name in {*promises[module]} - UNTYPED.get(module, set())}
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "librmq"]
    assert librmq.__file__ is not None
    result = subprocess.run(
        [*command, "--ignoreexternal", "--outputjson"],
        env={**os.environ, "PYTHONPATH": str(Path(librmq.__file__).parent.parent)},  # it does not find an editable one
        capture_output=True,
        text=True,
        check=False,
    )
    if not result.stdout.startswith("{"):
        pytest.skip(f"pyright could not be set up: {result.stderr[-200:]}")
    symbols = json.loads(result.stdout)["typeCompleteness"]["symbols"]
    types = {name: symbol for symbol in symbols for name in (symbol["name"], *symbol.get("alternateNames", ()))}
    assert sorted(promised - {*types}) == []
    incomplete = [name for name in promised if not types[name]["isTypeKnown"] or types[name]["isTypeAmbiguous"]]
    causes = [one for symbol in symbols for one in symbol["diagnostics"] if "missing type annotation" in one["message"]]
    assert sorted(incomplete) == [], causes
