"""The time-driven parts of a broker, each on its own store in memory; the test kit would run a whole broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.delay import DelayConfig, DelaySchedule
from librmq.files._memory import MemoryFiles
from librmq.message.delays import is_timed, parse_level, without_time
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import encode_properties
from librmq.message.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from librmq.message.topics import SystemTopic
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import AppendResult, MessageStore
from librmq.store.format.broker_tables import BrokerTables
from tests.stores import ROOT, SMALL, START_MS, died

NOW = DelayConfig(first_look_s=0, save_every_s=None)
TINY = TimerConfig(
    slots_total=300, timer_roll_window_slot=100, timer_log_file_size=1024, timer_max_delay_sec=10_000, save_every_s=None
)


def put_timed(timers: Timers, message: Message, queue_id: int = 0, **fields: Any) -> AppendResult:
    """Store a message as 5.x does: in the timer topic if it names a future time, otherwise in its own topic."""
    store = timers._store  # noqa: SLF001
    is_whole = fields.get("sys_flag", 0) & TRANSACTION_MASK in (0, TRANSACTION_COMMIT)
    if parse_level(message.properties.get("DELAY")) > 0:
        return store.append(without_time(message), queue_id, **fields)
    if is_whole and message.topic != SystemTopic.TIMER and is_timed(message.properties):
        fields.pop("properties_raw", None)
        waiting = timers.waiting_form(message, queue_id)
        if waiting is not None:
            message, queue_id = waiting, 0
    if fields.get("properties_raw") is None:
        fields["properties_raw"] = encode_properties(message.properties) + b"\2" * bool(message.properties)
    return store.append(message, queue_id, **fields)


class ByTime:
    """A store with its clock and files, in memory or in a folder.

    Subclasses implement the step `run_due`; `pass_to` jumps from one due step to the next.
    """

    topic: ClassVar[str]
    """The topic in which messages wait."""
    appends: ClassVar[tuple[str, str]]
    """The part of the store, and the name of its method, that delivers messages."""

    def __init__(
        self,
        config: StoreConfig = SMALL,
        files: MemoryFiles | None = None,
        at_ms: int = START_MS,
        folder: Path | None = None,
    ) -> None:
        self.files = files or MemoryFiles()
        self.clock = ManualClock(at_ms)
        self.store = (
            MessageStore.open(ROOT, config, files=self.files, clock=self.clock)
            if folder is None
            else MessageStore.open(folder, config, clock=self.clock, background=False)
        )
        self.told: list[tuple[StoredMessage, AppendResult]] = []
        """Each message that waited, with the result of its delivery."""
        self.runs: list[int] = []
        """Times at which `pass_to` ran a step, in milliseconds since the start."""

    def run_due(self, now_ms: int) -> int | None:
        raise NotImplementedError

    def pass_to(self, at_ms: int) -> int | None:
        """Advance the clock to ``at_ms`` after the start; return when the next step is due, also after the start."""
        until = START_MS + at_ms
        due = self.run_due(self.clock.now_ms())
        while due is not None and due <= until:
            assert due >= self.clock.now_ms()
            self.clock.move_to(due)
            self.runs.append(due - START_MS)
            due = self.run_due(due)
        self.clock.move_to(until)
        return None if due is None else due - START_MS

    def put_soon(self, body: bytes = b"b") -> None:
        """Store a message that waits for one second."""
        raise NotImplementedError

    def put_raw(self, **properties: str) -> None:
        """Append a record with the given properties to the topic of waiting messages."""
        self.store.append(Message(self.topic, b"bad"), 0, properties_raw=encode_properties(properties))

    def delivered(self) -> list[tuple[bytes, int]]:
        """Return the body of each delivered message and its time since the start, in order of delivery."""
        return [(m.body, m.store_timestamp_ms - START_MS) for m in self.store if m.topic != self.topic]


class Waiting(ByTime):
    """The schedule of messages with a delay level."""

    topic = SystemTopic.SCHEDULE
    appends = ("copies", "append")

    def __init__(
        self,
        config: StoreConfig = SMALL,
        settings: DelayConfig = NOW,
        *,
        files: MemoryFiles | None = None,
        at_ms: int = START_MS,
    ) -> None:
        super().__init__(config, files, at_ms)
        self.offsets = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.schedule = DelaySchedule(self.store, self.offsets, at_ms, settings, delivered=self.tell)

    def run_due(self, now_ms: int) -> int | None:
        return self.schedule.run_due(now_ms)

    def tell(self, message: StoredMessage, topic: str, queue_id: int, result: AppendResult) -> None:
        assert (topic, str(queue_id)) == (message.properties["REAL_TOPIC"], message.properties["REAL_QID"])
        self.told.append((message, result))

    def put(self, body: bytes = b"b", level: int = 1, **fields: Any) -> AppendResult:
        return self.store.append(Message("T", body, delay_level=level), 2, **fields)

    def put_soon(self, body: bytes = b"b") -> None:
        self.put(body)

    def put_raw(self, **properties: str) -> None:
        super().put_raw(DELAY="1", **properties)


class Wheel(ByTime):
    """The timers, which deliver messages after any delay."""

    topic = SystemTopic.TIMER
    appends = ("copies", "append_again")

    def __init__(
        self,
        settings: TimerConfig = TINY,
        *,
        config: StoreConfig = SMALL,
        files: MemoryFiles | None = None,
        at_ms: int = START_MS,
        folder: Path | None = None,
    ) -> None:
        super().__init__(config, files, at_ms, folder)
        self.settings = settings
        self.timers = Timers(self.store, settings, delivered=lambda *what: self.told.append(what))

    def run_due(self, now_ms: int) -> int | None:
        return self.timers.run_due(now_ms)

    def put(self, body: bytes = b"b", *, key: str | None = "U", **properties: object) -> AppendResult:
        message = Message("T", body, tags="t", unique_key=key, flag=3)
        message.properties |= {name: str(value) for name, value in properties.items()}
        result = put_timed(self.timers, message, 2)
        self.timers.run_due(self.clock.now_ms())
        return result

    def put_soon(self, body: bytes = b"b") -> None:
        self.put(body, TIMER_DELAY_SEC=1)

    def rolled(self) -> list[StoredMessage]:
        return [m for m in self.store if m.topic == SystemTopic.TIMER and "TIMER_ROLL_TIMES" in m.properties]

    def save(self) -> None:
        self.timers.save()

    def after_kill(self, **more: Any) -> Wheel:
        return Wheel(self.settings, files=died(self.files), at_ms=self.clock.now_ms(), **more)
