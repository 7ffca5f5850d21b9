"""Positions in queues of stores: each offset with the record by which it is known what the offset counts.

::

    {store: {topic: {queue id: queue offset of the next message}},
     "fingerprints": {store: {topic: {queue id: [physical offset, digest]}}}}

The fingerprint of a queue is that of the last entry before its offset. A store or a topic that was made again can have
the same names and offsets, but not that record in that place. Streams keep positions in Spark's checkpoint, incremental
runs in their state.

A run of a pipeline over messages reads what was stored since the last one.

::

    OUT/latest             a link to the folder of the last run
    OUT/runs/000007/       its result in Parquet, and its state: what was read up to there
    OUT/messages/000007/   the columns of messages that run 7 read, and perhaps those of earlier runs

Spark writes the folders. A run counts once ``latest`` leads to its folder, which is the last thing that it does, so a
run that was killed leaves folders that nothing refers to. The next run deletes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.columns import DataLossError
from librmq.columns.planned_store import PlannedStore
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles
from librmq.files.interface import make_folders
from librmq.runtime.event_log import EventLog
from librmq.spark import stores
from librmq.spark._options import parse_read_options
from librmq.spark.pipelines import LeftOut, find
from librmq.spark.pipelines._catalog import Inputs, MessageRead, OfMessages
from librmq.spark.stores import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = EventLog("librmq.spark")
_FINGERPRINTS: Final = "fingerprints"
"""Key of a document beside its stores, whose paths are absolute."""

Document = dict[str, dict[str, dict[str, Any]]]
Key = tuple[str, str, int]
"""Store, topic, queue id."""
Stores = Mapping[str, PlannedStore]


class Fingerprint(NamedTuple):
    """What distinguishes a record from those of other stores, and of other times."""

    physical_offset: int
    digest: str
    """As from `PlannedStore.fingerprint_at`."""


@dataclass(frozen=True)
class Positions:
    """The next offset of each queue, and the fingerprint of the entry before it where that was seen."""

    offsets: Mapping[Key, int] = field(default_factory=dict)
    fingerprints: Mapping[Key, Fingerprint] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: Document) -> Positions:
        """Return the positions in a document."""
        marks = flat(document.get(_FINGERPRINTS, {}))
        return cls(flat(document), {key: Fingerprint(*mark) for key, mark in marks.items()})

    def document(self) -> Document:
        """Return the document of these positions, which is JSON."""
        marks = nested({key: list(mark) for key, mark in self.fingerprints.items()})
        return nested(self.offsets) | ({_FINGERPRINTS: marks} if marks else {})

    def moved_to(self, offsets: Mapping[Key, int], stores: Stores) -> Positions:
        """Return these positions, moved to ``offsets`` in ``stores``.

        They stay equal where no offset has moved, because Spark runs a batch for each offset that differs.

        Raises:
            ConfigError: A store that was not read before is a copy of another one.
        """
        if offsets == self.offsets:
            return self
        fingerprints: dict[Key, Fingerprint] = {}
        for key, offset in offsets.items():
            store, fingerprint = stores.get(key[0]), self.fingerprints.get(key)
            if fingerprint is not None and (offset == self.offsets[key] or store is None):
                fingerprints[key] = fingerprint
            elif store is not None and key[1:] in store.queues:
                place = store.queues[key[1:]].place_of(offset - 1)
                digest = store.fingerprint_at(place) if place >= 0 else None
                if digest is not None:
                    fingerprints[key] = Fingerprint(place, digest)
        PlannedStore.refuse_copies(stores, {path for path, _, _ in self.fingerprints})
        return Positions(offsets, fingerprints)

    def located(self, stores: Stores, unless: str | None, warned: set[str]) -> Positions:
        """Return the positions by the present paths of their stores, without the queues that are others now.

        A queue of which retention has deleted the last entry that was read, and no other, counts as the same; the log
        says so for each store that is not in ``warned``.

        Args:
            stores: The stores to read, by path.
            unless: What to set in order to go on after a loss; None if it is set.
            warned: The stores of which the log has said that a queue is not known for certain.

        Raises:
            DataLossError: A store is gone, or a store or queue is another one now, and ``unless`` is not None.
        """
        present = self.present_paths(stores)
        for path in dict.fromkeys(path for path, _, _ in self.offsets):
            now = os.path.realpath(path)
            if path in present or any(now == os.path.realpath(other) for other in present.values()):
                continue  # a link to a store that has another path in the offset: it is read once
            if unless is not None:
                raise DataLossError(self._loss_of(path, stores, present.values(), unless))
            if path not in stores:  # it may come back
                present[path] = path
        positions = Positions(
            {(present[key[0]], *key[1:]): offset for key, offset in self.offsets.items() if key[0] in present},
            {(present[key[0]], *key[1:]): mark for key, mark in self.fingerprints.items() if key[0] in present},
        )
        others = {key for key in positions.offsets if positions._is_other(key, stores, unless, warned)}
        return Positions(
            {key: offset for key, offset in positions.offsets.items() if key not in others},
            {key: mark for key, mark in positions.fingerprints.items() if key not in others},
        )

    def _is_other(self, key: Key, stores: Stores, unless: str | None, warned: set[str]) -> bool:
        """Return whether a queue is another one than that of which the offset counts the entries."""
        store, mark, offset = stores.get(key[0]), self.fingerprints.get(key), self.offsets[key]
        queue = None if store is None else store.queues.get(key[1:])
        if store is None or queue is None or offset < queue.begin:
            return False  # the caller sees that messages are gone
        what = f"read up to offset {offset}, but it ends at {queue.end}"
        if offset <= queue.end:
            place = -1 if mark is None else queue.place_of(offset - 1)
            digest = store.fingerprint_at(place) if mark is not None and place == mark.physical_offset else ""
            if mark is None or (place >= 0 and digest == mark.digest):
                return False
            if place < 0 or digest is None:
                if key[0] not in warned:
                    warned.add(key[0])
                    _log.warning(
                        "%(path)s: retention has deleted the last message that was read of %(queue)s, so it can't be "
                        "checked that it is still the same queue; it is read from offset %(queue_offset)d on",
                        path=key[0],
                        queue=f"{key[1]}/{key[2]}",
                        queue_offset=offset,
                    )
                return False
            what = (
                f"offset {offset - 1} is another message than the last one that was read, at {mark.physical_offset} of "
                "the log: the topic was deleted and created again, or the log lost its end"
            )
        if unless is not None:
            raise DataLossError(
                f"{key[0]}: topic {key[1]!r}, queue {key[2]}: {what} ({unless} reads from its beginning)"
            )
        return True

    def next_offset(self, key: Key, stores: Stores, unless: str | None) -> int:
        """Return the next offset to read of a queue, which is the first one of a queue that is new.

        Raises:
            DataLossError: Messages before it were deleted unread, and ``unless``, as of `located`, is not None.
        """
        store, last_end = stores.get(key[0]), self.offsets.get(key)
        queue = None if store is None else store.queues.get(key[1:])
        begin = 0 if queue is None else queue.begin
        if unless is not None and begin > (last_end or 0):
            # Positions hold every queue of the first read, so one that is new was empty or absent then.
            before = "it is new" if last_end is None else f"read up to offset {last_end}"
            raise DataLossError(
                f"{key[0]}: topic {key[1]!r}, queue {key[2]}: {before}, but begins at offset {begin}: the messages "
                f"before were deleted unread ({unless} reads the rest)"
            )
        return max(begin, last_end or 0)

    def present_paths(self, stores: Stores) -> dict[str, str]:
        """Return where the stores are now; those that are gone are left out."""
        marks = {path: self._marks_of(path) for path, _, _ in self.offsets}

        def has_last(path: str, now: str) -> bool:
            """Return whether the store at ``now`` has the last record that was read of the one at ``path``."""
            return any(stores[now].fingerprint_at(mark.physical_offset) == mark.digest for mark in marks[path][:1])

        def can_be(path: str, now: str) -> bool:
            """Return whether it has an earlier one, or no longer the place of the last one."""
            digests = ((stores[now].fingerprint_at(mark.physical_offset), mark.digest) for mark in marks[path])
            return not marks[path] or any(current in (None, digest) for current, digest in digests)

        rounds: tuple[Callable[[str, str], bool], ...] = (
            # The surest first, so that of a store and its copy each keeps its offsets.
            lambda path, now: path == now and has_last(path, now),
            has_last,
            lambda path, now: path == now and can_be(path, now),
            lambda path, now: os.path.realpath(path) == os.path.realpath(now) and can_be(path, now),
        )
        present: dict[str, str] = {}
        for matches in rounds:
            for path in marks:
                free = () if path in present else stores.keys() - present.values()
                matching = sorted(now for now in free if matches(path, now))
                if matching:
                    present[path] = matching[0]
        return present

    def _loss_of(self, path: str, stores: Stores, known_paths: Iterable[str], unless: str) -> str:
        """Return what is wrong with a store that no path leads to."""
        marks = self._marks_of(path)
        if path in stores and marks:
            place, end = marks[0].physical_offset, stores[path].log_end
            what = f"its log {f'ends at {end}, before' if place >= end else 'has another record at'} {place}"
            return (
                f"{path}: {what}, the last that was read: the folder holds another store, a replica that was behind, "
                f"or a log that lost its end ({unless} reads from its beginning)"
            )
        text = f"{path}: this store was read, and none of the named folders holds it now"
        for now in sorted(stores.keys() - set(known_paths)) if marks else ():
            if stores[now].fingerprint_at(marks[0].physical_offset) is None:
                text += (
                    f"; {now} can be this store, but retention has deleted the messages by which it was known: if "
                    f"it is, name it by a link at {path}"
                )
        return f"{text} (add its folder, or {unless} goes on without it)"

    def _marks_of(self, path: str) -> list[Fingerprint]:
        """Return the fingerprints of a store, the last record's first."""
        return sorted((mark for key, mark in self.fingerprints.items() if key[0] == path), reverse=True)


def nested(values: Mapping[Key, Any]) -> Document:
    """Return what belongs to queues by store, topic and queue id."""
    nested: Document = {}
    for (path, topic, queue_id), value in sorted(values.items()):
        nested.setdefault(path, {}).setdefault(topic, {})[str(queue_id)] = value
    return nested


def flat(document: Document) -> dict[Key, Any]:
    """Return what belongs to queues by queue."""
    return {
        (path, topic, int(queue_id)): value
        for path, topics in document.items()
        if path != _FINGERPRINTS
        for topic, queues in topics.items()
        for queue_id, value in queues.items()
    }


_STATE: Final = "_librmq_run.json"
"""Spark reads no file whose name begins with an underscore."""
_LOCK: Final = "_librmq.lock"
_MOST_PARTS: Final = 32
"""Folders of messages from which the next run makes one."""


@dataclass(frozen=True, slots=True)
class Increment:
    """The result of `run_incrementally`: its folder, and the number of messages that this run read."""

    path: str
    messages: int
    """Offsets that are new; places that ``damaged=skip`` leaves out count."""
    left_out: LeftOut
    """What this run left out with ``damaged=skip``, because it can't be read."""
    lost: int
    """Number of messages that retention deleted before a run read them, with ``damaged=skip``."""


@dataclass(frozen=True)
class _State:
    """A run: what it was asked, what has been read, and which folders of messages hold that."""

    pipeline: str
    settings: dict[str, str]
    ends: Document = field(default_factory=dict)
    """The positions before which all is read."""
    parts: tuple[str, ...] = ()
    run: int = 0
    skipped: tuple[str, ...] = ()
    """The stores of which a run has left out messages."""

    @classmethod
    def read(cls, path: str) -> _State:
        try:
            document = json.loads(DiskFiles().read(path))
            return cls(**document | {name: tuple(document[name]) for name in ("parts", "skipped")})
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(path, 0, "config", f"expected the state of an incremental run: {error}") from None


def run_incrementally(
    spark: SparkSession,
    name: str,
    paths: stores.Paths,
    out: str,
    settings: Settings | None = None,
    *,
    partition_by: Sequence[str] = (),
) -> Increment:
    """Bring the result of a pipeline over messages in ``out`` up to date, reading only messages stored since last time.

    The result in ``OUT/latest`` equals that of a run over all messages that were ever there. The columns that the
    pipeline reads are kept in ``out``, so retention may delete messages that a run has read.

    Raises:
        ConfigError: The pipeline shows the present state of a store, or an earlier run had other settings or stores.
        DataLossError: Retention deleted messages that no run has read; ``damaged=skip`` continues after them.
        StoreLockedError: Another process runs in ``out``.
    """
    chosen_settings = dict(settings or {})
    pipeline = find(name, chosen_settings)
    if not isinstance(pipeline.source, OfMessages):
        raise ConfigError(
            f"pipeline {name}: it shows the present state; append the result of each run to a table (--append)"
        )
    for setting in ("starting_offsets", "ending_offsets"):
        if setting in chosen_settings:
            raise ConfigError(f"setting {setting}: an incremental run chooses the offsets; leave it out")
    out = os.path.abspath(out)
    is_new = not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out))
    if not is_new and not os.path.isdir(os.path.join(out, "runs")):
        raise ConfigError(f"{out} exists and holds no incremental runs; name another folder")
    make_folders(DiskFiles(), os.path.join(out, "runs"))
    with _locked(out):
        before = _last_state(out, name, chosen_settings)
        inputs = Inputs(spark, stores.paths_of(paths), chosen_settings)
        _delete_others(os.path.join(out, "messages"), before.parts)
        _delete_others(os.path.join(out, "runs"), [_folder(before.run)])
        read = pipeline.source.reads(chosen_settings)
        skips = chosen_settings.get("damaged") == "skip"
        with ExitStack() as opened:
            planned = _open(read, inputs.paths, opened)
            is_damaged = any(store.damage for store in planned.values())
            former = Positions.parse(before.ends)
            moves: dict[Any, Any] = {old: new for old, new in former.present_paths(planned).items() if old != new}
            unless = "setting damaged=skip" if before.run and not skips else None
            last = former.located(planned, unless, set())
            ending = {
                (path, *name): queue.end for path, store in planned.items() for name, queue in store.queues.items()
            }
            starting = {key: last.next_offset(key, planned, unless) for key in ending}
            ends = last.moved_to({**last.offsets, **ending}, planned)
        count = sum(max(0, end - starting[queue]) for queue, end in ending.items())
        run, parts, skipped = before.run + 1, before.parts, LeftOut()
        has_news = count > 0 or not parts or bool(moves)
        new = {
            "startingOffsets": json.dumps(nested(starting)),
            "endingOffsets": json.dumps(nested(ending)),
            "failOnDataLoss": str(not skips),
        }
        if skips and (has_news or is_damaged):
            skipped = LeftOut.from_frame(read.left_out(spark, inputs.paths, **new))
        if has_news:
            fresh = read.messages(spark, inputs.paths, **new)
            if len(parts) >= _MOST_PARTS or moves:
                stored = _stored_messages(spark, out, read, parts)
                fresh, parts = stored.replace(moves, subset=["store"]).unionByName(fresh), ()
            parts = (*parts, _folder(run))
            fresh.write.parquet(os.path.join(out, "messages", parts[-1]))
        # Retention deleted what is between the end of the last run and the first offset.
        first_ends = {} if before.run else starting  # a queue that appears later is read from offset 0
        last_ends = {queue: last.offsets.get(queue, first_ends.get(queue, 0)) for queue in starting}
        lost = {queue: begin - last_ends[queue] for queue, begin in starting.items() if begin > last_ends[queue]}
        former_skipped = (moves.get(path, path) for path in before.skipped)
        stores_skipped = tuple(sorted({*former_skipped, *skipped.stores, *(path for path, _, _ in lost)}))
        result = pipeline.result(
            inputs, _stored_messages(spark, out, read, parts), stores_skipped if skips or stores_skipped else None
        )
        target = os.path.join(out, "runs", _folder(run))
        result.write.partitionBy(*partition_by).parquet(target)
        state = _State(name, _pinned(chosen_settings), ends.document(), parts, run, stores_skipped)
        DiskFiles().write(os.path.join(target, _STATE), json.dumps(vars(state)).encode())
        _link(out, target)
        return Increment(os.path.join(out, "latest"), count, skipped, sum(lost.values()))


def _folder(run: int) -> str:
    return f"{run:06}"


def _pinned(settings: Settings) -> dict[str, str]:
    """Return the settings that every run in a folder shares."""
    return {name: value for name, value in settings.items() if name != "damaged"}


def _last_state(out: str, name: str, settings: Settings) -> _State:
    latest = os.path.join(out, "latest")
    if not os.path.lexists(latest):
        return _State(name, _pinned(settings))
    state = _State.read(os.path.join(latest, _STATE))
    if (state.pipeline, state.settings) != (name, _pinned(settings)):
        description = ", ".join(f"{setting}={value}" for setting, value in state.settings.items()) or "no settings"
        raise ConfigError(
            f"{out} was begun by the pipeline {state.pipeline} with {description}; keep them, or name another folder"
        )
    return state


def _open(read: MessageRead, paths: Sequence[str], opened: ExitStack) -> dict[str, PlannedStore]:
    """Open the stores with the wanted queues, until ``opened`` ends."""
    default_topics = {} if read.first_sends_only or "topic" in read.options else {"topicPattern": "(?s).*"}
    options = {**default_topics, **read.options}
    return {
        path: opened.enter_context(PlannedStore.open(path, parse_read_options({**options, "path": path})))
        for path in paths
    }


def _stored_messages(spark: SparkSession, out: str, read: MessageRead, parts: Sequence[str]) -> DataFrame:
    return spark.read.schema(read.columns).parquet(*(os.path.join(out, "messages", part) for part in parts))


@contextmanager
def _locked(out: str) -> Iterator[None]:
    lock = DiskFiles().lock(os.path.join(out, _LOCK))
    try:
        yield
    finally:
        lock.release()


def _link(out: str, target: str) -> None:
    """Let ``OUT/latest`` lead to ``target``, in one step."""
    fresh = os.path.join(out, "latest.new")
    with suppress(FileNotFoundError):
        os.unlink(fresh)
    os.symlink(os.path.relpath(target, out), fresh)
    os.replace(fresh, os.path.join(out, "latest"))
    DiskFiles().flush_folder(out)


def _delete_others(folder: str, current: Sequence[str]) -> None:
    """Delete what killed or earlier runs left in ``folder``, and nothing of another name."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if re.fullmatch(r"\d{6,}", name) and name not in current:
            shutil.rmtree(os.path.join(folder, name))
