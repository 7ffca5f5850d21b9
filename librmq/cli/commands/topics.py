"""``topics``, ``stats``, ``disk``, ``queues``, ``queue``, ``count``: how much of what a store holds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any, Final

from librmq.cli._output import Output, ProgressBar, complain
from librmq.cli._rows import entry_rows, queue_row
from librmq.cli._selection import TOPICS, MessageQuery, iso_time, near, note_topic_of, places_in, select
from librmq.cli._stores import open_source, open_store, open_view, recorded_settings, report_cut
from librmq.diagnosis import StoreView
from librmq.diagnosis.view import topic_summaries
from librmq.errors import InputError
from librmq.files import Damage
from librmq.formatting import id_ranges
from librmq.message import StoredMessage
from librmq.message.properties import tags_code
from librmq.message.topics import SystemTopic, is_own_group, kind_of_topic
from librmq.store import MessageStore
from librmq.store.engine.derivation import has_queue_entry
from librmq.store.format import directory
from librmq.store.format.directory import has_abort


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
        resent = view.resent_letters.total()
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
                "dead_letters": sum(row.messages for row in rows if row.kind == "dead") - resent,
                "resent": resent,
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
    from librmq.diagnosis.disk_use import DiskUse, topic_uses

    with open_view(arguments) as view:
        use = DiskUse.of(view.store.path, view.store.config)
        thresholds = [threshold._asdict() for threshold in use.thresholds]
        output.row({"type": "disk", **use._asdict(), "thresholds": thresholds})
        for topic in topic_uses(view):
            output.row({"type": "topic", **topic._asdict()})
        for file in use.old_files(view):
            output.row({"type": "file", **file._asdict()})
        output.close()
        for note in use.notes(view):
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
_ANY: Final = MessageQuery()
_MOST_READ: Final = 4096
"""Records that are read for the tags of codes, at most twice as many."""
_OF_A_BATCH: Final = 1024
_KEYS_APART: Final = 1 << 16
"""Rows of keys to collect before they are merged, beside twice those that there are."""
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
        counts: Counts | Iterator[tuple[Group, tuple[int, int]]] | None = None
        sampled: dict[str, bool] = {}
        is_of_ranges = not selection.is_by_index and selection.grep is None and selection.offsets is None
        if arguments.config is None and arguments.at is None and is_of_ranges:  # columns take no settings
            counts, is_sampled = _by_columns(store, selection, arguments)
            sampled = {"sampled": is_sampled} if arguments.sampled else {}
        if counts is None:
            with selection.bar("count", store):
                counts = _by_messages(_queued_messages(store, selection, arguments.all), by, selection.topic)
        ordered = sorted(counts.items(), key=lambda item: _place(by, *item)) if isinstance(counts, dict) else counts
        for group, (messages, size) in ordered:
            output.row({**_group_fields(by, group), "messages": messages, "bytes": size, **sampled})
        note_topic_of(store, selection.topic, output, selection.queue_id)
    return 0


def _place(by: str, group: Group, counts: tuple[int, int]) -> tuple[Any, ...]:
    """Return the sort key of a line: times and queues in their order, else the largest number first."""
    return group if by in _UNIT_MS or by == "queue" else (-counts[0], group[0] is not None, group[0] or "")


def _group_fields(by: str, group: Group) -> dict[str, Any]:
    if by == "queue":
        return {"queue": f"{group[0]}:{group[1]}", "topic": group[0], "queue_id": group[1]}
    if by in _UNIT_MS:
        return {by: iso_time(group[0]).replace("+00:00", "Z")}
    return {by: group[0]}


# ---- count by messages


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
) -> tuple[Counts | Iterator[tuple[Group, tuple[int, int]]] | None, bool]:
    """Return the counts from columns of the store, those of keys in order, and whether tags come from a sample.

    The counts are None without the extra ``arrow``.
    """
    if find_spec("pyarrow") is None:
        return None, False
    by, everything = arguments.by, arguments.all
    from librmq.columns import ReaderKeywords
    from librmq.columns.record_batches import reader_of

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
    if selection.begin_ms >= 0:
        settings["since"] = selection.begin_ms
    if selection.end_ms < _ANY.end_ms:
        settings["until"] = selection.end_ms
    counts: Counts = {}
    ranges = replace(selection, begin_ms=_ANY.begin_ms, end_ms=_ANY.end_ms).ranges(store)
    total = sum(len(offsets) for (topic, _), offsets in ranges.items() if selection.topic or topic in topics)
    is_by_code = (
        arguments.sampled and selection.tags is None and selection.sql is None and SystemTopic.SCHEDULE not in topics
    )
    with ProgressBar("count", total, "messages") as bar:
        if is_by_code:
            codes = reader_of(store, **settings | {"view": "queues", "columns": _OF_CODES})
            by_tag = _by_codes(store, bar.track(codes, _row_count))
            if by_tag is not None:
                return by_tag, True
        batches = bar.track(reader_of(store, **settings), _row_count)
        if by == "key":
            keys = _Keys()
            for batch in batches:
                keys.add(batch)
            return keys.in_order(), False
        for batch in batches:
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
    """Add a batch by arrays, because Arrow's own groups load pandas."""
    import numpy as np

    from librmq.columns.arrays import integers

    sizes = integers(batch.column("size"))
    groups: list[Group]
    if by in _UNIT_MS:
        times, rows = np.unique(integers(batch.column("storeTimestamp")) // (1000 * _UNIT_MS[by]), return_inverse=True)
        groups = [(time * _UNIT_MS[by],) for time in times.tolist()]
    else:
        encoded = batch.column(_COLUMNS[by][0]).dictionary_encode("encode")
        names, indices = encoded.dictionary.to_pylist(), integers(encoded.indices)
        ids = integers(batch.column("queueId")) if by == "queue" else np.zeros(len(indices), np.int64)
        queues, rows = np.unique(indices << 32 | ids, return_inverse=True)
        groups = [
            (names[queue >> 32], queue & 0xFFFFFFFF) if by == "queue" else (names[queue >> 32],)
            for queue in queues.tolist()
        ]
    numbers, sums = np.bincount(rows, minlength=len(groups)), np.bincount(rows, sizes, len(groups)).astype(np.int64)
    for group, number, size in zip(groups, numbers.tolist(), sums.tolist(), strict=True):
        before = counts.get(group, (0, 0))
        counts[group] = before[0] + number, before[1] + size


class _Keys:
    """The counts of many keys as arrays, of which a dictionary would take ten times the memory."""

    def __init__(self) -> None:
        self._texts: list[Any] = []  # arrays of Arrow; the first has the keys so far, each once
        self._numbers: list[Any] = []
        self._sizes: list[Any] = []
        self._rows = self._merged = 0

    def add(self, batch: Any) -> None:  # noqa: ANN401 (a batch of Arrow)
        """Add a batch, in which a message has a row for each of its keys."""
        import numpy as np

        from librmq.columns.arrays import integers
        from librmq.message.properties import split_keys

        texts, owners = list[str | None](), list[int]()
        for number, keys in enumerate(batch.column("keys").to_pylist()):
            names = list(dict.fromkeys(split_keys(keys))) if keys else [None]
            texts += names
            owners += [number] * len(names)
        self._texts.append(_texts(texts))
        self._numbers.append(np.ones(len(texts), np.int64))
        self._sizes.append(integers(batch.column("size"))[owners])
        self._rows += len(texts)
        if self._rows > 2 * self._merged + _KEYS_APART:
            self._merge()

    def _merge(self) -> None:
        import numpy as np
        import pyarrow as pa

        from librmq.columns.arrays import integers

        encoded = pa.concat_arrays(self._texts).dictionary_encode("encode")
        indices, count = integers(encoded.indices), len(encoded.dictionary)
        self._texts = [encoded.dictionary]
        for columns in (self._numbers, self._sizes):
            columns[:] = [np.bincount(indices, np.concatenate(columns), count).astype(np.int64)]
        self._rows = self._merged = count

    def in_order(self) -> Iterator[tuple[Group, tuple[int, int]]]:
        """Yield the keys with their messages and bytes, those of most messages first."""
        import numpy as np
        import pyarrow.compute as pc

        from librmq.columns.arrays import integers, numbers

        if not self._texts:
            return
        self._merge()
        by_text = np.roll(integers(pc.sort_indices(self._texts[0])), self._texts[0].null_count)  # null comes first
        order = by_text[np.argsort(-self._numbers[0][by_text], kind="stable")]
        for begin in range(0, len(order), _KEYS_APART):
            rows = order[begin : begin + _KEYS_APART]
            texts = self._texts[0].take(numbers(rows)).to_pylist()
            for text, number, size in zip(
                texts, self._numbers[0][rows].tolist(), self._sizes[0][rows].tolist(), strict=True
            ):
                yield (text,), (number, size)


def _texts(values: list[str | None]) -> Any:  # noqa: ANN401 (an array of Arrow)
    """Return texts as an array of Arrow, whose own function loads pandas."""
    import numpy as np

    from librmq.columns.arrays import numbers, strings

    array = strings([value or "" for value in values])
    if None not in values:
        return array
    present = np.array([value is not None for value in values])
    return array.take(numbers(np.arange(len(values)), present))
