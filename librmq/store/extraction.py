"""Stores made of some records of another: every sound one of a damaged store, or those that a caller selects.

The messages of each queue are numbered from 0 without a gap, and the progress of groups follows.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

from librmq.clock import SystemClock
from librmq.config import StoreConfig, check_path
from librmq.consumequeue_entries import ENTRY_SIZE, entry_dtype
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, RecordError
from librmq.files import DiskFiles, Files, file_size
from librmq.files.interface import copy_file, make_folders
from librmq.java.lang import java_decode
from librmq.message import StoredMessage, record
from librmq.message.batch import inner_messages
from librmq.message.delays import queue_id_of_level
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, validate_queue
from librmq.store._snapshots import KEPT_CONFIG, check_outside, copy_config, growing_store
from librmq.store.engine.derivation import DerivedBlock, has_queue_entry
from librmq.store.engine.store_parts import PartFiles
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import has_abort
from librmq.store.format.documents import OWN_FOLDER, write_kept_config
from librmq.store.format.spark_jobs import JobNote, MovedJobs, noted_jobs
from librmq.store.recovery import salvage
from librmq.store.recovery._copied_parts import CopiedParts, settle
from librmq.store.recovery.salvage import Gap, LogPart, RecordBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TIMER_CHECK: Final = re.compile("timercheck")
_MAX_DIGITS: Final = 20  # a queue offset has no more
_LONG: Final = struct.Struct(">q")
_LONGEST: Final = 1 << 30
"""Length of a broker's log files."""
_OTHER_PROPERTIES: Final = frozenset(
    (
        PropertyName.CHECK_IMMUNITY_TIME,
        PropertyName.TRANSACTION_CHECK_TIMES,
        PropertyName.TRANSACTION_PREPARED_QUEUE_OFFSET,
        "1ST_POP_TIME",
        "INNER_MULTI_DISPATCH",
    )
)
"""Properties of RocketMQ that a user may set, or that are younger than 4.9."""


class Rescued(NamedTuple):
    """A new store with the sound records of a damaged one."""

    path: str
    """The folder of the new store."""
    records: int
    """Number of copied records."""
    gaps: int
    """Number of gaps in the damaged log."""


def rescue(
    path: str,
    target: str,
    config: StoreConfig | None = None,
    *,
    files: Files | None = None,
    tell: Callable[[Gap], object] = lambda gap: None,
) -> Rescued:
    """Create a store in ``target``, which is empty or does not exist, from every sound record of the store in ``path``.

    The order is that of `librmq.store.salvaged_records`, including the kept cuts; ``tell`` is called with each gap.
    Records keep their fields except physical offset, offset id and queue offset. The messages of each queue are
    numbered from 0 without a gap, so that no consumer stops at a lost message. The progress of groups, delay levels and
    transactions is adjusted to the new numbers. A Spark job with a ``jobId`` stays committed if its first record was
    saved, or, after its end, any record; otherwise it can write its messages again.
    """
    check_path("path", path, "the folder of a store")
    check_path("target", target, "the folder of a new store")
    files, clock = files or DiskFiles(), SystemClock()
    config = config or directory.infer_config(path, files)
    gaps = 0
    with growing_store(target, files) as part, closing(_Copies(PartFiles(part, config, files))) as copies:
        notes = _sound_notes(path, files, tell)
        numbers, jobs = copies.numbers, MovedJobs(notes)
        valid_queue = cache(validate_queue)
        largest = config.commitlog_file_size - record.BLANK_SIZE
        for item in _records(path, files, numbers.end_log, largest, in_blocks=not notes):
            if isinstance(item, RecordBlock):
                copies.append_block(item)
                continue
            if isinstance(item, StoredMessage):
                try:
                    valid_queue(item.topic, item.queue_id)
                    for message in inner_messages(item):
                        place, raw = copies.append(message)
                        jobs.add_copy(item.physical_offset, item.raw, place, raw)
                    continue
                except (MessageIllegalError, RecordError) as error:
                    item = Gap(item.physical_offset, item.size, path, str(error))
            gaps += 1
            tell(item)
        copy_config(path, part, files, OWN_FOLDER, only=KEPT_CONFIG)
        moved = jobs.committed_jobs()
        if moved:
            make_folders(files, os.path.join(part, JobNote.FOLDER))
        for job, note in moved.items():
            note.write(JobNote.path(part, job), files)
        copy_config(path, part, files, without=_TIMER_CHECK)  # it belongs to a timer log that is not copied
        with suppress(CorruptionError):  # a table that can't be read stays as it is
            revise_progress(part, files, numbers.new_offset, clock.now_ms())
        copies.settle(config)
    return Rescued(target, copies.count, gaps)


class Extracted(NamedTuple):
    """A small store with selected records of another."""

    path: str
    """The folder of the new store."""
    messages: int
    """Number of copied messages."""
    bytes: int
    """Bytes of their records."""


Redaction = Literal["bodies", "properties"]
"""What `extract` hides: bodies, or the values of properties that RocketMQ does not know itself."""


def extract(
    path: str,
    target: str,
    keep: Callable[[StoredMessage], bool] | Collection[int],
    *,
    redact: Collection[Redaction] = (),
    files: Files | None = None,
) -> Extracted:
    """Create a store in ``target``, which is empty or does not exist, from the records for which ``keep`` returns True.

    ``keep`` can also be their physical offsets, by which other records are only checked, not decoded.
    Of each record all but physical offset, queue offset and prepared-transaction offset stays, unless ``redact`` names
    it: a redacted body or value is as long as before, a redacted body is not compressed, and gets its checksum. Tags
    and keys stay. The files are as small as the records allow. Topics, the progress of groups and filters go with
    their messages. ``path`` is only read.

    Raises:
        ConfigError: ``target`` is in the store, or ``redact`` names something else.
        CorruptionError: The log is damaged.
        StoreIOError: ``target`` is not empty, or there is no space: up to 1 GiB more than the new store for a moment.
    """
    check_path("path", path, "the folder of a store")
    check_path("target", target, "the folder of a new store")
    unknown = set(redact) - set(get_args(Redaction))
    if unknown:
        raise ConfigError(f"redact: expected bodies or properties, found {sorted(unknown)!r:.80}")
    files = files or DiskFiles()
    directory.check_kind(path, files)
    check_outside(path, target)
    config = directory.infer_config(path, files)
    tables = BrokerTables.open(os.path.join(path, directory.CONFIG), files=files)
    records = _chosen(path, files, keep, in_blocks=not redact)
    room = sum(entry.size for entry in files.list(os.path.join(path, directory.COMMITLOG)))
    return make_store(target, records, tables, config, redact=redact, files=files, room=room)


def make_store(
    target: str,
    messages: Iterable[StoredMessage | RecordBlock],
    tables: BrokerTables,
    config: StoreConfig,
    *,
    topics: Collection[str] = (),
    redact: Collection[Redaction] = (),
    files: Files,
    room: int | None = None,
) -> Extracted:
    """Create a store in ``target``, as `extract` does, from records of another in the order of its log.

    ``tables`` are those of the other store. Their rows of the records' topics are copied, and those of ``topics``. With
    ``room``, about the most bytes that they can have, the files get the smallest lengths that hold the records, not
    those of ``config``.
    """
    with (
        growing_store(target, files) as part,
        closing(_Copies(PartFiles(part, config, files), {}, room)) as copies,
    ):
        copied = copies.copy_each(messages, redact)
        if room is not None:
            config = small_config(config, copied)
        for _ in copied:  # none are left if their lengths were wanted
            pass
        numbers = copies.numbers
        numbers.end_log()
        write_kept_config(part, config, files, is_own=True)
        _copy_tables(tables, part, numbers, numbers.topics() | set(topics), files)
        copies.settle(config)
    return Extracted(target, copies.count, copies.size)


def _chosen(
    path: str, files: Files, keep: Callable[[StoredMessage], bool] | Collection[int], *, in_blocks: bool
) -> Iterator[StoredMessage | RecordBlock]:
    """Yield the messages of a store to copy; all its records are checked."""
    places = np.empty(0, np.int64)
    if not callable(keep):
        places = np.sort(np.fromiter(keep, np.int64, len(keep)))
    parts = _plain_blocks(salvage.log_parts(path, files, in_blocks=in_blocks and not callable(keep)))
    for part in _sound(path, files, parts):
        if isinstance(part, RecordBlock):
            if (block := part.at(places)) is not None:
                yield block
        elif callable(keep):
            yield from filter(keep, _inner(path, part))
        elif _contains(places, part.physical_offset):
            yield from _inner(path, part)


def _contains(places: NDArray[np.int64], place: int) -> bool:
    at = int(np.searchsorted(places, place))
    return at < len(places) and int(places[at]) == place


def _is_plain(block: RecordBlock, largest: int) -> bool:
    """Return whether no record of a block is too large or in a transaction, and all of its queues can be."""
    if block.sizes.max() > largest:
        return False
    raw = np.frombuffer(block.data, np.uint8)
    has_prepared = record.headers_at(raw, np.cumsum(block.sizes) - block.sizes)["prepared_offset"].any()
    return not has_prepared and all(_is_plain_queue(topic, queue_id) for topic, queue_id, *_ in block.derived.queues)


@lru_cache(1 << 16)
def _is_plain_queue(topic: bytes, queue_id: int) -> bool:
    name = java_decode(topic)
    with suppress(MessageIllegalError):
        validate_queue(name, queue_id)
        return name not in (SystemTopic.HALF, SystemTopic.OP)
    return False


def _plain_blocks(parts: Iterable[LogPart], largest: int = sys.maxsize) -> Iterator[LogPart]:
    """Yield the records of each block that is not plain one by one."""
    for part in parts:
        if isinstance(part, RecordBlock) and not _is_plain(part, largest):
            yield from part.messages()
        else:
            yield part


def _sound(path: str, files: Files, parts: Iterable[LogPart]) -> Iterator[StoredMessage | RecordBlock]:
    gap, is_killed = None, has_abort(files, path)
    for item in parts:
        is_end = is_killed and gap is None  # a recovery cuts what a kill leaves if no record follows
        if isinstance(item, Gap):
            gap = item
        if gap is not None and not (is_end and gap is item):
            raise CorruptionError(gap.file, gap.physical_offset, "record", f"{gap.what}: run librmq salvage first")
        if not isinstance(item, Gap):
            yield item


def _inner(path: str, message: StoredMessage) -> list[StoredMessage]:
    try:
        return inner_messages(message)
    except RecordError as error:
        at = message.physical_offset
        raise CorruptionError(path, at, "record", f"{error.reason}: run librmq salvage first") from None


def small_config(config: StoreConfig, messages: Iterable[StoredMessage | RecordBlock]) -> StoreConfig:
    """Return the settings with the smallest files that hold the messages, and a few more."""
    size = largest = keys = 0
    entries: Counter[tuple[str, int]] = Counter()
    for message in messages:
        if isinstance(message, RecordBlock):
            size, largest = size + len(message.data), max(largest, int(message.sizes.max()))
            for topic, queue_id, _, raw in message.derived.queues:
                entries[java_decode(topic), queue_id] += len(raw) // ENTRY_SIZE
            keys += message.count_keys()
            continue
        size, largest = size + message.size, max(largest, message.size)
        entries[message.topic, message.queue_id] += 1
        keys += 1 + len(message.keys)
    slots = _power_of_two(max(16, keys // 2))
    return replace(
        config,
        commitlog_file_size=min(_power_of_two(max(4 << 10, size + 2 * largest)), _LONGEST),
        consumequeue_file_size=ENTRY_SIZE * _power_of_two(max(64, *entries.values(), 0)),
        max_hash_slot_num=slots,
        max_index_num=4 * slots,  # so that both follow from the file's length
        max_total_size=None,
    )


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()


def _redacted(raw: bytes, topic: str, redact: Collection[Redaction]) -> bytes:
    """Return a record without what ``redact`` names, as long as before."""
    copy = record.decode_record(raw)
    if "bodies" in redact and topic != SystemTopic.OP:  # its bodies are numbers of halves
        body = b"x" * len(copy.body)
        plain = copy.sys_flag & ~(record.COMPRESSED | record.COMPRESSION_MASK)
        copy = replace(copy, body=body, body_crc=record.body_checksum(body), sys_flag=plain)
    if "properties" in redact:
        parts = [part.partition(b"\1") for part in copy.properties_raw.split(b"\2")]
        hidden = [
            name + separator + (value if _is_rocketmqs(name) else b"x" * len(value)) for name, separator, value in parts
        ]
        copy = replace(copy, properties_raw=b"\2".join(hidden))
    return record.encode_record(copy)


def _is_rocketmqs(name: bytes) -> bool:
    """Return whether RocketMQ gives the property a meaning; the cause of a dead letter is an application's text."""
    text = name.decode("utf-8", "replace")
    return text != PropertyName.DEAD_LETTER_CAUSE and (
        text in RESERVED_PROPERTIES or text in _OTHER_PROPERTIES or text.startswith(("TIMER_", "__"))
    )


def _copy_tables(tables: BrokerTables, part: str, numbers: Renumbering, topics: set[str], files: Files) -> None:
    folder = os.path.join(part, directory.CONFIG)
    make_folders(files, folder)
    copies = BrokerTables.open(folder, files=files)
    groups = {topic.removeprefix(prefix) for prefix in (TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER) for topic in topics}
    for (group, topic), offsets in tables.progress().items():
        if topic in topics:
            groups.add(group)
            row = {queue_id: numbers.new_offset(topic, queue_id, at) for queue_id, at in offsets.items()}
            copies.offsets.set(f"{topic}@{group}", row)
    for table, copied, names in (
        (tables.topics, copies.topics, topics),
        (tables.filter_table, copies.filter_table, topics),
        (tables.groups, copies.groups, groups),
    ):
        for name in filter(names.__contains__, table.rows):
            copied.set(name, table.rows[name])
    if SystemTopic.SCHEDULE in topics:
        for level, offset in tables.delays.rows.items():
            copies.delays.set(level, numbers.new_offset(SystemTopic.SCHEDULE, queue_id_of_level(level), offset))
    copies.persist(SystemClock().now_ms())
    for table, why_unknown in ((copies.offsets, tables.unknown_progress()), (copies.delays, tables.unknown_delays())):
        if why_unknown is not None:  # an empty table would say that nothing was consumed
            files.delete(table.path)


def _records(
    path: str, files: Files, end_log: Callable[[], None], largest: int, *, in_blocks: bool
) -> Iterator[LogPart]:
    directory.check_kind(path, files)
    yield from _plain_blocks(salvage.log_parts(path, files, in_blocks=in_blocks), largest)
    end_log()
    yield from salvage.cut_records(path, files)


class Renumbering:
    """Queue offsets of a rescued store: each queue counts from 0 without a gap.

    A consumer cannot pass an entry that leads to no record, so a lost record has no entry.
    """

    def __init__(self) -> None:
        self._old: dict[tuple[str, int], array[int]] = {}  # old queue offsets by the new ones
        self._made_again: dict[tuple[str, int], int] = {}
        self._log_ends: dict[tuple[str, int], int] = {}
        self._halves: dict[tuple[int, int], int] = {}

    def next(self, topic: str, queue_id: int, old: int) -> int:
        """Return the queue offset of the next record, by its queue and its old queue offset."""
        name = topic, queue_id
        queue = self._old.get(name)
        if queue is None:
            queue = self._old[name] = array("q")
        new = len(queue)
        if new > 1 and queue[-1] < queue[-2] and old == queue[-1] + 1:
            self._made_again[name] = new - 1  # two such records show that the topic was deleted and made again
        queue.append(old)
        if topic == SystemTopic.HALF:
            self._halves[queue_id, old] = new
        return new

    def next_of_many(self, topic: str, queue_id: int, old: NDArray[np.int64]) -> int:
        """Return the queue offset of the first of adjacent records; their old queue offsets ascend."""
        first, *_ = (self.next(topic, queue_id, number) for number in old[:2].tolist())
        self._old[topic, queue_id].frombytes(old[2:].tobytes())
        return first

    def end_log(self) -> None:
        """Note that the following records were cut from the log, so no progress passes them."""
        self._log_ends = {name: len(queue) for name, queue in self._old.items()}

    def new_offset(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Return the queue offset after everything that ``queue_offset`` of the damaged store had passed."""
        name = topic, queue_id
        begin, end = self._made_again.get(name, 0), self._log_ends.get(name, 0)
        if begin >= end:
            return end
        left = np.frombuffer(self._old[name], np.int64)[begin:end] >= queue_offset
        return begin + int(left.argmax()) if left.any() else end

    def topics(self) -> set[str]:
        """Return the topics with records."""
        return {topic for topic, _ in self._old}

    def half(self, queue_id: int, queue_offset: int) -> int:
        """Return the new queue offset of a half message; -1 if it was lost."""
        return self._halves.get((queue_id, queue_offset), -1)


def _sound_notes(path: str, files: Files, tell: Callable[[Gap], object]) -> dict[str, JobNote]:
    """Return the store's notes about jobs; ``tell`` is called with unreadable ones."""
    notes = {}
    for job in noted_jobs(path, files):
        try:
            notes[job] = JobNote.read(JobNote.path(path, job), files)
        except CorruptionError as error:
            tell(Gap(0, 0, error.file, error.what))
    return notes


class _Copies:
    """The records of a new log, each with its physical offset and queue offset there, written in large blocks."""

    _BLOCK: Final = 4 << 20

    def __init__(self, part: PartFiles, places: dict[int, int] | None = None, room: int | None = None) -> None:
        """Take the new places of halves by their old ones; without them prepared offsets stay.

        With ``room`` for about the whole log the files get their lengths by `settle`, which makes queues and index.
        """
        self.numbers = Renumbering()
        self.count = self.size = 0
        """Number and bytes of the records."""
        self._places = places
        self._is_small = room is not None
        self._block = bytearray()
        self._end = 0
        self._parts: CopiedParts | None = None
        if room is not None:
            self._open(part, min(_power_of_two(max(4 << 10, room)), _LONGEST))
            return
        self._open(part, part.config.commitlog_file_size)
        try:
            # Extension units are made by a recovery, which reads the log again.
            self._parts = None if part.config.enable_consumequeue_ext else CopiedParts(part, self._log)
        except BaseException:
            self._log.close()
            raise

    def _open(self, part: PartFiles, file_size: int) -> None:
        self._part = part = replace(part, config=replace(part.config, commitlog_file_size=file_size))
        self._log = log = part.open_log(writable=True, scan_from=lambda _: self._end)
        self._fits = log.fits

    def copy_each(
        self, messages: Iterable[StoredMessage | RecordBlock], redact: Collection[Redaction]
    ) -> Iterator[StoredMessage | RecordBlock]:
        """Append messages without what ``redact`` names, and yield each behind that."""
        assert self._places is not None
        for message in messages:
            if isinstance(message, RecordBlock):
                self.append_block(message)
            else:
                copied = StoredMessage(_redacted(message.raw, message.topic, redact)) if redact else message
                place, _ = self.append(copied)
                if message.sys_flag & record.TRANSACTION_MASK or message.topic == SystemTopic.HALF:
                    self._places[message.physical_offset] = place
            yield message

    def append(self, message: StoredMessage) -> tuple[int, bytes]:
        """Append a record, and return its place and bytes.

        Raises:
            MessageIllegalError: It fits into no file.
        """
        raw, sys_flag = bytearray(message.raw), message.sys_flag
        if has_queue_entry(sys_flag):
            topic = message.topic
            if topic == SystemTopic.OP:
                raw = _op_of_half(message, self.numbers)
            number = self.numbers.next(topic, message.queue_id, message.queue_offset)
            raw[record.QUEUE_OFFSET_AT : record.QUEUE_OFFSET_AT + 8] = _LONG.pack(number)
        if self._places is not None and message.prepared_transaction_offset:
            at = record.host_ends(sys_flag)[1] + 4
            raw[at : at + 8] = _LONG.pack(self._places.get(message.prepared_transaction_offset, 0))
        if self._end + len(raw) > self._fits:
            self._claim(len(raw))
        place = self._end
        raw[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8] = _LONG.pack(place)
        self._add(raw, 1)
        return place, bytes(raw)

    def append_block(self, block: RecordBlock) -> None:
        """Append records that take part in no transaction."""
        raw, record_places = np.frombuffer(bytearray(block.data), np.uint8), block.derived.keys.physical_offsets
        ends = np.cumsum(block.sizes)
        begins = ends - block.sizes
        old = record.gather(raw, begins + record.QUEUE_OFFSET_AT, ">i8").astype(np.int64)
        queues = block.derived.queues
        entries = np.frombuffer(bytearray(b"".join(packed for *_, packed in queues)), entry_dtype())
        rows = np.searchsorted(record_places, entries["physical_offset"].astype(np.int64))
        stops = np.cumsum([len(packed) // ENTRY_SIZE for *_, packed in queues])
        firsts = [
            self.numbers.next_of_many(java_decode(topic), queue_id, olds)
            for (topic, queue_id, *_), olds in zip(queues, np.split(old[rows], stops[:-1]), strict=True)
        ]
        counts = np.diff(stops, prepend=0)
        numbers = np.empty_like(old)
        numbers[rows] = np.arange(len(old)) + np.repeat(firsts - stops + counts, counts)
        places = np.empty(len(old), np.int64)
        words = np.ndarray((len(raw) - 7,), ">i8", raw.data, strides=(1,))
        words[begins + record.QUEUE_OFFSET_AT] = numbers
        begin, at, size = self._end, 0, 0
        while at < len(old):
            end = int(np.searchsorted(ends, size + self._fits - self._end, "right"))
            if end <= at:
                self._claim(int(block.sizes[at]))
                continue
            places[at:end] = begins[at:end] + (self._end - size)
            words[begins[at:end] + record.PHYSICAL_OFFSET_AT] = places[at:end]
            self._add(raw.data[size : ends[end - 1]], end - at)
            at, size = end, int(ends[end - 1])
        if self._parts is not None and self._parts.followed == begin:  # so they need not be derived again
            entries["physical_offset"] = places[rows]
            packs = np.split(entries, stops[:-1])
            moved = [
                (*queue[:2], first, pack.tobytes()) for queue, first, pack in zip(queues, firsts, packs, strict=True)
            ]
            keys = block.derived.keys._replace(physical_offsets=places)
            self._parts.add_block(DerivedBlock(self._end, moved, keys))

    def _claim(self, size: int) -> None:
        """Go to the next file, if ``size`` bytes do not fit into this one."""
        self.write()
        while self._is_small and (length := self._log.file_size) < min(_LONGEST, self._end + size + record.BLANK_SIZE):
            self._resize(min(2 * length, _LONGEST))
        self._end = self._log.claim(size)
        self._fits = self._end - self._end % self._log.file_size + self._log.file_size - record.BLANK_SIZE

    def _resize(self, length: int) -> None:
        """Give the only file of the log another length."""
        files, place = self._part.files, self._log.sequence.path(0)
        self._log.close()
        if self._end:
            full_path = os.path.join(self._part.path, "whole")
            files.rename(place, full_path)
            copy_file(files, files.open(full_path), place, end=self._end, size=length)
            files.delete(full_path)
        self._open(self._part, length)

    def _add(self, raw: bytes | bytearray | memoryview, count: int) -> None:
        self._block += raw
        self._end += len(raw)
        self.size += len(raw)
        self.count += count
        if len(self._block) >= self._BLOCK:
            self.write()

    def write(self) -> None:
        """Write the records that are collected."""
        if self._block:
            self._log.append_block(self._block)
            self._block = bytearray()
            if self._parts is not None:
                self._parts.follow()

    def settle(self, config: StoreConfig) -> None:
        """Write what is left, make queues and index with these settings, and mark the store as closed."""
        self.write()
        if self._log.file_size != config.commitlog_file_size:
            self._resize(config.commitlog_file_size)
        self._part = part = replace(self._part, config=config)
        if config.enable_consumequeue_ext:
            self._log.flush()
            self.close()
            settle(part.path, config, part.files, SystemClock())
            return
        self._parts = self._parts or CopiedParts(part, self._log)
        self._parts.settle()

    def close(self) -> None:
        """Release the files of the log and the index."""
        if self._parts is not None:
            self._parts.release()
        self._log.close()


def _is_number(part: bytes) -> bool:
    return part.isdigit() and len(part) < _MAX_DIGITS


def _op_of_half(message: StoredMessage, numbers: Renumbering) -> bytearray:
    """Return the record of an op message that names the new queue offsets of its halves."""
    op = record.decode_record(message.raw)
    parts = op.body.split(b",")  # 5.x writes a comma behind each number
    if any(_is_number(part) for part in parts):
        moved = (b"%d" % numbers.half(message.queue_id, int(part)) if _is_number(part) else part for part in parts)
        body = b",".join(moved)
        op = replace(op, body=body, body_crc=record.body_checksum(body))
    return bytearray(record.encode_record(op))


# ---- progress of groups and delay levels

NewOffset = Callable[[str, int, int], int]
"""Function of topic, queue id and queue offset to the queue offset in the copy."""


def revise_progress(path: str, files: Files, new_offset: NewOffset, now_ms: int) -> None:
    """Replace every stored queue offset by its ``new_offset``.

    A rescued store numbers its messages differently, and progress beyond a queue would make a group skip later
    messages. Backups are deleted, since they hold the progress of the source.

    Raises:
        CorruptionError: A table and its backup are unreadable.
    """
    folder = os.path.join(path, directory.CONFIG)
    tables = BrokerTables.open(folder, files=files)
    for (group, topic), offsets in tables.progress().items():
        row = {queue_id: new_offset(topic, queue_id, at) for queue_id, at in offsets.items()}
        tables.offsets.set(f"{topic}@{group}", row)
    for level, at in list(tables.delays.rows.items()):
        tables.delays.set(level, new_offset(SystemTopic.SCHEDULE, queue_id_of_level(level), at))
    for table in (tables.offsets, tables.delays):
        if file_size(files, table.path) or file_size(files, f"{table.path}.bak"):  # else the source has no such table
            table.persist(now_ms)
            if file_size(files, f"{table.path}.bak") is not None:
                files.delete(f"{table.path}.bak")
