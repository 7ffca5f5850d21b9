"""Open a store to change it, or to preview a change in memory."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from librmq.cli.input import settle_config
from librmq.clock import ManualClock, SystemClock
from librmq.diagnosis.findings import named
from librmq.errors import InputError
from librmq.files.disk import DiskFiles
from librmq.files.memory import OverlayFiles
from librmq.files.seam import Files
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import CONFIG, check_kind

if TYPE_CHECKING:
    from librmq.broker import Broker
    from librmq.config import StoreConfig

_QUEUES: Final = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", re.ASCII)


@contextmanager
def open_broker(arguments: argparse.Namespace) -> Iterator[Broker]:
    """Open the broker of a store, which does nothing by itself; with ``--dry-run`` in memory alone.

    Raises:
        StoreLockedError: Another process owns the store; the error says which.
    """
    from librmq.broker import Broker
    from librmq.runtime.runner import ManualRunner

    files, config = _files_and_config(arguments)
    runner = ManualRunner(ManualClock(SystemClock().now_ms()))  # whose time stands still
    with Broker.open(arguments.store, runner=runner, files=files, store_config=config) as broker:
        yield broker


@contextmanager
def open_to_change(arguments: argparse.Namespace) -> Iterator[tuple[MessageStore, BrokerTables]]:
    """Open a store and the broker's tables in it, which are saved at the end; with ``--dry-run`` in memory alone.

    Raises:
        StoreLockedError: Another process owns the store; the error says which.
    """
    files, config = _files_and_config(arguments)
    with MessageStore.open(arguments.store, config, files=files) as store:
        tables = BrokerTables.open(os.path.join(arguments.store, CONFIG), files=files)
        yield store, tables
        tables.persist(SystemClock().now_ms())


def _files_and_config(arguments: argparse.Namespace) -> tuple[Files, StoreConfig | None]:
    """Return where changes go, and the settings that a file names; refuse a folder of another kind."""
    files: Files = OverlayFiles() if arguments.dry_run else DiskFiles()
    check_kind(arguments.store, files)
    return files, None if arguments.config is None else settle_config(arguments.store, files, arguments.config)


def select_queues(topic: str, text: str | None, ids: Collection[int]) -> list[int]:
    """Return the queues that ``--queue`` names, such as ``3`` or ``0,3,5-9``; without it all.

    Raises:
        InputError: The text is malformed, or the topic has no such queue.
    """
    if text is None:
        return sorted(ids)
    bounds = (
        [[int(queue_id) for queue_id in part.split("-")] for part in text.split(",")] if _QUEUES.fullmatch(text) else []
    )
    if not bounds or any(bound != sorted(bound) for bound in bounds):
        raise InputError(f"--queue: expected queue ids such as 3, or 0,3,5-9, found {text!r:.80}")
    if any(queue_id not in ids for bound in bounds for queue_id in bound):
        raise InputError(f"topic {topic!r} has no queue {text}: its queues are {named(ids)}")
    return sorted({queue_id for queue_id in ids if any(bound[0] <= queue_id <= bound[-1] for bound in bounds)})
