"""``filter``, ``bloom``, ``allocate``: cases on standard input, each answered without a store."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

from librmq.cli._output import Output
from librmq.cli._rows import Row, read_rows, standard_input
from librmq.cli.commands.filters import read_case
from librmq.client import allocation
from librmq.client.queue_selectors import select_by_hash
from librmq.errors import (
    AllocationError,
    ConfigError,
    FilterError,
    FilterEvaluationError,
    FilterSyntaxError,
    InputError,
)
from librmq.filter import BloomFilter
from librmq.filter.filters import compiled
from librmq.filter.parser import Dialect
from librmq.java.lang import long_hash
from librmq.message.message import Message, MessageQueue
from tests.cases import fields

# ---- filters


def answer_case(row: object, dialect: Dialect = "4.9", *, strict: bool = False) -> dict[str, Any]:
    """Return a case ``{expr, props}`` with its ``result`` and ``match``.

    The result is true, false, null for UNKNOWN, or the name of an error. With ``strict``, an expression with text after
    it does not compile.

    Raises:
        FilterError: The row is no case.
    """
    expression, properties = read_case(row)
    assert isinstance(row, dict)
    answer: dict[str, Any] = {name: row[name] for name in ("expr", "props") if name in row}
    try:
        sql = compiled(expression, dialect)
        if strict:
            sql.selector.refuse_rest()
    except FilterSyntaxError:
        return answer | {"result": "PARSE_ERROR", "match": None}
    try:
        result: bool | str | None = sql.evaluate(properties)
    except FilterEvaluationError as error:
        result = f"EVAL_ERROR:{error.java_name}"
    return answer | {"result": result, "match": result is True}


def answer_bloom(row: object) -> dict[str, Any]:
    """Return ``{k, m, positions: [{str, bits}]}`` for ``{f, n, strings}``.

    Raises:
        ConfigError: The row is no such case.
    """
    if not isinstance(row, dict):
        raise ConfigError("expected an object with f, n and strings")
    f, n = row.get("f"), row.get("n")
    if isinstance(f, bool) or not isinstance(f, int | float) or type(n) is not int:
        raise ConfigError("f: expected a number of percent; n: expected an integer")
    bloom = BloomFilter(f, n)
    answer: dict[str, Any] = {"k": bloom.hash_count, "m": bloom.bit_count}
    if "strings" in row:
        strings = row["strings"]
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise ConfigError("strings: expected a list of strings")
        answer["positions"] = [{"str": text, "bits": list(bloom.positions(text))} for text in strings]
    return answer


T = TypeVar("T")


def filter_(arguments: argparse.Namespace, output: Output) -> int:
    """Evaluate the cases on standard input."""
    return _answer_rows(lambda case: answer_case(case, arguments.dialect, strict=arguments.strict), output.row, output)


def bloom(arguments: argparse.Namespace, output: Output) -> int:
    """Print the bit positions of strings for each filter on standard input."""
    return _answer_rows(answer_bloom, output.row, output)


def _answer_rows(answer: Callable[[Row], T], write: Callable[[T], None], output: Output) -> int:
    for number, case in read_rows(standard_input()):
        try:
            result = answer(case)
        except (FilterError, ConfigError, InputError) as error:
            raise InputError(f"line {number}: {error}") from None
        write(result)
        output.flush()
    return 0


# ---- allocation of queues

_STRATEGIES: Final = (
    "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, CONFIG, MACHINE_ROOM and, around another one, MACHINE_ROOM_NEARBY"
)
_SELECTORS: Final = ("HASH", "MACHINE_ROOM")
_INPUTS: Final = ("virtual_nodes", "consumer_idcs", "config", "inner", "cid", "mqs", "cids", "arg_type", "arg")


def allocate(arguments: argparse.Namespace, output: Output) -> int:
    """Answer the cases on standard input."""
    return _answer_rows(_allocated, output.row, output)


def _allocated(row: Row) -> Row:
    """Return a case with its ``result`` or ``error_type``.

    Raises:
        InputError: The row is no case.
    """
    kind = "strategy" if "strategy" in row else "selector"
    if kind not in row or ("strategy" in row and "selector" in row):
        raise InputError("expected a strategy or a selector")
    answer = {name: row[name] for name in (kind, *_INPUTS) if name in row}
    try:
        return answer | {"result": _shares(row) if kind == "strategy" else _selected(row)}
    except AllocationError as error:
        return answer | {"error_type": error.java_name}


def _shares(row: Row) -> list[list[Any]] | None:
    client_id = "" if _required(row, "cid") is None else fields.text(row, "cid")
    queues, clients = _queues(row, "mqs"), _texts(row, "cids")
    name = fields.text(row, "strategy")
    if name == "CONFIG" and _required(row, "config") is None:
        return None
    return [list(queue) for queue in _strategy(name, row)(client_id, queues, clients)]


def _strategy(name: str, row: Row) -> allocation.AllocationStrategy:
    match name:
        case "AVG":
            return allocation.allocate_averagely
        case "AVG_BY_CIRCLE":
            return allocation.allocate_averagely_by_circle
        case "CONSISTENT_HASH":
            nodes = fields.int64(row, "virtual_nodes", 10)
            if nodes < 0:  # refused before any queue is read
                raise AllocationError(f"virtual_nodes: expected 0 or more, found {nodes}")
            return partial(allocation.allocate_consistent_hash, virtual_nodes=nodes)
        case "CONFIG":
            queues = _queues(row, "config")
            return _fail_on_null if row["config"] is None else allocation.allocate_by_config(queues)
        case "MACHINE_ROOM":
            rooms = _texts(row, "consumer_idcs")
            return _by_unknown_rooms if row["consumer_idcs"] is None else allocation.allocate_by_machine_room(rooms)
        case "MACHINE_ROOM_NEARBY" if fields.text(row, "inner") != name:
            inner = _strategy(row["inner"], row)
            return allocation.allocate_machine_room_nearby(
                inner, lambda queue: allocation.room_before_dash(queue.broker_name), allocation.room_before_dash
            )
    raise InputError(f"unknown strategy {name!r:.80}; known are {_STRATEGIES}")


def _fail_on_null(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Fail as RocketMQ 4.9 does on a list that is null."""
    raise AllocationError("null for a list", "NullPointerException")


def _by_unknown_rooms(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Allocate by rooms that are null: RocketMQ fails only at the first queue with a room."""
    rooms = {queue.broker_name.partition("@")[0] for queue in queues}
    if allocation.allocate_by_machine_room(rooms)(client_id, queues, [client_id] if client_id in clients else clients):
        return _fail_on_null(client_id, queues, clients)
    return []


def _selected(row: Row) -> list[Any] | None:
    queues = _queues(row, "mqs")
    name, kind, key = fields.text(row, "selector"), fields.text(row, "arg_type"), _required(row, "arg")
    if name not in _SELECTORS:
        raise InputError(f"unknown selector {name!r:.80}; known are {', '.join(_SELECTORS)}")
    key = _key(kind, row, key)
    if row["mqs"] is None and name == "HASH":
        raise AllocationError("null for queues", "NullPointerException")
    if name == "MACHINE_ROOM":  # RocketMQ 4.9 chooses nothing
        return None
    return list(select_by_hash(queues, _ANY, key))


_ANY: Final = Message("any", b"")
_SPECIAL_DOUBLES: Final = ("NaN", "Infinity", "-Infinity")


def _key(kind: str, row: Row, key: object) -> object:
    """Return the key in the type that the selector needs."""
    match kind:
        case "null" if key is None:
            return None
        case "String" if isinstance(key, str):
            return fields.text(row, "arg")
        case "Boolean" if isinstance(key, bool):
            return key
        case "Integer" if type(key) is int and -(1 << 31) <= key < 1 << 31:
            return key
        case "Long" if type(key) is int and -(1 << 63) <= key < 1 << 63:
            return long_hash(key)
        case "Double" if key in _SPECIAL_DOUBLES or (isinstance(key, int | float) and not isinstance(key, bool)):
            try:
                return float(cast("str | float", key))
            except OverflowError:
                pass
    raise InputError(f"arg: expected a value of arg_type {kind!r:.80}, found {json.dumps(key)[:80]}")


def _required(row: Row, name: str) -> Any:
    if name not in row:
        raise InputError(f"{name} is missing")
    return row[name]


def _texts(row: Row, name: str) -> list[str]:
    """Return a list of texts; null is an empty one."""
    values = _list(row, name)
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"{name}: expected strings, found {json.dumps(value)[:80]}")
    return values


def _queues(row: Row, name: str) -> Sequence[MessageQueue]:
    """Return a list of ``[topic, broker name, queue id]`` as queues; null is an empty one."""
    queues = []
    for value in _list(row, name):
        match value:
            case [str(topic), str(broker), int(number)] if (
                not isinstance(number, bool) and -(1 << 31) <= number < 1 << 31
            ):
                queues.append(MessageQueue(topic, broker, number))
            case _:
                raise InputError(f"{name}: expected [topic, broker name, queue id], found {json.dumps(value)[:80]}")
    return queues


def _list(row: Row, name: str) -> list[Any]:
    values = _required(row, name)
    if values is not None and not isinstance(values, list):
        raise InputError(f"{name}: expected a list, found {json.dumps(values)[:80]}")
    return values or []
