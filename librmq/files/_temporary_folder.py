"""A folder on disk that is deleted again."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Final

from librmq.files._disk import DiskFiles
from librmq.files.interface import File
from librmq.override import override
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.files")
_TRIES: Final = 5


class _TemporaryFiles(DiskFiles):
    """Files that are deleted again, so that no call waits for the device: they outlive the process, not the machine."""

    is_temporary = True

    @override
    def flush_folder(self, path: str) -> None:
        pass

    @override
    def _wait_for_device(self, descriptor: int, *, is_data: bool = False) -> None:
        pass

    @override
    def _wait_for_part(self, file: File, begin: int, end: int) -> None:
        pass


class TemporaryFolder:
    """A new folder, deleted by `delete` or at the end of the process that made it, but not by a forked child."""

    def __init__(self) -> None:
        self.name: str = tempfile.mkdtemp(prefix="librmq-")
        self.files: DiskFiles = _TemporaryFiles()
        """Opens what is in the folder, without flushes to the device."""
        self.delete: Callable[[], object] = weakref.finalize(self, _delete_folder, self.name, os.getpid())


def _delete_folder(path: str, process: int) -> None:
    for _ in range(_TRIES):  # at the end of the process, threads of a broker that was not closed can still write
        if os.getpid() == process and os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
    if os.getpid() == process and os.path.isdir(path):
        try:
            shutil.rmtree(path)
        except OSError as error:
            _log.warning("%(path)s: the temporary folder could not be deleted: %(error)s", path=path, error=error)
