"""Notes about Spark jobs that wrote to a store, so that a job committed again writes nothing twice.

::

    librmq/spark/<job>.json     {"version": 1, "begin", "end", "first", "records", "done"}

``begin`` and ``end`` are physical offsets, ``first`` the first bytes of the first record in hexadecimal digits,
``done`` says whether queues and index had all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from librmq.errors import CorruptionError
from librmq.files.interface import Files
from librmq.store.format.documents import OWN_FOLDER, read_document, write_document

JOB_NOTES_FOLDER: Final = os.path.join(OWN_FOLDER, "spark")
JOB_FIRST_BYTES: Final = 64
_JOB_SUFFIX: Final = ".json"
_JOB_KINDS: Final = {"begin": (int,), "end": (int,), "first": (str,), "records": (int,), "done": (bool,)}


def note_path(path: str, job: str) -> str:
    """Return the file of a job of the store in ``path``."""
    return os.path.join(path, JOB_NOTES_FOLDER, f"{job}{_JOB_SUFFIX}")


@dataclass(frozen=True, slots=True)
class JobNote:
    """Begin and end of a job's records in the log, the first bytes of the first one, and whether the job is done."""

    begin: int
    end: int
    first: bytes
    records: int
    done: bool = False

    @classmethod
    def read(cls, path: str, files: Files) -> JobNote:
        """Read the note in the file ``path``.

        Raises:
            CorruptionError: The file holds no note.
        """
        fields = read_document(path, files, _JOB_KINDS)
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
    entries = files.list(os.path.join(path, JOB_NOTES_FOLDER))
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

    def copied(self, physical_offset: int, raw: bytes, new_physical_offset: int, new_raw: bytes) -> None:
        """Note that a record was copied; records come in log order, those of cuts after them."""
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
                first = new_raw[:JOB_FIRST_BYTES]
                self.moved[name] = replace(note, begin=new_physical_offset, end=end, first=first)

    def finish(self) -> dict[str, JobNote]:
        """Return the notes of jobs that stay committed, by name."""
        for name, note in self._notes:
            if note.done and self._lowest is not None and note.begin < self._lowest and name not in self.moved:
                self.moved[name] = replace(note, begin=-1, end=-1)
        return self.moved
