"""Find the store that a path or URL means: the folder itself, its log, a folder above it, or a local copy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from librmq.cli.commands import READING
from librmq.cli.output import complain, name_as
from librmq.errors import InputError

if TYPE_CHECKING:
    from librmq.columns import RemoteStore

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


# ------------------------------------------------------------------------------------------------------------- URLs


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
