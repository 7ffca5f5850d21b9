"""Documents: JSON files of librmq's own in a store, each with a version. A broker ignores them.

::

    librmq/config.json     {"version": 1, "commitlog_file_size", …, "message_delay_level", "max_total_size", …}
                           the settings of a store that its files do not show
    librmq/replica.json    {"version": 1, "of": "broker-a", "folder": "/srv/broker-a"}
                           the mark of a store that copies another store's log

Without the first, sizes come from the store's files, the delay levels are 4.9's, and retention deletes nothing by age
or size. Without the second, the copy is an independent store that takes messages; ``folder`` tells two masters of one
name apart, and copies of earlier versions lack it. `librmq.store.format.job_notes`, `librmq.store.recovery.open` and
`librmq.store.recovery.salvage` have further documents.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, NamedTuple

from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files.interface import Files
from librmq.runtime.event_log import EventLog

OWN_FOLDER: Final = "librmq"
"""The folder of librmq's own files in a store."""
CONFIG_FILE: Final = os.path.join(OWN_FOLDER, "config.json")
MARK_FILE: Final = os.path.join(OWN_FOLDER, "replica.json")
_log = EventLog("librmq.store")
_VERSION: Final = 1

Kinds = Mapping[str, tuple[type, ...]]
"""The fields of a document with the types of their values; without `NoneType` among them, a field can't be absent."""


def read_document(path: str, files: Files, kinds: Kinds, *, max_size: int = 1 << 20) -> dict[str, Any]:
    """Return the fields in the file ``path`` that ``kinds`` names; other fields are ignored.

    Raises:
        CorruptionError: The file holds no such document, or a later version of librmq wrote it.
    """
    try:
        document = json.loads(files.read(path, max_size))
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r:.80} instead of {_VERSION}")
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
        *("max_hash_slot_num", "max_index_num", "message_delay_level", "max_total_size", "file_reserved_hours"),
        "keep_unconsumed",
    ),
    _ANY,
)
_SMALLEST_LOG_FILE: Final = 256  # below any total size


def read_kept_config(path: str, files: Files) -> dict[str, Any]:
    """Return the settings that the store in ``path`` keeps, none if the file is missing or unreadable."""
    place = os.path.join(path, CONFIG_FILE)
    if not files.size(place):
        return {}
    try:
        settings = read_document(place, files, _KEPT)
        StoreConfig(**{"commitlog_file_size": _SMALLEST_LOG_FILE, **settings})
    except (ConfigError, CorruptionError):
        return {}
    return settings


def write_kept_config(path: str, config: StoreConfig, files: Files) -> None:
    """Keep the settings of the store in ``path`` if they have changed; durable when it returns.

    A full disk does not prevent opening the store; the next opening tries again. If retention deletes more than before,
    a warning says so once.
    """
    settings = {name: getattr(config, name) for name in _KEPT}
    before = read_kept_config(path, files)
    if settings == before:
        return
    stricter = [name for name in before if _is_stricter(name, settings[name], before[name])]
    if stricter:
        changes = ", ".join(f"{name} is {settings[name]} and was {before[name]}" for name in stricter)
        _log.warning("%(path)s: retention deletes more from now on: %(changes)s", path=path, changes=changes)
    try:
        write_document(os.path.join(path, CONFIG_FILE), files, settings, indent=1)
    except StoreIOError as error:
        if error.errno != errno.ENOSPC:
            raise
        _log.warning("sizes, delay levels and retention are not kept: %(error)s", error=error, path=path)


def _is_stricter(name: str, now: Any, before: Any) -> bool:  # noqa: ANN401 (settings have different types)
    """Return whether a setting of retention lets go of messages that it kept before."""
    if name == "keep_unconsumed":
        return bool(before and not now)
    if name not in ("max_total_size", "file_reserved_hours") or now is None:
        return False
    return bool(before is None or now < before)


# ---- mark of a replica


class ReplicaMark(NamedTuple):
    """The master of a copy."""

    master: str
    """Its name."""
    folder: str | None
    """The folder of its store; None if unknown."""

    def is_of(self, name: str, folder: str) -> bool:
        """Return whether the master is the store in this folder, or has this name if its folder is unknown."""
        return self.master == name if self.folder is None else self.folder == folder


def read_mark(path: str, files: Files) -> ReplicaMark | None:
    """Return the master that the store in ``path`` copies; None if it is an independent store.

    Raises:
        CorruptionError: The mark is unreadable, or a later version of librmq wrote it.
    """
    place = os.path.join(path, MARK_FILE)
    if not files.size(place):
        return None
    fields = read_document(place, files, {"of": (str,), "folder": (str, NoneType)})
    return ReplicaMark(fields["of"], fields.get("folder"))


def write_mark(path: str, mark: ReplicaMark, files: Files) -> None:
    """Mark the store in ``path`` as the copy of this master. The mark is durable on return."""
    folder = {} if mark.folder is None else {"folder": mark.folder}
    write_document(os.path.join(path, MARK_FILE), files, {"of": mark.master, **folder}, indent=1)


def clear_mark(path: str, files: Files) -> None:
    """Make the store in ``path`` independent. The change is durable on return."""
    files.delete(os.path.join(path, MARK_FILE))
    files.flush_folder(os.path.join(path, os.path.dirname(MARK_FILE)))
