"""Notes about dead letters that were sent to their groups again, so that none is sent twice by mistake.

::

    librmq/resent.json     [[physical offset, message id, store time of the letter, time of the last resend], …]

Times are in milliseconds. RocketMQ ignores the file; without it all letters count as unsent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

from librmq.errors import MalformedError
from librmq.files.interface import Files, make_folders
from librmq.message.message import StoredMessage
from librmq.store.format.documents import OWN_FOLDER

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
    if not files.size(notes):
        return {}
    try:
        rows = json.loads(files.read(notes))
        return {(int(place), str(message_id), int(stored_ms)): int(at) for place, message_id, stored_ms, at in rows}
    except (ValueError, TypeError) as error:
        raise MalformedError(
            f"{notes}: expected a list of the dead letters that were sent again: {error}; without the file all count "
            "as unsent"
        ) from None


def note_resent(path: str, files: Files, letters: Iterable[StoredMessage], at_ms: int, log_begin: int) -> None:
    """Note that letters were sent again; notes on letters before ``log_begin``, which are deleted, go.

    Raises:
        MalformedError: The file holds something else.
    """
    times = {**resent_times(path, files), **dict.fromkeys(map(letter_identity, letters), at_ms)}
    rows = [[*identity, resent_ms] for identity, resent_ms in sorted(times.items()) if identity[0] >= log_begin]
    notes = _resent_path(path)
    make_folders(files, os.path.dirname(notes))
    files.write(notes, json.dumps(rows).encode())


def _resent_path(path: str) -> str:
    return os.path.join(path, OWN_FOLDER, "resent.json")
