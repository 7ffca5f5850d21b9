"""The file seam: real files, files in memory, locks, rolling sequences, an overlay.

Other rooms take `Files` and its kinds from here, from `interface` what works with each kind, and from `rolling`
sequences of files; `regular` and `lock` are for code that shares files with other users or processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.files._disk import DiskFiles as DiskFiles
    from librmq.files._memory import MemoryFiles as MemoryFiles
    from librmq.files._memory import OverlayFiles as OverlayFiles
    from librmq.files._memory import TemporaryFolder as TemporaryFolder
    from librmq.files.interface import Advice as Advice
    from librmq.files.interface import Buffer as Buffer
    from librmq.files.interface import Damage as Damage
    from librmq.files.interface import File as File
    from librmq.files.interface import FileLock as FileLock
    from librmq.files.interface import Files as Files
    from librmq.files.interface import FileStatus as FileStatus
    from librmq.files.interface import FolderEntry as FolderEntry
    from librmq.files.interface import file_size as file_size
    from librmq.files.interface import is_folder as is_folder
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.files._disk": ("DiskFiles",),
            "librmq.files.interface": (
                "Advice",
                "Buffer",
                "Damage",
                "File",
                "FileLock",
                "FileStatus",
                "Files",
                "FolderEntry",
                "file_size",
                "is_folder",
            ),
            "librmq.files._memory": ("MemoryFiles", "OverlayFiles", "TemporaryFolder"),
        },
    )
