"""Unique message ids, as clients make them.

::

    address 4 or 16 | process 2 | number of the loader 4 | ms since the month began 4 | counter 2      in hex

Mirrors ``MessageClientIDSetter``. Months begin in UTC here; the original takes its machine's time zone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import NamedTuple

from librmq.errors import MalformedError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class UniqueIds:
    """Makes ids that no other process makes. Thread-safe; a child process may go on using it.

    ``now_ms`` tells the time, ``ip`` is this machine's address in 4 or 16 bytes, and ``number`` any 32 bits
    that tell this maker from others in the same process.
    """

    def __init__(self, now_ms: Callable[[], int], ip: bytes, number: int) -> None:
        if len(ip) not in (4, 16):
            raise MalformedError(f"expected an address of 4 or 16 bytes, found {ip!r}")
        self._now_ms = now_ms
        self._ip = ip
        self._number = (number & 0xFFFFFFFF).to_bytes(4, "big")
        self._count = count().__next__  # counting is one step for the interpreter
        self._latest = (-1, "")  # a millisecond and what ids begin with in it

    def next(self) -> str:
        """A new id: 32 hex digits, or 56 with an IPv6 address. 65,536 in a millisecond are distinct."""
        now_ms = self._now_ms()
        at_ms, prefix = self._latest
        if at_ms != now_ms:
            prefix = self._prefix(now_ms)
            self._latest = (now_ms, prefix)
        return f"{prefix}{self._count() & 0xFFFF:04X}"

    def _prefix(self, now_ms: int) -> str:
        process = (os.getpid() & 0xFFFF).to_bytes(2, "big")  # asked again, for it changes in a fork
        since_ms = (now_ms - _month_begin_ms(now_ms)) & 0xFFFFFFFF
        return (self._ip + process + self._number + since_ms.to_bytes(4, "big")).hex().upper()


class UniqueIdParts(NamedTuple):
    """What a unique id tells."""

    ip: str
    """IPv4 as usual, IPv6 as eight groups of four digits."""
    pid: int
    """The process, modulo 65,536."""
    number: int
    timestamp_ms: int
    """When it was made, if that is less than a month ago."""
    counter: int


def decode_unique_id(text: str, now_ms: int) -> UniqueIdParts:
    """Take a unique id apart; ``now_ms`` tells in which month it was made. `MalformedError` if it is none."""
    try:
        raw = bytes.fromhex(text) if len(text) in (32, 56) and text.isalnum() else b""
    except ValueError:
        raw = b""
    if not raw:
        raise MalformedError(f"expected a unique id of 32 or 56 hex digits, found {text[:80]!r}")
    ip, rest = raw[:-12], raw[-12:]
    begin_ms = _month_begin_ms(now_ms)
    since_ms = int.from_bytes(rest[6:10], "big")
    if begin_ms + since_ms >= now_ms:
        begin_ms = _month_begin_ms(begin_ms - 1)
    return UniqueIdParts(
        ip=".".join(map(str, ip)) if len(ip) == 4 else ip.hex(":", 2),
        pid=int.from_bytes(rest[:2], "big"),
        number=int.from_bytes(rest[2:6], "big"),
        timestamp_ms=begin_ms + since_ms,
        counter=int.from_bytes(rest[10:], "big"),
    )


def _month_begin_ms(now_ms: int) -> int:
    now = _EPOCH + now_ms * _MILLISECOND
    begin = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (begin - _EPOCH) // _MILLISECOND
