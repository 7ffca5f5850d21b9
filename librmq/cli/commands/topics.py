"""``topics``, ``stats``, ``disk``, ``queues``, ``queue``, ``count``: how much of what a store holds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import chain
from typing import Any, Final

from librmq.cli.output import Output, ProgressBar, complain, log_bar, watching_bar
from librmq.cli.rows import entry_rows, queue_row
from librmq.cli.selection import TOPICS, MessageQuery, near, note_topic_of, places_in, select
from librmq.cli.stores import open_source, open_store, open_view, recorded_settings, report_cut
from librmq.diagnosis.findings import id_ranges
from librmq.diagnosis.view import StoreView, topic_summaries
from librmq.errors import InputError
from librmq.files.interface import Damage
from librmq.message.delays import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.message.properties import tags_code
from librmq.message.topics import is_own_group, kind_of_topic
from librmq.store import MessageStore
from librmq.store.engine.dispatch import has_queue_entry
from librmq.store.format import directory
from librmq.store.format.checkpoint import has_abort


def topics(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each topic that has queues, or that users made."""
    with (
        open_source(arguments) as view,
        ProgressBar("topics", len(view.listed_topics), "topics", quiet=output.is_on_terminal) as bar,
    ):
        output.rows_of(bar.track(topic_summaries(view), lambda summary: 1))
        if isinstance(view, StoreView):
            _note_topics(view)
    return 0


def _note_topics(view: StoreView) -> None:
    for note in view.tables.topic_notes():
        complain(f"note: {note}")


def stats(arguments: argparse.Namespace, output: Output) -> int:
    """Print a row about the whole store."""
    with open_view(arguments) as view:
        store = view.store
        with ProgressBar("stats", len(view.listed_topics), "topics") as bar:
            rows = list(bar.track(topic_summaries(view), lambda summary: 1))
        user_rows = [row for row in rows if row.kind == "user"]
        times = [time_ms for row in rows for time_ms in row[-2:] if time_ms is not None]
        holder = store.files.lock_holder(directory.lock_path(store.path))
        output.row(
            {
                "type": "stats",
                "path": arguments.url or os.path.abspath(store.path),
                "kind": directory.kind_text(store.path, store.files),
                "used_by": holder,
                "closed_cleanly": None if holder is not None else not has_abort(store.files, store.path),
                "topics": len(user_rows),
                "queues": sum(row.queues for row in user_rows),
                "messages": sum(row.messages for row in user_rows),
                "retries": sum(row.messages for row in rows if row.kind == "retry"),
                "dead_letters": sum(row.messages for row in rows if row.kind == "dead"),
                "groups": sum(not is_own_group(group) for group in view.groups),
                "log_bytes": store.log.end - store.log.begin,
                "log_files": len(store.log.sequence.starts),
                "min_phy_offset": store.log.begin,
                "max_phy_offset": store.log.end,
                "min_timestamp_ms": min(times, default=None),
                "max_timestamp_ms": max(times, default=None),
                "settings": recorded_settings(store.path, store.files),
            }
        )
        output.close()
        _note_topics(view)
    return 0


def disk(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bytes of a store and its disk in a row, then a row for each topic, and for each old file of the log."""
    from librmq.diagnosis.disk_use import disk_notes, disk_use, old_files, topic_uses

    with open_view(arguments) as view:
        config = view.store.config
        use = disk_use(view.store.path, config)
        thresholds = [threshold._asdict() for threshold in use.thresholds]
        output.row({"type": "disk", **use._asdict(), "thresholds": thresholds})
        for topic in topic_uses(view):
            output.row({"type": "topic", **topic._asdict()})
        for file in old_files(view, use, config):
            output.row({"type": "file", **file._asdict()})
        output.close()
        for note in disk_notes(view, use, config):
            complain(f"note: {note}")
    return 0


# ---- queues


def queues(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each queue."""
    with open_store(arguments) as store:
        for (topic, queue_id), queue_ in sorted(store.queues.items()):
            output.row(queue_row(topic, queue_id, queue_))
    return 0


def queue(arguments: argparse.Namespace, output: Output) -> int:
    """Print the entries of a queue."""
    topic, queue_id = arguments.topic, arguments.queue_id
    with open_store(arguments) as store:
        consume_queue = store.queues.get((topic, queue_id))
        if consume_queue is None:
            topics = {name for name, _ in store.queues}
            ids = [number for name, number in store.queues if name == topic]
            hint = f"; its queues are {id_ranges(ids)}" if ids else near(topic, topics, TOPICS)
            raise InputError(f"unknown queue: there is no queue {queue_id} of topic {topic!r}{hint}")
        before = 0
        for row in entry_rows(topic, queue_id, consume_queue):
            output.row(row)
            if row["phys"] < before:  # a later message is at a later place
                path, position = consume_queue.place_of(row["offset"])
                what = f"the entry leads to {row['phys']}, the one before it to {before}"
                report_cut(arguments, Damage(path, position, "entry", what))
            before = row["phys"]
    return 0


# ---- count

Group = tuple[Any, ...]
Counts = dict[Group, tuple[int, int]]

_UNIT_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_MOST_READ: Final = 4096
"""Records that are read for the tags of codes, at most twice as many."""
_OF_A_BATCH: Final = 1024
_OF_CODES: Final = ["tagsCode", "size", "physicalOffset"]
_COLUMNS: Final = {
    "topic": ("topic",),
    "queue": ("topic", "queueId"),
    "tag": ("tags",),
    "key": ("keys",),
}


def count(arguments: argparse.Namespace, output: Output) -> int:
    """Print the number of messages of each group, and the bytes of their records."""
    selection, by = select(arguments), arguments.by
    if arguments.sampled and by != "tag":
        raise InputError("--sampled: expected --by tag, because only tags have codes in the queues")
    with open_store(arguments) as store:
        counts, sampled = None, {}
        is_of_ranges = not selection.is_by_index and selection.grep is None and selection.offsets is None
        if arguments.config is None and arguments.at is None and is_of_ranges:  # columns take no settings
            counts, is_sampled = _by_columns(store, selection, arguments)
            sampled = {"sampled": is_sampled} if arguments.sampled else {}
        if counts is None:
            with _bar(store, selection):
                counts = _by_messages(_queued_messages(store, selection, arguments.all), by, selection.topic)
        for group, (messages, size) in sorted(counts.items(), key=lambda item: _place(by, *item)):
            output.row({**_group_fields(by, group), "messages": messages, "bytes": size, **sampled})
        note_topic_of(store, selection.topic, output)
    return 0


def _place(by: str, group: Group, counts: tuple[int, int]) -> tuple[Any, ...]:
    """Return the sort key of a line: times and queues in their order, else the largest number first."""
    return group if by in _UNIT_MS or by == "queue" else (-counts[0], group[0] is not None, group[0] or "")


def _group_fields(by: str, group: Group) -> dict[str, Any]:
    if by == "queue":
        return {"queue": f"{group[0]}:{group[1]}", "topic": group[0], "queue_id": group[1]}
    if by in _UNIT_MS:
        try:
            return {by: datetime.fromtimestamp(group[0] / 1000, UTC).isoformat().replace("+00:00", "Z")}
        except (ValueError, OverflowError, OSError):
            return {by: str(group[0])}  # ms, as an export writes times outside of the years of ISO 8601
    return {by: group[0]}


# ---- count by messages


def _bar(store: MessageStore, selection: MessageQuery) -> AbstractContextManager[None]:
    """Return the bar of the way that `MessageQuery.select_from` goes."""
    if selection.topic is None or selection.is_by_index:
        return log_bar("count", store.path, 1)
    return watching_bar("count", sum(map(len, selection.ranges(store).values())), "messages")


def _queued_messages(store: MessageStore, selection: MessageQuery, everything: bool) -> Iterator[StoredMessage]:
    named = selection.topic is not None
    for message in selection.select_from(store):
        if has_queue_entry(message.sys_flag) and (everything or named or kind_of_topic(message.topic) == "user"):
            yield message


def _by_messages(messages: Iterable[StoredMessage], by: str, topic: str | None) -> Counts:
    """Return the counts of messages, all of one topic if it is named."""
    counts: Counts = {}
    for message in messages:
        for group in _groups(message, by, topic or message.topic):
            number, size = counts.get(group, (0, 0))
            counts[group] = number + 1, size + message.size
    return counts


def _groups(message: StoredMessage, by: str, topic: str) -> list[Group]:
    if by == "topic":
        return [(topic,)]
    if by == "queue":
        return [(topic, queue_id) for queue_id, _ in places_in(message, topic)]
    if by == "tag":
        return [(message.tags,)]
    if by == "key":
        return [(key,) for key in dict.fromkeys(message.keys)] or [(None,)]
    return [(message.store_timestamp_ms // _UNIT_MS[by] * _UNIT_MS[by],)]


# ---- count by columns


def _by_columns(
    store: MessageStore, selection: MessageQuery, arguments: argparse.Namespace
) -> tuple[Counts | None, bool]:
    """Return the counts from columns of the store, a block at a time, and whether tags come from a sample.

    The counts are None without the extra ``arrow``.
    """
    if find_spec("pyarrow") is None:
        return None, False
    by, everything = arguments.by, arguments.all
    from librmq.columns.record_batches import ReaderKeywords, reader_of

    names = _COLUMNS.get(by, ("storeTimestamp",))
    settings = ReaderKeywords(columns=[*names, "size"], tags=selection.tags, sql=selection.sql, checksums=False)
    settings["as_recovered"] = True  # `open_store` has reported what this leaves out
    if by in ("topic", "queue") and selection.tags is None and selection.sql is None:
        settings["view"] = "queues"
    topics = {topic for topic, _ in store.queues if everything or kind_of_topic(topic) == "user"}
    if selection.topic is None and not topics:
        return {}, False
    settings["topic"] = topics if selection.topic is None else selection.topic
    if selection.queue_id is not None:
        settings["queue"] = selection.queue_id
    if selection.has_times:
        settings["since"], settings["until"] = max(0, selection.begin_ms), selection.end_ms
    counts: Counts = {}
    if not topics and selection.topic is None:
        return counts, arguments.sampled
    ranges = selection.ranges(store)
    total = sum(len(offsets) for (topic, _), offsets in ranges.items() if selection.topic or topic in topics)
    is_by_code = arguments.sampled and selection.tags is None and selection.sql is None and SCHEDULE_TOPIC not in topics
    with ProgressBar("count", total, "messages") as bar:
        if is_by_code:
            codes = reader_of(store, **settings | {"view": "queues", "columns": _OF_CODES})
            by_tag = _by_codes(store, bar.track(codes, _row_count))
            if by_tag is not None:
                return by_tag, True
        for batch in bar.track(reader_of(store, **settings), _row_count):
            _add(counts, batch, by)
    return counts, False


def _row_count(batch: Any) -> int:  # noqa: ANN401 (a batch of Arrow)
    return int(batch.num_rows)


def _by_codes(store: MessageStore, batches: Iterable[Any]) -> Counts | None:
    """Return the counts by tag from the tags codes of queue entries.

    Records tell the tag of each code: its first, its last, and some thousand spread over all. The sample can miss a
    rare tag that shares its code with a frequent one. None if codes are no answer: a code has two tags, a record is
    unreadable, there are too many codes, or a code is the address of an extension unit.
    """
    import pyarrow as pa

    counts: Counts = {}
    ends: dict[int, tuple[int, int]] = {}
    spread: list[int] = []
    for batch in batches:
        grouped = pa.table(batch).group_by("tagsCode").aggregate(
            [("size", "count"), ("size", "sum"), ("physicalOffset", "min"), ("physicalOffset", "max")]
        )  # fmt: skip
        for row in grouped.to_pylist():
            number, size = counts.get((row["tagsCode"],), (0, 0))
            counts[row["tagsCode"],] = number + row["size_count"], size + row["size_sum"]
            first, _ = ends.get(row["tagsCode"], (row["physicalOffset_min"], 0))
            ends[row["tagsCode"]] = first, row["physicalOffset_max"]
        if 2 * len(ends) > _MOST_READ or not all(-(1 << 31) <= code < 1 << 31 for (code,) in counts):
            return None
        spread += batch["physicalOffset"].to_numpy()[:: -(-batch.num_rows // _OF_A_BATCH)].tolist()
    tags: dict[int, str | None] = {}
    for physical_offset in sorted({*chain(*ends.values()), *spread[:: -(-len(spread) // _MOST_READ) or 1]}):
        message = store.message_at(physical_offset)
        if message is None:
            return None
        code = tags_code(message.tags or "")
        if (code,) not in counts or tags.setdefault(code, message.tags) != message.tags:
            return None
    if len(tags) != len(counts):
        return None
    return {(tags[code],): counted for (code,), counted in counts.items()}


def _add(counts: Counts, batch: Any, by: str) -> None:  # noqa: ANN401 (a batch of Arrow)
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.table(batch)
    if by in _UNIT_MS:
        at = pc.divide(pc.cast(table["storeTimestamp"], pa.int64()), 1000 * _UNIT_MS[by])
        table = pa.table({"at": pc.multiply(at, _UNIT_MS[by]), "size": table["size"]})
    elif by == "key":
        table = _one_row_a_key(table)
    counted = table.group_by(table.column_names[:-1]).aggregate([("size", "count"), ("size", "sum")])
    *groups, numbers, sizes = (
        counted[name].to_pylist() for name in (*table.column_names[:-1], "size_count", "size_sum")
    )
    for group, number, size in zip(zip(*groups, strict=True), numbers, sizes, strict=True):
        before = counts.get(group, (0, 0))
        counts[group] = before[0] + number, before[1] + size


def _one_row_a_key(table: Any) -> Any:  # noqa: ANN401 (a table of Arrow)
    """Return the rows of ``keys`` and ``size`` once for each key of a message."""
    from librmq.message.properties import split_keys

    rows = [
        (key, size)
        for keys, size in zip(table["keys"].to_pylist(), table["size"].to_pylist(), strict=True)
        for key in (dict.fromkeys(split_keys(keys)) if keys else [None])
    ]
    import pyarrow as pa

    return pa.table({"key": pa.array([key for key, _ in rows], pa.string()), "size": [size for _, size in rows]})
