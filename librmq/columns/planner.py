"""Planning of a read: which ranges of queue offsets to read, and how to cut them into tasks. It reads no bodies.

All wanted queues are cut at the same places of the log, so each stretch of the log is read by one task. The places are
quantiles of the wanted entries, so all tasks are of similar size.

Before that, Arrow drops ranges that a predicate can't match, by facts about a range. A range of a queue has one topic,
one queue id, and bounds of queue offset, physical offset and store time. Arrow accepts such facts as the partition
expression of a fragment, and drops fragments that contradict a filter. The fragments here have no files, only facts. A
range that can match in part is cut into eighths, down to `_LEAST` entries, or until cutting decides nothing or takes
too long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.decoding import LAST_MS, TIMESTAMP, TYPES
from librmq.columns.options import Part, Predicate, ReadOptions, ReadSelection, Slice, log_unknown_topics
from librmq.columns.planned_store import PlannedStore
from librmq.columns.remote import RemoteFiles
from librmq.files import Damage, Files
from librmq.store import MessageStore
from librmq.store.engine.store_parts import QueueName

PARTITION_BYTES: Final = 128 << 20
"""Bytes of the log in a task; twice as many where it decodes none of `_WHOLE`."""
PARTITION_ENTRIES: Final = 1 << 20
_WHOLE: Final = frozenset(("body", "storedBody", "properties", "propertiesString"))
"""Columns that take most of a record's bytes."""
Ranges = Sequence[tuple[QueueName, range]]
"""Offsets to read by queue; a queue can have several ranges."""
_PART_SAMPLES: Final = 32
"""Entries of a store to look at for each task, about."""
_LEAST_SAMPLES: Final = 256
"""Fewest entries of a store to look at, about."""
_MOST_SAMPLES: Final = 4096
"""Most entries of a store to look at, about, unless more tasks are wanted."""


def plan(
    options: ReadOptions,
    files: Files | None = None,
    *,
    columns: Collection[str] = _WHOLE,
    is_portable: bool = False,
    opened: MessageStore | None = None,
) -> list[Part]:
    """Plan a read of ``columns`` of each store in ``options``; the only one may be ``opened`` read-only already.

    A part of a remote store needs the mirror in ``files``, unless it ``is_portable``: then it has its entries, and
    another process fetches what it reads of the log.

    Raises:
        ConfigError: An offset names a queue that does not exist, the offsets of a queue begin after their end, or one
            store is a copy of another.
        DataLossError: Requested messages were deleted, and ``options`` treat that as an error.
        CorruptionError: A queue or the log is damaged, and the mode is ``FAILFAST``.
    """
    parts: list[Part] = []
    topics: set[str] = set()
    bytes_a_part = 2 * PARTITION_BYTES if _WHOLE.isdisjoint(columns) else PARTITION_BYTES
    if isinstance(files, RemoteFiles):
        options = files.mirrored(options)
    # Finding the records between entries needs the entries of all queues.
    planned = replace(options, selection=ReadSelection(internal=True)) if options.view == "log" else options
    with PlannedStore.open_all(planned, files, opened) as stores:
        narrowed = [store.narrowed() for store in stores]
        rows = [sum(map(len, queue_ranges.values())) for queue_ranges in narrowed]
        for store, queue_ranges, count in zip(stores, narrowed, rows, strict=True):
            min_parts = max(1, -(-options.min_partitions * count // max(1, sum(rows))))
            topics |= store.topics
            of_store = damaged_parts(store, set())
            if options.view == "log":
                # In other modes a damaged entry can give a wrong place.
                times = options.selection if options.mode == "FAILFAST" else ReadSelection()
                of_store += log_parts(store, times, min_parts, bytes_a_part=bytes_a_part)
            else:
                ranges = _pruned(store, list(queue_ranges.items()))
                of_store += queue_parts(
                    store, ranges, min_parts, entries_only=options.view == "queues", bytes_a_part=bytes_a_part
                )
            parts += [portable(part, store) for part in of_store] if is_portable else of_store
    if opened is None:  # a caller that has opened the store says itself what it lacks
        log_unknown_topics(options, topics)
    return parts


def damaged_parts(store: PlannedStore, reported: set[Damage]) -> list[Part]:
    """Return a part with what planning found damaged and is not yet ``reported``, to which it is added; else none."""
    # Files of a remote store are named by its URL.
    damages = [replace(damage, file=damage.file.replace(store.path, store.place, 1)) for damage in store.damage]
    fresh = tuple(damage for damage in damages if damage not in reported)
    reported.update(fresh)
    return [replace(_part(store, ()), damage=fresh)] if fresh else []


def queue_parts(
    store: PlannedStore,
    ranges: Ranges,
    min_parts: int,
    *,
    entries_only: bool = False,
    bytes_a_part: int = PARTITION_BYTES,
) -> list[Part]:
    """Cut the entries in ``ranges`` into at least ``min_parts`` tasks, unless there are too few entries.

    With ``entries_only`` a task gets more entries, because it reads no messages.
    """
    gaps = _bounds_of_gaps(store)
    if gaps and not entries_only:  # what leads to bytes that the log lacks is left out
        pieces = [(name, store.queues[name].pieces(offsets, gaps)) for name, offsets in ranges]
        ranges = [(name, piece) for name, parts in pieces for piece in parts[::2] if piece]
    samples = _samples(store, ranges, max(min_parts, (store.log_end - store.log_begin) // bytes_a_part))
    rows = sum(len(offsets) for _, offsets in ranges)
    if not rows:
        return []
    size = sum(size * weight for _, size, weight in samples)
    count = max(min_parts, -(-rows // PARTITION_ENTRIES) if entries_only else -(-size // bytes_a_part))
    shares = _shares(store, ranges, _quantiles([(place, weight) for place, _, weight in samples], count))
    return [_part(store, slices) for slices in shares if slices]


def log_parts(
    store: PlannedStore, times: ReadSelection, min_parts: int, *, bytes_a_part: int = PARTITION_BYTES
) -> list[Part]:
    """Cut the stretch of the log with these store times into tasks, each of which starts at a record."""
    begin, end = _stretch(store, times)
    ranges = [(name, offsets) for name in store.queues if (offsets := _offsets_in_log(store, name, begin, end))]
    samples = _samples(store, ranges, max(min_parts, (end - begin) // bytes_a_part))
    count = max(min_parts, -(-(end - begin) // bytes_a_part))
    bounds = _quantiles([(place, weight) for place, _, weight in samples], count)
    gaps = _bounds_of_gaps(store)
    bounds = sorted({place for place in (*bounds, *gaps) if begin < place < end})
    stretches = zip([begin, *bounds], [*bounds, end], _shares(store, ranges, bounds), strict=True)
    return [
        replace(_part(store, slices), walk=(first, last))
        for first, last, slices in stretches
        if first < last and not bisect_right(gaps, first) % 2
    ]


def _bounds_of_gaps(store: PlannedStore) -> list[int]:
    """Return begin and end of each part of the log that its files lack."""
    return [at for gap in store.store.log.gaps for at in (gap.offset, gap.offset + gap.bytes)]


def _stretch(store: PlannedStore, times: ReadSelection) -> tuple[int, int]:
    """Return the log without what is before and after some times.

    Some records have no entry, so the stretch ends at entries outside of these times. It is the whole log if the order
    of its times is not known; rows are compared anyway.
    """
    begin, end = store.log_begin, store.log_end
    if not times.has_times or not (stored := store.times).covers_log:
        return begin, end
    begin_ms, end_ms = times.window_ms
    for queue in store.queues.values():
        offsets = range(queue.begin, queue.end)
        if (first := stored.before(queue, begin_ms, offsets)) > queue.begin:
            begin = max(begin, queue.place_of(first - 1))
        if (last := stored.behind(queue, end_ms, offsets)) < queue.end:
            end = min(end, queue.place_of(last))
    return begin, max(begin, end)


def _offsets_in_log(store: PlannedStore, name: QueueName, begin: int, end: int) -> range:
    """Return the offsets of a queue whose messages are in a stretch of the log."""
    queue = store.queues[name]
    if (begin, end) == (store.log_begin, store.log_end):
        return range(queue.begin, queue.end)
    return range(queue.first_from(begin), queue.first_from(end))


def _shares(store: PlannedStore, ranges: Ranges, bounds: Sequence[int]) -> list[tuple[Slice, ...]]:
    """Cut all ranges at ``bounds`` of the log, and return the slices of each share."""
    shares: list[list[Slice]] = [[] for _ in range(len(bounds) + 1)]
    for name, offsets in ranges:
        queue = store.queues[name]
        for share, piece in zip(shares, queue.pieces(offsets, bounds), strict=True):
            if piece:
                inline_from = max(piece.start, queue.inline_from)
                inline = queue.entries(inline_from, piece.stop).tobytes()
                share.append(Slice(*name, piece.start, piece.stop, inline_from, inline))
    return [tuple(share) for share in shares]


def _part(store: PlannedStore, slices: tuple[Slice, ...]) -> Part:
    config = store.config
    return Part(
        store.path,
        config.commitlog_file_size,
        config.consumequeue_file_size,
        slices,
        has_batches=store.has_batches,
    )


def portable(part: Part, store: PlannedStore) -> Part:
    """Return a part of a remote store with its entries and the place of the log, for a process without the mirror."""
    if (remote := store.remote) is None:
        return part
    slices = []
    for share in part.slices:
        entries = store.queues[share.topic, share.queue_id].entries(share.begin, share.end)
        slices.append(replace(share, inline_from=share.begin, inline=entries.tobytes()))
    return replace(part, path=remote.url, slices=tuple(slices), remote=remote.log)


def _samples(store: PlannedStore, ranges: Ranges, parts: int) -> list[tuple[int, int, int]]:
    """Return places and sizes of sampled entries in the order of the log, and the number that each stands for."""
    samples: list[tuple[int, int, int]] = []
    count = min(max(_PART_SAMPLES * parts, _LEAST_SAMPLES), max(_MOST_SAMPLES, parts))
    step = max(1, sum(len(offsets) for _, offsets in ranges) // count)
    rows = 0
    for name, offsets in ranges:
        entries = map(store.queues[name].entry, offsets[-rows % step :: step])
        samples += [(entry.physical_offset, entry.size, step) for entry in entries if entry and entry.size > 0]
        rows += len(offsets)
    return sorted(samples)


def _quantiles(places: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return where to cut places in ascending order, with weights, into ``count`` shares of equal weight."""
    total = sum(weight for _, weight in places)
    bounds: list[int] = []
    reached = 0
    for place, weight in places:
        if reached >= total * (len(bounds) + 1) / count and len(bounds) < count - 1:
            bounds.append(place)
        reached += weight
    return sorted(set(bounds))


# ---- ranges that a predicate can match

_LEAST: Final = 8
_PIECES: Final = 8
_MOST: Final = 1 << 14
"""Most ranges to check in one step; ranges beyond it are left to the filter on rows."""
_KNOWN: Final = frozenset(("topic", "queueId", "queueOffset", "physicalOffset", "storeTimestamp"))

_Range = tuple[QueueName, range]


def _pruned(store: PlannedStore, ranges: Ranges) -> Ranges:
    """Return the parts of ``ranges`` that can hold rows for the predicate of the read."""
    predicate = store.options.predicate
    if predicate is None or not _KNOWN & set(predicate.columns):
        return ranges
    matching: list[_Range] = []
    groups: list[list[_Range]] = [list(ranges)]  # each group holds the pieces of one range; at first, all queues
    first = True
    while groups:
        following: list[list[_Range]] = []
        verdicts = iter(_verdicts(store, [piece for group in groups for piece in group], predicate))
        for pieces in groups:
            judged = list(zip(pieces, verdicts, strict=False))
            open_ones = [piece for piece, (may, must) in judged if may and not must]
            matching += [piece for piece, (may, must) in judged if may and must]
            if len(open_ones) == len(pieces) and not first:  # cutting decided nothing
                matching += open_ones
                continue
            for name, offsets in open_ones:
                if len(offsets) > _LEAST and _PIECES * len(following) < _MOST:
                    following.append([(name, piece) for piece in _cut(offsets)])
                else:
                    matching.append((name, offsets))
        groups, first = following, False
    return _joined(matching)


def _verdicts(store: PlannedStore, ranges: Ranges, predicate: Predicate) -> list[tuple[bool, bool]]:
    """Return for each range whether some of its rows can match, and whether all do."""
    import pyarrow.dataset as ds  # loads pandas, which only filters need
    from pyarrow.fs import LocalFileSystem

    kind, nowhere = ds.IpcFileFormat(), LocalFileSystem()
    fragments = [
        kind.make_fragment(f"/{number}", nowhere, partition_expression=_facts_of(store, *piece, predicate.columns))
        for number, piece in enumerate(ranges)
    ]
    schema, expression = pa.schema([(name, TYPES[name]) for name in predicate.columns]), predicate.expression
    dataset = ds.FileSystemDataset(fragments, schema, kind)
    possible, doubtful = (
        {int(fragment.path[1:]) for fragment in dataset.get_fragments(filter=condition)}
        for condition in (expression, ~pc.is_valid(expression) | ~expression)
    )
    return [(number in possible, number not in doubtful) for number in range(len(ranges))]


def _facts_of(store: PlannedStore, name: QueueName, offsets: range, columns: Collection[str]) -> pc.Expression:
    """Return facts about a range of a queue, as an expression."""
    queue = store.queues[name]
    facts: Any = pc.scalar(True)
    if "topic" in columns:
        facts &= pc.is_valid(pc.field("topic")) & (pc.field("topic") == name[0])
    if "queueId" in columns:
        facts &= pc.is_valid(pc.field("queueId")) & (pc.field("queueId") == pa.scalar(name[1], pa.int32()))
    if "queueOffset" in columns:
        facts &= _between("queueOffset", pa.scalar(offsets[0], pa.int64()), pa.scalar(offsets[-1], pa.int64()))
    if "physicalOffset" in columns:
        first, last = (pa.scalar(queue.place_of(at), pa.int64()) for at in (offsets[0], offsets[-1]))
        facts &= _between("physicalOffset", first, last)
    if "storeTimestamp" in columns:
        times = store.times.bounds_of(queue, offsets)
        if times is not None and -LAST_MS <= times[0] <= times[1] <= LAST_MS:
            first, last = (pa.scalar(time * 1000, TIMESTAMP) for time in times)
            facts &= _between("storeTimestamp", first, last)
    return facts


def _between(name: str, first: pa.Scalar, last: pa.Scalar) -> pc.Expression:
    field = pc.field(name)
    return pc.is_valid(field) & (field >= first) & (field <= last)


def _cut(offsets: range) -> list[range]:
    step = -(-len(offsets) // _PIECES)
    return [offsets[at : at + step] for at in range(0, len(offsets), step)]


def _joined(ranges: list[_Range]) -> list[_Range]:
    """Return the ranges in order, with adjacent ones joined."""
    joined: list[_Range] = []
    for name, offsets in sorted(ranges, key=lambda item: (item[0], item[1].start)):
        if joined and joined[-1][0] == name and joined[-1][1].stop == offsets.start:
            joined[-1] = name, range(joined[-1][1].start, offsets.stop)
        else:
            joined.append((name, offsets))
    return joined
