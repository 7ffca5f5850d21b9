"""The recipes of the pages on processes and gunicorn, run by their servers: two workers share a store."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

import librmq
from librmq import BrokerUnreachableError
from librmq.clock import SystemClock
from librmq.idempotence import upgrade_tables
from librmq.protocol import QueryOffset
from librmq.testing import check_history
from librmq.wire._unix_sockets import connect_to, credentials_of, owner_socket
from librmq.wire.share import SharedBroker
from tests.conftest import SlowBudget
from tests.programs import Process, environment, free_port
from tests.project.test_docs import DOCS, blocks
from tests.recording import Recording
from tests.wire.stub import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("sys.platform == 'win32'", reason="no Unix domain sockets with credentials"),
]


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with the files of the pages."""
    for block in (*blocks(DOCS / "processes.md"), *blocks(DOCS / "howto" / "gunicorn.md")):
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
        for line in self.process.stdout:
            self.text += line

    def found(self, pattern: str) -> list[Any]:
        """Return the matches in what it has printed."""
        return re.findall(pattern, self.text)

    def wait(self, pattern: str, count: int) -> None:
        """Wait for so many different matches."""
        try:
            wait_until(lambda: len(set(self.found(pattern))) >= count or self.process.poll() is not None, pattern)
        finally:
            assert len(set(self.found(pattern))) >= count, self.text

    def end(self) -> None:
        """End it as its operator would."""
        self.process.terminate()
        self.process.wait(60)
        self._thread.join()
        self.process.stdout.close()


@contextmanager
def serving(folder: Path, module: str, *words: str, **variables: str) -> Iterator[Server]:
    server = Server(folder, module, *words, **variables)
    try:
        yield server
    finally:
        server.end()


WEB = {
    "uvicorn": ("app:app", "--workers", "2", "--port"),
    "gunicorn": ("wsgi:app", "--workers", "2", "--threads", "8", "--bind"),
}


@pytest.mark.parametrize("module", list(WEB))
def test_two_workers_of_a_web_server(recipes: Path, module: str) -> None:
    port = str(free_port())
    bind = port if module == "uvicorn" else f"127.0.0.1:{port}"
    started = {"uvicorn": r"Application startup complete", "gunicorn": r"Booting worker with pid: (\d+)"}[module]
    with serving(recipes, module, *WEB[module], bind) as server:
        wait_until(lambda: len(server.found(started)) >= 2, "two workers")
        served = set()
        for number in range(40):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/o-{number}", method="POST")
            with urllib.request.urlopen(request, timeout=60) as response:
                served.add(response.read().decode().strip())
        wait_until(lambda: len(set(server.found(r"charged (o-\d+)"))) == 40, "40 orders are charged")
        charged = server.found(r"(\d+) charged (o-\d+)")
        # A queue that moves to another worker can be read by both for a moment, so an order can be charged again.
        assert {order for _, order in charged} == {f"o-{number}" for number in range(40)}
        assert {process for process, _ in charged} >= served, "the worker that served them"
    assert "Traceback" not in server.text
    with librmq.MessageStore.open(recipes / "shop") as store:  # every worker has left it
        assert len([message for message in store if message.topic == "orders"]) == 40


def order_until_both_charge(server: Server, port: str, name: str) -> set[str]:
    """Send orders until each worker has charged one, and all are charged; return them.

    A worker that still begins would not hear of the end, for which gunicorn then waits 30 seconds.
    """
    orders: set[str] = set()

    def has_reached_both() -> bool:
        orders.add(order := f"{name}-{len(orders)}")
        urllib.request.urlopen(f"http://127.0.0.1:{port}/{order}", timeout=60).close()
        return len(orders) >= 10 and len(set(server.found(r"(\d+) charged"))) == 2

    wait_until(has_reached_both, "both workers charge orders")
    wait_until(lambda: orders <= set(server.found(r"charged (\S+)")), "all orders are charged")
    return orders


def test_preloaded_workers_go_on_after_a_restart(recipes: Path) -> None:
    """The owner is gunicorn's own process, which leaves the store in `on_exit`: a restart repeats nothing."""
    words = ("preloaded:app", "--preload", "--config", "preloaded.conf.py", *WEB["gunicorn"][1:])
    orders: set[str] = set()
    for start in range(2):
        port = str(free_port())
        with serving(recipes, "gunicorn", *words, f"127.0.0.1:{port}") as server:
            server.wait(r"Booting worker with pid: (\d+)", 2)
            ordered = order_until_both_charge(server, port, f"o-{start}")
        assert not orders & set(server.found(r"charged (\S+)"))
        assert "Traceback" not in server.text
        orders |= ordered


@pytest.mark.parametrize("module", list(WEB))
def test_prometheus_reads_the_owner(tmp_path: Path, module: str) -> None:
    """Also the next owner, after the first was killed."""
    port, scraped = str(free_port()), str(free_port())
    bind = port if module == "uvicorn" else f"127.0.0.1:{port}"
    for block in blocks(DOCS / "howto" / "prometheus.md"):
        if block.file is not None and block.file.endswith(".py"):
            (tmp_path / block.file).write_text(block.text.replace("9464", scraped), "utf-8")

    def metrics() -> str:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{scraped}/metrics", timeout=60) as response:
            return str(response.read().decode())
        return ""

    def count_of(name: str) -> float:
        return sum(float(number) for number in re.findall(rf'^{name}{{.*topic="orders".*}} (\S+)$', metrics(), re.M))

    with serving(tmp_path, module, *WEB[module], bind) as server:
        wait_until(lambda: 'librmq_group_lag{group="billing"' in metrics(), "the lag of the group")
        owner, served = owner_of(tmp_path / "shop"), set()
        for _ in range(20):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/orders/o", method="POST")
            with urllib.request.urlopen(request, timeout=60) as response:
                served.add(response.read().decode())
        assert count_of("librmq_messages_in_total") == 20, f"of all workers that served: {served}"
        os.kill(owner, signal.SIGKILL)
        wait_until(lambda: 'librmq_group_lag{group="billing"' in metrics(), "the metrics of the next owner")
        assert owner_of(tmp_path / "shop") != owner
    assert "Traceback" not in server.text


CHARGE = """\
def charge(message):
    import sqlite3
    from contextlib import closing
    from librmq.idempotence import transactional

    with closing(sqlite3.connect("charges.db", timeout=60)) as database:
        with transactional(database, message, group="billing", key=lambda message: message.keys[0]) as first:
            if first:
                database.execute("INSERT INTO charges VALUES (?)", (message.keys[0],))
"""


def record_charges(recipes: Path, file: str) -> None:
    """Let a recipe write a history, and charge each order in a database."""
    text = (recipes / file).read_text("utf-8")
    opened = re.search(r"^( *)(\S+ = )librmq\.Producer\(shared", text, re.MULTILINE)
    assert opened is not None
    recorded = "history = librmq.record_history(shared, f'{os.getpid()}.jsonl', process=str(os.getpid()))"
    text = text.replace(opened[0], f"{opened[1]}{recorded}\n{opened[0]}").replace("(shared, ", "(history, ")
    text = text.replace("record_history(history, ", "record_history(shared, ")
    text = text.replace("async def charge", "def charge")
    charge = re.search(r"^def charge\(message\):\n.*\n", text, re.MULTILINE)
    assert charge is not None
    (recipes / file).write_text(text.replace(charge[0], CHARGE), "utf-8")


class Orders:
    """A customer, who orders until each order is confirmed."""

    def __init__(self, port: str) -> None:
        self.port = port
        self.count = 0
        self.ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.ending.wait(0.02):
            url = f"http://127.0.0.1:{self.port}/orders/o-{self.count}"
            with suppress(OSError, HTTPException):
                urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()
                self.count += 1

    def end(self) -> None:
        self.ending.set()
        self._thread.join()


def owner_of(folder: Path) -> int:
    """Return the process that owns a store, 0 while none does."""
    with suppress(BrokerUnreachableError), connect_to(owner_socket(folder), 30) as connected:
        return credentials_of(connected).process
    return 0


@pytest.mark.parametrize("module", list(WEB))
def test_workers_killed_at_random_charge_once(recipes: Path, module: str, slow_budget: SlowBudget) -> None:
    file = {"uvicorn": "app.py", "gunicorn": "wsgi.py"}[module]
    record_charges(recipes, file)
    with closing(sqlite3.connect(recipes / "charges.db")) as database:
        database.execute("CREATE TABLE charges (number TEXT)")
    upgrade_tables(create_engine(f"sqlite:///{recipes / 'charges.db'}"))
    port, clock = str(free_port()), SystemClock()
    bind = port if module == "uvicorn" else f"127.0.0.1:{port}"
    words = [word if word != "2" else "4" for word in WEB[module]]
    crashes: list[dict[str, Any]] = []
    with serving(recipes, module, *words, bind) as server:

        def workers() -> list[int]:
            """Return the processes that have begun to record."""
            return [pid for path in recipes.glob("*.jsonl") if os.path.exists(f"/proc/{(pid := int(path.stem))}")]

        wait_until(lambda: len(workers()) == 4 or server.process.poll() is not None, "four workers")
        assert server.process.poll() is None, server.text
        orders = Orders(port)
        try:
            for number in slow_budget.rounds(30, f"kills of workers of {module}", at_least=4):
                confirmed, chance = orders.count, random.Random(f"{module} {number}")
                killed, owner = chance.choice(workers()), owner_of(recipes / "shop")
                crash = [{"process": str(killed)}, *([{"broker": "broker-a"}] if killed == owner else [])]
                crashes += [{"event": "crash", "at_ms": clock.now_ms(), **one} for one in crash]
                os.kill(killed, signal.SIGKILL)
                crashes += [{"event": "crash", "at_ms": clock.now_ms() + 2, **one} for one in crash]
                wait_until(
                    lambda: len(workers()) == 4 and orders.count > confirmed + 5,  # noqa: B023 (called at once)
                    "the next worker",
                )
                clock.wait(threading.Event(), chance.random())
        finally:
            orders.end()
        drained = clock.now_ms()
        with librmq.share(recipes / "shop") as shared:
            ordered = {f"o-{number}" for number in range(orders.count)}
            wait_until(lambda: lag_of(shared) == 0 and charges(recipes).keys() >= ordered, "all are charged")
            drained = clock.now_ms() + 1
    assert {number: times for number, times in charges(recipes).items() if times != 1} == {}
    crashes.append({"event": "drained", "group": "billing", "at_ms": drained})
    assert check_history(map(json.loads, Recording(str(recipes)).lines(crashes))) == []


def charges(recipes: Path) -> Counter[str]:
    """Return how often each order was charged."""
    with closing(sqlite3.connect(recipes / "charges.db", timeout=60)) as database:
        return Counter(number for (number,) in database.execute("SELECT number FROM charges"))


def lag_of(shared: SharedBroker) -> int:
    """Return how many orders the group has not read."""
    with librmq.MessageStore.open(shared.path, read_only=True) as store:
        ends = {queue: store.queue_range(*queue)[1] for queue in store.queues if queue[0] == "orders"}
    return sum(end - (shared.call(QueryOffset("billing", *queue)) or 0) for queue, end in ends.items())


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
            wait_until(lambda: sorted(heard) == [f"o-{number}" for number in range(10)], "all are heard")
    assert "Traceback" not in server.text


def test_two_workers_of_pytest_xdist(recipes: Path) -> None:
    with serving(recipes, "pytest", "-n", "2", "-p", "no:cacheprovider", "test_orders.py") as server:
        server.process.wait(120)
    assert "8 passed" in server.text, server.text
