"""``topic``, ``group``, ``reset``, ``skip``: change topics, consumer groups and their progress."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from librmq.cli._output import Output, complain
from librmq.cli._rows import Row, named
from librmq.cli._selection import GROUPS, TOPICS, age_clock, near, parse_time
from librmq.cli._stores import open_administered, open_running, select_queues, view_of
from librmq.config import check_reached
from librmq.diagnosis import View
from librmq.diagnosis.pending import waiting_retries
from librmq.errors import InputError
from librmq.formatting import moment
from librmq.message import Message, retry_topic
from librmq.message.lag import queue_lag
from librmq.message.properties import PropertyName
from librmq.message.topics import is_system_topic, moved_keys, validate_group
from librmq.protocol import INNER_PRODUCER, LOCAL_HOST, MoveGroup, SendMessage, SetGroup, UpdateOffset
from librmq.runtime.event_log import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from librmq.broker import AdministeredRoute, StoreRoute
    from librmq.diagnosis import Skip


_LAST_S: Final = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()
_QUEUES: Final = 8
_ROW_QUEUES: Final = 16
"""The queues of a topic whose row has no number of them."""
_NAMED: Final = 10
"""The most retries that are named."""
_PERMISSIONS: Final = {"rw": 6, "r": 4, "w": 2}
_TOPIC_OPTIONS: Final = {
    "create": ("queues", "write_queues", "permission", "type"), "grow": ("queues", "write_queues"),
    "permit": ("permission",), "delete": (),
}  # fmt: skip
_GROUP_OPTIONS: Final = {
    "create": ("retries", "ordered", "consumes", "broadcasts", "priority_factor", "max_process_deaths"),
    "copy": ("to", "with_retries"), "delete": (),
}  # fmt: skip
_OF_THE_DELAY: Final = frozenset((PropertyName.DELAY, PropertyName.REAL_TOPIC, PropertyName.REAL_QUEUE_ID))


def topic(arguments: argparse.Namespace, output: Output) -> int:
    """Create a topic, add queues, change its permission, or delete it."""
    name, action = arguments.topic, arguments.action
    _check_options(arguments, _TOPIC_OPTIONS)
    if is_system_topic(name):
        raise InputError(f"topic {name!r} is the broker's own: it can't be created, changed or deleted")
    with open_running(arguments, makes_store=action == "create") as broker:
        topics = broker.tables.topics
        old = topics.rows.get(name)
        if action == "create":
            if old is not None and not topics.is_new:  # of a store without a table, each topic with messages has a row
                queues = old.get("readQueueNums")
                raise InputError(f"topic {name!r} exists with {queues} queues: add queues by `topic grow`")
            changes = _create(broker, arguments)
        elif old is None:
            otherwise = TOPICS if action == "delete" else ": create it by `topic create`"
            raise InputError(f"topic {name!r} does not exist{near(name, topics.rows, otherwise)}")
        elif action == "delete":
            changes = _delete(broker, name)
        else:
            changes = {"grow": _grow, "permit": _permit}[action](broker, old, arguments)
    output.row({"topic": name, "action": action, **changes, "dry_run": arguments.dry_run})
    return 0


def _check_options(arguments: argparse.Namespace, options_by_action: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an option that only another action of the command takes."""
    for name in chain.from_iterable(options_by_action.values()):
        if name not in options_by_action[arguments.action] and getattr(arguments, name) is not None:
            actions = ", ".join(action for action, names in options_by_action.items() if name in names)
            raise InputError(f"--{name.replace('_', '-')}: it belongs to {actions}, not to {arguments.action}")


def _create(broker: StoreRoute, arguments: argparse.Namespace) -> Row:
    name, kind = arguments.topic, arguments.type
    read = arguments.queues or _QUEUES
    write = arguments.write_queues or read
    permission = arguments.permission or "rw"
    broker.create_topic(name, read, write_queues=write, permission=_PERMISSIONS[permission], message_type=kind)
    type_field = {} if kind is None else {"message_type": kind}
    return {"read_queues": read, "write_queues": write, "permission": permission, **type_field}


def _grow(broker: StoreRoute, old: Row, arguments: argparse.Namespace) -> Row:
    before = old.get("readQueueNums", 0)
    read = arguments.queues
    if read is None:
        raise InputError("--queues is missing")
    write = arguments.write_queues or read
    if read < before or write < old.get("writeQueueNums", 0):
        raise InputError(f"--queues: the topic has {before} queues with messages: expected more, found {read}")
    broker.create_topic(arguments.topic, read, write_queues=write, permission=old.get("perm", _PERMISSIONS["rw"]))
    write_before = old.get("writeQueueNums", 0)
    return {
        "read_queues": read,
        "write_queues": write,
        "before": before,
        "moved_keys": round(moved_keys(write_before, write), 4) if write_before else 0.0,
        "note": "stored messages stay in their queues; a key that selects its queue by hash can select another one "
        "now, so old and new messages of a key can be out of order",
    }


def _permit(broker: StoreRoute, old: Row, arguments: argparse.Namespace) -> Row:
    if arguments.permission is None:
        raise InputError("--permission is missing: rw, r or w")
    read, write = (old.get(name, _ROW_QUEUES) for name in ("readQueueNums", "writeQueueNums"))
    broker.create_topic(arguments.topic, read, write_queues=write, permission=_PERMISSIONS[arguments.permission])
    names = {value: text for text, value in _PERMISSIONS.items()}
    return {"permission": arguments.permission, "before": names.get(old.get("perm", 0), str(old.get("perm")))}


def _delete(broker: StoreRoute, name: str) -> Row:
    broker.delete_topic(name)
    view = view_of(broker)
    groups = sorted(group for group, topic in view.progress if topic == name)
    return {
        "messages": view.message_count(name),
        "groups": groups,
        "note": "its messages stay in the log until retention deletes them",
    }


def group(arguments: argparse.Namespace, output: Output) -> int:
    """Create a consumer group or change its settings, copy its progress to a new group, or delete it."""
    name, action = arguments.group, arguments.action
    _check_options(arguments, _GROUP_OPTIONS)
    if action == "create":
        validate_group(name)
    with open_running(arguments, makes_store=action == "create") as broker:
        groups = view_of(broker).groups
        if action != "create" and name not in groups:
            raise InputError(f"there is no group {name!r}{near(name, groups, GROUPS)}")
        row: Row = {"group": name, "action": action}
        if action == "create":
            row |= _set_group(broker, name, arguments)
        elif action == "copy":
            if arguments.with_retries and broker.connections(name) is not None:
                raise InputError(
                    f"--with-retries: group {name!r} runs, and its running consumers hold retries, which would come to "
                    "both groups: stop them first"
                )
            row |= _copy(broker, name, arguments.to, groups)
            row |= _retries_of(broker, name, arguments)
        else:
            row["topics"] = sorted(topic for topic, _ in _progress_of(broker, name))
            _make_known(broker, name)
            broker.delete_group(name, keep_progress=False)
    output.row({**row, "dry_run": arguments.dry_run})
    return 0


def _set_group(broker: StoreRoute, name: str, arguments: argparse.Namespace) -> Row:
    """Create a group, or change the settings that are given; return all that it has then."""
    broker.set_group(
        name,
        retry_max_times=arguments.retries,
        is_ordered=arguments.ordered,
        consumes=arguments.consumes,
        broadcasts=arguments.broadcasts,
        priority_factor=arguments.priority_factor,
        max_process_deaths=arguments.max_process_deaths,
    )
    settings = broker.group_settings(name)
    return {
        "retries": settings.retry_max_times,
        "ordered": settings.is_ordered,
        "consumes": settings.consumes,
        "broadcasts": settings.broadcasts,
        "priority_factor": settings.priority_factor,
        "max_process_deaths": settings.max_process_deaths,
    }


def _make_known(route: AdministeredRoute, group: str) -> None:
    """Make the settings of a group that only progress or its retries show, because brokers refuse to change it."""
    if group not in route.groups():
        route.set_group(group)


def _progress_of(broker: StoreRoute, group: str) -> list[tuple[str, dict[int, int]]]:
    """Return the topics in which a group has progress, with the queue offsets by queue id."""
    return [(topic, dict(row)) for (owner, topic), row in broker.tables.progress().items() if owner == group]


def _copy(broker: StoreRoute, name: str, new: str | None, groups: tuple[str, ...]) -> Row:
    """Create a group with the progress of another one."""
    if new is None:
        raise InputError("copy: name the new group by --to")
    validate_group(new)
    if new in groups:
        raise InputError(f"--to: group {new!r} exists; expected a new name")
    broker.call(SetGroup(new, {}, like=name))
    topics = []
    for topic, offsets in sorted(_progress_of(broker, name)):
        if topic != retry_topic(name):
            topics.append(topic)
            for queue_id, queue_offset in offsets.items():
                broker.call(UpdateOffset(new, topic, queue_id, queue_offset))
    return {"to": new, "topics": topics}


def _retries_of(broker: StoreRoute, name: str, arguments: argparse.Namespace) -> Row:
    """Move the waiting retries of a group if that is wanted; else return which stay with the old name."""
    if arguments.with_retries:
        moved, delayed = _move_retries(broker, name, arguments.to)
        fields: Row = {"retries_moved": moved, "retries_left": 0}
        if delayed:
            fields["note"] = f"{delayed} retries also come to group {name} when their delay ends: do not start it again"
        return fields
    retries = list(waiting_retries(broker.store, broker.tables, name))
    if not retries:
        return {"retries_left": 0}
    return {
        "retries_left": len(retries),
        "retries": [message.message_id for message in retries[:_NAMED]],
        "cut": len(retries) > _NAMED,
        "note": f"{len(retries)} retries of group {name} wait: move them too by --with-retries, or "
        "let an instance of it run until they are consumed",
    }


def _move_retries(broker: StoreRoute, group: str, new_group: str) -> tuple[int, int]:
    """Copy the waiting retries of a group to the retry topic of another one, and skip those that are due.

    The attempts so far count for the new group. Its retries are due at once.

    Returns:
        The number of copies, and how many of them the old group gets too when their delay ends.
    """
    topic, old_topic = retry_topic(new_group), retry_topic(group)
    retries = list(waiting_retries(broker.store, broker.tables, group))
    if retries:  # the first copy is the group's first retry
        broker.call(UpdateOffset(new_group, topic, 0, broker.store.queue_range(topic, 0)[1]))
    passed: dict[int, int] = {}
    for message in retries:
        copy = Message(topic, message.stored_body, flag=message.flag)
        copy.properties = {name: value for name, value in message.properties.items() if name not in _OF_THE_DELAY}
        copy.properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.offset_id)
        broker.call(
            SendMessage(
                INNER_PRODUCER,
                copy,
                0,
                message.born_timestamp_ms,
                message.born_host or LOCAL_HOST,
                message.sys_flag,
                reconsume_times=message.reconsume_times,
                max_reconsume_times=message.reconsume_times + 1,  # however many attempts it has had
            )
        )
        if message.topic == old_topic:
            passed[message.queue_id] = message.queue_offset + 1
    for queue_id, queue_offset in passed.items():  # no further: the group can be running, and fail again
        broker.reset_group(group, old_topic, queue_offset, queue_id=queue_id)
    return len(retries), sum(message.topic != old_topic for message in retries)


# ---- progress of a group


def reset(arguments: argparse.Namespace, output: Output) -> int:
    """Set a group's progress to the beginning or the end of each queue, a time, or a queue offset."""
    if (arguments.to is None) == (arguments.offset is None):
        raise InputError("expected either --to (begin, end or a time) or --offset")
    if arguments.to not in (None, "begin", "end"):
        time_ms = parse_time(arguments.to, age_clock(arguments.store, arguments.to))
        arguments.to = datetime.fromtimestamp(min(time_ms / 1000, _LAST_S), UTC)
    group, topic = arguments.group, arguments.topic
    with open_administered(arguments) as (route, view):
        queues = _selected_queues(arguments, view)
        before = next((progress for _, progress in view.consumed(group, topic)), {})
        _make_known(route, group)
        to = arguments.to if arguments.offset is None else max(int(arguments.offset), 0)
        if isinstance(to, int):
            check_reached("--offset", to, topic, [offsets.stop for offsets in queues.values()])
        after: dict[Any, int] = {}
        if arguments.route is not None and arguments.queue is None:
            # A broker of RocketMQ moves a running group only in all queues.
            after |= route.reset_group(group, topic, to)
        else:
            (only,) = route.broker_names() if arguments.route is None else ("",)
            for queue in queues:
                moved = route.endpoint(only or queue.broker_name).call(MoveGroup(group, topic, to, queue[-1]))
                (after[queue],) = moved.values()
        rows = []
        for queue, offsets in queues.items():
            progress = before.get(queue)
            row = _moved_row(arguments, queue[-1], offsets, None if progress is None else progress.offset, after[queue])
            rows.append(named(view.broker_name(queue), row))
            _note_limited(arguments, queue[-1], after[queue])
    output.rows_of(rows)  # the changes are saved
    return 0


def _note_limited(arguments: argparse.Namespace, queue_id: int, after: int) -> None:
    """Say that ``--offset`` is outside of a queue."""
    if arguments.offset is not None and after != int(arguments.offset):
        bound = "end" if after < int(arguments.offset) else "begin"
        complain(f"note: queue {queue_id} has no offset {arguments.offset}: its {bound} {after} is taken")


def _moved_row(arguments: argparse.Namespace, queue_id: int, offsets: range, before: int | None, after: int) -> Row:
    begin = max(before or 0, offsets.start)
    return {
        "group": arguments.group,
        "topic": arguments.topic,
        "queue_id": queue_id,
        "before": before,
        "after": after,
        "skipped": max(0, after - begin),
        "again": max(0, begin - after),
        "lag": queue_lag(after, offsets.start, offsets.stop),
        "dry_run": arguments.dry_run,
    }


def _selected_queues(arguments: argparse.Namespace, view: View[Any]) -> dict[Any, range]:
    """Return the queues in which to move a group, with their offsets; refuse a group or a topic that is unknown."""
    group, topic, queues = arguments.group, arguments.topic, view.queues(arguments.topic)
    if group not in view.groups:
        raise InputError(f"there is no group {group!r}{near(group, view.groups, GROUPS)}")
    if not queues:
        raise InputError(f"topic {topic!r} has no queue{near(topic, view.topics, TOPICS)}")
    ids = select_queues(topic, arguments.queue, {queue[-1] for queue in queues})
    return {queue: offsets for queue, offsets in queues.items() if queue[-1] in ids}


def skip(arguments: argparse.Namespace, output: Output) -> int:
    """Move a group's progress forward: past old messages, to the newest, or to the end; record the skip."""
    from librmq.diagnosis import move_to, plan_skip, set_aside
    from librmq.diagnosis import skip as pass_over

    if arguments.aside is not None and arguments.move is not None:
        raise InputError("expected either --aside or --move")
    if arguments.queues is not None and arguments.move is None:
        raise InputError("--queues: only --move makes a topic with a number of queues")
    if arguments.older_than is not None and arguments.keep is not None:
        raise InputError("expected either --older-than or --keep")
    age_s, newest = arguments.older_than, arguments.keep
    group, topic = arguments.group, arguments.topic
    clock = age_clock(arguments.store, arguments.older_than)
    with open_running(arguments) as broker:
        view = view_of(broker)
        queues = _selected_queues(arguments, view)
        queue_ids = {queue_id for _, queue_id in queues}
        to_end, now_ms = age_s is None and newest is None, clock.now_ms()
        plan = plan_skip(view, group, topic, older_than=age_s, lag_above=newest, to_end=to_end, now_ms=now_ms)
        plan = plan._replace(queues=tuple(queue_skip for queue_skip in plan.queues if queue_skip.queue_id in queue_ids))
        _announce(plan, "would skip" if arguments.dry_run else "skips")
        done = plan
        if plan.queues and arguments.move is not None:
            done = move_to(broker, plan, arguments.move, queues=arguments.queues)
        elif plan.queues:
            done = pass_over(broker, plan) if arguments.aside is None else set_aside(broker, plan, arguments.aside)
    for queue_skip in done.queues:
        row = {"group": group, "topic": topic, **queue_skip._asdict(), "skipped": queue_skip.end - queue_skip.begin}
        output.row({**row, "aside": done.aside, "dry_run": arguments.dry_run})
    return 0


def _announce(plan: Skip, skips: str) -> None:
    """Tell a person what is skipped, before it is."""
    bounds = ((queue_skip.first_timestamp_ms, queue_skip.last_timestamp_ms) for queue_skip in plan.queues)
    times = [time for time in chain(*bounds) if time is not None]
    stored = f", stored from {moment(min(times))} to {moment(max(times))} UTC" if times else ""
    complain(f"note: group {plan.group!r} {skips} {counted(plan.messages, 'message')} of topic {plan.topic!r}{stored}")
