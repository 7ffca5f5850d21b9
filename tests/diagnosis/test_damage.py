"""Damage of a folder is a finding, before everything else."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from librmq import Broker, Message, MessageStore
from librmq.diagnosis import Thresholds, design_check, diagnose


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a closed store whose group has consumed nothing of two queues; one has a frequent key."""
    path = tmp_path / "store"
    with Broker.open(path) as broker:
        broker.create_topic("T", 4)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(120):
            broker.store.append(Message("T", b"body %d" % number, keys=["hot"] if number % 2 else []), 1)
        broker.store.append(Message("T", b"the only one"), 0)
    return path


def kinds(path: Path, *, check: bool | None = None) -> list[str]:
    return [one.kind for one in diagnose(path, Thresholds(old_s=1e9), check=check)]


def test_a_changed_byte_of_a_body_comes_first(store: Path) -> None:
    log = min((store / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw.replace(b"body 7", b"bodi 7", 1))
    (first, *_) = diagnose(store)
    assert (first.kind, first.severity) == ("damage", "error")
    assert "body checksum" in first.what
    assert kinds(store, check=False)[0] == "damage"


@pytest.mark.parametrize("check", [True, False])
def test_a_missing_queue_is_found_with_and_without_verify(store: Path, check: bool) -> None:
    shutil.rmtree(store / "consumequeue" / "T" / "1")
    found = [one for one in diagnose(store, check=check) if one.kind == "damage"]
    assert [one.evidence["kinds"] for one in found] == [["missing"]]


@pytest.mark.slow
def test_a_sound_folder_has_no_damage_even_after_a_crash(store: Path) -> None:
    assert "damage" not in kinds(store)
    with MessageStore.open(store) as writer:
        writer.append(Message("T", b"x"), 2)
        for check in (True, False):
            assert "damage" not in kinds(store, check=check)
    (store / "abort").touch()
    for check in (True, False):
        assert "damage" not in kinds(store, check=check)


def test_a_folder_shows_the_hot_key_of_a_queue_that_lags(store: Path) -> None:
    found = {one.kind: one for one in diagnose(store)}
    assert found["hot-key"].subject == "group G, topic T, queue 1"
    assert (found["hot-key"].evidence["key"], found["hot-key"].evidence["share"]) == ("hot", 0.5)
    assert set(found) == {"hot-key", "backlog"}


def test_findings_are_the_same_without_arrow(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings read samples as rows, for which Arrow would only take longer to load."""
    found = [*diagnose(store), *design_check(store)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert [*diagnose(store), *design_check(store)] == found
    assert len(found) >= 2
