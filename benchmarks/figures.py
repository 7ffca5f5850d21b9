"""The figures that the README shows, of the compiled core and of Python code, in some ten minutes.

They are cases of other benchmarks, measured here together, because all of those with both codes take an hour.
"""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.frame import Case, main, title

TITLES: Final = {
    "store": (
        "single append, 128 B, against SQLite, a row a transaction",
        "single append, 128 B, against LMDB nosync, writable map",
        "batch append 256, 128 B, against LMDB nosync, 256 in putmulti",
    ),
    "durability": ("sync append, 128 B, against SQLite, synchronous FULL",),
    "clients": (
        "send to listener, a stream, against litequeue",
        "send to listener, one in flight, against dramatiq StubBroker",
        "send to listener, one in flight, against an append and two queue.Queue",
        "send to listener, one in flight, against litequeue",
    ),
    "share": (
        "a peer's sends, by two peers, against an echo over the socket",
        "a peer's sends, by two peers, against litequeue from two",
    ),
    "kombu": (
        "get and acknowledge, one process, against Redis",
        "get and acknowledge, four processes, against filesystem",
    ),
    "tail": (
        "10,000 a second: bare queue to a thread, one in: 2",
        "10,000 a second: bare queue to a thread, one in: 100",
        "10,000 a second: send to listener, one in: 2",
        "10,000 a second: send to listener, one in: 100",
        "10,000 a second: send to listener, one in: 2, against bare queue to a thread",
        "10,000 a second: send to listener, one in: 10,000, against bare queue to a thread",
    ),
}
"""The cases by the benchmark that has them."""


def cases_of(subject: str) -> list[Case]:
    """Return the cases of another benchmark that the README shows."""
    by_title = {title(case): case for case in importlib.import_module(f"benchmarks.{subject}").CASES}
    return [by_title[name] for name in TITLES[subject]]


CASES: Final = [case for subject in TITLES for case in cases_of(subject)]

if __name__ == "__main__":
    main("figures", __doc__, CASES, both=True)
