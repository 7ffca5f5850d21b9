"""A log on several paths, as a broker with several ``storePathCommitLog`` keeps it: each path has some of its files.

::

    commitlog/    00000000000000000000   00000000000000262144
    commitlog-2/  00000000000000131072   00000000000000393216

A broker takes the paths in turn, and leaves out one whose disk is full. Readers take the files of all paths together
(`librmq.files.regular.join_folders`): those of folders in the store, which are found here, and those that a user names.
Such a store is never written: its next file belongs to a path that no file names.

A folder in the store counts if it has files of the log's length, none of which the log has too, and one of them follows
a file of the log, or comes before one. A copy of the log does not. Mirrors ``MultiPathMappedFileQueue``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Final

from librmq.errors import NotAStoreError
from librmq.files import Files, file_size, is_folder
from librmq.files.regular import join_folders, joined_folders
from librmq.message import record

_DIGITS: Final = 20
_MAGICS: Final = frozenset(magic & 0xFFFFFFFF for magic in (*record.MAGICS, record.BLANK_MAGIC))


def log_starts(folder: str, files: Files) -> set[int]:
    """Return the places at which the log files in a folder begin, by their names."""
    names = files.names(folder)
    return {int(name) for name in names if len(name) == _DIGITS and name.isascii() and name.isdigit()}


def join_paths(log: str, folders: Iterable[str], files: Files) -> tuple[str, ...]:
    """Join the folders, of those given, that have files of the log in folder ``log``; return all that are joined.

    Folders that a user has named stay joined.
    """
    named = tuple(folder for folder in joined_folders(log) if is_folder(files, folder))
    listed: list[str] = []
    candidates = {folder: starts for folder in folders if folder not in named and (starts := log_starts(folder, files))}
    if candidates:
        starts = log_starts(log, files)
        length = max((file_size(files, os.path.join(log, f"{start:020}")) or 0 for start in starts), default=0)
        while length and (
            folder := next(
                (name for name in candidates if _continues(name, candidates[name], starts, length, files)), ""
            )
        ):
            listed.append(folder)
            starts |= candidates.pop(folder)
    if listed and files.is_shared:
        join_folders(log, (*named, *listed))
    return (*named, *listed)


def _continues(folder: str, starts: Collection[int], others: Collection[int], length: int, files: Files) -> bool:
    """Return whether the files of a folder belong to the log that has files at ``others``."""
    if any(start in others or start % length for start in starts):
        return False
    if not any(start + length in others or start - length in others for start in starts):
        return False
    places = [os.path.join(folder, f"{start:020}") for start in starts]
    if any(file_size(files, place) != length for place in places):
        return False
    return any(int.from_bytes(files.read(place, 4, 4), "big") in _MAGICS for place in places)


def name_paths(log: str, paths: Iterable[str], files: Files) -> None:
    """Join folders that a user names as paths of the log in folder ``log``; a broker may not have used one yet.

    Raises:
        NotAStoreError: A folder has other files, or one of a log that another folder has too.
    """
    join_folders(log, ())
    starts = log_starts(log, files)
    joined: list[str] = []
    for path in paths:
        path_starts = log_starts(path, files)
        if not path_starts and (not is_folder(files, path) or files.list(path)):
            raise NotAStoreError(
                f"{path}: expected a folder with files of a log, whose names have 20 digits, or an empty one"
            )
        if os.path.abspath(path) == os.path.abspath(log):
            continue
        if both := sorted(path_starts & starts):
            raise NotAStoreError(f"{path}: {both[0]:020}: another path of the log has a file of this name too")
        starts |= path_starts
        joined.append(path)
    join_folders(log, joined)
