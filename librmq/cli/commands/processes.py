"""``who``: the processes of this machine that share a store."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress

from librmq.cli.output import Output, complain
from librmq.cli.rows import Row
from librmq.errors import BrokerUnreachableError
from librmq.files.disk import DiskFiles
from librmq.files.lock import lock_process
from librmq.store.format import directory


def who(arguments: argparse.Namespace, output: Output) -> int:
    """Print the owner of a store, then the processes that reach it, the first that came first."""
    path = arguments.store
    directory.check_kind(path, DiskFiles())
    rows = [] if sys.platform == "win32" else _sharing(path)
    output.rows_of(rows)
    if not rows:
        holder = DiskFiles().lock_holder(directory.lock_path(path))
        held = (
            "no process has it open for writing" if holder is None else f"{holder} has it open, and does not share it"
        )
        complain(f"note: no process shares {path}: {held}")
    return 0


def _sharing(path: str) -> list[Row]:
    from librmq.cli.owner import owner_of
    from librmq.wire.unix_sockets import connect_to, credentials_of, owner_socket, process_of_host, share_folder

    try:
        with connect_to(owner_socket(path), _LOOK_S) as connected:
            owner = credentials_of(connected).process
    except BrokerUnreachableError:  # also of an owner that is stopped while many wait for it
        holder = lock_process(os.path.join(share_folder(path), "lock"))
        if holder is None:
            return []
        owner = holder
    try:
        with owner_of(path) as store:
            if store is None:
                return []
            begin_ms, connections = store.admin.connections()
    except BrokerUnreachableError as error:
        complain(f"note: the owner does not answer, so that its peers are unknown: {error}")
        return [_row("owner", owner, None)]
    since = {process: since_ms for host, since_ms in reversed(connections) if (process := process_of_host(host))}
    peers = sorted((since_ms, process) for process, since_ms in since.items() if process not in (owner, os.getpid()))
    return [_row("owner", owner, begin_ms), *(_row("peer", process, since_ms) for since_ms, process in peers)]


_LOOK_S = 3.0


def _row(role: str, process: int, since_ms: int | None) -> Row:
    from librmq.wire.unix_sockets import is_stopped

    state = "stopped" if is_stopped(process) else "running"
    return {"role": role, "pid": process, "program": _program(process), "since_ms": since_ms, "state": state}


def _program(process: int) -> str | None:
    """Return the command line of a process; None where the system does not say."""
    with suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
        words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ")
        return words.decode("utf-8", "replace") or None
    return None
