"""Reads of a queue: its entries, their messages, and the limits of a read.

Mirrors 4.9.4's ``DefaultMessageStore.getMessage``, whose order of checks decides where a read ends.
"""

from __future__ import annotations

import enum
import itertools
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from librmq.commitlog import CommitLog
from librmq.config import wrong_kind
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import (
    ENTRY,
    ENTRY_SIZE,
    HOLE_SIZE,
    LAST_EXT_ADDRESS,
    ExtUnit,
    entry_dtype,
    places_and_sizes,
)
from librmq.errors import CorruptionError, RecordError
from librmq.files import Buffer
from librmq.files.rolling import MappedFileQueue
from librmq.message import StoredMessage, StoredRecords
from librmq.message import record as record_format
from librmq.message.message import is_batch
from librmq.message.record import has_own_checksum
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE
from librmq.store.engine._entry_checks import ADVICE, EntryChecks, is_usual, usual_tail
from librmq.store.engine.store_parts import QueueName

if TYPE_CHECKING:
    import numpy.typing as npt


_MIN_LOOKED_AT: Final = 16_000  # bytes of entries that a read examines, or 20 for each wanted message
_pull: Final = CORE.pull
_read: Final = CORE.read
_with_codes: Final = CORE.with_codes
_PLACE: Final = struct.Struct(">q")  # the first field of an entry
_OWN_FIELDS: Final = ("body_crc", "queue_id", "queue_offset", "physical_offset", "body_length")
_OWN: Final = record_format.header_struct(*_OWN_FIELDS, unsigned=("body_length",)).format.replace("8x", "Q", 1)
"""The format of a record up to its body, with size and magic as one number."""
_unpack_body_size = record_format.header_struct("body_length", unsigned=("body_length",)).unpack_from
_unpack_checksum = record_format.header_struct("body_crc", "sys_flag", "body_length").unpack_from
_NOT_PLAIN: Final = record_format.HOSTS_V6 | record_format.COMPRESSED
_MAGIC: Final = record_format.MESSAGE_MAGIC
_BODY_AT: Final = record_format.BODY_AT


class GetStatus(enum.Enum):
    """Status of a read; 4.9.4's ``GetMessageStatus``."""

    FOUND = "FOUND"
    """The result has messages."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """No message that was looked at matches; continue at ``next_offset``."""
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    """Retention has deleted the messages; continue at ``next_offset``."""
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    """The file of the queue that has this offset was deleted, or cannot be read."""
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    """The offset is beyond the end of the queue."""
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    """The offset is the end of the queue: there is no message yet."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """Retention has deleted the messages of this offset; continue at ``next_offset``."""
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    """The queue has no message, or there is no such queue."""


@dataclass(slots=True)
class ReadResult:
    """Result of a read."""

    status: GetStatus
    """Whether messages were found, and if not, why."""
    messages: Sequence[StoredMessage]
    """Messages in the order of the queue."""
    next_offset: int
    """Queue offset of the next read, whatever the status."""
    min_offset: int
    """The queue's first offset."""
    max_offset: int
    """The offset of the queue's next message."""
    total_size: int = 0
    """Bytes of the returned records."""


if CORE.use_read_results is not None:
    CORE.use_read_results(ReadResult, GetStatus.FOUND, ConsumeQueue, MappedFileQueue)


class MessageFilter(Protocol):
    """A filter of messages in two phases; 4.9.4's ``MessageFilter``."""

    def match_entries(
        self, tags_codes: npt.NDArray[np.int64], units: Sequence[ExtUnit | None] | None
    ) -> npt.NDArray[np.bool_]:
        """Return which entries can match, without reading the log.

        ``units`` are the entries' extension units, if the queue has any.
        """

    def match_message(self, message: StoredMessage) -> bool:
        """Return whether the message matches."""


def read_queue(
    checks: EntryChecks,
    queue: ConsumeQueue | None,
    name: QueueName,
    queue_offset: int,
    max_messages: int,
    matching: MessageFilter | None,
    *,
    joined: bool = False,
    checked: bool = False,
) -> ReadResult:
    """Read messages of a queue from ``queue_offset`` on; see `MessageStore.read`. Thread-safe."""
    if queue is None or queue.max_offset == 0:
        return ReadResult(GetStatus.NO_MESSAGE_IN_QUEUE, [], 0, 0, 0)
    low, high = queue.min_offset, queue.max_offset
    if queue_offset < low:
        return ReadResult(GetStatus.OFFSET_TOO_SMALL, [], low, low, high)
    if queue_offset == high:
        return ReadResult(GetStatus.OFFSET_OVERFLOW_ONE, [], queue_offset, low, high)
    if queue_offset > high:
        return ReadResult(GetStatus.OFFSET_OVERFLOW_BADLY, [], high, low, high)
    if queue._has_batches:
        return _read_batches(checks, queue, name, queue_offset, max_messages, matching, low, high)
    if matching is None:
        # The path of every pull, in which each call counts.
        log, transfer = checks.log, checks.transfer
        fast_result: ReadResult | None = (
            None
            if _read is None or joined
            else _read(log, queue, queue_offset, max_messages, transfer, low, high, name)
        )
        if fast_result is None and (raw := queue.read(queue_offset, max_messages if max_messages > 1 else 1)):
            fast_result = _read_all(checks, name, raw, queue_offset, low, high, joined, checked)
        if fast_result is not None:
            return fast_result
    limit = max(_MIN_LOOKED_AT // ENTRY_SIZE, max_messages)
    raw = queue.read(queue_offset, limit)
    if not raw:
        following = queue.next_file_offset(queue_offset)
        return ReadResult(GetStatus.OFFSET_FOUND_NULL, [], following, low, high)
    result = ReadResult(GetStatus.NO_MATCHED_MESSAGE, [], queue_offset, low, high)
    entries: tuple[Sequence[int], Sequence[int]]
    candidates: Sequence[int]
    if matching is None:
        entries = places_and_sizes(raw)
        candidates = range(len(entries[0]))
    else:
        candidates = matching_entries(queue, raw, matching)
        if not candidates:  # the lists would take most of the time
            result.next_offset += len(raw) // ENTRY_SIZE
            return result
        array = np.frombuffer(raw, entry_dtype())
        entries = array["physical_offset"].tolist(), array["size"].tolist()
    _read_candidates(checks, queue, name, entries, candidates, max_messages, matching, result)
    return result


def wrong_argument(queue_offset: object, max_messages: object, matching: object) -> TypeError | None:
    """Return the error that names the first of these that is of a wrong kind, None if none is."""
    for name, value in (("queue_offset", queue_offset), ("max_messages", max_messages)):
        if not hasattr(value, "__index__"):
            return wrong_kind(name, value, "a whole number")
    if matching is not None and not hasattr(matching, "match_entries"):
        return wrong_kind("matching", matching, "a filter, as matching() returns it")
    return None


def _read_all(
    checks: EntryChecks,
    name: QueueName,
    raw_entries: bytes,
    queue_offset: int,
    low: int,
    high: int,
    joined: bool,
    checked: bool,
) -> ReadResult | None:
    """Read without a filter on a fast path; None if anything is unusual, for which the caller takes the general path.

    The fast path needs entries that all point into one file, at records of the usual magic that name them.
    """
    log, transfer = checks.log, checks.transfer
    log_end = log.end
    (begin,) = _PLACE.unpack_from(raw_entries)
    on_disk = log_end - begin > transfer.memory
    if on_disk and log_end - _PLACE.unpack_from(raw_entries, len(raw_entries) - ENTRY_SIZE)[0] <= transfer.memory:
        return None  # messages in memory have other limits
    max_count, max_bytes = transfer.most[on_disk]
    batch = records_of(log, name, queue_offset, raw_entries, max_count, max_bytes, joined, checked)
    if batch is None:
        return None
    messages, total = batch
    return ReadResult(GetStatus.FOUND, messages, queue_offset + len(messages), low, high, total)


def records_of(
    log: CommitLog,
    name: QueueName,
    queue_offset: int,
    raw_entries: bytes,
    max_count: int = sys.maxsize,
    max_bytes: int = sys.maxsize,
    joined: bool = False,
    checked: bool = False,
) -> tuple[Sequence[StoredMessage], int] | None:
    """Return the messages of the first packed entries, from ``queue_offset`` on, and their bytes; at least one message.

    Return None unless they are in one file of the log, in order, and each is `is_usual`. With ``checked``, pure Python
    compares the bodies now.
    """
    (begin,), (last,) = _PLACE.unpack_from(raw_entries), _PLACE.unpack_from(raw_entries, len(raw_entries) - ENTRY_SIZE)
    file_size, sequence = log.file_size, log.sequence
    start = begin - begin % file_size
    file = sequence.mapped.get(start) or sequence.file_at(start)
    if file is None:
        return None
    limit = min(log.end, start + file_size)
    log._note_looks(begin, last, len(raw_entries) // ENTRY_SIZE)
    if _pull is not None:
        batch: Any = _pull(raw_entries, file.buffer, start, limit, max_count, max_bytes, *name, queue_offset, joined)
        if batch is not None:
            if not joined:
                return batch  # type: ignore[no-any-return]
            data, count = batch
            return StoredRecords((data,), count), len(data)
    return _cut_out(raw_entries, file.buffer, start, limit, (max_count, max_bytes), name, queue_offset, checked)


class _UncheckedMessage(StoredMessage):
    """A message that pure Python has read, whose body is compared with its checksum when it is used."""

    __slots__ = ()

    @property
    @override
    def body(self) -> bytes:
        """The body as sent.

        Raises:
            BodyChecksumError: The body does not match its checksum.
        """
        raw = self.raw
        checksum, flags, size = _unpack_checksum(raw)
        if flags & _NOT_PLAIN or has_own_checksum(raw):
            self._check_body()
            return super().body
        body = raw[_BODY_AT : _BODY_AT + size]
        if record_format.body_checksum(body) != checksum:
            self._check_body()
        return body

    @override
    def _check_body(self) -> None:
        """Compare the body with its checksum, and the record with one of its own.

        Raises:
            RecordError: It does not match.
        """
        try:
            record_format.check_record(self.raw, 0, len(self.raw), check_body=True)
        except RecordError as error:
            what = f"{error.reason}, in the record at {self.physical_offset}; {ADVICE}"
            raise type(error)(what, error.position) from None


def _cut_out(
    raw_entries: bytes,
    buffer: Buffer,
    start: int,
    limit: int,
    limits: tuple[int, int],
    name: QueueName,
    queue_offset: int,
    checked: bool,
) -> tuple[Sequence[StoredMessage], int] | None:
    """Return the messages of the first entries and their bytes, None if anything is unusual.

    ``buffer`` is the file of the log that begins at ``start``; its records end at ``limit``. ``limits`` are the most
    messages and bytes.
    """
    max_count, max_bytes = limits
    places, sizes = places_and_sizes(raw_entries[: max_count * ENTRY_SIZE])
    total = sum(sizes)
    if total > max_bytes:
        count = len(sizes)
        while total > max_bytes and count > 1:
            count -= 1
            total -= sizes[count]
        places, sizes = places[:count], sizes[:count]
    if places[0] < start or places[-1] + sizes[-1] > limit:
        return None
    begin, size, count = places[0], sizes[0], len(sizes)
    end = begin + count * size
    records: Sequence[bytes]
    try:
        if count > 1 and sizes == (size,) * count and size > 0 and places == (*range(begin, end, size),):
            records = _cut_row(size, count)(buffer[begin - start : end - start])
        else:
            records = [buffer[place - start : place - start + size] for place, size in zip(places, sizes, strict=True)]
        if CORE.module is not None:  # for memory files, which it does not read
            are_usual = all(map(is_usual, records, places, itertools.count(queue_offset), itertools.repeat(name)))
            return ([*map(StoredMessage, records)], total) if are_usual else None
        if not _are_usual(records, places, sizes, name, queue_offset, checked):
            return None
    except struct.error:  # an entry leads out of the file, or to no record
        return None
    if checked and len(records) > 1:
        return StoredRecords(records), total
    return [*map(StoredMessage if checked else _UncheckedMessage, records)], total


@lru_cache(maxsize=64)
def _cut_row(size: int, count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Return what cuts records of one size in a row apart, in half the time that a slice of each takes."""
    return struct.Struct(f"{size}s" * count).unpack


def _are_usual(
    records: Sequence[bytes],
    places: Sequence[int],
    sizes: Sequence[int],
    name: QueueName,
    queue_offset: int,
    checked: bool,
) -> bool:
    """Return whether each record from ``queue_offset`` on is a usual one, as `is_usual` says.

    That is inlined, because it runs for each message. A record is unpacked as if its body were as long as that of the
    record before it with this size; `is_usual` compares those with which that is not so.

    Raises:
        struct.error: A record ends before its parts do.
    """
    (topic, queue_id), before, body_size, crc32 = name, None, 0, record_format.crc32
    for raw, place, size in zip(records, places, sizes):  # noqa: B905 of one length, and quicker so
        if size != before:
            before = size
            (body_size,) = _unpack_body_size(raw)
            usual_head, usual_end, unpack = _usual_parts(topic, size, body_size, checked)
        head, checksum, own_id, own_offset, own_place, own_body_size, body, body_end, last = unpack(raw)
        if head != usual_head:
            return False
        if (
            own_place != place
            or own_offset != queue_offset
            or own_id != queue_id
            or own_body_size != body_size
            or body_end != usual_end
            or (checked and (crc32(body) & 0x7FFFFFFF != checksum or (last == 2 and has_own_checksum(raw))))
        ) and not is_usual(raw, place, queue_offset, name):
            return False
        queue_offset += 1
    return True


@lru_cache(maxsize=4096)
def _usual_parts(
    topic: str, size: int, body_size: int, checked: bool
) -> tuple[int, bytes, Callable[[bytes], tuple[Any, ...]]]:
    """Return what usual records of these sizes begin with, what follows their bodies, and a function.

    It unpacks `_OWN`, the body, what follows it, and the last byte. The body is empty unless ``checked``.

    Raises:
        struct.error: There are no such records.
    """
    end = usual_tail(topic, size - body_size)
    properties_size = size - _BODY_AT - body_size - len(end)
    body = f"{body_size}s" if checked else f"0s{body_size}x"
    last = f"{properties_size - 1}xB" if properties_size else "0s"
    return size << 32 | _MAGIC, end, struct.Struct(f"{_OWN}{body}{len(end)}s{last}").unpack


def _read_candidates(
    checks: EntryChecks,
    queue: ConsumeQueue,
    name: QueueName,
    entries: tuple[Sequence[int], Sequence[int]],
    candidates: Sequence[int],
    max_messages: int,
    matching: MessageFilter | None,
    result: ReadResult,
) -> None:
    """Read with a filter, or over deleted messages; end before a damaged one, which the next read raises."""
    messages: list[StoredMessage] = []
    result.messages = messages
    (places, sizes), transfer = entries, checks.transfer
    log_end, first, count = checks.log.end, result.next_offset, len(places)
    looked_at = 0
    for at in [*candidates, count]:
        if messages and looked_at < count:
            max_count, max_bytes = transfer.limits(log_end, places[looked_at])
            if len(messages) >= min(max_count, max_messages):
                break
            # An entry that does not match still ends the read if its message would not fit.
            room = max_bytes - result.total_size
            if max(sizes[looked_at : at + 1]) > room:
                looked_at += next(number for number, size in enumerate(sizes[looked_at:]) if size > room)
                break
        looked_at = at
        if at == count:
            break
        try:
            raw = checks.record(queue, name, first + at, places[at], sizes[at])
        except CorruptionError:
            if not at:  # else the next read begins with it
                raise
            break
        looked_at += 1
        if raw is None:
            if not messages and sizes[at] != HOLE_SIZE:
                result.status = GetStatus.MESSAGE_WAS_REMOVING
            continue
        message = StoredMessage(raw)
        if matching is not None and not matching.match_message(message):
            if not messages:
                result.status = GetStatus.NO_MATCHED_MESSAGE
            continue
        messages.append(message)
        result.total_size += len(raw)
        result.status = GetStatus.FOUND
    result.next_offset += looked_at


def _read_batches(
    checks: EntryChecks,
    queue: ConsumeQueue,
    name: QueueName,
    queue_offset: int,
    max_messages: int,
    matching: MessageFilter | None,
    low: int,
    high: int,
) -> ReadResult:
    """Read a queue in which a record can be several messages."""
    result = ReadResult(GetStatus.NO_MATCHED_MESSAGE, [], queue_offset, low, high)
    raw = queue.read(queue_offset, max(max_messages, 1))
    count = len(raw) // ENTRY_SIZE
    candidates = set(range(count) if matching is None else matching_entries(queue, raw, matching))
    log, transfer, messages, last = checks.log, checks.transfer, list[StoredMessage](), -1
    result.messages = messages
    for number, (physical_offset, size, _) in enumerate(ENTRY.iter_unpack(raw)):
        max_count, max_bytes = transfer.limits(log.end, physical_offset)
        if messages and (len(messages) >= max_count or result.total_size >= max_bytes):
            break
        if number in candidates and physical_offset != last:
            try:
                record = checks.record(queue, name, queue_offset + number, physical_offset, size)
                stored = [] if record is None else unwrapped(log, StoredMessage(record))
            except CorruptionError:
                if not number:
                    raise
                break
            last = physical_offset
        result.next_offset += 1
        if number not in candidates or not stored:
            continue
        inner = queue_offset + number - stored[0].queue_offset if len(stored) > 1 else 0
        message = stored[inner] if 0 <= inner < len(stored) else stored[0]
        if matching is None or matching.match_message(message):
            messages.append(message)
            result.total_size += message.size
    if messages:
        result.status = GetStatus.FOUND
    return result


def unwrapped(log: CommitLog, message: StoredMessage) -> list[StoredMessage]:
    """Return the messages of a record, as `inner_messages` does.

    Raises:
        CorruptionError: The body is not a batch.
    """
    if not is_batch(message):
        return [message]
    from librmq.message.batch import inner_messages  # 5.x alone stores such records

    try:
        return inner_messages(message)
    except RecordError as error:
        at = message.physical_offset
        raise CorruptionError(log.sequence.path_at(at), at, "record", error.reason) from None


def matching_entries(queue: ConsumeQueue, raw: bytes, matching: MessageFilter) -> list[int]:
    """Return the numbers of the entries that can match."""
    tag_codes: bytes | None = getattr(matching, "_packed_codes", None)
    if _with_codes is not None and tag_codes is not None:
        with_codes: list[int] | None = _with_codes(raw, tag_codes)
        if with_codes is not None:
            return with_codes
    codes = np.frombuffer(raw, entry_dtype())["tags_code"].astype(np.int64)
    # Methods of arrays, of which a read of few entries calls each once, take half the time of numpy's functions.
    if not len(codes) or codes.item(codes.argmin()) > LAST_EXT_ADDRESS:
        numbers: list[int] = matching.match_entries(codes, None).nonzero()[0].tolist()
        return numbers
    addresses = np.flatnonzero(codes <= LAST_EXT_ADDRESS)
    units = [queue.ext_unit(code) for code in codes.tolist()]
    unknown = [at for at in addresses.tolist() if units[at] is None]
    for at, unit in enumerate(units):
        if unit is not None:
            codes[at] = unit.tags_code
    matches = matching.match_entries(codes, units)
    matches[unknown] = True  # only the message itself decides
    return np.flatnonzero(matches).tolist()
