"""``export``: messages to Parquet, CSV or JSON lines."""

from __future__ import annotations

import argparse
import re
from typing import Final

from librmq.cli.input import age_clock, parse_time
from librmq.cli.output import Output
from librmq.cli.progress import ProgressBar
from librmq.cli.selection import check_times
from librmq.cli.stores import storage_options
from librmq.cli.unknown_names import note_topic
from librmq.errors import CorruptionError, InputError
from librmq.files.disk import DiskFiles
from librmq.runtime.headway import watched
from librmq.store.format import directory

_MODES: Final = re.compile(r" \(mode PERMISSIVE[^)]*\)")
"""What an error advises users of columns and Spark; the command has no modes."""


def export(arguments: argparse.Namespace, output: Output) -> int:
    """Export messages, and print a row that says how many."""
    from librmq.columns import ReaderKeywords
    from librmq.columns import export as export_messages

    clock = age_clock(arguments.store, arguments.since, arguments.until)
    settings = ReaderKeywords(
        topic=re.compile("(?s).*") if arguments.all and not arguments.topic else arguments.topic,
        tags=arguments.tag,
        sql=arguments.sql,
        processes=_queue_number("--processes", arguments.processes),
        fail_on_data_loss=not arguments.skip_deleted,
        as_recovered=arguments.as_recovered,
    )
    if (options := storage_options(arguments)) is not None:
        settings["storage_options"] = options
    if arguments.columns is not None:
        settings["columns"] = arguments.columns.split(",")
    since, until = (None if text is None else parse_time(text, clock) for text in (arguments.since, arguments.until))
    check_times(arguments, since, until)
    if since is not None:
        settings["since"] = since
    if until is not None:
        settings["until"] = until
    if arguments.queue is not None:
        settings["queue"] = [_queue_number("--queue", queue_id) for queue_id in arguments.queue]

    def show(done: int, total: int | None) -> None:
        if total is not None:  # otherwise these are bytes of the log, which opening walks over
            bar.advance(done, total)

    with ProgressBar("export", 0, "messages") as bar, watched(show):
        try:
            exported = export_messages(
                arguments.store,
                arguments.out,
                format=arguments.file_format,
                partition_by=arguments.partition_by.split(",") if arguments.partition_by else (),
                grep=arguments.grep,
                **settings,
            )
        except CorruptionError as error:
            what = _MODES.sub("", error.what)
            if error.kind in ("checksum", "record") and not arguments.as_recovered:
                what += "; --as-recovered exports the messages before it"
            raise CorruptionError(error.file, error.offset, error.kind, what) from None
    if not exported.rows and arguments.topic and "://" not in arguments.store:
        topics = {topic for topic, _ in directory.list_queues(arguments.store, DiskFiles())}
        for topic in arguments.topic:
            note_topic(topic, topics, output)
    output.row(
        {
            "type": "export",
            "path": exported.path,
            "rows": exported.rows,
            "files": exported.files,
            "skipped": exported.skipped,
        }
    )
    return 0


def _queue_number(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return int(text)
    raise InputError(f"{name}: expected a whole number, found {text!r:.80}")
