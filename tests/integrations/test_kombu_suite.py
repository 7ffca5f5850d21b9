"""kombu's own integration tests, unchanged, from the source archive of the installed version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.judged.facts import assert_passed
from tests.programs import environment, unpack_suite

pytestmark = [pytest.mark.slow, pytest.mark.platform]
pytest.importorskip("kombu")

CASES = """
import kombu
import pytest

import librmq.integrations.kombu
from t.integration.common import (
    BaseExchangeTypes, BaseMessage, BasePriority, BaseTimeToLive, BasicFunctionality,
)


@pytest.fixture()
def connection(tmp_path):
    return kombu.Connection(f"librmq://{tmp_path}/store")


@pytest.fixture()
def invalid_connection():
    return kombu.Connection("librmq:///proc/no-store")


class TestBasicFunctionality(BasicFunctionality): pass
class TestExchangeTypes(BaseExchangeTypes): pass
class TestTimeToLive(BaseTimeToLive): pass
class TestPriority(BasePriority): pass
class TestMessage(BaseMessage): pass
"""


def test_the_classes_of_kombu(tmp_path: Path) -> None:
    unpack_suite("kombu", tmp_path)
    (tmp_path / "test_suite.py").write_text(CASES)
    words = ("-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:pytest_librmq", "-c", os.devnull)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path), str(tmp_path / "test_suite.py")],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    ran = re.search(r"\b(\d+) passed", done.stdout)
    assert ran, done.stdout
    assert_passed("kombu", version("kombu"), int(ran[1]))
