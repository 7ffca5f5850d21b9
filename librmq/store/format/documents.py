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
                               note about a Spark job (`librmq.store.format.spark_jobs`)
    librmq/cancelled.json      {"version": 1, "number", "messages": […]}, and cancelled-since.json
                               messages that were cancelled while they waited (`librmq.scheduling.waiting`)
    librmq/schedules.json      {"schedules": {name: when it sends what, and how far it is}}
    librmq/starts.json         {"startTable": {group: {topic: time of the move}}}
                               groups that ``start_at`` has moved (`librmq.store.format.broker_tables`)
    librmq/clock.json          {"version": 1, "now_ms"}
                               the time of a clock that tests have moved, in a store that ``librmq serve`` had
    librmq/resent.json         {"version": 1, "letters": [[physical offset, message id, store time, time of the last
                               resend], …]}: dead letters that were sent to their groups again
    librmq/notes.lock          locked while this one, recorded settings or the notes of skips
                               (`librmq.diagnosis._skips`) change

The last field of each is ``"crc32"``, eight hexadecimal digits: the checksum of the bytes before the comma in front of
it. A document with another one, or without it, is damaged.

Without `config.json`, sizes come from the store's files, and the delay levels are 4.9's. Without `retention.json`, or
with that of another folder, retention deletes nothing by age or size. Without `replica.json`, the copy is an
independent store that takes messages; ``folder`` tells two masters of one name apart, and is noted when the copy first
follows its master. `resent.json` has times in milliseconds; without it all letters count as unsent.
`librmq.store.engine.saved_state` and `librmq.store.recovery.salvage` have further documents.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any, Final, NamedTuple, Self
from zlib import crc32

from librmq.clock import SystemClock
from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, StoreIOError, StoreLockedError
from librmq.files import Files
from librmq.files.interface import confine, identity_of, is_full, make_folders, read_replaced
from librmq.message import StoredMessage
from librmq.runtime.event_log import EventLog

OWN_FOLDER: Final = "librmq"
"""The folder of librmq's own files in a store."""
GROUPS_FOLDER: Final = os.path.join(OWN_FOLDER, "groups")
"""The folder of the page of groups."""
JOBS_FOLDER: Final = os.path.join(OWN_FOLDER, "spark")
"""The folder of the notes about Spark jobs."""
CLOSED_FILE: Final = os.path.join(OWN_FOLDER, "closed.json")
CONFIG_FILE: Final = os.path.join(OWN_FOLDER, "config.json")
RETENTION_FILE: Final = os.path.join(OWN_FOLDER, "retention.json")
SETTINGS_FILE: Final = os.path.join(OWN_FOLDER, "settings.json")
SCHEDULES_FILE: Final = os.path.join(OWN_FOLDER, "schedules.json")
START_FILE: Final = os.path.join(OWN_FOLDER, "starts.json")
MARK_FILE: Final = os.path.join(OWN_FOLDER, "replica.json")
_log = EventLog("librmq.store")
_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 20
_NOTES_S: Final = 10.0
_NOTES_AGAIN_S: Final = 0.005


def _folder_identity(path: str, files: Files) -> str | None:
    """Return a text that a copy of a folder does not have, also after a restart; None where the system has none."""
    identity = identity_of(files, path)
    return None if identity is None else folder_part(identity)


def is_of_another_folder(path: str, files: Files, machine: str | None) -> bool:
    """Return whether the store in ``path`` is a copy, because its retention, or ``machine``, names another folder."""
    identity, noted = _folder_identity(path, files), None if machine is None else folder_part(machine)
    with suppress(CorruptionError):
        fields = read_document(os.path.join(path, RETENTION_FILE), files, {"folder": (str, NoneType)})
        noted = noted or (fields or {}).get("folder")
    return identity is not None and noted is not None and noted != identity


def folder_part(identity: str) -> str:
    """Return the part of an `identity_of` that stays the same after a restart."""
    # The number of the machine's start is left out. A folder in the place of a deleted one can have its inode, for
    # example when a backup is restored, but it has another generation.
    start, _, place = identity.partition(":")
    generation = start.partition("/")[2]
    return f"{generation}:{place}" if generation else place


Kinds = Mapping[str, tuple[type, ...]]
"""The fields of a document with the types of their values; without `NoneType` among them, a field can't be absent."""


class _LaterVersionError(CorruptionError):
    """A later version of librmq wrote a document, which must not be replaced by what this one knows."""


_WITHOUT: Final = {
    CONFIG_FILE: "sizes come from the other files, and delay levels are RocketMQ's",
    RETENTION_FILE: "retention deletes nothing by age or size until it is named again",
    SETTINGS_FILE: "the next process that opens the store names its settings",
    SCHEDULES_FILE: "schedules send nothing until programs set them again",
    START_FILE: "groups that start_at has moved start again where it says",
    MARK_FILE: "the copy is a store of its own",
    os.path.join(OWN_FOLDER, "cancelled.json"): "cancelled messages are delivered",
    os.path.join(OWN_FOLDER, "cancelled-since.json"): "messages that were cancelled last are delivered",
    os.path.join(OWN_FOLDER, "resent.json"): "all dead letters count as unsent",
    os.path.join(OWN_FOLDER, "replay.json"): "replay --route begins at the start",
}
"""What follows from the loss of a document."""


def with_checksum(data: bytes) -> bytes:
    """Return a JSON object of one field at least with its checksum as the last field."""
    content = data.rstrip().removesuffix(b"}").rstrip()
    return content + b',"crc32":"%08x"}' % crc32(content)


def checked(path: str, data: bytes, at: int = 0) -> bytes:
    """Return a JSON object, read at a place of the file ``path``, without its checksum.

    Raises:
        CorruptionError: It has another checksum, or none.
    """
    content, _, end = data.rpartition(b',"crc32":"')
    if end.rstrip() != b'%08x"}' % crc32(content):
        what = f"expected its checksum as the last field, found {data[-21:]!r} at the end; {_advice(path)}"
        raise CorruptionError(path, at, "checksum", what)
    return content + b"}"


def _advice(path: str) -> str:
    name = os.path.join(*path.split(os.sep)[-2:])
    effect = f": then {_WITHOUT[name]}" if name in _WITHOUT else ""
    return f"copy the file from a backup of the store, or delete it{effect}"


def damaged_documents(path: str, files: Files) -> Iterator[CorruptionError]:
    """Yield what is wrong with the documents of the store in ``path``."""
    folders = [os.path.join(path, folder) for folder in (OWN_FOLDER, JOBS_FOLDER)]
    places = [os.path.join(folder, name) for folder in folders for name in files.names(folder)]
    for place in places:
        if not place.endswith((".json", ".json.bak", ".jsonl")):
            continue
        try:
            data, at = _document(place, files), 0
            if data is None:
                continue
            for item in data.splitlines(keepends=True) if place.endswith(".jsonl") else [data]:
                checked(place, item, at)
                at += len(item)
        except CorruptionError as error:
            yield error


def read_document(path: str, files: Files, kinds: Kinds, *, max_size: int = _MOST_BYTES) -> dict[str, Any] | None:
    """Return the fields in the file ``path`` that ``kinds`` names, None if it is missing.

    Other fields are ignored. Another process may replace or delete the file at any time.

    Raises:
        CorruptionError: The file holds no such document, or a later version of librmq wrote it.
    """
    data = _document(path, files, max_size)
    return None if data is None else parse_document(path, data, kinds)


def _document(path: str, files: Files, *max_size: int) -> bytes | None:
    """Return the bytes of a document, None if it is missing; librmq leaves no empty one."""
    if files.status(path) is None:
        return None
    data = read_replaced(files, path, *max_size)
    if data or files.status(path) is not None:
        return data
    return None  # it was deleted meanwhile


def parse_document(path: str, data: bytes, kinds: Kinds) -> dict[str, Any]:
    """Return the fields of a document that was read from ``path``, as `read_document` does."""
    data = checked(path, data)
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
        required = ", ".join(name for name, types in kinds.items() if NoneType not in types)
        what = f"expected a document{' with ' * bool(required)}{required}, found {error}; {_advice(path)}"
        raise CorruptionError(path, 0, "config", what) from None
    return {name: document[name] for name in kinds if name in document}


def write_document(path: str, files: Files, fields: Mapping[str, object], *, indent: int | None = None) -> None:
    """Write a document to the file ``path``, whose folder is made; durable when it returns."""
    files.make_folder(os.path.dirname(path))
    separators = (",", ":") if indent is None else None
    data = json.dumps({"version": _VERSION, **fields}, indent=indent, separators=separators).encode()
    files.write(path, with_checksum(data))


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
_SETTINGS: Final[Kinds] = {**_KEPT, _OWN: (bool, NoneType)}
_SMALLEST_LOG_FILE: Final = 256  # it is below any total size
_LIMITS: Final = ("max_total_size", "file_reserved_hours")


class RecordedRetention(NamedTuple):
    """The settings of retention that a store has recorded."""

    settings: dict[str, Any]
    named: list[str]
    """Those that a process which shares the store has named."""
    is_foreign: bool = False
    """Whether another folder has recorded them, or none that is known: then they delete nothing here."""
    folder: str | None = None
    """The folder that has recorded them."""
    told: str | None = None
    """The last folder in which a log line has said that they delete nothing."""

    @classmethod
    def read(cls, path: str, files: Files) -> RecordedRetention:
        """Return the retention that the store in ``path`` has recorded; none if it is of another folder.

        Raises:
            CorruptionError: The file is damaged.
        """
        recorded = _recorded_retention(path, files)
        return cls({}, []) if recorded.is_foreign else recorded

    @classmethod
    def name(cls, path: str, files: Files, values: Mapping[str, Any]) -> None:
        """Record that a process which shares the store has named these settings; durable when it returns."""
        before = cls.read(path, files)
        names = {*before.named, *values}
        _write_retention(path, files, cls({**before.settings, **values}, [name for name in RETENTION if name in names]))

    @property
    def in_force(self) -> dict[str, Any]:
        """The settings that count in this folder."""
        return {} if self.is_foreign else self.settings


class KeptSettings(NamedTuple):
    """The settings that a store keeps."""

    sizes: dict[str, Any]
    """Sizes and delay levels; none if the file is missing."""
    is_own: bool
    """Whether librmq made the store."""
    retention: RecordedRetention

    @property
    def default_retention(self) -> dict[str, Any]:
        """The retention of an existing store that has recorded none: none by age or size.

        On a full disk that of a broker deletes what groups have not consumed, one that librmq made does not.
        """
        return {"max_total_size": None, "file_reserved_hours": None, "keep_unconsumed": self.is_own}

    @classmethod
    def read(cls, path: str, files: Files) -> Self:
        """Read the settings that the store in ``path`` keeps.

        Raises:
            CorruptionError: They are damaged, or a later version of librmq keeps them, for which sizes and delay levels
                may differ.
        """
        place = os.path.join(path, CONFIG_FILE)
        fields = read_document(place, files, _SETTINGS) or {}
        is_own = fields.pop(_OWN, None) is True
        _check_settings(place, fields)
        return cls(fields, is_own, _recorded_retention(path, files))

    @classmethod
    def read_sound(cls, path: str, files: Files) -> Self:
        """Read them as if a damaged file were missing, and warn of it."""
        while True:
            try:
                return cls.read(path, files)
            except _LaterVersionError:
                raise
            except CorruptionError as error:
                _log.warning("%(error)s", error=error, path=path)
                from librmq.files import OverlayFiles

                files = OverlayFiles(files)
                files.delete(error.file)


_NOTHING_KEPT: Final = KeptSettings({}, is_own=False, retention=RecordedRetention({}, []))


def _check_settings(place: str, settings: Mapping[str, Any]) -> None:
    try:
        StoreConfig(**{"commitlog_file_size": _SMALLEST_LOG_FILE, **settings})
    except ConfigError as error:
        raise CorruptionError(place, 0, "config", f"{error}; {_advice(place)}") from None


def write_kept_config(
    path: str, config: StoreConfig, files: Files, before: KeptSettings = _NOTHING_KEPT, *, is_own: bool
) -> KeptSettings:
    """Keep the settings of the store in ``path`` if they differ from ``before``; durable when it returns.

    ``is_own`` says that librmq made the store, not a broker. Return what the store keeps now.

    A full disk does not prevent opening the store; the next opening tries again.
    """
    settings = {name: getattr(config, name) for name in _KEPT}
    if settings == before.sizes and is_own == before.is_own:
        return before
    with full_disk_suffered(path, "sizes and delay levels"):
        write_document(os.path.join(path, CONFIG_FILE), files, settings | ({_OWN: True} if is_own else {}), indent=1)
        return before._replace(sizes=settings, is_own=is_own)
    return before


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


_RETENTION: Final[Kinds] = {
    "settings": (dict,), "named": (list,), "folder": (str, NoneType), "told": (str, NoneType),
}  # fmt: skip


def _recorded_retention(path: str, files: Files) -> RecordedRetention:
    place = os.path.join(path, RETENTION_FILE)
    try:
        fields = read_document(place, files, _RETENTION)
    except _LaterVersionError:
        fields = None
    if fields is None:
        return RecordedRetention({}, [])
    settings = {name: value for name, value in fields["settings"].items() if name in RETENTION}
    _check_settings(place, settings)
    named, identity = [name for name in settings if name in fields["named"]], _folder_identity(path, files)
    is_foreign = identity is not None and fields.get("folder") != identity
    return RecordedRetention(settings, named, is_foreign and bool(settings), fields.get("folder"), fields.get("told"))


def write_retention(path: str, config: StoreConfig, files: Files, kept: KeptSettings) -> None:
    """Record the retention of the store in ``path`` if it has changed; durable when it returns.

    ``kept`` is what the store keeps; the default of a store without a record needs none. If retention deletes more than
    before, a warning says so once; a line says at the first opening that a record of another folder deletes nothing.
    """
    settings, before = {name: getattr(config, name) for name in RETENTION}, kept.retention
    if before.is_foreign or not before.settings:
        if all(settings[name] == value for name, value in kept.default_retention.items()):
            folder = _folder_identity(path, files)
            limits = any(before.settings.get(name) is not None for name in _LIMITS)
            if before.is_foreign and limits and before.told != folder:
                _log.info(
                    "%(path)s: retention was recorded for another folder, and deletes nothing here until it is named "
                    "again: %(recorded)s",
                    path=path,
                    recorded=", ".join(f"{name}={value!r:.80}" for name, value in before.settings.items()),
                )
                with full_disk_suffered(path, "settings of retention"), notes_locked(path, files):
                    _write_retention(path, files, before._replace(told=folder))
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
        now = RecordedRetention.read(path, files)
        later = {name: now.settings[name] for name in now.named if name not in before.named}
        _write_retention(path, files, RecordedRetention({**settings, **later}, now.named))


def _write_retention(path: str, files: Files, retention: RecordedRetention) -> None:
    """Record retention as that of this folder, or of the other one in which it was named."""
    fields: dict[str, object] = {"settings": retention.settings, "named": retention.named}
    if retention.told is None:
        fields["folder"] = _folder_identity(path, files)
    else:
        fields |= {"folder": retention.folder, "told": retention.told}
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


# ---- dead letters that were sent again

_LETTERS: Final[Kinds] = {"letters": (list,)}


class RecordIdentity(NamedTuple):
    """What distinguishes a record, such as a dead letter's, from another in its place after the log was cut."""

    physical_offset: int
    message_id: str
    store_timestamp_ms: int

    @classmethod
    def of(cls, message: StoredMessage) -> Self:
        """Return that of a message's record."""
        return cls(message.physical_offset, message.message_id, message.store_timestamp_ms)


def resent_times(path: str, files: Files) -> Mapping[RecordIdentity, int]:
    """Return the times at which letters of the store in ``path`` were last sent again.

    Raises:
        CorruptionError: The file is damaged.
    """
    notes = _resent_path(path)
    data = _document(notes, files)
    rows = [] if data is None else parse_document(notes, data, _LETTERS)["letters"]
    try:
        return {RecordIdentity(int(place), str(name), int(stored_ms)): int(at) for place, name, stored_ms, at in rows}
    except (ValueError, TypeError) as error:
        what = f"expected a list of the dead letters that were sent again: {error}; {_advice(notes)}"
        raise CorruptionError(notes, 0, "config", what) from None


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


def note_resent(path: str, files: Files, letters: Iterable[RecordIdentity], at_ms: int, log_begin: int) -> None:
    """Note that letters were sent again; notes on letters before ``log_begin``, which are deleted, go.

    Raises:
        CorruptionError: The file is damaged.
    """
    with notes_locked(path, files):
        times = {**resent_times(path, files), **dict.fromkeys(letters, at_ms)}
        rows = [[*letter, at] for letter, at in sorted(times.items()) if letter.physical_offset >= log_begin]
        write_document(_resent_path(path), files, {"letters": rows})


def _resent_path(path: str) -> str:
    return os.path.join(path, OWN_FOLDER, "resent.json")
