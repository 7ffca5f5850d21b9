"""Run simulations: ``python -m tests.simulation --seed 7 --days 7``, or of new seeds ``--seconds 60`` long.

``--shares`` lets processes share a store instead, and kills them.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.simulation.shares import CHANGES, SharedWorld
from tests.simulation.world import DAYS, STEPS, World


def main() -> int:
    """Run them, and print the seed of each, its length and what happened in all."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", default=str(time.time_ns() % 1_000_000_000))  # noqa: TID251 (a new one each time)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--steps", type=int, help=f"{STEPS:,}, of shares {CHANGES}")
    parser.add_argument("--over-share", action="store_true", help="reach the broker through the socket of a share")
    parser.add_argument("--shares", action="store_true", help="let processes share a store, and kill them")
    parser.add_argument("--seconds", type=float, help="go on with SEED/1, SEED/2, … for so long")
    settings = parser.parse_args()
    begin, counts = time.monotonic(), Counter[str]()  # noqa: TID251 (of the runs themselves)
    for number in itertools.count():
        seed, shares, over_share = settings.seed, settings.shares, settings.over_share
        if number:
            seed = f"{seed}/{number}"
            over_share, shares = over_share or number % 4 == 3, shares or number % 4 == 1
        if shares:
            print(f"--seed {seed} --shares", end="", flush=True)
            folder = Path(tempfile.mkdtemp(prefix="librmq-shares-"))
            shared = SharedWorld(seed, folder)
            shared.run(settings.steps or CHANGES)
            shutil.rmtree(folder)
            counts += shared.counts
        else:
            steps = settings.steps or STEPS
            way = " --over-share" if over_share else ""
            print(f"--seed {seed} --days {settings.days:g} --steps {steps}{way}", end="", flush=True)
            world = World(seed, over_share=over_share)
            world.run(settings.days, steps)
            counts += world.counts
        so_far_s = time.monotonic() - begin  # noqa: TID251
        print(f": no anomaly; after {so_far_s:.1f} s", flush=True)
        if settings.seconds is None or so_far_s > settings.seconds:
            print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
