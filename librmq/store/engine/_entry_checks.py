"""From an entry to its record: every read compares the two, and derives an entry that disagrees from the log again.

::

    where the entry leads                                      a read
    below the log's first byte, in the order of the queue      finds no message: retention has deleted it
    to a record of this place, topic, queue and queue offset   returns it
    elsewhere, and the log has such a record                   returns that one; the entry is corrected
    to the next record of the queue, whose own fields differ   returns it as the entry says
    anywhere else, or to a damaged record                      raises where the damage is

A store that writes corrects entries in the files, and compares the rest of their queues (`Comparison`). Until then, and
in a store that is only read, the corrected entries are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, HOLE_SIZE, is_ext_address
from librmq.errors import CorruptionError, MessageIllegalError, RecordError
from librmq.message import StoredMessage, frames, record
from librmq.runtime.compiled_core import CORE
from librmq.runtime.event_log import EventLog
from librmq.store.engine.derivation import Derivation, claims, has_queue_entry
from librmq.store.engine.store_parts import Parts, QueueName, QueueTable

_log = EventLog("librmq.store")

_is_stored: Final = CORE.is_stored
_OWN: Final = ("body_crc", "queue_id", "queue_offset", "physical_offset", "body_length")
_unpack_own = record.header_struct(*_OWN, unsigned=("body_length",)).unpack_from
_BODY_AT: Final = record.BODY_AT
ADVICE: Final = "librmq verify lists the damage of the store"
_UNKNOWN_MEMORY: Final = 8 << 30


class Transfer:
    """Limits of one read, which depend on whether its messages count as in memory. Immutable."""

    __slots__ = ("memory", "most")

    def __init__(self, config: StoreConfig) -> None:
        self.most: tuple[tuple[int, int], tuple[int, int]] = (
            (config.max_transfer_count_in_memory, config.max_transfer_bytes_in_memory),
            (config.max_transfer_count_on_disk, config.max_transfer_bytes_on_disk),
        )
        """The most messages and bytes of a read of messages in memory, and of others."""
        memory = _UNKNOWN_MEMORY
        if hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.memory: int = memory * config.memory_ratio // 100
        """A message counts as in memory if it begins at most this many bytes before the log's end."""

    def limits(self, log_end: int, physical_offset: int) -> tuple[int, int]:
        """Return the most messages and bytes of a read that reaches ``physical_offset``."""
        return self.most[log_end - physical_offset > self.memory]


class _Neighbour(NamedTuple):
    """The nearest entry before another one whose record is known."""

    queue_offset: int
    """-1 without one."""
    end: int
    """Where the queue's next record can begin: behind its record, or at the log's first byte."""


class _Found(NamedTuple):
    """Where a search for a record has ended."""

    physical_offset: int
    raw: bytes | None = None
    damage: CorruptionError | None = None


class EntryChecks:
    """What the reads of one store share: its log, and what they have found wrong in its entries. Thread-safe."""

    def __init__(self, parts: Parts, transfer: Transfer) -> None:
        self.log: CommitLog = parts.log
        self.queues: QueueTable = parts.queues
        self.transfer: Transfer = transfer
        self._levels = parts.levels
        self.corrected: dict[QueueName, dict[int, bytes]] = {}
        """Corrected entries that the files do not have."""
        self._resolved: dict[QueueName, _Neighbour] = {}
        """The last entry of a queue that was derived: a search for the next one begins there."""
        self._told: set[QueueName] = set()
        self.noticed: Callable[[QueueName], object] = lambda _: None
        """Called with a queue at its first entry that disagrees."""

    def record(
        self, queue: ConsumeQueue, name: QueueName, queue_offset: int, physical_offset: int, size: int
    ) -> bytes | None:
        """Return the record of a queue's entry, with a sound body; None if there is no such message any more.

        Raises:
            CorruptionError: The record is damaged, or the log has none for this entry.
        """
        if self.corrected and (corrected := self.corrected.get(name, {}).get(queue_offset)):
            physical_offset, size, _ = ENTRY.unpack(corrected)
        if size == HOLE_SIZE:
            return None  # filler, or a message that recovery found lost
        raw, damage = None, None
        try:
            raw = self.log.read(physical_offset, size)
            if raw is not None:
                if is_usual(raw, physical_offset, queue_offset, name):
                    return raw
                if queue_offset in claims(raw, name) and StoredMessage(raw).physical_offset == physical_offset:
                    return self._sound(raw, physical_offset)
        except RecordError as error:
            raw, damage = None, frames.damage(self.log.sequence.path_at(physical_offset), physical_offset, error)
        except CorruptionError as error:
            if error.kind == "checksum":
                raise
            damage = error
        if raw is None and damage is None and queue.has_expired(queue_offset, physical_offset, self.log.end):
            return None  # `read` says that the log lacks this place, below its first byte or in a gap
        return self._derive(queue, name, queue_offset, (physical_offset, size), raw)

    def _sound(self, raw: bytes, physical_offset: int) -> bytes:
        try:
            return self.log.sound(raw, physical_offset)
        except CorruptionError as error:
            raise _with_advice(error) from error

    # ---- an entry that disagrees

    def _derive(
        self, queue: ConsumeQueue, name: QueueName, queue_offset: int, entry: tuple[int, int], raw: bytes | None
    ) -> bytes | None:
        """Return the record that the log has for an entry, which leads to ``raw``, if that is a record."""
        place, size = entry
        before = self._neighbour(queue, name, queue_offset)
        result = self._search(name, queue_offset, before.end, place)
        at, right = result.physical_offset, result.raw
        if right is None and raw is not None and before.end <= place <= at:
            right = self._if_its_record(queue, name, queue_offset, place, raw)
            at = at if right is None else place
        if right is None:
            if at == place and queue.read(queue_offset + 1, 1)[:12] == ENTRY.pack(place, size, 0)[:12]:
                self._resolved[name] = _Neighbour(queue_offset, before.end)
                return None  # recovery found the message lost, and let its entry lead to the next one
            if before.queue_offset < 0 < self.log.begin and at < self.log.end and result.damage is None:
                return None  # retention has deleted all before it
            path, position = queue.place_of(queue_offset)
            what = f"queue offset {queue_offset} leads to {place}, and the log has no record of it"
            raise _with_advice(result.damage or CorruptionError(path, position, "entry", what))
        self._resolved[name] = _Neighbour(queue_offset, at + len(right))
        if (at, len(right)) != entry:
            self._correct(queue, name, queue_offset, at, right)
        if name not in self._told:
            self._told.add(name)
            self._tell(queue, name, queue_offset, entry, at)
        message = _as_entered(right, at, name, queue_offset)
        try:
            return self._sound(message, at)
        except CorruptionError:
            self._sound(right, at)  # a checksum of all of it can be of what a broker wrote, or of what damage left
            return message

    def _search(self, name: QueueName, queue_offset: int, begin: int, place: int) -> _Found:
        """Search the log for the record of an entry from the end of the one before, for they are in one order.

        The search ends at a record of a later entry, or at one of the queue to which the entry leads.
        """
        topic = name[0].encode()
        try:
            for at, _, raw in self.log.scan(begin, check_body=False):
                if raw is None or topic not in raw or not has_queue_entry(StoredMessage(raw).sys_flag):
                    continue
                claimed = claims(raw, name)
                if queue_offset in claimed:
                    return _Found(at, raw)
                if claimed and (claimed.start > queue_offset or at == place):
                    return _Found(at)
        except CorruptionError as error:
            return _Found(error.offset, damage=error)
        return _Found(self.log.end)

    def _neighbour(self, queue: ConsumeQueue, name: QueueName, queue_offset: int) -> _Neighbour:
        """Return the nearest entry before another one that is known to lead to its record."""
        resolved = self._resolved.get(name, _Neighbour(-1, -1))
        for number in range(queue_offset - 1, queue.min_offset - 1, -1):
            if number == resolved.queue_offset:
                return resolved
            stored = self.corrected.get(name, {}).get(number) or queue.read(number, 1)
            place, size, _ = ENTRY.unpack(stored) if stored else (-1, 0, 0)
            with suppress(CorruptionError, RecordError):
                raw = self.log.read(place, size)
                if raw is not None and number in claims(raw, name):
                    return _Neighbour(number, place + size)
        return _Neighbour(-1, self.log.begin)

    def _if_its_record(
        self, queue: ConsumeQueue, name: QueueName, queue_offset: int, place: int, raw: bytes
    ) -> bytes | None:
        """Return the record to which an entry leads if it is its own, although a field of it differs; else None.

        No other entry leads to it then.
        """
        message = StoredMessage(raw)
        _, _, begin, end, _, _ = message.frame
        queue_name, topic = (message.topic, message.queue_id), name[0].encode()
        bytes_off = len(topic) if end - begin != len(topic) else sum(map(int.__ne__, raw[begin:end], topic))
        if bytes_off + (queue_name[1] != name[1]) + (message.queue_offset != queue_offset) != 1:
            return None  # one flipped byte does not explain it
        other = queue if queue_name == name else None
        with suppress(CorruptionError, MessageIllegalError):
            other = other or self.queues.find(queue_name)
        entry = b"" if other is None else other.read(message.queue_offset, 1)
        return raw if not entry or ENTRY.unpack(entry)[0] != place else None

    def _correct(
        self, queue: ConsumeQueue, name: QueueName, queue_offset: int, physical_offset: int, raw: bytes
    ) -> None:
        code = Derivation(self._levels).derive(physical_offset, len(raw), raw).tags_code or 0
        stored = queue.read(queue_offset, 1)
        if queue.ext is not None and stored and is_ext_address(ENTRY.unpack(stored)[2]):
            code = ENTRY.unpack(stored)[2]
        self.corrected.setdefault(name, {})[queue_offset] = ENTRY.pack(physical_offset, len(raw), code)

    def _tell(
        self, queue: ConsumeQueue, name: QueueName, queue_offset: int, entry: tuple[int, int], place: int
    ) -> None:
        topic, queue_id = name
        path, position = queue.place_of(queue_offset)
        what = "leads elsewhere, and is corrected"
        if entry[0] == place:
            path, position, what = self.log.sequence.path_at(place), place, "leads to a record that says otherwise"
        _log.warning(
            "%(path)s: at %(position)d: entry %(queue_offset)d of %(topic)s/%(queue_id)d %(_what)s; "
            "readers get the message that the log has for it, at %(physical_offset)d. Others of this queue are not "
            "logged; %(_advice)s",
            path=path,
            position=position,
            topic=topic,
            queue_id=queue_id,
            queue_offset=queue_offset,
            physical_offset=place,
            _what=what,
            _advice=ADVICE,
        )
        self.noticed(name)

    # ---- for the writer

    def write_corrected(self) -> None:
        """Write the corrected entries into the files; only the writer calls it, under its lock."""
        for name in list(self.corrected):
            with suppress(CorruptionError):  # a queue that can't be opened is refused to its readers too
                for queue_offset, entry in self.corrected[name].items():
                    self.queues[name]._correct(queue_offset, entry)
            del self.corrected[name]


def is_usual(raw: bytes, physical_offset: int, queue_offset: int, name: QueueName) -> bool:
    """Return whether a sound record of the first magic names this place of this queue."""
    topic, queue_id = name
    if _is_stored is not None:
        return bool(_is_stored(raw, physical_offset, queue_offset, queue_id, topic))
    checksum, own_id, own_offset, own_place, body_size = _unpack_own(raw)
    body_end = _BODY_AT + body_size
    return (
        own_place == physical_offset
        and own_offset == queue_offset
        and own_id == queue_id
        and raw.startswith(usual_tail(topic, len(raw) - body_size), body_end)
        and (not body_size or record.body_checksum(raw[_BODY_AT:body_end]) == checksum)
        and not (raw[-1] == 2 and record.has_own_checksum(raw))
    )


@lru_cache(maxsize=4096)
def usual_tail(topic: str, size_without_body: int) -> bytes:
    """Return the topic and the length of the properties as they follow the body of a usual record.

    The result is longer than a record with less bytes than ``size_without_body``.
    """
    text = topic.encode()
    size = size_without_body - record.FIXED_SIZE - len(text)
    if not 0 <= size <= record.MAX_PROPERTIES_SIZE or len(text) > record.MAX_TOPIC_SIZE:
        return bytes(1 << 16)
    return bytes((len(text),)) + text + size.to_bytes(2, "big")


def _as_entered(raw: bytes, physical_offset: int, name: QueueName, queue_offset: int) -> bytes:
    """Return a record with the place and the queue that its entry says: every consumer goes by its own fields."""
    changed = bytearray(raw)
    _, _, begin, end, _, _ = StoredMessage(raw).frame
    changed[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8] = physical_offset.to_bytes(8, "big")
    if queue_offset not in claims(raw, name):
        topic, queue_id = name
        changed[record.QUEUE_OFFSET_AT : record.QUEUE_OFFSET_AT + 8] = queue_offset.to_bytes(8, "big")
        changed[record.QUEUE_ID_AT : record.QUEUE_ID_AT + 4] = queue_id.to_bytes(4, "big")
        changed[begin:end] = topic.encode()
    return bytes(changed)


def _with_advice(error: CorruptionError) -> CorruptionError:
    return CorruptionError(error.file, error.offset, error.kind, f"{error.what}; {ADVICE}")
