"""Rows that commands print; other tools rely on their names, values and order."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from librmq.cli._json_rows import refuse_constant
from librmq.cli._output import complain
from librmq.consumequeue_ext import is_ext_address
from librmq.errors import BodyCompressionError, MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage, record
from librmq.message.batch import inner_messages, is_batch
from librmq.message.ids import format_host
from librmq.message.properties import PropertyName
from librmq.store.engine.derivation import derived_tags_code

if TYPE_CHECKING:
    from librmq.consumequeue import ConsumeQueue
    from librmq.files import Damage
    from librmq.store import Gap, MessageStore, Snapshot, Verdict


Row = dict[str, Any]


def named(broker_name: str, row: Row) -> Row:
    """Return a row with the name of its broker, if there is one."""
    return row | {"broker": broker_name} if broker_name else row


def message_row(message: StoredMessage, levels: DelayLevels, physical_offset: int | None = None) -> Row:
    """Return the row of a record. ``physical_offset`` is its place, if that is not the one in the record.

    ``levels`` give the delivery time of a delayed message.
    """
    properties, properties_raw = message.properties, message.properties_raw
    tags_code = derived_tags_code(message, levels)
    row: Row = {
        "type": "message",
        "phys": message.physical_offset if physical_offset is None else physical_offset,
        "size": message.size,
        "crc_ok": message.crc_ok,
        "magic": f"{message.magic:08x}",
        "body_crc": message.body_crc,
        "topic": message.topic,
        "queue_id": message.queue_id,
        "flag": message.flag,
        "queue_offset": message.queue_offset,
        "commit_log_offset": message.physical_offset,
        "sys_flag": message.sys_flag,
        "born_timestamp": message.born_timestamp_ms,
        "born_host": format_host(message.born_host),
        "store_timestamp": message.store_timestamp_ms,
        "store_host": format_host(message.store_host),
        "reconsume_times": message.reconsume_times,
        "prepared_transaction_offset": message.prepared_transaction_offset,
        "msg_id": message.offset_id,
        "body_b64": _base64(_body(message)),
    }
    if is_batch(message):
        row["inner_messages"] = _count_inner(message)
    if message.sys_flag & record.COMPRESSED:
        row["stored_body_b64"] = _base64(message.stored_body)
    row |= {
        "properties": dict(sorted(properties.items())),
        "properties_raw": java_decode(properties_raw),
        "dispatch_tags_code": tags_code,
        "dispatch_tags_code_hex": _hex(tags_code),
        "dispatch_keys": properties.get(PropertyName.KEYS) if properties_raw else "",
        "dispatch_uniq_key": message.unique_key,
        "raw_sha1": hashlib.sha1(message.raw, usedforsecurity=False).hexdigest(),
    }
    return row


def _count_inner(message: StoredMessage) -> int | None:
    """Return the number of messages in a batch of 5.x, None if it can't be opened."""
    try:
        return len(inner_messages(message))
    except RecordError:
        return None


def _body(message: StoredMessage) -> bytes | None:
    """Return the decompressed body, None if it cannot be decompressed."""
    try:
        return message.body
    except BodyCompressionError:
        return None
    except MissingExtraError as error:
        _hint(str(error))
        return None


@cache
def _hint(text: str) -> None:
    """Print a hint once, however many messages it concerns."""
    complain(f"hint: {text}")


def _base64(data: bytes | None) -> str | None:
    return base64.b64encode(data).decode("ascii") if data else None


def _hex(tags_code: int) -> str:
    return f"{tags_code & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def blank_row(physical_offset: int, size: int) -> Row:
    """Return the row of the blank at the end of a log file."""
    return {"type": "blank", "phys": physical_offset, "size": size}


# ---------------------------------------------------------------------------------------------------- queues


def queue_row(topic: str, queue_id: int, queue: ConsumeQueue) -> Row:
    """Return the row of a queue with its offsets."""
    return {
        "topic": topic,
        "queue_id": queue_id,
        "min_offset": queue.min_offset,
        "max_offset": queue.max_offset,
        "max_physic_offset": queue.max_physic_offset,
    }


def entry_rows(topic: str, queue_id: int, queue: ConsumeQueue) -> Iterator[Row]:
    """Yield the rows of a queue's entries, with their extension units.

    Raises:
        CorruptionError: An entry is damaged; the rows before it have been yielded.
    """
    for first, block in queue.blocks():
        for queue_offset, (physical_offset, size, tags_code) in enumerate(block.tolist(), first):
            row = {
                "type": "cq",
                "topic": topic,
                "queue_id": queue_id,
                "offset": queue_offset,
                "phys": physical_offset,
                "size": size,
                "tags_code": tags_code,
                "tags_code_hex": _hex(tags_code),
            }
            if queue.ext is not None and is_ext_address(tags_code):
                unit = queue.ext.get(tags_code)
                row["ext"] = {
                    "size": unit.size,
                    "tags_code": unit.tags_code,
                    "msg_store_time": unit.store_timestamp_ms,
                    "bitmap_hex": unit.bitmap.hex() if unit.bitmap else None,
                }
            yield row


# ---------------------------------------------------------------------------------------------- whole stores


def store_row(store: MessageStore, phase: str) -> Row:
    """Return the row of a store with its offsets and times."""
    queues = sorted(store.queues.items())
    return {
        "type": "store",
        "phase": phase,
        "min_phy_offset": store.log.begin,
        "max_phy_offset": store.log.end,
        "flushed_where": store.log.end,
        "checkpoint_physic_ts": store.checkpoint.physic_timestamp_ms,
        "checkpoint_logics_ts": store.checkpoint.logics_timestamp_ms,
        "checkpoint_index_ts": store.checkpoint.index_timestamp_ms,
        "queues": [queue_row(topic, queue_id, queue) for (topic, queue_id), queue in queues],
        "topic_queue_table": dict(
            sorted((f"{topic}-{queue_id}", queue.max_offset) for (topic, queue_id), queue in queues)
        ),
    }


def cut_row(store: str, cut: Damage) -> Row:
    """Return the row of a cut or a change by recovery."""
    return {
        "file": os.path.relpath(cut.file, store),
        "offset": cut.offset,
        "bytes": cut.bytes,
        "why": cut.what,
    }


def gap_row(store: str, gap: Gap) -> Row:
    """Return the row of a gap between sound records."""
    return {
        "type": "gap",
        "phys": gap.physical_offset,
        "size": gap.size,
        "file": os.path.relpath(gap.file, store),
        "what": gap.what,
    }


def snapshot_row(copy: Snapshot) -> Row:
    """Return the row of a snapshot, or of a store restored from one."""
    return {
        "type": "snapshot",
        "path": copy.path,
        "min_phy_offset": copy.begin,
        "max_phy_offset": copy.end,
        "copied_files": copy.copied_files,
        "linked_files": copy.linked_files,
        "changed": [cut_row(copy.path, change) for change in copy.changed],
    }


def verify_row(store: str, verdict: Verdict) -> Row:
    """Return the row of a verdict about a store."""
    return {
        "type": "verify",
        "sound": verdict.sound,
        "damage": [
            {
                "file": os.path.relpath(damage.file, store),
                "offset": damage.offset,
                "kind": damage.kind,
                "what": damage.what,
            }
            for damage in verdict.damage
        ],
    }


# ---- bodies

BodyForm = Literal["text", "json", "hex", "base64", "none"]

_OF_THE_BODY: Final = ("body_b64", "stored_body_b64")


def shown_row(message: StoredMessage, levels: DelayLevels, form: BodyForm) -> dict[str, Any]:
    """Return the row of a message with its ``body`` in a form; null for one that cannot be decompressed."""
    row = {name: value for name, value in message_row(message, levels).items() if name not in _OF_THE_BODY}
    row["body"] = None if form == "none" else _body_as(message, form)
    return row


def _body_as(message: StoredMessage, form: BodyForm) -> object:
    try:
        body = message.body
    except BodyCompressionError:
        return None
    if form == "hex":
        return body.hex()
    if form == "base64":
        return base64.b64encode(body).decode("ascii")
    text = body.decode(errors="backslashreplace")
    if form == "json":
        try:
            return json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            return text
    return text


def _finite(text: str) -> float:
    """Return a number; one beyond the largest float has no JSON form, so that its body stays text."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number
