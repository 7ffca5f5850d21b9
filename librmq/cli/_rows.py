"""Rows that commands print; other tools rely on their names, values and order."""

from __future__ import annotations

import hashlib
import json
import math
import os
from binascii import b2a_base64
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final, Literal

from librmq.cli._json_rows import refuse_constant
from librmq.cli._output import complain, to_json
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
    from librmq.store.engine.store_parts import QueueState


Row = dict[str, Any]


def named(broker_name: str, row: Row) -> Row:
    """Return a row with the name of its broker, if there is one."""
    return row | {"broker": broker_name} if broker_name else row


BodyForm = Literal["text", "json", "hex", "base64", "none"]
_SCHEDULE: Final = SystemTopic.SCHEDULE.encode()
_LONG_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def message_line(
    raw: bytes,
    levels: DelayLevels,
    physical_offset: int | None = None,
    form: BodyForm | None = None,
    *,
    is_sound: bool = True,
) -> str:
    """Return the row of a record as JSON. ``physical_offset`` is its place, if that is not the one in the record.

    With ``form`` the row ends with the ``body`` in that form, and has no Base64. ``levels`` give the delivery time of a
    delayed message. ``is_sound`` is what the caller, or the walk that gave the record, found of the body's checksum.
    """
    # Commands print millions of records: a row that is text from the start takes half the time of a dict's.
    (
        size, magic, checksum, queue_id, flag, queue_offset, place, sys_flag, born_ms, born_host, stored_ms, store_host,
        reconsume_times, prepared, _,
    ) = record.HEADERS[raw[record.SYS_FLAG_AT + 3] & record.HOSTS_V6].unpack_from(raw)  # fmt: skip
    body_at, body_end, topic_at, topic_end, properties_at, end = record.frame(raw, 0, len(raw))
    body, topic = raw[body_at:body_end], raw[topic_at:topic_end]
    if sys_flag & (record.COMPRESSED | record.INNER_BATCH):
        bodies = _unusual_bodies(StoredMessage(raw), is_shown=form is not None)
    else:
        bodies = f'"body_b64":{_base64(body)},' if form is None else ""
    shown = "" if form is None else f',"body":{_body_as(body, sys_flag, form)}'
    delivery = derived_tags_code(StoredMessage(raw), levels) if topic == _SCHEDULE else None
    return (
        f'{{"type":"message","phys":{place if physical_offset is None else physical_offset},"size":{size},'
        f'"crc_ok":{"true" if is_sound else "false"},"magic":"{magic:08x}",'
        f'"body_crc":{(checksum ^ 0x80000000) - 0x80000000},"topic":{_json_text(topic)},"queue_id":{queue_id},'
        f'"flag":{flag},"queue_offset":{queue_offset},"commit_log_offset":{place},"sys_flag":{sys_flag},'
        f'"born_timestamp":{born_ms},"born_host":"{_host(born_host)}","store_timestamp":{stored_ms},'
        f'"store_host":"{_host(store_host)}","reconsume_times":{reconsume_times},'
        f'"prepared_transaction_offset":{prepared},"msg_id":"{_hex_host(store_host)}{place & _LONG_MASK:016X}",'
        f"{bodies}{_property_fields(raw[properties_at:end], delivery)},"
        f'"raw_sha1":"{hashlib.sha1(raw, usedforsecurity=False).hexdigest()}"{shown}}}'
    )


@lru_cache(1 << 10)
def _json_text(raw: bytes) -> str:
    return encode_basestring(java_decode(raw))


@lru_cache(1 << 10)
def _host(raw: bytes) -> str:
    return format_host(decode_host(raw))


@lru_cache(1 << 10)
def _hex_host(raw: bytes) -> str:
    return raw.hex().upper()


_PLAIN: Final = bytes(range(0x20, 0x7F)).translate(None, b'"\\')
"""What JSON does not escape."""
_SEPARATORS: Final = frozenset(b"\2".join([b"\1"] * count) for count in range(1, 65))
"""What is between the names and values of properties, if each name has a value."""


def _property_fields(raw: bytes, delivery: int | None) -> str:
    """Return the fields of stored properties, and of what they define; ``delivery`` replaces the code of the tag."""
    text, parts = java_decode(raw), [""]
    if raw.translate(None, _PLAIN) in _SEPARATORS:
        parts = text.replace("\2", "\1").split("\1")
    if "" not in parts:
        names, values = tuple(parts[::2]), parts[1::2]
        escaped, text = values, text.replace("\1", "\\u0001").replace("\2", "\\u0002")
    else:  # a part is missing, empty, or must be escaped
        properties = decode_properties(text)
        names, values = tuple(properties), list(properties.values())
        escaped, text = [_escaped(value) for value in values], _escaped(text)
    fill, tag_at = _property_format(names, "null" if raw else '""')
    return fill(*escaped, text, _codes(None if tag_at is None else values[tag_at], delivery))


def _escaped(text: str) -> str:
    return encode_basestring(text)[1:-1]


_BRACES: Final = {ord("{"): "{{", ord("}"): "}}"}


@lru_cache(1 << 10)
def _property_format(names: tuple[str, ...], no_keys: str) -> tuple[Callable[..., str], int | None]:
    """Return what makes the fields from values of properties with these names, and the place of the tag's value."""
    places = {name: place for place, name in enumerate(names)}  # the last of equal names counts
    members = [f'{encode_basestring(name).translate(_BRACES)}:"{{{places[name]}}}"' for name in sorted(places)]
    keys, unique_key = (
        f'"{{{places[name]}}}"' if name in places else missing
        for name, missing in ((PropertyName.KEYS, no_keys), (PropertyName.UNIQUE_KEY, "null"))
    )
    text = (
        '"properties":{{' + ",".join(members) + f'}}}},"properties_raw":"{{{len(names)}}}",{{{len(names) + 1}}},'
        f'"dispatch_keys":{keys},"dispatch_uniq_key":{unique_key}'
    )
    return text.format, places.get(PropertyName.TAGS)


@lru_cache(1 << 10)
def _codes(tag: str | None, delivery: int | None) -> str:
    code = tags_code_of(tag) if delivery is None else delivery
    return f'"dispatch_tags_code":{code},"dispatch_tags_code_hex":"{_hex(code)}"'


def _unusual_bodies(message: StoredMessage, *, is_shown: bool) -> str:
    """Return the fields of a body that is compressed, or of a batch of 5.x."""
    is_compressed = message.sys_flag & record.COMPRESSED
    fields = "" if is_shown else f'"body_b64":{_base64(_body(message))},'
    if message.sys_flag & record.INNER_BATCH and is_batch(message):
        fields += f'"inner_messages":{to_json(_count_inner(message))},'
    return fields if is_shown or not is_compressed else f'{fields}"stored_body_b64":{_base64(message.stored_body)},'


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


def _base64(data: bytes | None) -> str:
    return f'"{b2a_base64(data, newline=False).decode()}"' if data else "null"


def _hex(tags_code: int) -> str:
    return f"{tags_code & _LONG_MASK:016x}"


def _body_as(stored_body: bytes, sys_flag: int, form: BodyForm) -> str:
    """Return a body as JSON, null if it cannot be decompressed."""
    if form == "none":
        return "null"
    try:
        body = record.decompress_body(stored_body, sys_flag, record.DECOMPRESSED_LIMIT)
    except BodyCompressionError:
        return "null"
    if form == "hex":
        return f'"{body.hex()}"'
    if form == "base64":
        return f'"{b2a_base64(body, newline=False).decode()}"'
    text = body.decode(errors="backslashreplace")
    if form == "json":
        try:
            value = json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            pass
        else:
            return to_json(value)
    return encode_basestring(text)


def _finite(text: str) -> float:
    """Return a number; one beyond the largest float has no JSON form, so that its body stays text."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def blank_row(physical_offset: int, size: int) -> Row:
    """Return the row of the blank at the end of a log file."""
    return {"type": "blank", "phys": physical_offset, "size": size}


# ---------------------------------------------------------------------------------------------------- queues


def queue_row(topic: str, queue_id: int, queue: ConsumeQueue | QueueState) -> Row:
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
    queues = sorted(store.queues.states().items())  # opens none of them
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
