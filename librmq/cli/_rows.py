"""Rows that commands read, JSON objects in lines, and print; other tools rely on their names, values and order."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from binascii import b2a_base64
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from librmq.cli._output import complain, to_json
from librmq.consumequeue_entries import is_ext_address
from librmq.errors import BodyCompressionError, InputError, MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage, record
from librmq.message.batch import inner_messages
from librmq.message.ids import decode_host, format_host
from librmq.message.message import is_batch
from librmq.message.properties import PropertyName, decode_properties
from librmq.message.properties import tags_code as tags_code_of
from librmq.message.topics import SystemTopic
from librmq.store.engine.derivation import derived_tags_code

if TYPE_CHECKING:
    from librmq.consumequeue import ConsumeQueue
    from librmq.files import Damage
    from librmq.scheduling import Schedule
    from librmq.store import Gap, MessageStore, Snapshot, Verdict
    from librmq.store.engine.store_parts import QueueState

Row = dict[str, Any]

_LONGEST_LINE: Final = 64 << 20


def parse_object(text: str | bytes) -> Row:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise InputError("not JSON: nested too deep") from None
    except UnicodeDecodeError:
        raise InputError("not JSON: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError("expected a JSON object")
    return value


def refuse_constant(name: str) -> object:
    """Refuse a number of Python that JSON does not have, such as NaN."""
    raise ValueError(f"{name} is no JSON number")


def binary_input() -> BinaryIO:
    """Return standard input.

    Raises:
        InputError: It is closed.
    """
    if sys.stdin is None:
        raise InputError("-: standard input is closed")
    return sys.stdin.buffer


def standard_input() -> Iterator[bytes]:
    """Return the lines of standard input, none if it is closed; a line that is far too long comes in parts."""
    if sys.stdin is None:
        return iter(())
    stream = sys.stdin.buffer
    return iter(lambda: stream.readline(_LONGEST_LINE + 1), b"")


def read_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """Yield the JSON objects of lines with their numbers, without empty lines."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > _LONGEST_LINE:
            raise InputError(f"line {number}: longer than {_LONGEST_LINE} bytes")
        try:
            yield number, parse_object(line)
        except InputError as error:
            raise InputError(f"line {number}: {error}") from None


def named(broker_name: str, row: Row) -> Row:
    """Return a row with the name of its broker, if there is one."""
    return row | {"broker": broker_name} if broker_name else row


def schedule_row(schedule: Schedule) -> Row:
    times = {"next_ms": schedule.next_ms, "last_ms": schedule.last_ms, "paused": schedule.paused}
    return {"name": schedule.name, "topic": schedule.topic, **times, "rule": schedule.rule, "missed": schedule.missed}


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
    body_field = "" if form is None else f',"body":{_body_as(body, sys_flag, form)}'
    delivery = derived_tags_code(StoredMessage(raw), levels) if topic == _SCHEDULE else None
    at = str(place)
    check = _USUAL if is_sound and magic == record.MESSAGE_MAGIC else _checked(magic, is_sound=is_sound)
    born_at, store_fields = _hosts(born_host, store_host, reconsume_times)
    return (
        f'{{"type":"message","phys":{at if physical_offset is None or physical_offset == place else physical_offset},'
        f'"size":{size},{check},"body_crc":{(checksum ^ 0x80000000) - 0x80000000},{_queue(topic, queue_id, flag)},'
        f'"queue_offset":{queue_offset},"commit_log_offset":{at},"sys_flag":{sys_flag},"born_timestamp":{born_ms},'
        f'"born_host":"{born_at}","store_timestamp":{stored_ms},{store_fields},'
        f'"prepared_transaction_offset":{prepared},"msg_id":"{(store_host + raw[_PLACE]).hex().upper()}",'
        f"{bodies}{_property_fields(java_decode(raw[properties_at:end]), delivery)},"
        f'"raw_sha1":"{hashlib.sha1(raw, usedforsecurity=False).hexdigest()}"{body_field}}}'
    )


_PLACE: Final = slice(record.PHYSICAL_OFFSET_AT, record.PHYSICAL_OFFSET_AT + 8)


def _checked(magic: int, *, is_sound: bool) -> str:
    return f'"crc_ok":{"true" if is_sound else "false"},"magic":"{magic:08x}"'


_USUAL: Final = _checked(record.MESSAGE_MAGIC, is_sound=True)


# Numbers that are the same in many records are formatted once.
@lru_cache(1 << 12)
def _queue(topic: bytes, queue_id: int, flag: int) -> str:
    return f'"topic":{encode_basestring(java_decode(topic))},"queue_id":{queue_id},"flag":{flag}'


@lru_cache(1 << 12)
def _hosts(born_host: bytes, store_host: bytes, reconsume_times: int) -> tuple[str, str]:
    born_at, stored_at = (format_host(decode_host(host)) for host in (born_host, store_host))
    return born_at, f'"store_host":"{stored_at}","reconsume_times":{reconsume_times}'


def _property_fields(text: str, delivery: int | None) -> str:
    """Return the fields of stored properties, and of what they define; ``delivery`` replaces the code of the tag."""
    properties = decode_properties(text)
    quoted = encode_basestring
    members = ",".join([f"{quoted(name)}:{quoted(value)}" for name, value in sorted(properties.items())])
    keys, unique_key = properties.get(PropertyName.KEYS), properties.get(PropertyName.UNIQUE_KEY)
    return (
        f'"properties":{{{members}}},"properties_raw":{quoted(text)},'
        f"{_codes(properties.get(PropertyName.TAGS), delivery)},"
        f'"dispatch_keys":{quoted(keys) if keys else "null" if text else _NO_KEYS},'
        f'"dispatch_uniq_key":{quoted(unique_key) if unique_key else "null"}'
    )


_NO_KEYS: Final = '""'  # as 4.9's dispatch has them of a record without properties


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


_DEEPER: Final = 100


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
            if text.count("[") + text.count("{") > _DEEPER:
                # The row nests it deeper, and CSV and tables read and write it again.
                for _ in range(_DEEPER):
                    value = [value]
                return to_json(value)[_DEEPER:-_DEEPER]
            return to_json(value)
        except (ValueError, RecursionError):
            pass
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


def store_row(store: MessageStore) -> Row:
    """Return the row of a recovered store with its offsets and times."""
    queues = sorted(store.queues.states().items())  # opens none of them
    return {
        "type": "store",
        "phase": "after_load",
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
    parts = (("damage", verdict.damage), ("recoverable", verdict.recoverable))
    return {"type": "verify", "sound": verdict.sound} | {
        name: [
            {"file": os.path.relpath(item.file, store), "offset": item.offset, "kind": item.kind, "what": item.what}
            for item in items
        ]
        for name, items in parts
    }
