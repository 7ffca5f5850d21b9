"""Read a store as Arrow: a stream of record batches, or a dataset to which DuckDB and Polars push their filters.

>>> batches = reader("data", topic="orders", columns=["queueOffset", "body"])  # doctest: +SKIP
>>> table = batches.read_all()  # doctest: +SKIP
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final, TypedDict, Unpack, cast, get_args

import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns._read import Reading
from librmq.columns.decoding import TYPES, columns_of, default_columns
from librmq.columns.options import (
    LARGEST_OFFSET,
    LATEST,
    Mode,
    Predicate,
    ReadOptions,
    ReadSelection,
    View,
    check_filters,
    topics_named,
)
from librmq.columns.planner import plan
from librmq.columns.remote import RemoteFiles, RemoteStore, check_storage_options, located
from librmq.config import suggest, to_timestamp_ms
from librmq.errors import ConfigError
from librmq.files import Files
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.message.traces import TraceReader
from librmq.store import MessageStore

Store = str | os.PathLike[str] | RemoteStore
Stores = Store | Sequence[Store]
"""The folder or URL of a store, or several."""

_OF_SPARK: Final = {
    "selector": "sql",
    "startingtimestamp": "since",
    "endingtimestamp": "until",
    "topicpattern": "topic, which takes re.compile(…)",
}
"""Options of Spark's source, without case, that no similar name of a setting explains."""


class ReaderKeywords(TypedDict, total=False):
    """Settings of a read: which rows and columns, and how. A condition that is left out, or None, takes all rows."""

    topic: str | Iterable[str] | re.Pattern[str] | None
    """A name, several, or a pattern for the whole name; ``*`` in a name stands for any text, as in ``%RETRY%*``. By
    default all user topics: neither the broker's own, nor those of retries and dead letters."""
    topics: str | Iterable[str] | re.Pattern[str] | None
    """Another spelling of ``topic``, until 1.0."""
    queue: int | Iterable[int] | None
    """Queue ids."""
    tags: str | None
    """A subscription such as ``"created || paid"``; in the view ``queues`` by hash alone, in place of which entries of
    ``SCHEDULE_TOPIC_XXXX`` have the time of delivery."""
    sql: str | None
    """An SQL92 expression over properties, decided as the broker does."""
    filter: Any
    """A `pyarrow.compute` expression over the columns of the view."""
    columns: Sequence[str] | None
    """The names of the columns to return; others are not decoded."""
    since: datetime | int | None
    """Earliest store time: a time with a time zone, or milliseconds since 1970. With it and ``until``, store times are
    assumed to grow along a queue."""
    until: datetime | int | None
    """Exclusive end of the store times."""
    at: datetime | int | None
    """The moment at which the store is read, as `librmq.MessageStore.open` takes it: a time with a time zone, or the
    physical offset at which the log ended."""
    offsets: range | Mapping[tuple[str, int], range | int] | None
    """Queue offsets: one range for every queue, or a mapping from topic and queue id to a range or the first offset.
    Only queues in the mapping are read."""
    view: View
    """``messages`` (those in queues), ``all`` (also those of retries, dead letters and the broker's own topics),
    ``queues`` (the entries of all queues alone) or ``log`` (every record). Default: ``messages``."""
    mode: Mode
    """On damage ``FAILFAST`` raises, ``PERMISSIVE`` returns a row with the reason in a column ``_corrupt_record``,
    ``DROPMALFORMED`` skips the row. Default: ``FAILFAST``."""
    as_recovered: bool
    """Whether ``FAILFAST`` leaves out sound records after damage, as a recovery does, instead of raising.
    Default: False."""
    fail_on_data_loss: bool
    """Whether to raise if offsets named in a mapping are gone, instead of reading the rest. Default: True."""
    checksums: bool
    """Whether to compare bodies with their checksums. Default: True."""
    files: Files | None
    """Where the files are; by default on the disk."""
    storage_options: Mapping[str, Any] | None
    """For a URL: arguments of the file system, such as keys and endpoints; refused for a local path, and for a
    `RemoteStore`, which has its own."""


def reader(store: Stores, **settings: Unpack[ReaderKeywords]) -> pa.RecordBatchReader:
    """Return the messages of a store, or several, as a stream of record batches.

    By default these are all user messages. Columns have the names of Spark's source: ``topic``, ``queueId``,
    ``queueOffset``, ``physicalOffset``, ``storeTimestamp``, ``body`` and so on. The read takes no lock and changes no
    byte. It includes all messages acknowledged before the call; a store that was not closed is read as recovery would
    leave it, unless that cuts sound records. Topics, queues, offsets and times limit what is read; the other
    conditions are evaluated before bodies are decoded. Rows come in log order, and memory holds a few batches at a
    time.

    Args:
        store: The folder of a store, its URL (with the extra ``remote``), a `RemoteStore`, or several of them; the
            column ``store`` then names the store.
        **settings: See `ReaderKeywords`.

    Raises:
        ConfigError: A setting, a column or a value is wrong.
        FilterSyntaxError: ``tags`` or ``sql`` does not compile.
        NotAStoreError: There is no store.
        CorruptionError: The store is damaged; also raised while batches are read.
        DataLossError: Messages at requested offsets were deleted.
    """
    return batches_of(*selection(store, settings))


def reader_of(store: MessageStore, **settings: Unpack[ReaderKeywords]) -> pa.RecordBatchReader:
    """Return what `reader` does of an open store, without opening it again if it is read-only."""
    return batches_of(*selection(store.path, settings), store if store.read_only else None)


def scan(options: ReadOptions, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows that ``options`` select as record batches, part by part, in this process.

    ``columns`` are names from `TYPES`, by default `default_columns`. Other columns are not decoded.
    """
    names = default_columns(options) if columns is None else columns
    schema = pa.schema([(name, TYPES[name]) for name in names])
    yield from batches_of(options, schema)


def selection(store: Stores, settings: ReaderKeywords) -> tuple[ReadOptions, pa.Schema, Files | None]:
    """Check the settings; return options, schema and files."""
    for name in settings:
        if name not in ReaderKeywords.__annotations__:
            meant = _OF_SPARK.get(name.replace("_", "").lower())
            answer = suggest(name, ReaderKeywords.__annotations__) if meant is None else f"did you mean {meant}?"
            raise ConfigError(f"{name:.80}: unknown setting of reader; {answer}")
    paths, files = _located_stores(store, settings)
    options = _options(paths, settings)
    if (expression := settings.get("filter")) is not None:
        options = replace(options, predicate=_predicate_of(expression, options))
    schema = _schema(options, settings.get("columns"))
    return options, schema, files


def _located_stores(store: Stores, settings: ReaderKeywords) -> tuple[tuple[str, ...], Files | None]:
    """Return the paths or URLs of the stores, and the files to read them from."""
    stores = [store] if isinstance(store, str | os.PathLike | RemoteStore) else _several("store", store)
    if not stores:
        raise ConfigError("store: expected the folder of a store, found none")
    for place in stores:
        if not isinstance(place, str | os.PathLike | RemoteStore):
            raise ConfigError(f"store: expected a folder, a URL or a RemoteStore, found {place!r:.80}")
    files = settings.get("files")
    options = settings.get("storage_options")
    check_storage_options(options)
    if files is not None and not all(callable(getattr(files, name, None)) for name in ("open", "list", "status")):
        raise ConfigError(f"files: expected Files such as MemoryFiles, found {files!r:.80}; leave it out for the disk")
    locate = partial(located, storage_options=options) if files is None else os.fspath
    places = [at if isinstance(at, RemoteStore) else locate(os.fspath(at)) for at in stores]
    paths = tuple(place.url if isinstance(place, RemoteStore) else place for place in places)
    remote = {place.url: place for place in places if isinstance(place, RemoteStore)}
    if files is None and remote:
        files = RemoteFiles(remote)
    if options and not any(isinstance(place, RemoteStore) and place not in stores for place in places):
        raise ConfigError(
            "storage_options: they are for URLs, and no store is one; leave them out (a RemoteStore has its own)"
        )
    targets: dict[str, str] = {}
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"store: {path} is named twice; name each store once")
        target = os.path.realpath(path) if "files" not in settings and "://" not in path else path
        if targets.setdefault(target, path) != path:
            raise ConfigError(f"store: {targets[target]} and {path} lead to the same store; name it once")
    return paths, files


def _schema(options: ReadOptions, columns: Sequence[str] | None) -> pa.Schema:
    names = default_columns(options) if columns is None else _names("columns", columns)
    available = columns_of(options.view)
    for name in names:
        if name not in available:
            raise ConfigError(f"columns: the view {options.view} has no column {name!r}; {suggest(name, available)}")
        if names.count(name) > 1:
            raise ConfigError(f"columns: {name!r} is named twice; name each column once")
    return pa.schema([(name, TYPES[name]) for name in names])


def batches_of(
    options: ReadOptions,
    schema: pa.Schema,
    files: Files | None = None,
    opened: MessageStore | None = None,
) -> pa.RecordBatchReader:
    """Plan a read, and return its batches as a stream; the store may be ``opened`` read-only."""
    parts = plan(options, files, opened=opened)

    def batches() -> Iterator[pa.RecordBatch]:
        reading = Reading(options, schema, files)
        for part in parts:
            yield from reading.read(part)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _options(paths: tuple[str, ...], settings: ReaderKeywords) -> ReadOptions:
    view, mode = settings.get("view", "messages"), settings.get("mode", "FAILFAST")
    for name, value, choices in (("view", view, get_args(View)), ("mode", mode, get_args(Mode))):
        if value not in choices:
            raise ConfigError(f"{name}: expected one of {', '.join(choices)}, found {value!r:.80}")
    for name in ("fail_on_data_loss", "checksums", "as_recovered"):
        if not isinstance(settings.get(name, True), bool):
            raise ConfigError(f"{name}: expected True or False, found {settings.get(name)!r:.80}")
    at = settings.get("at")
    if at is not None and not (at >= 0 if type(at) is int else isinstance(at, datetime)):
        raise ConfigError(f"at: expected a time with a time zone or a physical offset, found {at!r:.80}")
    sql = settings.get("sql")
    tags = check_filters(view, settings.get("tags"), sql, "sql")
    selection = ReadSelection(
        begin_ms=_milliseconds("since", settings.get("since")),
        end_ms=_milliseconds("until", settings.get("until")),
        tags=tags,
        internal=view != "messages",
    )
    if selection.begin_ms is not None and selection.end_ms is not None and selection.begin_ms > selection.end_ms:
        raise ConfigError(
            f"since: expected a time before until ({settings.get('until')}), found {settings.get('since')}"
        )
    selection, queue = replace(selection, **_topics(settings)), settings.get("queue")
    if queue is not None:
        ids: list[Any] = list(queue) if isinstance(queue, Iterable) and not isinstance(queue, bytes) else [queue]
        if not ids or not all(type(queue_id) is int and queue_id >= 0 for queue_id in ids):
            raise ConfigError(f"queue: expected queue ids, whole numbers from 0 on, found {queue!r:.80}")
        selection = replace(selection, queue_ids=frozenset(ids))
    options = ReadOptions(
        paths,
        view=view,
        selection=selection,
        selector=sql,
        mode=mode,
        as_recovered=settings.get("as_recovered", False),
        fail_on_data_loss=settings.get("fail_on_data_loss", True),
        checksums=settings.get("checksums", True),
        several=len(paths) > 1,
        at=at,
    )
    return _with_offsets(options, settings.get("offsets"))


def _predicate_of(expression: pc.Expression, options: ReadOptions) -> Predicate:
    """Return an expression with the columns that it reads.

    Raises:
        ConfigError: It is no expression, or does not match the columns of the view.
    """
    if not isinstance(expression, pc.Expression):
        raise ConfigError(
            "filter: expected an expression such as pyarrow.compute.field('topic') == 'orders', "
            f"found {expression!r:.80}"
        )
    names = sorted(columns_of(options.view))
    fields = [pa.field(name, TYPES[name]) for name in names]
    row = pa.table([pa.nulls(1, field.type) for field in fields], schema=pa.schema(fields))
    try:
        row.filter(expression)  # without a row, Arrow does not see that times with and without zone are compared
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0].partition(f" in {names[0]}:")[0]  # a list of all columns follows
        raise ConfigError(f"filter: {reason}; the columns are {', '.join(names)}") from error
    columns = []
    for left_out in names:
        without = pa.schema([field for field in fields if field.name != left_out])
        try:
            without.empty_table().filter(expression)
        except pa.ArrowInvalid:
            columns.append(left_out)
    return Predicate(expression, tuple(columns), _tags_of(expression, row.schema) if "tags" in columns else None)


_TAGS: Final = re.compile(r"\btags\b")
_COMPARED: Final = re.compile(r"\(tags == |\bis_in\(tags, |\bis_valid\(tags\)|\bis_null\(tags, ")
"""What Arrow shows of an expression that reads tags only to compare them with whole values."""


def _tags_of(expression: pc.Expression, schema: pa.Schema) -> frozenset[str] | None:
    """Return tags of which rows that an expression selects have one; None if they can have others, or none.

    The tags are all texts in the expression. Arrow says whether it can be true for another one, which stands for all
    others if the expression only compares tags as a whole.
    """
    import pyarrow.dataset as ds  # loads pandas, as a filter does
    from pyarrow.fs import LocalFileSystem

    text = str(expression)
    if len(_TAGS.findall(text)) > len(_COMPARED.findall(text)):
        return None
    try:
        literals = pa.ipc.open_file(expression.__reduce__()[1][0]).read_all()  # Arrow's form of an expression on a wire
    except (pa.ArrowException, TypeError):
        return None
    tags = frozenset(_texts([column.to_pylist() for column in literals.columns]))
    kind, field = ds.IpcFileFormat(), pc.field("tags")
    others = (field.is_null(), field == "".join(tags) + "-")
    fragments = [kind.make_fragment("/", LocalFileSystem(), partition_expression=other) for other in others]
    can_be_other = any(ds.FileSystemDataset(fragments, schema, kind).get_fragments(filter=expression))
    return None if can_be_other else tags


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within lists and mappings; Arrow compares texts with bytes, too."""
    if isinstance(value, str | bytes):
        yield value if isinstance(value, str) else value.decode(errors="replace")
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _with_offsets(options: ReadOptions, offsets: Any) -> ReadOptions:
    """Return options with the wanted queue offsets."""
    if offsets is None:
        return options
    if isinstance(offsets, range):
        begin, end = _bounds(offsets)
        return replace(options, selection=replace(options.selection, begin_offset=begin, end_offset=end))
    if not isinstance(offsets, Mapping):
        raise ConfigError(f"offsets: expected a range, or a mapping like {{('orders', 0): 17}}, found {offsets!r:.80}")
    if options.view == "log":
        raise ConfigError("offsets: the view log is not read by queue; give a range, or read the view messages")
    starting: dict[str, dict[str, int]] = {}
    ending: dict[str, dict[str, int]] = {}
    for name, bounds in offsets.items():
        if not (isinstance(name, tuple) and len(name) == 2 and type(name[0]) is str and type(name[1]) is int):
            raise ConfigError(f"offsets: expected a topic and a queue id like ('orders', 0), found {name!r:.80}")
        if not options.selection.names_topic(name[0]):
            raise ConfigError(f"offsets: {name!r:.80} is of a topic that topic does not select; leave topic out")
        if options.selection.queue_ids is not None and name[1] not in options.selection.queue_ids:
            raise ConfigError(f"offsets: {name!r:.80} is a queue that queue does not select; leave queue out")
        begin, end = _bounds(bounds)
        starting.setdefault(name[0], {})[str(name[1])] = begin
        ending.setdefault(name[0], {})[str(name[1])] = LATEST if end == LARGEST_OFFSET else end
    queues = frozenset(cast(Mapping[tuple[str, int], Any], offsets))
    selection = replace(options.selection, queues=queues)
    return replace(
        options, selection=selection, starting=starting, ending=ending, offset_settings=("offsets", "offsets")
    )


def _bounds(offsets: Any) -> tuple[int, int]:
    if type(offsets) is int and 0 <= offsets <= LARGEST_OFFSET:
        return offsets, LARGEST_OFFSET
    if isinstance(offsets, range) and offsets.step == 1 and 0 <= offsets.start <= offsets.stop <= LARGEST_OFFSET:
        return offsets.start, offsets.stop
    raise ConfigError(f"offsets: expected a range such as range(10, 20), or the first offset, found {offsets!r:.80}")


def _topics(settings: ReaderKeywords) -> dict[str, Any]:
    """Return the fields of `ReadSelection` for the setting ``topic``, or ``topics``."""
    name, topic = ("topic", settings.get("topic"))
    if settings.get("topics") is not None:
        if topic is not None:
            raise ConfigError("topics: it is another spelling of topic, expected only one of them, found both")
        name, topic = ("topics", settings.get("topics"))
    if topic is None:
        return {}
    if not isinstance(topic, re.Pattern):
        return topics_named([topic] if isinstance(topic, str) else _names(name, topic))
    if not isinstance(topic.pattern, str):
        raise ConfigError(f"{name}: expected a pattern of text, found one of bytes, {topic.pattern!r:.80}")
    return {"topic_pattern": topic}


def _names(what: str, names: Iterable[str]) -> list[str]:
    texts = [names] if isinstance(names, str) else _several(what, names)
    if not texts:
        raise ConfigError(f"{what}: expected at least one name, found none")
    for name in texts:
        if not isinstance(name, str):
            raise ConfigError(f"{what}: expected names, found {name!r:.80}")
    return texts


def _several(what: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(f"{what}: expected text, or several texts in a list, found {values!r:.80}") from None


def _milliseconds(name: str, time: datetime | int | None) -> int | None:
    return None if time is None else to_timestamp_ms(name, time)


# ---- the traces of clients: a row for each record in the messages of trace topics

TRACE_TOPICS: Final = f"{SystemTopic.TRACE}|{TopicPrefix.TRACE}.*"
"""A pattern for the topics of traces whose names users have not chosen."""
_TRACE_SOURCE: Final = ("store", "storeTimestamp", "bornHost", "uniqueKey", "physicalOffset", "body")
"""The columns of messages that `decoded_traces` needs; it adds ``store`` if it is there."""
_TRACE_SCHEMA: Final = pa.schema(
    {
        "trace": pa.string(), "at": pa.timestamp("us", "UTC"), "id": pa.string(), "topic": pa.string(),
        "group": pa.string(), "instance": pa.string(), "succeeded": pa.bool_(), "result": pa.string(),
        "tookSeconds": pa.float64(), "retries": pa.int32(), "keys": pa.string(), "request": pa.string(),
        "physicalOffset": pa.int64(),
    }
)  # fmt: skip
"""The columns of a trace, those of `librmq.message.traces.Trace`: ``at`` is a time, ``tookSeconds`` a number."""
_TRACES_OF_STORES: Final = _TRACE_SCHEMA.insert(0, pa.field("store", pa.string()))


def traces(store: Stores, **settings: Unpack[ReaderKeywords]) -> pa.RecordBatchReader:
    """Return what clients have recorded about messages in a store, or several, as a stream of record batches.

    ``topic`` names the topics of traces; by default they are RocketMQ's own. Of several stores the column ``store``
    names the store. The other settings, and errors, are those of `reader`, but for ``columns`` and mode ``PERMISSIVE``.

    Raises:
        ConfigError: A setting is wrong.
        NotAStoreError: There is no store.
        CorruptionError: The store is damaged; also raised while batches are read.
    """
    if settings.get("columns") is not None or settings.get("mode") == "PERMISSIVE":
        raise ConfigError(
            "columns, mode: a trace has its own columns, none for damage: leave columns out, and read a damaged store "
            "in mode DROPMALFORMED"
        )
    several = not isinstance(store, str) and isinstance(store, Iterable)
    source_settings: ReaderKeywords = {**settings, "columns": _TRACE_SOURCE if several else _TRACE_SOURCE[1:]}
    if source_settings.get("topic") is None and source_settings.get("topics") is None:
        source_settings["topic"] = re.compile(TRACE_TOPICS)
    schema = _TRACES_OF_STORES if several else _TRACE_SCHEMA
    return pa.RecordBatchReader.from_batches(schema, decoded_traces(reader(store, **source_settings)))


def decoded_traces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the traces in batches of messages of trace topics; records that can't be read are left out."""
    decoder = TraceReader()
    for batch in batches:
        schema = _TRACES_OF_STORES if "store" in batch.schema.names else _TRACE_SCHEMA
        rows = list[dict[str, object]]()
        for row in batch.to_pylist():
            stored_ms = int(row["storeTimestamp"].timestamp() * 1000)
            address = row["bornHost"].rpartition(":")[0].strip("[]")
            body, unique_key = row["body"] or b"", row["uniqueKey"]
            for trace in decoder.decode(body, address, unique_key, stored_ms, row["physicalOffset"]):
                of_trace = dict(zip(_TRACE_SCHEMA.names, trace, strict=True))
                rows.append(of_trace | {"at": trace.at_ms * 1000, "store": row.get("store")})
        yield pa.RecordBatch.from_pylist(rows, schema)
