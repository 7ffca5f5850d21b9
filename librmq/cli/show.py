"""``show`` and ``tail``: the selected messages, or the last of them."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from librmq.cli.log import cut_at
from librmq.cli.output import Output, whole_number
from librmq.cli.progress import ProgressBar
from librmq.cli.rows import shown_row
from librmq.cli.selection import MessageQuery, in_queue, select, user_queue
from librmq.cli.stores import files_and_config, report_cut
from librmq.cli.unknown_names import note_message, note_topic_of
from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message.delay_levels import DEFAULT_LEVELS, DelayLevels
from librmq.message.message import StoredMessage
from librmq.store.engine.dispatch import has_queue_entry
from librmq.store.format.directory import COMMITLOG

if TYPE_CHECKING:
    from librmq.store import MessageStore

_FILES_MAPPED: Final = 32
_POLL_S: Final = 0.2
_FIRST_WINDOW: Final = 32


def show(arguments: argparse.Namespace, output: Output) -> int:
    """Print the selected messages in log order."""
    selection = select(arguments)
    if arguments.route is not None:
        from librmq.cli.cluster_source import open_cluster

        with open_cluster(arguments) as cluster:
            for message in cluster.messages(selection):
                output.row(shown_row(message, DEFAULT_LEVELS, arguments.body))
        _note_unknown(selection, output)
        return 0
    if selection.topic is None and not selection.is_by_index:
        files, config = files_and_config(arguments, log_only=True)
        levels = DelayLevels.parse(config.message_delay_level)
        folder = os.path.join(arguments.store, COMMITLOG)
        sequence = MappedFileQueue(
            folder, config.commitlog_file_size, files, MappingPool(_FILES_MAPPED), writable=False
        )
        with ProgressBar("show", sequence.end - sequence.begin, quiet=output.is_on_terminal) as bar:
            try:
                for message in _in_log(sequence, selection, bar):
                    output.row(shown_row(message, levels, arguments.body))
            except CorruptionError as error:
                if error.kind == "size":
                    raise
                cut = cut_at(sequence, error)
                if cut is not None:
                    report_cut(arguments, cut)
        check_queues(arguments, files, config)
        return 0
    from librmq.cli.stores import open_store

    with open_store(arguments) as store:
        for message in selection.messages(store):
            output.row(shown_row(message, store.levels, arguments.body))
        note_topic_of(store, selection.topic, output)
    _note_unknown(selection, output)
    return 0


def _note_unknown(selection: MessageQuery, output: Output) -> None:
    is_limited = replace(selection, id=None, key=None) != MessageQuery()
    note_message(output, name=selection.id, kind="id", is_limited=is_limited or selection.key is not None)
    note_message(output, name=selection.key, kind="key", is_limited=is_limited)


def _in_log(sequence: MappedFileQueue, selection: MessageQuery, bar: ProgressBar) -> Iterator[StoredMessage]:
    """Yield the selected records of the log alone: no queue is opened, and files before the wanted times are skipped.

    Raises:
        CorruptionError: The bytes are no record, perhaps because the log ends there.
    """
    test = selection.test()
    log = CommitLog(sequence)
    log.end = sequence.end
    begin = _first_file(log, sequence, selection.begin_ms)
    for physical_offset, _, raw in log.scan(begin):
        bar.to(physical_offset - sequence.begin)
        if raw is not None:
            message = StoredMessage(raw)
            if test(message):
                yield message


def _first_file(log: CommitLog, sequence: MappedFileQueue, begin_ms: int) -> int:
    """Return where the last file begins whose first record is not later than a time."""
    begin, end = sequence.begin, sequence.end
    low, high = 0, max(0, -(-(end - begin) // sequence.file_size) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        first = log.first_store_timestamp_ms(begin + middle * sequence.file_size)
        if first is not None and first < begin_ms:
            low = middle
        else:
            high = middle - 1
    return begin + low * sequence.file_size


# ------------------------------------------------------------------------------------------------------------ tail


def tail(arguments: argparse.Namespace, output: Output) -> int:
    """Print the last of the selected messages, and with ``--follow`` new ones."""
    from librmq.cli.stores import open_store

    count = whole_number("--count", arguments.count)
    selection = select(arguments)
    with open_store(arguments) as store:
        end = store.log.end
        for message in _last(store, selection, count, everything=arguments.all):
            output.row(shown_row(message, store.levels, arguments.body))
        note_topic_of(store, selection.topic, output)
        if arguments.follow:
            output.draw()
            for message in _following(store, selection, end, SystemClock(), everything=arguments.all):
                output.row(shown_row(message, store.levels, arguments.body))
                output.draw()
    return 0


def _last(store: MessageStore, selection: MessageQuery, count: int, *, everything: bool) -> list[StoredMessage]:
    """Return the last ``count`` selected messages in log order, read back from the queues' ends in growing windows."""
    if selection.is_by_index:
        return list(selection.messages(store))[-count:]
    test, matching = selection.test(), store.matching(tags=selection.tags)
    ranges = {
        name: offsets
        for name, offsets in selection.ranges(store).items()
        if everything or selection.topic is not None or user_queue(name)
    }
    window = max(count, _FIRST_WINDOW)
    while True:
        messages: list[StoredMessage] = []
        complete_from = 0
        for name, offsets in ranges.items():
            begin = max(offsets.start, offsets.stop - window)
            messages += filter(test, in_queue(store, name, range(begin, offsets.stop), matching))
            if begin > offsets.start:
                entry = store.queues[name].entry(begin)
                complete_from = max(complete_from, 0 if entry is None else entry.physical_offset)
        messages = sorted(
            (message for message in messages if message.physical_offset >= complete_from),
            key=lambda message: message.physical_offset,
        )
        if len(messages) >= count or not complete_from:
            return messages[-count:]
        window *= 8


def _following(
    store: MessageStore, selection: MessageQuery, begin: int, clock: Clock, *, everything: bool
) -> Iterator[StoredMessage]:
    """Yield the selected messages stored from ``begin`` on, without end."""
    test, never, at = selection.test(), threading.Event(), begin
    while True:
        store.refresh()
        at = max(at, store.log.begin)
        for physical_offset, size, raw in store.log.scan(min(at, store.log.end)):
            at = physical_offset + size
            if raw is None:
                continue
            message = StoredMessage(raw)
            if not (everything or (has_queue_entry(message.sys_flag) and user_queue((message.topic, 0)))):
                continue
            if test(message):
                yield message
        clock.wait(never, _POLL_S)
