"""Cost of allocation: 1,000 queues to 100 clients by consistent hash, and the whole share of a client.

A client computes only its own share, so the benchmark counts such shares. The ring and the hashes of the queues are
kept between calls, as in a client between rebalances. "Ring rebuilt" is the cost after a change of the group.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, rate
from librmq.client import allocation as allocation_module
from librmq.client.allocation import allocate_averagely, allocate_consistent_hash, own_share
from librmq.message.message import MessageQueue

QUEUES: Final = tuple(MessageQueue("OrderTopic", f"broker-{at // 50}", at % 50) for at in range(1000))
CLIENTS: Final = tuple(f"10.1.{at // 250}.{at % 250}@{30000 + at}" for at in range(100))
SHARES: Final = 2_000


def _run(share: Callable[[str], object], count: int, *, anew: bool = False) -> Run:
    def run(_: Path) -> float:
        share(CLIENTS[0])
        with Stopwatch() as watch:
            for number in range(count):
                if anew:
                    allocation_module._ring.cache_clear()
                share(CLIENTS[number % len(CLIENTS)])
        return count / watch.seconds

    return run


def allocation(bench: Bench) -> list[Row]:
    """Return shares a second, for 1,000 queues and 100 clients."""
    count = bench.count(SHARES)
    rates = bench.interleave(
        {
            "consistent hash": _run(lambda client: allocate_consistent_hash(client, QUEUES, CLIENTS), count),
            "consistent hash, ring rebuilt": _run(
                lambda client: allocate_consistent_hash(client, QUEUES, CLIENTS), bench.count(SHARES // 20), anew=True
            ),
            "consistent hash, with sorting": _run(
                lambda client: own_share(client, QUEUES, CLIENTS, allocate_consistent_hash), bench.count(SHARES // 4)
            ),
            "averagely": _run(lambda client: allocate_averagely(client, QUEUES, CLIENTS), count),
        }
    )
    targets = {"consistent hash": Target(1000)}
    return [
        Row(
            "allocate 1,000 queues to 100 clients",
            case,
            "",
            statistics.median(measured),
            "/s",
            targets.get(case, Target()),
            ours=rate(statistics.median(measured), "shares/s"),
        )
        for case, measured in rates.items()
    ]


ROWS: Final[dict[str, Measure]] = {"allocation": allocation}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("allocate", __doc__ or "", ROWS, ("numpy",), arguments)


if __name__ == "__main__":
    sys.exit(main())
