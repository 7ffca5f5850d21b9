"""Django's own tests of tasks, unchanged, from the source archive of the installed version."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.judged.facts import assert_passed
from tests.programs import environment, unpack_suite

HAS_TASKS = find_spec("django") is not None and find_spec("django.tasks") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.platform,
    pytest.mark.skipif(not HAS_TASKS, reason="needs Django 6.0 or later; django-tasks publishes no tests"),
]

PROGRAM = """
import sys

from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    SECRET_KEY="of a test",
    USE_TZ=True,
    INSTALLED_APPS=["librmq.integrations.django"],
)
import django

django.setup()

from itertools import count

from django.tasks.backends import dummy, immediate
from django.test.runner import DiscoverRunner

from librmq.integrations.django import LibrmqBackend, Worker

numbers = count()


class Empty(LibrmqBackend):
    def __init__(self, alias, params):
        self.results = []
        self.given = params
        super().__init__(alias, {**params, "OPTIONS": {"path": f"store-{next(numbers)}", "invisible": 3600}})

    def clear(self):
        self.close()
        self.__init__(self.alias, self.given)


class DummyBackend(Empty):
    def enqueue(self, task, args, kwargs):
        self.results.append(super().enqueue(task, args, kwargs))
        return self.results[-1]


class ImmediateBackend(Empty):
    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        worker = Worker(self)
        try:
            worker.run_pending()
        finally:
            worker.close()
        return self.get_result(result.id)


dummy.DummyBackend = DummyBackend
immediate.ImmediateBackend = ImmediateBackend
left_out = {
    "test_cannot_get_result", "test_cannot_refresh_result", "test_cannot_pass_run_after",  # librmq can
    "test_using_correct_backend",  # expects a backend without options; librmq's has a folder
    "test_refresh_result", "test_refresh_result_async",  # the dummy's: change a result in the list that is its store
}


class Runner(DiscoverRunner):
    def build_suite(self, *args, **kwargs):
        suite = super().build_suite(*args, **kwargs)
        kept = [
            test for test in suite
            if test._testMethodName not in left_out
            or (type(test).__name__, test._testMethodName) in {
                ("TaskTestCase", "test_using_correct_backend"), ("TaskTestCase", "test_refresh_result"),
            }
        ]
        return type(suite)(kept)


names = ("dummy_backend", "immediate_backend", "tasks")
sys.exit(Runner(verbosity=2).run_tests([f"tasks.test_{name}" for name in names]))
"""


def test_the_tests_of_tasks(tmp_path: Path) -> None:
    unpack_suite("django", tmp_path, "/tests/tasks/")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment(str(tmp_path / "tests")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ran = re.search(r"Ran (\d+) tests", done.stderr)
    assert ran, done.stderr
    assert_passed("django", version("django"), int(ran[1]))
