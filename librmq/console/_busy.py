"""What every instance does now: which thread has which message since when, and at which line its listener stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from librmq.console._messages import name_of
from librmq.console._place import Look
from librmq.console._tables import Cell, Fact, Page, Query, Table, count, group_link, link, topic_link
from librmq.diagnosis import StoreView
from librmq.formatting import UNKNOWN, duration, innermost_frame, number, short
from librmq.message.topics import is_own_group
from librmq.protocol import InstanceState, ListenerCall

_GROUPS: Final = 100
_AT_WORK: Final = ("message", "for", "stands at", "group", "topic", "thread", "instance")
_INSTANCES: Final = ("instance", "group", "busy", "threads", "queues", "held messages", "state")
_NOBODY: Final = "No process has this store open, so nothing is at work."


def busy_page(look: Look, query: Query) -> Page:
    """Show the instances of all groups, and where their listeners stand, the one that has worked longest first."""
    place = look.place
    if place.route is None or query.at_ms is not None:
        return Page("Busy", notes=["Of a past moment nothing is known." if query.at_ms is not None else _NOBODY])
    route, now_ms = place.route, query.clock.now_ms()
    names = sorted({group for client in route.clients() for group in client.consumer_groups if not is_own_group(group)})
    states = [(group, *found) for group in names[:_GROUPS] for found in sorted(route.instances(group).items())]
    known = [(group, state) for group, _, state in states if state is not None]
    calls = [(group, state, call) for group, state in known for call in state.listeners]
    calls.sort(key=lambda entry: now_ms + 1 if entry[2].since_ms is None else entry[2].since_ms)
    with ExitStack() as opened:
        view = opened.enter_context(place.log()) if place.has_log else None
        rows = [[*_work(view, group, state, call, now_ms)] for group, state, call in calls]
    running, threads = (sum(getattr(state, name) or 0 for _, state in known) for name in ("running", "threads"))
    instances = [[*_instance(group, client_id, state)] for group, client_id, state in states]
    silent = len(states) - len(known)
    note = f"Of {number(len(names))} groups the first {_GROUPS} were asked." if len(names) > _GROUPS else ""
    return Page(
        "Busy",
        [
            Fact("listeners at work", number(running), f"of {number(threads)} threads", _warn(running >= threads > 0)),
            Fact("instances", number(len(states)), f"{number(silent)} silent" if silent else "", _warn(silent > 0)),
        ],
        [
            Table("At work", _AT_WORK, rows, nothing="No listener works now."),
            Table("Instances", _INSTANCES, instances, note, "No instance runs."),
        ],
    )


def _work(view: StoreView | None, group: str, state: InstanceState, call: ListenerCall, now_ms: int) -> Iterator[Cell]:
    queue = call.queue
    message = None if view is None else view.message(queue.topic, queue.queue_id, call.queue_offset)
    more = f" and {number(call.messages - 1)} more" if call.messages > 1 else ""
    name = short(call.message_id, 40) if message is None else name_of(message)
    seconds = None if call.since_ms is None else max(now_ms - call.since_ms, 0) / 1000
    yield Cell(f"{name}{more}", link("message", id=call.message_id))
    yield Cell(duration(seconds), order=seconds)
    yield Cell(innermost_frame(call.stack))
    yield group_link(group)
    yield topic_link(queue.topic)
    yield Cell(call.thread)
    yield Cell(state.client_id)


def _instance(group: str, client_id: str, state: InstanceState | None) -> Iterator[Cell]:
    yield Cell(client_id)
    yield group_link(group)
    if state is None:
        yield from (count(None), count(None), count(None), count(None), Cell("does not answer", "", "warn"))
        return
    is_full = bool(state.threads) and (state.running or 0) >= state.threads
    yield count(state.running, _warn(is_full))
    yield count(state.threads)
    yield count(len(state.queues))
    yield count(sum(held.waiting + held.running for held in state.queues))
    runs = UNKNOWN if state.running is None else "runs"
    yield Cell("paused" if state.is_paused else runs, "", _warn(state.is_paused))


def _warn(is_unusual: bool) -> str:
    return "warn" if is_unusual else ""
