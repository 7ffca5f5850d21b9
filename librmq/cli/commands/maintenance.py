"""``verify``, ``recover``, ``salvage``, copies, ``settings``, ``who``: a store as a whole, and what uses it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from librmq.cli._output import (
    DAMAGED,
    INTERRUPTED,
    EndSignals,
    Output,
    ProgressBar,
    complain,
    end_signals,
    json_line,
    log_bar,
)
from librmq.cli._rows import Row, gap_row, message_line, snapshot_row
from librmq.cli._stores import announced, files_and_config, recorded_settings, report_missing
from librmq.clock import SystemClock
from librmq.errors import ConfigError, CorruptionError, InputError
from librmq.files import DiskFiles, Files, is_folder
from librmq.message import record
from librmq.message.topics import SystemTopic
from librmq.runtime.event_log import counted
from librmq.store import recognise
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.cluster import Replica
    from librmq.config import StoreConfig
    from librmq.filter import Registrations


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Print the damage of a store, without changing it."""
    from librmq.cli._rows import verify_row
    from librmq.store import verify as verify_store
    from librmq.store.format.broker_tables import repair_advice
    from librmq.store.format.spark_jobs import StagedRun

    files, config = files_and_config(arguments)
    with log_bar("verify", arguments.store, 2):
        verdict = verify_store(arguments.store, config, files)
    output.row(verify_row(arguments.store, verdict))
    output.close()
    report_missing(arguments, files, config)
    for note in (*verdict.notes, *StagedRun.notes(arguments.store, files)):
        complain(f"note: {note}")
    if verdict.recoverable:
        places = counted(len(verdict.recoverable), "place")
        complain(
            f"note: the store is recoverable: {places} as a kill, or a copy of a running store, leaves them, which the "
            "next opening repairs without a loss"
        )
    for damage in verdict.damage:
        if damage.kind == "config":
            complain(f"next: {repair_advice(damage.file, files)}")
    if any(damage.kind != "config" for damage in verdict.damage):
        cut = "copy the folder, then `librmq recover STORE --dry-run` shows what a recovery would cut, and "
        database = directory.tables_database(os.path.join(arguments.store, directory.CONFIG), files)
        if database is not None or recognise(arguments.store, files).derives_queues:
            cut = ""
        complain(f"next: {cut}`librmq salvage STORE --into NEW` saves every record that can be read")
    return 0 if verdict.sound else DAMAGED


def can_start(arguments: argparse.Namespace, output: Output) -> int:
    """Print whether a broker and librmq start on a store, then why; status 1 if one refuses or loses anything."""
    from librmq.diagnosis import can_start as judge

    files, config = files_and_config(arguments)
    with log_bar("can-start", arguments.store, 1):
        verdict = judge(arguments.store, config, files=files)
    row = {name: value for name, value in verdict._asdict().items() if name != "reasons"}
    output.row({"type": "start", **row})
    for reason in verdict.reasons:
        output.row({"type": "reason", **reason._asdict()})
    output.close()
    report_missing(arguments, files, config, of_log=True)
    complain(f"note: {verdict.sentence(arguments.store)}")
    return DAMAGED if {verdict.broker, verdict.librmq} & {"loses", "refuses"} else 0


def recover(arguments: argparse.Namespace, output: Output) -> int:
    """Recover the store in place, or with ``--dry-run`` in memory, and print its new state and the cuts."""
    from librmq.cli._rows import cut_row, store_row
    from librmq.store import MessageStore

    files, config = files_and_config(arguments)
    filters = _registrations(arguments.store, files) if config.enable_consumequeue_ext else None
    with (
        log_bar("recover", arguments.store, 2),
        announced(arguments),
        MessageStore.open(arguments.store, config, files=files, thorough=True, filters=filters) as store,
    ):
        row = store_row(store)
        row["cut"] = [cut_row(arguments.store, cut) for cut in store.recovered]
    output.row(row)
    return 0


def _registrations(store: str, files: Files) -> Registrations | None:
    """Return the groups' filters, for the bitmaps of rebuilt extension units; None if they are unreadable."""
    from librmq.store import BrokerTables

    try:
        tables = BrokerTables.open(os.path.join(store, directory.CONFIG), files=files)
        return tables.registrations(SystemClock().now_ms())
    except (CorruptionError, ConfigError) as error:
        complain(f"note: bitmaps of filters are not rebuilt, so reads evaluate the filters instead: {error}")
        return None


def broker_conf(arguments: argparse.Namespace, output: Output) -> int:
    """Print the settings with which a RocketMQ broker opens the store."""
    files, config = files_and_config(arguments)
    directory.check_kind(arguments.store, files, writable=True)
    sys.stdout.write(broker_properties(arguments.store, config))
    if directory.is_made_by_librmq(arguments.store, files):
        sys.stdout.write(_TIMER_NOTE)
        waiting = _count_timers(arguments.store, config, files)
        if waiting:
            complain(
                f"librmq: {arguments.store}: {waiting} messages wait in the timer (librmq pending), and RocketMQ 4.9 "
                "would not deliver them: let them pass, cancel them, or run RocketMQ 5 with timerWheelEnable=true"
            )
    return 0


def broker_properties(path: str, config: StoreConfig) -> str:
    """Return the properties for a 4.9 broker to open the store in folder ``path`` with settings ``config``."""
    root = os.path.abspath(path)
    if any(unicodedata.category(character) == "Cc" for character in root):
        raise ConfigError(f"{root!r}: expected a path without control characters: move the store elsewhere")
    if "," in root:
        raise ConfigError(
            f"{root}: a broker reads a path with a comma as several, and deletes the queues: move the store elsewhere"
        )
    properties = {
        "storePathRootDir": root,
        "storePathCommitLog": os.path.join(root, directory.COMMITLOG),
        "mappedFileSizeCommitLog": config.commitlog_file_size,
        "mappedFileSizeConsumeQueue": config.consumequeue_file_size,
        "enableConsumeQueueExt": config.enable_consumequeue_ext,
        "enableCalcFilterBitMap": config.enable_consumequeue_ext and config.enable_calc_filter_bitmap,
        "mappedFileSizeConsumeQueueExt": config.consumequeue_ext_file_size,
        "maxHashSlotNum": config.max_hash_slot_num,
        "maxIndexNum": config.max_index_num,
        "maxMessageSize": min(config.max_message_size, config.commitlog_file_size - record.BLANK_SIZE),
        "messageDelayLevel": config.message_delay_level,
        "enablePropertyFilter": config.enable_property_filter,
    }
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in properties.items()}
    return "".join(f"{name}={_property(text)}\n" for name, text in texts.items())


def _property(value: str) -> str:
    """Return a value as ``java.util.Properties`` reads it: in Latin-1, with escapes."""
    escaped = []
    for character in value:
        if character == "\\":
            escaped.append("\\\\")
        elif " " <= character <= "~":
            escaped.append(character)
        else:
            units = character.encode("utf-16-be", "surrogatepass").hex()
            escaped.append("".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)))
    text = "".join(escaped)
    return f"\\{text}" if text.startswith(" ") else text


_TIMER_NOTE: Final = (
    "# RocketMQ 4.9 delivers no message that waits for a time other than a delay level: librmq pending lists them,\n"
    "# with kind timer. librmq and RocketMQ 5 with timerWheelEnable=true deliver them.\n"
)


def _count_timers(path: str, config: StoreConfig, files: Files) -> int:
    """Return the number of messages that wait in a store's timer."""
    from librmq.scheduling.timer import waiting_timers
    from librmq.store import MessageStore

    if not is_folder(files, directory.queue_folder(path, SystemTopic.TIMER, 0)):
        return 0
    with MessageStore.open(path, config, files=files, read_only=True) as store:
        return sum(1 for _ in waiting_timers(store))


# ---- stores made from other stores


def salvage(arguments: argparse.Namespace, output: Output) -> int:
    """Print every sound record and every gap, or make a new store of the records."""
    from librmq.message import DelayLevels
    from librmq.store import rescue
    from librmq.store.recovery import salvage

    store = arguments.store
    files, config = files_and_config(arguments)
    if arguments.into is not None:
        with log_bar("salvage", store, 3):
            rescued = rescue(
                store, arguments.into, config, files=files, tell=lambda gap: output.row(gap_row(store, gap))
            )
        output.row({"type": "salvage", "into": rescued.path, "records": rescued.records, "gaps": rescued.gaps})
        return 0
    levels = DelayLevels.parse(config.message_delay_level)
    with log_bar("salvage", store, 1, quiet=output.is_on_terminal):
        output.lines(
            json_line(gap_row(store, item)) if isinstance(item, salvage.Gap) else message_line(item.raw, levels)
            for item in salvage.salvaged_records(store, files)
        )
    return 0


def extract(arguments: argparse.Namespace, output: Output) -> int:
    """Make a small store of the selected messages and print its row."""
    from librmq.cli._selection import select
    from librmq.cli._stores import note_tables, open_store
    from librmq.diagnosis import StoreView
    from librmq.store import extract

    selection = select(arguments)
    with log_bar("extract", arguments.store, 3):
        with open_store(arguments) as store:
            note_tables(StoreView.over(store))
            places = selection.places(store, arguments.limit)
        if not places:
            raise InputError(
                "expected at least one message to extract, found none: `librmq show` selects in the same way"
            )
        small = extract(arguments.store, arguments.out, places, redact=arguments.redact or ())
    output.row({"type": "extract", "into": small.path, "messages": small.messages, "bytes": small.bytes})
    return 0


def snapshot(arguments: argparse.Namespace, output: Output) -> int:
    """Make a snapshot and print its row."""
    from librmq.store import snapshot

    files, config = files_and_config(arguments)
    with log_bar("snapshot", arguments.store, 3):
        copy = snapshot(arguments.store, arguments.target, config, copy=arguments.copy, files=files)
    output.row(snapshot_row(copy))
    return 0


def restore(arguments: argparse.Namespace, output: Output) -> int:
    """Make a store from a snapshot and print its row."""
    from librmq.store import restore

    files, config = files_and_config(arguments)
    with log_bar("restore", arguments.store, 3):
        restored = restore(arguments.store, arguments.target, config, files=files)
    output.row(snapshot_row(restored))
    return 0


# ---- a copy that is kept up to date

_POLL_S: Final = 0.2
_CLEAR: Final = "\r\x1b[K"


class StatusLine:
    """One line on a terminal that is replaced by the next; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._last = ""

    def show(self, text: str) -> None:
        """Replace the line; an empty text removes it."""
        if self._is_shown and text != self._last:
            self._last = text
            self._stream.write(_CLEAR + text)
            self._stream.flush()


def follow(arguments: argparse.Namespace, output: Output) -> int:
    """Keep the copy up to date until a signal ends it, or copy up to the present end."""
    from librmq.cluster import Replica

    with end_signals() as ended, Replica.open(arguments.copy, of=arguments.store) as replica:
        lines = _States(replica, output.of_lines())
        is_complete = _catch_up(replica, lines, ended)
        if not arguments.until_end:
            _keep_up(replica, lines, ended)
        elif is_complete:
            is_complete = replica.follow()
        lines.print_state("ended")
    if arguments.until_end and not is_complete:
        complain("interrupted")
        return INTERRUPTED
    return 0


class _States:
    """The rows that a program reads: one for each change of state."""

    def __init__(self, replica: Replica, output: Output) -> None:
        self._replica = replica
        self._output = output
        self._state = ""
        self.print_state("copying")

    def print_state(self, state: str) -> None:
        if state == self._state:
            return
        self._state, replica = state, self._replica
        row: dict[str, Any] = {"type": "follow", "state": state}
        self._output.row({**row, "physical_offset": replica.end, "lag_bytes": replica.lag_bytes})
        self._output.flush()

    def update(self) -> None:
        """Print a row if the master has become reachable or unreachable; raise why the replica has stopped."""
        if self._replica.failure is not None:
            raise self._replica.failure
        self.print_state("current" if self._replica.reaches_master else "unreachable")


def _catch_up(replica: Replica, lines: _States, ended: EndSignals) -> bool:
    """Wait until the copy has everything, with a bar; return False if a signal came before."""
    begin = replica.end
    with ProgressBar("follow", replica.lag_bytes) as bar:
        while replica.lag_bytes or not replica.reaches_master:
            if ended.wait(_POLL_S):
                return False
            if replica.failure is not None:
                raise replica.failure
            bar.to(replica.end - begin)
    lines.update()
    return True


def _keep_up(replica: Replica, lines: _States, ended: EndSignals) -> None:
    """Show the state until a signal comes."""
    status = StatusLine(sys.stderr)
    try:
        while not ended.wait(_POLL_S):
            lines.update()
            what = f"{replica.lag_bytes:,} behind" if replica.reaches_master else "the master cannot be read"
            status.show(f"{replica.path}: {replica.end:,} bytes, {what}; Ctrl-C ends")
    finally:
        status.show("")


# ---- settings that a store has recorded


def settings(arguments: argparse.Namespace, output: Output) -> int:
    """Print the recorded settings of a store, or change some, with the values before and after."""
    from librmq.broker.config import Promises
    from librmq.store import MessageStore

    files, config = files_and_config(arguments)
    recorded = Promises.read(arguments.store, files)
    named = Promises.of_values({name: _value(text) for name, text in arguments.set or ()})
    before, after = recorded.values(), named.over(recorded).values()
    if arguments.set:
        config = config.with_settings(named.named()[0])
        with MessageStore.open(arguments.store, config, files=files):  # so that no other process has it
            recorded.record(arguments.store, files, named)
    for name in after:
        if not arguments.set or name in named.values():
            row = {"setting": name, "before": before.get(name), "after": after[name]}
            output.row({**row, "was_recorded": name in before, "dry_run": arguments.dry_run})
    if not after:
        output.explain_nothing("the store has recorded no settings: the next process that names one does")
    return 0


def _value(text: str) -> object:
    """Return the value that a text is in JSON; otherwise it is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# ---- processes that share a store


def who(arguments: argparse.Namespace, output: Output) -> int:
    """Print the owner of a store, then the processes that reach it, the first that came first."""
    path = arguments.store
    directory.check_kind(path, DiskFiles())
    rows = [] if sys.platform == "win32" else _sharing(path)
    if rows:
        rows[0]["settings"] = recorded_settings(path, DiskFiles())
    output.rows_of(rows)
    if not rows:
        holder = DiskFiles().lock_holder(directory.lock_path(path))
        held = (
            "no process has it open for writing" if holder is None else f"{holder} has it open, and does not share it"
        )
        complain(f"note: no process shares {path}: {held}")
    return 0


def _sharing(path: str) -> list[Row]:
    from librmq.wire.share_links import sharing_processes

    processes, error = sharing_processes(path)
    if error is not None:
        complain(f"note: the owner does not answer, so that its peers are unknown: {error}")
    return [
        {
            "role": sharing.role,
            "pid": sharing.process,
            "program": _program(sharing.process),
            "since_ms": sharing.since_ms,
            "state": sharing.state,
            **({"peers_append": sharing.has_page} if sharing.role == "owner" else {}),
        }
        for sharing in processes
    ]


def _program(process: int) -> str | None:
    """Return the command line of a process; None where the system does not say."""
    with suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
        words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ")
        return words.decode("utf-8", "replace") or None
    return None
