"""Power failures of a master and of its replica, at any moment of the copying."""

from __future__ import annotations

import pytest

from librmq import Broker, BrokerConfig, ManualRunner, StoreConfig
from librmq.cluster import Replica
from librmq.errors import ReplicaError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.protocol import SendStatus
from librmq.store.recovery._verify import verify
from tests.broker.parties import send
from tests.conftest import SlowBudget
from tests.file_seams import CrashImages, RecordingFiles

FILE = 4096
STORE = StoreConfig.tiny(commitlog_file_size=FILE, max_message_size=3000)
KILLS = 4000


class Pair:
    """A master and its replica after some messages, each with a disk of its own."""

    def __init__(self, seed: int, master_files: Files, copy_files: Files) -> None:
        self.runner = ManualRunner()
        config = BrokerConfig(replication="sync")
        self.master = Broker.open("/b", config, runner=self.runner, files=master_files, store_config=STORE)
        self.replica = Replica.open("/copy", of=self.master, files=copy_files)
        self.safe: dict[int, bytes] = {}
        for number in range(25):
            body = b"%d," % number * (1 + (number * 37 + seed * 101) % 300)
            response = send(self.master, "T", body, number % 2)
            assert response.status is SendStatus.SEND_OK
            self.safe[response.physical_offset] = body
            self.runner.advance(seed % 700)

    def copied(self, replica: Replica) -> dict[int, bytes]:
        return {one.physical_offset: one.body for one in replica.store if one.body}


def check_replica(seed: int, kills: int) -> None:
    """The copy loses its unflushed bytes, then gets them again."""
    files = RecordingFiles()
    pair = Pair(seed, MemoryFiles(), files)
    pair.replica.abandon()
    for image in CrashImages(files.trace).images(seed, kills):
        disk = image.files()
        replica = Replica.open("/copy", of=pair.master, files=disk)
        assert replica.follow(), image
        assert replica.end == pair.master.store.log.end, image
        assert {place: pair.copied(replica)[place] for place in pair.safe} == pair.safe, image
        assert replica.store.verify().damage == (), image
        replica.close()


def check_master(seed: int, kills: int) -> None:
    """The master loses an unflushed end that the replica has. The replica refuses, or continues if they agree."""
    files = RecordingFiles()
    pair = Pair(seed, files, MemoryFiles())
    end = pair.replica.end
    pair.master.abandon()
    for image in CrashImages(files.trace).images(seed, kills):
        disk = image.files()
        master = Broker.open("/b", runner=pair.runner, files=disk, store_config=STORE)
        if master.store.log.end < end:
            with pytest.raises(ReplicaError, match="ahead"):
                pair.replica.reconnect(master)
        else:
            pair.replica.reconnect(master)
            assert pair.replica.follow(), image
        assert pair.copied(pair.replica) == pair.safe, image
        master.abandon()
    copy_files = pair.replica.store.files
    pair.replica.promote()
    with Broker.open("/copy", runner=pair.runner, files=copy_files) as promoted:
        assert {one.physical_offset: one.body for one in promoted.store} == pair.safe
    assert verify("/copy", STORE, copy_files).damage == ()


@pytest.mark.slow
def test_many_power_failures_are_survived(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(KILLS // 10, "rounds of 10 kills", at_least=20):
        (check_replica if number % 2 else check_master)(1000 + number, 10)
