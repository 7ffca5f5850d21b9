"""``dump``: the log, record by record."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Final

from librmq.cli.output import DAMAGED, Output, complain
from librmq.cli.progress import ProgressBar
from librmq.cli.rows import blank_row, message_row
from librmq.cli.stores import files_and_config
from librmq.commitlog import CommitLog
from librmq.errors import CorruptionError
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.files.seam import Damage
from librmq.message.delay_levels import DelayLevels
from librmq.message.frames import LogItem
from librmq.message.message import StoredMessage
from librmq.store.format.directory import COMMITLOG
from librmq.store.recovery.salvage import find_record

_ZEROS: Final = bytes(1 << 20)


def dump(arguments: argparse.Namespace, output: Output) -> int:
    """Print every record up to the first damage; with ``--all`` also the records behind it."""
    files, config = files_and_config(arguments, log_only=True)
    folder = os.path.join(arguments.store, COMMITLOG)
    sequence = MappedFileQueue(folder, config.commitlog_file_size, files, MappingPool(32), writable=False)
    levels = DelayLevels.parse(config.message_delay_level)
    damages: list[CorruptionError] = []
    items = _all_items(sequence, damages.append) if arguments.all else _items(sequence, arguments.as_recovered)
    begin = sequence.begin
    with ProgressBar("dump", sequence.end - begin, quiet=output.is_on_terminal) as bar:
        for physical_offset, size, raw in items:
            bar.to(physical_offset - begin)
            if raw is None:
                output.row(blank_row(physical_offset, size))
                continue
            message = StoredMessage(raw)
            output.row(message_row(message, levels, physical_offset))
            if arguments.all and not message.crc_ok:
                path = sequence.path_at(physical_offset)
                damages.append(CorruptionError(path, physical_offset, "checksum", "the body's checksum is wrong"))
    output.close()
    check_queues(arguments, files, config)
    for damage in damages:
        complain(f"librmq dump: {damage}")
    return DAMAGED if damages else 0


def _items(sequence: MappedFileQueue, as_recovered: bool) -> Iterator[LogItem]:
    """Yield records and blanks up to the log's end.

    Raises:
        CorruptionError: The bytes are neither a record nor a blank.
    """
    try:
        yield from _whole_files(sequence, sequence.begin, check_body=True)
    except CorruptionError as error:
        if not ends_at(sequence, error.offset) and not (as_recovered and cut_at(sequence, error) is not None):
            raise


def _all_items(sequence: MappedFileQueue, damaged: Callable[[CorruptionError], object]) -> Iterator[LogItem]:
    """Yield records and blanks up to the log's end, call ``damaged`` for each damage, and continue behind it."""
    at = sequence.begin
    while True:
        try:
            yield from _whole_files(sequence, at, check_body=False)
        except CorruptionError as error:
            if ends_at(sequence, error.offset):
                return
            damaged(error)
            following = find_record(sequence, error.offset + 1, check_body=False)
            if following is None:
                return
            at = following
        else:
            return


def _whole_files(sequence: MappedFileQueue, begin: int, *, check_body: bool) -> Iterator[LogItem]:
    """Yield records and blanks to the end of the last file, except a blank there, before which the log ends."""
    log = CommitLog(sequence)
    log.end = sequence.end
    for physical_offset, size, raw in log.scan(begin, check_body=check_body):
        if raw is None and physical_offset + size == sequence.end:
            return
        yield physical_offset, size, raw


def cut_at(sequence: MappedFileQueue, error: CorruptionError) -> Damage | None:
    """Return the damage that ends the log, if sound records follow it."""
    log, at = CommitLog(sequence), error.offset
    cut = Damage(error.file, at, error.kind, error.what, log.data_behind(at))
    following = find_record(sequence, at + max(log.unfinished_at(at), 1), at + cut.bytes)
    return None if following is None else cut


def ends_at(sequence: MappedFileQueue, physical_offset: int) -> bool:
    """Return whether the log ends here: only zeros follow in all files, or a batch that is not completely written."""
    unfinished = CommitLog(sequence).unfinished_at(physical_offset)
    if unfinished:
        return find_record(sequence, physical_offset + unfinished) is None
    at = physical_offset
    while (file := sequence.file_at(at)) is not None:
        start = at % file.size
        block = file.buffer[start : start + len(_ZEROS)]
        if block != _ZEROS[: len(block)]:
            return False
        at += len(block)
    return True
