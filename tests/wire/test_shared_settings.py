"""The settings that a shared store keeps: named once, taken over by every later owner, changed only on purpose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import librmq
from librmq import BrokerConfig, ConfigError, StoreConfig, TimerConfig, TransactionConfig
from librmq.errors import CorruptionError
from tests.programs import run_program

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
        broker = cast("Any", shared._link).route
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
        for change in (False, True):
            with pytest.raises(ConfigError, match=rf"durability is 'async'.*'sync'.*end process {owner.owner}"):
                librmq.share(tmp_path, store_config=StoreConfig(durability="sync"), change_settings=change)
    assert owned(tmp_path, store_config=StoreConfig(durability="sync"))[0].durability == "sync"


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ('{"version": 1, "store": {"durability": "never"}, "broker": {}}', ConfigError, "durability.*delete the file"),
        ('{"version": 1, "store": {}, "broker": {"timers": {"slots_total": 1}}}', ConfigError, "delete the file"),
        ('{"version": 1, "store": {}, "broker": {"hops": "yes"}}', ConfigError, "hops.*delete the file"),
        ('{"version": 2, "store": {}, "broker": {}}', CorruptionError, "version 2"),
        ("[", CorruptionError, "settings.json"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, text: str, error: type[Exception], match: str) -> None:
    owned(tmp_path, store_config=SYNC)
    file = tmp_path / "librmq" / "settings.json"
    file.write_text(text)
    with pytest.raises(error, match=match):
        librmq.share(tmp_path)
    file.unlink()
    assert owned(tmp_path)[0].durability == "async", "without the file settings are named anew"
