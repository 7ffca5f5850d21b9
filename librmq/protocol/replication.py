"""What replicas ask their master: bytes of its log, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from librmq.config import StoreConfig
from librmq.protocol.request import Request, value

__all__ = ["CopiedTables", "CopyTables", "DescribeLog", "FollowLog", "LeaveLog", "LogBytes", "LogDescription"]


@value
class LogDescription:
    """The log of a master."""

    name: str
    """The broker's name, or the store's folder."""
    place: tuple[object, str]
    """The master's files if they are not the disk, and the folder of its store."""
    config: StoreConfig
    begin: int
    """Physical offset of its first file."""
    end: int


@value
class DescribeLog(Request[LogDescription]):
    """Return what a replica must know before it follows."""


@value
class LogBytes:
    """Bytes of a master's log."""

    data: bytes
    begin: int
    """Physical offset of the master's first file."""
    end: int
    is_held: bool = False
    """Whether the master calls `FollowLog.notify` when there is more."""


@value
class FollowLog(Request[LogBytes]):
    """Read up to ``size`` bytes from one file of the log.

    Everything before ``physical_offset`` is acknowledged: the replica has it. A place beyond the log's end, or before
    its begin, gets no bytes and acknowledges nothing.
    """

    replica: str
    """The replica's id; an empty one only reads, and acknowledges nothing."""
    physical_offset: int
    size: int
    notify: Callable[[], None] | None = None
    """Called once when there is more to read, in the thread of a send: it must be short."""
    follow: Callable[[], int] | None = None
    """Lets the replica follow at once in the calling thread, for a send that waits for it, and returns the physical
    offset up to which it has the log then."""


@value
class LeaveLog(Request[None]):
    """End the following of a replica, which is closed."""

    replica: str


@value
class CopiedTables:
    """The tables of a master, by the name of their rows in its files."""

    topics: Mapping[str, Any]
    groups: Mapping[str, Any]
    offsets: Mapping[str, Mapping[int, int]]
    delays: Mapping[int, int]


@value
class CopyTables(Request[CopiedTables]):
    """Return the topics, groups, progress of consumers and of delays."""

    notify: Callable[[], None] | None = None
    """Called once when a table changes, under the runner's lock."""
