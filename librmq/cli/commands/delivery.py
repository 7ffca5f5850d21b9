"""``pending``, ``decide``, ``timers``, ``dead-letters``: messages that are not delivered yet, or were given up."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from librmq.cli.input import age_clock, note_group, note_topic_of, parse_time
from librmq.cli.output import Output, complain
from librmq.cli.rows import named
from librmq.cli.stores import open_broker, open_source, open_store
from librmq.diagnosis import deadletters
from librmq.errors import InputError
from librmq.files.disk import DiskFiles
from librmq.store.format.directory import check_kind


def pending(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each message that waits."""
    from librmq.diagnosis.pending import pending_messages

    with open_store(arguments, all_in_memory=True) as store:
        messages = pending_messages(store, kind=arguments.kind, topic=arguments.topic)
        output.rows_of(message._asdict() for message in messages)
        note_topic_of(store, arguments.topic, output)
    return 0


def decide(arguments: argparse.Namespace, output: Output) -> int:
    """Commit or roll back a half message that checks have given up."""
    from librmq.diagnosis.pending import decide_half, given_up

    physical_offset = arguments.physical_offset
    if arguments.commit == arguments.rollback:
        raise InputError("expected either --commit or --rollback")
    with open_broker(arguments) as broker:
        row = next((half._asdict() for half in given_up(broker) if half.physical_offset == physical_offset), {})
        decide_half(broker, physical_offset, commit=arguments.commit)
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


# ---- dead letters


def dead_letters(arguments: argparse.Namespace, output: Output) -> int:
    """Print the dead letters, or their causes, or send them to their group again."""
    if arguments.route is not None:
        if arguments.resend:
            raise InputError("--resend works on the folder of a store: brokers of 4.x have no request for it")
        if arguments.unsent:
            raise InputError("--unsent works on the folder of a store, which notes what was sent again")
    if arguments.resend:
        if arguments.causes:
            raise InputError("expected either --causes or --resend")
        return _resend(arguments, output)
    if arguments.dry_run and arguments.route is None:
        raise InputError("--dry-run belongs to --resend: a list changes nothing")
    is_selected = _selection(arguments)
    with open_source(arguments) as view:
        selected = [pair for pair in deadletters.letters_by_queue(view, arguments.group) if is_selected(pair[1])]
        if arguments.causes:
            causes = deadletters.sum_up_causes(letter for _, letter in selected)
            output.rows_of(cause._asdict() for cause in causes)
        else:
            output.rows_of(named(view.broker_name(queue), letter._asdict()) for queue, letter in selected)
        if arguments.group is not None:
            note_group(arguments.group, view.groups, output)
    return 0


def _selection(arguments: argparse.Namespace) -> Callable[[deadletters.GivenUpMessage], bool]:
    """Return the function that decides whether the options select a dead letter."""
    since_ms = None
    if arguments.since is not None:
        since_ms = parse_time(arguments.since, age_clock(arguments.store, arguments.since))
    return lambda letter: (
        (arguments.cause is None or arguments.cause in letter.cause)
        and (arguments.id is None or arguments.id == letter.unique_key)
        and (since_ms is None or letter.store_timestamp_ms >= since_ms)
        and (letter.resent_at_ms is None or not arguments.unsent)
    )


def _resend(arguments: argparse.Namespace, output: Output) -> int:
    """Resend those of the chosen dead letters that were not sent yet, at most ``--limit``; ``--id`` repeats one.

    A dry run does the same in memory.
    """
    if arguments.group is None:
        raise InputError("--resend: name the group with --group")
    is_selected = _selection(arguments)
    with open_broker(arguments) as broker:
        selected = {
            message.physical_offset: message
            for message in deadletters.dead_letters(broker, group=arguments.group)
            if is_selected(message)
        }
        unsent = [
            message
            for message in broker.dead_letters(arguments.group)
            if (letter := selected.get(message.physical_offset))
            and (letter.resent_at_ms is None or arguments.id is not None)
        ]
        unsent = unsent[: arguments.limit]
        broker.resend_dead_letters(arguments.group, unsent)
        at_ms = broker.runner.now_ms()
    if not unsent:
        before = (
            f"all {len(selected):,} dead letters were sent before, as resent_at_ms in the list says: name one with "
            "--id to send it once more"
        )
        complain(
            f"note: {before if selected else f'no such dead letter of group {arguments.group!r}'}: nothing is sent"
        )
    for message in unsent:
        letter = selected[message.physical_offset]
        resent_at_ms = letter.resent_at_ms if arguments.dry_run else at_ms
        output.row({**letter._replace(resent_at_ms=resent_at_ms)._asdict(), "resent": not arguments.dry_run})
    return 0
