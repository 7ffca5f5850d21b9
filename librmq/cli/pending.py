"""``pending``, ``decide``, ``timers``: waiting messages, given-up halves, and the files of a timer."""

from __future__ import annotations

import argparse

from librmq.cli.output import Output
from librmq.cli.stores import open_store
from librmq.cli.unknown_names import note_topic_of
from librmq.errors import InputError
from librmq.files.disk import DiskFiles
from librmq.store.format.directory import check_kind


def pending(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each message that waits."""
    from librmq.diagnosis.pending import pending_messages

    with open_store(arguments, all_in_memory=True) as store:
        for message in pending_messages(store, kind=arguments.kind, topic=arguments.topic):
            output.row(message._asdict())
        note_topic_of(store, arguments.topic, output)
    return 0


def decide(arguments: argparse.Namespace, output: Output) -> int:
    """Commit or roll back a half message that checks have given up."""
    from librmq.cli.stores import open_broker
    from librmq.diagnosis.halves import decide_half, given_up

    text = arguments.physical_offset
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputError(f"expected a physical offset that `pending --kind given_up` lists, found {text!r:.80}")
    if arguments.commit == arguments.rollback:
        raise InputError("expected either --commit or --rollback")
    with open_broker(arguments) as broker:
        row = next((half._asdict() for half in given_up(broker) if half.physical_offset == int(text)), {})
        decide_half(broker, int(text), commit=arguments.commit)
    output.row({**row, "decision": "commit" if arguments.commit else "rollback", "dry_run": arguments.dry_run})
    return 0


def timers(arguments: argparse.Namespace, output: Output) -> int:
    """Print the timer log, the used slots of the wheel, and the checkpoint."""
    from librmq.store.format.timerfiles import (
        CHECKPOINT_SIZE,
        TimerCheckpoint,
        TimerLog,
        Unit,
        read_slots,
        timer_log_size,
    )

    files, store = DiskFiles(), arguments.store
    check_kind(store, files, log_only=True)
    size = timer_log_size(store, files)
    if size:
        for position, item in TimerLog(store, size, files=files, writable=False).items():
            if isinstance(item, Unit):
                output.row(
                    {
                        "type": "timerlog_unit",
                        "pos": position,
                        "size": item.size,
                        "prev_pos": item.previous,
                        "magic": item.magic,
                        "curr_write_time_ms": item.write_time_ms,
                        "delay_ms_rel": item.delay_ms,
                        "offset_py": item.physical_offset,
                        "size_py": item.message_size,
                        "real_topic_hash": item.topic_hash,
                        "reserved": item.reserved,
                    }
                )
            else:
                output.row({"type": "timerlog_blank", "pos": position, "size": item})
    for number, slot in read_slots(store, files):
        output.row(
            {
                "type": "wheel_slot",
                "index": number,
                "time_in_precision_units": slot.time,
                "first_pos": slot.first,
                "last_pos": slot.last,
                "num": slot.messages,
                "magic": slot.magic,
            }
        )
    checkpoint = TimerCheckpoint.read(store, files)
    if checkpoint is not None:
        output.row(
            {
                "type": "timercheck",
                "file_size": CHECKPOINT_SIZE,
                "last_read_time_ms": checkpoint.read_time_ms,
                "last_timer_log_flush_pos": checkpoint.log_position,
                "last_timer_queue_offset": checkpoint.queue_offset,
                "master_timer_queue_offset": checkpoint.master_queue_offset,
                "data_version_state": checkpoint.state_version,
                "data_version_timestamp": checkpoint.version_timestamp_ms,
                "data_version_counter": checkpoint.version_counter,
            }
        )
    return 0
