"""Sockets between processes of one user on one machine: a file, and the process at the other end.

A peer's host in the server is the loopback address that its process id makes (process 1234 is ``127.0.4.210``), so that
the budgets of addresses are budgets of processes, and the log names who was cut off.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import sys
import tempfile
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple

from librmq.errors import BrokerUnreachableError, StoreError
from librmq.files import DiskFiles, Files
from librmq.files.interface import SystemCall
from librmq.store.format.documents import OWN_FOLDER

_UCRED: Final = struct.Struct("iII")
"""``struct ucred`` of Linux: process, user, group."""
_XUCRED: Final = struct.Struct("II")
"""The beginning of ``struct xucred`` of macOS: version, user."""
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID = 0, 1, 2
_ELSEWHERE: Final = "librmq-"
"""Begin of the name of a folder for a socket whose path in the store is too long."""
_LONGEST_PLACE: Final = 4096
_MOST_BYTES: Final = 100
"""Bytes of a path that a socket can have everywhere."""
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "afs", "gpfs", "beegfs"),
        *("9p", "virtiofs", "vboxsf", "ocfs2", "gfs2"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "fuse.ceph-fuse"),
    )
)


class Credentials(NamedTuple):
    """The process at the other end of a connection."""

    process: int
    """0 if the system does not say, as for another container's."""
    user: int


def credentials_of(connected: socket.socket) -> Credentials:
    """Return the process at the other end; at the client's end the one that listens."""
    if sys.platform == "linux":
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        process, user, _ = _UCRED.unpack(raw)
    else:
        _, user = _XUCRED.unpack(connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 76)[: _XUCRED.size])
        process = connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    return Credentials(process, user)


def checked_credentials(connected: socket.socket) -> Credentials:
    """Return the process at the other end, which must belong to this process's user."""
    credentials = credentials_of(connected)
    if credentials.user != os.geteuid():
        raise PermissionError(f"process {credentials.process} belongs to user {credentials.user}: expected one's own")
    return credentials


def host_of_process(process: int) -> str:
    """Return the loopback address that stands for a process."""
    low = process & 0xFFFFFF
    return f"127.{low >> 16}.{low >> 8 & 255}.{low & 255}"


def process_of_host(host: str) -> int:
    """Return the process that `host_of_process` made an address of."""
    return int.from_bytes(socket.inet_aton(host)) & 0xFFFFFF


def has_ended(process: int) -> bool:
    """Return whether a process has ended, or does so within a second, since it closes its sockets first."""
    if sys.platform != "linux" or process in (0, os.getpid()):
        return False
    try:
        handle = os.pidfd_open(process)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        return bool(waiting.poll(1000))
    finally:
        os.close(handle)


def listen_at(path: str) -> socket.socket:
    """Return a socket that listens at ``path``, in place of a former one, for this user only."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        new = path + ".new"
        with suppress(FileNotFoundError):
            os.unlink(new)
        listening.bind(new)
        os.chmod(new, 0o600)
        listening.listen(128)
        os.rename(new, path)  # so that a client finds a socket that answers, or the former one
    except BaseException:
        listening.close()
        raise
    return listening


def connect_to(path: str, timeout_s: float) -> socket.socket:
    """Return a connection to a process of the same user that listens at ``path``."""
    try:
        with ExitStack() as undo:
            connected = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connected.settimeout(timeout_s)
            connected.connect(path)
            checked_credentials(connected)
            connected.settimeout(None)
            undo.pop_all()
    except OSError as error:  # also of a process without free descriptors
        raise BrokerUnreachableError(f"{path} can't be reached: {error}") from error
    return connected


# ---- the socket of a store


def share_folder(path: str | os.PathLike[str]) -> str:
    """Return the folder of a store that has the owner's lock and socket."""
    return os.path.join(os.path.abspath(os.fspath(path)), OWN_FOLDER, "share")


def make_share_folder(path: str, files: Files) -> None:
    """Make the folder of the owner's lock and socket, for this user only.

    Raises:
        CorruptionError: It is a symbolic link, or a file.
    """
    folder = share_folder(path)
    files.make_folder(folder)
    with SystemCall("make the folder", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)


def owner_socket(path: str | os.PathLike[str]) -> str:
    """Return the path of the socket at which the owner of a store answers, if it has one."""
    folder = share_folder(path)
    with suppress(OSError, StoreError, UnicodeError):
        identity, _, socket_file = (
            DiskFiles().read(os.path.join(folder, "place"), 0, _LONGEST_PLACE).decode().partition(" ")
        )
        if identity == _identity(path) and _is_elsewhere(socket_file):
            return socket_file
    return os.path.join(folder, "owner")


def bell_beside(socket_file: str) -> str:
    """Return the path of the socket by which peers wake the owner that answers at ``socket_file``."""
    return os.path.join(os.path.dirname(socket_file), "bell")


def _identity(path: str | os.PathLike[str]) -> str:
    """Return what a copy of a store's folder does not share with it."""
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def _is_elsewhere(path: str) -> bool:
    """Return whether a path is one that `listen_as_owner` makes, whatever the file of a store from elsewhere says."""
    folder, name = os.path.split(path)
    return name == "owner" and os.path.basename(folder).startswith(_ELSEWHERE) and os.path.isabs(folder)


def listen_as_owner(path: str, files: Files) -> tuple[socket.socket, list[str]]:
    """Return the owner's listening socket, and what to delete at its end. Under the lock of the folder."""
    folder = share_folder(path)
    place, beside = os.path.join(folder, "place"), os.path.join(folder, "owner")
    # An owner that was killed leaves its socket behind.
    delete_place([bell_beside(owner_socket(path)), owner_socket(path), os.path.dirname(owner_socket(path)), place])
    if len(os.fsencode(beside)) <= _MOST_BYTES:
        return listen_at(beside), [beside]
    elsewhere = tempfile.mkdtemp(prefix=_ELSEWHERE)
    socket_file = os.path.join(elsewhere, "owner")
    listening = listen_at(socket_file)
    files.write(place, f"{_identity(path)} {socket_file}".encode())
    return listening, [socket_file, elsewhere, place]


def delete_place(paths: list[str]) -> None:
    """Delete sockets of this user, a store's file ``place``, and empty folders that `listen_as_owner` made."""
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                if os.path.basename(path).startswith(_ELSEWHERE):
                    os.rmdir(path)
            elif os.path.basename(path) == "place" or (stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()):
                os.unlink(path)


# ---- what the system says of processes and folders


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def network_file_system(path: str, mounts: str = "/proc/self/mountinfo") -> str | None:
    """Return the name of the network file system that has a path; None if it is local, or the system does not say."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            mounted, _, described = line.partition(" - ")
            if mounted.split()[2] == name:
                kind = described.split()[0]
                return kind if kind in _NETWORK_FILE_SYSTEMS else None
    return None
