"""The command ``soak``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from librmq.cli.output import INTERRUPTED, Output, complain, end_signals
from librmq.cli.routes import access_of
from tests.soak.run import Soak, SoakPlan
from tests.soak.worker import ClusterAccess

_HAS_ANOMALIES: Final = 1
_SHOWN: Final = 100


def soak(arguments: argparse.Namespace, output: Output) -> int:
    """Run a soak; status 1 if its history has anomalies, 130 if it was interrupted."""
    names = ("rate", "workers", "name")
    plan = SoakPlan(
        store=arguments.store,
        cluster=None if arguments.route is None else ClusterAccess(**access_of(arguments)),
        is_served=arguments.serve,
        seconds=getattr(arguments, "for"),
        faults=() if arguments.faults == ["none"] else arguments.faults,
        fault_every_s=arguments.every,
        settle_s=arguments.settle,
        history=arguments.out,
        **{name: value for name in names if (value := getattr(arguments, name)) is not None},
        **({} if arguments.loads is None else {"loads": arguments.loads}),
    )
    run = Soak(plan)

    def show(row: Mapping[str, Any]) -> None:
        if output.is_on_terminal:
            counts = "  ".join(f"{what} {count:,}" for what, count in row.items() if what not in ("type", "seconds"))
            complain(f"{row['seconds']:5} s  {counts}")
        else:
            output.row(row)
            output.flush()

    with end_signals() as signals:
        result = run.run(signals.wait, show)
    for name, why in result.left.items():
        complain(f"note: {name} is left: {why}")
    for anomaly in result.anomalies[:_SHOWN]:
        output.row({"type": "anomaly", **anomaly.row()})
    if len(result.anomalies) > _SHOWN:
        complain(f"note: {len(result.anomalies) - _SHOWN:,} more: librmq check-history {result.history}")
    output.row(
        {
            "type": "verdict",
            "anomalies": len(result.anomalies),
            "interrupted": result.is_interrupted,
            **result.counts,
            "left": list(result.left),
            "history": result.history,
        }
    )
    if result.is_interrupted:
        return INTERRUPTED
    return _HAS_ANOMALIES if result.anomalies else 0
