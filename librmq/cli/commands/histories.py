"""``check-history``: anomalies in the recorded history of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from librmq.cli.fields import parse_object
from librmq.cli.output import Output, complain
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
