"""A master and its replica, compared with a model through kills, cut and slow links, and retention."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq import Broker, BrokerConfig, ManualRunner, StoreConfig
from librmq.cluster import Replica
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.protocol import SendStatus, UpdateOffset
from librmq.store.recovery._verify import verify
from tests.broker.parties import send
from tests.budget import examples
from tests.cluster.replica_link import ReplicaLink

FILE = 4096
STORE = StoreConfig.tiny(commitlog_file_size=FILE, max_message_size=3000, max_total_size=6 * FILE)
COPY_MS = 10_000
"""Interval at which a replica copies the progress."""


class ReplicaMachine(RuleBasedStateMachine):
    """Knows all stored messages, those that a replica acknowledged, and the progress of the last seconds."""

    @initialize(sync=st.booleans())
    def begin(self, sync: bool) -> None:
        self.files, self.runner = MemoryFiles(), ManualRunner()
        self.config = BrokerConfig(replication="sync" if sync else "async")
        self.is_sync = sync
        self.master = self.open_master()
        self.link = ReplicaLink(self.master, self.runner.manual_clock)
        self.replica = self.open_replica()
        self.sent: list[tuple[int, bytes]] = []  # physical offset, body
        self.safe: set[int] = set()  # messages that the replica has, according to the status of their send
        self.progress: list[tuple[int, int]] = [(self.runner.now_ms(), 0)]  # time, the master's value
        self.reached_ms = self.runner.now_ms()  # when the link last worked, or began to be cut
        self.kept: set[int] = set()  # progress that only the replica has, because the master died before saving it

    def open_master(self) -> Broker:
        return Broker.open("/b", self.config, runner=self.runner, files=self.files, store_config=STORE)

    def open_replica(self) -> Replica:
        return Replica.open("/copy", of=self.link, runner=self.runner, files=self.files)

    # --- what happens

    @rule(size=st.integers(1, 2500), count=st.integers(1, 3), waits=st.booleans())
    def send(self, size: int, count: int, waits: bool) -> None:
        for _ in range(count):
            body = b"%d," % len(self.sent) * (1 + size // 8)
            response = send(self.master, "T", body, wait_store_ok=waits)
            self.sent.append((response.physical_offset, body))
            if self.is_sync and waits and response.status is SendStatus.SEND_OK:
                self.safe.add(response.physical_offset)
                assert self.replica.end > response.physical_offset

    @rule(seconds=st.sampled_from([0.05, 1, 7, 10, 70]))
    def time_passes(self, seconds: float) -> None:
        self.runner.advance(round(1000 * seconds))
        if not self.link.is_cut:
            self.reached_ms = self.runner.now_ms()

    @rule(most=st.one_of(st.none(), st.integers(0, 5000)))
    def link_breaks(self, most: int | None) -> None:
        """The link breaks immediately, or in the middle of a copy."""
        if most is None:
            self.link.cut()
        else:
            self.link.most_bytes = most

    @rule()
    def link_returns(self) -> None:
        self.link.restore()
        assert self.replica.follow()
        assert self.replica.end == self.master.store.log.end
        self.reached_ms = self.runner.now_ms()

    @rule(torn=st.integers(0, 300), kill=st.booleans())
    def replica_dies(self, torn: int, kill: bool) -> None:
        """The replica's file may contain part of the next bytes, and a restart may lose more."""
        before = self.replica.end
        if not kill:
            self.replica.close()
        else:
            self.replica.abandon()
            path = f"/copy/commitlog/{before - before % FILE:020}"
            log = self.master.store.log
            if torn and log.begin <= before < log.end and file_size(self.files, path):
                data = log.data_at(before, torn)
                file = self.files.open(path, writable=True)
                file.buffer[before % FILE : before % FILE + len(data)] = data
        self.link.restore()
        self.replica = self.open_replica()
        assert self.replica.end >= min(before, self.master.store.log.end)
        self.reached_ms = self.runner.now_ms()

    @rule()
    def master_dies(self) -> None:
        """A killed process loses no message, but loses its progress since the last save."""
        self.master.abandon()
        self.check_failover()
        self.kept.add(self.replica.broker.consumer_offset("g", "T") or 0)
        self.master = self.open_master()
        self.link.master = self.master
        self.link.restore()
        self.replica.reconnect(self.link)
        self.note_progress()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def consume(self, data: Any) -> None:
        begin, end = self.master.store.queue_range("T", 0)
        offset = data.draw(st.integers(begin, end))
        self.master.call(UpdateOffset("g", "T", 0, offset))
        self.note_progress()

    # --- what must hold

    def note_progress(self) -> None:
        self.progress.append((self.runner.now_ms(), self.master.consumer_offset("g", "T") or 0))

    def check_failover(self) -> None:
        """Every safe message can be read from the copy, whose progress is at most 10 s old.

        So every message that is delivered again was consumed in the 10 s before the link last worked.
        """
        copied = {one.physical_offset: one.body for one in self.replica.store.messages("T", 0)}
        begin = self.replica.store.log.begin
        for place, body in self.sent:
            if place in self.safe and place >= begin:
                assert copied[place] == body
        found = self.replica.broker.consumer_offset("g", "T") or 0
        since = self.reached_ms - COPY_MS
        old = [value for at, value in self.progress if at <= since]
        recent = [value for at, value in self.progress if at > since]
        assert found in {*old[-1:], *recent, *self.kept}

    @invariant()
    def the_copy_is_a_part_of_the_master(self) -> None:
        if not hasattr(self, "replica"):
            return
        mine, theirs = self.replica.store.log, self.master.store.log
        assert mine.end <= theirs.end
        for start in mine.sequence.starts:
            if start in theirs.sequence.starts and start < mine.end:
                assert mine.data_at(start, min(FILE, mine.end - start)) == theirs.data_at(
                    start, min(FILE, mine.end - start)
                )

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        self.link.restore()
        assert self.replica.follow()
        self.check_failover()
        self.replica.promote()
        self.master.abandon()
        assert verify("/copy", None, self.files).damage == ()
        with Broker.open("/copy", runner=self.runner, files=self.files) as promoted:
            send(promoted, "T", b"new")
            assert [one.body for one in promoted.messages("T")][-1] == b"new"


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
