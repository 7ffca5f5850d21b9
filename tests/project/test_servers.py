"""The recipes of docs/processes.md, run by the servers that they are for: two workers share a store."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import librmq
from tests.programs import Process, environment
from tests.project.test_docs import DOCS, blocks
from tests.wire.stub import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("sys.platform == 'win32'", reason="no Unix domain sockets with credentials"),
]


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for block in blocks(DOCS / "processes.md"):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, "utf-8")
    return tmp_path


class Server:
    """A server in a process of its own, and what it and its workers print."""

    def __init__(self, folder: Path, module: str, *words: str, **variables: str) -> None:
        if find_spec(module) is None:
            assert not os.environ.get("CI"), f"{module} is missing, of the extra test"
            pytest.skip(f"needs {module}, of the extra test")
        own = environment(PYTHONUNBUFFERED="", **variables)
        own["PYTHONPATH"] = os.pathsep.join((str(folder), own["PYTHONPATH"]))
        self.process: Process[str] = Process(
            [sys.executable, "-m", module, *words], cwd=folder, stdout=-1, stderr=-2, text=True, env=own
        )
        self.text = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    def found(self, pattern: str) -> list[Any]:
        """Return the matches in what it has printed."""
        return re.findall(pattern, self.text)

    def wait(self, pattern: str, count: int) -> None:
        """Wait for so many different matches."""
        try:
            wait_until(lambda: len(set(self.found(pattern))) >= count or self.process.poll() is not None, pattern, 60)
        finally:
            assert len(set(self.found(pattern))) >= count, self.text

    def end(self) -> None:
        """End it as its operator would."""
        self.process.terminate()
        self.process.wait(60)
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def serving(folder: Path, module: str, *words: str, **variables: str) -> Iterator[Server]:
    server = Server(folder, module, *words, **variables)
    try:
        yield server
    finally:
        server.end()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


WEB = {
    "uvicorn": ("app:app", "--workers", "2", "--port"),
    "gunicorn": ("wsgi:app", "--workers", "2", "--threads", "8", "--bind"),
}


@pytest.mark.parametrize("module", list(WEB))
def test_two_workers_of_a_web_server(recipes: Path, module: str) -> None:
    port = free_port()
    bind = port if module == "uvicorn" else f"127.0.0.1:{port}"
    started = {"uvicorn": r"Application startup complete", "gunicorn": r"Booting worker with pid: (\d+)"}[module]
    with serving(recipes, module, *WEB[module], bind) as server:
        wait_until(lambda: len(server.found(started)) >= 2, "two workers", 60)
        served = set()
        for number in range(40):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/o-{number}", method="POST")
            with urllib.request.urlopen(request, timeout=60) as response:
                served.add(response.read().decode().strip())
        wait_until(lambda: len(set(server.found(r"charged (o-\d+)"))) == 40, "40 orders are charged", 60)
        charged = server.found(r"(\d+) charged (o-\d+)")
        # A queue that moves to another worker can be read by both for a moment, so an order can be charged again.
        assert {order for _, order in charged} == {f"o-{number}" for number in range(40)}
        assert {process for process, _ in charged} >= served, "the worker that served them"
    assert "Traceback" not in server.text
    with librmq.MessageStore.open(recipes / "shop") as store:  # every worker has left it
        assert len([message for message in store if message.topic == "orders"]) == 40


def test_celery_beside_an_application(recipes: Path) -> None:
    heard: list[str] = []
    words, filesystem = ("-A", "tasks", "worker", "--concurrency", "2"), {"CELERY_BROKER": "filesystem://"}
    with librmq.share(recipes / "shop") as shared, serving(recipes, "celery", *words, **filesystem) as server:
        billing = librmq.PushConsumer(shared, "billing", consume_from=librmq.ConsumeFrom.FIRST)
        billing.subscribe("orders", lambda message: heard.append(message.keys[0]))
        with billing:
            calls = (
                "import os, sys; sys.path.append('.'); import tasks; [tasks.order.delay(f'o-{n}') for n in range(10)]"
            )
            calling = Process([sys.executable, "-c", calls], cwd=recipes, env=environment(**filesystem))
            assert calling.wait(60) == 0
            wait_until(lambda: sorted(heard) == [f"o-{number}" for number in range(10)], "all are heard", 60)
    assert "Traceback" not in server.text


def test_two_workers_of_pytest_xdist(recipes: Path) -> None:
    with serving(recipes, "pytest", "-n", "2", "-p", "no:cacheprovider", "test_orders.py") as server:
        server.process.wait(120)
    assert "8 passed" in server.text, server.text
