"""Input of commands: rows on standard input, times as people write them, names that a store may not have."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from librmq.cli.options import UNIT_MS
from librmq.cli.output import Output, complain
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.config import nearest
from librmq.errors import InputError, StoreError

if TYPE_CHECKING:
    from librmq.store import MessageStore


_LONGEST_LINE: Final = 64 << 20
_LARGEST: Final = (1 << 63) - 1
_AGO: Final = re.compile(r"-?(\d{1,12})(ms|s|m|h|d)")


def age_clock(stores: str | Sequence[str] | None, *times: str | float | None) -> Clock:
    """Return the clock from which ages among ``times`` count: that of the last message of stores not in use.

    A line on standard error says so. For stores in use, a cluster and a URL it is the machine's.
    """
    paths = [stores] if isinstance(stores, str) else stores or ()
    if not any(isinstance(time, float) or (time is not None and _AGO.fullmatch(time)) for time in times):
        return SystemClock()
    from librmq.diagnosis.formatting import moment
    from librmq.diagnosis.view import StoreView

    last_ms = []
    for path in paths:
        try:
            with StoreView.open(path) as view:
                if view.owner is not None or view.now_ms is None:
                    return SystemClock()
                last_ms.append(view.now_ms)
        except StoreError:  # the command says what is wrong
            return SystemClock()
    if not last_ms:
        return SystemClock()
    complain(
        f"note: no process uses {', '.join(paths)}: ages count from the last message, at {moment(max(last_ms))} UTC"
    )
    return ManualClock(max(last_ms))


def parse_time(text: str, clock: Clock) -> int:
    """Return milliseconds since 1970 from a number, ISO 8601 (local without a zone) or an age such as ``2h``.

    Raises:
        InputError: The text is none of these.
    """
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _LARGEST:
        return int(text)
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return max(0, clock.now_ms() - int(ago[1]) * UNIT_MS[ago[2]])
    try:
        return max(0, round(datetime.fromisoformat(text).timestamp() * 1000))
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"not a time: {text!r}; expected milliseconds since 1970, a date such as '2026-11-20 08:00' or "
            "2026-11-20T08:00:00Z, or how long ago such as 2h"
        ) from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        InputError: The text is none.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InputError("not JSON: nested too deep") from None
    except UnicodeDecodeError:
        raise InputError("not JSON: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError("expected a JSON object")
    return value


def standard_input() -> Iterator[bytes]:
    """Return the lines of standard input, none if it is closed; a line that is far too long comes in parts."""
    if sys.stdin is None:
        return iter(())
    stream = sys.stdin.buffer
    return iter(lambda: stream.readline(_LONGEST_LINE + 1), b"")


@contextmanager
def end_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Put the numbers of SIGINT and SIGTERM in a queue."""
    # An event has a lock that the main thread may hold when a handler runs.
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, _: ended.put(number)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def input_size() -> int:
    """Return the size of a file on standard input, 0 if it is none."""
    try:
        return os.fstat(sys.stdin.fileno()).st_size if sys.stdin is not None else 0
    except (OSError, ValueError):  # closed, or not of the system
        return 0


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def read_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of lines with their numbers, without empty lines.

    Raises:
        InputError: A line has none; the error names the line.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > _LONGEST_LINE:
            raise InputError(f"line {number}: longer than {_LONGEST_LINE} bytes")
        try:
            yield number, parse_object(line)
        except InputError as error:
            raise InputError(f"line {number}: {error}") from None


def read_ranges(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options that choose a part of the stores, as settings of a report or a pipeline."""
    clock = age_clock(arguments.stores, arguments.since, arguments.until)
    options = {"topic": arguments.topic, "group": arguments.group, "tags": arguments.tag}
    for name in ("since", "until"):
        text = getattr(arguments, name)
        options[name] = None if text is None else str(parse_time(text, clock))
    return {name: value for name, value in options.items() if value is not None}


# ---- unknown names

GROUPS: Final = "; librmq groups lists the groups"
TOPICS: Final = "; librmq topics lists the topics"
"""What to do about an unknown name, for `near`."""


def note_group(group: str | None, groups: Collection[str], output: Output) -> None:
    """Tell a person that there is no such group, and which one is near."""
    if group is not None and group not in groups:
        output.says_nothing_found = False
        complain(f"note: there is no group {group!r}{near(group, groups, GROUPS)}")


def note_topic(topic: str | None, topics: Collection[str], output: Output) -> None:
    """Tell a person that a topic has no queue, and which one is near."""
    if topic is not None and topic not in topics:
        output.says_nothing_found = False
        complain(f"note: topic {topic!r} has no queue{near(topic, topics, TOPICS)}")


def note_topic_of(store: MessageStore, topic: str | None, output: Output) -> None:
    """Tell a person that a topic has no queue in a store, if no row was printed."""
    if not output.rows:
        note_topic(topic, {name for name, _ in store.queues}, output)


def note_message(output: Output, *, name: str | None, kind: str, is_limited: bool = False) -> None:
    """Tell a person that no message has an id or a key, if no row was printed."""
    if name is not None and not output.rows and output.says_nothing_found:
        output.says_nothing_found = False
        where = " among those that the other options select" if is_limited else ""
        complain(f"note: no message has the {kind} {name!r}{where}")


def note_part(stores: Iterable[str], topics: str | None, groups: str | None, output: Output) -> None:
    """Tell a person which of the topics and groups, separated by commas, none of the stores has.

    It prints nothing if a store can't be read, because its names are not known.
    """
    from librmq.diagnosis.view import StoreView

    known_topics: set[str] = set()
    known_groups: set[str] = set()
    if topics is None and groups is None:
        return
    try:
        for path in stores:
            with StoreView.open(path) as view:
                known_topics.update(view.topics)
                known_groups.update(view.groups)
    except StoreError:
        return
    for topic in topics.split(",") if topics else ():
        note_topic(topic.strip(), known_topics, output)
    for group in groups.split(",") if groups else ():
        note_group(group.strip(), known_groups, output)


def near(name: str, names: Collection[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the nearest known one, ``otherwise`` if none is near."""
    nearest_name = nearest(name, names)
    return f"; did you mean {nearest_name!r}?" if nearest_name is not None else otherwise
