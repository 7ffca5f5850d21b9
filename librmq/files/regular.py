"""Opening of regular files, which may lie in one of several folders.

A folder of a store holds what anyone with its rights put there: opening a pipe would wait for its writer, and a socket
can't be opened at all. So each file is opened here. It is refused unless it is regular.

A broker can keep its log on several paths. Then `join_folders` lets readers of this process find the files of all of
them in the first folder. A file that is in the first folder costs nothing more.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence
from typing import Final

from librmq.errors import CorruptionError

_FLAGS: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Do not wait for the writer of a pipe. A regular file is never waited for."""
_NO_FILES: Final = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)
"""Errors of opening a socket, a device without a driver, or a pipe to write that no process reads."""

_joined: dict[str, tuple[str, ...]] = {}
"""Other folders with files of a folder, by its absolute path."""


def open_regular(
    path: str, flags: int = os.O_RDONLY, mode: int = 0o600, *, name: str = "", folder: int | None = None
) -> int:
    """Open a file, and return its descriptor, which the caller closes; a new one is given away by `give_to_owner`.

    Args:
        path: The file, for errors too.
        flags: As of `os.open`.
        mode: The rights of a new file.
        name: The file's name within ``folder``; by default ``path`` is opened.
        folder: The descriptor of a folder.

    Raises:
        CorruptionError: It is a folder, a pipe, a socket or a device; with ``O_NOFOLLOW`` a symbolic link.
        OSError: It can't be opened.
    """
    try:
        descriptor = os.open(name or place_of(path), flags | _FLAGS, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_FILES or (error.errno == errno.EISDIR and os.path.isdir(path)):
            raise CorruptionError(path, 0, "name", "expected a regular file") from None
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise CorruptionError(path, 0, "name", "a symbolic link: expected a file of the store") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptionError(path, 0, "name", "expected a regular file")
        if flags & os.O_CREAT:
            give_to_owner(descriptor, os.path.dirname(name or path), folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def give_to_owner(descriptor: int, folder: str, folder_descriptor: int | None = None) -> None:
    """Let what root has made in another user's folder belong to that user, whose service could not use it otherwise.

    ``descriptor`` is what was made: that user can put something else in the place of a name. ``folder`` is named
    within ``folder_descriptor``; if it is empty, it is that one, or the current one.
    """
    if not _is_root():
        return
    if folder or folder_descriptor is None:
        above = os.stat(folder or os.curdir, dir_fd=folder_descriptor)
    else:
        above = os.fstat(folder_descriptor)
    status = os.fstat(descriptor)
    # The user can have linked a file of root here, which must stay root's.
    is_only_here = stat.S_ISDIR(status.st_mode) or status.st_nlink <= 1
    if above.st_uid and not status.st_uid and is_only_here:
        os.chown(descriptor, above.st_uid, above.st_gid)


def make_owned_folder(path: str, mode: int = 0o777, *, name: str = "", folder: int | None = None) -> None:
    """Make a folder, which `give_to_owner` gives away; the arguments are as of `open_regular`.

    Raises:
        OSError: It can't be made, for example because it is there.
    """
    if not _is_root():
        os.mkdir(name or path, mode, dir_fd=folder)
        return
    # Hold the folder above, so that it stays the same one, whatever its user does meanwhile.
    above = os.open(os.path.dirname(path) or os.curdir, os.O_RDONLY | os.O_DIRECTORY) if folder is None else folder
    try:
        name = name or os.path.basename(path)
        os.mkdir(name, mode, dir_fd=above)
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            give_to_owner(descriptor, "", above)
        finally:
            os.close(descriptor)
    finally:
        if folder is None:
            os.close(above)


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def user_name(user: int) -> str:
    """Return the name and number of a user, or the number alone where it has no name, as in a container."""
    import pwd  # not on Windows

    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def with_owner(path: str, error: OSError) -> OSError:
    """Return a refusal with whose file it is, if that is another user's; any other error as it is."""
    if error.errno != errno.EACCES or sys.platform == "win32":
        return error
    place = os.path.abspath(path)
    while True:
        try:
            user = os.stat(place).st_uid
            break
        except OSError:  # behind a folder that this user may not search, or not there
            place = os.path.dirname(place)
    if user == os.geteuid():
        return error
    return OSError(
        error.errno,
        f"{error.strerror}: {place} belongs to user {user_name(user)}, and this process to {user_name(os.geteuid())}",
    )


def join_folders(folder: str, others: Sequence[str]) -> None:
    """Let readers of this process find the files of other folders in ``folder`` too; none ends it."""
    if others:
        _joined[os.path.abspath(folder)] = tuple(others)
    else:
        _joined.pop(os.path.abspath(folder), None)


def joined_folders(folder: str) -> tuple[str, ...]:
    """Return the other folders whose files count as in ``folder``."""
    return _joined.get(os.path.abspath(folder), ()) if _joined else ()


def place_of(path: str) -> str:
    """Return where a file is that may be in another folder than its path says."""
    if _joined and (others := joined_folders(os.path.dirname(path))) and not os.path.lexists(path):
        places = (os.path.join(other, os.path.basename(path)) for other in others)
        return next(filter(os.path.lexists, places), path)
    return path
