"""Notes about Spark jobs in a store: which are committed, what their runs have staged, where copied records are.

::

    librmq/spark/<job>.json    {"version": 1, "begin", "end", "first", "records", "done"}

``begin`` and ``end`` are physical offsets, ``first`` the first bytes of the first record in hexadecimal digits, and
``done`` says whether queues and index had all of it. A job that is committed again writes nothing again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Final

from librmq.errors import CorruptionError
from librmq.files import Files
from librmq.formatting import moment, size
from librmq.store.format.documents import JOBS_FOLDER, read_document, write_document

_JOB_SUFFIX: Final = ".json"
_RUN: Final = re.compile(r".+\.([0-9]{13})-[0-9a-f]{8}\.staging")
_JOB_KINDS: Final = {"begin": (int,), "end": (int,), "first": (str,), "records": (int,), "done": (bool,)}


@dataclass(frozen=True, slots=True)
class JobNote:
    """Begin and end of a job's records in the log, the first bytes of the first one, and whether the job is done."""

    FOLDER: ClassVar = JOBS_FOLDER
    """The folder of the notes in a store."""
    FIRST_BYTES: ClassVar = 64
    """The number of bytes of the first record to note."""

    begin: int
    end: int
    first: bytes
    records: int
    done: bool = False

    @classmethod
    def path(cls, store: str, job: str) -> str:
        """Return the file of a job in the folder of a store."""
        return os.path.join(store, cls.FOLDER, f"{job}{_JOB_SUFFIX}")

    @classmethod
    def read(cls, path: str, files: Files) -> JobNote:
        """Read the note in the file ``path``.

        Raises:
            CorruptionError: The file holds no note.
        """
        fields = read_document(path, files, _JOB_KINDS)
        if fields is None:
            raise CorruptionError(path, 0, "config", "expected a note of a job, found none")
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
    entries = files.list(os.path.join(path, JobNote.FOLDER))
    return [entry.name.removesuffix(_JOB_SUFFIX) for entry in entries if entry.name.endswith(_JOB_SUFFIX)]


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Records that a run of a Spark job has staged and not committed."""

    folder: str
    began_ms: int
    bytes: int

    NAME: ClassVar = "{job}.{began_ms}-{random}.staging"
    """The name of the folder; the random number has 8 hexadecimal digits."""
    KEPT_MS: ClassVar = 24 * 3600 * 1000
    """Milliseconds after which a run that has neither committed nor ended counts as killed."""

    @classmethod
    def all_in(cls, base: str, files: Files) -> list[StagedRun]:
        """Return what runs of jobs have staged in the folder ``base``, the oldest first."""
        names = [entry.name for entry in files.list(base)]
        runs = [(int(match[1]), os.path.join(base, match[0])) for match in map(_RUN.fullmatch, names) if match]
        return [cls(folder, ms, sum(entry.size for entry in files.list(folder))) for ms, folder in sorted(runs)]

    @classmethod
    def of_store(cls, path: str, files: Files) -> list[StagedRun]:
        """Return what runs have staged in the store in ``path``, the oldest first."""
        return cls.all_in(os.path.join(path, JobNote.FOLDER), files)

    def said(self) -> str:
        """Return where the records are, since when, and how they go away."""
        return (
            f"{self.folder}: {size(self.bytes)} of a Spark job that runs or was killed, since {moment(self.began_ms)} "
            "UTC; a later write of Spark deletes it a day after its start"
        )

    @classmethod
    def notes(cls, path: str, files: Files) -> list[str]:
        """Return a sentence about the runs of which the store in ``path`` has records; none without them."""
        runs = cls.of_store(path, files)
        what = f"{JobNote.FOLDER} holds {size(sum(run.bytes for run in runs))} of Spark jobs that run or were killed"
        return [
            f"{what}, the first since {moment(run.began_ms)} UTC: {len(runs)} folders, which a later write of Spark "
            "deletes a day after their start"
            for run in runs[:1]
        ]


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

    def add_copy(self, physical_offset: int, raw: bytes, new_physical_offset: int, new_raw: bytes) -> None:
        """Add the copy of a record; records come in log order, those of cuts after them."""
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
                first = new_raw[: JobNote.FIRST_BYTES]
                self.moved[name] = replace(note, begin=new_physical_offset, end=end, first=first)

    def committed_jobs(self) -> dict[str, JobNote]:
        """Return the notes of jobs that stay committed, by name."""
        for name, note in self._notes:
            if note.done and self._lowest is not None and note.begin < self._lowest and name not in self.moved:
                self.moved[name] = replace(note, begin=-1, end=-1)
        return self.moved
