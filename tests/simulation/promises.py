"""The plainest promise, judged without librmq: an acknowledged message is there, and a queue is read in order.

It reads the log's files by the published layout of a record and compares them with what callers were told. It shares
no code with the library, nor with the checker of histories: a mistake in either shows as a difference.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

RECORD = 0xDAA320A7
_FIXED = struct.Struct(">iIIiiqqiq")
"""Length, magic, checksum of the body, queue id, flag, queue offset, physical offset, system flag, born time."""

Event = Mapping[str, Any]


class Record(NamedTuple):
    topic: str
    queue_id: int
    queue_offset: int
    message_id: str
    """The unique id that its producer gave it."""
    sys_flag: int


def records(log_files: Iterable[bytes]) -> Iterator[Record]:
    for data in log_files:
        at = 0
        while at + 8 <= len(data):
            length, magic = struct.unpack_from(">iI", data, at)
            if magic != RECORD:  # a blank fills the rest of a file, and zeros follow the log's end
                break
            _, _, _, queue_id, _, queue_offset, _, sys_flag, _ = _FIXED.unpack_from(data, at)
            place = at + _FIXED.size + (20 if sys_flag & 16 else 8)  # behind the born host
            place += 8 + (20 if sys_flag & 32 else 8) + 4 + 8  # store time, store host, attempts, prepared offset
            (body,) = struct.unpack_from(">i", data, place)
            place += 4 + body
            topic = data[place + 1 : place + 1 + data[place]].decode()
            place += 1 + data[place]
            (size,) = struct.unpack_from(">H", data, place)
            text = data[place + 2 : place + 2 + size].decode("utf-8", "replace")
            properties = dict(pair.split("\x01", 1) for pair in text.split("\x02") if "\x01" in pair)
            yield Record(topic, queue_id, queue_offset, properties.get("UNIQ_KEY", ""), sys_flag)
            at += length


def had_two_readers(events: Sequence[Event], first: int, last: int) -> bool:
    """Return whether the queue of two commits, given by their numbers from 1 on, had another reader between them.

    While a queue goes from one instance to another, or the broker has lost one of two, each saves its own progress.
    """
    commit = events[last - 1]
    readers = set[str]()
    for number, event in enumerate(events[:last], 1):
        kind = event["event"]
        if kind == "crash":
            readers.discard(event.get("process", ""))
        elif kind in ("assign", "revoke") and all(event[key] == commit[key] for key in ("group", "topic", "queue_id")):
            if number > first:
                return True
            (readers.add if kind == "assign" else readers.discard)(event["process"])
        if number >= first and len(readers) > 1:
            return True
    return False


def broken_promises(
    events: Sequence[Event], log: Iterable[Record], taken_by: Mapping[str, Sequence[str]], ordered: Iterable[str] = ()
) -> list[str]:
    """Return a sentence for each broken promise of a run whose groups have all been drained.

    Args:
        events: The history, as `docs/histories.md` describes it.
        log: The records that the log still holds.
        taken_by: The groups that take every message of a topic, by topic.
        ordered: The groups that read each queue in order.
    """
    in_log = {(record.topic, record.queue_id, record.queue_offset): record.message_id for record in log}
    copies = Counter((topic, message_id) for (topic, _, _), message_id in in_log.items())
    begins: dict[tuple[str, int], int] = {}
    for topic, queue_id, offset in in_log:
        begins[topic, queue_id] = min(offset, begins.get((topic, queue_id), offset))
    return [
        *_missing(events, in_log, begins),
        *unfinished(events, taken_by),
        *_delivered_again(events, copies),
        *_out_of_order(events, frozenset(ordered)),
    ]


def unfinished(events: Sequence[Event], taken_by: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each message that is not yet where a run's end leaves it, as in `broken_promises`."""
    return [*_undelivered(events, taken_by), *_undecided(events)]


def _missing(
    events: Sequence[Event], in_log: Mapping[tuple[str, int, int], str], begins: Mapping[tuple[str, int], int]
) -> Iterator[str]:
    """Acknowledged places that the log lacks, or that hold something else. Retention may delete a queue's beginning."""
    for event in events:
        if event["event"] != "send" or event["outcome"] != "ok" or "queue_offset" not in event:
            continue
        queue = event["topic"], event["queue_id"]
        if queue in begins and event["queue_offset"] < begins[queue]:
            continue
        held = in_log.get((*queue, event["queue_offset"]))
        if held != event["id"] and (held is not None or queue in begins):
            yield f"{event['id']} was acknowledged at {queue} {event['queue_offset']}, which holds {held}"


def _undelivered(events: Sequence[Event], taken_by: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Messages that are due and visible, and that a group has neither consumed nor among its dead letters."""
    done = defaultdict[str, set[str]](set)
    committed = set[str]()
    for event in events:
        if (event["event"] == "deliver" and event.get("outcome") == "ok") or event["event"] == "dead_letter":
            done[event["group"]].add(event["id"])
        elif event["event"] == "end_transaction" and event["decision"] == "commit" and event["outcome"] == "ok":
            committed.add(event["id"])
    for event in events:
        if (
            event["event"] == "send"
            and event["outcome"] == "ok"
            and not (event.get("half") and event["id"] not in committed)
        ):
            for group in taken_by.get(event["topic"], ()):
                if event["id"] not in done[group]:
                    yield f"{event['id']} of {event['topic']} was acknowledged, and group {group} never consumed it"


def _undecided(events: Sequence[Event]) -> Iterator[str]:
    """Half messages that have neither ended nor been given up by the broker."""
    ended = {
        event["id"]
        for event in events
        if event["event"] == "discard" or (event["event"] == "end_transaction" and event["outcome"] != "failed")
    }
    for event in events:
        if event["event"] == "send" and event["outcome"] == "ok" and event.get("half") and event["id"] not in ended:
            yield f"{event['id']} was sent half, and was neither decided nor given up"


def _delivered_again(events: Sequence[Event], copies: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Messages for later that were sent once, and that the broker has put into their topic more than once."""
    sends = [event for event in events if event["event"] == "send"]
    times = Counter(event["id"] for event in sends)
    for event in sends:
        count = copies.get((event["topic"], event["id"]), 0)
        if "not_before_ms" in event and times[event["id"]] == 1 and count > 1:
            yield f"{event['id']} of {event['topic']} was sent once, and delivered {count} times"


def _out_of_order(events: Sequence[Event], ordered: frozenset[str]) -> Iterator[str]:
    """First deliveries of a queue in an ordered group whose queue offsets fall, though nothing restarted between."""
    reads = defaultdict[tuple[str, str, int], list[tuple[int, int]]](list)
    for event in events:
        if event["event"] == "deliver" and event["group"] in ordered and event.get("outcome") == "ok":
            topic = event.get("stored_in", event["topic"])
            reads[event["group"], topic, event["queue_id"]].append((event["begin_ms"], event["queue_offset"]))
    for place, read in reads.items():
        first = dict[int, int]()
        for begin_ms, offset in sorted(read):
            first.setdefault(offset, begin_ms)
        times = [first[offset] for offset in sorted(first)]
        if times != sorted(times):
            yield f"group {place[0]} read queue {place[1]}/{place[2]} first out of order"
