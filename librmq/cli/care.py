"""``verify``, ``recover``, ``load``, ``broker-conf``: checking, repairing and continuing a store."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from librmq.cli.input import settle_config, standard_input
from librmq.cli.main import DAMAGED
from librmq.cli.output import Output, complain
from librmq.files import DiskFiles
from librmq.layout import broker_conf as broker_conf_of
from librmq.layout import check_kind

__all__ = ["broker_conf", "load", "recover", "verify"]


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Print what is damaged; changes nothing."""
    from librmq import verify
    from librmq.cli.rows import verify_row

    files = DiskFiles()
    check_kind(arguments.store, files)
    config = settle_config(arguments.store, files, arguments.config)
    verdict = verify.verify(arguments.store, config, files)
    output.row(verify_row(arguments.store, verdict))
    output.close()
    for note in verdict.notes:
        complain(f"note: {note}")
    return 0 if verdict.sound else DAMAGED


def recover(arguments: argparse.Namespace, output: Output) -> int:
    """Recover the store in place and print what it has then, and what was cut."""
    from librmq.cli.rows import cut_row, store_row
    from librmq.store import MessageStore

    files = DiskFiles()
    check_kind(arguments.store, files)
    config = settle_config(arguments.store, files, arguments.config)
    with MessageStore.open(arguments.store, config, files=files, thorough=True) as store:
        row = store_row(store, "after_load")
        row["cut"] = [cut_row(arguments.store, cut) for cut in store.recovered]
    output.row(row)
    return 0


def load(arguments: argparse.Namespace, output: Output) -> int:
    """Apply the operations on standard input."""
    files = DiskFiles()
    check_kind(arguments.store, files, writable=True)
    config = settle_config(arguments.store, files, arguments.config)

    from librmq import load

    def write(row: dict[str, Any]) -> None:
        output.row(row)
        output.flush()

    load.run(
        arguments.store,
        config,
        standard_input(),
        write,
        warn=lambda reason: complain(f"librmq load: {reason}"),
    )
    return 0


def broker_conf(arguments: argparse.Namespace, output: Output) -> int:
    """Print the settings with which a real broker opens the store."""
    files = DiskFiles()
    check_kind(arguments.store, files)
    config = settle_config(arguments.store, files, arguments.config)
    sys.stdout.write(broker_conf_of(arguments.store, config))
    return 0
