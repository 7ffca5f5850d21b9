"""``topic`` and ``group``: create, change and delete topics and consumer groups."""

from __future__ import annotations

import argparse
from typing import Any, Final

from librmq.cli.output import Output
from librmq.cli.stores import open_to_change
from librmq.cli.unknown_names import GROUPS, TOPICS, near
from librmq.diagnosis.view import StoreView
from librmq.diagnosis.waiting_retries import move_retries, waiting_retries
from librmq.errors import InputError
from librmq.message.topics import is_system_topic, validate_client_topic, validate_group
from librmq.store import MessageStore
from librmq.store.format.broker_tables import MOST_QUEUES, BrokerTables, group_row, topic_row, with_topic_type

_QUEUES: Final = 8
_NAMED: Final = 10
"""The most retries that are named."""
_PERMISSIONS: Final = {"rw": 6, "r": 4, "w": 2}


def topic(arguments: argparse.Namespace, output: Output) -> int:
    """Create a topic, add queues, change its permission, or delete it."""
    name = arguments.topic
    if is_system_topic(name):
        raise InputError(f"topic {name!r} is the broker's own: it can't be created, changed or deleted")
    with open_to_change(arguments) as (store, tables):
        old = tables.topics.rows.get(name)
        change = {"create": _create, "grow": _grow, "permit": _permit, "delete": _delete}[arguments.action]
        row = {"topic": name, "action": arguments.action, **change(store, tables, name, old, arguments)}
    output.row({**row, "dry_run": arguments.dry_run})
    return 0


def _create(
    store: MessageStore, tables: BrokerTables, name: str, old: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    if old is not None:
        raise InputError(f"topic {name!r} exists with {old.get('readQueueNums')} queues: add queues by `topic grow`")
    validate_client_topic(name)
    read = _queue_count("--queues", arguments.queues, _QUEUES)
    write = _queue_count("--write-queues", arguments.write_queues, read)
    permission = arguments.permission or "rw"
    row, kind = topic_row(name, read, write, _PERMISSIONS[permission]), arguments.type
    tables.topics.set(name, row if kind is None else with_topic_type(row, kind))
    type_field = {} if kind is None else {"message_type": kind}
    return {"read_queues": read, "write_queues": write, "permission": permission, **type_field}


def _grow(
    store: MessageStore, tables: BrokerTables, name: str, old: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    if old is None:
        raise _missing(name, tables)
    before = old.get("readQueueNums", 0)
    read = _queue_count("--queues", arguments.queues, None)
    write = _queue_count("--write-queues", arguments.write_queues, read)
    if read < before or write < old.get("writeQueueNums", 0):
        raise InputError(f"--queues: the topic has {before} queues with messages: expected more, found {read}")
    tables.topics.set(name, {**old, "readQueueNums": read, "writeQueueNums": write})
    return {
        "read_queues": read,
        "write_queues": write,
        "before": before,
        "note": "stored messages stay in their queues; a key that selects its queue by hash can select another one "
        "now, so old and new messages of a key can be out of order",
    }


def _permit(
    store: MessageStore, tables: BrokerTables, name: str, old: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    if old is None:
        raise _missing(name, tables)
    if arguments.permission is None:
        raise InputError("--permission is missing: rw, r or w")
    tables.topics.set(name, {**old, "perm": _PERMISSIONS[arguments.permission]})
    names = {value: text for text, value in _PERMISSIONS.items()}
    return {"permission": arguments.permission, "before": names.get(old.get("perm", 0), str(old.get("perm")))}


def _delete(
    store: MessageStore, tables: BrokerTables, name: str, old: dict[str, Any] | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    if old is None:
        raise _missing(name, tables, TOPICS)
    tables.topics.remove(name)
    left = sum(queue.max_offset - queue.min_offset for (topic, _), queue in store.queues.items() if topic == name)
    groups = sorted(group for group, topic in StoreView.over(store, tables).progress if topic == name)
    return {"messages": left, "groups": groups, "note": "its messages stay in the log until retention deletes them"}


def _missing(name: str, tables: BrokerTables, otherwise: str = ": create it by `topic create`") -> InputError:
    return InputError(f"topic {name!r} does not exist{near(name, tables.topics.rows, otherwise)}")


def _queue_count(name: str, text: str | None, default: int | None) -> int:
    if text is None:
        if default is None:
            raise InputError(f"{name} is missing")
        return default
    if text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= MOST_QUEUES:
        return int(text)
    raise InputError(f"{name}: expected a whole number from 1 to {MOST_QUEUES}, found {text!r:.80}")


def group(arguments: argparse.Namespace, output: Output) -> int:
    """Create a consumer group or change its retries, copy its progress to a new group, or delete it."""
    name, action = arguments.group, arguments.action
    if action == "create":
        validate_group(name)
    with open_to_change(arguments) as (store, tables):
        groups = StoreView.over(store, tables).groups
        if action != "create" and name not in groups:
            raise InputError(f"there is no group {name!r}{near(name, groups, GROUPS)}")
        row: dict[str, Any] = {"group": name, "action": action}
        if action == "create":
            old = tables.groups.rows.get(name) or group_row(name)
            retries = old["retryMaxTimes"] if arguments.retries is None else _retries(arguments.retries)
            tables.groups.set(name, {**old, "retryMaxTimes": retries})
            row["retries"] = retries
        elif action == "copy":
            row |= _copy(tables, name, arguments.to, groups)
            row |= _retries_of(store, tables, name, arguments)
        else:
            row["topics"] = _delete_group(tables, name)
    output.row({**row, "dry_run": arguments.dry_run})
    return 0


def _retries(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 8:
        return int(text)
    raise InputError(f"--retries: expected a whole number, found {text!r:.80}")


def _copy(tables: BrokerTables, name: str, new: str | None, groups: tuple[str, ...]) -> dict[str, Any]:
    """Create a group with the progress of another one."""
    if new is None:
        raise InputError("copy: name the new group by --to")
    validate_group(new)
    if new in groups:
        raise InputError(f"--to: group {new!r} exists; expected a new name")
    old = tables.groups.rows.get(name) or group_row(name)
    tables.groups.set(new, {**old, "groupName": new})
    topics = []
    for key, offsets in sorted(tables.offsets.rows.items()):
        topic, _, owner = key.rpartition("@")
        if owner == name and topic != f"%RETRY%{name}":
            tables.offsets.set(f"{topic}@{new}", dict(offsets))
            topics.append(topic)
    return {"to": new, "topics": topics}


def _retries_of(store: MessageStore, tables: BrokerTables, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Move the waiting retries of a group if that is wanted; else return which stay with the old name."""
    if arguments.with_retries:
        moved, delayed = move_retries(store, tables, name, arguments.to)
        fields: dict[str, Any] = {"retries_moved": moved, "retries_left": 0}
        if delayed:
            fields["note"] = f"{delayed} retries also come to group {name} when their delay ends: do not start it again"
        return fields
    retries = list(waiting_retries(store, tables, name))
    if not retries:
        return {"retries_left": 0}
    return {
        "retries_left": len(retries),
        "retries": [message.message_id for message in retries[:_NAMED]],
        "cut": len(retries) > _NAMED,
        "note": f"{len(retries)} retries of group {name} wait: move them too by --with-retries, or "
        "let an instance of it run until they are consumed",
    }


def _delete_group(tables: BrokerTables, name: str) -> list[str]:
    """Delete a group's row and its progress; return the topics of the progress."""
    if name in tables.groups.rows:
        tables.groups.remove(name)
    keys = [key for key in tables.offsets.rows if key.rpartition("@")[2] == name]
    for key in keys:
        tables.offsets.remove(key)
    return sorted(key.rpartition("@")[0] for key in keys)
