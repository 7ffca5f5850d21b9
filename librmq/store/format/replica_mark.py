"""The mark of a store that copies another store's log, in a file of librmq's own.

::

    librmq/replica.json    {"version": 1, "of": "broker-a"}

The broker ignores the file. Without it, the copy is an independent store that takes messages.
"""

from __future__ import annotations

import json
import os
from typing import Final

from librmq.errors import CorruptionError
from librmq.files.seam import Files

__all__ = ["FILE", "clear_mark", "read_mark", "write_mark"]

FILE: Final = os.path.join("librmq", "replica.json")
_VERSION: Final = 1
_MAX_FILE_SIZE: Final = 1 << 16


def read_mark(path: str, files: Files) -> str | None:
    """Return the name of the master that the store in ``path`` copies; None if it is an independent store.

    Raises:
        CorruptionError: the mark is unreadable, or a later version of librmq wrote it.
    """
    place = os.path.join(path, FILE)
    if not files.size(place):
        return None
    try:
        document = json.loads(files.read(place, _MAX_FILE_SIZE))
        if document["version"] == _VERSION and isinstance(document["of"], str):
            return str(document["of"])
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise CorruptionError(place, 0, "config", f"expected version {_VERSION} of a replica's mark")


def write_mark(path: str, of: str, files: Files) -> None:
    """Mark the store in ``path`` as the copy of the master with this name. The mark is durable on return."""
    files.make_folder(os.path.join(path, os.path.dirname(FILE)))
    files.write(os.path.join(path, FILE), json.dumps({"version": _VERSION, "of": of}, indent=1).encode())


def clear_mark(path: str, files: Files) -> None:
    """Make the store in ``path`` independent. The change is durable on return."""
    files.delete(os.path.join(path, FILE))
    files.flush_folder(os.path.join(path, os.path.dirname(FILE)))
