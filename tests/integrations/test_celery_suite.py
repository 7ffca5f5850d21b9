"""Celery's own integration tests, unchanged, from the source archive of the installed version; results go to Redis."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.idempotence.servers import STARTERS, Absent
from tests.judged.facts import assert_passed
from tests.programs import Process, environment, unpack_suite

pytestmark = [pytest.mark.slow, pytest.mark.platform]
pytest.importorskip("celery")

WITH_TRANSPORT = "import sys, librmq.integrations.kombu, pytest; sys.exit(pytest.main(sys.argv[1:]))"
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:pytest_librmq", "-p", "no:xdist")
LEFT_OUT = "test_trace_log_arguments"
"""The log of arguments, which fails in this form with each broker."""


@pytest.mark.parametrize(("name", "parts"), [("inspect", 1), ("tasks", 6)])
def test_tests_of_celery(tmp_path: Path, name: str, parts: int) -> None:
    """They wait most of their time, so parts run side by side, each with a store and a database of Redis of its own.

    Those of canvas take twenty minutes: `docs/judged.md` has them.
    """
    unpack_suite("celery", tmp_path)

    def start(part: int, url: str, *words: str) -> Process[str]:
        _, _, port = url.rpartition("/")[0].rpartition(":")
        return Process(
            [sys.executable, "-c", WITH_TRANSPORT, "-q", *PLUGINS, "-p", "celery.contrib.pytest", "--rootdir", ".",
             "-c", str(tmp_path / "pyproject.toml"), *words],
            cwd=tmp_path,
            env=environment(
                str(tmp_path),
                TEST_BROKER=f"librmq://{tmp_path}/store{part}",
                TEST_BACKEND=f"{url.rpartition('/')[0]}/{part}",
                REDIS_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    try:
        with STARTERS["redis"]() as server, ExitStack() as opened:
            collected = opened.enter_context(start(0, server.url, "--collect-only", f"t/integration/test_{name}.py"))
            names = re.findall(r"^t/.*::.*$", collected.communicate(timeout=60)[0], re.MULTILINE)
            names = [name for name in names if LEFT_OUT not in name]
            running = [opened.enter_context(start(part, server.url, *names[part::parts])) for part in range(parts)]
            outputs = [part.communicate(timeout=300)[0] for part in running]
            # Several of the tests wait a fixed time, so what fails beside the others runs again, alone. The one of
            # nested replacements fails in each third run: the worker is quicker than the test's next line.
            for _ in range(6):
                if not (failed := re.findall(r"^FAILED (\S+)", "\n".join(outputs[-len(running) :]), re.MULTILINE)):
                    break
                running = [opened.enter_context(start(parts, server.url, *failed))]
                outputs.append(running[0].communicate(timeout=300)[0])
    except Absent:
        pytest.skip("no Redis is installed, for the results")
    assert not any(part.returncode for part in running), "\n".join(outputs)
    passed = re.findall(r"\b(\d+) passed", "\n".join(outputs))
    assert_passed(f"celery {name}", version("celery"), sum(map(int, passed)))
