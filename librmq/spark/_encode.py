"""Encoding of rows to log records, by columns; only the checksum needs a call for each message.

The fixed part of records is a numpy array, the other parts are Arrow columns, and a record joins the parts of a row.
Fields that only the store knows (physical offset, queue offset, store time) stay zero until the commit. Properties are
in the order of a Java map: rows with the same names in the same order, a *shape*, are encoded together.

Columns are checked as a whole; a row that looks wrong is made a `Message`, whose error says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.arrays import Ints, integers
from librmq.columns.decoding import HEADER
from librmq.config import suggest
from librmq.errors import ConfigError, MessageIllegalError
from librmq.java.lang import (
    absolute_hashes,
    hash_append,
    hash_map_order,
    part_hashes,
    string_hash,
)
from librmq.message import Message, record
from librmq.message.ids import encode_host, parse_host
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName, split_keys
from librmq.message.topics import is_system_topic, validate_queue, validate_topic
from librmq.store.engine.store_parts import QueueName
from librmq.store.format.broker_tables import MOST_QUEUES

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "uniqueKey": ("string",),
    "properties": ("map<string,string>",),
    "queueId": ("int", "bigint", "smallint", "tinyint"),
    "flag": ("int",),
    "bornTimestamp": ("timestamp",),
}
"""Columns of a written row, and their possible Spark types."""

_OWN: Final = (("tags", PropertyName.TAGS), ("keys", PropertyName.KEYS), ("uniqueKey", PropertyName.UNIQUE_KEY))
_TAKEN: Final = frozenset(name for _, name in _OWN)
_NO_TEXT: Final = "[\x01\x02]"
_NOT_A_KEY: Final = r"^$|[\x09-\x0d\x1c-\x20\x{85}\p{Z}]"


@dataclass(slots=True)
class Encoded:
    """The records of a batch, one after the other."""

    data: pa.Buffer
    sizes: Ints
    lanes: list[QueueName]
    lane: npt.NDArray[np.int32]
    tags_code: Ints
    record_of_key: Ints
    key_hashes: Ints


@dataclass(frozen=True)
class Encoder:
    """The part of the encoding that is the same for all rows. Picklable."""

    topic: str | None
    queue_id: int | None
    queues: int
    """Number of queues for rows without a queue, unless ``queues_of`` has that of the topic."""
    host: str
    max_body: int
    max_record: int
    queues_of: Mapping[str, int] = field(default_factory=dict)

    def encode(self, batch: pa.RecordBatch, first_row: int, now_ms: int) -> Encoded:
        """Return the records of ``batch``, whose first row is number ``first_row`` of its task.

        Raises:
            MessageIllegalError: A row is no message; the error names the first one.
        """
        rows = batch.num_rows
        bodies = _bodies(batch, first_row)
        topics = self._topics(batch)
        queue_ids = self._queue_ids(batch, topics, first_row)
        lanes, lane = _lanes(topics, queue_ids)
        reserved = {name: _texts(batch, column) for column, name in _OWN}
        properties = _column(batch, "properties")
        reserved = {name: _or_property(values, properties, name) for name, values in reserved.items()}
        self._check_rows(bodies, reserved, _column(batch, "keys"), properties, first_row)
        stored = _Properties(properties, reserved, rows).encoded()
        host = encode_host(parse_host(self.host))
        topic_fields = _topic_fields(lanes).take(pa.array(lane))
        body_sizes = _sizes(bodies)
        property_sizes = _sizes(stored)
        if property_sizes.size and int(property_sizes.max()) > record.MAX_PROPERTIES_SIZE:
            at = int(property_sizes.argmax())
            raise MessageIllegalError(
                f"row {first_row + at}: {property_sizes[at]} bytes of properties, {record.MAX_PROPERTIES_SIZE} at most"
            )
        sizes = 72 + 2 * len(host) + body_sizes + _sizes(topic_fields) + 2 + property_sizes
        if rows and int(sizes.max()) > self.max_record:
            raise MessageIllegalError(
                f"row {first_row + int(sizes.argmax())}: a record of {sizes.max()} bytes does not fit a file of the "
                f"log, at most {self.max_record} do"
            )
        head = np.zeros(rows, HEADER)
        head["size"], head["magic"] = sizes, record.MESSAGE_MAGIC
        head["queue_id"], head["flag"] = queue_ids, _ints(batch, "flag", 0)
        head["body_crc"], head["body_length"] = _checksums(bodies), body_sizes
        head["born_timestamp"] = _millis(batch, now_ms)
        lengths = property_sizes.astype(">u2").view("S2")
        parts: list[Any]
        if len(host) == 8:
            head["born_host"] = head["store_host"] = np.void(host)
            parts = [_fixed(head.view(f"V{HEADER.itemsize}"))]
        else:
            head["sys_flag"] = record.HOSTS_V6
            raw = head.view(np.uint8).reshape(rows, HEADER.itemsize)
            both = np.tile(np.frombuffer(host, np.uint8), (rows, 1))
            wide = np.hstack((raw[:, :48], both, raw[:, 56:64], both, raw[:, 72:88]))
            parts = [_fixed(np.ascontiguousarray(wide).view(f"V{wide.shape[1]}").reshape(rows))]
        parts += [bodies, topic_fields, _fixed(lengths), stored]
        joined = pc.binary_join_element_wise(*parts, b"")
        record_of_key, hashes = hash_keys(lanes, lane, reserved)
        codes = tags_codes(reserved[PropertyName.TAGS]).to_numpy(zero_copy_only=False)
        buffer = joined.buffers()[2] if rows else pa.py_buffer(b"")
        return Encoded(buffer.slice(0, int(sizes.sum())), sizes, lanes, lane, codes, record_of_key, hashes)

    # --------------------------------------------------------------------------------------------------------- columns

    def _topics(self, batch: pa.RecordBatch) -> pa.Array:
        column = _column(batch, "topic")
        if column is None:
            if self.topic is None:
                raise ConfigError("no topic: expected a column topic or an option topic")
            return pa.repeat(pa.scalar(self.topic, pa.string()), batch.num_rows)
        return column if self.topic is None else column.fill_null(self.topic)

    def _queue_ids(self, batch: pa.RecordBatch, topics: pa.Array, first_row: int) -> Ints:
        names = topics.dictionary_encode()
        counts = [self.queues_of.get(name, self.queues) for name in names.dictionary.to_pylist()]
        counts_of_rows = np.array([*counts, 1], np.int64)[names.indices.fill_null(-1).to_numpy()]
        queue_ids: Ints = (first_row + np.arange(batch.num_rows)) % counts_of_rows
        if self.queue_id is not None:
            queue_ids[:] = self.queue_id
        column = _column(batch, "queueId")
        if column is None:
            return queue_ids
        return integers(pc.coalesce(column.cast(pa.int64()), pa.array(queue_ids)))

    def _check_rows(
        self,
        bodies: pa.Array,
        reserved: dict[str, pa.Array],
        keys: pa.Array | None,
        properties: pa.Array | None,
        first_row: int,
    ) -> None:
        suspicious = np.zeros(len(bodies), np.bool_)
        suspicious |= _sizes(bodies) > self.max_body
        for values in reserved.values():
            if _least_byte(values) <= 2:
                suspicious |= _mask(pc.match_substring_regex(values, _NO_TEXT))
        lists = keys if keys is not None and pa.types.is_list(keys.type) else None
        if lists is not None:
            wrong_keys = pc.match_substring_regex(lists.flatten(), _NOT_A_KEY).fill_null(True)
            suspicious[pc.list_parent_indices(lists).filter(wrong_keys).to_numpy(zero_copy_only=False)] = True
        if properties is not None and len(properties):
            row = np.repeat(np.arange(len(properties)), map_counts(properties))
            names_of, items = map_entries(properties)
            names = names_of.dictionary_encode()
            bad = [
                not name.strip() or "\1" in name or "\2" in name or name in RESERVED_PROPERTIES - _TAKEN
                for name in names.dictionary.to_pylist()
            ]
            wrong = np.array(bad, np.bool_)[names.indices.to_numpy()] if len(names_of) else np.zeros(0, np.bool_)
            if items.null_count:
                wrong |= items.is_null().to_numpy(zero_copy_only=False)
            if _least_byte(items) <= 0x20 or _has_wide(items):
                wrong |= _mask(pc.match_substring_regex(items, _NO_TEXT))
                wrong |= _mask(pc.equal(pc.utf8_trim_whitespace(items), ""))
            wrong |= _sizes(items.fill_null("")) == 0
            suspicious[row[wrong]] = True
        for at in np.flatnonzero(suspicious).tolist():
            body = bodies[at].as_py()
            if len(body) > self.max_body:
                raise MessageIllegalError(f"row {first_row + at}: a body of {len(body)} bytes, {self.max_body} at most")
            others = {} if properties is None else dict(properties[at].as_py() or ())
            try:
                Message("t", b"", properties={name: value for name, value in others.items() if name not in _TAKEN},
                        tags=reserved["TAGS"][at].as_py(),
                        keys=split_keys(reserved["KEYS"][at].as_py()) if lists is None
                        else lists[at].as_py() or (),
                        unique_key=reserved["UNIQ_KEY"][at].as_py())  # fmt: skip
            except MessageIllegalError as error:
                raise MessageIllegalError(f"row {first_row + at}: {error}") from None


def check_columns(names: Sequence[tuple[str, str]], extra: str | None) -> None:
    """Raise `ConfigError` for columns (name, Spark type) that cannot be written; ``extra`` is one to order by."""
    for name, count in Counter(name for name, _ in names).items():
        if count > 1:
            raise ConfigError(f"column {name!r}: two columns are written to it; write one")
    for name, kind in names:
        if name not in COLUMNS:
            if name == extra:
                continue
            raise ConfigError(f"column {name!r}: expected one that can be written: {suggest(name, COLUMNS)}")
        if kind not in COLUMNS[name]:
            raise ConfigError(f"column {name!r}: expected type {' or '.join(COLUMNS[name])}, found {kind}")
    if "body" not in {name for name, _ in names}:
        raise ConfigError("no body: expected a column body of type binary or string")
    if extra is None:
        return
    order_kind = dict(names).get(extra)
    if order_kind is None:
        raise ConfigError(f"option orderBy: there is no column {extra!r}; {suggest(extra, dict(names))}")
    # Arrow for Python has no intervals of months.
    unordered = ("array", "map", "struct", "void", "variant", "interval year", "interval month")
    if order_kind == "interval" or order_kind.startswith(unordered):
        raise ConfigError(f"option orderBy: column {extra!r} has type {order_kind}, which has no order; name another")


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    at = batch.schema.get_field_index(name)
    if at < 0:
        return None
    column, kind = batch.column(at), batch.schema.field(at).type
    # Texts can have offsets of 64 bits, if the session asks for them.
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_list(kind) and pa.types.is_large_string(kind.value_type):
        return column.cast(pa.list_(pa.string()))
    if pa.types.is_map(kind) and pa.types.is_large_string(kind.key_type):
        return column.cast(pa.map_(pa.string(), pa.string()))
    return column


def _bodies(batch: pa.RecordBatch, first_row: int) -> pa.Array:
    column = _column(batch, "body")
    assert column is not None
    if column.null_count:
        at = first_row + int(column.is_null().to_numpy(zero_copy_only=False).argmax())
        raise MessageIllegalError(f"row {at}: body: expected bytes or text, found null; an empty body is written as ''")
    return column.cast(pa.binary())


def _texts(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column of texts, null where missing; lists of keys are joined."""
    column = _column(batch, name)
    if column is None:
        return pa.nulls(batch.num_rows, pa.string())
    if pa.types.is_list(column.type):
        column = pc.binary_join(column, " ")
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


def _or_property(values: pa.Array, properties: pa.Array | None, name: str) -> pa.Array:
    """Return a property from its own column, or from the map where the column is null."""
    if properties is None or not values.null_count:
        return values
    value = pc.map_lookup(properties, pa.scalar(name), "last")
    return pc.coalesce(values, pc.if_else(pc.equal(value, ""), pa.scalar(None, pa.string()), value))


def _ints(batch: pa.RecordBatch, name: str, default: int) -> Any:
    column = _column(batch, name)
    return default if column is None else column.fill_null(default).to_numpy(zero_copy_only=False)


def _millis(batch: pa.RecordBatch, now_ms: int) -> Any:
    column = _column(batch, "bornTimestamp")
    if column is None:
        return now_ms
    micros = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return np.floor_divide(micros.fill_null(now_ms * 1000).to_numpy(zero_copy_only=False), 1000)


def _sizes(values: pa.Array) -> Ints:
    sizes: Ints = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


def _mask(values: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = values.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return mask


def _bytes_of(values: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of texts, with possible others around them."""
    data = values.buffers()[2] if len(values) else None
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def _least_byte(values: pa.Array) -> int:
    data = _bytes_of(values)
    return int(data.min()) if len(data) else 255


def _has_wide(values: pa.Array) -> bool:
    data = _bytes_of(values)
    return bool(len(data)) and int(data.max()) >= 0x80


def _fixed(values: npt.NDArray[Any]) -> pa.Array:
    """Return values of one length as a binary array."""
    size = values.dtype.itemsize
    offsets = np.arange(len(values) + 1, dtype=np.int32) * size
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
    )


def _checksums(bodies: pa.Array) -> list[int]:
    if not len(bodies):
        return []
    _, offsets, data = bodies.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(bodies) + 1, bodies.offset * 4).tolist()
    view = memoryview(data or b"")
    return [record.crc32(view[a:b]) & 0x7FFFFFFF for a, b in pairwise(bounds)]


def _lanes(topics: pa.Array, queue_ids: Ints) -> tuple[list[QueueName], npt.NDArray[np.int32]]:
    """Return the queues of the rows, each once, and the number of each row's queue."""
    if topics.null_count:
        at = int(topics.is_null().to_numpy(zero_copy_only=False).argmax())
        raise MessageIllegalError(f"row {at} of its batch: topic: expected text, found null")
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    for topic in names:
        validate_topic(topic)
        if is_system_topic(topic):
            raise MessageIllegalError(f"topic {topic!r} is the broker's own: write to a user topic")
    for queue_id in (int(queue_ids.min()), int(queue_ids.max())) if len(queue_ids) else ():
        validate_queue("t", queue_id)
        if queue_id >= MOST_QUEUES:
            raise MessageIllegalError(f"queue id: expected at most {MOST_QUEUES - 1}, found {queue_id}")
    pairs = encoded.indices.to_numpy().astype(np.int64) << 32 | queue_ids
    unique, which = np.unique(pairs, return_inverse=True)
    lanes = [(names[pair >> 32], pair & 0xFFFFFFFF) for pair in unique.tolist()]
    return lanes, which.reshape(-1).astype(np.int32)


def _topic_fields(lanes: Sequence[QueueName]) -> pa.Array:
    fields = [topic.encode() for topic, _ in lanes]
    return pa.array([bytes((len(field),)) + field for field in fields], pa.binary())


def tags_codes(tags: pa.Array) -> pa.Int64Array:
    """Return the tags code of each queue entry: the Java hash of its tags, 0 for none."""
    encoded = tags.dictionary_encode()
    names = encoded.dictionary
    hashes = _hashes(np.zeros(len(names), np.int64), names)
    codes = pa.array(hashes.astype(np.uint32).view(np.int32).astype(np.int64), pa.int64())
    return codes.take(encoded.indices).fill_null(0)


def hash_keys(
    lanes: Sequence[QueueName], lane: npt.NDArray[np.int32], reserved: dict[str, pa.Array]
) -> tuple[Ints, Ints]:
    """Return the row of each key, ascending, and its hash in the index; the unique id first."""
    prefixes = np.array([string_hash(f"{topic}#") for topic, _ in lanes], np.int64)
    uniques, keys = reserved[PropertyName.UNIQUE_KEY], reserved[PropertyName.KEYS]
    rows = len(lane)
    unique_rows = np.flatnonzero(uniques.is_valid().to_numpy(zero_copy_only=False))
    if (_bytes_of(keys) == 0x20).any():
        split = pc.split_pattern(keys.fill_null(""), " ")
        flat = split.flatten()
        nonempty = _mask(pc.not_equal(flat, "")) if len(flat) else np.zeros(0, np.bool_)
        key_rows = np.repeat(np.arange(rows), integers(pc.list_value_length(split)))[nonempty]
        keys = flat.filter(pa.array(nonempty))
    else:
        key_rows = np.flatnonzero(keys.is_valid().to_numpy(zero_copy_only=False))
        keys = keys.drop_null()
    owner = np.concatenate((unique_rows, key_rows)).astype(np.int64)
    of_row = prefixes[lane]
    hashes = np.concatenate((_hashes(of_row[unique_rows], uniques.drop_null()), _hashes(of_row[key_rows], keys)))
    order = np.argsort(owner, kind="stable")
    return owner[order], absolute_hashes(hashes[order])


def _hashes(prefixes: Ints, keys: pa.Array) -> Ints:
    """Return `hash_append` of each text of a column without nulls to its prefix, modulo 2**32."""
    if not len(keys):
        return np.zeros(0, np.int64)
    begins = np.frombuffer(keys.buffers()[1], np.int32, len(keys), keys.offset * 4)
    hashes = part_hashes(_bytes_of(keys), begins, _sizes(keys), prefixes)
    for at in np.flatnonzero(hashes < 0):
        hashes[at] = hash_append(int(prefixes[at]), keys[at].as_py()) & 0xFFFFFFFF
    return hashes


def map_counts(properties: pa.Array) -> Ints:
    """Return the number of entries of each map; none for null."""
    offsets = np.frombuffer(properties.buffers()[1], np.int32, len(properties) + 1, properties.offset * 4)
    counts = np.diff(offsets).astype(np.int64)
    if properties.null_count:
        counts[properties.is_null().to_numpy(zero_copy_only=False)] = 0
    return counts


def map_entries(properties: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return names and values of all maps that are not null, in order."""
    if properties.null_count:
        properties = properties.drop_null()
    offsets = np.frombuffer(properties.buffers()[1], np.int32, len(properties) + 1, properties.offset * 4)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(properties) else (0, 0)
    return properties.keys.slice(first, last - first), properties.items.slice(first, last - first)


def _row_numbers(table: Ints) -> Ints:
    """Return a number for each row, equal for equal rows only."""
    numbers = np.zeros(len(table), np.int64)
    for column in table.T:
        values, codes = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * len(values) + codes, return_inverse=True)
    return numbers


class _Properties:
    def __init__(self, properties: pa.Array | None, reserved: dict[str, pa.Array], rows: int) -> None:
        self._reserved = reserved
        self._rows = rows
        self._names: list[str] = []
        counts, codes = np.zeros(rows, np.int64), np.zeros(0, np.int64)
        self._values = pa.array([], pa.string())
        if properties is not None and rows:
            counts = map_counts(properties)
            keys, values = map_entries(properties)
            row = np.repeat(np.arange(rows), counts)
            encoded = keys.dictionary_encode()
            self._names = encoded.dictionary.to_pylist()
            codes = encoded.indices.to_numpy().astype(np.int64)
            user = np.array([name not in _TAKEN for name in self._names], np.bool_)
            is_stored = user[codes] if len(codes) else np.zeros(0, np.bool_)
            self._values = values.filter(pa.array(is_stored))
            codes, row = codes[is_stored], row[is_stored]
            counts = np.bincount(row, minlength=rows)
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        widest = int(counts.max()) if rows else 0
        # A row's shape: the names of its map in their order, and which of the others it has.
        shapes = np.full((rows, widest + len(reserved)), -1, np.int64)
        row = np.repeat(np.arange(rows), counts)
        shapes[row, np.arange(len(codes)) - np.repeat(self._starts[:-1], counts)] = codes
        for at, values in enumerate(reserved.values()):
            shapes[:, widest + at] = values.is_valid().to_numpy(zero_copy_only=False)
        self._widest = widest
        self._shapes = shapes

    def encoded(self) -> pa.Array:
        if not self._rows:
            return pa.array([], pa.binary())
        if (self._shapes == self._shapes[0]).all():
            return self._joined(np.arange(self._rows), self._shapes[0]).cast(pa.binary())
        _, first, which = np.unique(_row_numbers(self._shapes), return_index=True, return_inverse=True)
        groups, places = [], []
        for number, example in enumerate(first.tolist()):
            rows = np.flatnonzero(which.reshape(-1) == number)
            groups.append(self._joined(rows, self._shapes[example]))
            places.append(rows)
        order = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_arrays(groups).take(pa.array(order)).cast(pa.binary())

    def _joined(self, rows: Ints, shape: Ints) -> pa.Array:
        names, columns = [], []
        for at, code in enumerate(shape[: self._widest].tolist()):
            if code >= 0:
                names.append(self._names[code])
                columns.append(self._values.take(pa.array(self._starts[rows] + at)))
        for (name, values), is_present in zip(self._reserved.items(), shape[self._widest :].tolist(), strict=True):
            if is_present:
                names.append(name)
                columns.append(values.take(pa.array(rows)))
        if not names:
            return pa.repeat(pa.scalar("", pa.string()), len(rows))
        parts: list[Any] = []
        for number, at in enumerate(hash_map_order(tuple(names))):
            separator = "\2" if number else ""
            parts += [pa.scalar(f"{separator}{names[at]}\1"), columns[at]]
        return pc.binary_join_element_wise(*parts, "")
