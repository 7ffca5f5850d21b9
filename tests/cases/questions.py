"""``ask``: many queries of a store on standard input, each answered as soon as it is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from librmq.cli._output import Output
from librmq.cli._rows import Row, read_rows, standard_input
from librmq.cli._stores import open_store
from librmq.errors import FilterSyntaxError, InputError
from librmq.filter import TagFilter
from librmq.store import MessageStore
from librmq.store.engine._message_filters import ByTags
from tests.cases import fields

_USUAL_MAX: Final = 64
_LAST: Final = (1 << 63) - 1


def ask(arguments: argparse.Namespace, output: Output) -> int:
    """Answer the queries on standard input, each as soon as it is read."""
    with open_store(arguments, all_in_memory=True) as store:
        for number, question in read_rows(standard_input()):
            try:
                kind = fields.text(question, "type")
                answer = _ANSWERS.get(kind)
                if answer is None:
                    raise InputError(f"type: expected one of {', '.join(_ANSWERS)}, found {kind!r:.80}")
                row = answer(store, question)
            except InputError as error:
                raise InputError(f"line {number}: {error}") from None
            output.row(row)
            output.flush()
    return 0


def _index_query(store: MessageStore, question: Row) -> Row:
    """Return the index entries of a key, in the index's order, and the messages found through them."""
    topic, key = fields.text(question, "topic"), fields.text(question, "key")
    max_messages = fields.int64(question, "max_num", _USUAL_MAX)
    begin_ms, end_ms = fields.int64(question, "begin", 0), fields.int64(question, "end", _LAST)
    messages = store.find_by_key(topic, key, begin_ms, end_ms, max_messages, exact=False)
    return {
        "type": "index_query",
        "topic": topic,
        "key": key,
        "max_num": max_messages,
        "begin": begin_ms,
        "end": end_ms,
        "phys_offsets": store.index.query(topic, key, begin_ms, end_ms, max_messages),
        "index_last_update_timestamp": store.index.end_timestamp_ms,
        "index_last_update_phyoffset": store.index.end_physical_offset,
        "query_message_phys": [message.physical_offset for message in messages],
    }


def _get_message(store: MessageStore, question: Row) -> Row:
    topic, queue_id = fields.text(question, "topic"), fields.int64(question, "queue_id")
    queue_offset, max_messages = fields.int64(question, "offset"), fields.int64(question, "max_msg_nums", 32)
    expression = fields.optional_text(question, "sub_expression")
    result = store.read(topic, queue_id, queue_offset, max_messages, _by_tags(expression))
    return {
        "type": "get_message",
        "topic": topic,
        "queue_id": queue_id,
        "offset": queue_offset,
        "max_msg_nums": max_messages,
        "sub_expression": expression,
        "status": result.status.value,
        "next_begin_offset": result.next_offset,
        "min_offset": result.min_offset,
        "max_offset": result.max_offset,
        "buffer_total_size": result.total_size,
        "queue_offsets": [message.queue_offset for message in result.messages],
    }


def _offset_by_time(store: MessageStore, question: Row) -> Row:
    """Return the queue offsets nearest to times, and the store time of the queue's oldest message, -1 for none."""
    timestamps = question.get("timestamps")
    if not isinstance(timestamps, list):
        raise InputError(f"timestamps: expected a list, found {timestamps!r:.80}")
    times_ms = [fields.int64({"timestamps": time}, "timestamps") for time in timestamps]
    topic, queue_id = fields.text(question, "topic"), fields.int64(question, "queue_id")
    queue = store.queues.get((topic, queue_id))
    entry = queue.entry(queue.min_offset) if queue is not None else None
    earliest = None if entry is None else store.log.store_timestamp_ms(entry.physical_offset, entry.size)
    return {
        "type": "offset_by_time",
        "topic": topic,
        "queue_id": queue_id,
        "results": [[time_ms, store.queue_offset_at(topic, queue_id, time_ms)] for time_ms in times_ms],
        "earliest_message_time": -1 if earliest is None else earliest,
    }


def _by_tags(expression: str | None) -> ByTags | None:
    """Return the filter of a subscription such as ``a || b``, by code alone as in a broker; None selects all."""
    try:
        tags = TagFilter(expression)
    except FilterSyntaxError as error:
        raise InputError(f"sub_expression: {error}") from None
    return None if tags.takes_all else ByTags(tags, exact=False)


_ANSWERS: Final[dict[str, Callable[[MessageStore, Row], Row]]] = {
    "index_query": _index_query,
    "get_message": _get_message,
    "offset_by_time": _offset_by_time,
}
