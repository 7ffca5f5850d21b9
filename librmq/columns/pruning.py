"""Pruning: which queue offsets a predicate can match, decided by Arrow from facts about a range, without reading it.

A range of a queue has one topic, one queue id, and bounds of queue offset, physical offset and store time. Arrow
accepts such facts as the partition expression of a fragment, and drops fragments that contradict a filter. The
fragments here have no files, only facts. A range that can match in part is cut into eighths, down to `_LEAST` entries,
or until cutting decides nothing or takes too long.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.decode import TIMESTAMP, TYPES, columns_of
from librmq.columns.options import Predicate, ReadOptions
from librmq.columns.planner import PlannedStore, Ranges
from librmq.errors import ConfigError
from librmq.store.engine.store_parts import QueueName

_LEAST: Final = 8
_PIECES: Final = 8
_MOST: Final = 1 << 14
"""Most ranges to check in one step; ranges beyond it are left to the filter on rows."""
_KNOWN: Final = frozenset(("topic", "queueId", "queueOffset", "physicalOffset", "storeTimestamp"))

_Range = tuple[QueueName, range]


def predicate_of(expression: pc.Expression, options: ReadOptions) -> Predicate:
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
    return Predicate(expression, tuple(columns))


def pruned(store: PlannedStore, ranges: Ranges, options: ReadOptions) -> Ranges:
    """Return the parts of ``ranges`` that can hold rows for the predicate of ``options``."""
    predicate = options.predicate
    if predicate is None or not _KNOWN & set(predicate.columns):
        return ranges
    facts = _Facts(store, frozenset(predicate.columns), pa.schema([(name, TYPES[name]) for name in predicate.columns]))
    matching: list[_Range] = []
    groups: list[list[_Range]] = [list(ranges)]  # each group holds the pieces of one range; at first, all queues
    first = True
    while groups:
        following: list[list[_Range]] = []
        for pieces, (possible, certain) in zip(groups, facts.matches(groups, predicate.expression), strict=True):
            open_ones = [piece for piece, may, must in zip(pieces, possible, certain, strict=True) if may and not must]
            matching += [piece for piece, may, must in zip(pieces, possible, certain, strict=True) if may and must]
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


class _Facts:
    """Facts about ranges of a store's queues, as expressions."""

    def __init__(self, store: PlannedStore, columns: frozenset[str], schema: pa.Schema) -> None:
        self._store = store
        self._columns = columns
        self._schema = schema

    def matches(self, groups: list[list[_Range]], expression: pc.Expression) -> list[tuple[list[bool], list[bool]]]:
        """Return for the ranges of each group whether some of their rows can match, and whether all do."""
        import pyarrow.dataset as ds  # loads pandas, which only filters need
        from pyarrow.fs import LocalFileSystem

        kind, nowhere = ds.IpcFileFormat(), LocalFileSystem()
        pieces = [piece for group in groups for piece in group]
        fragments = [
            kind.make_fragment(f"/{number}", nowhere, partition_expression=self._facts_of(*piece))
            for number, piece in enumerate(pieces)
        ]
        dataset = ds.FileSystemDataset(fragments, self._schema, kind)
        possible, doubtful = (
            {int(fragment.path[1:]) for fragment in dataset.get_fragments(filter=condition)}
            for condition in (expression, ~pc.is_valid(expression) | ~expression)
        )
        verdicts, at = [], 0
        for group in groups:
            numbers = range(at, at + len(group))
            verdicts.append(
                ([number in possible for number in numbers], [number not in doubtful for number in numbers])
            )
            at += len(group)
        return verdicts

    def _facts_of(self, name: QueueName, offsets: range) -> pc.Expression:
        queue = self._store.queues[name]
        facts: Any = pc.scalar(True)
        if "topic" in self._columns:
            facts &= pc.is_valid(pc.field("topic")) & (pc.field("topic") == name[0])
        if "queueId" in self._columns:
            facts &= pc.is_valid(pc.field("queueId")) & (pc.field("queueId") == pa.scalar(name[1], pa.int32()))
        if "queueOffset" in self._columns:
            facts &= _between("queueOffset", pa.scalar(offsets[0], pa.int64()), pa.scalar(offsets[-1], pa.int64()))
        if "physicalOffset" in self._columns:
            first, last = (pa.scalar(queue.place(at), pa.int64()) for at in (offsets[0], offsets[-1]))
            facts &= _between("physicalOffset", first, last)
        if "storeTimestamp" in self._columns:
            times = self._store.stored_at(name, offsets[0]), self._store.stored_at(name, offsets[-1])
            if times[0] is not None and times[1] is not None:
                first, last = (pa.scalar(time * 1000, TIMESTAMP) for time in times if time is not None)
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
