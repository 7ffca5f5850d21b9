"""``query`` and ``ask``: searches by key, id, queue offset and time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from librmq.cli.input import age_clock, field, parse_time, read_rows, standard_input
from librmq.cli.output import Output, complain, whole_number
from librmq.cli.rows import get_message_row, index_query_row, message_row, offset_by_time_row
from librmq.cli.selection import check_id
from librmq.cli.stores import open_store
from librmq.cli.unknown_names import note_topic_of
from librmq.errors import FilterSyntaxError, InputError
from librmq.filter.filters import TagFilter
from librmq.message.message import StoredMessage
from librmq.store import MessageStore
from librmq.store.engine.message_filters import ByTags

_LAST: Final = (1 << 63) - 1
_USUAL_MAX: Final = 64


def query(arguments: argparse.Namespace, output: Output) -> int:
    """Print the messages with a key, or with an id."""
    by_key = arguments.topic is not None or arguments.key is not None
    if by_key == (arguments.id is not None):
        raise InputError("expected either --topic and --key, or --id")
    clock = age_clock(arguments.store, arguments.begin, arguments.end)
    if by_key:
        if not arguments.topic or not arguments.key:
            raise InputError("a search by key needs both --topic and --key")
        begin = 0 if arguments.begin is None else parse_time(arguments.begin, clock)
        end = _LAST if arguments.end is None else parse_time(arguments.end, clock)
        row_limit = whole_number("--max", arguments.max)
        with open_store(arguments) as store:
            messages = store.find_by_key(arguments.topic, arguments.key, begin, end, row_limit, exact=False)
            _print_messages(store, messages, output)
            if len(messages) >= row_limit:
                complain(f"note: {len(messages)} messages, as many as --max allows; there may be more")
            if output.is_on_terminal:  # programs get no line if nothing is found
                note_topic_of(store, arguments.topic, output)
    else:
        check_id(arguments.id)
        with open_store(arguments) as store:
            _print_messages(store, store.find_by_id(arguments.id), output)
    return 0


def _print_messages(store: MessageStore, messages: list[StoredMessage], output: Output) -> None:
    for message in messages:
        output.row(message_row(message, store.levels))


# ---------------------------------------------------------------------------------------------------- queries


def ask(arguments: argparse.Namespace, output: Output) -> int:
    """Answer the queries on standard input, each as soon as it is read."""
    with open_store(arguments, all_in_memory=True) as store:
        for number, question in read_rows(standard_input()):
            try:
                kind = field(question, "type", str)
                answer = _ANSWERS.get(kind)
                if answer is None:
                    raise InputError(f"type: expected one of {', '.join(_ANSWERS)}, found {kind!r:.80}")
                row = answer(store, question)
            except InputError as error:
                raise InputError(f"line {number}: {error}") from None
            output.row(row)
            output.flush()
    return 0


def _index_query(store: MessageStore, question: dict[str, Any]) -> dict[str, Any]:
    return index_query_row(
        store,
        field(question, "topic", str),
        field(question, "key", str),
        field(question, "max_num", int, _USUAL_MAX),
        field(question, "begin", int, 0),
        field(question, "end", int, _LAST),
    )


def _get_message(store: MessageStore, question: dict[str, Any]) -> dict[str, Any]:
    topic = field(question, "topic", str)
    queue_id = field(question, "queue_id", int)
    queue_offset = field(question, "offset", int)
    max_messages = field(question, "max_msg_nums", int, 32)
    expression = field(question, "sub_expression", str, None)
    result = store.read(topic, queue_id, queue_offset, max_messages, _by_tags(expression))
    return get_message_row(topic, queue_id, queue_offset, max_messages, expression, result)


def _offset_by_time(store: MessageStore, question: dict[str, Any]) -> dict[str, Any]:
    timestamps = field(question, "timestamps", list)
    times = [field({"timestamps": time}, "timestamps", int) for time in timestamps]
    return offset_by_time_row(store, field(question, "topic", str), field(question, "queue_id", int), times)


def _by_tags(expression: str | None) -> ByTags | None:
    """Return the filter of a subscription such as ``a || b``, by code alone as in a broker; None selects all."""
    try:
        tags = TagFilter(expression)
    except FilterSyntaxError as error:
        raise InputError(f"sub_expression: {error}") from None
    return None if tags.takes_all else ByTags(tags, exact=False)


_ANSWERS: Final[dict[str, Callable[[MessageStore, dict[str, Any]], dict[str, Any]]]] = {
    "index_query": _index_query,
    "get_message": _get_message,
    "offset_by_time": _offset_by_time,
}
