"""Run one simulation: ``python -m tests.simulation --seed 7 --days 7``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.world import DAYS, STEPS, World


def main() -> int:
    """Run it, and print its seed, its length and what happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", default=str(time.time_ns() % 1_000_000))  # noqa: TID251 (a new one each time)
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--over-share", action="store_true", help="reach the broker through the socket of a share")
    settings = parser.parse_args()
    print(f"seed {settings.seed}", flush=True)
    begin = time.monotonic()  # noqa: TID251 (of the run itself)
    world = World(settings.seed, over_share=settings.over_share)
    world.run(settings.days, settings.steps)
    print(f"{settings.days:g} days in {time.monotonic() - begin:.1f} s: no anomaly")  # noqa: TID251
    print(", ".join(f"{name} {count:,}" for name, count in sorted(world.counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
