"""``groups``, ``lag``, ``top``, ``expiring``, ``whatif``, ``pending``, ``decide``, ``cancel``, ``timers``, and letters.

What consumer groups have left to consume, what waits before they get it, and what they gave up.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, nullcontext, redirect_stderr
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from librmq.cli._output import Output, complain
from librmq.cli._rows import named, schedule_row
from librmq.cli._selection import age_clock, note_group, note_topic, note_topic_of, parse_time
from librmq.cli._stores import (
    note_replaced,
    open_administered,
    open_running,
    open_source,
    open_store,
    open_view,
    view_of,
)
from librmq.clock import SystemClock
from librmq.diagnosis import GivenUpMessage, GroupRate, Lag, StoreView, TopicProgress, View
from librmq.diagnosis import lag as lag_of
from librmq.diagnosis.deadletters import letters_by_queue, sum_up_causes
from librmq.diagnosis.view import LiveView, group_summaries
from librmq.errors import CorruptionError, InputError
from librmq.files import DiskFiles
from librmq.formatting import moment
from librmq.message.topics import SystemTopic, is_own_group
from librmq.runtime.event_log import counted
from librmq.store.format.directory import check_kind
from librmq.store.format.documents import RecordIdentity

if TYPE_CHECKING:
    from librmq.diagnosis import Consumption, PopHolds


def groups(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each consumer group."""
    with open_source(arguments) as view:
        output.rows_of(_with_in_flight(view, group_summaries(view, includes_own=arguments.all)))
        if not output.rows and isinstance(view, StoreView) and (why := view.unknown_groups) is not None:
            output.explain_nothing(why)
    return 0


def lag(arguments: argparse.Namespace, output: Output) -> int:
    """Print the lag of each group in each queue, its sums by topic or group, or rates."""
    if arguments.every is not None:
        _lag_rates(arguments, output)
        return 0
    with open_source(arguments) as view:
        output.rows_of(_lag_rows(view, arguments))
        _note_unknown(view, arguments, output)
        if not output.rows and output.says_nothing_found and isinstance(view, StoreView):
            if view.unknown_progress is None:
                output.explain_nothing(view.unknown_groups or "no group has progress in these topics")
            else:  # The note was printed already.
                output.says_nothing_found = False
    return 0


def _lag_rows(view: View[Any], arguments: argparse.Namespace) -> Iterable[Any]:
    by, group, topic = arguments.by, arguments.group, arguments.topic
    if by == "origin":
        from librmq.diagnosis import waiting_origins

        if not isinstance(view, StoreView):
            raise InputError("--by origin: expected a folder, because it reads the messages that wait")
        origins = waiting_origins(view, group=group, topic=topic)
        return (row for row in origins if _is_shown(row.group, arguments))
    queue_lags = lag_of(view, group=group, topic=topic, includes_own=arguments.all)
    if by == "queue":
        is_one_broker = isinstance(view, StoreView)
        rows = iter(queue_lags) if is_one_broker else chain.from_iterable(map(_queue_rows, queue_lags.topics))
        return _with_in_flight(view, rows)
    return _with_in_flight(view, queue_lags.by_topic() if by == "topic" else queue_lags.by_group())


def _is_shown(group: str, arguments: argparse.Namespace) -> bool:
    """Return whether a command prints the rows of a group: those of the broker's own groups if a user asks for them."""
    if arguments.group is None:
        return arguments.all or not is_own_group(group)
    return bool(arguments.group == group)


def _with_in_flight(view: View[Any], rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows of groups, with what POP holds for each if the store is that of a broker that knows POP."""
    if not isinstance(view, StoreView) or not view.revive_topics:
        return rows
    holds = _pop_holds(view)
    counts = holds.counts()
    return (
        row._asdict() | {"in_flight": counts[tuple(getattr(row, name) for name in _PLACE if hasattr(row, name))]}
        for row in rows
    )


_PLACE: Final = ("group", "topic", "queue_id")


def _pop_holds(view: StoreView) -> PopHolds:
    from librmq.diagnosis import pop_holds

    holds = pop_holds(view)
    for note in holds.notes:
        complain(f"note: {note}")
    return holds


def _queue_rows(columns: TopicProgress) -> Iterable[Any]:
    rows = columns.rows()
    if not columns.broker_names:
        return rows
    return (named(broker_name, row._asdict()) for broker_name, row in zip(columns.broker_names, rows, strict=True))


def expiring(arguments: argparse.Namespace, output: Output) -> int:
    """Print the unconsumed messages that retention by age would delete soon, by group and topic."""
    from librmq.diagnosis import expiring as expiring_of

    with open_view(arguments) as view:
        rows = expiring_of(view, reserved_s=arguments.reserved, within_s=arguments.within)
        output.rows_of(rows)
        if view.owner is None and view.now_ms is not None:
            complain(f"note: no process uses the store; times count from its last message, {moment(view.now_ms)}")
    return 0


def _lag_rates(arguments: argparse.Namespace, output: Output) -> None:
    """Print how fast topics grow and groups consume them; of an unused store what its messages tell."""
    if arguments.by in ("group", "origin"):
        raise InputError(f"--every measures by group and topic: expected no --by {arguments.by}")

    looks = _looks(arguments, arguments.group, arguments.topic, includes_own=arguments.all)
    with closing(looks):  # which closes the last view, also where an error ends this
        for view, now, rates in looks:
            if rates is None:
                _note_unknown(view, arguments, output)
                if isinstance(view, StoreView) and view.owner is None:
                    _print_recent_rates(view, now, output)
                    return
            for rate in rates or ():
                output.row(rate._asdict())
            output.draw()


def _looks(
    arguments: argparse.Namespace, group: str | None = None, topic: str | None = None, *, includes_own: bool = False
) -> Generator[tuple[LiveView, Lag, list[GroupRate] | None], None, None]:
    """Yield a view every so many seconds, with the lag of groups, and their rates since the view before, if any."""
    if arguments.every < _LEAST_S:
        raise InputError(f"--every: expected at least 100ms, found {arguments.every} s")
    clock, never = SystemClock(), threading.Event()
    before: Lag | None = None
    while True:
        with open_source(arguments) as view:
            now = lag_of(view, group=group, topic=topic, times=False, includes_own=includes_own)
            now = replace(now, now_ms=clock.now_ms())
            yield view, now, None if before is None else now.rates_since(before)
        before = now
        clock.wait(never, arguments.every)


def top(arguments: argparse.Namespace, output: Output) -> int:
    """Print what groups, instances and listeners do; on a terminal each look takes the place of the one before."""
    is_screen = output.is_on_terminal and arguments.format in (None, "table") and not arguments.once
    with closing(_looks(arguments)) as looks:
        while True:
            notes = io.StringIO()
            with redirect_stderr(notes) if is_screen else nullcontext():
                view, now, rates = next(looks)
            if is_screen:
                sys.stdout.write(_CLEAR)
                sys.stderr.write(notes.getvalue())  # below what was cleared
            running = view.running_groups
            left_out = []
            for kind, rows in (
                ("group", [*_group_rows(view, now, rates)]),
                ("instance", [*view.instance_rows(running)]),
                ("listener", view.listener_rows(running)),
            ):
                visible_rows = rows[:_ON_SCREEN] if is_screen else rows
                output.rows_of(visible_rows)
                if len(visible_rows) < len(rows):
                    left_out.append(counted(len(rows) - len(visible_rows), f"more {kind}"))
            output.writer.close()  # all of it, with the headings
            if left_out:
                complain(f"note: without {', '.join(left_out)}")
            if rates is None and isinstance(view, StoreView) and view.route is None:
                complain("note: the instances are unknown: no process shares this store")
            if arguments.once or (isinstance(view, StoreView) and view.owner is None):
                return 0


_CLEAR: Final = "\x1b[H\x1b[J"
_ON_SCREEN: Final = 12
"""Rows of a kind that a screen shows, the first ones."""


def _group_rows(view: LiveView, now: Lag, rates: list[GroupRate] | None) -> Iterator[dict[str, Any]]:
    """Yield what flows in each group, the one with the largest lag first."""
    lags = {group: 0 for group in (*view.groups, *view.running_groups) if not is_own_group(group)}
    lags |= {row.group: row.lag for row in now.by_group()}
    running = set(view.running_groups)  # no other group is asked for its instances
    stored, consumed = defaultdict[str, float](float), defaultdict[str, float](float)
    for rate in rates or ():
        stored[rate.group] += rate.stored_per_s
        consumed[rate.group] += rate.consumed_per_s or 0
    for group, lag in sorted(lags.items(), key=lambda item: (-item[1], item[0])):
        gain = consumed[group] - stored[group]
        yield {
            "type": "group", "group": group, "lag": lag,
            "stored_per_s": None if rates is None else stored[group],
            "consumed_per_s": None if rates is None else consumed[group],
            "drain_s": 0.0 if not lag else lag / gain if gain > 0 else None,
            "instances": None if view.route is None else len(view.states(group)) if group in running else 0,
        }  # fmt: skip


def _note_unknown(view: View[Any], arguments: argparse.Namespace, output: Output) -> None:
    """Tell a person about a group and a topic that are unknown; each can cost requests to all brokers of a cluster."""
    if arguments.group is not None:
        note_group(arguments.group, view.groups, output)
    if arguments.topic is not None:
        note_topic(arguments.topic, view.topics, output)


# ---- rates

_WINDOW_S: Final = 600
_LEAST_S: Final = 0.1


def _print_recent_rates(view: StoreView, queue_lags: Lag, output: Output) -> None:
    """Print what a store that no process uses tells: how fast topics grew at its end."""
    complain(
        "note: no process uses the store. stored_per_s is the rate of its last ten minutes; how fast groups consumed "
        "then is unknown"
    )
    for topic_lag in queue_lags.by_topic():
        messages, seconds = _stored_recently(view, topic_lag.topic)
        rate = GroupRate(topic_lag.group, topic_lag.topic, seconds, messages / seconds, None, topic_lag.lag, None)
        output.row(rate._asdict())


def _stored_recently(view: StoreView, topic: str) -> tuple[int, float]:
    """Return the messages of a topic in the last ten minutes of the store, and how many seconds they cover."""
    if view.now_ms is None:
        return 0, 1.0
    stored, begin_ms = 0, view.now_ms
    since_ms = view.now_ms - 1000 * _WINDOW_S
    for queue, offsets in view.queues(topic).items():
        first = view.store.times.first_from(view.store.queues[queue], since_ms, offsets)
        if first in offsets:
            stored += offsets.stop - first
            time_ms = view.stored_at(queue, first)
            begin_ms = begin_ms if time_ms is None else min(begin_ms, time_ms)
    return stored, max(1.0, (view.now_ms - begin_ms) / 1000)


# ---- time to drain a backlog


def whatif(arguments: argparse.Namespace, output: Output) -> int:
    """Print the time to drain a group's backlog as it is, then with changes, the greatest speed-up first."""
    from librmq.diagnosis import what_if

    with open_view(arguments) as view:
        for scenario in what_if(_consumption(view, arguments)):
            consumption = scenario.consumption
            row = {"scenario": scenario.name, **scenario.estimate._asdict(), "speed_up": scenario.speed_up}
            row |= {"lag": sum(consumption.lags), "queues": len(consumption.lags)}
            row |= {name: getattr(consumption, name) for name in _OF_CONSUMPTION}
            output.row({**row, "advice": scenario.advice})
    return 0


_OF_CONSUMPTION: Final = ("clients", "threads", "batch_size", "handler_s", "stored_per_s")


def _consumption(view: StoreView, arguments: argparse.Namespace) -> Consumption:
    from librmq.diagnosis import consumption_of

    stored_per_s = arguments.inflow
    if stored_per_s is None:
        messages, seconds = _stored_recently(view, arguments.topic)
        stored_per_s = messages / seconds
    consumption = consumption_of(
        view, arguments.group, arguments.topic, handler_s=arguments.handler, stored_per_s=stored_per_s
    )
    changes = {"clients": arguments.clients, "threads": arguments.threads, "batch_size": arguments.batch}
    return dataclasses.replace(
        consumption,
        is_orderly=arguments.orderly or consumption.is_orderly,
        downstream_per_s=arguments.downstream,
        **{name: value for name, value in changes.items() if value is not None},
    )


# ---- messages that wait


def progress(arguments: argparse.Namespace, output: Output) -> int:
    """Print the progress of groups as the file, its backup, and records of moves have it."""
    from librmq.diagnosis import progress_history

    with open_view(arguments) as view:
        for row in progress_history(view, beside=tuple(arguments.beside or ())):
            if _is_shown(row.group, arguments) and arguments.topic in (None, row.topic):
                output.row(row._asdict())
        if not output.rows:
            _note_unknown(view, arguments, output)
    return 0


def pending(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each message that waits."""
    from librmq.diagnosis import pending_messages

    with open_store(arguments, all_in_memory=True) as store:
        view = StoreView.over(store)
        holds = _pop_holds(view) if arguments.kind in (None, "pop") else None
        if store.past_ms is None:
            _note_unknown_waiting(view, arguments.kind)
        messages = pending_messages(store, view.tables, kind=arguments.kind, topic=arguments.topic, holds=holds)
        output.rows_of(messages)
        note_topic_of(store, arguments.topic, output)
    return 0


def schedules(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each schedule."""
    from librmq.broker import Schedule

    with open_view(arguments) as view:
        for name, row in sorted(view.tables.schedules.rows.items()):
            output.row(schedule_row(Schedule.of_row(name, row)))
    return 0


def _note_unknown_waiting(view: StoreView, kind: str | None) -> None:
    """Say what the rows of `pending` leave out or assume because a table of progress is missing."""
    tables = view.tables
    note_replaced(tables)
    if kind in (None, "half") and SystemTopic.HALF in view.topics and (why := tables.unknown_progress()) is not None:
        complain(f"note: {why}; of each half its last copy is listed, unless the log has its end")
    if kind in (None, "delay", "retry") and SystemTopic.SCHEDULE in view.topics and (why := tables.unknown_delays()):
        complain(f"note: {why}; delayed messages and retries that were due before the last message are left out")


def decide(arguments: argparse.Namespace, output: Output) -> int:
    """Commit or roll back a half message that checks have given up."""
    from librmq.broker import Broker
    from librmq.diagnosis import decide_half, given_up

    physical_offset = arguments.physical_offset
    if arguments.commit == arguments.rollback:
        raise InputError("expected either --commit or --rollback")
    with open_running(arguments) as broker:
        if arguments.force and not isinstance(broker, Broker):
            raise InputError("--force: expected a store that no process uses; its producer group decides")
        halves = given_up(view_of(broker))
        row = next((half._asdict() for half in halves if half.physical_offset == physical_offset), {})
        decide_half(broker, physical_offset, commit=arguments.commit, force=arguments.force)
    output.row({**row, "decision": "commit" if arguments.commit else "rollback", "dry_run": arguments.dry_run})
    return 0


def cancel(arguments: argparse.Namespace, output: Output) -> int:
    """Cancel a message that waits for its time."""
    with open_running(arguments) as broker:
        if broker.find_by_id(arguments.id) is None:
            raise InputError(
                f"there is no message with the id {arguments.id!r:.200}: expected a unique id or an offset id, as "
                "`librmq pending` and `librmq show` print them"
            )
        row = {"id": arguments.id, **broker.cancel(arguments.id)._asdict()}
    output.row(row | ({"dry_run": True} if arguments.dry_run else {}))
    return 0


_UNIT: Final = {
    "size": "size", "prev_pos": "previous", "magic": "magic", "curr_write_time_ms": "write_time_ms",
    "delay_ms_rel": "delay_ms", "offset_py": "physical_offset", "size_py": "message_size",
    "real_topic_hash": "topic_hash", "reserved": "reserved",
}  # fmt: skip
"""Fields of the rows that `timers` prints, named as in 5.3.3's files, and the attributes with their values."""
_SLOT: Final = {
    "time_in_precision_units": "time", "first_pos": "first", "last_pos": "last", "num": "messages", "magic": "magic",
}  # fmt: skip
_CHECKPOINT: Final = {
    "last_read_time_ms": "read_time_ms", "last_timer_log_flush_pos": "log_position",
    "last_timer_queue_offset": "queue_offset", "master_timer_queue_offset": "master_queue_offset",
    "data_version_state": "state_version", "data_version_timestamp": "version_timestamp_ms",
    "data_version_counter": "version_counter",
}  # fmt: skip


def _fields(item: object, names: dict[str, str]) -> dict[str, Any]:
    return {name: getattr(item, attribute) for name, attribute in names.items()}


def timers(arguments: argparse.Namespace, output: Output) -> int:
    """Print the timer log, the used slots of the wheel, and the checkpoint."""
    from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, TimerWheel, Unit

    files, store = DiskFiles(), arguments.store
    check_kind(store, files)
    size = TimerLog.file_size_in(store, files)
    if size:
        for position, item in TimerLog(store, size, files=files, writable=False).items():
            if isinstance(item, Unit):
                output.row({"type": "timerlog_unit", "pos": position, **_fields(item, _UNIT)})
            else:
                output.row({"type": "timerlog_blank", "pos": position, "size": item})
    damage = None
    try:
        for number, slot in TimerWheel.read_slots(store, files):
            output.row({"type": "wheel_slot", "index": number, **_fields(slot, _SLOT)})
    except CorruptionError as error:
        damage = error  # raised when everything else is printed
    checkpoint = TimerCheckpoint.read(store, files)
    if checkpoint is not None:
        size = TimerCheckpoint.FILE_SIZE
        output.row({"type": "timercheck", "file_size": size, **_fields(checkpoint, _CHECKPOINT)})
    if damage is not None:
        raise damage
    return 0


# ---- dead letters


def dead_letters(arguments: argparse.Namespace, output: Output) -> int:
    """Print the dead letters, or their causes, or send them to their group again."""
    if arguments.route is not None and arguments.unsent:
        raise InputError("--unsent works on the folder of a store, which notes what was sent again")
    if arguments.resend:
        if arguments.causes:
            raise InputError("expected either --causes or --resend")
        return _resend(arguments, output)
    if arguments.dry_run:
        raise InputError("--dry-run belongs to --resend: a list changes nothing")
    is_selected = _selection(arguments)
    with open_source(arguments) as view:
        selected = [row for row in letters_by_queue(view, arguments.group) if is_selected(row[-1])]
        is_noted = isinstance(view, StoreView)  # a broker does not say what was sent again
        if arguments.causes:
            causes = sum_up_causes(letter for *_, letter in selected)
            output.rows_of(cause._asdict() | ({} if is_noted else {"resent": None}) for cause in causes)
        else:
            rows = (named(view.broker_name(queue), letter._asdict()) for queue, _, letter in selected)
            left_out = () if is_noted else ("resent_at_ms",)
            output.rows_of({name: value for name, value in row.items() if name not in left_out} for row in rows)
        if arguments.group is not None:
            note_group(arguments.group, view.groups, output)
    return 0


def _selection(arguments: argparse.Namespace) -> Callable[[GivenUpMessage], bool]:
    """Return the function that decides whether the options select a dead letter."""
    since_ms = None
    if arguments.since is not None:
        since_ms = parse_time(arguments.since, age_clock(arguments.store, arguments.since))
    return lambda letter: (
        (arguments.cause is None or letter.is_caused_by(arguments.cause))
        and (arguments.id is None or arguments.id == letter.unique_key)
        and (since_ms is None or letter.store_timestamp_ms >= since_ms)
        and (letter.resent_at_ms is None or not arguments.unsent)
    )


def _resend(arguments: argparse.Namespace, output: Output) -> int:
    """Resend those of the chosen dead letters that were not sent yet, at most ``--limit``; ``--id`` repeats one.

    A dry run does the same in memory.
    """
    from librmq.broker.retries import resend_letters, unsent_letters

    group = arguments.group
    if group is None:
        raise InputError("--resend: name the group with --group")
    is_selected = _selection(arguments)
    only_unsent = arguments.id is None or arguments.unsent
    with open_administered(arguments) as (broker, view):
        noted = view.resent_times.keys()
        unsent = set(unsent_letters(broker, group, broker.messages)) if only_unsent else None
        letters = list(letters_by_queue(view, group))
        selected = [row for row in letters if is_selected(row[-1])]
        if unsent is not None:
            sent = {RecordIdentity.of(message) for _, message, _ in letters} - noted - unsent
            if count := len(sent):
                complain(
                    f"note: an ended process had sent {count:,} dead letters without a note; they count as sent now"
                )
        to_send = [row for row in selected if unsent is None or RecordIdentity.of(row[1]) in unsent][: arguments.limit]
        messages = [message for _, message, _ in to_send]
        done, refused = resend_letters(broker, group, broker.messages, messages, only_unsent=only_unsent)
        resent, at_ms = frozenset(done), broker.runner.now_ms()
        if not to_send:
            why = f"no such dead letter of group {group!r}"
            if selected:
                why = (
                    f"all {len(selected):,} dead letters were sent before, as resent_at_ms in the list says: name one "
                    "with --id to send it once more"
                )
            complain(f"note: {why}: nothing is sent")
        for queue, message, letter in to_send:
            if RecordIdentity.of(message) in resent:
                resent_at_ms = letter.resent_at_ms if arguments.dry_run else at_ms
                row = {**letter._replace(resent_at_ms=resent_at_ms)._asdict(), "resent": not arguments.dry_run}
                output.row(named(view.broker_name(queue), row))
        if refused:
            raise refused[0][1]
    return 0
