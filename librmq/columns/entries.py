"""Queue entries of a part, from the files of the queues or from the plan."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from librmq.columns.parts import Part, Slice
from librmq.config import ENTRY_SIZE
from librmq.consumequeue import entry_dtype
from librmq.errors import CorruptionError, StoreIOError
from librmq.files.rolling import file_name
from librmq.files.seam import Files
from librmq.store.format import directory


def slice_entries(part: Part, share: Slice, files: Files, deleted: list[str]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the entries of a slice, each time with the first queue offset; add deleted files to ``deleted``."""
    per_file = part.queue_file_size // ENTRY_SIZE
    at, stored_end = share.begin, min(share.end, share.inline_from)
    while at < stored_end:
        start = at - at % per_file
        until = min(stored_end, start + per_file)
        name = file_name(start * ENTRY_SIZE)
        path = os.path.join(directory.queue_folder(part.path, share.topic, share.queue_id), name)
        try:
            file = files.open(path)
        except StoreIOError as error:
            if error.errno != errno.ENOENT:
                raise
            deleted.append(path)
        else:
            if file.size < (until - start) * ENTRY_SIZE:
                raise CorruptionError(path, file.size, "size", f"expected {part.queue_file_size} bytes")
            # A copy: a mapping holds a descriptor, and there can be many queues.
            yield at, np.frombuffer(file.buffer, entry_dtype(), until - at, (at - start) * ENTRY_SIZE).copy()
        at = until
    if share.inline and at < share.end:
        yield max(at, share.inline_from), np.frombuffer(share.inline, entry_dtype())
