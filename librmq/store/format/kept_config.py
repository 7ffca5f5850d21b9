"""The settings of a store that its files do not show, in a file of librmq's own.

::

    librmq/config.json    {"version": 1, "commitlog_file_size", …, "message_delay_level", "max_total_size", …}

The broker ignores the file, and it can be deleted. Then sizes come from the store's files, the delay levels are 4.9's,
and retention deletes nothing by age or size.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any, Final

from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files.seam import Files
from librmq.runtime.event_log import EventLog

FILE: Final = os.path.join("librmq", "config.json")
_log = EventLog("librmq.store")
_VERSION: Final = 1
_MAX_FILE_SIZE: Final = 1 << 20
_KEPT: Final = (
    *("commitlog_file_size", "consumequeue_file_size", "enable_consumequeue_ext", "consumequeue_ext_file_size"),
    *("max_hash_slot_num", "max_index_num", "message_delay_level", "max_total_size", "file_reserved_hours"),
    "keep_unconsumed",
)
_SMALLEST_LOG_FILE: Final = 256  # below any total size


def read_kept_config(path: str, files: Files) -> dict[str, Any]:
    """Return the settings that the store in ``path`` keeps, none if the file is missing or unreadable."""
    place = os.path.join(path, FILE)
    if not files.size(place):
        return {}
    try:
        document = json.loads(files.read(place, _MAX_FILE_SIZE))
        if document["version"] != _VERSION:
            return {}
        settings = {name: document[name] for name in _KEPT if name in document}
        StoreConfig(**{"commitlog_file_size": _SMALLEST_LOG_FILE, **settings})
    except (ValueError, TypeError, KeyError, RecursionError, ConfigError, CorruptionError):
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
        files.make_folder(os.path.join(path, os.path.dirname(FILE)))
        files.write(os.path.join(path, FILE), json.dumps({"version": _VERSION, **settings}, indent=1).encode())
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
