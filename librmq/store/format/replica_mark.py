"""The mark of a store that copies another store's log, in a file of librmq's own.

::

    librmq/replica.json    {"version": 1, "of": "broker-a", "folder": "/srv/broker-a"}

``folder`` tells two masters of one name apart; copies of earlier versions lack it. The broker ignores the file.
Without it, the copy is an independent store that takes messages.
"""

from __future__ import annotations

import json
import os
from typing import Final, NamedTuple

from librmq.errors import CorruptionError
from librmq.files.seam import Files

FILE: Final = os.path.join("librmq", "replica.json")
_VERSION: Final = 1
_MAX_FILE_SIZE: Final = 1 << 16


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
    place = os.path.join(path, FILE)
    if not files.size(place):
        return None
    try:
        document = json.loads(files.read(place, _MAX_FILE_SIZE))
        master, folder = document["of"], document.get("folder")
        if document["version"] == _VERSION and isinstance(master, str) and isinstance(folder, str | None):
            return ReplicaMark(master, folder)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise CorruptionError(place, 0, "config", f"expected version {_VERSION} of a replica's mark")


def write_mark(path: str, mark: ReplicaMark, files: Files) -> None:
    """Mark the store in ``path`` as the copy of this master. The mark is durable on return."""
    files.make_folder(os.path.join(path, os.path.dirname(FILE)))
    document = {"version": _VERSION, "of": mark.master}
    if mark.folder is not None:
        document["folder"] = mark.folder
    files.write(os.path.join(path, FILE), json.dumps(document, indent=1).encode())


def clear_mark(path: str, files: Files) -> None:
    """Make the store in ``path`` independent. The change is durable on return."""
    files.delete(os.path.join(path, FILE))
    files.flush_folder(os.path.join(path, os.path.dirname(FILE)))
