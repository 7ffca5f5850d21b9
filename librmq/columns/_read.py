"""Reading of a part, queue entries or a stretch of the log, to Arrow batches. Also runs in Spark's workers.

Files are mapped and read without a lock. Pages are released after each batch, which bounds the memory of a task. Rows
are filtered before they are decoded, by the cheapest test first: the hash of the tag in the entry, the header, named
properties, the text of the tag, the selector. Bodies and maps are decoded only for the remaining rows.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from librmq.columns.arrays import Ints, Mask, keep_freed_memory, numbers, record_starts, runs, strings
from librmq.columns.decoding import CORRUPT, ENTRY_COLUMNS, FIELDS, FIXED_COLUMNS, TYPES, Block
from librmq.columns.options import REST, DataLossError, Part, ReadOptions, Slice
from librmq.columns.remote import RemoteFiles, RemoteStore, remote_store
from librmq.config import ENTRY_SIZE
from librmq.consumequeue_entries import HOLE_SIZE, LAST_EXT_ADDRESS, entry_dtype
from librmq.errors import CorruptionError, NotAStoreError, RecordError, StoreIOError
from librmq.files import Damage, DiskFiles, File, Files, is_folder
from librmq.files.interface import numbered_files
from librmq.files.rolling import file_name
from librmq.java.lang import string_hash
from librmq.message import StoredMessage, record
from librmq.message.batch import inner_messages
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.runtime.event_log import EventLog
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.filter import TagFilter


# ---- entries of queues


@dataclass(slots=True)
class Rows:
    """Entries of several queues, or records of the log without queues."""

    places: Ints
    sizes: Ints
    codes: Ints
    queue: npt.NDArray[np.int32]
    queue_offsets: Ints

    def __len__(self) -> int:
        return len(self.places)

    def take(self, which: Any) -> Rows:
        """Return the rows that a slice, a mask or an array of numbers chooses."""
        return Rows(
            self.places[which], self.sizes[which], self.codes[which], self.queue[which], self.queue_offsets[which]
        )


@dataclass(slots=True)
class Entries:
    """Entries of several queues as their files have them.

    Rows are made batch by batch: arrays of a whole task would each take new memory from the system.
    """

    stored: npt.NDArray[np.void]
    """The entries, queue by queue."""
    order: Ints
    """The places in ``stored`` of the entries in log order."""
    block: npt.NDArray[np.int32]
    """The block of each entry: neighbours of one queue, which were read at once."""
    queues: npt.NDArray[np.int32]
    """The queue of each block."""
    shifts: Ints
    """By block, the queue offset of an entry less its place in ``stored``."""

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, begin: int, end: int) -> Rows:
        """Return the entries from ``begin`` to ``end`` in log order."""
        order = self.order[begin:end]
        # NumPy takes plain bytes five times as fast as items with fields.
        stored = self.stored.view(f"V{ENTRY_SIZE}")[order].view(self.stored.dtype)
        block = self.block[order]
        return Rows(
            stored["physical_offset"].astype(np.int64),
            stored["size"].astype(np.int64),
            stored["tags_code"].astype(np.int64),
            self.queues[block],
            order + self.shifts[block],
        )


def slice_entries(part: Part, share: Slice, files: Files, deleted: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the entries of a slice, each time with the first queue offset; add deleted files to ``deleted``."""
    per_file = part.queue_file_size // ENTRY_SIZE
    at, stored_end = share.begin, min(share.end, share.inline_from)
    while at < stored_end:
        start = at - at % per_file
        until = min(stored_end, start + per_file)
        name = file_name(start * ENTRY_SIZE)
        path = os.path.join(directory.queue_folder(part.path, share.topic, share.queue_id), name)
        try:  # no mapping, which holds a descriptor, because there can be many queues
            raw = files.read(path, (at - start) * ENTRY_SIZE, (until - at) * ENTRY_SIZE)
        except StoreIOError as error:
            if error.errno != errno.ENOENT:
                raise
            deleted.append(path)
        else:
            if len(raw) < (until - at) * ENTRY_SIZE:
                place = (at - start) * ENTRY_SIZE + len(raw)
                raise CorruptionError(path, place, "size", f"expected {part.queue_file_size} bytes")
            yield at, raw
        at = until
    if share.inline and at < share.end:
        yield share.inline_from, share.inline


# ---- modes for damage

_log = EventLog("librmq.columns")
_MOST_TOLD: Final = 1000
"""Rows in one batch about damage."""


class Malformed:
    """The damage that the read of a part finds. Its generators do with it what the mode says."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, part: Part, store: str) -> None:
        self._options = options
        self._schema = schema
        self._part = part
        self._store = store
        self._left_out = 0
        """Number of damaged places that mode ``DROPMALFORMED`` left out."""
        self._first_left_out = ""

    def bad_entries(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Handle entries that lead to no record."""
        return self.batches([self._in_queue(rows, at) for at in range(len(rows))], self._known_columns(rows))

    def records(self, rows: Rows, reasons: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Handle records that cannot be read, each with its reason."""
        damage = [self.in_log(place, why) for place, why in zip(rows.places.tolist(), reasons, strict=True)]
        return self.batches(damage, self._known_columns(rows))

    def log_left_out(self) -> None:
        if self._left_out:
            _log.warning(
                "%(path)s: damaged places left out of a read: %(count)d, the first: %(error)s",
                path=self._store,
                count=self._left_out,
                error=self._first_left_out,
            )

    def batches(
        self, damages: Sequence[Damage], columns: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Raise `CorruptionError`, count, or yield a row about each; ``columns`` has the other columns of each row."""
        columns = columns or [{}] * len(damages)
        mode = self._options.mode
        predicate = None if self._options.reports_all_damage else self._options.predicate
        if mode == "FAILFAST":
            hint = "(mode PERMISSIVE reads the rest)"
            raise CorruptionError(damages[0].file, damages[0].offset, damages[0].kind, f"{damages[0].what} {hint}")
        if mode == "DROPMALFORMED":
            self._first_left_out = self._first_left_out or _text_of(damages[0])
            self._left_out += len(damages)
            return
        names = dict.fromkeys([*self._schema.names, *(() if predicate is None else predicate.columns)])
        schema = pa.schema([(name, TYPES[name]) for name in names])
        for begin in range(0, len(damages), _MOST_TOLD):
            some = slice(begin, begin + _MOST_TOLD)
            rows = [
                {CORRUPT: _text_of(damage), "store": self._store, **where}
                for damage, where in zip(damages[some], columns[some], strict=True)
            ]
            table = pa.Table.from_pylist(rows, schema=schema)
            if predicate is not None:
                table = table.filter(predicate.expression)
            yield from table.select(self._schema.names).cast(self._schema).to_batches()

    def _known_columns(self, rows: Rows) -> list[dict[str, Any]]:
        places = rows.places.tolist()
        if self._part.walk is not None:
            return [{"physicalOffset": place} for place in places]
        queues = [self._part.slices[number] for number in rows.queue.tolist()]
        return [
            {"physicalOffset": place, "topic": queue.topic, "queueId": queue.queue_id, "queueOffset": queue_offset}
            for place, queue, queue_offset in zip(places, queues, rows.queue_offsets.tolist(), strict=True)
        ]

    def in_log(self, place: int, what: str) -> Damage:
        """Return damage at a place of the log where no record can be read."""
        start = max(place, 0) // self._part.log_file_size * self._part.log_file_size
        return Damage(os.path.join(self._store, directory.COMMITLOG, file_name(start)), place, "record", what)

    def _in_queue(self, rows: Rows, at: int) -> Damage:
        share, queue_offset = self._part.slices[int(rows.queue[at])], int(rows.queue_offsets[at])
        position = queue_offset * ENTRY_SIZE % self._part.queue_file_size
        name = file_name(queue_offset * ENTRY_SIZE - position)
        path = os.path.join(directory.queue_folder(self._store, share.topic, share.queue_id), name)
        what = f"queue offset {queue_offset}: found physical offset {rows.places[at]} and size {rows.sizes[at]}"
        return Damage(path, position, "entry", what)


def _text_of(damage: Damage) -> str:
    return f"{damage.file}: at {damage.offset}: {damage.what}"


BATCH_ROWS: Final = 8192
ENTRY_BATCH_ROWS: Final = 65_536
BATCH_BYTES: Final = 4 << 20
_PLACE: Final = "\0place"


class Reading:
    """Reads parts as ``options`` say, into batches of ``schema``, whose names are all in `TYPES`. Picklable."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, files: Files | None = None) -> None:
        keep_freed_memory()
        self._options = options
        self._schema = schema
        self._files = files
        self._logs: dict[str, RemoteStore] = {}

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``part``; `CorruptionError` and `DataLossError` as the options say."""
        files = self._files or DiskFiles()
        if part.remote is not None:
            store = self._logs.setdefault(part.remote.url, RemoteStore.of_log(part.remote))
            files = RemoteFiles({store.url: store})
            part = replace(part, path=files.mirror(store.url))
        task = _Task(self._options, self._schema, part, files)
        try:
            yield from task.batches()
        finally:
            task.malformed.log_left_out()


class _Task:
    def __init__(self, options: ReadOptions, schema: pa.Schema, part: Part, files: Files) -> None:
        self._options = options
        self._schema = schema
        self._part = part
        self._files = files
        self._remote = remote_store(files, part.path)
        self._file: tuple[int, File, npt.NDArray[np.uint8]] | None = None
        conditions = options.selection
        self._tags: TagFilter | None = None
        self._filter = None
        if conditions.tags is not None:
            from librmq.filter import TagFilter  # loads a grammar that few reads need

            self._tags = TagFilter(conditions.tags)
        if options.selector is not None:
            from librmq.filter.filters import compiled

            self._filter = compiled(options.selector)
        self._predicate_columns = () if options.predicate is None else options.predicate.columns
        needed = {*schema.names, *self._predicate_columns}
        has_filters = self._tags is not None or self._filter is not None
        self._frames = (
            not needed <= FIXED_COLUMNS | {"topic", "tagsCode", "store", CORRUPT}
            or (part.walk is not None and ("topic" in needed or not conditions.takes_all))
            or has_filters
        )
        self._entries_only = options.view == "queues" or (
            # A count needs no record, as with the view queues. Modes that report or leave out damage look at each
            # record, and a batch has one entry for several messages.
            options.counts
            and needed <= ENTRY_COLUMNS
            and part.walk is None
            and options.mode == "FAILFAST"
            and not (has_filters or conditions.has_times or part.has_batches)
        )
        self._bodies = "body" in needed
        of_entries = {"physicalOffset"} if part.walk is not None else {"physicalOffset", "queueId", "queueOffset"}
        self._fields = [field for column, field in FIELDS.items() if column in needed - of_entries]
        if part.walk is None:
            self._fields += ["queue_offset", "queue_id"]  # which each entry's record must have
            topics = [share.topic.encode() for share in part.slices]
            self._queue_ids = np.array([share.queue_id for share in part.slices], np.int32)
            self._topic_sizes = np.array(list(map(len, topics)), np.int64)
            self._topic_ends = np.array([int.from_bytes(topic[-8:], "big") for topic in topics], np.uint64)
        self._fields += ["store_timestamp"] * conditions.has_times + ["body_crc"] * (self._bodies and options.checksums)
        self.malformed = Malformed(options, schema, part, self._store())

    # ------------------------------------------------------------------------------------------------------- batches

    def batches(self) -> Iterator[pa.RecordBatch]:
        if self._options.fail_on_data_loss and not is_folder(self._files, self._part.path):
            raise NotAStoreError(
                f"{self._part.path}: the driver found a store, this worker does not: mount it under the same path on "
                "both"
            )
        if self._part.damage:
            yield from self.malformed.batches(self._part.damage)
        entries, deleted = self._entries()
        if deleted and self._options.fail_on_data_loss:
            raise DataLossError(f"{self._part.path}: {deleted[0]} was deleted after the read was planned; {REST}")
        if self._entries_only:
            for begin in range(0, len(entries), ENTRY_BATCH_ROWS):
                rows = yield from self._sound(entries.rows(begin, begin + ENTRY_BATCH_ROWS))
                yield from self._entry_batch(rows)
            return
        rows = yield from self._sound(entries.rows(0, len(entries)))
        if self._part.walk is not None:
            rows, bad = self._walk(rows, *self._part.walk)
            if bad:
                yield from self.malformed.batches([self.malformed.in_log(place, why) for place, why in bad])
        else:
            for codes in self._wanted_codes():
                rows = rows.take(_candidates(rows.codes, codes) | self._has_times_as_codes(rows))
            self._fetch(rows.places, rows.sizes)
        size = self._part.log_file_size
        # Spark is faster with few large batches; data of variable length decodes faster in pieces that fit the cache.
        max_rows = BATCH_ROWS if self._frames else ENTRY_BATCH_ROWS
        sizes, files = np.clip(rows.sizes, 0, BATCH_BYTES), rows.places // size
        for begin, end in runs(sizes, BATCH_BYTES, max_rows, files):
            yield from self._messages(rows.take(slice(begin, end)), int(files[begin]) * size)
            self._release_pages()
        self._file = None
        if self._remote is not None:
            self._remote.release_space()

    def _sound(self, rows: Rows) -> Generator[pa.RecordBatch, None, Rows]:
        """Return the rows without those that stand for no message, after what the mode yields about bad ones."""
        bad_entries = (rows.sizes <= 0) | (rows.places < 0)
        if bad_entries.any():
            yield from self.malformed.bad_entries(rows.take(bad_entries))
            rows = rows.take(~bad_entries)
        if self._options.view != "queues" and (holes := rows.sizes == HOLE_SIZE).any():
            rows = rows.take(~holes)
        return rows

    def _wanted_codes(self) -> Iterator[Iterable[int]]:
        """Yield the hashes of the wanted tags: those of the setting, and those of the predicate."""
        if self._tags is not None and not self._tags.takes_all:
            yield self._tags.codes
        predicate = self._options.predicate
        if predicate is not None and predicate.tags is not None and not self._options.reports_all_damage:
            yield map(string_hash, predicate.tags)

    def _has_times_as_codes(self, rows: Rows) -> Mask:
        """Return which rows wait for a delay: their entries hold the time of delivery where others have a hash."""
        waits = np.array([share.topic == SystemTopic.SCHEDULE for share in self._part.slices], np.bool_)
        return waits[rows.queue] if len(waits) else np.zeros(len(rows), np.bool_)

    def _entry_batch(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        if self._tags is not None and not self._tags.takes_all:
            rows = rows.take(_candidates(rows.codes, self._tags.codes))
        if self._options.selection.has_times:
            rows = rows.take(self._in_window(rows))
        rows, _, _ = self._matching(rows, None, None)
        if len(rows):
            yield self._batch(rows, None)

    def _in_window(self, rows: Rows) -> Mask:
        """Return which entries lead to records with the wanted store times; this reads their headers."""
        self._fetch(rows.places, rows.sizes)
        begin_ms, end_ms = self._options.selection.window_ms
        keep, size = np.zeros(len(rows), np.bool_), self._part.log_file_size
        files = rows.places // size
        for begin, end in runs(np.clip(rows.sizes, 0, BATCH_BYTES), BATCH_BYTES, ENTRY_BATCH_ROWS, files):
            start = int(files[begin]) * size
            if (raw := self._log_file(start)) is not None:
                block = Block(raw, rows.places[begin:end] - start, frames=False, fields=["store_timestamp"])
                stored = block.field("store_timestamp")
                keep[begin:end] = block.sound & (stored >= begin_ms) & (stored <= end_ms - 1)
            self._release_pages()
        return keep

    def _messages(self, rows: Rows, start: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one chunk, which is within one log file."""
        raw = self._log_file(start)
        if raw is None:
            files = numbered_files(self._files, os.path.join(self._part.path, directory.COMMITLOG))
            # Retention deletes the oldest files, so an entry that leads behind one that is there is damaged.
            if self._part.walk is None and any(int(file.name) < start for file in files):
                yield from self.malformed.bad_entries(rows)
            elif self._options.fail_on_data_loss:
                name = file_name(start)
                raise DataLossError(f"{self._store()}: commitlog/{name} was deleted; {REST}")
            return
        at = rows.places - start
        if self._part.has_batches:
            rows, raw, at, unreadable = self._unwrapped(rows, raw, at)
            if unreadable:
                yield from self.malformed.records(*unreadable)
        sizes = rows.sizes if self._part.walk is None else None
        block = Block(raw, at, sizes, frames=self._frames, fields=self._fields)
        if self._part.walk is None:
            self._compare(rows, block)
        if not block.sound.all():
            wrong = np.flatnonzero(~block.sound)
            yield from self.malformed.records(rows.take(wrong), [block.reason(int(at)).reason for at in wrong])
            rows, block = rows.take(block.sound), block.take(np.flatnonzero(block.sound))
        keep = self._passing(rows, block)
        if keep is not None:
            rows, block = rows.take(keep), block.take(np.flatnonzero(keep))
        if len(rows) and "body" not in self._predicate_columns:
            rows, block, _ = self._matching(rows, block, None)
        if not len(rows):
            return
        if self._bodies:
            yield from self._with_bodies(rows, block)
        else:
            yield self._batch(rows, block)

    def _with_bodies(self, rows: Rows, block: Block) -> Iterator[pa.RecordBatch]:
        """Yield rows with their bodies, in several batches if compressed ones become large."""
        for run, bodies, wrong in block.bodies(BATCH_BYTES, checksums=self._options.checksums):
            is_whole = run == slice(0, len(rows))
            part, content = (rows, block) if is_whole else (rows.take(run), block.take(np.arange(run.start, run.stop)))
            if wrong:
                order = sorted(wrong)
                yield from self.malformed.records(part.take(order), [wrong[at].reason for at in order])
                good = np.ones(len(part), np.bool_)
                good[list(wrong)] = False
                part, content = part.take(good), content.take(np.flatnonzero(good))
                bodies = bodies.filter(pa.array(good))
            if len(part) and "body" in self._predicate_columns:
                part, content, bodies = self._matching(part, content, bodies)
            if len(part):
                yield self._batch(part, content, bodies)

    def _compare(self, rows: Rows, block: Block) -> None:
        """Let no row be sound whose record names another place."""
        differs = block.field("queue_offset") != rows.queue_offsets
        differs |= block.field("queue_id") != self._queue_ids[rows.queue]
        if self._frames:
            differs |= ~block.has_topics(self._topic_sizes[rows.queue], self._topic_ends[rows.queue])
        for row in np.flatnonzero(differs & block.sound).tolist():
            from librmq.store.engine.derivation import claims  # the queues of few stores share records

            share, block.sound[row] = self._part.slices[rows.queue[row]], False
            with contextlib.suppress(RecordError):
                named = claims(block.record(row), (share.topic, share.queue_id))
                block.sound[row] = int(rows.queue_offsets[row]) in named

    def _unwrapped(
        self, rows: Rows, raw: npt.NDArray[np.uint8], at: Ints
    ) -> tuple[Rows, npt.NDArray[np.uint8], Ints, tuple[Rows, list[str]] | None]:
        """Return rows for the messages of batches in place of their records, with bytes and the places in them.

        The last item has the rows of batches that can't be opened, which are left out, and the reasons.
        """
        flags_at = at + record.SYS_FLAG_AT + 3
        inside = (at >= 0) & (flags_at < len(raw))
        is_batch = inside & (raw[np.where(inside, flags_at, 0)] & record.INNER_BATCH > 0)
        if not is_batch.any():
            return rows, raw, at, None
        numbers_of: list[int] = []
        pieces: list[bytes] = []
        wrong: dict[int, str] = {}
        last, messages = -1, [b""]
        for number, (place, batch) in enumerate(zip(at.tolist(), is_batch.tolist(), strict=True)):
            size = int.from_bytes(raw[place : place + 4].tobytes(), "big", signed=True)
            if not batch:
                pieces.append(raw[place : place + max(size, 0)].tobytes())
                numbers_of.append(number)
                continue
            try:
                if place != last:
                    stored = StoredMessage(raw[place : place + size].tobytes())
                    last, messages = place, [message.raw for message in inner_messages(stored)]
            except RecordError as error:
                wrong[number] = error.reason
                continue
            those = messages
            if self._part.walk is None:
                inner = int(rows.queue_offsets[number]) - StoredMessage(messages[0]).queue_offset
                those = messages[max(inner, 0) : max(inner, 0) + 1] or messages[:1]
            pieces += those
            numbers_of += [number] * len(those)
        unwrapped = rows.take(np.array(numbers_of, np.int64))
        lengths = np.array(list(map(len, pieces)), np.int64)
        unwrapped.sizes = np.where(is_batch[numbers_of], lengths, unwrapped.sizes) if len(lengths) else lengths
        unreadable = (rows.take(np.array(list(wrong), np.int64)), list(wrong.values())) if wrong else None
        return unwrapped, np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths, unreadable

    def _matching(self, rows: Rows, block: Block | None, bodies: pa.Array | None) -> tuple[Rows, Any, pa.Array | None]:
        """Return the rows that the predicate selects; only the columns that it reads are decoded."""
        predicate = self._options.predicate
        if predicate is None:
            return rows, block, bodies
        arrays = [self._array(name, rows, block, bodies) for name in predicate.columns]
        places = numbers(np.arange(len(rows)))
        table = pa.table([*arrays, places], names=[*predicate.columns, _PLACE])
        which = table.filter(predicate.expression).column(_PLACE).to_numpy()
        if len(which) == len(rows):
            return rows, block, bodies
        return (
            rows.take(which),
            None if block is None else block.take(which),
            None if bodies is None else bodies.take(numbers(which)),
        )

    def _passing(self, rows: Rows, block: Block) -> Mask | None:
        """Return which rows pass, None for all; the cheapest test comes first."""
        conditions = self._options.selection
        masks: list[Mask] = []
        if conditions.begin_ms is not None:
            masks.append(block.field("store_timestamp") >= conditions.begin_ms)
        if conditions.end_ms is not None:
            masks.append(block.field("store_timestamp") < conditions.end_ms)
        if self._part.walk is not None and not conditions.takes_all:
            masks.append(self._passing_in_log(block))
        if self._tags is not None and not self._tags.takes_all and self._tags.tags:
            masks.append(_is_in(block.property(PropertyName.TAGS), sorted(self._tags.tags)))
        if self._filter is not None:
            names = self._filter.selector.properties()
            columns = {name: block.property(name) for name in names} or {"": pa.nulls(len(rows), pa.string())}
            matched = self._filter.match_arrow(pa.RecordBatch.from_pydict(columns))
            masks.append(matched.to_numpy(zero_copy_only=False))
        keep = reduce(np.logical_and, masks) if masks else None
        return None if keep is None or keep.all() else keep

    def _passing_in_log(self, block: Block) -> Mask:
        conditions = self._options.selection
        keep = np.ones(len(block), np.bool_)
        if conditions.queue_ids is not None:
            keep &= np.isin(block.field("queue_id"), sorted(conditions.queue_ids))
        offsets = block.field("queue_offset")
        keep &= (offsets >= conditions.begin_offset) & (offsets < conditions.end_offset)
        if conditions.topics is not None or conditions.topic_pattern is not None or not conditions.internal:
            topics = block.topics().dictionary_encode()
            good = np.array([conditions.has_topic(topic) for topic in topics.dictionary.to_pylist()], np.bool_)
            keep &= good[topics.indices.to_numpy()] if len(good) else keep
        return keep

    def _batch(self, rows: Rows, block: Block | None, bodies: pa.Array | None = None) -> pa.RecordBatch:
        arrays = [self._array(field.name, rows, block, bodies) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, name: str, rows: Rows, block: Block | None, bodies: pa.Array | None) -> pa.Array:
        count = len(rows)
        if name == "store":
            return pa.repeat(pa.scalar(self._store(), pa.string()), count)
        if name == CORRUPT:
            return pa.nulls(count, pa.string())
        if name == "body" and bodies is not None:
            return bodies
        if self._part.walk is None:
            if name == "topic":
                return strings([share.topic for share in self._part.slices]).take(numbers(rows.queue))
            if name == "queueId":
                return numbers(self._queue_ids[rows.queue])
            if name == "queueOffset":
                return numbers(rows.queue_offsets)
            if name == "tagsCode":
                return numbers(rows.codes)
        if name == "physicalOffset":
            return numbers(rows.places)
        if name == "size" and block is None:
            return numbers(rows.sizes.astype(np.int32))
        assert block is not None
        return block.column(name)

    def _store(self) -> str:
        return self._part.path if self._remote is None else self._remote.url

    # ----------------------------------------------------------------------------------------------------- the files

    def _log_file(self, start: int) -> npt.NDArray[np.uint8] | None:
        if self._file is not None and self._file[0] == start:
            return self._file[2]
        path = os.path.join(self._part.path, directory.COMMITLOG, file_name(start))
        self._file = None
        try:
            file = self._files.open(path)
        except CorruptionError:
            return None
        except StoreIOError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
        self._file = start, file, np.frombuffer(file.buffer, np.uint8)
        return self._file[2]

    def _fetch(self, places: Ints, sizes: Ints) -> None:
        if self._remote is not None:
            self._remote._fetch_records(places, sizes)

    def _release_pages(self) -> None:
        """Release the pages of the log that were read, which bounds the memory of a task."""
        if self._file is None or not self._files.is_shared:  # no file would bring back what is only in memory
            return
        if isinstance(buffer := self._file[1].buffer, mmap.mmap):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the system may not have this call
                buffer.madvise(mmap.MADV_DONTNEED)

    def _entries(self) -> tuple[Entries, list[str]]:
        """Return the entries of all slices, and the files that were deleted."""
        deleted: list[str] = []
        blocks, numbers, begins = list[bytes](), list[int](), list[int]()
        for number, share in enumerate(self._part.slices):
            for begin, raw in slice_entries(self._part, share, self._files, deleted):
                blocks.append(raw)
                numbers.append(number)
                begins.append(begin)
        counts = np.fromiter(map(len, blocks), np.int64, len(blocks)) // ENTRY_SIZE
        stored = np.frombuffer(b"".join(blocks), entry_dtype())
        topics = {share.topic for share in self._part.slices}
        has_equal_rows = self._entries_only and self._options.counts and len(topics) == 1  # so their order says nothing
        if len(self._part.slices) > 1 and not has_equal_rows:
            order = np.argsort(stored["physical_offset"].astype(np.int64), kind="stable")
        else:
            order = np.arange(len(stored))
        entries = Entries(
            stored,
            order,
            np.repeat(np.arange(len(blocks), dtype=np.int32), counts),
            np.array(numbers, np.int32),
            np.array(begins, np.int64) - (np.cumsum(counts) - counts),
        )
        return entries, deleted

    # ----------------------------------------------------------------------------------------------- views of the log

    def _walk(self, indexed: Rows, begin: int, end: int) -> tuple[Rows, list[tuple[int, str]]]:
        """Return every record from ``begin`` to ``end``: those with entries, and those between them."""
        inside = (indexed.places >= begin) & (indexed.places < end) & (indexed.sizes > 0)
        places, first = np.unique(indexed.places[inside], return_index=True)
        ends = places + indexed.sizes[inside][first]
        starts: list[Ints] = [places]
        bad: list[tuple[int, str]] = []
        # Gaps: between the end of a known record and the start of the next, before the first, and after the last.
        gap_begins = np.concatenate(([begin], ends))
        gap_ends = np.concatenate((places, [end]))
        for at, until in zip(
            gap_begins[gap_begins != gap_ends].tolist(), gap_ends[gap_begins != gap_ends].tolist(), strict=True
        ):
            if at < until:
                starts += self._chain(at, until, bad)
        if len(places):
            candidates = np.sort(indexed.places[self._may_be_wanted()[indexed.queue]])
            # NumPy 2.4 hashes in `isin`, which takes seven times as long as the order of both.
            is_candidate = np.searchsorted(candidates, places) < np.searchsorted(candidates, places, side="right")
            starts[0] = places[is_candidate]
            self._fetch(starts[0], (ends - places)[is_candidate])
        every = np.sort(np.concatenate(starts))
        empty = np.zeros(len(every), np.int64)
        return Rows(every, empty, empty, empty.astype(np.int32), empty), bad

    def _may_be_wanted(self) -> Mask:
        """Return which slices lead to records that a read of the log may want; others are not decoded.

        A queue of the light kind, ``%LMQ%``, leads to records of other topics.
        """
        every_slice = self._options.mode != "FAILFAST"  # an entry of a damaged store may lie
        conditions = self._options.selection
        names = [(share.topic, share.queue_id) for share in self._part.slices]
        return np.array(
            [every_slice or name[0].startswith(TopicPrefix.LIGHT) or conditions.has_queue(*name) for name in names],
            np.bool_,
        )

    def _chain(self, at: int, until: int, bad: list[tuple[int, str]]) -> list[Ints]:
        """Return the records from ``at`` to ``until``, found without entries."""
        starts: list[Ints] = []
        size = self._part.log_file_size
        while at < until:
            start = at - at % size
            raw = self._log_file(start)
            if raw is not None:
                end = min(until - start, len(raw))
                if self._remote is not None:
                    self._remote.fetch(f"{directory.COMMITLOG}/{file_name(start)}", [(at - start, end)])
                for places, wrong in record_starts(raw, at - start, end):
                    starts.append(places + start)
                    bad += [(start + place, why) for place, why in wrong]
                    self._release_pages()
            elif self._options.fail_on_data_loss:
                raise DataLossError(f"{self._part.path}: commitlog/{file_name(start)} was deleted; {REST}")
            at = start + size
        return starts


def _is_in(values: pa.Array, members: list[str]) -> Mask:
    import pyarrow.compute as pc

    # Compare as numbers, for the reason given in `numbers`.
    mask = pc.is_in(values, strings(members)).cast(pa.uint8())
    return np.frombuffer(mask.buffers()[1], np.bool_, len(mask), mask.offset) if len(mask) else np.zeros(0, np.bool_)


def _candidates(codes: Ints, tag_codes: Iterable[int]) -> Mask:
    """Return which entries can have a tag with one of the hashes; an entry with an extension address can have any."""
    mask: Mask = np.isin(codes.astype(np.int32), np.array(sorted(tag_codes), np.int64)) | (codes <= LAST_EXT_ADDRESS)
    return mask
