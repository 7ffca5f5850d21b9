"""A store remembers the settings that its files do not show."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message
from librmq.broker.config import Promises
from librmq.cli.commands.maintenance import broker_properties
from librmq.config import StoreConfig
from librmq.errors import ConfigError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FileStatus
from librmq.store import MessageStore
from librmq.store._snapshots import snapshot
from librmq.store.engine.saved_state import read_closed_state
from librmq.store.engine.saved_state import read_mark as read_mark_of_flush
from librmq.store.extraction import rescue
from librmq.store.format.directory import infer_config
from librmq.store.format.documents import KeptSettings, RecordedRetention, ReplicaMark, resent_times, with_checksum
from librmq.store.recovery._verify import verify
from tests.budget import many

LEVELS = "1s 1h"


@many
@pytest.mark.parametrize(("slots", "entries"), [(64, 100), (5, 1000), (1000, 10), (64, 256), (63, 251)])
@pytest.mark.parametrize("kept", [True, False])
def test_any_index_sizes_are_inferred(tmp_path: Path, slots: int, entries: int, kept: bool) -> None:
    """They come from the file that the store keeps, or from header and length of an index file."""
    config = StoreConfig.tiny(max_hash_slot_num=slots, max_index_num=entries)
    with MessageStore.open(tmp_path, config) as store:
        for number in range(60):
            store.append(Message("T", b"x", keys=f"k{number}"))
    if not kept:
        (tmp_path / "librmq" / "config.json").unlink()
    assert verify(tmp_path).sound
    with MessageStore.open(tmp_path) as store:
        assert (store.config.max_hash_slot_num, store.config.max_index_num) == (slots, entries)
        assert len(store.find_by_key("T", "k7")) == 1
    (tmp_path / "abort").touch()
    with MessageStore.open(tmp_path, thorough=True) as store:
        assert len(store.find_by_key("T", "k59")) == 1
    with MessageStore.open(tmp_path, config) as store:
        assert store.recovered == []


def test_delay_levels_are_kept(tmp_path: Path) -> None:
    config = StoreConfig.tiny(message_delay_level=LEVELS)
    with MessageStore.open(tmp_path / "store", config) as store:
        store.append(Message("T", b"x", delay_level=2))
    assert verify(tmp_path / "store").sound
    snapshot(str(tmp_path / "store"), str(tmp_path / "copy"))
    rescue(str(tmp_path / "store"), str(tmp_path / "rescued"))
    for name in ("store", "copy", "rescued"):
        found = infer_config(str(tmp_path / name), DiskFiles())
        assert found.message_delay_level == LEVELS
        assert f"messageDelayLevel={LEVELS}" in broker_properties(str(tmp_path / name), found)
    (tmp_path / "store" / "librmq" / "config.json").write_text("{")  # the store opens whatever the file contains
    assert infer_config(str(tmp_path / "store"), DiskFiles()).message_delay_level == StoreConfig().message_delay_level


def test_broker_conf_has_all_needed_settings(tmp_path: Path) -> None:
    lines = broker_properties(str(tmp_path), StoreConfig(commitlog_file_size=65_536)).splitlines()
    assert "enablePropertyFilter=true" in lines
    assert "maxMessageSize=65528" in lines
    assert "enablePropertyFilter=false" in broker_properties(str(tmp_path), StoreConfig(enable_property_filter=False))
    with pytest.raises(ConfigError, match="comma"):
        broker_properties(str(tmp_path / "a,b"), StoreConfig())


@pytest.mark.parametrize("kept", [True, False])
def test_file_sizes_do_not_make_a_store_delete_files(kept: bool) -> None:
    """Neither a broker's 72 hours nor a new store's total size applies: only its owner sets a retention."""
    files, clock = MemoryFiles(), ManualClock(1_704_067_200_000)
    config = StoreConfig.tiny(max_total_size=None)
    with MessageStore.open("/store", config, files=files, clock=clock) as store:
        for _ in range(100):
            store.append(Message("T", bytes(4000)))
    if not kept:
        files.delete("/store/librmq/config.json")
    clock.advance(days=30)
    with MessageStore.open("/store", files=files, clock=clock) as store:
        assert (store.config.file_reserved_hours, store.config.max_total_size) == (None, None)
        clock.advance(days=1)
        store.run_due(clock.now_ms())
        assert store.log.begin == 0


def test_a_store_reopens_with_its_own_sizes_and_retention() -> None:
    """This holds before the first message too, when no file shows the sizes."""
    files = MemoryFiles()
    config = StoreConfig.tiny(max_total_size=1 << 20, file_reserved_hours=5, enable_consumequeue_ext=True)
    for path, given in (("/told", config), ("/new", None)):
        MessageStore.open(path, given, files=files).close()
        with MessageStore.open(path, files=files) as store:
            kept = dataclasses.replace(given or StoreConfig(), max_message_size=store.config.max_message_size)
            assert store.config == kept
            store.append(Message("T", b"x"))
    with MessageStore.open("/told", files=files) as store:
        assert store.config.commitlog_file_size == config.commitlog_file_size
        assert store.config.max_total_size == 1 << 20


def test_a_total_size_below_one_file_is_ignored() -> None:
    """The store keeps settings although larger files have replaced its own."""
    files = MemoryFiles()
    MessageStore.open("/store", StoreConfig.tiny(max_total_size=1 << 20), files=files).close()
    files.write("/store/commitlog/00000000000000000000", bytes(2 << 20))
    found = infer_config("/store", files)
    assert (found.commitlog_file_size, found.max_total_size) == (2 << 20, None)


SIZES: dict[str, Any] = {
    "commitlog_file_size": 65_536,
    "consumequeue_file_size": 4000,
    "max_hash_slot_num": 64,
    "max_index_num": 256,
}


@many
@pytest.mark.parametrize(
    "given",
    [
        StoreConfig(durability="sync"),
        StoreConfig.broker(durability="sync", **SIZES),
        StoreConfig().with_settings({"durability": "sync"}),
        pickle.loads(pickle.dumps(StoreConfig(durability="sync"))),
        dataclasses.replace(StoreConfig(), durability="sync"),
        dataclasses.replace(StoreConfig.broker(**SIZES), durability="sync"),
    ],
    ids=["defaults", "broker", "with settings", "pickled", "replaced", "replaced broker"],
)
@pytest.mark.parametrize("kept", [True, False])
def test_a_store_keeps_settings_that_are_not_named(given: StoreConfig, kept: bool) -> None:
    """Sizes, delay levels and retention are kept: 72 hours or 4 GiB would delete what the store kept before."""
    files, clock = MemoryFiles(), ManualClock(1_704_067_200_000)
    config = StoreConfig(**SIZES, max_total_size=None, keep_unconsumed=True, message_delay_level=LEVELS)
    with MessageStore.open("/store", config, files=files, clock=clock) as store:
        for _ in range(100):
            store.append(Message("T", bytes(4000), keys="k"))
    if not kept:
        files.delete("/store/librmq/config.json")
    clock.advance(days=30)
    with MessageStore.open("/store", given, files=files, clock=clock) as store:
        found = store.config
        assert {name: getattr(found, name) for name in SIZES} == SIZES
        assert (found.durability, found.max_total_size, found.file_reserved_hours) == ("sync", None, None)
        assert (found.keep_unconsumed, found.message_delay_level == LEVELS) == (kept, kept)
        clock.advance(days=1)
        store.run_due(clock.now_ms())
        assert store.log.begin == 0
    with MessageStore.open("/store", files=files, clock=clock) as store:
        assert store.config.max_total_size is None


def test_named_settings_replace_the_kept_ones(caplog: pytest.LogCaptureFixture) -> None:
    """A stricter retention is logged once. Sizes that the files show cannot be replaced."""
    files = MemoryFiles()
    given = StoreConfig(**SIZES, max_total_size=1 << 20, keep_unconsumed=True)
    with MessageStore.open("/store", given, files=files) as store:
        store.append(Message("T", b"x"))
    with caplog.at_level(logging.WARNING, "librmq"):
        for config in (
            StoreConfig(max_total_size=None),
            StoreConfig(file_reserved_hours=5, message_delay_level=LEVELS),
        ):
            with MessageStore.open("/store", config, files=files) as store:
                assert (store.config.max_total_size, store.config.commitlog_file_size) == (None, 65_536)
        assert (store.config.file_reserved_hours, store.config.message_delay_level) == (5, LEVELS)
        assert "file_reserved_hours is 5 and was None" in caplog.text
        caplog.clear()
        for _ in range(2):
            with MessageStore.open("/store", StoreConfig(max_total_size=1 << 30, keep_unconsumed=False), files=files):
                pass
        assert "max_total_size is 1073741824 and was None, keep_unconsumed is False and was True" in caplog.text
        assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match="commitlog_file_size"):
        MessageStore.open("/store", StoreConfig(commitlog_file_size=1 << 20), files=files)
    with pytest.raises(ConfigError, match="max_total_size"):
        MessageStore.open("/store", StoreConfig(max_total_size=1 << 10), files=files)


def test_a_configuration_knows_which_settings_were_named() -> None:
    assert StoreConfig(durability="sync").named == {"durability"}
    assert "max_total_size" not in StoreConfig.broker().named
    assert "max_total_size" in StoreConfig.broker(max_total_size=None).named
    config = StoreConfig(durability="sync").with_settings({"compress_from": 1})
    assert config.named == {"durability", "compress_from"}
    again = pickle.loads(pickle.dumps(config))
    assert (again, again.named, hash(again)) == (config, config.named, hash(config))
    assert dataclasses.replace(StoreConfig(), max_total_size=1 << 30).named == {"max_total_size"}
    assert "file_reserved_hours" in dataclasses.replace(StoreConfig.broker(), file_reserved_hours=5).named
    assert StoreConfig() == StoreConfig(durability="async")


class Vanishing(MemoryFiles):
    """Files of librmq's own that another process deletes after each look at their size."""

    def status(self, path: str) -> FileStatus | None:
        status = super().status(path)
        if status is not None and status.size and path.startswith("/s/librmq/"):
            self.delete(path)
        return status


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("closed.json", read_closed_state),
        ("flushed.json", read_mark_of_flush),
        ("config.json", lambda path, files: any(KeptSettings.read(path, files)[:2])),
        ("retention.json", lambda path, files: RecordedRetention.read(path, files).named),
        ("replica.json", ReplicaMark.read),
        ("resent.json", resent_times),
        ("settings.json", lambda path, files: any(Promises.read(path, files).named())),
    ],
)
def test_a_document_that_is_deleted_after_a_look_counts_as_missing(
    name: str, read: Callable[[str, MemoryFiles], object]
) -> None:
    """Readers take no lock, and a close deletes `closed.json` where the disk has no room for a new one."""
    files = Vanishing()
    files.make_folder("/s/librmq")
    files.write(f"/s/librmq/{name}", with_checksum(b'{"version": 1}'))
    assert not read("/s", files)
    assert files.names("/s/librmq") == ()
