"""Draw docs/hops.svg: how many hops a delay takes by levels, and how late it comes. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from librmq.scheduling.relay import best_level, hop_plan, simple_level

TARGET = Path(__file__).resolve().parent.parent / "docs" / "hops.svg"


def main() -> None:
    delays_ms = sorted({round(10 ** (3 + step / 40)) for step in range(185)})  # a second to eleven hours
    matplotlib.rcParams |= {"svg.hashsalt": "hops", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    matplotlib.rcParams |= {"font.size": 11, "axes.titlesize": "medium", "legend.fontsize": "medium"}
    figure = Figure(figsize=(4.6, 6), layout="constrained")  # a phone shows all of it, in letters large enough
    above, below = figure.subplots(2, 1, sharex=True)
    # Both are equally late, so one has rings and the other dots inside them.
    for name, choose, fill, size in (("simple", simple_level, "none", 5), ("best", best_level, "full", 2)):
        routes = [hop_plan(delay_ms, choose=choose) for delay_ms in delays_ms]
        seconds = [delay_ms / 1000 for delay_ms in delays_ms]
        above.plot(seconds, [one.hops for one in routes], label=name)
        below.plot(seconds, [one.overshoot_ms for one in routes], "o", fillstyle=fill, markersize=size, label=name)
    above.set(xscale="log", yscale="log", ylabel="hops", title="Any time by 4.9's delay levels")
    below.set(xlabel="delay in seconds", ylabel="lateness in ms, without ticks")
    above.legend()
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    figure.savefig(TARGET, metadata={"Title": "Hops and lateness of a delay by levels", "Date": None, "Creator": None})


if __name__ == "__main__":
    main()
