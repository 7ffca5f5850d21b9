"""pyright, the checker of many editors, agrees with mypy on what users write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed: pip install 'librmq[dev]'")
def test_pyright_finds_what_mypy_finds(tmp_path: Path) -> None:
    config = tmp_path / "pyrightconfig.json"
    settings = {
        "include": [os.path.relpath(FOLDER / name, tmp_path) for name in ("api.py", "clients.py")],
        "extraPaths": [str(FOLDER.parents[1])],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "reportUnusedFunction": False,
    }
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", str(config), "--outputjson"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout.startswith("{"):
        pytest.skip(f"pyright could not be set up: {result.stderr[-200:]}")
    found = [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in json.loads(result.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert found == []
