"""``export``: messages to Parquet, CSV or JSON lines."""

from __future__ import annotations

import argparse
import dataclasses

from librmq.cli.input import parse_time
from librmq.cli.output import Output
from librmq.cli.progress import ProgressBar
from librmq.clock import SystemClock
from librmq.errors import InputError
from librmq.runtime.headway import watched

__all__ = ["export"]


def export(arguments: argparse.Namespace, output: Output) -> int:
    """Export messages, and print a row that says how many."""
    from librmq.columns import ReaderKeywords
    from librmq.columns import export as export_messages

    clock = SystemClock()
    if not (arguments.processes.isascii() and arguments.processes.isdigit()):
        raise InputError(f"--processes: expected a number, found {arguments.processes!r:.80}")
    settings = ReaderKeywords(
        topic=arguments.topic,
        tags=arguments.tag,
        sql=arguments.sql,
        processes=int(arguments.processes),
        fail_on_data_loss=not arguments.skip_deleted,
    )
    if arguments.columns is not None:
        settings["columns"] = arguments.columns.split(",")
    if arguments.since is not None:
        settings["since"] = parse_time(arguments.since, clock)
    if arguments.until is not None:
        settings["until"] = parse_time(arguments.until, clock)

    def show(done: int, total: int | None) -> None:
        if total is not None:  # otherwise these are bytes of the log, which opening walks over
            bar.advance(done, total)

    with ProgressBar("export", 0, "messages") as bar, watched(show):
        made = export_messages(
            arguments.store,
            arguments.out,
            format=arguments.file_format,
            partition_by=arguments.partition_by.split(",") if arguments.partition_by else (),
            **settings,
        )
    output.row({"type": "export", **dataclasses.asdict(made)})
    return 0
