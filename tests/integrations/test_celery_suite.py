"""Celery's own integration tests, unchanged, from the source archive of the installed version; results go to Redis."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.idempotence.servers import STARTERS, Absent
from tests.judged.facts import assert_passed
from tests.programs import environment, unpack_suite

pytestmark = [pytest.mark.slow, pytest.mark.platform]
pytest.importorskip("celery")

WITH_TRANSPORT = "import sys, librmq.integrations.kombu, pytest; sys.exit(pytest.main(sys.argv[1:]))"
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:pytest_librmq", "-p", "no:xdist")


@pytest.mark.parametrize("name", ["inspect"])
def test_tests_of_celery(tmp_path: Path, name: str) -> None:
    """Those of tasks take five minutes, of canvas more: `docs/judged.md` has both."""
    unpack_suite("celery", tmp_path)
    try:
        with STARTERS["redis"]() as server:
            done = subprocess.run(
                [sys.executable, "-c", WITH_TRANSPORT, "-q", *PLUGINS, "-p", "celery.contrib.pytest", "--rootdir", ".",
                 "-c", str(tmp_path / "pyproject.toml"), f"t/integration/test_{name}.py"],
                cwd=tmp_path,
                env=environment(str(tmp_path), TEST_BROKER=f"librmq://{tmp_path}/store", TEST_BACKEND=server.url),
                capture_output=True,
                text=True,
                timeout=300,
            )  # fmt: skip
    except Absent:
        pytest.skip("no Redis is installed, for the results")
    assert done.returncode == 0, done.stdout
    ran = re.search(r"\b(\d+) passed", done.stdout)
    assert ran, done.stdout
    assert_passed(f"celery {name}", version("celery"), int(ran[1]))
