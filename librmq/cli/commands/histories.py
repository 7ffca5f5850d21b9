"""``check-history``, ``soak``: anomalies in the recorded history of a run, or of a run made for it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from librmq.cli.fields import parse_object
from librmq.cli.output import INTERRUPTED, Output, complain, end_signals
from librmq.errors import InputError

if TYPE_CHECKING:
    from librmq.testing.anomalies import Anomaly


_HAS_ANOMALIES: Final = 1


def check_history(arguments: argparse.Namespace, output: Output) -> int:
    """Print the anomalies of a history; status 1 if there are some."""
    from librmq.testing.anomalies import find_anomalies
    from librmq.testing.history_events import HistoryEvents

    if arguments.files.count("-") > 1:
        raise InputError("-: standard input can be read once")
    history = HistoryEvents()
    if arguments.out is not None and any(_is_same(path, arguments.out) for path in arguments.files):
        raise InputError(f"--out: expected another file than the history {arguments.out}")
    kept: dict[str, list[bytes]] = {}
    begins = []
    for path in arguments.files:
        begins.append(history.lines)
        with _history_file(path) as file:
            if arguments.out is not None and not os.path.isfile(path):  # it can be read once
                kept[path] = file.readlines()
                is_cut = history.read(iter(kept[path]), _file_name(path))
            else:
                is_cut = history.read(file, _file_name(path))
        if is_cut:
            complain(f"note: {_file_name(path)}: line {history.lines - begins[-1]} is incomplete, and left out")
    if history.lines == 0:
        complain("note: the history has no events")
    elif not history.groups:
        complain("note: no event 'group' says which topics a group reads: lost messages cannot be found")
    lines = history.lines
    anomalies = find_anomalies(history)
    output.rows_of(anomaly.row() for anomaly in anomalies)
    if arguments.out is not None:
        _write_timelines(arguments, anomalies, lines, begins, kept)
    if not anomalies:
        output.says_nothing_found = False
        if output.is_on_terminal:
            complain(f"note: nothing is wrong in {lines:,} lines")
    return _HAS_ANOMALIES if anomalies else 0


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return False


def _file_name(path: str) -> str:
    return "standard input" if path == "-" else path


@contextmanager
def _history_file(path: str) -> Iterator[BinaryIO]:
    """Open a file of a history, or standard input."""
    if path == "-":
        if sys.stdin is None:
            raise InputError("-: standard input is closed")
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _write_timelines(
    arguments: argparse.Namespace,
    anomalies: Sequence[Anomaly],
    lines: int,
    begins: Sequence[int],
    kept: dict[str, list[bytes]],
) -> None:
    """Write the page; the events that it shows are read again."""
    from librmq.testing.timelines import SHOWN, render_timelines

    wanted = {line for anomaly in anomalies[:SHOWN] for line in anomaly.events}
    events: dict[int, dict[str, Any]] = {}
    for path, begin in zip(arguments.files, begins, strict=True):
        with nullcontext(kept[path]) if path in kept else _history_file(path) as file:
            events |= {line: parse_object(text) for line, text in enumerate(file, begin + 1) if line in wanted}
    page = render_timelines(anomalies, events, lines, [*map(_file_name, arguments.files)])
    try:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise InputError(f"{arguments.out}: {error.strerror}") from None


_SHOWN: Final = 100


def soak(arguments: argparse.Namespace, output: Output) -> int:
    """Run a soak; status 1 if its history has anomalies, 130 if it was interrupted."""
    from librmq.cli.cluster import access_of
    from librmq.testing.soak import ClusterAccess, Soak, SoakPlan

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
