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

from librmq.cli.json_rows import refuse_constant
from librmq.cli.output import complain
from librmq.consumequeue_ext import is_ext_address
from librmq.errors import BodyCompressionError, MissingExtraError, RecordError
from librmq.java.lang import java_decode
from librmq.message import record
from librmq.message.batch import inner_messages, is_batch
from librmq.message.delays import DelayLevels
from librmq.message.ids import format_host
from librmq.message.message import StoredMessage
from librmq.message.properties import PROPERTY_KEYS
from librmq.store.engine.dispatch import derived_tags_code

if TYPE_CHECKING:
    from librmq.consumequeue import ConsumeQueue
    from librmq.files.interface import Damage
    from librmq.store import MessageStore
    from librmq.store.recovery.salvage import Gap
    from librmq.store.recovery.verify import Verdict
    from librmq.store.snapshots import Snapshot


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
        "dispatch_keys": properties.get(PROPERTY_KEYS) if properties_raw else "",
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


# ---- types of the rows
#
# `tools/generated.py` makes JSON Schemas and a page of them, and tests compare them with what commands print; nothing
# reads them at run time. A command has a text for each form of its rows: the class whose fields it prints, then the
# fields that no class has, as ``name:type``. ``name?`` can be absent, ``type?`` can be null, ``[type]`` is a list, and
# ``...`` means fields that depend on the input.

_RECORD: Final = (
    "type:str phys:int size:int crc_ok:bool magic:str body_crc:int topic:str queue_id:int flag:int queue_offset:int "
    "commit_log_offset:int sys_flag:int born_timestamp:int born_host:str store_timestamp:int store_host:str "
    "reconsume_times:int prepared_transaction_offset:int msg_id:str inner_messages?:int? properties:obj "
    "properties_raw:str dispatch_tags_code:int dispatch_tags_code_hex:str dispatch_keys:str? dispatch_uniq_key:str? "
    "raw_sha1:str "
)
_STORED: Final = _RECORD + "body_b64:str? stored_body_b64?:str?"
_SHOWN: Final = _RECORD + "body:any broker?:str"
_QUEUE: Final = "topic:str queue_id:int min_offset:int max_offset:int max_physic_offset:int"
_GAP: Final = "type:str phys:int size:int file:str what:str"
_SNAPSHOT: Final = (
    "type:str path:str min_phy_offset:int max_phy_offset:int copied_files:int linked_files:int changed:[obj]"
)
_LEFT: Final = "broker?:str in_flight?:int"
_ANOMALY: Final = (
    "anomaly:str at_ms:int id?:any group?:str topic?:str broker?:str queue_id?:int queue_offset?:int "
    "events:[int] what:str"
)

ROW_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "topics": ("librmq.diagnosis.view.TopicSummary",),
    "show": (_SHOWN,),
    "tail": (_SHOWN,),
    "count": (
        "topic:str messages:int bytes:int",
        "queue:str topic:str queue_id:int messages:int bytes:int",
        "tag:str? messages:int bytes:int sampled?:bool",
        "key:str? messages:int bytes:int",
        "minute:str messages:int bytes:int",
        "hour:str messages:int bytes:int",
        "day:str messages:int bytes:int",
    ),
    "groups": (f"librmq.diagnosis.view.GroupSummary {_LEFT}",),
    "lag": (
        f"librmq.diagnosis.lag_report.QueueLag {_LEFT}",
        f"librmq.diagnosis.lag_report.TopicLag {_LEFT}",
        f"librmq.diagnosis.lag_report.GroupLag {_LEFT}",
        "librmq.diagnosis.lag_report.GroupRate",
        "librmq.diagnosis.pending.WaitingOrigins",
    ),
    "progress": ("librmq.diagnosis.kept_progress.KeptProgress",),
    "expiring": ("librmq.diagnosis.pending.ExpiringMessages",),
    "dead-letters": (
        "librmq.diagnosis.deadletters.GivenUpMessage broker?:str resent?:bool",
        "librmq.diagnosis.deadletters.DeadLetterCause",
    ),
    "story": ("librmq.diagnosis.message_story.StoryEvent",),
    "traces": ("librmq.message.traces.Trace",),
    "diagnose": (
        "finding:str severity:str subject:str what:str evidence:obj next:str",
        "librmq.diagnosis.checks.TopicVolume",
    ),
    "stats": (
        "type:str path:str kind:str used_by:str? closed_cleanly:bool? topics:int queues:int messages:int retries:int "
        "dead_letters:int groups:int log_bytes:int log_files:int min_phy_offset:int max_phy_offset:int "
        "min_timestamp_ms:int? max_timestamp_ms:int? settings:obj",
    ),
    "disk": (
        "type:str log_bytes:int queue_bytes:int index_bytes:int timer_bytes:int other_bytes:int allocated_bytes:int "
        "used_ratio:num thresholds:[obj]",
        "librmq.diagnosis.disk_use.TopicUse type:str",
        "librmq.diagnosis.disk_use.OldFile type:str",
    ),
    "whatif": (
        "librmq.diagnosis.whatif.Estimate scenario:str speed_up:num? lag:int queues:int clients:int threads:int "
        "batch_size:int handler_s:num stored_per_s:num advice:str",
    ),
    "queues": (_QUEUE,),
    "query": (_STORED,),
    "pending": ("librmq.diagnosis.pending.PendingMessage",),
    "topic": (
        "topic:str action:str read_queues?:int write_queues?:int permission?:str message_type?:str before?:any "
        "moved_keys?:num messages?:int groups?:[str] note?:str dry_run:bool",
    ),
    "group": (
        "group:str action:str retries?:any to?:str topics?:[str] retries_moved?:int retries_left?:int cut?:bool "
        "note?:str dry_run:bool",
    ),
    "reset": (
        "group:str topic:str queue_id:int before:int? after:int skipped:int again:int lag:int dry_run:bool broker?:str",
    ),
    "skip": ("librmq.diagnosis.skips.SkippedQueue group:str topic:str skipped:int aside:str? dry_run:bool",),
    "replay": (
        "group:str topic:str skipped_by:str skipped_at_ms:int skipped:int messages:int dry_run:bool",
        "topic:str messages:int body_bytes:int unconfirmed:int dry_run:bool",
    ),
    "decide": ("librmq.diagnosis.pending.PendingMessage decision:str dry_run:bool",),
    "cancel": ("librmq.protocol.client_requests.CancelResult id:str dry_run?:bool",),
    "import": ("topic:str queues:int messages:int body_bytes:int dry_run:bool",),
    "recover": (
        "type:str phase:str min_phy_offset:int max_phy_offset:int flushed_where:int checkpoint_physic_ts:int "
        "checkpoint_logics_ts:int checkpoint_index_ts:int queues:[obj] topic_queue_table:obj cut:[obj]",
    ),
    "verify": ("type:str sound:bool damage:[obj]",),
    "can-start": (
        "type:str version:str broker:str librmq:str closed_cleanly:bool recovery_file:str? recovery_bytes:int? "
        "read_bytes_per_s:int? read_s:num? log_end:int? cut_bytes:int? recover_cuts:int?",
        "librmq.diagnosis.start_verdict.StartReason type:str",
    ),
    "salvage": ("type:str into:str records:int gaps:int", _GAP, _STORED),
    "extract": ("type:str into:str messages:int bytes:int",),
    "snapshot": (_SNAPSHOT,),
    "follow": ("type:str state:str physical_offset:int lag_bytes:int?",),
    "restore": (_SNAPSHOT,),
    "export": ("type:str path:str rows:int files:int skipped:bool",),
    "dump": (_STORED, "type:str phys:int size:int"),
    "queue": ("type:str topic:str queue_id:int offset:int phys:int size:int tags_code:int tags_code_hex:str ext?:obj",),
    "timers": (
        "type:str pos:int size:int prev_pos:int magic:int curr_write_time_ms:int delay_ms_rel:int offset_py:int "
        "size_py:int real_topic_hash:int reserved:int",
        "type:str pos:int size:int",
        "type:str index:int time_in_precision_units:int first_pos:int last_pos:int num:int magic:int",
        "type:str file_size:int last_read_time_ms:int last_timer_log_flush_pos:int last_timer_queue_offset:int "
        "master_timer_queue_offset:int data_version_state:int data_version_timestamp:int data_version_counter:int",
    ),
    "report": ("report:str json:str stores:int errors:int warnings:int",),
    "check-history": (_ANOMALY,),
    "serve": (
        "ready:bool grpc:str? remoting:str? control:str? grpc_tls?:str certificate?:str",
        "client:str group:str? state:str",
        "state:str now_ms:int",
    ),
    "settings": ("setting:str before:any after:any was_recorded:bool dry_run:bool",),
    "who": ("role:str pid:int program:str? since_ms:int? state:str settings?:obj",),
    "doctor": ("check:str ok:bool what:str",),
    "spark": ("...",),
}
"""The forms of the rows of each command that prints any."""
