"""Run simulations: ``python -m tests.simulation --seed 7 --days 7``, or of new seeds ``--seconds 60`` long."""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from tests.simulation.world import DAYS, STEPS, World


def main() -> int:
    """Run them, and print the seed of each, its length and what happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", default=str(time.time_ns() % 1_000_000_000))  # noqa: TID251 (a new one each time)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--over-share", action="store_true", help="reach the broker through the socket of a share")
    parser.add_argument("--seconds", type=float, help="go on with SEED/1, SEED/2, … for so long")
    settings = parser.parse_args()
    begin = time.monotonic()  # noqa: TID251 (of the runs themselves)
    for number in itertools.count():
        seed, over_share = settings.seed, settings.over_share
        if number:
            seed, over_share = f"{seed}/{number}", over_share or number % 4 == 3
        way = " --over-share" if over_share else ""
        print(f"--seed {seed} --days {settings.days:g} --steps {settings.steps}{way}", end="", flush=True)
        world = World(seed, over_share=over_share)
        world.run(settings.days, settings.steps)
        so_far_s = time.monotonic() - begin  # noqa: TID251
        print(f": no anomaly; after {so_far_s:.1f} s", flush=True)
        if settings.seconds is None or so_far_s > settings.seconds:
            print(", ".join(f"{name} {count:,}" for name, count in sorted(world.counts.items())))
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
