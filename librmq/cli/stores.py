"""The store that a command names: where it is, its settings, and how the command opens it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from librmq.cli.commands import READING
from librmq.cli.input import settle_config
from librmq.cli.output import complain, name_as
from librmq.clock import ManualClock, SystemClock
from librmq.diagnosis.findings import named
from librmq.errors import InputError
from librmq.files.disk import DiskFiles
from librmq.files.overlay import OverlayFiles
from librmq.files.seam import Files
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import CONFIG, check_kind

if TYPE_CHECKING:
    from librmq.broker import Broker
    from librmq.columns import RemoteStore
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


# ---- folders

_LOG: Final = "commitlog"
_DEEPEST: Final = 2
_MOST_FOLDERS: Final = 2000
_BY_QUEUES: Final = frozenset(("groups", "lag", "queue", "queues", "stats", "topics"))
"""Commands that read queues and tables, and of the log a few store times."""
_RECORD_BYTES: Final = 128
"""Enough of a record for its store time."""
_FEW_QUEUES: Final = 8


def locate(path: str) -> str:
    """Return the folder of the store that ``path`` means, with a note if it is another folder.

    A path without a store is returned unchanged, and the command refuses it.

    Raises:
        InputError: Several stores are below the path.
    """
    if os.path.lexists(os.path.join(path, _LOG)):
        return path
    absolute = os.path.abspath(path)
    stores = [os.path.dirname(absolute)] if os.path.basename(absolute) == _LOG else sorted(_below(path))
    if len(stores) > 1:
        names = ", ".join(stores[:5])
        raise InputError(f"{path}: no store, but {len(stores)} stores are below it ({names}): name one of them")
    if not stores:
        return path
    complain(f"note: the store is {stores[0]}")
    return stores[0]


def _below(path: str) -> Iterator[str]:
    """Yield the folders with a log up to `_DEEPEST` levels below a folder."""
    level, visited = [path], 0
    for _ in range(_DEEPEST):
        following = []
        for folder in level:
            with suppress(OSError), os.scandir(folder) as entries:
                inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
                visited += len(inside)
                if visited > _MOST_FOLDERS:
                    return
                following += inside
        yield from (folder for folder in following if os.path.isdir(os.path.join(folder, _LOG)))
        level = [folder for folder in following if not os.path.isdir(os.path.join(folder, _LOG))]


# ---- URLs


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/store``."""
    return "://" in path and not os.path.lexists(path)


def storage_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the arguments of the file system in ``--storage-options``.

    Raises:
        InputError: They are no JSON object.
    """
    text = getattr(arguments, "storage_options", None)
    if text is None:
        return None
    from librmq.cli.input import parse_object

    try:
        return parse_object(text)
    except InputError as error:
        raise InputError(f'--storage-options: {error}; an example: \'{{"region": "eu-central-1"}}\'') from None


def local_copy(arguments: argparse.Namespace, url: str) -> str:
    """Return the folder of a local copy of the store behind a URL, for as long as ``arguments`` exist.

    Of a store that was closed it has what the command reads, of another one everything.

    Raises:
        InputError: The command needs the store's folder.
        StoreError: The store can't be read there.
    """
    from librmq.cli.progress import watching_bar
    from librmq.columns.remote import RemoteStore, located

    _check_reads(arguments, url)
    store = located(url, storage_options(arguments))
    if isinstance(store, str):  # file://
        return locate(store)
    is_part = (
        arguments.command.name in _BY_QUEUES
        and getattr(arguments, "by", None) != "origin"
        and getattr(arguments, "every", None) is None
    )
    if not is_part:
        store = RemoteStore.whole(store.url, store.storage_options)
    arguments.copies = [*getattr(arguments, "copies", ()), store]
    with watching_bar("fetch", 0):
        path = store.path
        name_as(path, store.url)
        if is_part:
            _fetch_times(store, arguments)
    return path


def _check_reads(arguments: argparse.Namespace, url: str) -> None:
    name = arguments.command.name
    writes = next((action for action in ("resend", "follow") if getattr(arguments, action, False)), None)
    if (writes is None and name in READING) or name == "report":
        return
    what = name if writes is None else f"{name} --{writes}"
    raise InputError(
        f"{url}: {what} needs the folder of a store, found a URL: copy the store to a folder first (from S3: "
        "aws s3 cp --recursive URL FOLDER), and name the folder"
    )


def _fetch_times(store: RemoteStore, arguments: argparse.Namespace) -> None:
    """Fetch the records whose store times a command prints, all at once."""
    from librmq.diagnosis.backlog import first_place, lag
    from librmq.diagnosis.view import StoreView

    with StoreView.open(store.path) as view:
        last = sorted(view.ranges, key=lambda name: view.ranges[name].max_physic_offset)[-_FEW_QUEUES:]
        entries = {(name, view.ranges[name].max_offset - 1) for name in last}
        if arguments.command.name == "lag":
            for row in lag(view, group=arguments.group, topic=arguments.topic, times=False):
                if row.lag:
                    entries.add(((row.topic, row.queue_id), max(row.min_offset, row.consumer_offset or 0)))
        elif arguments.command.name in ("stats", "topics"):
            for name, state in view.ranges.items():
                entries |= {(name, state.min_offset), (name, state.max_offset - 1)}
        places = {
            first_place(view.store.queues[name], queue_offset)
            for name, queue_offset in entries
            if queue_offset < view.ranges[name].max_offset
        }
        store.fetch_at((place for place in places if place >= 0), _RECORD_BYTES)
