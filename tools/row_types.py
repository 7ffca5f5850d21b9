"""The types of the rows that each command prints: `generated` makes JSON Schemas of them, and tests compare both.

A command has a text for each form of its rows: the class whose fields it prints, then the fields that no class has, as
``name:type``. ``name?`` can be absent, ``type?`` can be null, ``[type]`` is a list, and ``...`` means fields that
depend on the input.
"""

from __future__ import annotations

from typing import Final

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
        f"librmq.diagnosis._lag_report.QueueLag {_LEFT}",
        f"librmq.diagnosis._lag_report.TopicLag {_LEFT}",
        f"librmq.diagnosis._lag_report.GroupLag {_LEFT}",
        "librmq.diagnosis._lag_report.GroupRate",
        "librmq.diagnosis.pending.WaitingOrigins",
    ),
    "top": (
        "type:str group:str lag:int stored_per_s:num? consumed_per_s:num? drain_s:num? instances:int?",
        "type:str instance:str group:str busy:int? threads:int? queues:int? held:int? state:str",
        "type:str for_s:num? place:str group:str topic:str keys:str? message_id:str messages:int thread:str "
        "instance:str",
    ),
    "progress": ("librmq.diagnosis._kept_progress.KeptProgress",),
    "expiring": ("librmq.diagnosis.pending.ExpiringMessages",),
    "dead-letters": (
        "librmq.diagnosis.deadletters.GivenUpMessage broker?:str resent?:bool",
        "librmq.diagnosis.deadletters.DeadLetterCause",
    ),
    "story": ("librmq.diagnosis._message_story.StoryEvent",),
    "traces": ("librmq.message.traces.Trace",),
    "diagnose": (
        "finding:str severity:str subject:str what:str evidence:obj next:str",
        "librmq.diagnosis._checks.TopicVolume",
    ),
    "stats": (
        "type:str path:str kind:str used_by:str? closed_cleanly:bool? topics:int queues:int messages:int retries:int "
        "dead_letters:int resent:int groups:int log_bytes:int log_files:int min_phy_offset:int max_phy_offset:int "
        "min_timestamp_ms:int? max_timestamp_ms:int? settings:obj",
    ),
    "disk": (
        "type:str log_bytes:int queue_bytes:int index_bytes:int timer_bytes:int other_bytes:int allocated_bytes:int "
        "used_ratio:num thresholds:[obj]",
        "librmq.diagnosis.disk_use.TopicUse type:str",
        "librmq.diagnosis.disk_use.OldFile type:str",
    ),
    "whatif": (
        "librmq.diagnosis._whatif.Estimate scenario:str speed_up:num? lag:int queues:int clients:int threads:int "
        "batch_size:int handler_s:num stored_per_s:num advice:str",
    ),
    "queues": (_QUEUE,),
    "query": (_STORED,),
    "schedules": ("name:str topic:str next_ms:int? last_ms:int? paused:bool rule:str missed:str",),
    "send": ("id:str topic:str queue_id:int queue_offset:int",),
    "consume": (_SHOWN,),
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
    "skip": ("librmq.diagnosis._skips.SkippedQueue group:str topic:str skipped:int aside:str? dry_run:bool",),
    "replay": (
        "group:str topic:str skipped_by:str skipped_at_ms:int skipped:int messages:int dry_run:bool",
        "topic:str messages:int body_bytes:int unconfirmed:int dry_run:bool",
    ),
    "decide": ("librmq.diagnosis.pending.PendingMessage decision:str dry_run:bool",),
    "cancel": ("librmq.protocol.CancelResult id:str dry_run?:bool",),
    "import": ("topic:str queues:int messages:int body_bytes:int dry_run:bool",),
    "recover": (
        "type:str phase:str min_phy_offset:int max_phy_offset:int flushed_where:int checkpoint_physic_ts:int "
        "checkpoint_logics_ts:int checkpoint_index_ts:int queues:[obj] topic_queue_table:obj cut:[obj]",
    ),
    "verify": ("type:str sound:bool damage:[obj] recoverable:[obj]",),
    "can-start": (
        "type:str version:str broker:str librmq:str closed_cleanly:bool condition:str? recovery_file:str? "
        "recovery_bytes:int? "
        "read_bytes_per_s:int? read_s:num? log_end:int? cut_bytes:int? recover_cuts:int?",
        "librmq.diagnosis._start_verdict.StartReason type:str",
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
    "console": ("ready:bool url:str",),
    "serve": (
        "ready:bool grpc:str? remoting:str? control:str? grpc_tls?:str certificate?:str",
        "client:str group:str? state:str",
        "state:str now_ms:int",
    ),
    "settings": ("setting:str before:any after:any was_recorded:bool dry_run:bool",),
    "who": ("role:str pid:int program:str? since_ms:int? state:str peers_append?:bool settings?:obj",),
    "doctor": ("check:str ok:bool what:str",),
    "spark": ("...",),
}
"""The forms of the rows of each command that prints any."""
