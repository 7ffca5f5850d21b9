"""What a read does with damage, by its mode: end with an error, report it in rows of its own, or leave it out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from librmq.columns.options import ReadOptions
from librmq.columns.parts import Part, Rows
from librmq.columns.schema import CORRUPT, TYPES
from librmq.config import ENTRY_SIZE
from librmq.errors import CorruptionError
from librmq.files.rolling import file_name
from librmq.files.seam import Damage
from librmq.runtime.event_log import EventLog
from librmq.store.format import directory

_log = EventLog("librmq.columns")
_MOST_TOLD: Final = 1000
"""Rows in one batch about damage."""


class Malformed:
    """The damage that the read of a part finds. Its generators do with it what the mode says."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, part: Part, store: str) -> None:
        self._options = options
        self._schema = schema
        self._part = part
        self._store = store
        self._left_out = 0
        """Number of damaged places that mode ``DROPMALFORMED`` left out."""
        self._first_left_out = ""

    def found_before(self, damage: Sequence[Damage]) -> Iterator[pa.RecordBatch]:
        """Handle what the plan found."""
        return self._batches(damage, [{}] * len(damage))

    def entries(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Handle entries that lead to no record."""
        return self._batches([self._in_queue(rows, at) for at in range(len(rows))], self._known_columns(rows))

    def records(self, rows: Rows, reasons: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Handle records that cannot be read, each with its reason."""
        damage = [self._in_log(place, why) for place, why in zip(rows.places.tolist(), reasons, strict=True)]
        return self._batches(damage, self._known_columns(rows))

    def places(self, bad: Sequence[tuple[int, str]]) -> Iterator[pa.RecordBatch]:
        """Handle places of the log where no record begins, each with its reason."""
        return self._batches([self._in_log(place, why) for place, why in bad], [{}] * len(bad))

    def end(self) -> None:
        """Log what was left out."""
        if self._left_out:
            _log.warning(
                "%(path)s: damaged places left out of a read: %(count)d, the first: %(error)s",
                path=self._store,
                count=self._left_out,
                error=self._first_left_out,
            )

    def _batches(self, damages: Sequence[Damage], columns: Sequence[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
        """Raise `CorruptionError`, count, or yield a row about each; ``columns`` has the other columns of each row."""
        mode = self._options.mode
        predicate = None if self._options.reports_all_damage else self._options.predicate
        if mode == "FAILFAST":
            hint = "(mode PERMISSIVE reads the rest)"
            raise CorruptionError(damages[0].file, damages[0].offset, damages[0].kind, f"{damages[0].what} {hint}")
        if mode == "DROPMALFORMED":
            self._first_left_out = self._first_left_out or _text_of(damages[0])
            self._left_out += len(damages)
            return
        names = dict.fromkeys([*self._schema.names, *(() if predicate is None else predicate.columns)])
        schema = pa.schema([(name, TYPES[name]) for name in names])
        for begin in range(0, len(damages), _MOST_TOLD):
            some = slice(begin, begin + _MOST_TOLD)
            rows = [
                {CORRUPT: _text_of(damage), "store": self._store, **where}
                for damage, where in zip(damages[some], columns[some], strict=True)
            ]
            table = pa.Table.from_pylist(rows, schema=schema)
            if predicate is not None:
                table = table.filter(predicate.expression)
            yield from table.select(self._schema.names).cast(self._schema).to_batches()

    def _known_columns(self, rows: Rows) -> list[dict[str, Any]]:
        places = rows.places.tolist()
        if self._part.walk is not None:
            return [{"physicalOffset": place} for place in places]
        queues = [self._part.slices[number] for number in rows.queue.tolist()]
        return [
            {"physicalOffset": place, "topic": queue.topic, "queueId": queue.queue_id, "queueOffset": queue_offset}
            for place, queue, queue_offset in zip(places, queues, rows.queue_offsets.tolist(), strict=True)
        ]

    def _in_log(self, place: int, what: str) -> Damage:
        start = max(place, 0) // self._part.log_file_size * self._part.log_file_size
        return Damage(os.path.join(self._store, directory.COMMITLOG, file_name(start)), place, "record", what)

    def _in_queue(self, rows: Rows, at: int) -> Damage:
        share, queue_offset = self._part.slices[int(rows.queue[at])], int(rows.queue_offsets[at])
        position = queue_offset * ENTRY_SIZE % self._part.queue_file_size
        name = file_name(queue_offset * ENTRY_SIZE - position)
        path = os.path.join(directory.queue_folder(self._store, share.topic, share.queue_id), name)
        what = f"queue offset {queue_offset}: found physical offset {rows.places[at]} and size {rows.sizes[at]}"
        return Damage(path, position, "entry", what)


def _text_of(damage: Damage) -> str:
    return f"{damage.file}: at {damage.offset}: {damage.what}"
