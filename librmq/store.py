"""The message store: log, queues, key index and checkpoint, composed.

Mirrors 4.9.4's ``DefaultMessageStore``. A message is acknowledged when its record stands in the log (in the page cache:
it survives the process, not the machine; `MessageStore.flush` makes it survive the machine). Queue entries and keys are
derived from the log and can always be rebuilt.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from librmq import codec, layout, recovery
from librmq.checkpoint import Checkpoint, clear_abort, has_abort
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.closedstate import QueueTable, write_closed_state
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.dispatch import Dispatcher, Lane, has_queue_entry, is_indexed, parse_level
from librmq.errors import (
    ConfigError,
    CorruptionError,
    FlushFailedError,
    MessageIllegalError,
    ReadOnlyError,
    StoreClosedError,
    StoreIOError,
)
from librmq.files import DiskFiles, FileLock, Files, make_folders
from librmq.flushing import Acknowledgement, GroupCommit, flush_all
from librmq.following import Following
from librmq.housekeeping import Background, Housekeeping
from librmq.keyindex import KeyIndex
from librmq.levels import SCHEDULE_TOPIC, DelayLevels, queue_id_of_level
from librmq.message import Message, StoredMessage
from librmq.reading import GetStatus, MessageFilter, ReadResult, Transfer, read_queue
from librmq.reconcile import Damage
from librmq.retention import Retention
from librmq.snapshot import Snapshot, snapshot
from librmq.topics import validate_topic
from librmq.verify import Verdict, verify_parts

if TYPE_CHECKING:
    from librmq.filter import Registrations, SqlFilter, WatchedPredicate

__all__ = ["AppendResult", "GetStatus", "MessageFilter", "MessageStore", "ReadResult"]

_LONGEST_PROPERTIES: Final = codec.MAX_PROPERTIES_SIZE
_TRANSACTION_MASK: Final = codec.TRANSACTION_MASK
_MAGIC: Final = codec.MESSAGE_MAGIC
_BATCH: Final = Dispatcher.BATCH
_pack_entry = ENTRY.pack
_pack_short = struct.Struct(">H").pack
_pack_header = {hosts: header.pack for hosts, header in codec.HEADERS.items()}


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
        """The message id by address: store host and physical offset in hexadecimal."""
        return codec.offset_message_id(codec.decode_host(self.store_host), self.physical_offset)


_new_result = tuple.__new__


class MessageStore:
    """A store directory, opened.

    Thread-safe: producers are serialised, readers take no lock. A handle is of no use in a child process after a fork.
    """

    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    filters: Registrations | None
    """The consumer groups' filters of which bitmaps are made, where there are extension files for them."""
    _in_background: bool
    recovered: list[Damage]
    """What opening and `recover` found and cut."""

    def __init__(self) -> None:
        raise TypeError("use MessageStore.open(path)")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        read_only: bool = False,
        thorough: bool = False,
        files: Files | None = None,
        clock: Clock | None = None,
        background: bool | None = None,
        filters: Registrations | None = None,
    ) -> Self:
        """Open the store in ``path``; a new one is made where there is nothing, unless ``read_only``.

        ``config`` None takes the sizes from the files that are there, 4.9's where there are none. A store that was not
        closed cleanly is recovered as the broker would; ``thorough`` looks at all of the log and makes again what
        `recover` does. `recovered` lists what was cut. ``background`` lets a thread of the store flush and expire by
        time, from the first append on; None does so unless ``clock`` is given, else `run_due` is the caller's to call.
        ``read_only`` takes no lock and changes no byte: beside a writer it sees what is written (`refresh`), else what
        a recovery would give, in memory. ``filters`` are the groups' SQL filters, by which messages get their bitmaps
        where the store has extension files; they may change while it is open.

        `NotAStoreError` for a directory that holds something else or another kind of store, `ConfigError` for a
        configuration that disagrees with the files, `StoreLockedError` if somebody else writes to it,
        `CorruptionError` for names, lengths and damage that no crash explains: where sound records follow, they are
        cut (and kept aside, `librmq.salvage`) only if ``thorough``.
        """
        store = object.__new__(cls)
        store.filters = filters
        store._in_background = not read_only and (clock is None if background is None else background)
        store._open(os.fspath(path), config, read_only, thorough, files or DiskFiles(), clock or SystemClock())
        return store

    @classmethod
    def temporary(cls, config: StoreConfig | None = None, *, clock: Clock | None = None) -> Self:
        """Open a new store in a directory of its own that is deleted on closing; with tiny files unless told else.

        For a store that touches no disk at all: ``MessageStore.open("/store", files=MemoryFiles())``.
        """
        folder = tempfile.TemporaryDirectory(prefix="librmq-")
        store = cls.open(folder.name, config or StoreConfig.tiny(), clock=clock)
        store._temporary = folder
        return store

    def _open(
        self, path: str, config: StoreConfig | None, read_only: bool, thorough: bool, files: Files, clock: Clock
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.files = files
        self.clock = clock
        self._now_ms = clock.now_ms
        self._lock = threading.Lock()
        self._deriving = threading.RLock()  # of whoever flushes what is derived, taken before the other
        self._closed: str | None = "was not opened"
        self._accepts = False
        self._background: Background | None = None
        self.recovered = []
        self._file_lock: FileLock | None = None
        self._parts: recovery.Parts | None = None
        self._following: Following | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        kind = layout.check_kind(path, files, writable=not read_only)
        leftovers: list[Damage] = []
        try:
            if not read_only:
                if kind is layout.StoreKind.NEW:
                    make_folders(files, path)
                self._file_lock = files.lock(layout.lock_path(path))
                if thorough or has_abort(files, path):
                    leftovers = recovery.clear_leftovers(path, files)
            if config is not None:
                layout.check_config(path, config, files)
            if read_only:
                self._follow(config)
            else:
                self._set_config(config or layout.infer_config(path, files))
                self._load(thorough=thorough)
            self.recovered[:0] = leftovers
        except BaseException:
            self._release()
            raise
        self._closed = None
        self._accepts = not read_only
        _open_stores.add(self)

    def _set_config(self, config: StoreConfig) -> None:
        self.config = config
        self.levels = DelayLevels.parse(config.message_delay_level)
        self._host = codec.encode_host(codec.parse_host(config.store_host))
        self._largest_body = config.max_message_size
        self._compress_from = config.compress_from or sys.maxsize
        self._transfer = Transfer(config)
        self._sync = config.durability == "sync"

    def _load(self, *, thorough: bool = False, living: bool = False) -> None:
        """Open the parts and bring them to agree."""
        bitmaps = self.filters if self.config.enable_calc_filter_bitmap else None
        parts = recovery.load(
            self.path,
            self.config,
            self.levels,
            self.files,
            self.clock,
            writable=True,
            thorough=thorough,
            living=living,
            bitmap_of=None if bitmaps is None else bitmaps.bitmap,
        )
        self._take(parts)
        self.recovered = self.recovered + parts.cuts

    def _follow(self, config: StoreConfig | None) -> None:
        """Open the parts for reading only, beside whoever writes to them."""

        def opened(following: Following) -> None:
            self._set_config(following.config)
            self._take(following.parts)
            self.recovered = following.parts.cuts

        bitmaps = self.filters
        self._following = Following(
            self.path, config, self.files, self.clock, None if bitmaps is None else bitmaps.bitmap, opened
        )

    def _take(self, parts: recovery.Parts) -> None:
        self._parts = parts
        self.log = parts.log
        self.queues = parts.queues
        self.index = parts.index
        self.checkpoint = parts.checkpoint
        self._dispatcher = parts.dispatcher
        self._lanes = parts.lanes
        self._commit = GroupCommit(self.log.flush, self.log.end, self._on_failed_flush)
        self._settled = 0  # below this physical offset queues and index have reached the device too
        self._derived_failure: StoreIOError | None = None  # a flush of queues or index: until reopened, none counts
        self._retention = Retention(
            self.log,
            lambda: list(self.queues.values()),
            self.index,
            self.config,
            self.files,
            self.path,
            lock=self._lock,
            settled=lambda: self._settled,
            watch_disk=not isinstance(self.clock, ManualClock),
        )
        self._housekeeping = Housekeeping(
            self.config,
            self.log,
            self._commit,
            self._flush_derived,
            lambda: self._dispatcher.entries + len(self._dispatcher.records),
            self._expire,
            self.clock.now_ms(),
        )

    # -------------------------------------------------------------------------------------------------------- append

    def append(
        self,
        message: Message,
        queue_id: int = 0,
        *,
        born_timestamp_ms: int | None = None,
        born_host: codec.Host | bytes | None = None,
        store_host: codec.Host | bytes | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        properties_raw: bytes | None = None,
        _wait: bool = True,
    ) -> AppendResult:
        """Append a message to the queue ``queue_id`` of its topic.

        Returns when it stands in the log's page cache (it survives the process), with ``durability="sync"`` when it has
        reached the device (it survives the machine); producers that wait together share one flush.

        A message with a delay level goes to the schedule topic, unless it is prepared or a rollback. The keywords are
        the record's fields that a broker fills in: the times in ms, hosts as (address, port) or as a record has them;
        both hosts are the store's and the born time is now unless given. ``properties_raw`` stores the bytes as they
        are instead of encoding the message's properties; a message that has properties all the same vouches that the
        bytes say them.

        `MessageIllegalError` before a byte is written: topic, body, properties or record too long, a field out of
        range.
        """
        topic, body = message.topic, message.body
        properties: Mapping[str, str] = message.properties
        if properties_raw is None:
            if "DELAY" in properties and sys_flag & _TRANSACTION_MASK in (0, codec.TRANSACTION_COMMIT):
                level = self.levels.cap(parse_level(properties["DELAY"]))
                if level > 0:
                    properties = {**properties, "DELAY": str(level), "REAL_TOPIC": topic, "REAL_QID": str(queue_id)}
                    topic, queue_id = SCHEDULE_TOPIC, queue_id_of_level(level)
            raw = codec.encode_properties(properties)
        else:
            raw = properties_raw
            properties = properties or codec.decode_properties(raw)
        lane = self._lanes.get((topic, queue_id)) or self._lane(topic, queue_id)
        if len(body) >= self._compress_from and not sys_flag & codec.COMPRESSED:
            body, sys_flag = codec.compress_body(body), sys_flag | codec.COMPRESSED | codec.COMPRESSION_ZLIB
        if len(body) > self._largest_body or len(raw) > _LONGEST_PROPERTIES:
            raise self._too_long(body, raw)
        get = properties.get
        unique_key, keys, tags = get("UNIQ_KEY"), get("KEYS"), get("TAGS")
        tags_code = codec.tags_code(tags) if tags else 0
        stored_at = born_at = self._host
        if store_host is not None:
            stored_at = store_host if type(store_host) is bytes else codec.encode_host(store_host)
        if born_host is not None:
            born_at = born_host if type(born_host) is bytes else codec.encode_host(born_host)
        counted = True
        if sys_flag & _TRANSACTION_MASK:
            counted = has_queue_entry(sys_flag)
            if not is_indexed(sys_flag):
                unique_key = keys = None
        hosts_size = len(born_at) + len(stored_at)
        if hosts_size > 16 or sys_flag & codec.HOSTS_V6:
            sys_flag |= _host_flags(sys_flag, born_at, stored_at)
        checksum = zlib.crc32(body) & 0x7FFFFFFF
        body_size = len(body)
        topic_field = lane.topic_field
        tail = b"".join((body, topic_field, _pack_short(len(raw)), raw))
        size = 72 + hosts_size + len(tail)
        log, dispatcher = self.log, self._dispatcher
        try:
            with self._lock:
                if not self._accepts:
                    raise self._refusal()
                if len(dispatcher.records) >= _BATCH:  # now: should a full disk refuse it, nothing was written
                    dispatcher.drain()
                now = self._now_ms()
                physical_offset = log.end
                if physical_offset + size > log.fits:
                    physical_offset = log.claim(size)
                queue_offset = lane.next_queue_offset if counted else 0
                header = _pack_header[sys_flag & 48](
                    size, _MAGIC, checksum, queue_id, message.flag, queue_offset, physical_offset, sys_flag,
                    now if born_timestamp_ms is None else born_timestamp_ms, born_at,
                    now, stored_at, reconsume_times, prepared_transaction_offset, body_size,
                )  # fmt: skip
                if not counted:
                    log.append(header + tail)
                else:
                    if topic == SCHEDULE_TOPIC:
                        tags_code = self._deliver_timestamp_ms(properties, now, tags_code)
                    if lane.queue.ext is not None:  # before the record: should it fail, there is none without an entry
                        tags_code = dispatcher.add_unit(lane, tags_code, now, raw)
                    log.append(header + tail)
                    lane.next_queue_offset = queue_offset + 1
                    pending = lane.pending
                    if not pending:
                        dispatcher.lanes.append(lane)
                    pending.append(_pack_entry(physical_offset, size, tags_code))
                dispatcher.records.append((physical_offset, now, lane.prefix_hash, unique_key, keys))
        except struct.error as error:
            raise MessageIllegalError(f"a field of the record is out of range: {error}") from None
        if physical_offset + size >= self._housekeeping.alarm:
            self._wake()
        if self._sync and _wait:
            self._commit.reach(physical_offset + size)
        return _new_result(AppendResult, (physical_offset, size, queue_offset, now, stored_at))

    def append_again(
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
        header = codec.HEADERS[data[codec.SYS_FLAG_AT + 3] & codec.HOSTS_V6].unpack_from(data)
        _, _, _, _, own_flag, _, _, own_sys_flag, born_timestamp_ms, born_at, _, stored_at, times, _, _ = header
        message: Message = object.__new__(Message)  # of parts that were checked when it was stored
        message.topic, message.body, message.properties = topic, data[begin:end], dict(properties)
        message.flag = own_flag if flag is None else flag
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
            _wait=False,
        )

    def append_batch(
        self,
        messages: Sequence[Message],
        queue_id: int = 0,
        *,
        properties: Mapping[str, str] | None = None,
        born_timestamp_ms: int | None = None,
        born_host: codec.Host | None = None,
        store_host: codec.Host | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
    ) -> list[AppendResult]:
        """Append messages of one topic to one queue, all or none, side by side in one file of the log.

        ``properties`` are the batch's own, appended to each message's. `MessageIllegalError` before a byte is written:
        an empty batch, topics or wait flags that differ, a delay, a transaction flag, or more than
        ``max_message_size`` bytes as a client encodes it; `librmq.message.split_batch` cuts what is larger.
        """
        _check_batch(messages, sys_flag)
        added = codec.encode_properties(properties) if properties else b""
        lane = self._lanes.get((messages[0].topic, queue_id)) or self._lane(messages[0].topic, queue_id)
        stored_at = self._host if store_host is None else codec.encode_host(store_host)
        born_at = self._host if born_host is None else codec.encode_host(born_host)
        sys_flag |= _host_flags(sys_flag, born_at, stored_at)
        fixed = len(born_at) + len(stored_at) + 72
        encoded_size = total = 0
        prepared = []
        topic_field = lane.topic_field
        for message in messages:
            body, found = message.body, message.properties
            raw = codec.encode_properties(found)
            encoded_size += codec.BATCH_FIXED_SIZE + len(body) + len(raw)
            if properties:
                raw = codec.join_properties(raw, added)
                found = codec.decode_properties(raw)
            if len(body) > self._largest_body or len(raw) > _LONGEST_PROPERTIES:
                raise self._too_long(body, raw)
            tail = b"".join((body, topic_field, _pack_short(len(raw)), raw))
            size = fixed + len(tail)
            total += size
            prepared.append((size, zlib.crc32(body) & 0x7FFFFFFF, message.flag, tail, len(body), found, raw))
        if encoded_size > self._largest_body:
            raise MessageIllegalError(
                f"the batch has {encoded_size} bytes as a client encodes it, at most {self._largest_body} are taken: "
                f"split it"
            )
        pack = _pack_header[sys_flag & 48]
        parts: list[bytes] = []
        entries: list[bytes] = []
        records: list[tuple[int, int, int, str | None, str | None]] = []
        results: list[AppendResult] = []
        log, dispatcher, prefix_hash = self.log, self._dispatcher, lane.prefix_hash
        try:
            with self._lock:
                if not self._accepts:
                    raise self._refusal()
                if len(dispatcher.records) >= _BATCH:
                    dispatcher.drain()
                now = self._now_ms()
                born = now if born_timestamp_ms is None else born_timestamp_ms
                physical_offset = log.claim(total)
                queue_offset = lane.next_queue_offset
                for size, checksum, flag, tail, body_size, found, _ in prepared:
                    parts += (
                        pack(
                            size, _MAGIC, checksum, queue_id, flag, queue_offset, physical_offset, sys_flag,
                            born, born_at, now, stored_at, reconsume_times, 0, body_size,
                        ),
                        tail,
                    )  # fmt: skip
                    get = found.get
                    tags = get("TAGS")
                    entries.append(_pack_entry(physical_offset, size, codec.tags_code(tags) if tags else 0))
                    records.append((physical_offset, now, prefix_hash, get("UNIQ_KEY"), get("KEYS")))
                    results.append(_new_result(AppendResult, (physical_offset, size, queue_offset, now, stored_at)))
                    physical_offset += size
                    queue_offset += 1
                if lane.queue.ext is not None:
                    for at, (place, size, code) in enumerate(map(ENTRY.unpack, entries)):
                        entries[at] = _pack_entry(place, size, dispatcher.add_unit(lane, code, now, prepared[at][-1]))
                log.append(b"".join(parts))
                if not lane.pending:
                    dispatcher.lanes.append(lane)
                lane.pending += entries
                lane.next_queue_offset = queue_offset
                dispatcher.records += records
                if len(dispatcher.records) >= _BATCH:
                    with suppress(StoreIOError):  # these messages stand in the log; the next append is told
                        dispatcher.drain()
        except struct.error as error:
            raise MessageIllegalError(f"a field of the record is out of range: {error}") from None
        if physical_offset >= self._housekeeping.alarm:
            self._wake()
        if self._sync:
            self._commit.reach(physical_offset)
        return results

    def submit(self, message: Message, queue_id: int = 0, **fields: Any) -> Acknowledgement[AppendResult]:
        """Append like `append` with the same keywords, but return at once, whatever the durability.

        The acknowledgement completes when the message has reached the device: soon by itself with
        ``durability="sync"``, else with the next flush; its ``wait`` hurries.
        """
        result = self.append(message, queue_id, _wait=False, **fields)
        return Acknowledgement(result, self._commit, result.physical_offset + result.size)

    def wait_for(self, result: AppendResult) -> None:
        """Return when a message that `submit` took has reached the device; `FlushFailedError` if that is not known."""
        self._commit.reach(result.physical_offset + result.size)

    def is_writing(self) -> bool:
        """Whether somebody appends at this moment."""
        return self._lock.locked()

    def _lane(self, topic: str, queue_id: int) -> Lane:
        """The lane of a queue that is written for the first time since opening."""
        validate_topic(topic)
        if isinstance(queue_id, bool) or not hasattr(queue_id, "__index__") or not 0 <= queue_id < 1 << 31:
            raise MessageIllegalError(f"queue id: expected a whole number from 0 to 2147483647, found {queue_id!r}")
        if not self._accepts:
            raise self._refusal()
        with self._lock:
            assert self._parts is not None
            return self._parts.lane(topic, queue_id)

    def _deliver_timestamp_ms(self, properties: Mapping[str, str], now: int, tags_code: int) -> int:
        level = self.levels.cap(parse_level(properties.get("DELAY")))
        return self.levels.deliver_timestamp_ms(level, now) if level > 0 else tags_code

    def _too_long(self, body: bytes, raw: bytes) -> MessageIllegalError:
        if len(body) > self._largest_body:
            return MessageIllegalError(f"the body has {len(body)} bytes, at most {self._largest_body} are taken")
        return MessageIllegalError(f"the properties have {len(raw)} bytes, at most {_LONGEST_PROPERTIES} are taken")

    # ---------------------------------------------------------------------------------------------------------- read

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_messages: int = 32,
        matching: MessageFilter | None = None,
    ) -> ReadResult:
        """Read up to ``max_messages`` messages of a queue from ``queue_offset`` on.

        At most 32 messages and 256 KiB a call (8 and 64 KiB from far behind the log's end), the first is always given;
        a read does not cross a queue file. Whatever the status, ``next_offset`` says where to go on. While the disk is
        full, the newest messages may not be in their queues yet, and are read when there is room again.

        `CorruptionError` if an entry points at what is no record of its size.
        """
        self._check_open()
        if self._following is not None:
            return self._following.read((topic, queue_id), queue_offset, max_messages, matching, self._transfer)
        if self._dispatcher.records:
            try:
                self._drain()
            except StoreIOError as error:
                if error.errno != errno.ENOSPC:
                    raise
        return read_queue(
            self.log, self.queues.find((topic, queue_id)), queue_offset, max_messages, matching, self._transfer
        )

    def matching(
        self,
        *,
        tags: str | None = None,
        sql: str | SqlFilter | None = None,
        registration: tuple[str, str] | None = None,
        predicate: Callable[[StoredMessage], object] | WatchedPredicate[StoredMessage] | None = None,
    ) -> MessageFilter | None:
        """What `read` takes as its filter: at most one of ``tags`` (``a || b``), an ``sql`` expression, the
        ``registration`` of a group on a topic as (topic, group), whose bitmaps are looked at before the log is, or a
        ``predicate`` of your own. None of them is None: all messages.

        A predicate that takes more than 10 ms for a message is reported, and one that raises does not match; a
        `WatchedPredicate` has its own budget, policies and counts. A registration is the one in force now.

        `ConfigError` if SQL is asked for and ``enable_property_filter`` is off, or no such group is registered;
        `FilterSyntaxError` for an expression that does not compile.
        """
        from librmq.filter import SqlFilter, TagFilter, WatchedPredicate  # a grammar comes with it
        from librmq.matching import ByPredicate, BySql, ByTags

        if sum(one is not None for one in (tags, sql, registration, predicate)) > 1:
            raise ConfigError("matching: expected one of tags, sql, registration, predicate")
        if tags is not None:
            return ByTags(TagFilter(tags))
        if predicate is not None:
            if not isinstance(predicate, WatchedPredicate):
                predicate = WatchedPredicate(predicate, clock=self.clock, budget=0.01)
            return ByPredicate(predicate)
        if (sql is not None or registration is not None) and not self.config.enable_property_filter:
            raise ConfigError("SQL filters are switched off: set enable_property_filter")
        if sql is not None:
            return BySql(sql if isinstance(sql, SqlFilter) else SqlFilter(sql))
        if registration is None:
            return None
        topic, group = registration
        found = None if self.filters is None else self.filters.get(topic, group)
        if found is None:
            raise ConfigError(f"group {group!r} has no filter on topic {topic!r}")
        return BySql(found, self.filters)

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The entries of a queue, all that was acknowledged before the call among them; None if there is no such queue.

        For reading only: the store writes it.
        """
        self._check_open()
        self._drain()
        return self.queues.find((topic, queue_id))

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The queue offsets of the oldest message of a queue and of the next one; (0, 0) for no such queue.

        What was appended counts at once, entries that are not written yet among it.
        """
        self._check_open()
        queue = self.queues.find((topic, queue_id))
        if queue is None:
            return 0, 0
        lane = self._lanes.get((topic, queue_id))
        return queue.min_offset, queue.max_offset if lane is None else lane.next_queue_offset

    def counts_as_on_disk(self, physical_offset: int) -> bool:
        """Whether a message is so far behind the log's end that it is no longer taken to be in memory."""
        return self._transfer.is_on_disk(self.log.end, physical_offset)

    def message_at(self, physical_offset: int) -> StoredMessage | None:
        """The message whose record starts at ``physical_offset``; None where the log has nothing.

        `CorruptionError` if no sound record stands there.
        """
        self._check_open()
        message = self.log.message(physical_offset)
        return self.log.message(physical_offset) if message is None and self.refresh() else message

    def find_by_key(
        self,
        topic: str,
        key: str,
        begin_ms: int = 0,
        end_ms: int = (1 << 63) - 1,
        max_messages: int = 64,
        *,
        exact: bool = True,
    ) -> list[StoredMessage]:
        """The messages of ``topic`` that have ``key`` as unique key or among their keys, in log order.

        The index knows hashes and whole seconds: ``max_messages`` bounds what it gives, and ``exact`` false gives that
        whole, collisions and repetitions included, as a broker does.
        """
        return self._find_by_key(self._up_to_date(), topic, key, begin_ms, end_ms, max_messages, exact)

    @staticmethod
    def _find_by_key(
        parts: recovery.Parts, topic: str, key: str, begin_ms: int, end_ms: int, max_messages: int, exact: bool
    ) -> list[StoredMessage]:
        found = []
        last = -1
        for physical_offset in sorted(parts.index.query(topic, key, begin_ms, end_ms, max_messages)):
            if exact and physical_offset == last:
                continue
            last = physical_offset
            message = parts.log.message(physical_offset, check_body=False)
            if message is None:
                continue
            if exact and (message.topic != topic or (key != message.unique_key and key not in message.keys)):
                continue
            found.append(message)
        return found

    def find_by_id(self, message_id: str) -> list[StoredMessage]:
        """The messages with an id, in log order.

        An offset id (32 or 56 hexadecimal digits) that names a record gives that one; else it is taken for a unique
        key, which gives every record that has it, over all topics.
        """
        parts = self._up_to_date()
        try:
            _, physical_offset = codec.parse_offset_message_id(message_id)
        except ValueError:
            pass
        else:
            try:
                message = parts.log.message(physical_offset)
            except CorruptionError:
                message = None  # 32 digits may be a unique key too
            if message is not None and message.offset_id == message_id.upper():
                return [message]
        found = {
            message.physical_offset: message
            for topic in sorted({topic for topic, _ in parts.queues} | layout.known_topics(self.path, self.files))
            for message in self._find_by_key(parts, topic, message_id, 0, (1 << 63) - 1, 1 << 31, True)
            if message.unique_key == message_id
        }
        if not found:  # records that no index knows: of a rollback, or of a topic without a queue
            found = {
                message.physical_offset: message
                for message in parts.log.search(b"UNIQ_KEY\1" + message_id.encode(errors="surrogatepass"))
                if message.unique_key == message_id
            }
        return [found[physical_offset] for physical_offset in sorted(found)]

    def messages(
        self, topic: str, queue_id: int = 0, begin: int = 0, end: int | None = None
    ) -> Iterator[StoredMessage]:
        """The messages of a queue from queue offset ``begin`` (or the first that is there) up to ``end`` (its end now).

        Messages that retention deletes meanwhile are left out. `CorruptionError` as for `read`.
        """
        at = begin
        while True:
            result = self.read(topic, queue_id, at)
            if end is None:
                end = result.max_offset
            for place, message in enumerate(result.messages, at):
                if place >= end:
                    return
                yield message
            if result.next_offset >= end or (result.next_offset <= at and not result.messages):
                return
            at = result.next_offset

    def queue_offset_at(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the message stored nearest to ``timestamp_ms``, as a broker answers; 0 for no queue."""
        parts = self._up_to_date()
        queue = parts.queues.find((topic, queue_id))
        return 0 if queue is None else queue.offset_at(timestamp_ms, parts.log.store_timestamp_ms)

    def __iter__(self) -> Iterator[StoredMessage]:
        """All messages in log order; `CorruptionError` at the first that can't be read."""
        for _, _, raw in self._up_to_date().log.scan():
            if raw is not None:
                yield StoredMessage(raw)

    def refresh(self) -> bool:
        """See what somebody else has written, deleted or recovered since; true if there is anything new.

        For a handle that only reads. Reading at a queue's end, finding and iterating do it by themselves; `log`,
        `queues` and `index` show the store as of the last time, and may be other objects afterwards. What was given
        out before stays as it was.
        """
        self._check_open()
        return self._following is not None and self._following.refresh()

    # ----------------------------------------------------------------------------------------------- flush and close

    def flush(self) -> int:
        """Return when whatever was appended before is on the device, with its queue entries and keys.

        The physical offset up to which it is. `FlushFailedError` if that will never be known.
        """
        self._check_writable()
        self._flush_derived()
        return self._commit.flushed

    def run_due(self, now_ms: int) -> int | None:
        """Do what is due by time (flush, checkpoint, retention); returns when to call next (ms), None for not yet.

        A thread of the store does this by itself, unless it was opened with ``background=False`` or a clock of the
        caller's: then this is the caller's to call.
        """
        self._check_writable()
        return self._housekeeping.run_due(now_ms)

    def _flush_derived(self) -> None:
        """Flush the log, then what is derived from it, then the checkpoint that vouches for both."""
        with self._deriving:
            with self._lock:
                if self._parts is None:
                    raise self._unusable()
                dispatcher, checkpoint, index = self._dispatcher, self.checkpoint, self.index
                dispatcher.drain()
                end, stored = self.log.end, dispatcher.dispatched_timestamp_ms
                indexed = index.full_timestamp_ms
                queues, dispatcher.unflushed = dispatcher.unflushed, set()
                entries, dispatcher.entries = dispatcher.entries, 0
            try:
                self._commit.reach(end)
                flush_all(queues)
                index.flush()
                if self._derived_failure is not None:
                    return  # what that one left out may pass for flushed now: nothing may vouch for it
                if stored:
                    checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
                    # No later than the last record, should the clock have gone back.
                    checkpoint.index_timestamp_ms = min(indexed, stored)
                checkpoint.flush()
                self._settled = end
            except BaseException as error:
                with self._lock:
                    dispatcher.unflushed |= queues
                    dispatcher.entries += entries
                if isinstance(error, StoreIOError) and error.call.startswith("flush"):
                    self._derived_failure = error
                raise

    def _wake(self) -> None:
        """Let the store's thread look at what there is to do."""
        background = self._background
        if background is not None:
            background.wake()
        elif self._in_background:
            with self._lock:
                if self._background is None and self._accepts:
                    self._background = Background(self._housekeep, self.clock, "librmq-store")

    def _housekeep(self, now_ms: int) -> int | None:
        return self._housekeeping.run_due(now_ms)  # after `recover` it is another

    def _rest(self) -> None:
        """Return when the store's thread, if any, has ended; the next append that has work for one starts another."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.stop()

    def _on_failed_flush(self) -> None:
        self._accepts = False

    def _expire(self, now_ms: int) -> int | None:
        """The step of retention; what it finds of the disk decides whether messages are taken."""
        try:
            return self._retention.run_due(now_ms)
        finally:
            with self._lock:
                refused = self._closed is not None or self._commit.failure is not None
                self._accepts = not refused and not self._retention.refuses_writes
                if self._commit.failure is not None:  # meanwhile
                    self._accepts = False

    def recover(self) -> list[Damage]:
        """Look at the whole log and make queues and index agree with it; returns what was cut or rewritten.

        The log is cut at the first record that can't be read. Opening does the part of this that the last exit calls
        for; this is for a store of which something else is known or feared. Producers and readers wait.
        """
        in_background, self._in_background = self._in_background, False
        self._rest()
        try:
            with self._deriving, self._lock:
                if self._closed is not None or self.read_only:
                    raise self._unusable()
                self._dispatcher.drain()
                before = len(self.recovered)
                try:
                    self._close_parts()
                    self._load(thorough=True, living=True)
                    self._accepts = True
                except BaseException:
                    self._closed, self._accepts = "could not be recovered", False
                    self._release()
                    raise
                return self.recovered[before:]
        finally:
            self._in_background = in_background

    def snapshot(self, target: str | os.PathLike[str], *, copy: bool = False) -> Snapshot:
        """Make a store in ``target`` (empty, or not there yet) of all that was appended before the call.

        Producers, readers and retention go on meanwhile. Full files of the log are linked where the file system can,
        unless ``copy``. `librmq.snapshot.snapshot` does it without a handle, and says what it raises and costs.
        """
        self._check_open()
        return snapshot(
            self.path,
            os.fspath(target),
            self.config,
            copy=copy,
            files=self.files,
            clock=self.clock,
            end=None if self.read_only else self._whole_end,
        )

    def _whole_end(self) -> int:
        """Where the log ends, with no producer between two files."""
        with self._lock:
            return self.log.end

    def verify(self) -> Verdict:
        """Look at all of the store, changing nothing; producers wait."""
        with self._lock:
            if self._closed is not None:
                raise self._unusable()
            self._dispatcher.drain()
            return verify_parts(self.path, self.config, self.files)

    def close(self) -> None:
        """Flush, mark the store as cleanly closed and give the lock back. Closing again does nothing.

        `FlushFailedError` if a flush has failed: then the store is let go of as it is, and the next open recovers.
        """
        if not self._end("is closed"):
            return
        try:
            if not self.read_only:
                self._flush_derived()
                if self._derived_failure is None:
                    for queue in self.queues.opened():
                        queue.flush()  # retention deletes files of queues that nobody wrote to
                    write_closed_state(self.path, self.files, self.log, self.queues, self.index)
                    clear_abort(self.files, self.path)
        finally:
            self._release()

    def abandon(self) -> None:
        """Let go of the store as a process does that dies: the abort marker stays, the checkpoint is not written.

        All that was appended stands in the log, and in queues and index as far as the disk has room; the next `open`
        recovers. Doing so again, or after `close`, does nothing.
        """
        if not self._end("was abandoned"):
            return
        try:
            if not self.read_only:
                with suppress(StoreIOError):
                    self._dispatcher.drain()
        finally:
            self._release()

    def _end(self, why: str) -> bool:
        """Take no more calls; false if that was so already."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed, self._accepts = why, False
        self._rest()
        return True

    def _close_parts(self) -> None:
        with self._deriving:
            parts, self._parts = self._parts, None
            if parts is not None:
                self._commit.stop(f"{self.path}: the log was let go before this had reached the device")
                parts.close()

    def _release(self) -> None:
        """Let go of everything."""
        try:
            self._close_parts()
        finally:
            if self._file_lock is not None:
                self._file_lock.release()
                self._file_lock = None
            if self._temporary is not None:
                self._temporary.cleanup()

    def _up_to_date(self) -> recovery.Parts:
        """The parts, with everything in them that was acknowledged before the call."""
        self.refresh()
        self._drain()
        parts = self._parts
        if parts is None:
            raise self._unusable()
        return parts

    def _drain(self) -> None:
        """Write what readers look into."""
        if self._dispatcher.records:
            with self._lock:
                self._dispatcher.drain()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._unusable()

    def _check_writable(self) -> None:
        if self._closed is not None or self.read_only:
            raise self._unusable()

    def _refusal(self) -> Exception:
        """Why nothing can be appended."""
        if self._closed is None and not self.read_only:
            if self._commit.failure is not None:
                return FlushFailedError(self._commit.failure)
            if self._retention.refuses_writes:
                return self._retention.refusal()
        return self._unusable()

    def _unusable(self) -> Exception:
        if self._closed is not None:
            return StoreClosedError(f"{self.path}: this handle {self._closed}")
        return ReadOnlyError(f"{self.path}: this handle only reads")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _host_flags(sys_flag: int, born_at: bytes, stored_at: bytes) -> int:
    """The bits that tell hosts of 16 bytes; `MessageIllegalError` if ``sys_flag`` has one that the hosts do not."""
    flags = (codec.BORN_HOST_V6 if len(born_at) > 8 else 0) | (codec.STORE_HOST_V6 if len(stored_at) > 8 else 0)
    if sys_flag & codec.HOSTS_V6 & ~flags:
        raise MessageIllegalError(f"sys flag {sys_flag:#x} says that a host is IPv6, which it is not")
    return flags


def _check_batch(messages: Sequence[Message], sys_flag: int) -> None:
    """Refuse what no client would send as a batch and no broker would take."""
    if not messages:
        raise MessageIllegalError("a batch needs at least one message")
    first = messages[0]
    for message in messages:
        if message.topic != first.topic:
            raise MessageIllegalError(f"a batch has one topic, found {first.topic!r} and {message.topic!r}")
        if message.properties.get("WAIT") != first.properties.get("WAIT"):
            raise MessageIllegalError("a batch has one wait flag, found several")
        if parse_level(message.properties.get("DELAY")) > 0:
            raise MessageIllegalError("a batch can't be delayed")
    if sys_flag & _TRANSACTION_MASK:
        raise MessageIllegalError("a batch can't be part of a transaction")


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_open_stores):
        store._closed, store._accepts = "was opened before a fork: open the store anew in the child", False
        store._background = None
        store._file_lock = None
        store._lock, store._deriving = threading.Lock(), threading.RLock()  # some thread of the parent may hold them
        store._commit.forget(f"{store.path}: this handle {store._closed}")
    _open_stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
