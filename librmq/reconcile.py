"""Queues and key index held against the log, and made to agree with it.

The log is the truth: from each record follow the entry at its queue offset and the keys of the index. `reconcile`
walks over the log once, compares what is there with what follows, and (for recovery) rewrites what differs.

Two fields of a record can be wrong without a trace in a checksum and be told from the rest all the same: its own
address, and its queue offset, since the records of a queue count on. A single record that falls out of the count is
misaddressed; two that agree are a jump (a topic that was deleted and made again, a record whose topic was lost).
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from librmq import codec
from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ENTRY_DTYPE, ENTRY_SIZE, ConsumeQueue
from librmq.consumequeueext import is_ext_address
from librmq.dispatch import (
    BitmapOf,
    RawPending,
    derived_tags_code,
    has_queue_entry,
    index_block,
    is_indexed,
    key_hashes,
)
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.indexfile import IndexFile, IndexHeader, entry_seconds
from librmq.javahash import java_decode, string_hash
from librmq.keyindex import KeyIndex
from librmq.levels import SCHEDULE_TOPIC, DelayLevels
from librmq.message import StoredMessage
from librmq.topics import validate_queue

__all__ = ["Damage", "GapError", "OpenQueue", "first_at", "reconcile"]

_LONG: Final = struct.Struct(">q")
# Of a record with IPv4 hosts: magic, queue id, queue and physical offset, sys flag, store timestamp, body length.
_unpack_fields = struct.Struct(">4xI4xi4xqqi16xq20xi").unpack_from
_pack_entry = ENTRY.pack
_MAGIC: Final = codec.MESSAGE_MAGIC
_V6: Final = codec.HOSTS_V6
_IN_TRANSACTION: Final = codec.TRANSACTION_MASK
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_KEPT: Final = 10_000
_FILLER_SIZE: Final = 0x7FFFFFFF
_FILLER: Final = ENTRY.pack(0, _FILLER_SIZE, 0)
_NONE: Final = 1 << 63
_LARGEST_GAP: Final = 100_000  # entries that are filled in where records are missing; beyond, the queue starts anew
_COMPARED: Final = 4096  # entries that are compared together
_BLOCK: Final = 65_536
_ADDED: Final = 4096  # records whose keys are added together: as many as caches hold


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with ``bytes`` of ``file`` from ``offset`` on (physical for the log, else within the file)."""

    file: str
    offset: int
    kind: str
    what: str
    bytes: int = 0


class GapError(Exception):
    """A queue lacks entries from before the place where the walk began: walk over all of the log."""


OpenQueue = Callable[[str, int], ConsumeQueue]
"""From topic and queue id to the queue, opened; one that does not exist yet is empty."""


def reconcile(
    log: CommitLog,
    queues: MutableMapping[tuple[str, int], ConsumeQueue],
    open_queue: OpenQueue,
    index: KeyIndex | None,
    levels: DelayLevels,
    begin: int,
    *,
    mend: bool,
    bitmap_of: BitmapOf | None = None,
) -> Iterator[Damage]:
    """Hold what follows from the records from ``begin`` on against queues and index; yields what differs.

    With ``mend`` what differs is rewritten; without, nothing is changed. ``open_queue`` gives queues that are missing,
    ``bitmap_of`` the bitmaps of extension units that are made again.
    `GapError` if a queue that is mended lacks entries from before ``begin``. `CorruptionError` at a record that can't
    be read, or that names no possible queue.
    """
    begin = max(begin, log.begin)
    checks = _QueueChecks(log, queues, open_queue, begin, mend, bitmap_of)
    keys = None if index is None else _IndexCheck(index, begin, log.end, begin <= log.begin, mend)
    tags_codes: dict[bytes | None, int] = {None: 0}
    find = codec.find_keys_and_tags
    for physical_offset, size, raw in log.scan(begin, check_body=False):
        if raw is None:
            continue
        magic, queue_id, queue_offset, address, sys_flag, stored, body_size = _unpack_fields(raw)
        if magic != _MAGIC or sys_flag & _V6:
            stored = codec.store_timestamp_ms(raw)
            _, _, topic_at, topic_end, properties_at, _ = codec.frame(raw, 0, size)
        else:
            topic_at = 89 + body_size if body_size > 0 else 89
            topic_end = topic_at + raw[topic_at - 1]
            properties_at = topic_end + 2
        topic, properties = raw[topic_at:topic_end], raw[properties_at:]
        check = checks.get((topic, queue_id)) or checks.make(topic, queue_id, physical_offset)
        if address != physical_offset:
            yield _misaddressed(log, physical_offset, codec.PHYSICAL_OFFSET_AT, address, physical_offset, mend)
        unique, key, tags = find(properties)
        if not sys_flag & _IN_TRANSACTION or has_queue_entry(sys_flag):
            tags_code = tags_codes.get(tags)
            if tags_code is None:
                if len(tags_codes) > _TAGS_KEPT:
                    tags_codes = {None: 0}
                tags_code = tags_codes[tags] = codec.tags_code(java_decode(tags or b""))
            if topic == _SCHEDULE_TOPIC:
                tags_code = derived_tags_code(StoredMessage(raw), levels)
            entry = _pack_entry(physical_offset, size, tags_code)
            if queue_offset == check.expected:  # as nearly always
                check.expected = queue_offset + 1
                entries = check.entries
                entries.append(entry)
                if len(entries) >= _COMPARED:
                    check.settle()
            else:
                check.offer(queue_offset, _Entry(entry, stored, properties))
        if keys is not None:
            if sys_flag & _IN_TRANSACTION and not is_indexed(sys_flag):
                unique = key = None
            record = (physical_offset, stored, check.prefix_hash, unique, key)
            if keys.at_end:
                keys.add(record)
            else:
                keys.offer(record)
    for check in checks.all():
        check.finish()
        yield from check.damages
    if index is not None and keys is not None:
        keys.finish()
        yield from keys.damages
        if mend and not keys.sound:
            _index_again(log, index)


def _index_again(log: CommitLog, index: KeyIndex) -> None:
    """Make the whole key index anew."""
    for file in index.files:
        index.drop(file.name)
    prefixes: dict[str, int] = {}
    records: list[tuple[int, int, int, str | None, str | None]] = []
    for physical_offset, _, raw in log.scan(check_body=False):
        if raw is None:
            continue
        message = StoredMessage(raw)
        topic = message.topic
        prefix_hash = prefixes.get(topic)
        if prefix_hash is None:
            prefix_hash = prefixes[topic] = string_hash(topic + "#")
        unique_key = keys = None
        if is_indexed(message.sys_flag):
            unique_key, keys = message.unique_key, message.properties.get(codec.PROPERTY_KEYS)
        records.append((physical_offset, message.store_timestamp_ms, prefix_hash, unique_key, keys))
        if len(records) >= _BLOCK:
            index_block(index, records)
            records = []
    if records:
        index_block(index, records)


class _QueueChecks(dict[tuple[bytes, int], "_QueueCheck"]):
    """The checks of all queues, by topic as it stands in records and queue id."""

    def __init__(
        self,
        log: CommitLog,
        queues: MutableMapping[tuple[str, int], ConsumeQueue],
        open_queue: OpenQueue,
        begin: int,
        mend: bool,
        bitmap_of: BitmapOf | None,
    ) -> None:
        super().__init__()
        self._bitmap_of = bitmap_of
        self._log = log
        self._queues = queues
        self._open_queue = open_queue
        self._begin = begin
        self._mend = mend
        self._by_name: dict[tuple[str, int], _QueueCheck] = {}

    def make(self, topic_raw: bytes, queue_id: int, physical_offset: int) -> _QueueCheck:
        """The check of a queue of which the first record comes; `CorruptionError` if there can be no such queue."""
        topic = java_decode(topic_raw)
        check = self._by_name.get((topic, queue_id))  # malformed topics may be read alike
        if check is None:
            try:
                validate_queue(topic, queue_id)
            except MessageIllegalError as error:
                path = self._log.sequence.path_at(physical_offset)
                raise CorruptionError(path, physical_offset, "record", f"it names no queue: {error}") from None
            queue = self._queues.get((topic, queue_id))
            if queue is None:
                queue = self._open_queue(topic, queue_id)
                if self._mend:
                    self._queues[topic, queue_id] = queue
            check = self._check(topic, queue_id, queue)
        self[topic_raw, queue_id] = check
        return check

    def _check(self, topic: str, queue_id: int, queue: ConsumeQueue) -> _QueueCheck:
        check = _QueueCheck(self._log, queue, topic, self._begin, self._mend, self._bitmap_of)
        self._by_name[topic, queue_id] = check
        return check

    def all(self) -> list[_QueueCheck]:
        """The checks of all queues, those without a record too."""
        for (topic, queue_id), queue in list(self._queues.items()):
            if (topic, queue_id) not in self._by_name:
                self._check(topic, queue_id, queue)
        return list(self._by_name.values())


def _misaddressed(log: CommitLog, physical_offset: int, at: int, found: int, expected: int, mend: bool) -> Damage:
    """A field of 8 bytes in a record that is not what it must be."""
    field = "physical offset" if at == codec.PHYSICAL_OFFSET_AT else "queue offset"
    if mend:
        log.patch(physical_offset + at, _LONG.pack(expected))
    path = log.sequence.path_at(physical_offset)
    return Damage(path, physical_offset, "record", f"{field}: expected {expected}, found {found}", 8)


class _Entry(NamedTuple):
    """The entry that a record leads to, and what its extension unit is made of."""

    packed: bytes
    store_timestamp_ms: int
    properties: bytes

    @property
    def physical_offset(self) -> int:
        return int.from_bytes(self.packed[:8], "big")


class _QueueCheck:
    """One queue held against the records that name it, in the order of the log.

    Entries collect in ``entries`` and are compared together. Most records take a short cut that `reconcile` has
    inline: ``expected`` is the queue offset for which that holds, one that no record can have while none does.
    """

    def __init__(
        self,
        log: CommitLog,
        queue: ConsumeQueue,
        topic: str,
        begin: int,
        mend: bool,
        bitmap_of: BitmapOf | None,
    ) -> None:
        self._topic = topic
        self._bitmap_of = bitmap_of
        self.damages: list[Damage] = []
        self.prefix_hash = string_hash(topic + "#")
        self.entries: list[bytes] = []
        self.expected = _NONE
        self._log = log
        self._queue = queue
        self._begin = begin
        self._whole = begin <= log.begin
        self._mend = mend
        self._delayed = topic == SCHEDULE_TOPIC
        self._first = first_at(queue, begin)  # entries below it are of older records
        self._next: int | None = self._first if self._first > queue.min_offset else None
        self._held: tuple[int, _Entry] | None = None
        self._units: dict[int, _Entry] = {}  # of a queue with extension: by queue offset
        self._expect()

    def _expect(self) -> None:
        """Open the short cut for the next record, if there is nothing particular about it."""
        short = self._next is not None and self._held is None and self._queue.ext is None
        self.expected = self._next if short and self._next is not None else _NONE

    def settle(self) -> None:
        """Take over what went the short way."""
        if self.expected != _NONE:
            self._next = self.expected
        if len(self.entries) >= _COMPARED:
            self._compare()

    def offer(self, queue_offset: int, entry: _Entry) -> None:
        """Take the next record of the queue, which says that it is at ``queue_offset``."""
        self.settle()
        if self._held is not None:
            claimed, held = self._held
            self._held = None
            self._settle(claimed, held, queue_offset)
        if queue_offset == self._next:
            self._accept(queue_offset, entry, queue_offset)
        else:
            self._held = queue_offset, entry
        self._expect()

    def _settle(self, claimed: int, entry: _Entry, following: int | None) -> None:
        """Decide the queue offset of a record that falls out of the count, by the next one and by the queue."""
        due = self._next
        possible = 0 <= claimed < 1 << 58
        if due is None:
            if self._points_at(self._queue.min_offset, entry):
                due = self._queue.min_offset
            elif following and not 0 < following - claimed <= _LARGEST_GAP and not self._points_at(claimed, entry):
                due = following - 1
            else:
                due = claimed if possible else 0
        elif possible:
            jumps = following == claimed + 1 if following is not None else self._points_at(claimed, entry)
            due = claimed if jumps else due
        self._accept(claimed, entry, due)

    def _points_at(self, queue_offset: int, entry: _Entry) -> bool:
        raw = self._queue.read(queue_offset, 1)
        return raw[:12] == entry.packed[:12]  # with the size: zeros are no entry of the log's first record

    def _accept(self, claimed: int, entry: _Entry, queue_offset: int) -> None:
        if queue_offset != claimed:
            at = codec.QUEUE_OFFSET_AT
            self.damages.append(_misaddressed(self._log, entry.physical_offset, at, claimed, queue_offset, self._mend))
        if self._next is None:
            if queue_offset and not self._whole:
                raise GapError
            self._first = queue_offset
        elif queue_offset != self._next:
            self._jump(queue_offset)
        self._next = queue_offset + 1
        self.entries.append(entry.packed)
        if self._queue.ext is not None:
            self._units[queue_offset] = entry
        if len(self.entries) >= _COMPARED:
            self._compare()

    def _jump(self, queue_offset: int) -> None:
        """The count goes on elsewhere."""
        assert self._next is not None
        gap = queue_offset - self._next
        if gap > 0 and not self._whole:
            raise GapError
        if 0 < gap <= _LARGEST_GAP:
            self.entries += [_FILLER] * gap
            return
        # The topic was made anew (or lost more than can be filled in): the later records are the queue.
        self.damages = [damage for damage in self.damages if damage.kind == "record"]
        if gap < 0:
            replaced = min(-gap, len(self.entries))
            del self.entries[len(self.entries) - replaced :]
            self._next -= replaced
            self._compare()
            self._first = min(self._first, queue_offset)
        else:
            self.entries = []
            self._first = queue_offset

    def _compare(self) -> None:
        """Hold what has collected against the queue."""
        entries, queue = self.entries, self._queue
        if not entries:
            return
        assert self._next is not None
        at = self._next - len(entries)
        same = self._count_same(at, entries) if at >= queue.min_offset else 0
        if same < len(entries):
            self._report(at + same, entries[same], len(entries) - same)
            if self._mend:
                self._write(at + same, entries[same:])
        self.entries = []
        self._units = {}

    def _report(self, queue_offset: int, expected: bytes, count: int) -> None:
        queue = self._queue
        lacking = queue_offset >= queue.max_offset
        if lacking and self.damages and self.damages[-1].kind == "missing":
            return  # said already
        path, position = queue.place_of(queue_offset)
        what = f"lacks entries from queue offset {queue_offset} on"
        if queue.min_offset <= queue_offset < queue.max_offset:
            found = ENTRY.unpack(queue.read(queue_offset, 1))
            what = f"queue offset {queue_offset}: expected {ENTRY.unpack(expected)}, found {found}"
        self.damages.append(Damage(path, position, "missing" if lacking else "entry", what, ENTRY_SIZE * count))

    def _write(self, queue_offset: int, entries: Sequence[bytes]) -> None:
        queue = self._queue
        if queue_offset < queue.min_offset or queue_offset > queue.max_offset:
            queue.clear()
        else:
            queue.truncate_to(queue_offset)
        if queue.ext is not None:
            entries = [self._with_unit(number, entry) for number, entry in enumerate(entries, queue_offset)]
        queue.append_many(queue_offset, b"".join(entries))

    def _with_unit(self, queue_offset: int, packed: bytes) -> bytes:
        """The entry with the address of a new unit in the place of its code."""
        entry = self._units.get(queue_offset)
        if entry is None or self._queue.ext is None:
            return packed
        physical_offset, size, tags_code = ENTRY.unpack(packed)
        bitmap = None
        if self._bitmap_of is not None:
            properties = entry.properties
            bitmap = self._bitmap_of(self._topic, codec.decode_properties(properties) if properties else None)
        return ENTRY.pack(physical_offset, size, self._queue.ext.put(tags_code, entry.store_timestamp_ms, bitmap))

    def _count_same(self, queue_offset: int, entries: Sequence[bytes]) -> int:
        same = 0
        while same < len(entries):
            raw = self._queue.read(queue_offset + same, len(entries) - same)
            if not raw:
                return same
            count = len(raw) // ENTRY_SIZE
            if raw != b"".join(entries[same : same + count]):
                for number in range(same, same + count):
                    found = raw[ENTRY_SIZE * (number - same) : ENTRY_SIZE * (number - same + 1)]
                    if found != entries[number] and not self._leads_to(found, entries[number], queue_offset + number):
                        return number
            same += count
        return same

    def _leads_to(self, found: bytes, expected: bytes, queue_offset: int) -> bool:
        """Whether an entry says what is expected after all: by a unit, or as the original recovers it."""
        place, size, code = ENTRY.unpack(found)
        if found[:12] != expected[:12]:
            return False
        wanted = {ENTRY.unpack(expected)[2]}
        if self._delayed and (raw := self._log.read(place, size)):
            # After an unclean exit the original gives delayed records the code of their tags.
            wanted.add(codec.tags_code(StoredMessage(raw).tags))
        if not is_ext_address(code):
            return code in wanted
        if self._queue.ext is None:
            return False  # there are no units that it could lead to
        before = self._queue.read(queue_offset - 1, 1)
        if before and is_ext_address(earlier := ENTRY.unpack(before)[2]) and earlier >= code:
            return False  # units are in the order of their entries
        unit, entry = self._queue.ext_unit(code), self._units.get(queue_offset)
        if unit is None or entry is None:
            return False
        return unit.tags_code in wanted and unit.store_timestamp_ms == entry.store_timestamp_ms

    def finish(self) -> None:
        """No record follows."""
        self.settle()
        if self._held is not None:
            claimed, held = self._held
            self._held = None
            self._settle(claimed, held, None)
        self._compare()
        queue = self._queue
        if self._next is None:  # no record at all: every entry must be of an older one
            self._next = self._first
        if queue.max_offset > self._next:
            self._report_ahead(self._next)
            if self._mend:
                queue.truncate_to(self._next)
        if self._whole:
            self._check_older()
        elif not self._mend:
            return
        stale = queue.data_behind_end()
        if stale:
            path, position = queue.place_of(queue.max_offset)
            self.damages.append(Damage(path, position, "tail", "bytes behind the last entry", stale))
            if self._mend:
                queue.recover()

    def _report_ahead(self, queue_offset: int) -> None:
        path, position = self._queue.place_of(queue_offset)
        ahead = self._queue.max_offset - queue_offset
        what = f"{ahead} entries from queue offset {queue_offset} on that no record of the log leads to"
        self.damages.append(Damage(path, position, "ahead", what, ENTRY_SIZE * ahead))

    def _check_older(self) -> None:
        """Entries before the log's first record of the queue must point below the log, or be filler."""
        queue = self._queue
        wrong = _first_not_older(queue, self._first, self._begin)
        if wrong is None:
            return
        path, position = queue.place_of(wrong)
        what = f"queue offset {wrong}: points at no record of this queue"
        self.damages.append(Damage(path, position, "entry", what, ENTRY_SIZE))
        if not self._mend:
            return
        kept = queue.entries(self._first)
        units = [queue.ext_unit(code) for code in kept["tags_code"].tolist()]
        queue.truncate_to(wrong)
        queue.append_many(wrong, _FILLER * (self._first - wrong))
        if queue.ext is not None:
            for number, unit in enumerate(units):
                if unit is not None:
                    kept["tags_code"][number] = queue.ext.put(unit.tags_code, unit.store_timestamp_ms, unit.bitmap)
        queue.append_many(self._first, kept.tobytes())
        queue.serve_from(self._begin)


def _first_not_older(queue: ConsumeQueue, end: int, begin: int) -> int | None:
    """The first entry below queue offset ``end`` that is no filler and of no message before ``begin`` of the log."""
    at = queue.stored_begin
    try:
        for first, block in queue.blocks(at, end):
            place = block["physical_offset"]
            wrong = np.flatnonzero((place >= begin) & ((place != 0) | (block["size"] != _FILLER_SIZE)))
            if len(wrong):
                return first + int(wrong[0])
            at = first + len(block)
    except CorruptionError:
        return at
    return None


def first_at(queue: ConsumeQueue, physical_offset: int) -> int:
    """The first queue offset whose message is at or behind ``physical_offset``, by halving.

    From the end on in growing steps before, since it mostly is there: so few files are mapped.
    """
    low, high = queue.min_offset, queue.max_offset
    step = 1
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        at = _behind_filler(queue, middle, high)
        raw = queue.read(at, 1) if at < high else b""
        if not raw or ENTRY.unpack(raw)[0] >= physical_offset:
            high, step = middle, 2 * step
        else:
            low, step = at + 1, 0
    return _behind_filler(queue, low, queue.max_offset)


def _behind_filler(queue: ConsumeQueue, queue_offset: int, end: int) -> int:
    """The first entry from ``queue_offset`` to ``end`` that is no filler."""
    while queue_offset < end and queue.read(queue_offset, 1) == _FILLER:
        raw = queue.read(queue_offset, min(_COMPARED, end - queue_offset))
        others = np.flatnonzero(np.frombuffer(raw, ENTRY_DTYPE)["size"] != _FILLER_SIZE)
        queue_offset += int(others[0]) if len(others) else len(raw) // ENTRY_SIZE
    return queue_offset


class _Run(NamedTuple):
    """The entries of the index that name one record, side by side."""

    physical_offset: int
    hashes: list[int]
    seconds: list[int]
    file: IndexFile
    number: int
    before: IndexHeader | None
    """The header of the file before."""


def _runs(index: KeyIndex, begin: int) -> Iterator[_Run]:
    """The entries for records from ``begin`` on, a record at a time; those of a record may lie in two files."""
    run: _Run | None = None
    for before, file in itertools.pairwise((None, *index.files)):
        assert file is not None
        header = None if before is None else before.header
        if file.header.end_physical_offset < begin:
            continue
        for first in range(1, file.header.index_count, _BLOCK):
            block = file.entries(first, first + _BLOCK)
            rows = zip(block["hash"].tolist(), block["physical"].tolist(), block["time_diff"].tolist(), strict=True)
            for number, (value, physical_offset, seconds) in enumerate(rows, first):
                if physical_offset < begin:
                    continue
                if run is None or run.physical_offset != physical_offset or run.file is not file:
                    if run is not None:
                        yield run
                    run = _Run(physical_offset, [], [], file, number, header)
                run.hashes.append(value)
                run.seconds.append(seconds)
    if run is not None:
        yield run


class _IndexCheck:
    """The key index held against the keys of the records, in the order of the log."""

    def __init__(self, index: KeyIndex, begin: int, end: int, whole: bool, mend: bool) -> None:
        self.damages: list[Damage] = []
        self._index = index
        self._mend = mend
        self._runs = _runs(index, begin)
        self._run = next(self._runs, None)
        self._adding: list[RawPending] = []
        self._lacking = 0
        self.at_end = False
        """Whether the index lacks all that follows."""
        self._log_end = end
        self._end = index.end_physical_offset
        self._none = all(file.header.index_count <= 1 for file in index.files)
        self.sound = not (self._none and self._end > begin)  # else files say that there were others before them
        """False where only making the index again mends it."""
        self._checked = index.files if whole else []  # what is made meanwhile needs no look
        for file in self._checked[:-1]:
            if not file.full:
                self.sound = False
                what = f"header: {file.header.index_count} of {file.max_entries}, and another file follows"
                self.damages.append(Damage(file.path, 36, "index", what))

    def offer(self, record: RawPending) -> None:
        """Take the keys of the next record, unless `at_end`."""
        physical_offset, store_timestamp_ms, prefix_hash, raw_unique_key, raw_keys = record
        unique_key = None if raw_unique_key is None else java_decode(raw_unique_key)
        keys = None if raw_keys is None else java_decode(raw_keys)
        run = self._run
        if run is None:  # the index has come to its end before the log
            if physical_offset > self._end or self._none:
                self.at_end = True
                self.add(record)
            return
        while run is not None and run.physical_offset < physical_offset:
            self._damaged(run, f"names {run.physical_offset}, where no record with keys is")
            run = self._run = next(self._runs, None)
        expected = key_hashes(prefix_hash, unique_key, keys)
        there: list[int] = []
        last = run
        while run is not None and run.physical_offset == physical_offset:
            there += run.hashes
            self._check_times(run, store_timestamp_ms)
            last = run
            run = self._run = next(self._runs, None)
        if there == expected or last is None:
            return
        if set(there) == set(expected) and not Counter(expected) - Counter(there):
            return  # a key twice: the original indexes a record again after an unclean exit
        if run is not None or not there or there != expected[: len(there)]:
            self._damaged(last, f"keys of {physical_offset}: expected hashes {expected}, found {there}")
        else:  # the last record that is indexed: a crash came between its keys
            texts = [*([unique_key] if unique_key else []), *codec.split_keys(keys)][len(there) :]
            self.add((physical_offset, store_timestamp_ms, prefix_hash, None, " ".join(texts).encode()))

    def _check_times(self, run: _Run, store_timestamp_ms: int) -> None:
        header, place = run.file.header, run.physical_offset
        seconds = entry_seconds(store_timestamp_ms, header.begin_timestamp_ms)
        times = [seconds] * len(run.seconds)
        if run.number == 1:  # it counts from the end of the file before it, which may be gone
            before = run.before
            times[0] = run.seconds[0] if before is None else entry_seconds(store_timestamp_ms, before.end_timestamp_ms)
        if run.seconds != times:
            self._damaged(run, f"times of {place}: expected {seconds} s, found {run.seconds}")
        first, last = run.number == 1, run.number + len(run.hashes) == header.index_count
        if (first and header.begin_timestamp_ms != store_timestamp_ms) or (
            last and header.end_timestamp_ms != store_timestamp_ms
        ):
            span = f"{header.begin_timestamp_ms} to {header.end_timestamp_ms}"
            self._damaged(run, f"header: times {span}, the record at {place} was stored at {store_timestamp_ms}")

    def add(self, record: RawPending) -> None:
        """Take a record whose keys the index lacks."""
        if record[3] or record[4]:
            self._lacking += 1
        if self._mend and self.sound:
            self._adding.append(record)
            if len(self._adding) >= _ADDED:
                self._write()

    def _write(self) -> None:
        if self._adding:
            index_block(self._index, self._adding)
            self._adding = []

    def _damaged(self, run: _Run, what: str) -> None:
        self.sound = False
        if not self.damages or self.damages[-1].file != run.file.path:  # one a file says enough
            position = run.file.entry_position(run.number)
            kind = "ahead" if run.physical_offset >= self._log_end else "entry"
            self.damages.append(Damage(run.file.path, position, kind, what, 20 * len(run.hashes)))

    def finish(self) -> None:
        """No record follows."""
        while self._run is not None:
            self._damaged(self._run, f"names {self._run.physical_offset}, where no record is")
            self._run = next(self._runs, None)
        for file in self._checked:
            found = file.check()
            if found is not None:
                self.sound = False
                position, what = found
                self.damages.append(Damage(file.path, position, "index", what))
        files = self._index.files
        if self._lacking:
            place = files[-1].path if files else self._index.folder
            self.damages.append(Damage(place, 0, "missing", f"lacks keys of the log's last {self._lacking} records"))
        if self.sound:
            self._write()
