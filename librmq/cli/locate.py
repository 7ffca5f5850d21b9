"""Find the store that a path means: the folder itself, its log, or a folder above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from librmq.cli.output import complain
from librmq.errors import InputError

__all__ = ["locate"]

_LOG: Final = "commitlog"
_DEEPEST: Final = 2
_MOST_FOLDERS: Final = 2000


def locate(path: str) -> str:
    """Return the folder of the store that ``path`` means, with a note if it is another folder.

    A path without a store is returned unchanged, and the command refuses it.

    Raises:
        InputError: Several stores are below the path.
    """
    if os.path.lexists(os.path.join(path, _LOG)):
        return path
    whole = os.path.abspath(path)
    found = [os.path.dirname(whole)] if os.path.basename(whole) == _LOG else sorted(_below(path))
    if len(found) > 1:
        names = ", ".join(found[:5])
        raise InputError(f"{path}: no store, but {len(found)} stores are below it ({names}): name one of them")
    if not found:
        return path
    complain(f"note: the store is {found[0]}")
    return found[0]


def _below(path: str) -> Iterator[str]:
    """Yield the folders with a log up to `_DEEPEST` levels below a folder."""
    level, looked_at = [path], 0
    for _ in range(_DEEPEST):
        following = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
                looked_at += len(inside)
                if looked_at > _MOST_FOLDERS:
                    return
                following += inside
        yield from (folder for folder in following if os.path.isdir(os.path.join(folder, _LOG)))
        level = [folder for folder in following if not os.path.isdir(os.path.join(folder, _LOG))]
