"""The settings that a shared store keeps: named once, taken over by every later owner, changed only on purpose."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

import librmq
from librmq import (
    Broker,
    BrokerConfig,
    ConfigError,
    ManualClock,
    ManualRunner,
    Message,
    StoreConfig,
    StoreLockedError,
    TimerConfig,
    TransactionConfig,
)
from librmq.broker.config import Promises
from librmq.cli import main
from librmq.errors import CorruptionError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FileLock, FileStatus
from librmq.store import MessageStore
from librmq.store._snapshots import snapshot
from librmq.store.format.documents import KeptSettings, RecordedRetention, with_checksum, write_retention
from tests.budget import many
from tests.conftest import SlowBudget
from tests.programs import Fork, run_program
from tests.stores import with_fields

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stores are not shared on Windows")

SYNC = StoreConfig(durability="sync", commitlog_file_size=1 << 20)
TIMED = BrokerConfig(timers=TimerConfig(slots_total=1000), transactions=TransactionConfig(timeout_s=1, interval_s=2))
WEB_PROCESS = """
import os, signal, sys
import librmq
from librmq import BrokerConfig, Producer, StoreConfig, TimerConfig

config = BrokerConfig(timers=TimerConfig(slots_total=1000), hops=True)
with librmq.share(sys.argv[1], config, store_config=StoreConfig(durability="sync")) as shared:
    Producer(shared, "web").send("reminders", b"tea", delay=37)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def settings_of(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((path / "librmq" / "settings.json").read_text())
    return settings


def owned(path: Path, *args: Any, **settings: Any) -> tuple[StoreConfig, BrokerConfig]:
    """Share a store that no process shares, and return the settings that its owner has."""
    with librmq.share(path, *args, **settings) as shared:
        broker = cast("Any", shared.link).route
        assert isinstance(broker, librmq.Broker)
        return broker.store.config, broker.config


def test_the_next_owner_after_a_kill_keeps_the_promises(tmp_path: Path) -> None:
    run_program(WEB_PROCESS, tmp_path)
    store, broker = owned(tmp_path)  # names nothing, as a script that only sends
    assert store.durability == "sync"
    assert broker.timers == TimerConfig(slots_total=1000)
    assert broker.hops


def test_a_later_owner_takes_what_the_first_has_named(tmp_path: Path) -> None:
    owned(tmp_path, TIMED, store_config=SYNC)
    for _ in range(2):
        store, broker = owned(tmp_path)
        assert (store.durability, store.commitlog_file_size) == ("sync", 1 << 20)
        assert (broker.timers, broker.transactions) == (TIMED.timers, TIMED.transactions)
    owned(tmp_path, BrokerConfig(hops=True), store_config=StoreConfig(max_message_size=1000))  # named by none so far
    store, broker = owned(tmp_path)
    assert (store.durability, store.max_message_size, broker.hops) == ("sync", 1000, True)


def test_a_snapshot_keeps_what_was_named(tmp_path: Path) -> None:
    owned(tmp_path / "store", TIMED, store_config=SYNC)
    snapshot(str(tmp_path / "store"), str(tmp_path / "copy"))
    store, broker = owned(tmp_path / "copy")
    assert (store.durability, broker.timers) == ("sync", TIMED.timers)


def test_other_settings_are_refused_with_each_difference(tmp_path: Path) -> None:
    owned(tmp_path, TIMED, store_config=SYNC)
    before = settings_of(tmp_path)
    with pytest.raises(ConfigError, match=r"durability is 'sync'.*names 'async'.*timers is .*change_settings=True"):
        librmq.share(tmp_path, BrokerConfig(timers=None), store_config=StoreConfig(durability="async"))
    assert settings_of(tmp_path) == before
    store, _ = owned(tmp_path, store_config=StoreConfig(durability="async"), change_settings=True)
    assert store.durability == "async"
    assert owned(tmp_path)[0].durability == "async"
    assert owned(tmp_path)[1].timers == TIMED.timers, "it was not named"


def test_a_peer_is_refused_while_the_owner_promises_otherwise(tmp_path: Path) -> None:
    with librmq.share(tmp_path) as owner:
        with librmq.share(tmp_path, store_config=StoreConfig(durability="async")) as peer:
            assert not peer.is_owner
        assert settings_of(tmp_path)["store"] == {"durability": "async"}, "a peer that agrees records what it names"
        for change in (False, True):
            with pytest.raises(ConfigError, match=rf"durability is 'async'.*'sync'.*end process {owner.owner}"):
                librmq.share(tmp_path, store_config=StoreConfig(durability="sync"), change_settings=change)
    with pytest.raises(ConfigError, match="durability"):
        librmq.share(tmp_path, store_config=StoreConfig(durability="sync"))


@pytest.mark.parametrize(
    "named", [StoreConfig(file_reserved_hours=1), StoreConfig(message_delay_level="7s"), StoreConfig(delete_when="05")]
)
def test_a_peer_names_nothing_in_silence(tmp_path: Path, named: StoreConfig) -> None:
    with librmq.share(tmp_path):
        with pytest.raises(ConfigError, match="the store has other settings"):
            librmq.share(tmp_path, store_config=named)
        default = BrokerConfig(timers=TimerConfig(), transactions=TransactionConfig())
        librmq.share(tmp_path, default, store_config=StoreConfig(max_total_size=4 << 30)).close()
        assert Promises.read(str(tmp_path), DiskFiles()).named()[0] == {"max_total_size": 4 << 30}
        assert settings_of(tmp_path)["broker"].keys() == {"timers", "transactions"}


def test_settings_that_two_processes_record_at_once_both_stay(tmp_path: Path) -> None:
    """A peer of a former owner records what it names while the next owner opens the store."""
    path, files = str(tmp_path), DiskFiles()
    with librmq.share(tmp_path):
        pass
    read_by_the_owner = Promises.read(path, files)
    named_by_a_peer = Promises(StoreConfig(durability="async"))
    Promises.read(path, files).check_peer(path, named_by_a_peer, files, 1)
    read_by_the_owner.record(path, files, Promises(StoreConfig(max_message_size=1 << 20)))
    assert Promises.read(path, files).named()[0] == {"durability": "async", "max_message_size": 1 << 20}


class NamingRetention(MemoryFiles):
    """Files in which a peer of a former owner names a setting of retention, once the next owner has looked at them."""

    is_due = False

    def lock(self, path: str) -> FileLock:
        self.is_due = self.is_due or path == "/s/lock"
        return super().lock(path)

    def status(self, path: str) -> FileStatus | None:
        status = super().status(path)
        if self.is_due and path == "/s/librmq/retention.json":
            self.is_due = False
            Promises().record("/s", self, Promises(StoreConfig(file_reserved_hours=72)))
        return status


def test_retention_that_a_peer_names_while_the_owner_records_its_own_stays() -> None:
    files, own = NamingRetention(), StoreConfig(max_total_size=8 << 30)
    files.is_due = True
    write_retention("/s", own, files, KeptSettings.read("/s", files))
    assert Promises.read("/s", files).named()[0] == {"file_reserved_hours": 72}
    assert RecordedRetention.read("/s", files).settings["max_total_size"] == 8 << 30


def test_an_opening_takes_what_a_peer_names_meanwhile() -> None:
    files, runner, own = NamingRetention(), ManualRunner(), StoreConfig(max_total_size=8 << 30)
    with pytest.raises(StoreLockedError, match="has just changed the settings"):
        Broker.open("/s", files=files, runner=runner, store_config=own)
    with Broker.open("/s", files=files, runner=runner) as broker:
        config = broker.store.config
        assert (config.file_reserved_hours, config.max_total_size) == (72, 8 << 30)


def test_an_owner_that_names_another_value_too_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value was recorded after the owner had looked: the owner does not replace it in silence."""

    def open_before_a_peer(*arguments: Any, **settings: Any) -> Broker:
        broker = opens(*arguments, **settings)
        Promises().record(str(tmp_path), DiskFiles(), Promises(StoreConfig(durability="sync")))
        return broker

    opens = Broker.open
    monkeypatch.setattr(Broker, "open", open_before_a_peer)
    with pytest.raises(ConfigError, match="durability is 'sync', and this process names 'async'"):
        librmq.share(tmp_path, store_config=StoreConfig(durability="async"))
    monkeypatch.undo()
    assert owned(tmp_path)[0].durability == "sync"


def test_a_total_size_below_the_default_file(tmp_path: Path) -> None:
    small = StoreConfig(commitlog_file_size=1 << 20, max_total_size=8 << 20)
    for _ in range(2):
        assert owned(tmp_path, store_config=small)[0].max_total_size == 8 << 20
        assert owned(tmp_path)[0].max_total_size == 8 << 20


REMINDERS = """
import os, signal, sys
import librmq
from librmq import BrokerConfig, Producer, TimerConfig

with librmq.share(sys.argv[1], BrokerConfig(timers=TimerConfig(timer_precision_ms=100))) as shared:
    producer = Producer(shared, "web")
    for delay in (5, 3):
        producer.send("reminders", b"tea", delay=delay)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["share", "open"])
def test_an_accepted_reminder_fires_under_the_next_owner(tmp_path: Path, place: str) -> None:
    run_program(REMINDERS, tmp_path)
    arrived: queue.Queue[bytes] = queue.Queue()
    opened = librmq.share(tmp_path) if place == "share" else librmq.Broker.open(tmp_path)
    consumer = librmq.PushConsumer(opened, "tea", consume_from=librmq.ConsumeFrom.FIRST)
    consumer.subscribe("reminders", lambda message: arrived.put(message.body))
    with opened, consumer:
        assert [arrived.get(timeout=20), arrived.get(timeout=20)] == [b"tea", b"tea"]
    assert settings_of(tmp_path)["broker"]["timers"]["timer_precision_ms"] == 100


def own(path: Path, life: int) -> None:
    """Own a store, and print each reminder that it has accepted."""
    named = BrokerConfig(timers=TimerConfig(timer_precision_ms=100))
    with librmq.share(path, named, store_config=StoreConfig(durability="sync")) as shared:
        assert shared.is_owner
        producer = librmq.Producer(shared, "web")
        for number in count():
            producer.send("reminders", f"{life}.{number}".encode(), delay=3)
            print(f"{life}.{number}", flush=True)


@pytest.mark.slow
def test_owners_killed_again_and_again_break_no_promise(tmp_path: Path, slow_budget: SlowBudget) -> None:
    """A process that names nothing shares the folder, and becomes the owner each time."""
    accepted: set[str] = set()
    for number in slow_budget.rounds(30, "kills", 30):
        with Fork(own, tmp_path, number) as web:
            accepted.add(web.stdout.readline().strip())
            with librmq.share(tmp_path) as script:
                assert not script.is_owner
                accepted.update(web.stdout.readline().strip() for _ in range(number % 5))
                web.process.kill()
                accepted.update(line.strip() for line in web.stdout if line.endswith("\n"))
                sent = librmq.Producer(script, "script").send("orders", b"x")
                assert script.is_owner
                broker = cast("Any", script.link).route
                assert broker.store.config.durability == "sync"
                unflushed, order = broker.store.log.unflushed, broker.find_by_id(sent.message_id)
                assert order.physical_offset + order.size <= broker.store.log.end - unflushed
                assert broker.config.timers == TimerConfig(timer_precision_ms=100)
    arrived: queue.Queue[str] = queue.Queue()
    with librmq.share(tmp_path) as last:
        consumer = librmq.PushConsumer(last, "tea", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("reminders", lambda message: arrived.put(message.body.decode()))
        with consumer:
            missing = accepted.copy()
            while missing:
                missing.discard(arrived.get(timeout=20))


def open_folders(name: str) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        with librmq.share(line.strip()) as shared:
            shared.create_topic("orders", 1)
            librmq.Producer(shared, "shop").send("orders", name.encode())
            print("opened", flush=True)
            sys.stdin.readline()
        print("closed", flush=True)


@pytest.mark.slow
def test_processes_that_open_a_new_folder_at_once(tmp_path: Path, slow_budget: SlowBudget) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(Fork(open_folders, str(number))) for number in range(4)]

        def expect(word: str) -> None:
            for process in processes:
                assert process.stdout.readline().strip() == word

        def write(line: str) -> None:
            for process in processes:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()

        expect("ready")
        for number in slow_budget.rounds(200, "new folders that four processes open at once", at_least=20):
            folder = tmp_path / str(number)
            write(str(folder))
            expect("opened")
            write("close")
            expect("closed")
            with MessageStore.open(folder, read_only=True) as store:
                assert sorted(message.body for message in store.topic_messages("orders")) == [b"0", b"1", b"2", b"3"]
            shutil.rmtree(folder)


# ---- one process after the other


def test_what_binds_accepted_messages_holds_for_the_next_opener(tmp_path: Path) -> None:
    levels = StoreConfig.tiny(message_delay_level="1s 7s")
    with Broker.open(tmp_path, TIMED, store_config=levels):
        pass
    Broker.open(tmp_path).close()
    librmq.share(tmp_path).close()
    with Broker.open(tmp_path) as broker:
        assert (broker.config.timers, broker.config.transactions) == (TIMED.timers, TIMED.transactions)
        assert (broker.store.config.message_delay_level, broker.store.config.max_message_size) == ("1s 7s", 48 << 10)
    before = settings_of(tmp_path)
    other = BrokerConfig(timers=None, transactions=TransactionConfig())
    with pytest.raises(ConfigError, match=r"max_message_size is 49152.*timers is .*transactions is .*change_settings"):
        Broker.open(tmp_path, other, store_config=StoreConfig(max_message_size=1000))
    assert settings_of(tmp_path) == before
    Broker.open(tmp_path, other, change_settings=True).close()
    with Broker.open(tmp_path) as broker:
        assert (broker.config.timers, broker.config.transactions) == (None, other.transactions)
        assert broker.store.config.max_message_size == 48 << 10, "it was not named"


@many
@pytest.mark.parametrize("place", ["open", "share", "store", "command"])
@pytest.mark.parametrize("copying", ["files", "snapshot"])
def test_a_copy_deletes_nothing_until_retention_is_named_again(
    tmp_path: Path, place: str, copying: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(1_704_067_200_000)
    named = StoreConfig.tiny(max_total_size=256 << 10, file_reserved_hours=1, keep_unconsumed=False, delete_when="05")
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    owned(origin, store_config=named)
    with MessageStore.open(origin, clock=clock, files=DiskFiles()) as store:
        for _ in range(40):
            store.append(Message("T", bytes(4000)))
    if copying == "files":
        shutil.copytree(origin, copy, ignore=shutil.ignore_patterns("share"))
    else:
        snapshot(str(origin), str(copy))
    caplog.clear()
    caplog.set_level(logging.INFO)
    if place == "open":
        Broker.open(copy).close()
    elif place == "share":
        owned(copy)
    elif place == "command":
        assert main(["topic", "create", str(copy), "U"]) == 0
    clock.advance(days=30)
    with MessageStore.open(copy, clock=clock) as store:
        found = store.config
        assert (found.max_total_size, found.file_reserved_hours, found.keep_unconsumed) == (None, None, True)
        store.delete_expired()
        store.run_due(clock.now_ms())
        assert store.log.begin == 0
        assert caplog.text.count("recorded for another folder") == 1  # not at each opening
        assert "file_reserved_hours=1" in caplog.text
    with MessageStore.open(copy, StoreConfig(file_reserved_hours=1), clock=clock) as store:
        assert (store.config.max_total_size, store.config.keep_unconsumed) == (None, True)
    caplog.clear()
    with MessageStore.open(copy, clock=clock) as store:
        assert store.config.file_reserved_hours == 1
        assert "another folder" not in caplog.text
    with MessageStore.open(origin, clock=clock) as store:
        assert (store.config.max_total_size, store.config.delete_when) == (256 << 10, "05")
        store.run_due(clock.now_ms())
    moved = origin.rename(tmp_path / "moved")
    with MessageStore.open(moved, clock=clock) as store:
        assert store.config.file_reserved_hours == 1, "it is the same folder"


class Identified(MemoryFiles):
    """Files of a folder that has an identity as on a disk."""

    folder = "start-1/generation-1:8:100"

    def identity(self, path: str) -> str:
        return self.folder


def test_a_backup_that_is_restored_in_place_of_a_deleted_store_deletes_nothing() -> None:
    """The system can give the new folder the inode of the deleted one; a restart of the machine changes neither."""
    files = Identified()
    MessageStore.open("/s", StoreConfig.tiny(file_reserved_hours=1), files=files).close()
    for folder, hours in (("start-2/generation-1:8:100", 1), ("start-2/generation-2:8:100", None)):
        files.folder = folder
        with MessageStore.open("/s", files=files) as store:
            assert store.config.file_reserved_hours == hours


def test_a_copy_of_a_replica_deletes_nothing_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    origin, copy, replica = tmp_path / "origin", tmp_path / "copy", BrokerConfig(replica_of="broker-b")
    Broker.open(origin, replica, store_config=StoreConfig.tiny(file_reserved_hours=1)).close()
    shutil.copytree(origin, copy)
    caplog.set_level(logging.INFO)
    with Broker.open(copy, replica) as broker:
        assert broker.store.config.file_reserved_hours is None
        assert "file_reserved_hours=1" in caplog.text
    with Broker.open(origin, replica) as broker:
        assert broker.store.config.file_reserved_hours == 1


def test_retention_of_another_folder_or_of_no_known_one_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    owned(tmp_path, store_config=StoreConfig.tiny(file_reserved_hours=1))
    file = tmp_path / "librmq" / "retention.json"
    document = file.read_bytes()
    for folder in (None, "1:1"):
        file.write_bytes(with_fields(document, folder=folder))
        assert owned(tmp_path)[0].file_reserved_hours is None
        assert "file_reserved_hours=1" in caplog.text
        caplog.clear()
    hostile = with_fields(document, settings={"file_reserved_hours": -1})
    for content in (b"{", b"[]", with_checksum(b"[]"), hostile):
        file.write_bytes(content)
        with pytest.raises(CorruptionError, match=r"retention\.json.*then retention deletes nothing"):
            owned(tmp_path)


def test_durability_and_retention_may_differ(tmp_path: Path) -> None:
    """Durability for as long as the process has the store open; of retention, the latest counts."""
    owned(tmp_path, store_config=StoreConfig(durability="sync", file_reserved_hours=72))
    with Broker.open(tmp_path) as broker:
        assert broker.store.config.durability == "sync"
    named = StoreConfig(durability="async", file_reserved_hours=24)
    with Broker.open(tmp_path, store_config=named) as broker:
        assert (broker.store.config.durability, broker.store.config.file_reserved_hours) == ("async", 24)
    store, _ = owned(tmp_path, store_config=StoreConfig(file_reserved_hours=24))
    assert (store.durability, store.file_reserved_hours) == ("sync", 24)
    Broker.open(tmp_path / "alone", store_config=named).close()
    assert not (tmp_path / "alone" / "librmq" / "settings.json").exists(), "nothing there binds the next one"


def test_commands_show_and_change_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path)

    def rows(*words: str, status: int = 0) -> list[dict[str, Any]]:
        assert main([*words, "--format", "jsonl"]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    with librmq.share(tmp_path, BrokerConfig(hops=True), store_config=StoreConfig(file_reserved_hours=72)):
        recorded = {"file_reserved_hours": 72, "hops": True}
        assert rows("stats", path)[0]["settings"] == recorded
        assert rows("who", path)[0]["settings"] == recorded
        assert {row["setting"]: row["after"] for row in rows("settings", path)} == recorded
        assert rows("settings", path, "--set", "hops=false", status=2) == []
    change = ("settings", path, "--set", "file_reserved_hours=24", "--set", "durability=sync")
    changed: list[dict[str, Any]] = [
        {"setting": "durability", "before": None, "after": "sync", "was_recorded": False, "dry_run": True},
        {"setting": "file_reserved_hours", "before": 72, "after": 24, "was_recorded": True, "dry_run": True},
    ]
    before = settings_of(tmp_path)
    assert rows(*change, "--dry-run") == changed
    assert settings_of(tmp_path) == before
    assert rows(*change) == [row | {"dry_run": False} for row in changed]
    store, broker = owned(tmp_path)
    assert (store.durability, store.file_reserved_hours, broker.hops) == ("sync", 24, True)
    for wrong in ("durability=never", "durabilty=sync", 'timers={"slots": 1}', "hops=maybe"):
        assert rows("settings", path, "--set", wrong, status=2) == []


def test_a_command_names_nothing(tmp_path: Path) -> None:
    Broker.open(tmp_path).close()
    assert main(["topic", "create", str(tmp_path), "orders"]) == 0
    assert not (tmp_path / "librmq" / "settings.json").exists()


@many
@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ('{"version": 1, "store": {"durability": "never"}, "broker": {}}', ConfigError, "durability.*delete the file"),
        ('{"version": 1, "store": {}, "broker": {"timers": {"slots_total": 1}}}', ConfigError, "delete the file"),
        ('{"version": 1, "store": {}, "broker": {"hops": "yes"}}', ConfigError, "hops.*delete the file"),
        ('{"version": 2, "store": {}, "broker": {}}', CorruptionError, "version 2"),
        ('{"version": 1, "store": {"flush_interval_s": NaN}, "broker": {}}', ConfigError, "found nan; delete the file"),
        ('{"version": 1, "store": {"max_message_size": 1e999}, "broker": {}}', ConfigError, "found inf; delete"),
        (f'{{"version": 1, "store": {{"max_message_size": {"9" * 4000}}}, "broker": {{}}}}', ConfigError, "found 9999"),
        (f'{{"version": 1, "store": {{"a": {"9" * 5000}}}, "broker": {{}}}}', CorruptionError, "settings.json"),
        ('{"version": 1, "store": {"message_delay_level": ["1s"]}, "broker": {}}', ConfigError, "delete the file"),
        ('{"version": 1, "store": [], "broker": {}}', CorruptionError, r"found \[\] as store"),
        ("[", CorruptionError, "settings.json"),
        ("[" * 200_000, CorruptionError, "settings.json"),
        (" " * (100 << 20), CorruptionError, "at most 1048576 bytes"),
    ],
    ids=range(13),
)
def test_a_hostile_file_is_refused(tmp_path: Path, text: str, error: type[Exception], match: str) -> None:
    owned(tmp_path, store_config=SYNC)
    file = tmp_path / "librmq" / "settings.json"
    file.write_bytes(with_checksum(text.encode()) if text.endswith("}") else text.encode())
    with pytest.raises(error, match=match):
        librmq.share(tmp_path)
    file.unlink()
    assert owned(tmp_path)[0].durability == "async", "without the file settings are named again"


@pytest.mark.parametrize("kind", ["folder", "link", "link to nothing", "link to a device"])
def test_what_is_no_file_of_settings_is_refused(tmp_path: Path, kind: str) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere.json"
    owned(store, store_config=SYNC)
    file = store / "librmq" / "settings.json"
    file.rename(elsewhere)
    before = elsewhere.read_bytes()
    if kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"link": elsewhere, "link to nothing": tmp_path / "absent"}.get(kind, Path("/dev/zero")))
    for opens in (librmq.share, librmq.Broker.open):
        with pytest.raises(CorruptionError, match=r"settings\.json.*(symbolic link|a regular file|its checksum)"):
            opens(store)
    assert elsewhere.read_bytes() == before
