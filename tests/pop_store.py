"""Stores with the records of POP, as a broker of 5.3.3 writes them by its sources.

No real broker made them. The bodies have the fields and the order that fastjson gives ``PopCheckPoint``, ``AckMsg`` and
``BatchAckMsg``; librmq's timer, whose files are compared with recorded ones, keeps them until their time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from librmq.clock import ManualClock
from librmq.diagnosis._pop import REVIVE_GROUP, HeldMessage, PopCheckPoint, parse_record
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.message.properties import PropertyName
from librmq.message.topics import receive_retry_topic
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import AppendResult, MessageStore
from librmq.store.format.broker_tables import BrokerTables
from tests.bytime import put_timed
from tests.stores import ROOT, SMALL, START_MS

REVIVE_TOPIC = "rmq_sys_REVIVE_LOG_DefaultCluster"
BROKER = "broker-a"
_WHEEL = TimerConfig(slots_total=600, timer_log_file_size=1024, timer_roll_window_slot=100)


class Receive(NamedTuple):
    group: str
    topic: str
    offsets: tuple[int, ...]
    received_ms: int
    invisible_ms: int
    first: int


class PopStore:
    """A store and the broker's tables, with what POP writes; it revives as the broker does."""

    def __init__(self, path: str = ROOT, files: Files | None = None) -> None:
        self.clock = ManualClock(START_MS)
        self.store = MessageStore.open(path, SMALL, files=files or MemoryFiles(), clock=self.clock)
        self.tables = BrokerTables.open(f"{path}/config", files=self.store.files)
        self.tables.set_topic(REVIVE_TOPIC, read_queues=1, write_queues=1, permission=6)
        self.timers = Timers(self.store, _WHEEL)

    def send(self, topic: str, count: int = 1, **fields: Any) -> list[AppendResult]:
        self.tables.make_topic(topic)
        end = self.store.queue_range(topic, 0)[1] if (topic, 0) in self.store.queues else 0
        messages = [Message(topic, b"x", unique_key=f"{topic}{end + at}") for at in range(count)]
        return [self.store.append(message, **fields) for message in messages]

    def put(self, tag: str, body: bytes, deliver_ms: int, key: str = "key") -> int:
        """Store a record of POP as the broker does, in the timer topic until its time."""
        message = Message(REVIVE_TOPIC, body, tags=tag, unique_key=key)
        message.properties[PropertyName.TIMER_DELIVER_MS] = str(deliver_ms)
        return put_timed(self.timers, message).physical_offset

    def receive(
        self, group: str, topic: str, offsets: Sequence[int], invisible_s: float = 60, *, old: bool = False
    ) -> Receive:
        """Write the check point of a receive; ``old`` without the numbers that older brokers do not write."""
        self.tables.set_group(group, retry_max_times=16)
        progress = self.tables.consumer_offset(topic, group, 0) or 0
        self.tables.set_consumer_offset(topic, group, 0, max(progress, max(offsets) + 1))
        return self._check_point(group, topic, tuple(offsets), round(1000 * invisible_s), old)

    def _check_point(
        self, group: str, topic: str, offsets: tuple[int, ...], invisible_ms: int, old: bool = False
    ) -> Receive:
        now_ms, first = self.clock.now_ms(), offsets[0]
        body = {"bm": 0, "bn": BROKER, "c": group, "d": [offset - first for offset in offsets], "it": invisible_ms,
                "n": len(offsets), "pt": now_ms, "q": 0, "reviveTime": now_ms + invisible_ms, "ro": 0, "so": first,
                "t": topic}  # fmt: skip
        if old:
            del body["d"]
        key = f"{topic}@0@{first}@{group}@{now_ms}@{BROKER}@ck"
        self.put("ck", _json(body), now_ms + invisible_ms - 1000, key)
        return Receive(group, topic, offsets, now_ms, invisible_ms, first)

    def acknowledge(self, receive: Receive, *offsets: int, batch: bool = False) -> None:
        """Acknowledge messages of a receive, each by itself or in a batch."""
        body = {"bn": BROKER, "c": receive.group, "pt": receive.received_ms, "q": 0, "so": receive.first,
                "t": receive.topic}  # fmt: skip
        due_ms = receive.received_ms + receive.invisible_ms
        if batch:
            self.put("bAck", _json({"ao": -1, "aol": list(offsets), **body}), due_ms)
            return
        for offset in offsets:
            self.put("ack", _json({"ao": offset, **body}), due_ms)

    def change(self, receive: Receive, offset: int, invisible_s: float) -> Receive:
        """Change the invisible time of one message of a receive."""
        changed = self._check_point(receive.group, receive.topic, (offset,), round(1000 * invisible_s))
        self.acknowledge(receive, offset)
        return changed

    def receive_in_order(
        self, group: str, topic: str, offsets: Sequence[int], *, done: Sequence[int] = (), changed: str = "", **row: Any
    ) -> None:
        """Write the file of receives in order, as after a receive for 60 s; ``done`` are acknowledged."""
        self.tables.set_group(group, retry_max_times=16)
        first, now_ms = offsets[0], self.clock.now_ms()
        bits = sum(1 << at for at, offset in enumerate(offsets) if offset in done)
        row = {"a": "attempt", "cm": bits, "i": 60_000, "l": now_ms, "o": [first, *(o - first for o in offsets[1:])],
               "popTime": now_ms, **row}  # fmt: skip
        text = json.dumps(row)[:-1] + f',"ot":{{{changed}}}}}'
        files, folder = self.store.files, f"{self.store.path}/config"
        files.make_folder(folder)
        files.write(f"{folder}/consumerOrderInfo.json", f'{{"table":{{"{topic}@{group}":{{0:{text}}}}}}}'.encode())

    def advance(self, seconds: float) -> None:
        """Let time pass for the timer."""
        end_ms = self.clock.now_ms() + round(1000 * seconds)
        self.timers.run_due(self.clock.now_ms())
        while self.clock.now_ms() < end_ms:
            self.clock.advance(ms=min(1000, end_ms - self.clock.now_ms()))
            self.timers.run_due(self.clock.now_ms())

    def revive(self) -> None:
        """Revive as the broker does: what has been due for two seconds, up to the first check point that has not."""
        done = self.tables.consumer_offset(REVIVE_TOPIC, REVIVE_GROUP, 0)
        begin = 0 if done is None else done + 1
        points: dict[Any, tuple[PopCheckPoint, int, set[int]]] = {}
        for message in self.store.messages(REVIVE_TOPIC, 0, begin):
            content = parse_record(message)
            if isinstance(content, PopCheckPoint):
                points[content.name] = content, message.queue_offset, set(content.offsets)
            elif content.name in points:
                points[content.name][2].difference_update(content.offsets)
        for content, queue_offset, held in sorted(points.values(), key=lambda point: point[1]):
            if self.clock.now_ms() - content.visible_ms <= 2000:
                break
            for offset in sorted(held):
                self._revive(content, offset)
            self.tables.set_consumer_offset(REVIVE_TOPIC, REVIVE_GROUP, 0, queue_offset)

    def _revive(self, content: PopCheckPoint, offset: int) -> None:
        group, topic, queue_id, _, _ = content.name
        message = next(self.store.messages(topic, queue_id, offset, offset + 1))
        copy = Message(topic if topic.startswith("%") else receive_retry_topic(group, topic), message.body)
        copy.properties = {**message.properties, "1ST_POP_TIME": str(content.name[-1])}
        self.tables.make_topic(copy.topic)
        if self.tables.consumer_offset(copy.topic, group, 0) is None:
            self.tables.set_consumer_offset(copy.topic, group, 0, 0)
        self.store.append(copy, reconsume_times=message.reconsume_times + 1)

    def save(self) -> None:
        """Write everything to the files."""
        self.timers.run_due(self.clock.now_ms())
        self.timers.save()
        self.store.flush()
        self.tables.persist(self.clock.now_ms())

    def close(self) -> None:
        """Write everything, and close the store as a broker does."""
        self.save()
        self.store.close()


def places(held: Sequence[HeldMessage]) -> list[tuple[str, str, int, int]]:
    """Return group, topic, queue offset and the seconds from the start to the end of the invisible time."""
    return sorted((one.group, one.topic, one.queue_offset, (one.visible_ms - START_MS) // 1000) for one in held)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(dict(sorted(body.items())), separators=(",", ":")).encode()
