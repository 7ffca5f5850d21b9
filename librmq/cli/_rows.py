"""Rows that commands print; other tools rely on their names, values and order."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from librmq.cli._json_rows import refuse_constant
from librmq.cli._output import PlainText, complain
from librmq.consumequeue_ext import is_ext_address
from librmq.errors import BodyCompressionError, MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage, record
from librmq.message.batch import inner_messages, is_batch
from librmq.message.ids import decode_host, format_host
from librmq.message.properties import PropertyName, decode_properties
from librmq.message.properties import tags_code as tags_code_of
from librmq.message.topics import SystemTopic
from librmq.store.engine.derivation import derived_tags_code

if TYPE_CHECKING:
    from librmq.consumequeue import ConsumeQueue
    from librmq.files import Damage
    from librmq.store import Gap, MessageStore, Snapshot, Verdict


Row = dict[str, Any]


def named(broker_name: str, row: Row) -> Row:
    """Return a row with the name of its broker, if there is one."""
    return row | {"broker": broker_name} if broker_name else row


def message_row(
    message: StoredMessage, levels: DelayLevels, physical_offset: int | None = None, *, has_bodies: bool = True
) -> Row:
    """Return the row of a record. ``physical_offset`` is its place, if that is not the one in the record.

    ``levels`` give the delivery time of a delayed message.
    """
    # Each field is looked for once, because commands print millions of records.
    raw, body_crc = message.raw, message.body_crc
    body_at, body_end, topic_at, topic_end, properties_at, end = message.frame
    (
        size, magic, _, queue_id, flag, queue_offset, place, sys_flag, born_ms, born_host, stored_ms, store_host,
        reconsume_times, prepared, _,
    ) = record.HEADERS[raw[record.SYS_FLAG_AT + 3] & record.HOSTS_V6].unpack_from(raw)  # fmt: skip
    topic, stored_body = java_decode(raw[topic_at:topic_end]), raw[body_at:body_end]
    properties_text = java_decode(raw[properties_at:end])
    properties = decode_properties(properties_text)
    is_delayed = topic == SystemTopic.SCHEDULE
    tags_code = derived_tags_code(message, levels) if is_delayed else _tags_code(properties.get(PropertyName.TAGS))
    is_compressed = sys_flag & record.COMPRESSED
    row: Row = {
        "type": "message",
        "phys": place if physical_offset is None else physical_offset,
        "size": size,
        "crc_ok": not stored_body or record.body_checksum(stored_body) == body_crc,
        "magic": f"{magic:08x}",
        "body_crc": body_crc,
        "topic": topic,
        "queue_id": queue_id,
        "flag": flag,
        "queue_offset": queue_offset,
        "commit_log_offset": place,
        "sys_flag": sys_flag,
        "born_timestamp": born_ms,
        "born_host": _host(born_host),
        "store_timestamp": stored_ms,
        "store_host": _host(store_host),
        "reconsume_times": reconsume_times,
        "prepared_transaction_offset": prepared,
        "msg_id": (store_host + raw[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8]).hex().upper(),
    }
    if has_bodies:
        row["body_b64"] = _base64(_body(message) if is_compressed else stored_body)
    if sys_flag & record.INNER_BATCH and is_batch(message):
        row["inner_messages"] = _count_inner(message)
    if is_compressed and has_bodies:
        row["stored_body_b64"] = _base64(stored_body)
    row |= {
        "properties": dict(sorted(properties.items())),
        "properties_raw": properties_text,
        "dispatch_tags_code": tags_code,
        "dispatch_tags_code_hex": _hex(tags_code),
        "dispatch_keys": properties.get(PropertyName.KEYS) if properties_text else "",
        "dispatch_uniq_key": properties.get(PropertyName.UNIQUE_KEY),
        "raw_sha1": hashlib.sha1(raw, usedforsecurity=False).hexdigest(),
    }
    return row


_tags_code: Final = lru_cache(1 << 10)(tags_code_of)


@lru_cache(1 << 10)
def _host(raw: bytes) -> str:
    return format_host(decode_host(raw))


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
    return PlainText(base64.b64encode(data), "ascii") if data else None


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


def shown_row(message: StoredMessage, levels: DelayLevels, form: BodyForm) -> dict[str, Any]:
    """Return the row of a message with its ``body`` in a form; null for one that cannot be decompressed."""
    row = message_row(message, levels, has_bodies=False)
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
