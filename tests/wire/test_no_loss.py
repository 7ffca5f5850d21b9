"""Thousands of messages of official clients that are killed and cut off: their history is right, the store sound.

The history is recorded where the server calls the broker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, BrokerConfig, MessageStore, TimerConfig, record_history
from librmq.store import verify
from librmq.testing import Anomaly, check_history
from librmq.wire.grpc import GrpcServer
from tests.programs import Process
from tests.wire.clients import HERE, OfficialClient
from tests.wire.stub import wait_until

SCRIPT = HERE / "load_client.py"
ROUND = 500


class Reader:
    """A client's process, and the last number that it has printed."""

    def __init__(self, process: Process[str]) -> None:
        self.process = process
        self.count = 0
        self.last = -1
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.last = int(line)
            self.count += 1

    def end(self) -> None:
        """Kill the process if it is still running, and read what it has printed."""
        self.process.kill()
        self._thread.join()  # before anything else reads the pipe: it is not safe for two threads
        self.process.communicate()


class Scene:
    """A served broker, its clients, and their history."""

    def __init__(self, client: OfficialClient, broker: Broker, path: Path, home: Path) -> None:
        self._client = client
        self._broker = broker
        self._path = path
        self._home = home
        self.server = GrpcServer(broker)
        self.worker = self.work()

    def work(self) -> Reader:
        return Reader(self._client.started(SCRIPT, "work", self.server.address, home=self._home))

    def send(self, first: int, end: int) -> Reader:
        return Reader(self._client.started(SCRIPT, "send", self.server.address, first, end, home=self._home))

    def cut(self) -> None:
        """Cut all connections; the port is served again immediately."""
        port = self.server.port
        self.server.close()
        self.server = GrpcServer(self._broker, port=port)

    def history(self) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self._path.read_bytes().splitlines() if line.strip()]
        now_ms = self._broker.runner.now_ms()
        group = {"event": "group", "group": "workers", "topics": ["load"]}
        return [*events, group, {"event": "drained", "group": "workers", "at_ms": now_ms}]

    def anomalies(self) -> list[Anomaly]:
        return check_history(self.history())

    def run(self, number: int) -> None:
        """Send some messages, and harm the clients in the middle."""
        begin, end = number * ROUND, (number + 1) * ROUND
        sender = self.send(begin, end)
        wait_until(lambda: sender.count > ROUND // 4, "a quarter is sent")
        harm = number % 4
        if harm == 0:
            self.worker.end()
            self.worker = self.work()
        elif harm == 1:
            sender.end()
            sender = self.send(sender.last + 1, end)
        elif harm == 2:
            self.cut()
        wait_until(lambda: sender.last == end - 1, "all are sent")
        sender.end()

    def close(self) -> None:
        self.worker.end()
        self.server.close()


@contextmanager
def scene_of(client: OfficialClient, broker: Broker, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    path, call = home / "history", broker.call
    with record_history(broker, path) as route:
        # The server gives messages back on behalf of clients, so the broker's own calls are recorded.
        monkeypatch.setattr(broker, "call", lambda request: route.recorder.call("clients", broker.name, request, call))
        scene = Scene(client, broker, path, home)
        try:
            yield scene
        finally:
            scene.close()


@pytest.mark.slow
def test_no_message_is_lost_by_killed_and_cut_clients(
    python: OfficialClient,
    tmp_path: Path,
    slow_budget: Any,
    figure: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    with (
        Broker.open(store, BrokerConfig(timers=TimerConfig())) as broker,
        scene_of(python, broker, tmp_path, monkeypatch) as scene,
    ):
        for number in slow_budget.rounds(20, f"times {ROUND} messages of official clients", at_least=4):
            scene.run(number)
        with suppress(AssertionError):  # the anomalies say more
            wait_until(lambda: not scene.anomalies(), "all are consumed")
        assert scene.anomalies() == []
        sent = sum(event["event"] == "send" and event["outcome"] == "ok" for event in scene.history())
    figure(f"{sent:,} messages of official clients, killed and cut off: none lost")
    assert not verify(store).damage
    with MessageStore.open(store, read_only=True) as opened:
        first = {int(one.body): one for one in opened if one.topic == "load"}
        again = [one for one in opened if one.topic == "%RETRY%workers_load"]
    for number, one in first.items():
        assert one.unique_key
        assert one.keys == (f"k{number}",)
        assert (one.properties["PGROUP"], one.properties["RECONSUME_TIME"], one.reconsume_times) == ("load", "0", 0)
        assert {"__BORNHOST", "BORN_TIMESTAMP"} <= one.properties.keys()
    assert {int(one.body) for one in again} >= {number for number in first if number % 10 == 3}
    for one in again:
        before = first[int(one.body)]
        assert one.reconsume_times >= 1
        assert one.queue_id == 0
        assert one.properties.keys() - before.properties.keys() == {"1ST_POP_TIME"}
        assert (one.stored_body, one.born_timestamp_ms) == (before.stored_body, before.born_timestamp_ms)
