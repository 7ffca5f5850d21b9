"""The store that a command names: where it is, its settings, and how the command opens it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from librmq.cli._output import complain, name_as
from librmq.cli._rows import parse_object
from librmq.cli._selection import age_clock, iso_time, parse_time
from librmq.cli._syntax import READING
from librmq.clock import ManualClock, SystemClock
from librmq.config import StoreConfig
from librmq.errors import BrokerUnreachableError, ConfigError, CorruptionError, InputError, NotAStoreError
from librmq.files import Damage, DiskFiles, Files, OverlayFiles, is_folder
from librmq.runtime.event_log import held_back
from librmq.store.format import directory
from librmq.store.format.documents import OWN_FOLDER
from librmq.store.format.log_paths import name_paths

if TYPE_CHECKING:  # commands that read the log alone need none of these
    from librmq.broker import AdministeredRoute, Broker, StoreRoute
    from librmq.columns import RemoteStore
    from librmq.diagnosis import ClusterView, StoreView
    from librmq.store import BrokerTables, Condition, MessageStore
    from librmq.wire.share_links import OwnedStore

_DEEPEST: Final = 2
_MOST_FOLDERS: Final = 2000
_BY_QUEUES: Final = frozenset(("groups", "lag", "queue", "queues", "stats", "topics"))
"""Commands that read queues and tables, and of the log a few store times."""
_RECORD_BYTES: Final = 128
"""Enough of a record for its store time."""
_FEW_QUEUES: Final = 8
_QUEUES: Final = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", re.ASCII)


# ---- folders


_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):\d{1,5}")


def names_cluster(place: str) -> bool:
    """Return whether the place that a command names is the ``HOST:PORT`` of a name server, and no file."""
    return not os.path.lexists(place) and _ADDRESS.fullmatch(place) is not None


def folder_of_place(place: str, log_paths: Sequence[str] = (), hint: str = "") -> str:
    """Return the folder of the store in a place that a command names.

    Raises:
        InputError: There is none, which ``hint`` continues, or librmq does not write to such a store.
    """
    if not os.path.isdir(place):
        raise InputError(f"{place}: expected the folder of a store, or the HOST:PORT of a name server{hint}")
    folder = locate(place, log_paths)
    directory.check_kind(folder, DiskFiles())
    return folder


def locate(path: str, log_paths: Sequence[str] = ()) -> str:
    """Return the folder of the store that ``path`` means, with a note if it is another folder.

    Readers of this process find the files of ``log_paths`` in its log too. A path without a store is returned
    unchanged, and the command refuses it.

    Raises:
        InputError: Several stores are below the path.
        NotAStoreError: One of ``log_paths`` has no files of a log.
    """
    name_paths(os.path.join(path, directory.COMMITLOG), log_paths, DiskFiles())
    if log_paths or os.path.lexists(os.path.join(path, directory.COMMITLOG)):
        return path
    absolute = os.path.abspath(path)
    stores = [os.path.dirname(absolute)] if os.path.basename(absolute) == directory.COMMITLOG else sorted(_below(path))
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
        yield from (folder for folder in following if os.path.isdir(os.path.join(folder, directory.COMMITLOG)))
        level = [folder for folder in following if not os.path.isdir(os.path.join(folder, directory.COMMITLOG))]


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
    from librmq.cli._output import watching_bar
    from librmq.columns import RemoteStore
    from librmq.columns.remote import located

    _check_reads(arguments, url)
    store = located(url, storage_options(arguments))
    if isinstance(store, str):  # file://
        return locate(store)
    is_part = (
        arguments.command.name in _BY_QUEUES
        and getattr(arguments, "by", None) != "origin"
        and getattr(arguments, "every", None) is None
        and getattr(arguments, "at", None) is None
    )
    with watching_bar("fetch", 0):
        if not is_part or _counts_receives(store, arguments):
            store, is_part = RemoteStore.whole(store.url, store.storage_options), False
        arguments.copies = [*getattr(arguments, "copies", ()), store]
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


def _counts_receives(store: RemoteStore, arguments: argparse.Namespace) -> bool:
    """Return whether a command counts what POP holds, which is in the log."""
    from librmq.diagnosis import StoreView

    if arguments.command.name not in ("groups", "lag"):
        return False
    with StoreView.open(store.path) as view:
        return bool(view.revive_topics)


def _fetch_times(store: RemoteStore, arguments: argparse.Namespace) -> None:
    """Fetch the records whose store times a command prints, all at once."""
    from librmq.diagnosis import StoreView, lag

    with StoreView.open(store.path) as view:
        last = sorted(view.ranges, key=lambda name: view.ranges[name].max_physic_offset)[-_FEW_QUEUES:]
        entries = {(name, view.ranges[name].max_offset - 1) for name in last}
        if arguments.command.name == "lag":
            for row in lag(view, group=arguments.group, topic=arguments.topic, times=False):
                if row.lag:
                    entries.add(((row.topic, row.queue_id), row.next_offset))
        elif arguments.command.name in ("stats", "topics"):
            for name, state in view.ranges.items():
                entries |= {(name, state.min_offset), (name, state.max_offset - 1)}
        messages = {
            view.store.queues[name].first_message(queue_offset)
            for name, queue_offset in entries
            if queue_offset < view.ranges[name].max_offset
        }
        store.fetch_at((message[1] for message in messages if message is not None), _RECORD_BYTES)


# ---- settings


def read_config(config_file: str) -> dict[str, Any]:
    """Return the settings in a file."""
    try:
        with open(config_file, "rb") as file:
            return parse_object(file.read(1 << 20))
    except OSError as error:
        raise InputError(f"{config_file}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{config_file}: {error}") from None


def settle_config(store: str, files: Files, config_file: str | None) -> StoreConfig:
    """Return the settings for a store: from its files, then the JSON in ``config_file``, then 4.9's defaults."""
    config = directory.infer_config(store, files)
    if config_file is None:
        return config
    row = read_config(config_file)
    try:
        config = StoreConfig.from_row(row, config)
        directory.check_config(store, config, files)
    except ConfigError as error:
        raise InputError(f"{config_file}: {error}") from None
    return config


def files_and_config(arguments: argparse.Namespace, *, writable: bool = False) -> tuple[Files, StoreConfig]:
    """Return the files and settings of the store that a command names; with ``--dry-run`` changes stay in memory.

    Raises:
        InputError: A setting is unknown or out of range, or contradicts the store's files.
        NotAStoreError: There is no store that the command can use, as `check_kind` says.
    """
    files: Files = DiskFiles(follow_links=getattr(arguments, "follow_links", False))
    if getattr(arguments, "dry_run", False):
        files = OverlayFiles()
    directory.check_kind(arguments.store, files, writable=writable)
    return files, settle_config(arguments.store, files, arguments.config)


def recorded_settings(path: str, files: Files) -> dict[str, Any]:
    """Return the settings that a store has recorded; none, and a note, if the record is unreadable."""
    from librmq.broker.config import Promises

    try:
        return Promises.read(path, files).values()
    except (ConfigError, CorruptionError) as error:
        complain(f"note: the recorded settings are unknown: {error}")
        return {}


# ---- a store to read


def open_store(arguments: argparse.Namespace, *, all_in_memory: bool = False) -> MessageStore:
    """Open the store that a command reads, without a lock and without changes.

    With ``all_in_memory`` a read returns as many old messages as new ones, whatever the machine's memory.
    """
    from librmq.store import MessageStore

    files, config = files_and_config(arguments)
    if all_in_memory:
        config = dataclasses.replace(
            config,
            max_transfer_count_on_disk=config.max_transfer_count_in_memory,
            max_transfer_bytes_on_disk=config.max_transfer_bytes_in_memory,
        )
    moment = read_moment(arguments)
    store = MessageStore.open(arguments.store, config, read_only=True, files=files, at=moment)
    if moment is not None:
        complain(
            f"note: the store as of {_described(store)}; progress, topics and groups back then are not kept, and due "
            "messages count as delivered"
        )
    check_opened(arguments, store)
    return store


def read_moment(arguments: argparse.Namespace) -> datetime | int | None:
    """Return the earlier moment at which a command shows the store; digits are a physical offset."""
    text = getattr(arguments, "at", None)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    time_ms = parse_time(text, age_clock(arguments.store, text), "a physical offset")
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _described(store: MessageStore) -> str:
    when = iso_time(store.past_ms) if store.past_ms else "before its first message"
    return f"{when}, when its log ended at {store.log.end}"


@contextmanager
def open_view(arguments: argparse.Namespace) -> Iterator[StoreView]:
    """View the store that a command reads, with the settings in ``--config`` if it is given."""
    from librmq.diagnosis import StoreView

    if arguments.config is None and getattr(arguments, "at", None) is None:
        with ExitStack() as opened:
            owner = _sharing_owner(arguments, opened)
            tables = None if owner is None else owner.tables
            view = opened.enter_context(StoreView.open(arguments.store, tables=tables, route=owner))
            check_opened(arguments, view.store)
            note_tables(view)
            yield view
    else:
        with open_store(arguments) as store:
            view = StoreView.over(store)
            note_tables(view)
            yield view


def _sharing_owner(arguments: argparse.Namespace, opened: ExitStack) -> OwnedStore | None:
    """Return the process that shares a store, with its tables as they are now; None without one that answers."""
    try:
        owner = opened.enter_context(shared_owner(arguments))
        if owner is not None:
            _ = owner.tables
        return owner
    except BrokerUnreachableError as error:
        complain(f"note: {error}; topics, groups and progress are those of its last save")
        return None


def note_replaced(tables: BrokerTables) -> None:
    """Say which tables were read from their backups."""
    for replaced in tables.replaced():
        complain(f"note: {replaced}")


def note_tables(view: StoreView) -> None:
    """Say which tables were read from their backups, and that the progress of groups is unknown, if that is so."""
    if not view.is_live:
        note_replaced(view.tables)
    if (why := view.unknown_progress) is not None:
        complain(f"note: {why}")


@contextmanager
def open_source(arguments: argparse.Namespace) -> Iterator[StoreView | ClusterView]:
    """View the store that a command reads, or the cluster in ``--route``.

    Raises:
        CorruptionError: The store is damaged.
        BrokerUnreachableError: No name server answers there.
        InputError: The command names a setting that only a store has.
    """
    if arguments.route is None:
        with open_view(arguments) as view:
            yield view
    else:
        with open_cluster(arguments) as cluster:
            yield cluster


@contextmanager
def open_cluster(arguments: argparse.Namespace) -> Iterator[ClusterView]:
    """Connect to the name server in ``--route``.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: The command names a setting that only a store has.
    """
    from librmq.cli._routes import connect_to
    from librmq.diagnosis import ClusterView

    if getattr(arguments, "config", None) is not None:
        raise InputError("--config describes the files of a store: leave it out with --route")
    with connect_to(arguments) as route:
        yield ClusterView(route)


def check_opened(arguments: argparse.Namespace, store: MessageStore) -> None:
    """Report what a store is short of.

    A command that reads a store which is not whole ends with status 1, unless ``--as-recovered`` is given.
    """
    condition = store.condition
    for damage in condition.damage:
        report_cut(arguments, damage)
    _note_begin(arguments, condition)
    arguments.opened = [*getattr(arguments, "opened", ()), (condition, store.log)]


def check_closed(arguments: argparse.Namespace) -> None:
    """Report the damage that a command has met after `check_opened`: of queues, and of records that it left out."""
    for condition, log in getattr(arguments, "opened", ()):
        for damage in condition.derived:
            report_cut(arguments, damage)
        if log.unreadable is not None:
            report_record(arguments, log.unreadable.offset, log.unreadable.what)


def check_queues(
    arguments: argparse.Namespace,
    files: Files,
    config: StoreConfig,
    compare: Callable[[MessageStore], object] = lambda _: None,
) -> None:
    """Report that a store lacks files of its log, for a command that has read only the log; ``compare`` gets it."""
    from librmq.store import MessageStore

    with (
        suppress(CorruptionError, NotAStoreError),  # this command does not read the damaged files
        MessageStore.open(arguments.store, config, read_only=True, files=files) as store,
    ):
        condition = store.condition
        for damage in condition.damage:
            if damage is not condition.cut or damage.kind == "ahead":  # the command has met other damage itself
                report_cut(arguments, damage)
        _note_begin(arguments, condition)
        compare(store)


def report_missing(
    arguments: argparse.Namespace, files: Files, config: StoreConfig | None = None, *, of_log: bool = False
) -> None:
    """Report what the store is short of, or only what its log lacks, as commands do that read messages."""
    from librmq.store import MessageStore

    with (
        suppress(CorruptionError, NotAStoreError),
        MessageStore.open(arguments.store, config, read_only=True, files=files) as store,
    ):
        condition = store.condition
        for damage in (*condition.lost, *condition.gaps) if of_log else condition.damage:
            report_cut(arguments, damage)


def _note_begin(arguments: argparse.Namespace, condition: Condition) -> None:
    """Say once that the store may lack files of its log's begin."""
    if condition.note and not getattr(arguments, "has_noted_begin", False):
        arguments.has_noted_begin = True  # a command can open its store many times
        complain(f"note: {condition.note}")


def report_cut(arguments: argparse.Namespace, damage: Damage) -> None:
    """Report once that the store is short of something: what follows the log's end, or files that are missing."""
    if _is_news(arguments, (damage.kind, damage.file)):
        complain(f"librmq {arguments.command.name}: {arguments.store}: {directory.told(damage)}")


def report_record(arguments: argparse.Namespace, physical_offset: int, what: str) -> None:
    """Report once that a record is damaged, which the command has left out, or printed as it is."""
    if _is_news(arguments, "record"):
        complain(
            f"librmq {arguments.command.name}: {arguments.store}: the record at {physical_offset} is damaged: {what}; "
            "librmq verify lists the damage"
        )


def report_left_out(arguments: argparse.Namespace, path: str) -> None:
    """Report that the numbers about a store of several can leave out messages, and first what it is short of."""
    arguments.store = path
    report_missing(arguments, DiskFiles())
    if _is_news(arguments, path):
        complain(
            f"librmq report: {path}: the store is damaged, and the numbers can leave out messages: librmq verify lists "
            "the damage, and librmq salvage saves what can be read"
        )


def _is_news(arguments: argparse.Namespace, what: object) -> bool:
    """Note that the store is short of something; return whether that is new, as a command can open it many times."""
    reported = vars(arguments).setdefault("is_cut_short", set())
    is_new = what not in reported
    reported.add(what)
    return is_new


# ---- a store to change


@contextmanager
def announced(arguments: argparse.Namespace) -> Iterator[None]:
    """Announce what an opening logs as what it would do, if ``--dry-run`` keeps it in memory."""
    if not getattr(arguments, "dry_run", False):
        yield
        return
    with held_back() as lines:
        try:
            yield
        finally:
            for line in lines:
                if line.record.levelno >= logging.WARNING:
                    complain(f"note: without --dry-run: {line.record.getMessage()}")


@contextmanager
def open_broker(arguments: argparse.Namespace, *, makes_store: bool = False) -> Iterator[Broker]:
    """Open the broker of a store, which does nothing by itself; with ``--dry-run`` in memory alone.

    With ``makes_store`` a new or empty folder becomes a store, and a note says so.

    Raises:
        StoreLockedError: Another process owns the store; the error says which.
    """
    from librmq.broker import Broker
    from librmq.runtime import ManualRunner

    files, config = files_and_config(arguments, writable=makes_store)
    if makes_store and not is_folder(files, os.path.join(arguments.store, directory.COMMITLOG)):
        complain(f"note: {arguments.store} had no store: a new one is made there")
    runner = ManualRunner(ManualClock(SystemClock().now_ms()))  # time stands still for a command
    name, cluster = directory.broker_names(arguments.store, files)  # with others it would make topics of its own
    with announced(arguments):
        broker = Broker.open(
            arguments.store, name=name, cluster_name=cluster, runner=runner, files=files, store_config=config
        )
    with broker:
        yield broker


@contextmanager
def shared_owner(arguments: argparse.Namespace) -> Iterator[OwnedStore | None]:
    """Connect to the process that shares the store that a command names; None if there is none.

    With ``--dry-run`` nothing is changed there.

    Raises:
        BrokerUnreachableError: It is stopped, or does not answer.
    """
    if sys.platform == "win32" or not os.path.isdir(os.path.join(arguments.store, OWN_FOLDER, "share")):
        yield None
        return
    from librmq.cli._routes import owner_of

    with owner_of(arguments.store, dry_run=getattr(arguments, "dry_run", False)) as owner:
        if owner is not None and arguments.config is not None:
            raise InputError("--config: leave it out, because a process shares the store, with its own settings")
        yield owner


@contextmanager
def open_running(arguments: argparse.Namespace, *, makes_store: bool = False) -> Iterator[Broker | OwnedStore]:
    """Open the broker of a store like `open_broker`, or connect to the process that shares it.

    Raises:
        StoreLockedError: Another process, which does not share it, owns the store.
        BrokerUnreachableError: The process that shares it is stopped, or does not answer.
    """
    with ExitStack() as opened:
        owner = opened.enter_context(shared_owner(arguments))
        yield opened.enter_context(open_broker(arguments, makes_store=makes_store)) if owner is None else owner


@contextmanager
def open_administered(arguments: argparse.Namespace) -> Iterator[tuple[AdministeredRoute, StoreView | ClusterView]]:
    """Open the broker of a store like `open_running`, or connect to the cluster in ``--route``; view what is there.

    Raises:
        StoreLockedError: Another process, which does not share it, owns the store.
        BrokerUnreachableError: The process that shares it is stopped, or no name server answers.
    """
    if arguments.route is None:
        with open_running(arguments) as broker:
            yield broker, view_of(broker)
    else:
        from librmq.cli._routes import ActingRoute

        with open_cluster(arguments) as cluster:
            yield ActingRoute(cluster.route, dry_run=arguments.dry_run), cluster


def view_of(broker: StoreRoute) -> StoreView:
    from librmq.diagnosis import StoreView

    return StoreView.over(broker.store, broker.tables)


def select_queues(topic: str, text: str | None, ids: Collection[int]) -> list[int]:
    """Return the queues that ``--queue`` names, such as ``3`` or ``0,3,5-9``; without it all."""
    if text is None:
        return sorted(ids)
    bounds = (
        [[int(queue_id) for queue_id in part.split("-")] for part in text.split(",")] if _QUEUES.fullmatch(text) else []
    )
    if not bounds or any(bound != sorted(bound) for bound in bounds):
        raise InputError(f"--queue: expected queue ids such as 3, or 0,3,5-9, found {text!r:.80}")
    if any(queue_id not in ids for bound in bounds for queue_id in bound):
        from librmq.formatting import id_ranges

        raise InputError(f"topic {topic!r} has no queue {text}: its queues are {id_ranges(ids)}")
    return sorted({queue_id for queue_id in ids if any(bound[0] <= queue_id <= bound[-1] for bound in bounds)})
