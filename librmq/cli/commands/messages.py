"""``show``, ``tail``, ``query``, ``dump``: the messages of a store, and the records of its log."""

from __future__ import annotations

import argparse
import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from librmq.cli._output import DAMAGED, LimitReached, Output, ProgressBar, complain, json_line
from librmq.cli._rows import BodyForm, blank_row, message_line
from librmq.cli._selection import (
    MessageQuery,
    age_clock,
    check_id,
    in_queue,
    note_message,
    note_offsets,
    note_queue,
    note_topic,
    note_topic_of,
    parse_time,
    select,
    user_queue,
)
from librmq.cli._stores import check_queues, files_and_config, open_source, open_store, report_cut, report_record
from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.consumequeue import offset_at_place
from librmq.consumequeue_entries import ENTRY_SIZE, HOLE_SIZE, PLACE
from librmq.errors import CorruptionError, InputError
from librmq.files import Damage, DiskFiles
from librmq.message import DelayLevels, StoredMessage, frames
from librmq.message.message import is_batch
from librmq.store.engine.derivation import claims, has_queue_entry
from librmq.store.engine.store_times import StoreTimes
from librmq.store.format.directory import has_abort
from librmq.store.recovery.open import readable_log
from librmq.store.recovery.salvage import find_record

if TYPE_CHECKING:
    from librmq.store import MessageStore
    from librmq.store.engine.store_parts import QueueName


# ---- the log


def dump(arguments: argparse.Namespace, output: Output) -> int:
    """Print every record up to the first damage; with ``--all`` also the records behind it."""
    files, config = files_and_config(arguments)
    log = readable_log(arguments.store, files, config.commitlog_file_size)
    levels = DelayLevels.parse(config.message_delay_level)
    damages: list[CorruptionError] = []
    begin = log.begin
    if arguments.at is not None:
        items = _scanned(arguments)
    else:
        items = _items(arguments, log, begin, damages.append if arguments.all else None)
        check_queues(arguments, files, config)
    with ProgressBar("dump", log.end - begin, quiet=output.is_on_terminal) as bar:

        def lines() -> Iterator[str]:
            for physical_offset, size, raw in items:
                bar.to(physical_offset - begin)
                if raw is None:
                    yield json_line(blank_row(physical_offset, size))
                    continue
                is_sound = not arguments.all or StoredMessage(raw).crc_ok  # otherwise the walk has compared it
                yield message_line(raw, levels, physical_offset, is_sound=is_sound)
                if not is_sound:
                    path = log.sequence.path_at(physical_offset)
                    damages.append(CorruptionError(path, physical_offset, "checksum", "the body's checksum is wrong"))

        output.lines(lines())
    output.close()
    for damage in damages:
        complain(f"librmq dump: {damage}")
    return DAMAGED if damages else 0


def _scanned(arguments: argparse.Namespace) -> Iterator[frames.LogItem]:
    """Yield the records and blanks of the log as it was at an earlier moment."""
    with open_store(arguments) as store:
        yield from store.log.scan()


def _items(
    arguments: argparse.Namespace,
    log: CommitLog,
    begin: int,
    damaged: Callable[[CorruptionError], object] | None = None,
) -> Iterator[frames.LogItem]:
    """Yield records and blanks up to the log's end.

    With ``damaged``, which gets each damage, they continue behind it, and checksums of bodies are not compared.

    Raises:
        CorruptionError: The bytes are neither a record nor a blank, and no torn end that a kill has left.
    """
    at: int | None = begin
    while at is not None:
        try:
            for item in log.scan(at, check_body=damaged is None):
                if item[2] is None and item[0] + item[1] == log.end:
                    return  # the log ends before the blank of its last file
                yield item
            return
        except CorruptionError as error:
            if ends_at(log, error.offset):
                return
            if damaged is None:
                is_torn_end = has_abort(DiskFiles(), arguments.store) and cut_at(log, error) is None
                if arguments.as_recovered or is_torn_end:
                    return
                raise
            damaged(error)
            at = find_record(log.sequence, error.offset + 1, check_body=False)


def cut_at(log: CommitLog, error: CorruptionError) -> Damage | None:
    """Return the damage that ends the log, if sound records follow it."""
    at = error.offset
    cut = Damage(error.file, at, error.kind, error.what, log.data_behind(at))
    following = find_record(log.sequence, at + max(log.unfinished_at(at), 1), at + cut.bytes)
    return None if following is None else cut


def ends_at(log: CommitLog, physical_offset: int) -> bool:
    """Return whether the log ends here: only zeros follow in all files, or a batch that is not completely written."""
    unfinished = log.unfinished_at(physical_offset)
    if unfinished:
        return find_record(log.sequence, physical_offset + unfinished) is None
    return not log.data_behind(physical_offset)


_POLL_S: Final = 0.2
_FIRST_WINDOW: Final = 32


def show(arguments: argparse.Namespace, output: Output) -> int:
    """Print the selected messages, oldest first."""
    selection = select(arguments)
    if arguments.route is None and arguments.at is None and selection.topic is None and not selection.is_by_index:
        _show_log(arguments, selection, output)
        return 0
    from librmq.diagnosis import StoreView

    with open_source(arguments) as view, ExitStack() as opened:
        if isinstance(view, StoreView):
            opened.enter_context(selection.bar("show", view.store, quiet=output.is_on_terminal))
            messages = selection.select_from(view.store, reads_on=True)
        else:
            messages = selection.select_at(view)
        _print_checked(arguments, output, messages, view.levels, arguments.body)
        opened.close()
        if not output.rows and selection.topic is not None:
            note_topic(selection.topic, view.topics, output)
            queues = view.queues(selection.topic)
            note_queue(selection.topic, selection.queue_id, {queue[-1] for queue in queues}, output)
            held = [offsets for queue, offsets in queues.items() if queue[-1] == selection.queue_id]
            note_offsets(selection, held[0] if len(held) == 1 else None, output)  # each of several brokers can have one
    _note_unknown(selection, output)
    return 0


def _print_checked(
    arguments: argparse.Namespace,
    output: Output,
    messages: Iterable[StoredMessage],
    levels: DelayLevels,
    form: BodyForm | None = None,
) -> None:
    """Print messages; one whose body does not match its checksum makes the answer a short one."""

    def lines() -> Iterator[str]:
        for message in messages:
            is_sound = message.crc_ok
            yield message_line(message.raw, levels, form=form, is_sound=is_sound)
            if not is_sound:
                why = "its body does not match its checksum (crc_ok is false)"
                report_record(arguments, message.physical_offset, why)

    output.lines(lines())


def _show_log(arguments: argparse.Namespace, selection: MessageQuery, output: Output) -> None:
    """Print the selected records of the log, and compare them with the queues afterwards."""
    files, config = files_and_config(arguments)
    levels = DelayLevels.parse(config.message_delay_level)
    log = readable_log(arguments.store, files, config.commitlog_file_size)
    named = _NamedOffsets(log)
    compare = partial(named.compare, arguments)
    if log.gaps:
        check_queues(arguments, files, config)
    with ProgressBar("show", log.end - log.begin, quiet=output.is_on_terminal) as bar:
        try:
            messages = _in_log(arguments, selection, bar, named)
            output.lines(message_line(message.raw, levels, form=arguments.body) for message in messages)
        except CorruptionError as error:
            cut = cut_at(log, error)
            if cut is None:
                raise
            report_cut(arguments, cut)
        except LimitReached:
            if named.gaps:
                check_queues(arguments, files, config, compare)
            raise
    check_queues(arguments, files, config, compare)


def _note_unknown(selection: MessageQuery, output: Output) -> None:
    is_limited = replace(selection, id=None, key=None) != MessageQuery()
    note_message(output, name=selection.id, kind="id", is_limited=is_limited or selection.key is not None)
    note_message(output, name=selection.key, kind="key", is_limited=is_limited)


def _in_log(
    arguments: argparse.Namespace, selection: MessageQuery, bar: ProgressBar, named: _NamedOffsets
) -> Iterator[StoredMessage]:
    """Yield the selected records of the log alone: no queue is opened.

    Files before the wanted times are skipped where the order of times is known.

    Raises:
        CorruptionError: The bytes are neither a record nor the log's end.
    """
    test = selection.test()
    log, begin = named.log, named.log.begin
    if selection.has_times:
        begin = StoreTimes.noted(arguments.store, DiskFiles(), log).first_file(selection.begin_ms)
    for physical_offset, _, raw in _items(arguments, log, begin):
        bar.to(physical_offset - log.begin)
        if raw is None and log.is_missing(physical_offset):
            named.expect_any()
        if raw is not None:
            message = StoredMessage(raw)
            if message.physical_offset != physical_offset:
                what = f"it says that it is at {message.physical_offset}"
                report_record(arguments, physical_offset, what)
            named.add(message, physical_offset)
            if test(message):
                yield message


class _NamedOffsets:
    """The queue offsets that the records of a walk name, to compare with the queues, which the walk does not ask."""

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        """As it is on disk: a view of a killed store has its records corrected."""
        self._begin, self._end = -1, 0
        self._runs: dict[QueueName, range] = {}
        """What seems to be in the log of each queue: from the first record's offset to the last one's."""
        self.gaps: defaultdict[QueueName, set[int]] = defaultdict(set)
        """The offsets of each queue that no record has named in their turn."""

    def add(self, message: StoredMessage, physical_offset: int) -> None:
        """Take the next record."""
        self._begin = physical_offset if self._begin < 0 else self._begin
        self._end = physical_offset + message.size
        if is_batch(message) or not has_queue_entry(message.sys_flag):
            return
        name, queue_offset = (message.topic, message.queue_id), message.queue_offset
        run = self._runs.get(name, range(queue_offset, queue_offset))
        if run.stop < queue_offset or (run.stop and not queue_offset):
            self.gaps[name].add(run.stop)
        if run.stop <= queue_offset or not queue_offset:  # a new topic of this name begins at 0
            self._runs[name] = range(run.start, queue_offset + 1)

    def expect_any(self) -> None:
        """Let the next record of each queue have any offset, because the log lacks those before it."""
        self._runs.clear()

    def compare(self, arguments: argparse.Namespace, store: MessageStore) -> None:
        """Report a record to which a queue leads and that names another place.

        Raises:
            CorruptionError: An entry or its record is unreadable.
        """
        if store.log.end < self._end:
            report_record(arguments, store.log.end, "the next opening ends the log here")
        begins = [self._begin, *(gap.offset + gap.bytes for gap in self.log.gaps)]
        for name, state in store.queues.states().items():
            run = self._runs.get(name, range(-1))
            if name not in self.gaps and (run.start, run.stop) == (state.min_offset, state.max_offset):
                continue
            queue = store.queues[name]
            firsts = [offset_at_place(queue, begin) for begin in begins]
            for first in map(queue.first_message, {*firsts, *self.gaps.get(name, ()), run.stop}):
                if first is not None and self._begin <= first[1] < self._end and not self.log.is_missing(first[1]):
                    raw = self.log.read(first[1])
                    if raw is None or first[0] not in claims(raw, name):
                        what = f"queue offset {first[0]} of {name[0]}/{name[1]} leads there, and it names another"
                        report_record(arguments, first[1], what)


# ---- the last messages


def tail(arguments: argparse.Namespace, output: Output) -> int:
    """Print the last of the selected messages, and with ``--follow`` new ones."""
    count = arguments.count
    selection = select(arguments)
    with open_store(arguments) as store:
        end = store.log.end
        with ProgressBar("tail", count, "messages", quiet=output.is_on_terminal) as bar:
            messages = bar.track(_last(store, selection, count, everything=arguments.all), lambda _: 1)
            _print_checked(arguments, output, messages, store.levels, arguments.body)
        note_topic_of(store, selection.topic, output, selection.queue_id)
        if arguments.follow:
            output.draw()
            for message in _following(store, selection, end, SystemClock(), everything=arguments.all):
                _print_checked(arguments, output, [message], store.levels, arguments.body)
                output.draw()
    return 0


def _last(store: MessageStore, selection: MessageQuery, count: int, *, everything: bool) -> list[StoredMessage]:
    """Return the last ``count`` selected messages in log order, found among the newest entries of all queues."""
    if selection.is_by_index:
        return list(selection.select_from(store))[-count:]
    test, matching = selection.test(is_in_queue=True), store.matching(tags=selection.tags)
    ranges = {
        name: offsets
        for name, offsets in selection.ranges(store).items()
        if everything or selection.topic is not None or user_queue(name)
    }
    window, available = max(count, _FIRST_WINDOW), sum(map(len, ranges.values()))
    while True:
        begins = {name: offsets.start for name, offsets in ranges.items()}
        if window < available:  # entries tell the order of messages, which need not be read for it
            newest = heapq.merge(*(_places(store, name, offsets) for name, offsets in ranges.items()), reverse=True)
            begins = {name: at for _, name, at in islice(newest, window)}
        messages = [
            message
            for name, begin in begins.items()
            for message in in_queue(store, name, range(begin, ranges[name].stop), matching, reads_on=True)
            if test(message)
        ]
        if len(messages) >= count or window >= available:
            return sorted(messages, key=lambda message: message.physical_offset)[-count:]
        window *= 8


def _places(store: MessageStore, name: QueueName, offsets: range) -> Iterator[tuple[int, QueueName, int]]:
    """Yield places of a queue's entries from the last one on; an entry without a message stays with the one after."""
    queue, place = store.queues[name], _LAST
    for at in reversed(offsets):
        stored, size = PLACE.unpack_from(queue.read(at, 1) or bytes(ENTRY_SIZE))
        if 0 < size < HOLE_SIZE and stored >= 0:
            place = min(place, stored)
        yield place, name, at


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


# ---- searches as a broker does

_LAST: Final = (1 << 63) - 1


def query(arguments: argparse.Namespace, output: Output) -> int:
    """Print the messages with a key, or with an id."""
    by_key = arguments.topic is not None or arguments.key is not None
    if by_key == (arguments.id is not None):
        raise InputError("expected either --topic and --key, or --id")
    clock = age_clock(arguments.store, arguments.begin, arguments.end)
    if by_key:
        if not arguments.topic or not arguments.key:
            raise InputError("a search by key needs both --topic and --key")
        begin = 0 if arguments.begin is None else parse_time(arguments.begin, clock)
        end = _LAST if arguments.end is None else parse_time(arguments.end, clock)
        with open_store(arguments) as store:
            messages = store.find_by_key(arguments.topic, arguments.key, begin, end, arguments.max, exact=False)
            _print_checked(arguments, output, messages, store.levels)
            if len(messages) >= arguments.max:
                complain(f"note: {len(messages)} messages, as many as --max allows; there may be more")
            if output.is_on_terminal:  # programs get no line if nothing is found
                note_topic_of(store, arguments.topic, output)
    else:
        check_id(arguments.id)
        with open_store(arguments) as store:
            _print_checked(arguments, output, store.find_by_id(arguments.id), store.levels)
    return 0
