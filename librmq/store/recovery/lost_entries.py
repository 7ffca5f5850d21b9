"""Queues that lack entries of records of the log, in a store that has no note of their ends.

A file of a queue that is missing in the middle is refused. One that is missing at an end leaves a queue that looks
whole; only then is the whole log searched for more of its records. A queue without its last entries looks whole too.
Power cuts take what was written last, so the end of the log is compared with the ends of queues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ENTRY_SIZE, HOLE_SIZE, ConsumeQueue
from librmq.errors import CorruptionError
from librmq.files.interface import Files
from librmq.message.delays import DelayLevels
from librmq.message.topics import LIGHT_PREFIX
from librmq.store.engine.dispatch import MULTI_DISPATCH, Derivation, DerivedBlock, light_queues
from librmq.store.engine.read import offset_at_place
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.recovery.reconciliation import unpassed

_LARGEST_PLACE: Final = 1 << 63
_TAIL: Final = 1 << 20
"""Bytes of the log up to its end whose records are compared with the ends of queues, which takes some milliseconds."""


def lacking_queues(
    path: str,
    files: Files,
    log: CommitLog,
    queues: Mapping[QueueName, ConsumeQueue],
    levels: DelayLevels,
    until: int,
    has_begin_and_end: Callable[[QueueName], bool] = lambda _: False,
) -> frozenset[QueueName]:
    """Return the queues that lack entries of records before physical offset ``until``.

    A queue can lack its only file, its first ones or its last ones. Retention deletes first files, and a broker deletes
    the folder of a queue with its topic, or when all its messages were deleted. So a queue without a folder counts only
    if a group has progress in it, and if another queue of the topic has an older entry.
    """
    spans = {name: _unknown_spans(queues[name], log, until) for name in queues if not has_begin_and_end(name)}
    with suppress(CorruptionError):  # a table that is told where it is read
        tables = BrokerTables.open(os.path.join(path, directory.CONFIG), files=files)
        topics = {topic for topic, _ in queues}
        for (_, topic), offsets in tables.progress().items():
            absent = {(topic, queue_id) for queue_id, at in offsets.items() if at > 0} - queues.keys()
            if absent and topic in topics:
                first = _first_place([queues[name] for name in queues if name[0] == topic])
                spans.update({name: [(first, until)] for name in absent})
    searched = {(topic.encode(), queue_id): spans for (topic, queue_id), spans in spans.items() if spans}
    return frozenset((topic.decode(), queue_id) for topic, queue_id in _queues_with_records(log, searched, levels))


def _unknown_spans(queue: ConsumeQueue, log: CommitLog, until: int) -> list[tuple[int, int]]:
    """Return the spans of the log about which the files of a queue say nothing."""
    begin, end = queue.stored_begin, queue.max_offset
    if begin >= end:
        return [(log.begin, until)]
    spans = []
    if begin and queue.min_offset == begin:  # no entry is of a deleted message
        place, size, _ = ENTRY.unpack(queue.read(begin, 1))
        if place > log.begin and size != HOLE_SIZE:
            spans.append((log.begin, place))
    if not end * ENTRY_SIZE % queue.file_size and queue.max_physic_offset < until:
        spans.append((queue.max_physic_offset, until))
    return spans


def _first_place(queues: Iterable[ConsumeQueue]) -> int:
    """Return the place of the first message of several queues, of which holes know nothing."""
    firsts = [queue.entry(queue.min_offset) for queue in queues if queue.min_offset < queue.max_offset]
    return min((entry.physical_offset for entry in firsts if entry is not None), default=_LARGEST_PLACE)


def _queues_with_records(
    log: CommitLog, spans: Mapping[tuple[bytes, int], Sequence[tuple[int, int]]], levels: DelayLevels
) -> set[tuple[bytes, int]]:
    """Return the queues that have a record in one of their spans of the log."""
    with_records = set[tuple[bytes, int]]()
    begin = min((begin for places in spans.values() for begin, _ in places), default=0)
    end = max((end for places in spans.values() for _, end in places), default=0)
    has_light = any(topic.startswith(LIGHT_PREFIX.encode()) for topic, _ in spans)

    def passes(block: DerivedBlock) -> bool:
        return not has_light and all((topic, queue_id) not in spans for topic, queue_id, _, _ in block.queues)

    derive = Derivation(levels).derive
    with suppress(CorruptionError):  # other damage, which is found where it is read
        for place, size, raw in unpassed(log, max(begin, log.begin), end, passes):
            if raw is None:
                continue
            _, _, _, topic, queue_id, _, code, _, properties, _, _ = derive(place, size, raw)
            names = {(topic, queue_id)} if code is not None else set()
            if has_light and MULTI_DISPATCH in properties:
                names |= {(name.encode(), light) for name, light, _ in light_queues(topic, queue_id, properties)}
            for name in names & spans.keys():
                if any(first <= place < last for first, last in spans[name]):
                    with_records.add(name)
            if len(with_records) == len(spans):
                break
    return with_records


def queues_without_last_entries(
    log: CommitLog, queues: Mapping[QueueName, ConsumeQueue], levels: DelayLevels, until: int
) -> frozenset[QueueName]:
    """Return the queues that lack entries of records in the last part of the log before physical offset ``until``.

    A broker deletes all queues of a topic together, and no entry before an older one. So a queue that has an older
    entry, or no folder while another queue of its topic has an older entry, has lost the entry of a record.
    """
    ends = {
        (topic.encode(), queue_id): queue.max_physic_offset
        for (topic, queue_id), queue in queues.items()
        if queue.stored_begin < queue.max_offset
    }
    topics = {topic.encode() for topic, _ in queues}

    def passes(block: DerivedBlock) -> bool:
        return all(
            topic not in topics or ENTRY.unpack(entries[-ENTRY_SIZE:])[0] < ends.get((topic, queue_id), 0)
            for topic, queue_id, _, entries in block.queues
        )

    behind: dict[tuple[bytes, int], int] = {}
    derive = Derivation(levels).derive
    with suppress(CorruptionError):  # other damage, which is found where it is read
        for place, size, raw in unpassed(log, _begin_of_tail(queues, until), until, passes):
            if raw is None:
                continue
            _, _, _, topic, queue_id, _, code, _, _, _, _ = derive(place, size, raw)
            if code is not None and topic in topics and place >= ends.get((topic, queue_id), 0):
                behind[topic, queue_id] = place  # the last one, before which an older entry must be
    lost = set[QueueName]()
    for (topic, queue_id), place in behind.items():
        name = topic.decode(), queue_id
        others = [queue for (other, _), queue in queues.items() if other == name[0]]
        if (topic, queue_id) in ends or (name not in queues and _first_place(others) < place):
            lost.add(name)
    return frozenset(lost)


def _begin_of_tail(queues: Mapping[QueueName, ConsumeQueue], until: int) -> int:
    """Return the place of a record at most `_TAIL` before ``until``, by the entries of queues."""
    least = until - _TAIL
    active = [queue for queue in queues.values() if queue.max_physic_offset > least]
    entries = [queue.entry(offset_at_place(queue, least)) for queue in active if queue.min_offset < queue.max_offset]
    return min((entry.physical_offset for entry in entries if entry is not None), default=until)
