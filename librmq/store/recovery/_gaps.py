"""What the log's folder lacks, for readers: files missing between others, half copied ones, and files of others.

A reader gets them from memory: a blank in place of what is missing, behind which every walk goes on. Writers refuse
such a store.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from librmq.errors import CorruptionError, RecordError
from librmq.files import Damage, Files, FolderEntry, OverlayFiles
from librmq.files.interface import copy_file
from librmq.files.rolling import file_name, list_starts
from librmq.message import frames, record
from librmq.store.format.directory import COMMITLOG, MISSING_LOG

_MOST_FILES: Final = 1 << 16
"""Most missing files in a row: a number that is further away is the name of no file of this log."""


def bridged(path: str, files: Files, size: int, *, is_written: bool = False) -> tuple[Files, list[Damage]]:
    """Return files in which the log of the store in ``path`` has only whole files of ``size`` bytes, and what it lacks.

    ``files`` are returned if nothing is wrong there, and changed if they are an overlay. What comes before the first
    file or after the last one is not known here. ``is_written`` says that a writer makes and deletes files meanwhile.
    """
    folder, before = os.path.join(path, COMMITLOG), None
    listed = _listed(files, folder, size, is_written=is_written)
    while listed != before:  # a listing that a writer overtakes can lack a file
        with suppress(CorruptionError):
            list_starts(folder, size, listed)
            return files, []
        before, listed = listed, _listed(files, folder, size, is_written=is_written)
    overlay = files if isinstance(files, OverlayFiles) else OverlayFiles(files)
    named, gaps = list[FolderEntry](), list[Damage]()
    for entry in listed:
        wrong = _why_foreign(folder, entry, size)
        if wrong is None and named and (expected := int(named[-1].name) + _MOST_FILES * size) < int(entry.name):
            wrong = f"expected a name up to {file_name(expected)}"
        if wrong is None:
            named.append(entry)
        else:
            place = os.path.join(folder, entry.name)
            gaps.append(Damage(place, 0, "name", f"{wrong}: readers pass over it, so move it away"))
            overlay.delete(place)
    following = int(named[0].name) if named else 0
    for entry in named:
        start = int(entry.name)
        if start > following:
            gaps.append(_fill(overlay, folder, following, start, size))
        if entry.size != size:
            gaps.append(_complete(overlay, folder, start, entry.size, size, is_last=entry is named[-1]))
        following = start + size
    return overlay, gaps


def _listed(files: Files, folder: str, size: int, *, is_written: bool) -> list[FolderEntry]:
    """Return what is in the folder, without last files that a writer is making."""
    listed = files.list(folder)
    while is_written and listed and listed[-1].name.isdigit() and listed[-1].size < size:
        listed.pop()
    return listed


def _why_foreign(folder: str, entry: FolderEntry, size: int) -> str | None:
    try:
        list_starts(folder, size, [entry])
    except CorruptionError as error:
        return error.what if error.kind == "name" else None
    return None


def _fill(overlay: OverlayFiles, folder: str, begin: int, end: int, size: int) -> Damage:
    """Put a file that is a blank where files are missing; return what is."""
    first = os.path.join(folder, file_name(begin))
    overlay.create(first, size).buffer[: record.BLANK_SIZE] = frames.blank(size)
    for start in range(begin + size, end, size):
        overlay.link(first, os.path.join(folder, file_name(start)))
    up_to = f" up to {file_name(end - size)}" if end - begin > size else ""
    return Damage(first, begin, MISSING_LOG, f"missing{up_to}, before {file_name(end)}", end - begin)


def _complete(overlay: OverlayFiles, folder: str, start: int, found_size: int, size: int, *, is_last: bool) -> Damage:
    """Give a file of another length its own, with a blank behind its last whole record unless it is the last file."""
    place, at = os.path.join(folder, file_name(start)), 0
    source = overlay.open(place) if found_size else None
    overlay.delete(place)
    if source is None:
        overlay.create(place, size)
    else:
        end, buffer = min(found_size, size), source.buffer
        with suppress(RecordError):
            while at + record.BLANK_SIZE <= end and (length := record.check_record(buffer, at, end, check_body=False)):
                at += length
        copy_file(overlay, source, place, end=at, size=size)
    if not is_last:
        overlay.open(place, writable=True).buffer[at : at + record.BLANK_SIZE] = frames.blank(size - at)
    what = f"expected {size} bytes, found {found_size}"
    return Damage(place, start + at, MISSING_LOG, what, size - at)
