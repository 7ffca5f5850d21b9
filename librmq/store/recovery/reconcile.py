"""Comparison of queues and key index with the log, and their repair.

The log is the truth: each record defines the entry at its queue offset and its keys in the index. `reconcile` walks
over the log once, compares entries and keys with the records, and, for recovery, rewrites differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from itertools import chain

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.files.seam import Damage
from librmq.message import record as record_format
from librmq.message.delay_levels import DelayLevels
from librmq.store.engine.dispatch import BitmapOf, Derivation
from librmq.store.engine.open_store import OpenQueue, QueueName
from librmq.store.format.keyindex import KeyIndex
from librmq.store.recovery.entry_check import ExpectedEntry, misaddressed
from librmq.store.recovery.index_check import SETTLED, IndexCheck, rebuild_index
from librmq.store.recovery.queue_check import COMPARED
from librmq.store.recovery.queue_checks import QueueChecks, Scope
from librmq.store.recovery.unclean_queues import UncleanQueues

_pack_entry = ENTRY.pack


def reconcile(  # noqa: C901, PLR0913 (one walk over the log, which is hot)
    log: CommitLog,
    queues: MutableMapping[tuple[str, int], ConsumeQueue],
    open_queue: OpenQueue,
    index: KeyIndex | None,
    levels: DelayLevels,
    begin: int,
    *,
    repair: bool,
    scope: Scope | None = None,
    left_out: dict[QueueName, int] | None = None,
    bitmap_of: BitmapOf | None = None,
    before_rebuild: Callable[[], None] | None = None,
    has_ext: bool = True,
    unclean: UncleanQueues | None = None,
    bodies_from: int | None = None,
) -> Iterator[Damage]:
    """Compare queues and index with the records from ``begin`` on, and yield the differences.

    With ``repair`` differences are rewritten; without it nothing is changed. ``scope`` excludes records for the queues,
    and ``left_out`` counts them by queue. From ``bodies_from`` on, bodies are compared with their checksums.
    ``open_queue`` makes missing queues, ``bitmap_of`` computes the bitmaps of rebuilt extension units, and
    ``before_rebuild()`` is called before the index is rebuilt.

    Raises:
        GapError: A queue lacks entries from before ``begin``, and cannot be repaired from there.
        CorruptionError: A record is unreadable or has an impossible queue.
    """
    begin = max(begin, log.begin)
    checks = QueueChecks(
        log, queues, open_queue, scope or Scope(begin), repair, bitmap_of, has_ext=has_ext, unclean=unclean
    )
    keys = None if index is None else IndexCheck(index, begin, log, begin <= log.begin, repair)
    derive = Derivation(levels).derive
    unchecked_end = log.end if bodies_from is None else max(begin, bodies_from)
    items = chain(log.scan(begin, unchecked_end, check_body=False), log.scan(unchecked_end))
    for place, item_size, raw in items:
        if raw is None:
            continue
        (
            physical_offset,
            size,
            address,
            topic,
            queue_id,
            queue_offset,
            code,
            stored,
            properties,
            unique,
            key,
        ) = derive(place, item_size, raw)
        check = checks.get((topic, queue_id)) or checks.make(topic, queue_id, physical_offset)
        if address != physical_offset:
            yield misaddressed(log, physical_offset, record_format.PHYSICAL_OFFSET_AT, address, physical_offset, repair)
        if code is not None:
            entry = _pack_entry(physical_offset, size, code)
            if queue_offset == check.expected:  # as nearly always
                check.expected = queue_offset + 1
                entries = check.entries
                entries.append(entry)
                if len(entries) >= COMPARED:
                    check.settle()
            else:
                check.offer(queue_offset, ExpectedEntry(entry, stored, properties))
        if keys is not None:
            record = (physical_offset, stored, check.prefix_hash, unique, key)
            if keys.at_end:
                lacking = keys.lacking
                lacking.append(record)
                if len(lacking) >= SETTLED:
                    keys.settle()
            else:
                keys.offer(record)
    for check in checks.finish():
        if left_out is not None and check.left_out:
            left_out[check.name] = check.left_out
        yield from check.damages
    checks.remove_empty()
    if index is not None and keys is not None:
        keys.finish()
        yield from keys.damages
        if repair and not keys.sound:
            if before_rebuild is not None:
                before_rebuild()
            rebuild_index(log, index)
