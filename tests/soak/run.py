"""A soak: processes send and consume for a time while they are killed and cut off, and record what they do.

`Soak` starts and harms the processes, each of which runs `tests.soak.worker.main`, and returns their history.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self, cast

from librmq.broker import Broker
from librmq.client.recorder import Event
from librmq.clock import SystemClock
from librmq.testing import check_history
from tests.soak.worker import LOADS, Recording, SoakNames

_QUEUES: Final = 4
_WORKERS: Final = 2
"""Processes of clients; an embedded store has one."""
_WORKER: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from tests.soak.worker import main; main()"
)
_START_S: Final = 60.0
_END_S: Final = 60.0
_SETTLE_S: Final = 120.0
"""After so long without a message that was missing, what is missing is lost."""


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """What a soak does. At most some 200,000 messages: the checker holds their events in memory."""

    store: Path
    """The folder of the store."""
    recordings: Path
    """The folder in which processes record what they do; the soak makes it."""
    is_served: bool = False
    """Whether clients reach the store over TCP, in processes of their own."""
    seconds: float
    """How long messages are sent."""
    rate: int
    """Messages a second, of all processes together."""
    loads: Sequence[str] = LOADS
    """Some of `LOADS`."""
    fault: str = "crash"
    """``crash`` kills the process that owns the store; in a served one ``kill`` kills a client's process, and ``cut``
    cuts connections."""
    fault_every_s: float
    """Seconds between two faults."""
    seed: int = 0


class CuttingProxy:
    """Passes connections on to the port and host in their first line, and cuts them. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="librmq soak proxy", daemon=True)
        self._thread.start()
        self._open: set[asyncio.StreamWriter] = set()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            port, host = (await reader.readline()).decode().split()
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writers.append(far_writer)
            self._open.add(writer)
            await asyncio.wait(
                [asyncio.create_task(_pass_on(*ends)) for ends in ((reader, far_writer), (far_reader, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        except (OSError, ValueError):  # nothing listens there, or the connection ended at once
            pass
        finally:
            self._open.discard(writer)
            for end in writers:
                end.transport.abort()

    def cut(self, rng: random.Random) -> int:
        """Cut about half of the connections, in the middle of what they carry; return their number."""

        async def cut() -> int:
            writers = [writer for writer in self._open if rng.random() < 0.5] or list(self._open)[:1]
            for writer in writers:
                writer.transport.abort()
            return len(writers)

        return asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        async def end_tasks() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()


# ---- the soak


class Process:
    """A process that runs `main`."""

    def __init__(self, name: str, settings: Mapping[str, object], folder: Path) -> None:
        self.name = name
        self.address: str | None = None
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"librmq soak {name}", daemon=True)
        self._reader.start()
        self.ask(json.dumps(settings))

    def _read(self) -> None:
        for line in cast(IO[bytes], self.process.stdout):
            self.address = json.loads(line)["ready"]
            self._is_ready.set()
        self._is_ready.set()

    def ask(self, order: str) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended, or was killed
            file = cast(IO[bytes], self.process.stdin)
            file.write(f"{order}\n".encode())
            file.flush()

    def wait_until_ready(self) -> None:
        assert self._is_ready.wait(_START_S), f"the process {self.name} did not start within {_START_S:g} s"
        self.check_running()

    def check_running(self) -> None:
        """Refuse an end that the soak did not ask for."""
        status = self.process.poll()
        assert status is None, f"{self.name} ended by itself with status {status}: {self._log.read_text('utf-8')}"

    def kill(self) -> int:
        """Kill it, and return the time of its last step: it is stopped first."""
        self.check_running()
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        killed_ms = SystemClock().now_ms()
        self.process.kill()
        self._close()
        return killed_ms

    def end(self) -> int | None:
        """Wait for the end that was asked for, and return its status; None if it was killed, because it goes on."""
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(_END_S)
        self.process.kill()
        self._close()
        return status

    def _close(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()


class Soak:
    """One run."""

    def __init__(self, plan: SoakPlan) -> None:
        self._plan = plan
        self._names = SoakNames(plan.loads)
        self._recording = Recording(str(plan.recordings))
        self._port = 0
        self._clock = SystemClock()
        self._random = random.Random(plan.seed)
        self._server: Process | None = None
        self._workers: list[Process] = []
        self._lives = 0
        self._events: list[Event] = []
        self._broker_name = ""
        self.faults: int = 0
        """How often the fault has come."""

    def run(self) -> list[dict[str, Any]]:
        """Run to the end, and return the history."""
        with Broker.open(self._plan.store) as broker:
            self._broker_name = broker.name
            for load in self._plan.loads:
                broker.create_topic(self._names.topic(load), _QUEUES)
            for group in self._names.topics:
                broker.set_group(group)
        self._plan.recordings.mkdir()
        statuses = {}
        with CuttingProxy() as self._proxy:
            try:
                self._run_processes()
            finally:
                statuses = self._end_processes()
        assert set(statuses.values()) == {0}, statuses
        return self._history(self._events)

    def _run_processes(self) -> None:
        """Send for the planned time, and wait until all is consumed."""
        plan = self._plan
        if plan.is_served:
            self._start_server()
        self._workers = [self._start_worker() for _ in range(_WORKERS if plan.is_served else 1)]
        for worker in self._workers:
            worker.wait_until_ready()
        end = self._clock.monotonic() + plan.seconds
        while (left_s := end - self._clock.monotonic()) > 0:
            if left_s > plan.fault_every_s:
                self._pass(plan.fault_every_s)
                self._make_fault()
            else:
                self._pass(left_s)
        for worker in self._workers:
            worker.ask("stop")
        self._settle()

    def _pass(self, seconds: float) -> None:
        self._clock.wait(threading.Event(), seconds)
        for process in self._processes():
            process.check_running()

    def _processes(self) -> list[Process]:
        return [*self._workers, *([self._server] if self._server is not None else [])]

    def _start_server(self) -> None:
        settings = {"role": "server", "store": str(self._plan.store), "port": self._port}
        self._server = Process(f"server-{self.faults}", settings, self._plan.recordings)
        self._server.wait_until_ready()
        self._port = int(cast(str, self._server.address).rpartition(":")[2])

    def _start_worker(self) -> Process:
        self._lives += 1
        name = f"worker-{self._lives}"
        settings: dict[str, object] = {
            "role": "embedded" if self._server is None else "client",
            "store": str(self._plan.store),
            "address": None if self._server is None else self._server.address,
            "proxy": self._proxy.port,
            "history": str(self._plan.recordings / f"{name}.jsonl"),
            "process": name,
            "loads": self._plan.loads,
            "rate": self._plan.rate / (1 if self._server is None else _WORKERS),
            "seed": self._random.randrange(1_000_000),
        }
        return Process(name, settings, self._plan.recordings)

    def _make_fault(self) -> None:
        fault = self._plan.fault
        self.faults += 1
        if fault == "cut":
            self._proxy.cut(self._random)
        elif fault == "crash" and self._server is not None:
            self._add_crash(self._server.kill(), broker=self._broker_name)
            self._start_server()
        else:
            place = self._random.randrange(len(self._workers))
            worker = self._workers[place]
            killed_ms = worker.kill()
            self._add_crash(killed_ms, process=worker.name)
            if fault == "crash":
                self._add_crash(killed_ms, broker=self._broker_name)
            self._workers[place] = self._start_worker()
            self._workers[place].wait_until_ready()

    def _add_crash(self, at_ms: int, **actor: str) -> None:
        self._events.append({"event": "crash", **actor, "at_ms": at_ms})

    def _settle(self) -> None:
        """Wait until nothing is missing, or nothing that was missing has come for some time."""
        fewest, since = None, self._clock.monotonic()
        while True:
            begin = self._clock.monotonic()
            drained_ms = self._clock.now_ms()
            marks = [{"event": "drained", "group": group, "at_ms": drained_ms} for group in self._names.topics]
            found = check_history(self._history([*self._events, *marks]))
            missing = sum(anomaly.anomaly in ("lost", "undecided") for anomaly in found)
            now = self._clock.monotonic()
            if fewest is None or missing < fewest:
                fewest, since = missing, now
            if not missing or now - since >= _SETTLE_S:
                self._events += marks
                return
            self._pass(max(0.5, now - begin))

    def _end_processes(self) -> dict[str, int | None]:
        """End the clients, then the server; return their exit statuses, None for those that go on."""
        statuses = {}
        for processes in (self._workers, [self._server] if self._server is not None else []):
            for process in processes:
                process.ask("stop")
                process.ask("end")
            for process in processes:
                statuses[process.name] = process.end()
        return statuses

    def _history(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._recording.lines(events)]
