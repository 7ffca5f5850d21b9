"""Draws ``docs/hops.svg``: how many hops a delay takes by delay levels, and how much too late it ends.

python tools/plot_hops.py      (wants the extra `report`)
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from librmq.hops import best_level, route, simple_level

LONGEST_MS = 48 * 3_600_000
WAYS = {"simple: level 1 again and again": simple_level, "best: the longest that fits": best_level}
TICKS = {1_000: "1 s", 10_000: "10 s", 60_000: "1 min", 600_000: "10 min", 3_600_000: "1 h", 36_000_000: "10 h"}


def main(path: Path) -> None:
    random = Random(0)
    delays_ms = sorted(int(1_000 * (LONGEST_MS / 1_000) ** random.random()) for _ in range(200))
    plt.rcParams |= {"svg.hashsalt": "librmq", "font.size": 9}
    figure, (hops, late) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for (label, choose), marker in zip(WAYS.items(), "x.", strict=True):
        routes = [route(delay_ms, choose=choose) for delay_ms in delays_ms]
        hops.plot(delays_ms, [one.hops for one in routes], label=label)
        late.plot(delays_ms, [one.overshoot_ms for one in routes], marker, markersize=4, label=label)
    late.axhline(1_000, linestyle="--", color="gray")
    hops.set(xscale="log", yscale="log", ylabel="hops")
    late.set(xlabel="delay", ylabel="too late by (ms), without ticks", ylim=(0, 1_100))
    late.set_xticks(list(TICKS), list(TICKS.values()))
    late.minorticks_off()
    hops.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(__file__).parent.parent / "docs" / "hops.svg")
