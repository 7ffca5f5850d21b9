"""Whether a broker, and librmq, would start on a store: at once, after a repair of their own, or not, and why.

::

    judged                what RocketMQ 4.9 (4.9.4) does            what 5.x (5.3.3) does differently
    tables in config/     an unreadable or empty file is replaced   also topicQueueMapping, consumerOrderInfo and
                          by its .bak; without a .bak it starts     timermetrics
                          with an empty table; if both are
                          unreadable it refuses
    files of log, queues  every length must be that of broker.conf  a last file of length zero is deleted
    the log's walk        from the third-last file                  from the last file that begins before the end of
                                                                    the queues
      after a kill        from the newest file whose first record is 3 s older than the checkpoint's times, or from the
                          first file; up to the first unreadable record, behind which everything is cut
    index after a kill    files that end after the checkpoint's time are deleted; keys before the walk stay lost
    timer                 none                                      the length of the wheel must fit its precision

Mirrors ``BrokerController.initialize``, ``DefaultMessageStore.load``, ``CommitLog.recoverNormally`` and
``recoverAbnormally``, ``MappedFileQueue.load``, ``IndexService.load`` and ``ConfigManager.load``. Nothing is changed.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from librmq.broker import Broker
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import ENTRY_SIZE, StoreConfig
from librmq.diagnosis._checks import missing_key_findings
from librmq.diagnosis._kept_progress import beyond_end_findings
from librmq.diagnosis._start_queues import QueuesAtStart
from librmq.diagnosis.view import StoreView
from librmq.errors import CorruptionError, MalformedError, RmqError, StoreIOError
from librmq.files import Damage, DiskFiles, Files, FolderEntry, OverlayFiles, file_size
from librmq.formatting import duration
from librmq.formatting import size as size_text
from librmq.java import json as java_json
from librmq.message import record
from librmq.message.topics import SystemTopic
from librmq.runtime import ManualRunner
from librmq.runtime.event_log import counted, held_back
from librmq.store import BrokerTables, Checkpoint, MessageStore, verify
from librmq.store.format import directory
from librmq.store.format.broker_tables import repair_advice
from librmq.store.format.indexfile import IndexHeader
from librmq.store.format.timerfiles import TimerWheel
from librmq.store.recovery.open import without_leftovers
from librmq.store.recovery.salvage import find_record

Start = Literal["starts", "reads", "repairs", "loses", "refuses"]
"""What an opener does: it starts, only reads, repairs the store without a loss, loses something, or refuses."""

_ORDER: Final[tuple[Start, ...]] = ("starts", "reads", "repairs", "loses", "refuses")
_TABLES: Final = (
    "topics.json", "consumerOffset.json", "subscriptionGroup.json", "consumerFilter.json", "delayOffset.json",
)  # fmt: skip
_TABLES_OF_5: Final = ("topicQueueMapping.json", "consumerOrderInfo.json", "timermetrics")
_MOST_WALKED: Final = 4 << 30
"""Bytes of the log up to which a verdict reads all that a broker's recovery would read."""
_MOST_TRIED: Final = 64 << 20
"""Length of a log up to which recoveries are tried in memory; of larger ones librmq's own is judged by a reader."""
_SAMPLE: Final = 64 << 20
"""Bytes that are read to measure the disk."""
_PIECE: Final = 1 << 20
_COPY: Final = "copy the folder first (cp -a)"
_NAMED: Final = 3


class StartReason(NamedTuple):
    """A reason why an opener does not simply start."""

    opener: str
    """``broker`` or ``librmq``."""
    verdict: Start
    """What it does for this reason."""
    file: str
    """The file that the reason is about, relative to the store's folder."""
    what: str
    """What is wrong, and what the opener does about it."""
    next: str
    """What to copy, to delete, or to run; empty if nothing is to be done."""


class StartVerdict(NamedTuple):
    """What a broker and librmq would do at a start on a store."""

    version: str
    """The version of RocketMQ by whose rules the store is judged: 4.9 or 5.3."""
    broker: Start
    """What the broker would do; that of the worst reason."""
    librmq: Start
    """What librmq would do."""
    closed_cleanly: bool
    """Whether there is no abort marker."""
    condition: Literal["sound", "recoverable", "damaged"] | None
    """What ``librmq verify`` finds; None if an opener refuses the store, or the log is above 64 MiB."""
    recovery_file: str | None
    """The file of the log from which a broker's recovery reads; None without a log, or if RocksDB decides it."""
    recovery_bytes: int | None
    """What it reads from there; None if that is unknown."""
    read_bytes_per_s: int | None
    """How fast this disk has just read a part of the log; None if nothing was read."""
    read_s: float | None
    """How long reading ``recovery_bytes`` takes at that rate; the broker's own work comes on top."""
    log_end: int | None
    """Where the log ends after the broker's start; None if it refuses, or not all of it was read."""
    cut_bytes: int | None
    """Bytes of the log behind that, which the broker cuts; None if they are unknown."""
    recover_cuts: int | None
    """How many places ``librmq recover`` would change; None if it refuses the store, or the log is above 64 MiB."""
    reasons: list[StartReason]
    """Why not simply ``starts``, the worst first."""

    def sentence(self, path: str) -> str:
        """Return the verdict on the store in ``path`` for people."""
        condition = "" if self.condition in (None, "sound") else f"{self.condition}; "
        text = f"{path}: {condition}RocketMQ {self.version} {_DOES[self.broker]}; librmq {_DOES[self.librmq]}"
        if self.condition is None and "refuses" not in (self.broker, self.librmq):
            text += (
                f"; queues and index were not compared with the log, which is above {size_text(_MOST_TRIED)}: librmq "
                "verify does that"
            )
        if self.recovery_file is None or self.recovery_bytes is None or self.broker == "refuses":
            return text
        text += f"; the broker reads {size_text(self.recovery_bytes)} from {self.recovery_file} on"
        if self.read_s is None:
            return text
        pace = f"the {size_text(self.read_bytes_per_s)} a second that were just read"
        return f"{text}, at least {duration(self.read_s)} at {pace}"


def can_start(
    path: str, config: StoreConfig | None = None, *, files: Files | None = None, clock: Clock | None = None
) -> StartVerdict:
    """Judge the store in ``path`` without changing it; a large log is read up to 4 GiB.

    Args:
        path: The store's folder.
        config: Its settings; by default those that its files show.
        files: The file system; the disk by default.
        clock: Measures the time of reading.

    Raises:
        NotAStoreError: There is no store.
    """
    files = files or DiskFiles()
    kind = directory.check_kind(path, files)
    config = config or directory.infer_config(path, files)
    judge = _Judge(path, config, files, kind)
    with judge.opened:
        return judge.verdict(clock or SystemClock())


@dataclass
class _ReadLog:
    """What a broker's recovery reads of the log, and what it finds; None where that is unknown."""

    start: int | None = None
    file: str | None = None
    bytes: int | None = None
    rate: int | None = None
    is_whole: bool = True
    end: int | None = None
    cut: int | None = None


class _Judge:
    def __init__(self, path: str, config: StoreConfig, files: Files, kind: directory.StoreKind) -> None:
        self._path = path
        self._config = config
        self._files = files
        self._kind = kind
        self._is_5 = directory.is_of_5(path, files)
        self._was_closed = not directory.has_abort(files, path)
        self.opened = ExitStack()
        """Closes what the verdict has opened."""
        self._queue_files = QueuesAtStart(path, config, files, lambda: self._store)
        self._reasons: list[StartReason] = []
        self._log_folder = os.path.join(path, directory.COMMITLOG)
        self._is_small = sum(entry.size for entry in files.list(self._log_folder)) <= _MOST_TRIED
        """Whether the whole store is checked, and openings are tried in memory."""

    @cached_property
    def _store(self) -> MessageStore:
        """The store as a reader sees it.

        Raises:
            RmqError: No reader opens it.
        """
        store = MessageStore.open(self._path, self._config, files=self._files, read_only=True)
        return self.opened.enter_context(store)

    @cached_property
    def _checkpoint(self) -> Checkpoint | None:
        with suppress(CorruptionError):
            return Checkpoint.open(os.path.join(self._path, directory.CHECKPOINT), files=self._files)
        return None

    def verdict(self, clock: Clock) -> StartVerdict:
        self._lock()
        self._tables()
        self._sequence(self._log_folder, self._config.commitlog_file_size, "mappedFileSizeCommitLog")
        if not self._kind.derives_queues:
            for folder in self._queue_files.folders(directory.CONSUMEQUEUE):
                self._sequence(folder, self._config.consumequeue_file_size, "mappedFileSizeConsumeQueue")
        self._timer()
        read = self._log(clock)
        self._index(read.start)
        if not self._kind.derives_queues:
            self._missing(read)
        librmq, cuts = self._by_librmq(clock)
        condition = self._diagnosed()
        librmq = max(librmq, *(r.verdict for r in self._reasons if r.opener == "librmq"), "starts", key=_ORDER.index)
        verdicts = [reason.verdict for reason in self._reasons if reason.opener == "broker"]
        broker: Start = max(verdicts, key=_ORDER.index, default="starts")
        if broker == "starts" and not self._was_closed:
            broker = "repairs"
        return StartVerdict(
            version="5.3" if self._is_5 else "4.9",
            broker=broker,
            librmq=librmq,
            closed_cleanly=self._was_closed,
            condition=condition,
            recovery_file=read.file,
            recovery_bytes=read.bytes,
            read_bytes_per_s=read.rate,
            read_s=read.bytes / read.rate if read.bytes is not None and read.rate else None,
            log_end=None if broker == "refuses" or not read.is_whole else read.end,
            cut_bytes=None if broker == "refuses" or not read.is_whole else read.cut,
            recover_cuts=cuts,
            reasons=sorted(self._reasons, key=lambda reason: -_ORDER.index(reason.verdict)),
        )

    def _name(self, place: str) -> str:
        return os.path.relpath(place, self._path)

    def _add(self, verdict: Start, file: str, what: str, following: str = "", *, opener: str = "broker") -> None:
        self._reasons.append(StartReason(opener, verdict, self._name(file), what, following))

    # ---- lock and tables

    def _lock(self) -> None:
        lock = directory.lock_path(self._path)
        holder = self._files.lock_holder(lock)
        if holder is not None:
            self._add("refuses", lock, f"{holder} has the store open, so another start is refused", "stop it first")

    def _tables(self) -> None:
        folder = os.path.join(self._path, directory.CONFIG)
        if directory.tables_database(folder, self._files) is not None:
            return  # the broker reads its tables from RocksDB
        for name in (*_TABLES, *(_TABLES_OF_5 if self._is_5 else ())):
            place = os.path.join(folder, name)
            state, backup = self._state(place), self._state(f"{place}.bak")
            if state is None or (state == "is missing" and backup == "is missing"):
                continue
            if name == "delayOffset.json" and backup in ("is missing", "is empty") and not self._has_delayed():
                self._add("repairs", place, f"{state}: the broker begins an empty table; no message is delayed")
                continue
            if backup is None:
                self._add("repairs", place, f"{state}, so {name}.bak is read in its place: it can be a save older",
                          f"to keep it, compare both, and copy {name}.bak over {name}")  # fmt: skip
            elif "damaged" in backup and state in ("is missing", "is empty"):
                self._add("refuses", f"{place}.bak", f"{backup}, and {name} {state}", repair_advice(place, self._files))
            elif "damaged" in backup:
                self._add("refuses", place, f"{state}, and {name}.bak {backup}", repair_advice(place, self._files))
            else:
                self._add("loses", place, f"{state}, and {name}.bak {backup}: the broker starts with an empty table",
                          f"copy {name} from a backup of the store before the start")  # fmt: skip
        with suppress(CorruptionError):
            tables = BrokerTables.open(folder, files=self._files)
            delays = tables.unknown_delays() if self._has_delayed() else None
            for unknown, table in ((tables.unknown_progress(), tables.offsets), (delays, tables.delays)):
                if unknown is not None and file_size(self._files, table.path) is None:
                    self._add("loses", table.path, f"{unknown.partition(':')[0]}, and the broker starts without it",
                              "copy the file from a backup of the store before the start")  # fmt: skip

    def _has_delayed(self) -> bool:
        """Return whether a queue of delayed messages has an entry."""
        root = os.path.join(self._path, directory.CONSUMEQUEUE, SystemTopic.SCHEDULE)
        return self._kind.derives_queues or any(
            any(self._files.read(os.path.join(root, queue.name, name), 0, ENTRY_SIZE))
            for queue in self._files.list(root)
            if queue.is_folder
            for name in self._files.names(os.path.join(root, queue.name))
        )

    def _state(self, place: str) -> str | None:
        """Return what is wrong with a file of a table, as a text that follows its name; None if nothing is."""
        length = file_size(self._files, place)
        if not length:
            return "is missing" if length is None else "is empty"
        try:
            document = java_json.loads(self._files.read(place))
        except MalformedError as error:
            return f"is damaged ({error})"
        return None if isinstance(document, dict) else f"is damaged (expected an object, found {document!r:.40})"

    # ---- lengths of files

    def _sequence(self, folder: str, length: int, setting: str) -> None:
        """Judge the files of a folder whose lengths must be equal."""
        entries = sorted(self._files.list(folder), key=lambda entry: entry.name)
        for number, entry in enumerate(entries):
            self._entry(os.path.join(folder, entry.name), entry, length, setting, is_last=number == len(entries) - 1)
        if folder != self._log_folder:
            return
        starts = [int(entry.name) for entry in entries if entry.name.isdigit() and entry.size == length]
        gaps = [start for before, start in itertools.pairwise(starts) if start != before + length]
        if gaps:
            self._add("loses", os.path.join(folder, f"{gaps[0]:020}"),
                      "the file before it is missing: the broker starts, and reads of its messages fail",
                      "copy the missing file from a backup of the store")  # fmt: skip

    def _entry(self, place: str, entry: FolderEntry, length: int, setting: str, *, is_last: bool) -> None:
        if entry.is_folder:
            if not self._is_5:
                self._add("refuses", place, "a folder beside files, whose lengths are checked", "move it away")
        elif not entry.size and is_last and self._is_5:
            self._add("repairs", place, "it has length zero, as a kill leaves it, and is deleted")
        elif entry.size != length:
            if not entry.size and is_last:
                repair = "delete it: it holds nothing, and `librmq recover` would too"
            elif os.path.dirname(place) == self._log_folder:
                repair = f"`librmq salvage {self._path} --into NEW` saves every record that can be read"
            else:
                repair = (f"{_COPY}; `librmq recover {self._path}` makes the queue again from the log, or move "
                          "consumequeue/ and index/ away: a broker makes both again")  # fmt: skip
            what = f"expected {length} bytes ({setting} of broker.conf), found {entry.size}"
            self._add("refuses", place, what, repair)
        elif not entry.name.isdigit():
            self._add("refuses", place, "its name is no number", "move it away")

    def _timer(self) -> None:
        if not self._is_5:
            return
        wheel = os.path.join(self._path, directory.TIMERWHEEL)
        snapshots = TimerWheel.snapshots_in(self._path, self._files)[-1:]
        for place in (wheel, *(f"{wheel}.{position}" for position in snapshots)):
            length = file_size(self._files, place) or 0
            if length % 64:
                what = f"expected a multiple of 64 bytes, two turns of slots, found {length}"
                if place == wheel:
                    self._add("refuses", wheel, what,
                              f"{_COPY}, then delete timerwheel, timerlog/ and config/timercheck: the broker makes "
                              "them again from the topic of timers, and delivers those again")  # fmt: skip
                else:
                    self._add("refuses", place, f"{what}; a broker with timerWheelSnapshotFlush=false does not read it",
                              "move it away: the broker reads the one before it, or timerwheel, and then the timer "
                              "log")  # fmt: skip
        folder = os.path.join(self._path, directory.TIMERLOG)
        entries = self._files.list(folder)
        lengths = [entry.size for entry in entries if entry.size and not entry.is_folder]
        if lengths:
            common_length = max(set(lengths), key=lambda size: (lengths.count(size), size))
            self._sequence(folder, common_length, "mappedFileSizeTimerLog")

    # ---- the log

    def _log(self, clock: Clock) -> _ReadLog:
        """Read the log as a broker would, and judge what it finds."""
        folder, read = self._log_folder, _ReadLog()

        def begin_of_walk(log: CommitLog) -> int:
            read.start = start = self._start_of_walk(log)
            if start is None:
                return log.third_last_file()
            read.bytes = max(0, log.begin + log.sequence.data_behind(log.begin) - start)
            read.rate = self._rate(log, start, read.bytes, clock)
            read.is_whole = read.bytes <= _MOST_WALKED
            return start if read.is_whole else log.third_last_file()

        try:
            files, _ = without_leftovers(self._path, self._files)
            log = CommitLog.open(
                folder, self._config.commitlog_file_size, files=files, writable=False, scan_from=begin_of_walk
            )
        except CorruptionError:
            return read  # a broker refuses it too, for a length or a name
        if not log.sequence.starts:
            if any(self._files.list(os.path.join(self._path, directory.CONSUMEQUEUE))):
                self._add("loses", folder, "the log has no file, so the broker deletes all queues",
                          "copy the log from a backup of the store before the start")  # fmt: skip
            return read
        start, end = read.start, log.found_end
        if start is None:
            self._add("starts", folder, "the queues are in RocksDB, whose end decides where the recovery reads")
            return read
        read.file = self._name(log.sequence.path(start))
        if not read.is_whole:
            self._add("starts", log.sequence.path(start),
                      f"more than {size_text(_MOST_WALKED)} would be read, of which only the last three files were "
                      "checked", f"`librmq verify {self._path}` reads everything")  # fmt: skip
        if not self._was_closed and start == log.begin and (read.bytes or 0) > 3 * log.file_size:
            self._add("repairs", os.path.join(self._path, directory.CHECKPOINT),
                      "its times are older than the log's second file, so the recovery reads the whole log",
                      "wait for it, and close the broker with mqshutdown the next time; deleting abort would make the "
                      "start quick, and hide what the kill has damaged")  # fmt: skip
        read.end = end.physical_offset
        read.cut = self._cut(log, end.physical_offset, end.damage)
        return read

    def _start_of_walk(self, log: CommitLog) -> int | None:
        """Return the file from which a broker reads the log; None if RocksDB decides."""
        starts = log.sequence.starts
        if self._was_closed and not self._is_5:
            return log.third_last_file()
        if self._kind in (directory.StoreKind.V5_ROCKSDB, directory.StoreKind.V5_MIXED):
            return None
        if self._was_closed:
            end = self._queue_files.end()
            return next((start for start in reversed(starts) if start <= end), starts[0])
        until_ms = 0 if self._checkpoint is None else self._checkpoint.min_timestamp_ms
        magics = record.MAGICS if self._is_5 else (record.MESSAGE_MAGIC,)
        for start in reversed(starts):
            magic = int.from_bytes(log.data_at(start, 8)[4:], "big")
            stored_ms = log.first_store_timestamp_ms(start) if magic in magics else None
            if stored_ms and stored_ms <= until_ms:
                return start
        return starts[0]

    def _missing(self, read: _ReadLog) -> None:
        """Judge what is missing of log, queues and index, which a broker does not notice."""
        named = {reason.file for reason in self._reasons if reason.verdict in ("loses", "refuses")}
        if not self._was_closed and read.start is None:
            return
        for part in self._queue_files.lost_parts(None if self._was_closed else read.start):
            file = self._name(part.file)
            is_log = file.startswith(directory.COMMITLOG)
            if file in named or (is_log and any(place.startswith(directory.COMMITLOG) for place in named)):
                continue
            if not part.is_lost:
                self._add("repairs", part.file, part.what)
            elif is_log:
                self._add("loses", part.file, f"{part.what}: the broker starts without these messages",
                          "copy the missing files from a backup of the store before the start")  # fmt: skip
            else:
                self._add("loses", part.file, part.what,
                          f"{_COPY}; `librmq recover {self._path}` makes it again from the log")  # fmt: skip
        for place in self._queue_files.empty_last_files(read.end or 0) if self._is_5 else ():
            self._add("refuses", place,
                      "the last file of a queue has no entry, and the one before it is full: the broker stops with an "
                      "IllegalArgumentException (RocketMQ's #9728)", "delete it: it holds nothing")  # fmt: skip

    def _cut(self, log: CommitLog, end: int, damage: CorruptionError | None) -> int:
        """Judge what a broker cuts behind the end of the log, and return its bytes."""
        behind = end + log.blank_at(end)
        cut = log.data_behind(behind)
        if not cut:
            return 0
        place = log.sequence.path_at(end)
        following = find_record(log.sequence, end + max(log.unfinished_at(end), 1), behind + cut)
        why = "the log's first unreadable record" if damage is None else damage.what
        what = f"at {end}: {why}; the broker cuts {size_text(cut)} from there on"
        if following is None:
            self._add("repairs", place, f"{what}, among which is no sound record")
        else:
            self._add("loses", place, f"{what}, with sound records from {following} on",
                      f"{_COPY}, then `librmq salvage {self._path} --into NEW` saves them")  # fmt: skip
        return cut

    def _rate(self, log: CommitLog, start: int, amount: int, clock: Clock) -> int | None:
        """Return how many bytes of the log the disk reads in a second."""
        began, read, sequence = clock.monotonic(), 0, log.sequence
        starts = (place for place in sequence.starts if place >= start)
        for file_start, at in itertools.product(starts, range(0, log.file_size, _PIECE)):
            with suppress(StoreIOError):
                read += len(self._files.read(sequence.path(file_start), at, min(_PIECE, log.file_size - at)))
            if read >= min(_SAMPLE, amount):
                break
        took = clock.monotonic() - began
        return int(read / took) if read and took > 0 else None

    # ---- the index

    def _index(self, start: int | None) -> None:
        folder = os.path.join(self._path, directory.INDEX)
        checkpoint_ms = 0 if self._checkpoint is None else self._checkpoint.index_timestamp_ms
        deleted: list[IndexHeader] = []
        for entry in self._files.list(folder):
            place = os.path.join(folder, entry.name)
            if entry.is_folder:
                if self._is_5:
                    self._add("refuses", place, "a folder among the files of the index", "move it away")
            elif not self._was_closed and entry.name.isdigit():
                header = IndexHeader.read(place, self._files)
                if header.end_timestamp_ms > checkpoint_ms:
                    deleted.append(header)
        lost = [header for header in deleted if start is not None and header.begin_physical_offset < start]
        if deleted:
            what = f"{counted(len(deleted), 'index file')} newer than the checkpoint's time deleted at the start"
            if lost:
                begin = min(header.begin_physical_offset for header in lost)
                self._add("loses", folder, f"{what}; keys of messages from {begin} to {start} are not indexed again",
                          f"after the start and a shutdown, `librmq recover {self._path}` indexes them")  # fmt: skip
            else:
                self._add("repairs", folder, f"{what}, and made again")

    # ---- what verify and diagnose know

    def _diagnosed(self) -> Literal["sound", "recoverable", "damaged"] | None:
        """Add what `verify` and `diagnose` find, and nothing above has named; return the verdict of `verify`."""
        if any(reason.verdict == "refuses" for reason in self._reasons):
            return None  # the openers look no further
        condition: Literal["sound", "recoverable", "damaged"] | None = None
        if self._is_small:
            verdict = verify(self._path, self._config, self._files)
            condition = "damaged" if verdict.damage else "recoverable" if verdict.recoverable else "sound"
            parts = [self._name(damage.file).partition(os.sep)[0] for damage in verdict.damage]
            if directory.COMMITLOG not in parts:  # what a start makes of that, and of the tables, is judged above
                for part, damage in zip(parts, verdict.damage, strict=True):
                    is_of_queue = part == directory.CONSUMEQUEUE and damage.kind != "missing"  # `_missing` says more
                    if part == directory.INDEX or is_of_queue:
                        self._add_known(damage.file, f"at {damage.offset}: {damage.what}")
        with suppress(RmqError):
            view = StoreView.over(self._store)
            for finding in () if condition else missing_key_findings(view):
                self._add_known(os.path.join(self._path, directory.INDEX), finding.what)
            for finding in beyond_end_findings(view):
                name = "timercheck" if finding.subject == "timer" else "delayOffset.json"
                place = os.path.join(self._path, directory.CONFIG, name)
                for opener in ("broker", "librmq"):
                    self._add("loses", place, finding.what, finding.next_step, opener=opener)
        return condition

    def _add_known(self, place: str, what: str) -> None:
        """Add what a broker starts with and does not repair, unless a reason is about its file or folder."""
        name = self._name(place)
        if not any(reason.file in (name, os.path.dirname(name)) or name == os.path.dirname(reason.file)
                   for reason in self._reasons if reason.verdict != "repairs"):  # fmt: skip
            self._add("loses", place, f"{what}: the broker starts, and does not repair that",
                      f"{_COPY}; `librmq recover {self._path} --dry-run` shows what a recovery repairs")  # fmt: skip

    # ---- librmq

    def _by_librmq(self, clock: Clock) -> tuple[Start, int | None]:
        """Return what librmq does at an opening for writing, tried in memory, and how much `recover` would change."""
        database = directory.tables_database(os.path.join(self._path, directory.CONFIG), self._files)
        paths = directory.log_paths(self._path, self._files)
        if self._kind.derives_queues or database is not None or paths:
            return "reads", None
        opened: Start
        try:
            cuts = self._opened_in_memory(clock) if self._is_small else self._judged_by_reader()
            opened = "repairs" if cuts or not self._was_closed else "starts"
        except RmqError as error:
            self._refused_by_librmq(error)
            opened, cuts = "refuses", []
        for cut in cuts[:_NAMED]:
            self._add("repairs", cut.file, f"at {cut.offset}: {cut.what}", opener="librmq")
        if opened == "starts":
            return opened, 0
        if not self._is_small:
            return opened, None
        files = OverlayFiles(self._files)
        with (
            suppress(RmqError),
            held_back(),
            MessageStore.open(self._path, self._config, files=files, thorough=True, background=False) as store,
        ):
            return opened, len(store.recovered)
        return opened, None

    def _refused_by_librmq(self, error: RmqError) -> None:
        if not isinstance(error, CorruptionError):
            self._add("refuses", self._path, str(error), opener="librmq")
            return
        is_table = os.path.basename(os.path.dirname(error.file)) == directory.CONFIG
        following = repair_advice(error.file, self._files) if is_table else (
            f"{_COPY}; `librmq recover {self._path} --dry-run` shows what a recovery would cut"
        )  # fmt: skip
        self._add("refuses", error.file, f"at {error.offset}: {error.what}", following, opener="librmq")

    def _opened_in_memory(self, clock: Clock) -> list[Damage]:
        """Open a broker whose changes stay in memory, and return what its recovery cut or made again.

        Raises:
            RmqError: librmq refuses the store.
        """
        with held_back():
            runner = ManualRunner(ManualClock(clock.now_ms()))
            broker = Broker.open(self._path, runner=runner, store_config=self._config, files=OverlayFiles(self._files))
            try:
                return list(broker.store.recovered)
            finally:
                broker.abandon()

    def _judged_by_reader(self) -> list[Damage]:
        """Return nothing for a large store that librmq opens; a recovery in memory would need room for its index.

        Raises:
            CorruptionError: Sound records follow the log's end, or a table is damaged, so that librmq refuses the
                store.
        """
        BrokerTables.open(os.path.join(self._path, directory.CONFIG), files=self._files)
        if (cut := self._store.cut_short) is not None and cut.bytes:
            raise CorruptionError(cut.file, cut.offset, cut.kind, cut.what)
        return []


_DOES: Final[dict[Start, str]] = {
    "starts": "starts",
    "reads": "only reads it",
    "repairs": "repairs it and starts",
    "loses": "starts, and loses something",
    "refuses": "refuses",
}
