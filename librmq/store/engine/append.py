"""Append messages: make records of them, write them to the log, collect the entries and keys that follow.

The path of a single message is one flat function, since each call costs every message; its checksum and encoding are
made outside the lock. Mirrors 4.9.4's ``CommitLog.asyncPutMessage`` and ``asyncPutMessages``.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, repeat
from typing import Final, NamedTuple, TypedDict, Unpack

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY
from librmq.errors import MessageIllegalError, StoreIOError
from librmq.message import record as record_format
from librmq.message.batch import BATCH_FIXED_SIZE, check_batch
from librmq.message.delay_levels import SCHEDULE_TOPIC, DelayLevels, queue_id_of_level
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import validate_topic
from librmq.runtime.critical import critical
from librmq.store.engine.dispatch import Dispatcher, Lane, has_queue_entry, is_indexed, parse_level
from librmq.store.engine.group_commit import Acknowledgement, GroupCommit
from librmq.store.engine.housekeeping import Housekeeping
from librmq.store.engine.open_store import Parts

__all__ = ["AppendFields", "AppendResult", "Appends"]

_LONGEST_PROPERTIES: Final = record_format.MAX_PROPERTIES_SIZE
_TRANSACTION_MASK: Final = record_format.TRANSACTION_MASK
_MAGIC: Final = record_format.MESSAGE_MAGIC
_BATCH: Final = Dispatcher.BATCH
_DELAYS_KEPT: Final = 1024
_CTRL_C_WAITS_S: Final = 0.05
_TWO_HOSTS: Final = 16  # the bytes of two with IPv4 addresses
_pack_entry = ENTRY.pack
_pack_short = struct.Struct(">H").pack
_pack_header = {hosts: header.pack for hosts, header in record_format.HEADERS.items()}
# The same for a copy, which takes over as bytes what stays: the flag; sys flag, born time and born host; store host,
# reconsume times and prepared offset.
_pack_copy = {
    hosts: struct.Struct(
        f">IIII{record_format.span('flag', 'flag')}sqq"
        f"{record_format.span('sys_flag', 'born_host', hosts)}sq"
        f"{record_format.span('store_host', 'prepared_offset', hosts)}si"
    ).pack
    for hosts in record_format.HEADERS
}


class AppendResult(NamedTuple):
    """Where a message went."""

    physical_offset: int
    size: int
    """Bytes of the record."""
    queue_offset: int
    store_timestamp_ms: int
    store_host: bytes
    """As it stands in the record: address and port."""

    @property
    def offset_id(self) -> str:
        """Offset id of the message: store host and physical offset in hexadecimal."""
        return record_format.offset_message_id(record_format.decode_host(self.store_host), self.physical_offset)


_new_result = tuple.__new__


class AppendFields(TypedDict, total=False):
    """The keywords of `MessageStore.append` that `MessageStore.submit` passes on."""

    born_timestamp_ms: int | None
    born_host: record_format.Host | bytes | None
    store_host: record_format.Host | bytes | None
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: int
    properties_raw: bytes | None


class Copy(NamedTuple):
    """A record to append once more, made by `prepare_again`."""

    lane: Lane
    size: int
    flag: bytes
    to_born_host: bytes
    """Sys flag, born time and born host."""
    from_store_host: bytes
    """Store host, reconsume times and prepared offset."""
    checksum: int
    body_size: int
    tail: bytes
    """All from the body on."""
    properties_raw: bytes
    tags_code: int
    unique_key: str | None
    keys: str | None


class Appends:
    """The appending methods of `MessageStore`. Thread-safe."""

    log: CommitLog
    clock: Clock
    levels: DelayLevels
    _accepts: bool
    _commit: GroupCommit
    _delays: dict[str, tuple[int, str, int]]
    """What `_delay` has found."""
    _compress_from: int
    _dispatcher: Dispatcher
    _host: bytes
    _housekeeping: Housekeeping
    _is_deleting: bool
    _lanes: dict[tuple[str, int], Lane]
    _largest_body: int
    _lock: threading.Lock
    _now_ms: Callable[[], int]
    _parts: Parts | None
    _sync: bool

    def _refusal(self) -> Exception:
        """Return the error that says why nothing can be appended."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Wake housekeeping: there is something to flush, or to make ready."""
        raise NotImplementedError

    def append(  # noqa: C901, PLR0913 (the hot path; a keyword for each field of a record)
        self,
        message: Message,
        queue_id: int = 0,
        *,
        born_timestamp_ms: int | None = None,
        born_host: record_format.Host | bytes | None = None,
        store_host: record_format.Host | bytes | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        properties_raw: bytes | None = None,
        wait: bool = True,
    ) -> AppendResult:
        """Append a message to the queue ``queue_id`` of its topic.

        Returns when it stands in the log's page cache (it survives the process), with ``durability="sync"`` when it has
        reached the device (it survives the machine), unless ``wait`` is false; producers that wait together share one
        flush.

        A message with a delay level goes to the schedule topic, unless it is prepared or a rollback. The keywords are
        the record's fields that a broker fills in: the times in ms, hosts as (address, port) or as a record has them;
        both hosts are the store's and the born time is now unless given. ``properties_raw`` stores the bytes as they
        are instead of encoding the message's properties; a message that has properties all the same vouches that the
        bytes say them.

        `MessageIllegalError` before a byte is written: topic, body, properties or record too long, a field out of
        range.
        """
        topic, body = message.topic, message.body
        if message._delays is not None:
            raise MessageIllegalError("delay, deliver_at: a broker resolves them; a store takes a delay_level")
        properties: Mapping[str, str] = message.properties
        waits_ms: int | None = None
        if properties_raw is None:
            if "DELAY" in properties and sys_flag & _TRANSACTION_MASK in (0, record_format.TRANSACTION_COMMIT):
                text = properties["DELAY"]
                level, name, level_ms = self._delays.get(text) or self._delay(text)
                if level > 0:
                    properties = {**properties, "DELAY": name, "REAL_TOPIC": topic, "REAL_QID": str(queue_id)}
                    topic, queue_id, waits_ms = SCHEDULE_TOPIC, queue_id_of_level(level), level_ms
            raw = record_format.encode_properties(properties)
        else:
            raw = properties_raw
            properties = properties or record_format.decode_properties(raw)
        lane = self._lanes.get((topic, queue_id)) or self._lane(topic, queue_id)
        body_size = len(body)
        if body_size >= self._compress_from and not sys_flag & record_format.COMPRESSED:
            body, sys_flag = (
                record_format.compress_body(body),
                sys_flag | record_format.COMPRESSED | record_format.COMPRESSION_ZLIB,
            )
            body_size = len(body)
        if body_size > self._largest_body or len(raw) > _LONGEST_PROPERTIES:
            raise self._too_long(body, raw)
        get = properties.get
        unique_key, keys, tags = get("UNIQ_KEY"), get("KEYS"), get("TAGS")
        tags_code = record_format.tags_code(tags) if tags else 0
        if topic == SCHEDULE_TOPIC and waits_ms is None:
            waits_ms = self._waits_ms(properties)
        stored_at = born_at = self._host
        counted = True
        if store_host is not None:
            stored_at = store_host if type(store_host) is bytes else record_format.encode_host(store_host)
        if born_host is not None:
            born_at = born_host if type(born_host) is bytes else record_format.encode_host(born_host)
        hosts_size = len(born_at) + len(stored_at)
        if sys_flag or hosts_size > _TWO_HOSTS:
            sys_flag |= _host_flags(sys_flag, born_at, stored_at)
            counted = has_queue_entry(sys_flag)
            if not is_indexed(sys_flag):
                unique_key = keys = None
        checksum = zlib.crc32(body) & 0x7FFFFFFF
        tail = b"".join((body, lane.topic_field, _pack_short(len(raw)), raw))
        size = 72 + hosts_size + len(tail)
        log, dispatcher = self.log, self._dispatcher
        try:
            with self._lock:
                if not self._accepts:
                    raise self._refusal()
                records = dispatcher.records
                if len(records) >= _BATCH or dispatcher.writing_at >= 0:
                    self._catch_up()  # now: should a full disk refuse it, nothing was written
                    records = dispatcher.records
                now = self._now_ms()
                physical_offset = log.end
                has_room = physical_offset + size <= log.sure
                if not has_room:
                    physical_offset = log.claim(size)
                queue_offset = lane.next_queue_offset if counted else 0
                header = _pack_header[sys_flag & 48](
                    size, _MAGIC, checksum, queue_id, message.flag, queue_offset, physical_offset, sys_flag,
                    now if born_timestamp_ms is None else born_timestamp_ms, born_at,
                    now, stored_at, reconsume_times, prepared_transaction_offset, body_size,
                )  # fmt: skip
                if counted:
                    if waits_ms is not None:
                        tags_code = now + waits_ms  # when it is to be delivered
                    if lane.queue.ext is not None:  # before the record: should it fail, there is none without an entry
                        with critical:
                            tags_code = dispatcher.add_unit(lane, tags_code, now, raw)
                if not has_room:
                    with critical:
                        log.make_room(size)
                dispatcher.writing_at = physical_offset
                log.copy_in(header + tail, size)
                if counted:
                    lane.next_queue_offset = queue_offset + 1
                    pending = lane.pending
                    if not pending:
                        lane.pending_from = queue_offset
                        dispatcher.lanes.append(lane)
                    pending.append(_pack_entry(physical_offset, size, tags_code))
                records.append((physical_offset, now, lane.prefix_hash, unique_key, keys))
                dispatcher.writing_at = -1
        except struct.error as error:
            raise MessageIllegalError(f"a field of the record is out of range: {error}") from None
        if physical_offset + size >= self._housekeeping.alarm:
            self._wake()
        if self._sync:
            if wait:
                self._commit.reach(physical_offset + size)
            else:
                self._wake()
        return _new_result(AppendResult, (physical_offset, size, queue_offset, now, stored_at))

    def append_again(  # noqa: PLR0913 (a keyword for each field of a record)
        self,
        record: StoredMessage,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        *,
        raw: bytes | None = None,
        flag: int | None = None,
        sys_flag: int | None = None,
        reconsume_times: int | None = None,
        prepared_transaction_offset: int = 0,
    ) -> AppendResult:
        """Append the message of a record once more, with these properties, to this queue of this topic.

        Body, born time and hosts are the record's, flags and counts too unless given. ``raw`` are the properties as
        they are to be stored, whatever they say of a delay; None encodes them as `append` does. Returns at once,
        whatever the durability. Raises what `append` does, and `RecordError` for a record that is none.
        """
        data = record.raw
        begin, end, _, _, _, _ = record.frame
        header = record_format.HEADERS[data[record_format.SYS_FLAG_AT + 3] & record_format.HOSTS_V6].unpack_from(data)
        _, _, _, _, own_flag, _, _, own_sys_flag, born_timestamp_ms, born_at, _, stored_at, times, _, _ = header
        message = Message._of(topic, data[begin:end], own_flag if flag is None else flag, dict(properties))
        return self.append(
            message,
            queue_id,
            born_timestamp_ms=born_timestamp_ms,
            born_host=born_at,
            store_host=stored_at,
            sys_flag=own_sys_flag if sys_flag is None else sys_flag,
            reconsume_times=times if reconsume_times is None else reconsume_times,
            prepared_transaction_offset=prepared_transaction_offset,
            properties_raw=raw,
            wait=False,
        )

    def prepare_again(
        self,
        record: StoredMessage,
        topic: str,
        queue_id: int,
        raw: bytes,
        unique_key: str | None,
        keys: str | None,
        tags: str | None,
    ) -> Copy:
        """Return the message of a record as `append_copies` takes it, for a queue of a topic.

        Its properties are stored as ``raw``; the caller vouches that they say these keys and tags. The rest stays.

        `MessageIllegalError` for what can't be appended, `RecordError` for a record that is none.
        """
        data = record.raw
        begin, end, _, _, _, _ = record.frame
        lane = self._lanes.get((topic, queue_id)) or self._lane(topic, queue_id)
        body = data[begin:end]
        raw_size = len(raw)
        size = end + len(lane.topic_field) + 2 + raw_size
        if raw_size > _LONGEST_PROPERTIES or size + record_format.BLANK_SIZE > self.log.file_size:
            raise MessageIllegalError(f"a record of {size} bytes, {raw_size} of them properties, can't be stored")
        bits = data[39]
        born_end = 68 if bits & record_format.BORN_HOST_V6 else 56
        if bits & _TRANSACTION_MASK and not is_indexed(bits):
            unique_key = keys = None
        return _new_result(
            Copy,
            (
                lane, size, data[16:20], data[36:born_end], data[born_end + 8 : begin - 4],
                zlib.crc32(body) & 0x7FFFFFFF, end - begin,
                b"".join((body, lane.topic_field, _pack_short(raw_size), raw)), raw,
                record_format.tags_code(tags) if tags else 0, unique_key, keys,
            ),
        )  # fmt: skip

    def append_copies(self, copies: Sequence[Copy]) -> list[AppendResult]:
        """Append what `prepare_again` made, side by side. Returns at once, whatever the durability.

        The results are fewer than the copies where the disk got full on the way: those of the first, which were
        written. Raises what `append` does, where none was.
        """
        results: list[AppendResult] = []
        with self._lock:
            now = self._admit()
            while len(results) < len(copies):
                try:
                    self._append_to_file(copies[len(results) :], now, results)
                except StoreIOError:
                    if not results:
                        raise
                    break
            self._write_full_batch()
        if self._sync or (results and results[-1].physical_offset + results[-1].size >= self._housekeeping.alarm):
            self._wake()
        return results

    def _append_to_file(self, copies: Sequence[Copy], now: int, results: list[AppendResult]) -> None:
        """Append as many as fit into one file of the log, and add their results."""
        log, dispatcher = self.log, self._dispatcher
        physical_offset = log.claim(copies[0].size)
        upto = physical_offset - physical_offset % log.file_size + log.file_size - record_format.BLANK_SIZE
        parts: list[bytes] = []
        entries_of: dict[Lane, list[bytes]] = {}
        entries: list[bytes] = []
        last: Lane | None = None
        next_queue_offset = 0
        records: list[tuple[int, int, int, str | None, str | None]] = []
        made: list[AppendResult] = []
        for (
            lane, size, flag, to_born_host, from_store_host, checksum, body_size, tail, raw, code, unique_key, keys
        ) in copies:  # fmt: skip
            if physical_offset + size > upto:
                break
            if lane is not last:
                last, entries = lane, entries_of.setdefault(lane, [])
                next_queue_offset = lane.next_queue_offset + len(entries)
            bits = to_born_host[3]
            if bits & _TRANSACTION_MASK and not has_queue_entry(bits):
                queue_offset = 0
            else:
                queue_offset = next_queue_offset
                next_queue_offset += 1
                if lane.queue.ext is not None:
                    with critical:
                        code = dispatcher.add_unit(lane, code, now, raw)
                entries.append(_pack_entry(physical_offset, size, code))
            parts += (
                _pack_copy[bits & 48](
                    size, _MAGIC, checksum, lane.queue_id, flag, queue_offset, physical_offset,
                    to_born_host, now, from_store_host, body_size,
                ),
                tail,
            )  # fmt: skip
            records.append((physical_offset, now, lane.prefix_hash, unique_key, keys))
            made.append(_new_result(AppendResult, (physical_offset, size, queue_offset, now, from_store_host[:-12])))
            physical_offset += size
        data = b"".join(parts)
        self._write(data, list(entries_of.items()), records)
        results += made

    def _write(
        self,
        data: bytes,
        entries_of: Iterable[tuple[Lane, list[bytes]]],
        records: Iterable[tuple[int, int, int, str | None, str | None]],
    ) -> None:
        """Write records side by side, and note what follows from them; `append` has the same for one."""
        log, dispatcher = self.log, self._dispatcher
        size = len(data)
        if log.end + size > log.sure:
            with critical:
                log.make_room(size)
        dispatcher.writing_at = log.end
        log.copy_in(data, size)
        for lane, entries in entries_of:
            if entries:
                if not lane.pending:
                    lane.pending_from = lane.next_queue_offset
                    dispatcher.lanes.append(lane)
                lane.next_queue_offset += len(entries)
                lane.pending += entries
        dispatcher.records += records
        dispatcher.writing_at = -1

    def _write_full_batch(self) -> None:
        """Write what follows from the records, where they are many."""
        if len(self._dispatcher.records) >= _BATCH:
            with suppress(StoreIOError):  # the messages stand in the log; the next append is told
                self._dispatcher.drain()

    def append_batch(  # noqa: PLR0913 (a keyword for each field of a record)
        self,
        messages: Sequence[Message],
        queue_id: int = 0,
        *,
        properties: Mapping[str, str] | None = None,
        born_timestamp_ms: int | None = None,
        born_host: record_format.Host | None = None,
        store_host: record_format.Host | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        wait: bool = True,
    ) -> list[AppendResult]:
        """Append messages of one topic to one queue, all or none, side by side in one file of the log.

        ``properties`` are the batch's own, appended to each message's; ``wait`` is as in `append`.
        `MessageIllegalError` before a byte is written: an empty batch, topics or wait flags that differ, a delay, a
        transaction flag, or more than ``max_message_size`` bytes as a client encodes it;
        `librmq.message.batch.split_batch` cuts what is larger.
        """
        check_batch(messages)
        if sys_flag & _TRANSACTION_MASK:
            raise MessageIllegalError("a batch can't be part of a transaction")
        if properties and parse_level(properties.get(record_format.PROPERTY_DELAY)) > 0:
            raise MessageIllegalError("a batch can't be delayed")
        added = record_format.encode_properties(properties) if properties else b""
        lane = self._lanes.get((messages[0].topic, queue_id)) or self._lane(messages[0].topic, queue_id)
        stored_at = self._host if store_host is None else record_format.encode_host(store_host)
        born_at = self._host if born_host is None else record_format.encode_host(born_host)
        sys_flag |= _host_flags(sys_flag, born_at, stored_at)
        fixed = 74 + len(born_at) + len(stored_at) + len(lane.topic_field)
        # Column by column: what is one call for all of them costs each message the least.
        found = [message.properties for message in messages]
        raws = list(map(record_format.encode_properties, found))
        bodies = [message.body for message in messages]
        body_sizes, raw_sizes = list(map(len, bodies)), list(map(len, raws))
        encoded_size = sum(body_sizes) + sum(raw_sizes) + BATCH_FIXED_SIZE * len(messages)
        if properties:
            raws = [record_format.join_properties(raw, added) for raw in raws]
            found = list(map(record_format.decode_properties, raws))
            raw_sizes = list(map(len, raws))
        if max(body_sizes) > self._largest_body or max(raw_sizes) > _LONGEST_PROPERTIES:
            raise self._too_long(max(bodies, key=len), max(raws, key=len))
        if encoded_size > self._largest_body:
            raise MessageIllegalError(
                f"the batch has {encoded_size} bytes as a client encodes it, at most {self._largest_body} are taken: "
                f"split it"
            )
        sizes = [fixed + body_size + raw_size for body_size, raw_size in zip(body_sizes, raw_sizes, strict=True)]
        checksums = [zlib.crc32(body) & 0x7FFFFFFF for body in bodies]
        flags = [message.flag for message in messages]
        unique_keys = [each.get("UNIQ_KEY") for each in found]
        keys = [each.get("KEYS") for each in found]
        tags_codes = [record_format.tags_code(each.get("TAGS")) for each in found]
        log, dispatcher = self.log, self._dispatcher
        try:
            with self._lock:
                now = self._admit()
                born = now if born_timestamp_ms is None else born_timestamp_ms
                places = list(accumulate(sizes, initial=log.claim(sum(sizes))))
                end = places.pop()
                queue_offsets = range(lane.next_queue_offset, lane.next_queue_offset + len(messages))
                headers = map(
                    _pack_header[sys_flag & 48],
                    sizes, repeat(_MAGIC), checksums, repeat(queue_id), flags, queue_offsets, places, repeat(sys_flag),
                    repeat(born), repeat(born_at), repeat(now), repeat(stored_at), repeat(reconsume_times), repeat(0),
                    body_sizes,
                )  # fmt: skip
                parts = zip(headers, bodies, repeat(lane.topic_field), map(_pack_short, raw_sizes), raws)
                data = b"".join(chain.from_iterable(parts))
                if lane.queue.ext is not None:
                    with critical:
                        tags_codes = [dispatcher.add_unit(lane, *unit) for unit in zip(tags_codes, repeat(now), raws)]
                entries = list(map(_pack_entry, places, sizes, tags_codes))
                records = zip(places, repeat(now), repeat(lane.prefix_hash), unique_keys, keys)
                results = zip(places, sizes, queue_offsets, repeat(now), repeat(stored_at))
                self._write(data, [(lane, entries)], records)
                self._write_full_batch()
        except struct.error as error:
            raise MessageIllegalError(f"a field of the record is out of range: {error}") from None
        if end >= self._housekeeping.alarm:
            self._wake()
        if self._sync:
            if wait:
                self._commit.reach(end)
            else:
                self._wake()
        return list(map(_new_result, repeat(AppendResult), results))

    def _admit(self) -> int:
        """Return the store time of records to be written now, under the lock. `append` has this inline.

        Raises what says why nothing can be appended, or what writing due entries raises.
        """
        if not self._accepts:
            raise self._refusal()
        if len(self._dispatcher.records) >= _BATCH or self._dispatcher.writing_at >= 0:
            self._mend()
            self._dispatcher.drain()
        return self._now_ms()

    def _catch_up(self) -> None:
        """Repair what an interrupted append has left, and write entries that are due."""
        self._mend()
        if len(self._dispatcher.records) >= _BATCH:
            self._dispatcher.advance()

    def _mend(self) -> None:
        """Repair what an interrupted append has left, under the lock, before anything derived is used."""
        if self._dispatcher.writing_at >= 0:
            assert self._parts is not None
            with critical:
                self._parts.derive_again()

    def submit(
        self, message: Message, queue_id: int = 0, **fields: Unpack[AppendFields]
    ) -> Acknowledgement[AppendResult]:
        """Append like `append` with the same keywords, but return at once, whatever the durability.

        The acknowledgement completes when the message has reached the device: soon by itself with
        ``durability="sync"``, else with the next flush; its ``wait`` hurries.
        """
        result = self.append(message, queue_id, wait=False, **fields)
        return Acknowledgement(result, self._commit, result.physical_offset + result.size)

    def wait_for(self, result: AppendResult) -> None:
        """Return when a message that `submit` took has reached the device; `FlushFailedError` if that is not known."""
        self._commit.reach(result.physical_offset + result.size)

    def is_writing(self) -> bool:
        """Return whether a call appends at this moment; a deletion by retention does not count."""
        return self._lock.locked() and not self._is_deleting

    def is_free_within(self, seconds: float) -> bool:
        """Wait until no call appends, or for ``seconds``; return whether none did."""
        deadline = self.clock.monotonic() + seconds
        while True:
            left = deadline - self.clock.monotonic()
            with critical:  # a lock that Ctrl-C takes from view is never given back
                if self._lock.acquire(timeout=min(max(left, 0), _CTRL_C_WAITS_S)):
                    self._lock.release()
                    return True
            if left <= 0:
                return False

    def _lane(self, topic: str, queue_id: int) -> Lane:
        """Return the lane of a queue that is written for the first time since opening."""
        validate_topic(topic)
        if isinstance(queue_id, bool) or not hasattr(queue_id, "__index__") or not 0 <= queue_id < 1 << 31:
            raise MessageIllegalError(f"queue id: expected a whole number from 0 to 2147483647, found {queue_id!r}")
        if not self._accepts:
            raise self._refusal()
        with self._lock:
            assert self._parts is not None
            with critical:
                return self._parts.lane(topic, queue_id)

    def _delay(self, text: str) -> tuple[int, str, int]:
        """Return the level that counts for a message's delay, its name, and its length in ms."""
        level = self.levels.cap(parse_level(text))
        found = level, str(level), self.levels.delay_ms(level)
        if len(self._delays) < _DELAYS_KEPT:
            self._delays[text] = found
        return found

    def _waits_ms(self, properties: Mapping[str, str]) -> int | None:
        """Return how many ms a message of the schedule topic waits by its level; None if it has none."""
        level = self.levels.cap(parse_level(properties.get("DELAY")))
        return self.levels.delay_ms(level) if level > 0 else None

    def _too_long(self, body: bytes, raw: bytes) -> MessageIllegalError:
        if len(body) > self._largest_body:
            return MessageIllegalError(f"the body has {len(body)} bytes, at most {self._largest_body} are taken")
        return MessageIllegalError(f"the properties have {len(raw)} bytes, at most {_LONGEST_PROPERTIES} are taken")


def _host_flags(sys_flag: int, born_at: bytes, stored_at: bytes) -> int:
    """Return the bits that tell hosts of 16 bytes; refuse a ``sys_flag`` that claims more than the hosts."""
    flags = (record_format.BORN_HOST_V6 if len(born_at) > 8 else 0) | (
        record_format.STORE_HOST_V6 if len(stored_at) > 8 else 0
    )
    if sys_flag & record_format.HOSTS_V6 & ~flags:
        raise MessageIllegalError(f"sys flag {sys_flag:#x} says that a host is IPv6, which it is not")
    return flags
