"""Input of commands: rows on standard input, times as people write them, names that a store may not have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from librmq.cli.options import UNIT_MS
from librmq.cli.output import Output, complain
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.config import nearest
from librmq.errors import InputError, StoreError

if TYPE_CHECKING:
    from librmq.store import MessageStore


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
