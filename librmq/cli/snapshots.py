"""``salvage``, ``snapshot``, ``restore``: stores made of other stores, and what can be got out of a damaged one."""

from __future__ import annotations

import argparse

from librmq.cli.input import settle_config
from librmq.cli.output import Output
from librmq.cli.rows import gap_row, message_row, snapshot_row
from librmq.files.disk import DiskFiles
from librmq.store.format.directory import check_kind

__all__ = ["restore", "salvage", "snapshot"]


def salvage(arguments: argparse.Namespace, output: Output) -> int:
    """Print every sound record and what is between them, or make a new store of the records."""
    from librmq.message.delay_levels import DelayLevels
    from librmq.store.recovery import salvage
    from librmq.store.upkeep.snapshot import rescue

    files, store = DiskFiles(), arguments.store
    check_kind(store, files, log_only=True)
    config = settle_config(store, files, arguments.config)
    if arguments.into is not None:
        made = rescue(store, arguments.into, config, files=files, tell=lambda gap: output.row(gap_row(store, gap)))
        output.row({"type": "salvage", "into": made.path, "records": made.records, "gaps": made.gaps})
        return 0
    levels = DelayLevels.parse(config.message_delay_level)
    for item in salvage.records(store, files):
        output.row(gap_row(store, item) if isinstance(item, salvage.Gap) else message_row(item, levels))
    return 0


def snapshot(arguments: argparse.Namespace, output: Output) -> int:
    """Make a snapshot and print what is in it."""
    from librmq.store.upkeep.snapshot import snapshot

    files = DiskFiles()
    check_kind(arguments.store, files)
    config = settle_config(arguments.store, files, arguments.config)
    made = snapshot(arguments.store, arguments.target, config, copy=arguments.copy, files=files)
    output.row(snapshot_row(made))
    return 0


def restore(arguments: argparse.Namespace, output: Output) -> int:
    """Make a store of a snapshot and print what is in it."""
    from librmq.store.upkeep.snapshot import restore

    files = DiskFiles()
    check_kind(arguments.store, files)
    config = settle_config(arguments.store, files, arguments.config)
    output.row(snapshot_row(restore(arguments.store, arguments.target, config, files=files)))
    return 0
