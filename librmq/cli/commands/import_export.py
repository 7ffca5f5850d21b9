"""``import`` and ``export``: messages as Parquet, CSV or JSON lines."""

from __future__ import annotations

import argparse
import base64
import binascii
import codecs
import contextlib
import csv
import itertools
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

from librmq.cli._output import Output, ProgressBar, complain
from librmq.cli._rows import binary_input, parse_object
from librmq.cli._selection import times_between
from librmq.cli._stores import read_moment, settle_config, storage_options
from librmq.clock import ManualClock, SystemClock
from librmq.config import nearest
from librmq.errors import CorruptionError, InputError, MessageIllegalError, MissingExtraError, StoreIOError
from librmq.files import DiskFiles, Files, OverlayFiles
from librmq.formatting import cell_text, unguarded
from librmq.message import Message, record
from librmq.message.ids import parse_host
from librmq.message.properties import PropertyName, checked_encoding, decode_properties, encode_properties
from librmq.message.topics import is_system_topic, validate_topic
from librmq.runtime import critical
from librmq.runtime.event_log import watched
from librmq.store import AppendFields, BrokerTables, MessageStore
from librmq.store.format.broker_tables import MOST_QUEUES, unlisted_topics
from librmq.store.format.directory import CONFIG, check_kind

_OF_THE_STORE: Final = record.HOSTS_V6 | record.TRANSACTION_MASK | record.COMPRESSED | 0x700
_FLUSH_BYTES: Final = 64 << 20
_COLUMNS: Final = frozenset((
    "topic", "queueId", "body", "body_b64", "properties", "propertiesString", "tags", "keys", "uniqueKey",
    "bornTimestamp", "storeTimestamp", "reconsumeTimes", "sysFlag", "flag", "bornHost", "storeHost",
    "preparedTransactionOffset",
))  # fmt: skip
"""The columns that are restored."""
_OF_ANOTHER_STORE: Final = frozenset((
    "queueOffset", "physicalOffset", "size", "bodyCrc", "tagsCode", "storedBody", "store", "date", "_corrupt_record",
))  # fmt: skip
"""Columns of an export that say where the message was, or what its bytes were."""
_COMPRESSIONS: Final = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
"""The programs that decompress files, by the endings of those."""


class _Read(NamedTuple):
    message: Message
    queue_id: int
    fields: AppendFields
    store_timestamp_ms: int | None


def import_(arguments: argparse.Namespace, output: Output) -> int:
    """Append the messages in a file or folder, and print a line for each of their topics."""
    counted: dict[str, list[int]] = {}
    unknown: set[str] = set()
    with ExitStack() as opened:
        rows = _rows(arguments.path, arguments.input_format, opened)
        write = opened.enter_context(_Writer(arguments)).append_message
        is_begun = False
        for number in itertools.count(1):
            done = number - 1
            try:
                row = next(rows, None)
                if row is None:
                    break
                if number <= arguments.skip:
                    continue
                read = _read(row)
                for column in map(str, row.keys() - _COLUMNS - _OF_ANOTHER_STORE):
                    _note_unknown(column, unknown)
                with critical:  # so that the row that an interrupt names is the next one
                    write(read)
                    is_begun = not arguments.dry_run
                    done = number
                    count = counted.setdefault(read.message.topic, [0, 0, 0])
                    count[0] = max(count[0], read.queue_id + 1)
                    count[1] += 1
                    count[2] += len(read.message.body)
            except (InputError, MessageIllegalError, StoreIOError, csv.Error, UnicodeEncodeError) as error:
                what = "half of a surrogate pair is not a character" if isinstance(error, UnicodeEncodeError) else error
                hint = f" ({_how_to_continue(done)})" if is_begun else ""
                raise InputError(f"{arguments.path}: row {number}: {what}{hint}") from None
            except KeyboardInterrupt:
                if is_begun:
                    complain(f"note: {_how_to_continue(done)}")
                raise
    for topic, (queues, messages, size) in sorted(counted.items()):
        row = {"topic": topic, "queues": queues, "messages": messages, "body_bytes": size}
        output.row({**row, "dry_run": arguments.dry_run})
    return 0


def _how_to_continue(done: int) -> str:
    return f"earlier rows are imported: continue by --skip {done}"


def _note_unknown(column: str, noted: set[str]) -> None:
    """Say once that a column is not imported."""
    if column not in noted:
        noted.add(column)
        near = nearest(column, _COLUMNS)
        complain(f"note: column {column!r} is unknown and not imported{f'; did you mean {near}?' if near else ''}")


class _Writer:
    """The store that messages go to, which keeps their store times if it was empty.

    A dry run does the same in memory, which it empties now and then.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._clock = ManualClock(0)
        self._open()
        self._keeps_times = self._store.log.begin == self._store.log.end
        self._queues: dict[str, int] = {}

    def _open(self) -> None:
        arguments, path = self._arguments, self._arguments.store
        files: Files = OverlayFiles() if arguments.dry_run else DiskFiles(follow_links=arguments.follow_links)
        check_kind(path, files, writable=True)
        config = None if arguments.config is None else settle_config(path, files, arguments.config)
        self._store = MessageStore.open(path, config, clock=self._clock, background=False, files=files)
        self._tables = BrokerTables.open(os.path.join(path, CONFIG), files=files)
        self._unflushed = 0

    def append_message(self, read: _Read) -> None:
        """Append a message; its topic gets the queues that it needs."""
        if self._unflushed > _FLUSH_BYTES and self._arguments.dry_run:
            self._store.close()
            self._open()
        elif self._unflushed > _FLUSH_BYTES:
            self._store.flush()
            self._unflushed = 0
        time_ms = read.store_timestamp_ms if self._keeps_times else SystemClock().now_ms()
        self._clock.move_to(max(self._clock.now_ms(), SystemClock().now_ms() if time_ms is None else time_ms))
        result = self._store.append(read.message, read.queue_id, wait=False, **read.fields)
        topic = read.message.topic
        self._queues[topic] = max(self._queues.get(topic, 0), read.queue_id + 1)
        self._unflushed += result.size

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._tables.topics.is_new:  # in a table that others began, topics of older messages count as deleted
                self._queues = unlisted_topics(self._store.queues, self._store.queue_range, ())
            for topic, queues in self._queues.items():
                self._tables.add_queues(topic, queues)
            self._tables.persist(SystemClock().now_ms())
        finally:
            self._store.close()


# ------------------------------------------------------------------------------------------------------------ rows


def _rows(path: str, form: str | None, opened: ExitStack) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a file of JSON lines or CSV, of standard input, or of a folder of Parquet."""
    *_, inner, ending = "", *path.lower().split(".")
    packer = _COMPRESSIONS.get(ending)
    ending = ending if packer is None else inner
    form = form or ("parquet" if os.path.isdir(path) else {"csv": "csv", "parquet": "parquet"}.get(ending, "jsonl"))
    if form == "parquet":
        return _rows_of_parquet(path, opened)
    if packer is not None:
        command = f"{packer} -dc {shlex.quote(path)} | librmq import STORE - --input-format {form}"
        raise InputError(f"{path}: a compressed file is not read: {command}")
    try:
        raw = binary_input() if path == "-" else opened.enter_context(open(path, "rb"))  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    total = 0 if path == "-" else os.fstat(raw.fileno()).st_size
    lines = opened.enter_context(ProgressBar("import", total)).track(raw, len)
    if form == "csv":
        csv.field_size_limit(1 << 30)
        first = next(lines, b"").removeprefix(codecs.BOM_UTF8)  # what Excel begins with
        texts = (line.decode("utf-8", "surrogateescape") for line in itertools.chain([first], lines))
        return map(_from_cells, csv.DictReader(texts, strict=True))
    return (parse_object(line) for line in lines if line.strip())


def _rows_of_parquet(path: str, opened: ExitStack) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.dataset as ds
    except ImportError:
        raise MissingExtraError("reading Parquet", "arrow") from None
    if path == "-":
        raise InputError("-: Parquet is not read from standard input: name its file or folder")
    try:
        dataset = ds.dataset(path, format="parquet", partitioning="hive", ignore_prefixes=["_", "."])
        bar = opened.enter_context(ProgressBar("import", dataset.count_rows(), "messages"))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: {error}") from None
    files = sorted(dataset.get_fragments(), key=lambda fragment: str(os.path.basename(fragment.path)))
    batches = (batch for file in files for batch in file.to_batches(schema=dataset.schema))
    return _rows_of_batches(bar.track(batches, len), pa.ArrowException)


def _rows_of_batches(batches: Iterator[Any], arrow_error: type[Exception]) -> Iterator[Mapping[str, Any]]:
    try:
        for batch in batches:
            yield from batch.to_pylist()
    except (OSError, arrow_error, UnicodeDecodeError) as error:
        raise InputError(f"the file is damaged: {error}") from None


def _from_cells(row: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a row of CSV as they were before ``export`` made them safe.

    Raises:
        InputError: The row has more cells than the heading, or fewer.
    """
    if None in row or None in row.values():
        raise InputError("expected as many cells as the heading has: is a comma or a quote in a cell without quotes?")
    return {
        name: value if name == "properties" else unguarded(value) if name == "body" else cell_text(value)
        for name, value in row.items()
    }


# -------------------------------------------------------------------------------------------------------- messages


def _read(row: Mapping[str, Any]) -> _Read:
    """Return the message of a row with the columns of an export.

    Raises:
        InputError: A column is missing, or has a value of another kind.
        MessageIllegalError: A store can't have the topic, or a record a property.
    """
    if "topic" not in row:
        raise InputError(f"expected a column 'topic', found {', '.join(map(repr, row)) or 'none':.200}")
    topic = row["topic"]
    if not isinstance(topic, str) or not topic:
        raise InputError(f"topic: expected text, found {topic!r:.80}")
    validate_topic(topic)
    if not topic.isprintable():  # other letters that a broker refuses may be in the export of a store
        raise InputError(f"topic {topic!r:.80} has control characters, which a broker refuses")
    if is_system_topic(topic):
        raise InputError(f"topic {topic!r} is the broker's own; its messages have no meaning in another store")
    message = Message(topic, _body(row))
    message.flag = _integer(row, "flag", 32)
    flags = _integer(row, "sysFlag", 32)
    sys_flag = flags & ~_OF_THE_STORE
    if flags & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT:
        sys_flag |= record.TRANSACTION_COMMIT
    if flags & record.COMPRESSED and flags & 0x700 in (0, record.COMPRESSION_ZLIB):
        message.body = zlib.compress(message.body, 5)
        sys_flag |= flags & (record.COMPRESSED | 0x700)
    fields = AppendFields(
        sys_flag=sys_flag,
        reconsume_times=_integer(row, "reconsumeTimes", 32),
        prepared_transaction_offset=_integer(row, "preparedTransactionOffset"),
        is_copy=True,
        properties_raw=_stored_properties(row),  # as bytes, so that a delay that is over does not begin again
    )
    if (born_ms := _time(row, "bornTimestamp")) is not None:
        fields["born_timestamp_ms"] = born_ms
    for column, field in (("bornHost", "born_host"), ("storeHost", "store_host")):
        if row.get(column):
            try:
                fields[field] = parse_host(str(row[column]))  # type: ignore[literal-required]
            except (ValueError, TypeError):
                raise InputError(
                    f"{column}: expected a host such as 127.0.0.1:10911, found {row[column]!r:.80}"
                ) from None
    queue_id = _integer(row, "queueId")
    if not 0 <= queue_id < MOST_QUEUES:
        raise InputError(f"queueId: expected a whole number from 0 to {MOST_QUEUES - 1}, found {queue_id}")
    return _Read(message, queue_id, fields, _time(row, "storeTimestamp"))


def _body(row: Mapping[str, Any]) -> bytes:
    encoded = row.get("body_b64")
    if encoded:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise InputError(f"body_b64: expected base64, found {encoded!r:.80}") from None
    body = row.get("body")
    if body is None:
        return b""
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode("utf-8", "surrogateescape")
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _stored_properties(row: Mapping[str, Any]) -> bytes:
    """Return the properties as a record has them.

    Raises:
        InputError: A column has a value of another kind.
        MessageIllegalError: A record can't hold a property, or columns contradict each other.
    """
    value = row.get("properties") or {}
    if isinstance(value, str):
        value = parse_object(value)
    try:
        properties = dict(value)
    except (TypeError, ValueError):
        properties = {"": None}
    if not all(isinstance(name, str) and isinstance(value, str) and name for name, value in properties.items()):
        raise InputError(f"properties: expected names with strings, found {value!r:.80}")
    if empty := [name for name, value in properties.items() if not value]:
        raise InputError(f"properties: {empty[0]!r:.80} is empty, which a record can't keep: leave it out")
    raw = row.get("propertiesString") or ""
    if not isinstance(raw, str):
        raise InputError(f"propertiesString: expected text, found {raw!r:.80}")
    properties = decode_properties(raw) | properties
    message = Message(
        "",
        b"",
        tags=None if PropertyName.TAGS in properties else _text(row, "tags"),
        unique_key=None if PropertyName.UNIQUE_KEY in properties else _text(row, "uniqueKey"),
    )
    properties |= message.properties
    if PropertyName.KEYS not in properties and (keys := _keys(row)):
        properties[PropertyName.KEYS] = keys
    light = properties.pop(PropertyName.INNER_MULTI_QUEUE_OFFSET, None)  # its places in the store that was exported
    if not raw or light is not None:
        return encode_properties(properties)
    checked_encoding(raw.encode(), properties)
    return raw.encode()


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name}: expected text, found {value!r:.80}")
    return value


def _keys(row: Mapping[str, Any]) -> str | None:
    """Return the keys as a record has them: one, or several of a list, in CSV as JSON.

    Raises:
        InputError: The column has something else.
        MessageIllegalError: A key has a space, which separates keys.
    """
    value = row.get("keys")
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and all(isinstance(key, str) and key and " " not in key for key in value):
        return " ".join(value)  # stored keys can have other whitespace, which new ones can't
    keys = value if isinstance(value, list) else _text(row, "keys") or ()
    return Message("", b"", keys=keys).properties.get(PropertyName.KEYS)


def _integer(row: Mapping[str, Any], name: str, bits: int = 64) -> int:
    value = row.get(name)
    if value is None or value == "":
        return 0
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 1 << bits
    if isinstance(value, bool | float) or not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise InputError(f"{name}: expected a whole number of {bits} bits, found {value!r:.80}")
    return number


_LONGEST_DATE: Final = len("20261120")


def _time(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    if (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and len(value) > _LONGEST_DATE and value.removeprefix("-").isdecimal()
    ):
        return _integer(row, name)  # as text, export writes times outside of the years of ISO 8601
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return round(at.timestamp() * 1000)
    except (TypeError, ValueError, OverflowError, OSError):
        raise InputError(f"{name}: expected a time such as 2026-11-20T08:00:00.000Z, found {value!r:.80}") from None


# ---- export

_MODES: Final = re.compile(r" \(mode PERMISSIVE[^)]*\)")
"""What an error advises users of columns and Spark; the command has no modes."""


def export(arguments: argparse.Namespace, output: Output) -> int:
    """Export messages, and print a row that says how many."""
    from librmq.columns import ReaderKeywords
    from librmq.columns import export as export_messages

    since, until = times_between(arguments, arguments.store)
    settings = ReaderKeywords(
        topic=re.compile("(?s).*") if arguments.all and not arguments.topic else arguments.topic,
        tags=arguments.tag,
        sql=arguments.sql,
        as_recovered=arguments.as_recovered,
    )
    limits = {
        "storage_options": storage_options(arguments),
        "columns": arguments.columns,
        "at": read_moment(arguments),
        "since": since,
        "until": until,
        "queue": arguments.queue,
    }
    settings.update(cast("ReaderKeywords", {name: value for name, value in limits.items() if value is not None}))

    def show(done: int, total: int | None) -> None:
        if total is not None:  # otherwise these are bytes of the log, which opening walks over
            bar.advance(done, total)

    with ProgressBar("export", 0, "messages") as bar, watched(show):
        try:
            exported = export_messages(
                arguments.store,
                arguments.out,
                format=arguments.file_format,
                partition_by=arguments.partition_by or (),
                grep=arguments.grep,
                **settings,
            )
        except CorruptionError as error:
            what = _MODES.sub("", error.what)
            if error.kind in ("checksum", "record") and not arguments.as_recovered:
                what += "; --as-recovered exports the messages before it"
            raise CorruptionError(error.file, error.offset, error.kind, what) from None
    output.row(
        {
            "type": "export",
            "path": exported.path,
            "rows": exported.rows,
            "files": exported.files,
            "skipped": exported.skipped,
        }
    )
    return 0
