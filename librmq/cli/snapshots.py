"""``salvage``, ``snapshot``, ``restore``: stores made from other stores, and records of damaged ones."""

from __future__ import annotations

import argparse

from librmq.cli.output import Output
from librmq.cli.progress import log_bar
from librmq.cli.rows import gap_row, message_row, snapshot_row
from librmq.cli.stores import files_and_config


def salvage(arguments: argparse.Namespace, output: Output) -> int:
    """Print every sound record and every gap, or make a new store of the records."""
    from librmq.message.delay_levels import DelayLevels
    from librmq.store.recovery import salvage
    from librmq.store.upkeep.snapshot import rescue

    store = arguments.store
    files, config = files_and_config(arguments, log_only=True)
    if arguments.into is not None:
        with log_bar("salvage", store, 3):
            rescued = rescue(
                store, arguments.into, config, files=files, tell=lambda gap: output.row(gap_row(store, gap))
            )
        output.row({"type": "salvage", "into": rescued.path, "records": rescued.records, "gaps": rescued.gaps})
        return 0
    levels = DelayLevels.parse(config.message_delay_level)
    with log_bar("salvage", store, 1, quiet=output.is_on_terminal):
        for item in salvage.records(store, files):
            output.row(gap_row(store, item) if isinstance(item, salvage.Gap) else message_row(item, levels))
    return 0


def snapshot(arguments: argparse.Namespace, output: Output) -> int:
    """Make a snapshot and print its row."""
    from librmq.store.upkeep.snapshot import snapshot

    files, config = files_and_config(arguments)
    with log_bar("snapshot", arguments.store, 3):
        copy = snapshot(arguments.store, arguments.target, config, copy=arguments.copy, files=files)
    output.row(snapshot_row(copy))
    return 0


def restore(arguments: argparse.Namespace, output: Output) -> int:
    """Make a store from a snapshot and print its row."""
    from librmq.store.upkeep.snapshot import restore

    files, config = files_and_config(arguments)
    with log_bar("restore", arguments.store, 3):
        restored = restore(arguments.store, arguments.target, config, files=files)
    output.row(snapshot_row(restored))
    return 0
