"""The layout of a store's folder, the kinds of stores, and the settings visible in a store's files.

::

    commitlog/            20-digit names     the log
    consumequeue/TOPIC/ID/                   entries of one queue
    consumequeue_ext/TOPIC/ID/               extension units of one queue
    index/                times of creation  key index
    config/               *.json             the broker's tables: topics, groups, offsets
    checkpoint abort lock
    librmq/                                  librmq's own files; can be deleted without loss while none shares it
    timerlog/ timerwheel compaction/ …       5.x
    dledger-ID/data, dledger-ID/index        a log replicated by DLedger, instead of commitlog/
    consumequeue/CURRENT, MANIFEST-*         5.x with its queues in RocksDB, perhaps beside folders of queues
    consumequeue_rocksdb/                    the same in a folder of its own, later than 5.3.3
    batchconsumequeue/TOPIC/ID/              5.x: entries of batches, 46 bytes each

Mirrors 4.9.4's ``StorePathConfigHelper`` and the loading of ``DefaultMessageStore``; 5.3.3 for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from librmq.config import ENTRY_SIZE, StoreConfig
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, NotAStoreError
from librmq.files import Damage, DiskFiles, Files, FolderEntry, file_size, is_folder
from librmq.files.interface import confine, numbered_files, read_replaced
from librmq.files.regular import joined_folders
from librmq.message.topics import reply_topic, validate_queue
from librmq.store.format.documents import GROUPS_FOLDER, OWN_FOLDER, KeptSettings
from librmq.store.format.indexfile import file_length

COMMITLOG: Final = "commitlog"
MISSING_LOG: Final = "deleted"
"""Kind of the damage that the first files of the log are missing."""
LOST: Final = "lost"
"""Kind of the damage that a message is lost: what leads to it is there, and the log does not have it."""
CONSUMEQUEUE: Final = "consumequeue"
CONSUMEQUEUE_EXT: Final = "consumequeue_ext"
CONSUMEQUEUE_ROCKSDB: Final = "consumequeue_rocksdb"
BATCHCONSUMEQUEUE: Final = "batchconsumequeue"
COMPACTION: Final = "compaction"
INDEX: Final = "index"
CONFIG: Final = "config"
CHECKPOINT: Final = "checkpoint"
ABORT: Final = "abort"
LOCK: Final = "lock"
TIMERLOG: Final = "timerlog"
TIMERWHEEL: Final = "timerwheel"
TIMER_UNIT_SIZE: Final = 52
TIMER_SLOT_SIZE: Final = 32

# Folders and files that only 5.x makes, and those that the timers of librmq make too.
_MADE_BY_5: Final = (
    COMPACTION,
    "brokerIdentity",
    "epochFileCheckpoint",
    os.path.join(CONFIG, "timermetrics"),
    os.path.join(CONFIG, "transactionMetrics"),
)
_OF_TIMERS: Final = (
    TIMERLOG,
    TIMERWHEEL,
    os.path.join(CONFIG, "timercheck"),
    os.path.join(CONSUMEQUEUE, "rmq_sys_wheel_timer"),
)

_KNOWN: Final = frozenset((
    COMMITLOG, CONSUMEQUEUE, CONSUMEQUEUE_EXT, CONSUMEQUEUE_ROCKSDB, BATCHCONSUMEQUEUE, COMPACTION, INDEX, CONFIG,
    TIMERLOG, OWN_FOLDER, "lost+found",
))  # fmt: skip
"""Folders that hold no file of the log."""
_QUEUE_IDS: Final = 1 << 31
_INHERITED: Final = 7  # the topic is readable, writable, and a default for new topics
# This many queues, and this many files of a folder, suffice to find the length of files.
_QUEUES_READ: Final = 64
_FILES_READ: Final = 64
_BROKER_FLUSHES: Final[dict[str, Any]] = {"flush_thorough_interval_s": 10}
"""Settings of flushes in a store that a broker made, unless its opener names others."""
_KEEPS_SIZES: Final = "a store keeps its sizes, so use these, or open it without settings"


class StoreKind(Enum):
    """The content of a folder; the value is a text for people."""

    NEW = "no store yet"
    V4 = "a store of RocketMQ 4"
    V5 = "a store of RocketMQ 5"
    V5_ROCKSDB = "a store of RocketMQ 5 with its queues in RocksDB"
    V5_MIXED = "a store of RocketMQ 5 with queues in files and in RocksDB"
    V5_BATCHES = "a store of RocketMQ 5 with queues of batches"

    @property
    def has_log(self) -> bool:
        """Whether it has a readable log."""
        return self is not StoreKind.NEW

    @property
    def derives_queues(self) -> bool:
        """Whether files do not show all queues, so that they are taken from the log, and the store is only read."""
        return self in (StoreKind.V5_ROCKSDB, StoreKind.V5_MIXED, StoreKind.V5_BATCHES)


def recognise(path: str, files: Files) -> StoreKind:
    """Return the kind of store in folder ``path``, without changing it.

    Raises:
        NotAStoreError: The path is not a folder, or holds queues without a log, a log replicated by DLedger, or one
            part of a log that is spread over several paths.
    """
    if not is_folder(files, path):
        # Look again before refusing, because another process may have made the folder after the first look.
        if file_size(files, path) is not None and not is_folder(files, path):
            raise NotAStoreError(f"{path}: expected the folder of a store, found a file")
        return StoreKind.NEW
    names = {entry.name: entry for entry in _listed(path, files)}
    for name, entry in names.items():
        if name.startswith("dledger-") and entry.is_folder:
            inside = {below.name for below in files.list(os.path.join(path, name)) if below.is_folder}
            if inside & {"data", "index"}:
                raise NotAStoreError(f"{path}: its log is replicated by DLedger ({name}), which librmq cannot read")
    log = names.get(COMMITLOG)
    if log is None and not joined_folders(os.path.join(path, COMMITLOG)):
        for name in (CONSUMEQUEUE, INDEX):
            if files.list(os.path.join(path, name)):
                return _recognise_without_log(path, name, files)
        return StoreKind.NEW
    if log is not None and not log.is_folder:
        raise NotAStoreError(f"{path}: {COMMITLOG}: expected a folder, found a file")
    log_paths(path, files, names.values())
    _refuse_part_of_log(path, files)
    derived = _kind_without_queues(path, files)
    if derived is not None:
        return derived
    if not _has_any(path, (*_MADE_BY_5, *_OF_TIMERS), files):
        return StoreKind.V4
    topics = os.path.join(path, CONFIG, "topics.json")
    return StoreKind.V5_BATCHES if b'"BatchCQ"' in read_replaced(files, topics) else StoreKind.V5


def log_paths(path: str, files: Files, entries: Iterable[FolderEntry] | None = None) -> tuple[str, ...]:
    """Take the files of a log on several paths together, and return its other paths; ``entries`` are the store's."""
    entries = files.list(path) if entries is None else entries
    folders = [os.path.join(path, entry.name) for entry in entries if entry.is_folder and entry.name not in _KNOWN]
    log = os.path.join(path, COMMITLOG)
    if not folders and not joined_folders(log):
        return ()
    from librmq.store.format.log_paths import join_paths

    return join_paths(log, folders, files)


def _recognise_without_log(path: str, name: str, files: Files) -> StoreKind:
    """Look again, because another process may have made the log after the folder was listed."""
    if is_folder(files, os.path.join(path, COMMITLOG)):
        return recognise(path, files)
    raise NotAStoreError(
        f"{path}: there is a folder {name} but no {COMMITLOG}; the broker keeps its log elsewhere, perhaps on several "
        "paths (storePathCommitLog): name them with --log-path, or make a folder with links to its files"
    )


def _has_any(path: str, names: Iterable[str], files: Files) -> bool:
    """Return whether a store has tables in RocksDB, or any file or folder of these names."""
    return tables_database(os.path.join(path, CONFIG), files) is not None or any(
        files.status(os.path.join(path, name)) is not None for name in names
    )


def _kind_without_queues(path: str, files: Files) -> StoreKind | None:
    """Return the kind of a store some of whose queues are not in files, None for another store."""
    queues = files.list(os.path.join(path, CONSUMEQUEUE))
    names = {entry.name for entry in queues if not entry.is_folder}
    if is_folder(files, os.path.join(path, CONSUMEQUEUE_ROCKSDB)) or (
        "CURRENT" in names and any(name.startswith("MANIFEST-") for name in names)
    ):
        return StoreKind.V5_MIXED if any(entry.is_folder for entry in queues) else StoreKind.V5_ROCKSDB
    if any(entry.is_folder for entry in files.list(os.path.join(path, BATCHCONSUMEQUEUE))):
        return StoreKind.V5_BATCHES
    return None


def _listed(path: str, files: Files) -> list[FolderEntry]:
    """List a folder; nothing if it has a link without a target and no log, because then it is not a store."""
    try:
        return files.list(path)
    except CorruptionError:
        if COMMITLOG in files.names(path):
            raise
        return []


def is_4_with_timers(path: str, files: Files) -> bool:
    """Return whether all files of RocketMQ 5 in the store belong to a timer."""
    if recognise(path, files) is not StoreKind.V5:
        return False
    return not _has_any(path, _MADE_BY_5, files)


def kind_text(path: str, files: Files) -> str:
    """Return the kind of a store for people; files of a timer, which librmq makes too, do not make it one of 5."""
    return f"{StoreKind.V4.value}, with timers" if is_4_with_timers(path, files) else recognise(path, files).value


def is_of_5(path: str, files: Files) -> bool:
    """Return whether a broker of RocketMQ 5 made the store, or continued it."""
    return recognise(path, files) not in (StoreKind.NEW, StoreKind.V4) and not is_4_with_timers(path, files)


# Allowed in the folder of a new store: remains of a killed maker, files of the broker's tools or of a file system.
_MAY_PRECEDE: Final = {
    *(LOCK, ABORT, f"{ABORT}.tmp", CHECKPOINT),
    *(CONFIG, CONSUMEQUEUE, CONSUMEQUEUE_EXT, INDEX, OWN_FOLDER),
    "lost+found",
}


def no_store(path: str) -> NotAStoreError:
    """Return the error of a folder without a log."""
    return NotAStoreError(f"{path}: no store: it has no folder {COMMITLOG}")


ON_PATHS: Final = (
    "if its broker keeps it on several paths (storePathCommitLog), name the others with --log-path, or make a folder "
    "with links to the files of all paths"
)
"""What helps where files of a log are elsewhere."""
WRITTEN_FOLDERS: Final = (COMMITLOG, CONSUMEQUEUE, CONSUMEQUEUE_EXT, INDEX, CONFIG, TIMERLOG, OWN_FOLDER)


def check_kind(path: str, files: Files, *, writable: bool = False) -> StoreKind:
    """Return the kind of the store in folder ``path`` if it can be opened, without changing it.

    With ``writable`` true, ``files`` follow no link within the store to write, from now on.

    Raises:
        NotAStoreError: `recognise` raises it, there is no store and ``writable`` is false, or ``writable`` is true and
            queues or the broker's tables are in RocksDB, or queues have batches.
        CorruptionError: ``writable`` is true, and a folder of the store is a link that ``files`` do not follow.
    """
    if writable:
        confine(files, path, OWN_FOLDER, *WRITTEN_FOLDERS)
    kind = recognise(path, files)
    if kind is StoreKind.NEW:
        if not writable:
            raise no_store(path)
        names = {entry.name for entry in files.list(path)}
        if COMMITLOG in names:  # another process has made the store meanwhile
            return check_kind(path, files, writable=True)
        foreign = sorted(names - _MAY_PRECEDE)
        if foreign:
            raise NotAStoreError(f"{path}: expected an empty folder or a store, found {foreign[0]}")
    elif writable and (paths := log_paths(path, files)):
        raise NotAStoreError(
            f"{path}: its log is on several paths (storePathCommitLog), here and in {', '.join(sorted(paths))}: librmq "
            "reads it, and never writes to it. Change it through its broker, or continue a copy that `librmq snapshot` "
            "has made"
        )
    if kind.derives_queues and writable:
        raise NotAStoreError(
            f"{path}: {kind.value}: librmq reads it (in Python with read_only=True), and never writes to it. Change it "
            "through its broker, or copy its messages to a store of librmq's own with `librmq extract`"
        )
    if writable and (database := tables_database(os.path.join(path, CONFIG), files)) is not None:
        raise NotAStoreError(
            f"{path}: its broker keeps topics, groups and progress in RocksDB ({database}): librmq reads the store (in "
            "Python with read_only=True), and never writes to it. Change it through its broker"
        )
    return kind


def has_timer(path: str, files: Files) -> bool:
    """Return whether a store has files of a timer."""
    names = (*files.names(path), *files.names(os.path.join(path, CONFIG)))
    return any(name.partition(".")[0] in (TIMERWHEEL, TIMERLOG, "timercheck") for name in names)


def is_database(folder: str, files: Files) -> bool:
    """Return whether there is a RocksDB in a folder."""
    return bool(file_size(files, os.path.join(folder, "CURRENT")))


def tables_database(folder: str, files: Files) -> str | None:
    """Return the folder of a RocksDB in a ``config`` folder that has progress of groups, None without one."""
    for name in files.names(folder):
        path = os.path.join(folder, name)
        if name not in ("topics", "subscriptionGroups") and is_database(path, files):
            return path
    return None


def has_tables(path: str, files: Files) -> bool:
    """Return whether a broker has left tables in a store, or where its groups are."""
    return bool(files.names(os.path.join(path, CONFIG)) or files.names(os.path.join(path, GROUPS_FOLDER)))


def derived_remedy(file: str, files: Files, kind: str = "") -> str:
    """Return what to do about a damaged file of queues or index: the log has its messages, unless it has no file."""
    if kind == LOST:
        return "librmq recover goes on without the message"
    for name in (CONSUMEQUEUE, INDEX):
        root, separator, _ = file.rpartition(os.path.join(os.sep, name, ""))
        if separator and not numbered_files(files, os.path.join(root, COMMITLOG)):
            return f"{COMMITLOG}/ has no file to make it again from: copy it from the store that this is a copy of"
    return "the log has the messages: librmq recover makes the file again"


def told(damage: Damage) -> str:
    """Return what a store is short of as commands and the console say it, and what to do."""
    missing = (
        "copy the missing {} of commitlog/ from the store that this is a copy of, or name the other paths of the log "
        "(storePathCommitLog) with --log-path; without it these messages are lost"
    )
    if damage.kind != MISSING_LOG and os.path.basename(os.path.dirname(damage.file)) != COMMITLOG:
        remedy = derived_remedy(damage.file, DiskFiles(), damage.kind)
        return f"{damage.file}: at {damage.offset}: {damage.what}; {remedy}"
    if damage.kind in ("name", "size"):
        return f"{damage.file}: {damage.what}"
    if damage.kind == MISSING_LOG:
        return f"{damage.file}: {damage.what}: {missing.format('part')}"
    if damage.bytes:
        ends = f"the log ends at {damage.offset}; {damage.bytes} bytes with sound records follow"
        return f"{ends} ({damage.what}): librmq salvage saves them"
    what = f"the log ends at {damage.offset}; {damage.what}: {missing.format('end')}"
    return f"{what}, and librmq recover cuts the store there"


def lock_path(path: str) -> str:
    """Return the path of the file whose lock makes a writer the owner of the store."""
    return os.path.join(path, LOCK)


def _refuse_part_of_log(path: str, files: Files) -> None:
    """Refuse a log on several paths, which has every second (third, …) file on each; a gap or two are damage."""
    folder = os.path.join(path, COMMITLOG)
    sequence = _sequence(folder, files)
    lengths = {size for _, size in sequence}
    gaps = {after - before for (before, _), (after, _) in itertools.pairwise(sequence)}
    if len(sequence) >= 3 and len(lengths) == 1 and len(gaps) == 1:
        (length,), (gap,) = lengths, gaps
        if length and gap > length and gap % length == 0:
            raise NotAStoreError(f"{folder}: only one of every {gap // length} files of the log is here: {ON_PATHS}")


# ----------------------------------------------------------------------------------------------------- queues


def queue_folder(path: str, topic: str, queue_id: int, *, ext: bool = False) -> str:
    """Return the folder of a queue's files, or with ``ext`` of its extension units."""
    return os.path.join(path, CONSUMEQUEUE_EXT if ext else CONSUMEQUEUE, topic, str(queue_id))


def list_queues(path: str, files: Files, *, ext: bool = False) -> list[tuple[str, int]]:
    """Return topic and id of every queue with a folder (with ``ext``, a folder of extension units), sorted.

    Plain files among the folders are ignored.

    Raises:
        CorruptionError: The name of a folder can't be a topic or a queue id (kind ``name``).
    """
    return sorted(iter_queues(path, files, ext=ext))


def iter_queues(path: str, files: Files, *, ext: bool = False) -> Iterator[tuple[str, int]]:
    """Yield what `list_queues` returns, in the order of the disk, and list the next topic only when it is asked for."""
    root = os.path.join(path, CONSUMEQUEUE_EXT if ext else CONSUMEQUEUE)
    for topic in files.list(root):
        if topic.is_folder:
            folder = os.path.join(root, topic.name)
            try:
                validate_queue(topic.name, 0)
            except MessageIllegalError as error:
                raise CorruptionError(folder, 0, "name", str(error)) from None
            for entry in files.list(folder):
                if entry.is_folder:
                    yield topic.name, _queue_id(folder, entry)


def known_topics(path: str, files: Files) -> set[str]:
    """Return the topics in the broker's ``topics.json``, none if it is unreadable."""
    return set(_topic_rows(path, files))


def _topic_rows(path: str, files: Files) -> dict[str, Any]:
    for name in ("topics.json", "topics.json.bak"):
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, CorruptionError):
            return dict(json.loads(read_replaced(files, os.path.join(path, CONFIG, name)))["topicConfigTable"])
    return {}


def broker_names(path: str, files: Files) -> tuple[str, str]:
    """Return the names of the broker and its cluster, after which it names topics of its own; else those of librmq."""
    rows, suffix = _topic_rows(path, files), reply_topic("")
    clusters = [topic.removesuffix(suffix) for topic in rows if topic.endswith(suffix)]
    brokers = [
        topic
        for topic, row in rows.items()
        if isinstance(row, dict) and (row.get("perm"), row.get("writeQueueNums")) == (_INHERITED, 1)
    ]
    return _only(brokers, "broker-a"), _only(clusters, "DefaultCluster")


def _only(names: list[str], otherwise: str) -> str:
    return names[0] if len(names) == 1 and names[0] and names[0].isprintable() else otherwise


def _queue_id(folder: str, entry: FolderEntry) -> int:
    name = entry.name
    if name.isascii() and name.isdigit() and len(name) <= 10:
        queue_id = int(name)
        if str(queue_id) == name and queue_id < _QUEUE_IDS:
            return queue_id
    raise CorruptionError(os.path.join(folder, name), 0, "name", "expected a folder named by a queue id")


# --------------------------------------------------------------------------------------------------- settings


def is_made_by_librmq(path: str, files: Files, kept: KeptSettings | None = None) -> bool:
    """Return whether librmq made the store in ``path``, or will make it; otherwise it is a broker's directory.

    `librmq/config.json` says so. Without it log files of `StoreConfig`'s default length do: a broker has others.
    ``kept`` is what the store keeps, if it was read.

    Raises:
        CorruptionError: What the store keeps is damaged.
    """
    if not any(_sequence(os.path.join(path, COMMITLOG), files)):
        return True
    kept = kept or KeptSettings.read(path, files)
    if kept.sizes:
        return kept.is_own
    return _file_settings(path, files, {}).get("commitlog_file_size") == StoreConfig().commitlog_file_size


def infer_config(path: str, files: Files, kept: KeptSettings | None = None) -> StoreConfig:
    """Return the settings that the store's files show, over defaults.

    These are `StoreConfig`'s for a new store and for a log with files of their size, otherwise a 4.9 broker's. An
    existing store has the retention that it recorded in this folder, otherwise its `KeptSettings.default_retention`. If
    files of one kind disagree, the majority decides, and opening the others raises `CorruptionError`. Empty files, and
    lengths that no setting produces, are ignored. ``kept`` is what the store keeps, if it was read; else a damaged file
    of that is warned of, and counts as missing.
    """
    kept = kept or KeptSettings.read_sound(path, files)
    settings, defaults = _stored_settings(path, files, kept, _file_settings(path, files, kept.sizes)), StoreConfig()
    if (
        is_folder(files, os.path.join(path, COMMITLOG))
        and settings.get("commitlog_file_size") != defaults.commitlog_file_size
    ):
        defaults = StoreConfig.broker()
    return dataclasses.replace(defaults, **_with_room(settings, defaults))


def complete_config(path: str, config: StoreConfig, files: Files, kept: KeptSettings | None = None) -> StoreConfig:
    """Return ``config`` with the store's own sizes, delay levels and retention where its maker named no others.

    An existing store that has recorded no retention in this folder has its `KeptSettings.default_retention`, unless the
    maker named another. ``kept`` is as in `infer_config`.

    Raises:
        ConfigError: A named setting contradicts a file, or they contradict each other.
    """
    kept = kept or KeptSettings.read_sound(path, files)
    file_settings = _file_settings(path, files, kept.sizes)
    stored = _stored_settings(path, files, kept, file_settings)
    settings = {name: value for name, value in stored.items() if name not in config.named}
    config = config.with_settings(_with_room(settings, config))
    _check_file_settings(path, config, file_settings)
    return config


def _stored_settings(path: str, files: Files, kept: KeptSettings, file_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a store keeps or its files show, and the others of an existing store of its maker."""
    settings: dict[str, Any] = {}
    if is_folder(files, os.path.join(path, COMMITLOG)):
        settings = kept.default_retention
        if not is_made_by_librmq(path, files, kept):
            settings |= _BROKER_FLUSHES
    return {**settings, **kept.sizes, **kept.retention.in_force, **file_settings}


def _with_room(settings: dict[str, Any], others: StoreConfig) -> dict[str, Any]:
    """Return settings without a total size that was kept beside files of another size."""
    total, file_size = settings.get("max_total_size"), settings.get("commitlog_file_size", others.commitlog_file_size)
    return settings if total is None or total >= file_size else {**settings, "max_total_size": None}


def check_config(path: str, config: StoreConfig, files: Files) -> None:
    """Check ``config`` against the store's files.

    Raises:
        ConfigError: A setting contradicts a file.
    """
    _check_file_settings(path, config, _file_settings(path, files, KeptSettings.read_sound(path, files).sizes))


def _check_file_settings(path: str, config: StoreConfig, file_settings: Mapping[str, Any]) -> None:
    slots, entries = file_settings.get("max_hash_slot_num"), file_settings.get("max_index_num")
    for name, value in file_settings.items():
        if name in ("max_hash_slot_num", "max_index_num"):
            continue
        ours = getattr(config, name)
        if ours != value:
            raise ConfigError(
                f"{name}: expected {_json(value)}, as in the files of {path}, found {_json(ours)}: {_KEEPS_SIZES}"
            )
    if slots is not None and entries is not None:
        ours = file_length(config.max_hash_slot_num, config.max_index_num)
        theirs = file_length(slots, entries)
        if ours != theirs:
            raise ConfigError(
                f"max_hash_slot_num and max_index_num: expected index files of {theirs} bytes, as in {path}, found "
                f"settings for {ours}: {_KEEPS_SIZES}"
            )


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _file_settings(path: str, files: Files, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the files of a store show, none for a new store."""
    settings: dict[str, Any] = {}
    if not is_folder(files, os.path.join(path, COMMITLOG)):
        return settings
    from librmq.store.format._file_lengths import majority_geometry, majority_length

    length = majority_length([_sequence(os.path.join(path, COMMITLOG), files)], 1, saved.get("commitlog_file_size"))
    if length is not None and length >= 256:
        settings["commitlog_file_size"] = length
    length = majority_length(_queues(path, CONSUMEQUEUE, files), ENTRY_SIZE, saved.get("consumequeue_file_size"))
    if length is not None:
        settings["consumequeue_file_size"] = length
    ext = list(_queues(path, CONSUMEQUEUE_EXT, files))
    if ext:
        settings["enable_consumequeue_ext"] = True
        length = majority_length(ext, 1, saved.get("consumequeue_ext_file_size"))
        if length is not None and length >= 64:
            settings["consumequeue_ext_file_size"] = length
    slots_and_entries = majority_geometry(os.path.join(path, INDEX), files, saved)
    if slots_and_entries is not None:
        settings["max_hash_slot_num"], settings["max_index_num"] = slots_and_entries
    return settings


Sequence = list[tuple[int, int]]
"""Start and length of files of one folder, ascending."""


def _sequence(folder: str, files: Files) -> Sequence:
    """Return the first files of a folder, because a look at the length of each takes long where they are many."""
    sequence: Sequence = []
    for name in files.names(folder):
        if len(name) == 20 and name.isascii() and name.isdigit():
            path = os.path.join(folder, name)
            size = None if is_folder(files, path) else file_size(files, path)
            if size is not None:
                sequence.append((int(name), size))
                if len(sequence) == _FILES_READ:
                    break
    return sequence


def _queues(path: str, name: str, files: Files) -> Iterator[Sequence]:
    """Return the files of some queues, or of all if they are few."""
    remaining = _QUEUES_READ
    root = os.path.join(path, name)
    for topic in files.list(root):
        if topic.is_folder:
            for queue in files.list(os.path.join(root, topic.name)):
                if queue.is_folder:
                    sequence = _sequence(os.path.join(root, topic.name, queue.name), files)
                    if sequence:
                        yield sequence
                        remaining -= 1
                        if not remaining:
                            return


def set_abort(files: Files, root: str) -> None:
    """Mark the store in folder ``root`` as open; durable when it returns."""
    files.write(os.path.join(root, ABORT), b"")


def clear_abort(files: Files, root: str) -> None:
    """Mark the store as closed, as the last step of closing."""
    files.delete(os.path.join(root, ABORT))
    files.flush_folder(root)


def has_abort(files: Files, root: str) -> bool:
    """Return whether the store is open, or was not closed."""
    return file_size(files, os.path.join(root, ABORT)) is not None
