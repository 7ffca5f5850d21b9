"""Files of the log, of queues and of the index that are missing.

A missing file in the middle of a queue is refused where the queue is opened. A queue that lacks a file at an end looks
whole, and so does an index that lacks one between two others. Only the log's records tell.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, HOLE_SIZE, entry_dtype
from librmq.errors import CorruptionError, StoreIOError
from librmq.files import Damage, Files
from librmq.message import DelayLevels
from librmq.message.topics import TopicPrefix
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import Derivation
from librmq.store.engine.saved_state import (
    FILES_A_ROUND,
    broker_has_started,
    is_below,
    lacks_all_records,
    noted_states,
)
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory
from librmq.store.format.indexfile import HEADER, HEADER_SIZE, IndexFile, IndexHeader

_LARGEST_PLACE: Final = 1 << 63
_MOST_BETWEEN: Final = 10_000  # at most so many records without keys are read between two index files


def missing_keys(files: Iterable[IndexFile], log: CommitLog, levels: DelayLevels) -> tuple[int, int] | None:
    """Return begin and end of the first part of the log between index files that has keys, None if there is none.

    The recovery of RocketMQ 4.9 can leave one: it deletes index files that the checkpoint does not cover, and indexes
    the log from a later place on. The call reads few records. A gap inside of a file it does not find.
    """
    derive = Derivation(levels).derive
    begin, indexed = log.begin, -1
    for file in files:
        header = file.header
        if header.index_count <= 1:
            continue
        records = log.scan(begin, min(header.begin_physical_offset, log.end), check_body=False)
        with suppress(CorruptionError):  # `verify` reports it
            for place, size, raw in itertools.islice(records, _MOST_BETWEEN):
                if raw is not None and place != indexed and any(derive(place, size, raw)[-2:]):
                    return place, header.begin_physical_offset
        indexed = header.end_physical_offset
        begin = max(begin, indexed)
    return None


def lacking_queues(
    path: str,
    files: Files,
    log: CommitLog,
    queues: Mapping[QueueName, ConsumeQueue],
    levels: DelayLevels,
    until: int,
    may_lack_end: Callable[[QueueName, int], bool] = lambda *_: False,
) -> frozenset[QueueName]:
    """Return the queues that lack a file with entries of records before physical offset ``until``, or such entries.

    A damaged entry that leads beyond the log's end is cut with those behind it, and one that ends the queue hides them.
    Last entries that became zeros leave no trace, so the log is asked about queues of which ``may_lack_end(name, place
    of the end)`` is true.

    A queue can lack its only file, its first ones or its last ones. Retention deletes first files, and a broker deletes
    the folder of a queue with its topic, or when all its messages were deleted. So a queue without a folder counts only
    if a group has progress in it, and if another queue of the topic has an older entry.
    """
    spans = {}
    for name, queue in queues.items():
        end = max(queue.max_physic_offset, 0)
        spans[name] = _unknown_spans(queue, log, until, end < until and may_lack_end(name, end))
    if directory.has_tables(path, files):
        from librmq.store.format.broker_tables import BrokerTables

        with suppress(CorruptionError):  # a damaged table is reported where it is read
            tables = BrokerTables.open(os.path.join(path, directory.CONFIG), files=files)
            topics = {topic for topic, _ in queues}
            for (_, topic), offsets in tables.progress().items():
                absent = {(topic, queue_id) for queue_id, at in offsets.items() if at > 0} - queues.keys()
                if absent and topic in topics:
                    of_topic = (queues[name] for name in queues if name[0] == topic)
                    firsts = (queue.entry(queue.min_offset) for queue in of_topic)  # of holes it knows nothing
                    places = (entry.physical_offset for entry in firsts if entry is not None)
                    first = min(places, default=_LARGEST_PLACE)
                    spans.update({name: [(first, until)] for name in absent})
    searched = {(topic.encode(), queue_id): spans for (topic, queue_id), spans in spans.items() if spans}
    return frozenset((topic.decode(), queue_id) for topic, queue_id in _queues_with_records(log, searched, levels))


def _unknown_spans(queue: ConsumeQueue, log: CommitLog, until: int, has_no_end: bool) -> list[tuple[int, int]]:
    """Return the spans of the log about which the files of a queue say nothing."""
    begin, end = queue.stored_begin, queue.max_offset
    if begin >= end:
        is_whole = not (begin or has_no_end or queue.data_behind_end()) and queue.what_is_missing() is None
        return [] if is_whole else [(log.begin, until)]
    spans = []
    if begin and queue.min_offset == begin:  # no entry is of a deleted message
        place, size, _ = ENTRY.unpack(queue.read(begin, 1))
        if place > log.begin and size != HOLE_SIZE:
            spans.append((log.begin, place))
    known_to = queue.max_physic_offset
    has_no_end |= not end * ENTRY_SIZE % queue.file_size
    if queue.data_behind_end():
        has_no_end, bad = True, queue._first_bad(begin, end)
        if bad is not None:  # the search for the end has passed it
            place, size, _ = ENTRY.unpack(queue.read(bad - 1, 1) or bytes(ENTRY_SIZE))
            known_to = max(place + size, log.begin)
    if has_no_end and known_to < until:
        spans.append((known_to, until))
    return spans


_Spans = Mapping[tuple[bytes, int], Sequence[tuple[int, int]]]
"""Parts of the log by queue, whose topic is as in a record."""


def _queues_with_records(log: CommitLog, spans: _Spans, levels: DelayLevels) -> set[tuple[bytes, int]]:
    """Return the queues that have a record in one of their spans of the log."""
    with_records = set[tuple[bytes, int]]()
    begin = min((begin for places in spans.values() for begin, _ in places), default=0)
    end = max((end for places in spans.values() for _, end in places), default=0)
    has_light = any(topic.startswith(TopicPrefix.LIGHT.encode()) for topic, _ in spans)
    with suppress(CorruptionError):  # other damage is found where it is read
        for block in Derivation(levels).blocks(log, max(begin, log.begin), end, lambda *_: not has_light):
            of_queues = [((topic, queue_id), entries) for topic, queue_id, _, entries in block.queues]
            for record in block.records:
                packed = ENTRY.pack(record.physical_offset, record.size, 0)
                of_queues += [((name.encode(), light_id), packed) for name, light_id, _ in record.light_queues()]
            for name, entries in of_queues:
                if name in spans:
                    places = np.frombuffer(entries, entry_dtype())["physical_offset"]
                    if any(((first <= places) & (places < last)).any() for first, last in spans[name]):
                        with_records.add(name)
            if len(with_records) == len(spans):
                break
    return with_records


# ---- the beginning of a log that lacks files


def missing_first_files(
    path: str, log: CommitLog, files: Files, config: StoreConfig, *, was_closed: bool
) -> tuple[Damage | None, str]:
    """Return the first files of the log that are missing, or else a note that a kill explains too.

    A note of librmq, or a queue or index file, tells that retention has not deleted them.

    Retention deletes up to `FILES_A_ROUND` log files, then the files of queues and index that are only about them. So
    one that is further below the log's start tells that files are missing. Without one nothing does.
    """
    notes, begin = noted_states(path, files, was_closed=was_closed), log.begin
    for when, state in () if broker_has_started(path, files) else notes:
        if state.log_begin < begin:
            what = f"the log began at {state.log_begin} at the last {when}, and begins at {begin}"
            place, size = log.sequence.path(state.log_begin), begin - state.log_begin
            return Damage(place, state.log_begin, directory.MISSING_LOG, what, size), ""
    if any(state.log_begin == begin for _, state in notes):
        return None, ""
    place = log.sequence.path(begin)
    with suppress(CorruptionError, StoreIOError):  # other damage is found where it is read
        if (lacking := lacks_all_records(path, files, log)) is not None:
            return Damage(place, begin, directory.MISSING_LOG, lacking), ""
        limit = begin - FILES_A_ROUND * log.file_size
        if (old := _untrimmed_file(path, files, config, limit)) is not None:
            return Damage(place, begin, directory.MISSING_LOG, _describe(begin, old, limit)), ""
        if (old := _untrimmed_file(path, files, config, begin)) is not None:
            why = "its first files are missing, or a kill ended a retention"
            return None, f"{_describe(begin, old, 'it')}: {why}"
    return None, ""


def _describe(begin: int, old: str, limit: object) -> str:
    return f"the log begins at {begin}, but {old} is about messages before {limit}"


def _untrimmed_file(path: str, files: Files, config: StoreConfig, limit: int) -> str | None:
    """Return a file of a queue or the index that a retention up to ``limit`` deletes, relative to the store.

    The file after it begins before the limit too. Retention keeps the last file, which can be old if it is full.
    """
    if limit <= 0:
        return None
    for name in directory.list_queues(path, files):
        folder = directory.queue_folder(path, *name)
        if len(starts := sorted(start for start in files.names(folder) if start.isdigit())) > 1:
            places = (starts[0], config.consumequeue_file_size - ENTRY_SIZE), (starts[1], 0)
            entries = [files.read(os.path.join(folder, start), at, ENTRY_SIZE) for start, at in places]
            if all(len(entry) == ENTRY_SIZE and is_below(entry, limit) for entry in entries):
                return os.path.relpath(os.path.join(folder, starts[0]), path)
    folder = os.path.join(path, directory.INDEX)
    names = sorted(name for name in files.names(folder) if name.isdigit())[:2]
    headers = [files.read(os.path.join(folder, name), 0, HEADER_SIZE) for name in names]
    if len(headers) > 1 and all(len(header) == HEADER_SIZE for header in headers):
        oldest, second = (IndexHeader(*HEADER.unpack(header)) for header in headers)
        if 0 < oldest.end_physical_offset < limit and 0 < second.begin_physical_offset < limit:
            return os.path.join(directory.INDEX, names[0])
    return None
