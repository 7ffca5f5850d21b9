"""Cost of allocation: 1,000 queues to 100 clients by consistent hash, and the whole share of a client.

A client computes only its own share, so the benchmark counts such shares. The ring and the hashes of the queues are
kept between calls, as in a client between rebalances. "Ring rebuilt" is the cost after a change of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Target, Timed, main
from librmq.client import allocation
from librmq.client.allocation import allocate_averagely, allocate_consistent_hash, own_share
from librmq.message.message import MessageQueue

QUEUES: Final = tuple(MessageQueue("OrderTopic", f"broker-{at // 50}", at % 50) for at in range(1000))
CLIENTS: Final = tuple(f"10.1.{at // 250}.{at % 250}@{30000 + at}" for at in range(100))


def shares(bench: Bench, _: Path, *, share: Callable[[str], object], count: int, rebuilt: bool = False) -> Timed:
    """Compute shares of one client after the other."""
    share(CLIENTS[0])
    yield
    for number in range(bench.count(count)):
        if rebuilt:
            allocation._ring.cache_clear()
        share(CLIENTS[number % len(CLIENTS)])
    yield bench.count(count)


def by_hash(client: str) -> object:
    return allocate_consistent_hash(client, QUEUES, CLIENTS)


def with_sorting(client: str) -> object:
    """Compute a share with everything that a client does in a rebalance."""
    return own_share(client, QUEUES, CLIENTS, allocate_consistent_hash)


def averagely(client: str) -> object:
    return allocate_averagely(client, QUEUES, CLIENTS)


CASES: Final = [
    Case("allocate 1,000 queues to 100 clients", run, detail, target=target, unit="/s")
    for detail, run, target in (
        ("consistent hash", partial(shares, share=by_hash, count=2_000), Target(1000)),
        ("consistent hash, ring rebuilt", partial(shares, share=by_hash, count=100, rebuilt=True), Target()),
        ("consistent hash, with sorting", partial(shares, share=with_sorting, count=500), Target()),
        ("averagely", partial(shares, share=averagely, count=2_000), Target()),
    )
]

if __name__ == "__main__":
    main("allocate", __doc__, CASES)
