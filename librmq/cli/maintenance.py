"""``verify``, ``recover``, ``load``, ``broker-conf``: checking, repairing and continuing a store."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from librmq.cli.input import input_size, standard_input
from librmq.cli.output import DAMAGED, Output, complain
from librmq.cli.progress import ProgressBar, log_bar
from librmq.cli.stores import files_and_config, read_config
from librmq.clock import SystemClock
from librmq.errors import ConfigError, CorruptionError
from librmq.files.seam import Files
from librmq.store.format.directory import CONFIG
from librmq.store.format.directory import broker_conf as broker_conf_of

if TYPE_CHECKING:
    from librmq.filter import Registrations


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Print the damage of a store, without changing it."""
    from librmq.cli.rows import verify_row
    from librmq.store.recovery import verify

    files, config = files_and_config(arguments)
    with log_bar("verify", arguments.store, 2):
        verdict = verify.verify(arguments.store, config, files)
    output.row(verify_row(arguments.store, verdict))
    output.close()
    for note in verdict.notes:
        complain(f"note: {note}")
    if not verdict.sound:
        complain(
            "next: copy the folder, then `librmq recover STORE --dry-run` shows what a recovery would cut, and `librmq "
            "salvage STORE --into NEW` saves every record that can be read"
        )
    return 0 if verdict.sound else DAMAGED


def recover(arguments: argparse.Namespace, output: Output) -> int:
    """Recover the store in place, or with ``--dry-run`` in memory, and print its new state and the cuts."""
    from librmq.cli.rows import cut_row, store_row
    from librmq.store import MessageStore

    files, config = files_and_config(arguments)
    filters = _registrations(arguments.store, files) if config.enable_consumequeue_ext else None
    with (
        log_bar("recover", arguments.store, 2),
        MessageStore.open(arguments.store, config, files=files, thorough=True, filters=filters) as store,
    ):
        row = store_row(store, "after_load")
        row["cut"] = [cut_row(arguments.store, cut) for cut in store.recovered]
    output.row(row)
    return 0


def _registrations(store: str, files: Files) -> Registrations | None:
    """Return the groups' filters, for the bitmaps of rebuilt extension units; None if they are unreadable."""
    from librmq.store.format.broker_tables import BrokerTables

    try:
        return BrokerTables.open(os.path.join(store, CONFIG), files=files).registrations(SystemClock().now_ms())
    except (CorruptionError, ConfigError) as error:
        complain(f"note: bitmaps of filters are not rebuilt, so reads evaluate the filters instead: {error}")
        return None


def load(arguments: argparse.Namespace, output: Output) -> int:
    """Apply the operations on standard input."""
    _, config = files_and_config(arguments, writable=True)

    from librmq.cli import load
    from librmq.scheduling.timer_config import TimerConfig

    timer = TimerConfig.from_row(read_config(arguments.config)) if arguments.config else None

    def write(row: dict[str, Any]) -> None:
        output.row(row)
        output.flush()

    with ProgressBar("load", input_size(), quiet=output.is_on_terminal) as bar:
        load.run(
            arguments.store,
            config,
            _counted(standard_input(), bar),
            write,
            warn=lambda reason: complain(f"librmq load: {reason}"),
            timer=timer,
        )
    return 0


def _counted(lines: Iterable[bytes], bar: ProgressBar) -> Iterator[bytes]:
    for line in lines:
        yield line
        bar.advance(len(line))


def broker_conf(arguments: argparse.Namespace, output: Output) -> int:
    """Print the settings with which a RocketMQ broker opens the store."""
    _, config = files_and_config(arguments)
    sys.stdout.write(broker_conf_of(arguments.store, config))
    return 0
