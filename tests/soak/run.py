"""A soak: processes send and consume for a time while they are killed and cut off; then their history is judged.

`Soak` starts and harms the processes, each of which runs `tests.soak.worker.main`, and writes one history of
what they recorded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final, Self, cast

from librmq.broker import Broker
from librmq.client.recorder import Event
from librmq.clock import SystemClock
from librmq.errors import ConfigError, InputError, RmqError
from librmq.message.topics import dead_letter_topic, retry_topic
from librmq.testing.histories.anomalies import Anomaly, find_anomalies
from librmq.testing.histories.events import HistoryEvents
from tests.soak.worker import LOADS, Recording, SoakNames, recorded_kind

PREFIX: Final = "librmq_soak_"
"""Begins the names of all topics and groups of a soak."""
FAULTS: Final = ("kill", "crash", "cut")
"""Kills of a client's process, kills of the process that owns the store, and cuts of connections."""
_QUEUES: Final = 4
_WORKER: Final = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from tests.soak.worker import main; main()"
)
_START_S: Final = 60.0
_END_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """What a soak does. At most some 200,000 messages: the checker holds their events in memory."""

    store: str
    """The folder of the store."""
    is_served: bool = False
    """Whether clients reach the store over TCP, in processes of their own."""
    seconds: float = 30.0
    """How long messages are sent."""
    rate: int = 100
    """Messages a second, of all processes together."""
    loads: Sequence[str] = LOADS
    """Some of `LOADS`."""
    workers: int = 2
    """Processes of clients; an embedded store has one."""
    faults: Sequence[str] | None = None
    """Some of `FAULTS`, which come in turn; None: all that are possible."""
    fault_every_s: float = 5.0
    """Seconds between two faults."""
    settle_s: float = 120.0
    """After so long without a message that was missing, what is missing is lost."""
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """The end of the names of topics and groups."""
    history: str | None = None
    """The file of the history; None: `PREFIX`, the name, and ``.jsonl``."""

    def possible_faults(self) -> tuple[str, ...]:
        """Return the faults that a served or an embedded store allows."""
        return FAULTS if self.is_served else ("crash",)


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

    def __init__(self, name: str, settings: Mapping[str, object], folder: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.error = ""
        self.address: str | None = None
        self._log = os.path.join(folder, f"{name}.log")
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the soak alone
            )
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"librmq soak {name}", daemon=True)
        self._reader.start()
        self.ask(json.dumps(settings))

    def _read(self) -> None:
        for line in cast(IO[bytes], self.process.stdout):
            row = json.loads(line)
            if "ready" in row:
                self.address = row["ready"]
                self._is_ready.set()
            else:
                self.counts, self.error = Counter(row["counts"]), row["error"]
        self._is_ready.set()

    def ask(self, order: str) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended, or was killed
            file = cast(IO[bytes], self.process.stdin)
            file.write(f"{order}\n".encode())
            file.flush()

    def wait_until_ready(self) -> None:
        """Wait until its clients have started.

        Raises:
            InputError: It has ended, or is not ready in time.
        """
        if not self._is_ready.wait(_START_S):
            raise InputError(f"the process {self.name} did not start within {_START_S:g} s")
        self.check_running()

    def check_running(self) -> None:
        """Refuse an end that the soak did not ask for.

        Raises:
            InputError: It has ended.
        """
        if (status := self.process.poll()) is not None:
            with open(self._log, encoding="utf-8", errors="replace") as log:
                last = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "no message")
            raise InputError(f"the process {self.name} ended by itself with status {status}: {last:.500}")

    def kill(self) -> int:
        """Kill it, and return the time of its last step: it is stopped first."""
        self.check_running()
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        killed_ms = SystemClock().now_ms()
        self.process.kill()
        self._close()
        return killed_ms

    def wait_for_end(self) -> str:
        """Wait for the end that was asked for, and kill the process if that takes too long; return what failed."""
        problem = ""
        try:
            if status := self.process.wait(_END_S):
                problem = f"it ended with status {status}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            problem = f"it was killed, because it did not end within {_END_S:g} s"
        self._close()
        return problem

    def _close(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()


@dataclass(frozen=True)
class SoakResult:
    """How a soak ended."""

    anomalies: list[Anomaly]
    history: str
    """The file of the history."""
    counts: Mapping[str, int]
    """Sends and deliveries by their outcome, and faults by their kind."""
    left: Mapping[str, str]
    """Topics and groups that could not be deleted, and processes that did not end, with the reason."""
    is_interrupted: bool


class Soak:
    """One run."""

    def __init__(self, plan: SoakPlan) -> None:
        self._plan = plan
        self.names = SoakNames(PREFIX + plan.name, plan.loads)
        """Its topics and groups."""
        self.history: str = plan.history or f"{self.names.base}.jsonl"
        """The file of the history."""
        self._parts = f"{self.history}.parts"
        self._recording = Recording(self._parts)
        self._address: str | None = None
        self._port = 0
        self._clock = SystemClock()
        self._random = random.Random(plan.name)
        self._server: Process | None = None
        self._workers: list[Process] = []
        self._lives = 0
        self._ended: Counter[str] = Counter()
        self._events: list[Event] = []
        self._proxy: CuttingProxy | None = None
        self._broker_name = ""
        self._created: list[tuple[str, str]] = []
        self._left: dict[str, str] = {}
        self._faults: Counter[str] = Counter(dict.fromkeys(plan.possible_faults(), 0))

    def run(self, wait: Callable[[float], bool], show: Callable[[Mapping[str, object]], None]) -> SoakResult:
        """Run to the end.

        Args:
            wait: Waits so many seconds; returns whether the run is interrupted.
            show: Called each second with what was done so far.

        Raises:
            ConfigError: The file of the history exists.
            InputError: A topic or group exists that is not this soak's, no message was taken, or a process ended by
                itself.
            RmqError: The store refuses something.
        """
        for path in (self.history, self._parts):
            if os.path.lexists(path):
                raise ConfigError(f"{path}: exists: each soak writes a history of its own")
        try:
            with Broker.open(self._plan.store) as broker:
                self._broker_name = broker.name
                self._create_topics(broker)
            os.mkdir(self._parts)
            with CuttingProxy() as self._proxy:
                try:
                    is_interrupted = self._run_processes(wait, show)
                finally:
                    self._end_processes()
            anomalies, counts = self._write_history()
        finally:
            if self._created:
                self._delete_topics()
        shutil.rmtree(self._parts)
        if not counts["sent"] and not is_interrupted:
            raise InputError(f"no message was acknowledged; the last error: {self._last_error()}")
        return SoakResult(anomalies, self.history, counts, self._left, is_interrupted)

    # ---- topics and groups

    def _create_topics(self, broker: Broker) -> None:
        """Create topics and groups, unless one of them exists."""
        topics, groups = [self.names.topic(load) for load in self._plan.loads], list(self.names.topics)
        for names, existing in ((topics, broker.topics()), (groups, broker.groups())):
            if others := sorted(set(names) & set(existing)):
                raise InputError(f"{others[0]!r} exists, so it is not this soak's")
        for topic in topics:
            self._created.append(("topic", topic))
            broker.create_topic(topic, _QUEUES)
        for group in groups:
            self._created.append(("group", group))
            broker.set_group(group)

    def _delete_topics(self) -> None:
        """Delete what was created, and what consumers have caused; note what remains, and why."""
        with Broker.open(self._plan.store) as broker:
            existing, groups = broker.topics(), broker.groups()
            deletions: dict[str, Callable[[], None]] = {}
            for kind, name in self._created:
                if kind == "group" and name in groups:
                    deletions[name] = partial(broker.delete_group, name, keep_progress=False)
                for topic in [name] if kind == "topic" else [retry_topic(name), dead_letter_topic(name)]:
                    if topic in existing:
                        deletions[topic] = partial(broker.delete_topic, topic)
            for name, delete in deletions.items():
                try:
                    delete()
                except RmqError as error:
                    self._left[name] = str(error)
            broker.clean_unused_topics()

    # ---- processes

    def _run_processes(self, wait: Callable[[float], bool], show: Callable[[Mapping[str, object]], None]) -> bool:
        """Send for the planned time, and wait until all is consumed; return whether the run was interrupted."""
        plan = self._plan
        faults = plan.possible_faults() if plan.faults is None else tuple(plan.faults)
        if plan.is_served:
            self._start_server()
        self._workers = [self._start_worker() for _ in range(plan.workers if plan.is_served else 1)]
        for worker in self._workers:
            worker.wait_until_ready()
        begin = self._clock.monotonic()
        fault_at, shown_at, number = begin + plan.fault_every_s, begin + 1, 0
        while (now := self._clock.monotonic()) < begin + plan.seconds:
            if now >= shown_at:
                shown_at = max(shown_at + 1, now)
                show(self._progress(now - begin))
            if faults and now >= fault_at:
                self._make_fault(faults[number % len(faults)])
                fault_at, number = self._clock.monotonic() + plan.fault_every_s, number + 1
            due = [begin + plan.seconds, shown_at, *([fault_at] if faults else [])]
            if wait(max(0.0, min(due) - self._clock.monotonic())):
                return True
            for process in self._processes():
                process.check_running()
        for worker in self._workers:
            worker.ask("stop")
        return self._settle(wait, lambda: show(self._progress(self._clock.monotonic() - begin)))

    def _processes(self) -> list[Process]:
        return [*self._workers, *([self._server] if self._server is not None else [])]

    def _start_server(self) -> None:
        settings = {"role": "server", "store": self._plan.store, "port": self._port}
        self._server = Process(f"server-{self._faults['crash']}", settings, self._parts)
        self._server.wait_until_ready()
        address = cast(str, self._server.address)
        self._port = int(address.rpartition(":")[2])
        self._address = address

    def _start_worker(self) -> Process:
        self._lives += 1
        name = f"worker-{self._lives}"
        workers = 1 if self._address is None else self._plan.workers
        settings: dict[str, object] = {
            "role": "embedded" if self._address is None else "client",
            "store": self._plan.store,
            "address": self._address,
            "proxy": cast(CuttingProxy, self._proxy).port,
            "history": os.path.join(self._parts, f"{name}.jsonl"),
            "process": name,
            "base": self.names.base,
            "loads": self._plan.loads,
            "rate": self._plan.rate / workers,
            "seed": self._random.randrange(1_000_000),
        }
        return Process(name, settings, self._parts)

    def _make_fault(self, fault: str) -> None:
        if fault == "cut":
            cast(CuttingProxy, self._proxy).cut(self._random)
        elif fault == "crash" and self._server is not None:
            self._add_crash(self._server.kill(), broker=self._broker_name)
            self._start_server()
        else:
            place = self._random.randrange(len(self._workers))
            worker = self._workers[place]
            killed_ms = worker.kill()
            self._ended += worker.counts
            self._add_crash(killed_ms, process=worker.name)
            if fault == "crash":
                self._add_crash(killed_ms, broker=self._broker_name)
            self._workers[place] = self._start_worker()
            self._workers[place].wait_until_ready()
        self._faults[fault] += 1

    def _add_crash(self, at_ms: int, **actor: str) -> None:
        self._events.append({"event": "crash", **actor, "at_ms": at_ms})

    def _progress(self, seconds: float) -> dict[str, object]:
        counts = sum((worker.counts for worker in self._workers), self._ended)
        row: dict[str, object] = {"type": "progress", "seconds": round(seconds)}
        return row | {what: counts[what] for what in ("sent", "failed", "consumed")} | self._faults

    def _last_error(self) -> str:
        return next((worker.error for worker in self._workers if worker.error), "none")

    def _settle(self, wait: Callable[[float], bool], show: Callable[[], None]) -> bool:
        """Wait until nothing is missing, or nothing that was missing has come for some time."""
        fewest, since = None, self._clock.monotonic()
        shown_at = since
        while True:
            begin = self._clock.monotonic()
            marks = [{"event": "drained", "group": group, "at_ms": self._clock.now_ms()} for group in self.names.topics]
            history = HistoryEvents()
            history.read(self._recording.lines([*self._events, *marks]), self.history)
            missing = sum(anomaly.anomaly in ("lost", "undecided") for anomaly in find_anomalies(history))
            now = self._clock.monotonic()
            if fewest is None or missing < fewest:
                fewest, since = missing, now
            if not missing or now - since >= self._plan.settle_s:
                self._events += marks
                return False
            if now >= shown_at:
                shown_at = now + 1
                show()
            if wait(max(0.5, now - begin)):
                return True
            for process in self._processes():
                process.check_running()

    def _end_processes(self) -> None:
        """End the clients, then the server; kill what does not end."""
        for processes in (self._workers, [self._server] if self._server is not None else []):
            for process in processes:
                process.ask("stop")
                process.ask("end")
            for process in processes:
                if problem := process.wait_for_end():
                    self._left[f"process {process.name}"] = problem

    # ---- the history

    def _write_history(self) -> tuple[list[Anomaly], Counter[str]]:
        """Write the history, check it, and count its events."""
        counts = Counter({**dict.fromkeys(_COUNTED.values(), 0), **self._faults})
        with open(self.history, "xb") as file:
            for line in self._recording.lines(self._events):
                file.write(line)
                if (kind := recorded_kind(line)) in ("send", "deliver"):
                    counts[_COUNTED[kind, json.loads(line).get("outcome", "died")]] += 1
        history = HistoryEvents()
        with open(self.history, "rb") as file:
            history.read(file, self.history)
        return find_anomalies(history), counts


_COUNTED: Final = {
    ("send", "ok"): "sent",
    ("send", "failed"): "refused",
    ("send", "unknown"): "unknown",
    ("deliver", "ok"): "consumed",
    ("deliver", "retry"): "retried",
    ("deliver", "died"): "died",
}
"""What is counted of sends and deliveries, by their outcome."""
