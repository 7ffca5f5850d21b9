"""Documents: JSON files of librmq's own in a store. A broker ignores them.

::

    librmq/config.json         {"version": 1, "commitlog_file_size", …, "message_delay_level"}
                               the settings of a store that its files do not show; "made_by_librmq": true in a store
                               that no broker made
    librmq/retention.json      {"version": 1, "settings": {…}, "named": […], "folder": "generation:device:inode"}
                               what retention deletes, in no other folder than this one; which of it a process that
                               shares the store has named
    librmq/settings.json       {"version": 1, "store": {…}, "broker": {…}}
                               what processes have named of the store's other promises (`librmq.broker.config`)
    librmq/replica.json        {"version": 1, "of": "broker-a", "folder": "/srv/broker-a"}
                               the mark of a store that copies another store's log
    librmq/spark/<job>.json    {"version": 1, "begin", "end", "first", "records", "done"}
                               note about a Spark job, which writes nothing again if it is committed again
    librmq/cancelled.json      {"version": 1, "messages": […]}, and cancelled-since.json
                               messages that were cancelled while they waited (`librmq.scheduling.waiting`)
    librmq/starts.json         {"startTable": {group: {topic: time of the move}}}
                               groups that ``start_at`` has moved (`librmq.store.format.broker_tables`)
    librmq/clock.json          {"version": 1, "now_ms"}
                               the time of a clock that tests have moved, in a store that ``librmq serve`` had
    librmq/resent.json         [[physical offset, message id, store time, time of the last resend], …]
                               dead letters that were sent to their groups again
    librmq/notes.lock          locked while this one, recorded settings or the notes of skips
                               (`librmq.diagnosis._skips`) change

Without `config.json`, sizes come from the store's files, and the delay levels are 4.9's. Without `retention.json`, or
with that of another folder, retention deletes nothing by age or size. Without `replica.json`, the copy is an
independent store that takes messages; ``folder`` tells two masters of one name apart, and copies of earlier versions
lack it. In the note about a job, ``begin`` and ``end`` are physical offsets, ``first`` the first bytes of the first
record in hexadecimal digits, and ``done`` says whether queues and index had all of it. `resent.json` has times in
milliseconds; without it all letters count as unsent. `librmq.store.engine.saved_state` and
`librmq.store.recovery.salvage` have further documents.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any, ClassVar, Final, NamedTuple

from librmq.clock import SystemClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, MalformedError, StoreIOError, StoreLockedError
from librmq.files import Files
from librmq.files.interface import confine, identity_of, is_full, make_folders, read_replaced
from librmq.message import StoredMessage
from librmq.runtime.event_log import EventLog

OWN_FOLDER: Final = "librmq"
"""The folder of librmq's own files in a store."""
CLOSED_FILE: Final = os.path.join(OWN_FOLDER, "closed.json")
CONFIG_FILE: Final = os.path.join(OWN_FOLDER, "config.json")
RETENTION_FILE: Final = os.path.join(OWN_FOLDER, "retention.json")
SETTINGS_FILE: Final = os.path.join(OWN_FOLDER, "settings.json")
START_FILE: Final = os.path.join(OWN_FOLDER, "starts.json")
MARK_FILE: Final = os.path.join(OWN_FOLDER, "replica.json")
_log = EventLog("librmq.store")
_VERSION: Final = 1
_NOTES_S: Final = 10.0
_NOTES_AGAIN_S: Final = 0.005


def _folder_identity(path: str, files: Files) -> str | None:
    """Return a text that a copy of a folder does not have, also after a restart; None where the system has none."""
    identity = identity_of(files, path)
    if identity is None:
        return None
    # The number of the machine's start is left out. A folder in the place of a deleted one can have its inode, for
    # example when a backup is restored, but it has another generation.
    start, _, place = identity.partition(":")
    generation = start.partition("/")[2]
    return f"{generation}:{place}" if generation else place


Kinds = Mapping[str, tuple[type, ...]]
"""The fields of a document with the types of their values; without `NoneType` among them, a field can't be absent."""


class _LaterVersionError(CorruptionError):
    """A later version of librmq wrote a document, which must not be replaced by what this one knows."""


def read_document(path: str, files: Files, kinds: Kinds, *, max_size: int = 1 << 20) -> dict[str, Any] | None:
    """Return the fields in the file ``path`` that ``kinds`` names, None if it is missing or empty.

    Other fields are ignored. Another process may replace or delete the file at any time.

    Raises:
        CorruptionError: The file holds no such document, or a later version of librmq wrote it.
    """
    data = read_replaced(files, path, max_size)
    return parse_document(path, data, kinds) if data else None


def parse_document(path: str, data: bytes, kinds: Kinds) -> dict[str, Any]:
    """Return the fields of a document that was read from ``path``, as `read_document` does."""
    try:
        document = json.loads(data)
        version = document["version"]
        if type(version) is int and version > _VERSION:
            what = f"expected version {_VERSION}, found version {version} of a later librmq: update librmq"
            raise _LaterVersionError(path, 0, "config", what)
        if version != _VERSION:
            raise ValueError(f"version {version!r:.80} instead of {_VERSION}")
        for name, types in kinds.items():
            if type(document.get(name)) not in types:
                raise ValueError(f"{document.get(name)!r:.80} as {name}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        names = ", ".join(kinds)
        raise CorruptionError(path, 0, "config", f"expected a document with {names}, found {error}") from None
    return {name: document[name] for name in kinds if name in document}


def write_document(path: str, files: Files, fields: Mapping[str, object], *, indent: int | None = None) -> None:
    """Write a document to the file ``path``, whose folder is made; durable when it returns."""
    files.make_folder(os.path.dirname(path))
    separators = (",", ":") if indent is None else None
    files.write(path, json.dumps({"version": _VERSION, **fields}, indent=indent, separators=separators).encode())


# ---- settings

_ANY: Final = (bool, int, float, str, list, dict, NoneType)
_KEPT: Final = dict.fromkeys(
    (
        *("commitlog_file_size", "consumequeue_file_size", "enable_consumequeue_ext", "consumequeue_ext_file_size"),
        *("max_hash_slot_num", "max_index_num", "message_delay_level"),
    ),
    _ANY,
)
RETENTION: Final = ("max_total_size", "file_reserved_hours", "delete_when", "keep_unconsumed")
"""The settings of retention."""
_OWN: Final = "made_by_librmq"
_SMALLEST_LOG_FILE: Final = 256  # it is below any total size
_LIMITS: Final = ("max_total_size", "file_reserved_hours")


def read_kept_config(path: str, files: Files) -> dict[str, Any]:
    """Return the settings that the store in ``path`` keeps, none if the file is missing or unreadable.

    Raises:
        CorruptionError: A later version of librmq keeps them, for which sizes and delay levels may differ.
    """
    try:
        settings = read_document(os.path.join(path, CONFIG_FILE), files, _KEPT) or {}
        StoreConfig(**{"commitlog_file_size": _SMALLEST_LOG_FILE, **settings})
    except _LaterVersionError:
        raise
    except (ConfigError, CorruptionError):
        return {}
    return settings


def is_kept_as_own(path: str, files: Files) -> bool:
    """Return whether the settings kept in ``path`` say that librmq made the store; False if they are unreadable."""
    try:
        fields = read_document(os.path.join(path, CONFIG_FILE), files, {_OWN: (bool, NoneType)}) or {}
    except CorruptionError:
        return False
    return fields.get(_OWN) is True


def write_kept_config(path: str, config: StoreConfig, files: Files, *, is_own: bool) -> None:
    """Keep the settings of the store in ``path`` if they have changed; durable when it returns.

    ``is_own`` says that librmq made the store, not a broker.

    A full disk does not prevent opening the store; the next opening tries again.
    """
    settings = {name: getattr(config, name) for name in _KEPT}
    before = read_kept_config(path, files)
    if settings == before and is_own == is_kept_as_own(path, files):
        return
    with full_disk_suffered(path, "sizes and delay levels"):
        write_document(os.path.join(path, CONFIG_FILE), files, settings | ({_OWN: True} if is_own else {}), indent=1)


@contextmanager
def full_disk_suffered(path: str, what: str) -> Iterator[None]:
    """Let a full disk be no reason to fail: warn that ``what`` is not recorded."""
    try:
        yield
    except StoreIOError as error:
        if not is_full(error):
            raise
        _log.warning("%(what)s are not recorded: %(error)s", what=what, error=error, path=path)


# ---- retention


class RecordedRetention(NamedTuple):
    """The settings of retention that a store has recorded."""

    settings: dict[str, Any]
    named: list[str]
    """Those that a process which shares the store has named."""
    is_foreign: bool = False
    """Whether another folder has recorded them, or none that is known: then they delete nothing here."""


def read_retention(path: str, files: Files) -> RecordedRetention:
    """Return the retention that the store in ``path`` has recorded; none if it is unreadable or of another folder."""
    recorded = _recorded_retention(path, files)
    return RecordedRetention({}, []) if recorded.is_foreign else recorded


def _recorded_retention(path: str, files: Files) -> RecordedRetention:
    kinds: Kinds = {"settings": (dict,), "named": (list,), "folder": (str, NoneType)}
    try:
        fields = read_document(os.path.join(path, RETENTION_FILE), files, kinds)
        if fields is not None:
            settings = {name: value for name, value in fields["settings"].items() if name in RETENTION}
            named, identity = [name for name in RETENTION if name in fields["named"]], _folder_identity(path, files)
            is_foreign = identity is not None and fields.get("folder") != identity
        else:  # earlier versions have recorded it beside the sizes, which a copy has too
            settings = read_document(os.path.join(path, CONFIG_FILE), files, dict.fromkeys(RETENTION, _ANY)) or {}
            named, is_foreign = [], bool(settings)
        if not settings:
            return RecordedRetention({}, [])
        StoreConfig(**{"commitlog_file_size": _SMALLEST_LOG_FILE, **settings})
    except (ConfigError, CorruptionError):
        return RecordedRetention({}, [])
    return RecordedRetention(settings, [name for name in named if name in settings], is_foreign)


def write_retention(path: str, config: StoreConfig, files: Files, *, default: Mapping[str, Any]) -> None:
    """Record the retention of the store in ``path`` if it has changed; durable when it returns.

    ``default`` is that of a store without a record, which needs none. If retention deletes more than before, a warning
    says so once; one says at each opening that a record of another folder deletes nothing.
    """
    settings, before = {name: getattr(config, name) for name in RETENTION}, _recorded_retention(path, files)
    if before.is_foreign or not before.settings:
        if all(settings[name] == value for name, value in default.items()):
            if before.is_foreign and any(before.settings.get(name) is not None for name in _LIMITS):
                _log.warning(
                    "%(path)s: retention was recorded for another folder, and deletes nothing here until it is named "
                    "again: %(recorded)s",
                    path=path,
                    recorded=", ".join(f"{name}={value!r:.80}" for name, value in before.settings.items()),
                )
            return
        before = RecordedRetention({}, [])
    if settings == before.settings:
        return
    stricter = [name for name, value in before.settings.items() if _is_stricter(name, settings[name], value)]
    if stricter:
        changes = ", ".join(f"{name} is {settings[name]} and was {before.settings[name]}" for name in stricter)
        _log.warning("%(path)s: retention deletes more from now on: %(changes)s", path=path, changes=changes)
    with full_disk_suffered(path, "settings of retention"), notes_locked(path, files):
        # A peer of a former owner can have named some since the look before. They stay, because it relies on them.
        now = read_retention(path, files)
        later = {name: now.settings[name] for name in now.named if name not in before.named}
        _write_retention(path, files, {**settings, **later}, now.named)


def name_retention(path: str, files: Files, values: Mapping[str, Any]) -> None:
    """Record that a process which shares the store has named these settings of retention; durable when it returns."""
    before = read_retention(path, files)
    names = {*before.named, *values}
    _write_retention(path, files, {**before.settings, **values}, [name for name in RETENTION if name in names])


def _write_retention(path: str, files: Files, settings: Mapping[str, Any], named: list[str]) -> None:
    fields = {"settings": settings, "named": named, "folder": _folder_identity(path, files)}
    write_document(os.path.join(path, RETENTION_FILE), files, fields, indent=1)


def _is_stricter(name: str, now: Any, before: Any) -> bool:  # noqa: ANN401 (settings have different types)
    """Return whether a setting of retention lets go of messages that it kept before."""
    if name == "keep_unconsumed":
        return bool(before and not now)
    if name not in _LIMITS or now is None:
        return False
    return bool(before is None or now < before)


# ---- mark of a replica


class ReplicaMark(NamedTuple):
    """The master of a copy."""

    master: str
    folder: str | None
    """The folder of its store; None if unknown."""

    @classmethod
    def read(cls, path: str, files: Files) -> ReplicaMark | None:
        """Return the master that the store in ``path`` copies; None if it is an independent store.

        Raises:
            CorruptionError: The mark is unreadable, or a later version of librmq wrote it.
        """
        fields = read_document(os.path.join(path, MARK_FILE), files, {"of": (str,), "folder": (str, NoneType)})
        return None if fields is None else cls(fields["of"], fields.get("folder"))

    def write(self, path: str, files: Files) -> None:
        """Mark the store in ``path`` as the copy of this master. The mark is durable on return."""
        folder = {} if self.folder is None else {"folder": self.folder}
        write_document(os.path.join(path, MARK_FILE), files, {"of": self.master, **folder}, indent=1)

    @staticmethod
    def clear(path: str, files: Files) -> None:
        """Make the store in ``path`` independent. The change is durable on return."""
        files.delete(os.path.join(path, MARK_FILE))
        files.flush_folder(os.path.join(path, os.path.dirname(MARK_FILE)))

    def is_of(self, name: str, folder: str) -> bool:
        """Return whether the master is the store in this folder, or has this name if its folder is unknown."""
        return self.master == name if self.folder is None else self.folder == folder


# ---- notes about Spark jobs

_JOB_SUFFIX: Final = ".json"
_JOB_KINDS: Final = {"begin": (int,), "end": (int,), "first": (str,), "records": (int,), "done": (bool,)}


@dataclass(frozen=True, slots=True)
class JobNote:
    """Begin and end of a job's records in the log, the first bytes of the first one, and whether the job is done."""

    FOLDER: ClassVar = os.path.join(OWN_FOLDER, "spark")
    """The folder of the notes in a store."""
    FIRST_BYTES: ClassVar = 64
    """The number of bytes of the first record to note."""

    begin: int
    end: int
    first: bytes
    records: int
    done: bool = False

    @classmethod
    def path(cls, store: str, job: str) -> str:
        """Return the file of a job in the folder of a store."""
        return os.path.join(store, cls.FOLDER, f"{job}{_JOB_SUFFIX}")

    @classmethod
    def read(cls, path: str, files: Files) -> JobNote:
        """Read the note in the file ``path``.

        Raises:
            CorruptionError: The file holds no note.
        """
        fields = read_document(path, files, _JOB_KINDS)
        if fields is None:
            raise CorruptionError(path, 0, "config", "expected a note of a job, found none")
        try:
            return cls(**fields | {"first": bytes.fromhex(fields["first"])})
        except ValueError as error:
            raise CorruptionError(path, 0, "config", f"first: {error}") from None

    def write(self, path: str, files: Files) -> None:
        """Write the note to the file ``path``."""
        write_document(path, files, asdict(self) | {"first": self.first.hex()})

    def is_committed(self, log_begin: int, log_end: int, data_at: Callable[[int, int], object]) -> bool:
        """Return whether a log holds the job's records, or held them; ``data_at`` reads bytes of it."""
        if self.begin < log_begin:  # the records were in log files that are deleted now
            return self.done
        return not self.records or (self.begin < log_end and data_at(self.begin, len(self.first)) == self.first)


def noted_jobs(path: str, files: Files) -> list[str]:
    """Return the names of the jobs that the store in ``path`` remembers."""
    entries = files.list(os.path.join(path, JobNote.FOLDER))
    return [entry.name.removesuffix(_JOB_SUFFIX) for entry in entries if entry.name.endswith(_JOB_SUFFIX)]


class MovedJobs:
    """The jobs of a store while its records are copied one by one to other places.

    A job whose first record is copied stays committed. So does a job that was done and of which any record is copied,
    and one whose records retention had deleted. Every other job can run again.
    """

    def __init__(self, notes: dict[str, JobNote]) -> None:
        self._notes = sorted(notes.items(), key=lambda item: item[1].begin)
        self._at = 0
        self._lowest: int | None = None
        self._open: list[tuple[str, JobNote]] = []
        self.moved: dict[str, JobNote] = {name: note for name, note in self._notes if not note.records}
        """The notes of jobs that stay committed, by name."""

    def add_copy(self, physical_offset: int, raw: bytes, new_physical_offset: int, new_raw: bytes) -> None:
        """Add the copy of a record; records come in log order, those of cuts after them."""
        if self._lowest is None:
            self._lowest = physical_offset
        if self._at and physical_offset < self._notes[self._at - 1][1].begin:  # a cut: check all jobs again
            self._at, self._open = 0, []
        while self._at < len(self._notes) and self._notes[self._at][1].begin <= physical_offset:
            self._open.append(self._notes[self._at])
            self._at += 1
        for item in self._open.copy():
            name, note = item
            if physical_offset >= note.end:
                self._open.remove(item)
            elif physical_offset == note.begin and not raw.startswith(note.first):
                self._open.remove(item)  # another record took the place after a recovery
            elif name in self.moved:
                self.moved[name] = replace(self.moved[name], end=new_physical_offset + len(new_raw))
            elif physical_offset == note.begin or note.done:
                end = new_physical_offset + len(new_raw)
                first = new_raw[: JobNote.FIRST_BYTES]
                self.moved[name] = replace(note, begin=new_physical_offset, end=end, first=first)

    def committed_jobs(self) -> dict[str, JobNote]:
        """Return the notes of jobs that stay committed, by name."""
        for name, note in self._notes:
            if note.done and self._lowest is not None and note.begin < self._lowest and name not in self.moved:
                self.moved[name] = replace(note, begin=-1, end=-1)
        return self.moved


# ---- dead letters that were sent again

LetterIdentity = tuple[int, str, int]


def letter_identity(letter: StoredMessage) -> LetterIdentity:
    """Return what distinguishes a dead letter from a record in its place after the log was cut."""
    return letter.physical_offset, letter.message_id, letter.store_timestamp_ms


def resent_times(path: str, files: Files) -> Mapping[LetterIdentity, int]:
    """Return the times at which letters of the store in ``path`` were last sent again.

    Raises:
        MalformedError: The file holds something else.
    """
    notes = _resent_path(path)
    try:
        rows = json.loads(read_replaced(files, notes) or b"[]")
        return {(int(place), str(message_id), int(stored_ms)): int(at) for place, message_id, stored_ms, at in rows}
    except (ValueError, TypeError) as error:
        raise MalformedError(
            f"{notes}: expected a list of the dead letters that were sent again: {error}; without the file all count "
            "as unsent"
        ) from None


@contextmanager
def notes_locked(path: str, files: Files) -> Iterator[None]:
    """Keep other threads and processes from changing the notes of a store, which they read and then replace.

    Raises:
        StoreLockedError: Another one has not ended its change within 10 s.
    """
    confine(files, path, OWN_FOLDER)
    folder = os.path.join(path, OWN_FOLDER)
    make_folders(files, folder)
    clock = SystemClock()
    until_s = clock.monotonic() + _NOTES_S
    while True:
        try:
            lock = files.lock(os.path.join(folder, "notes.lock"))
            break
        except StoreLockedError:
            if clock.monotonic() > until_s:
                raise
            clock.wait(threading.Event(), _NOTES_AGAIN_S)
    try:
        yield
    finally:
        lock.release()


def note_resent(path: str, files: Files, letters: Iterable[LetterIdentity], at_ms: int, log_begin: int) -> None:
    """Note that letters were sent again; notes on letters before ``log_begin``, which are deleted, go.

    Raises:
        MalformedError: The file holds something else.
    """
    with notes_locked(path, files):
        times = {**resent_times(path, files), **dict.fromkeys(letters, at_ms)}
        rows = [[*identity, resent_ms] for identity, resent_ms in sorted(times.items()) if identity[0] >= log_begin]
        files.write(_resent_path(path), json.dumps(rows).encode())


def _resent_path(path: str) -> str:
    return os.path.join(path, OWN_FOLDER, "resent.json")
