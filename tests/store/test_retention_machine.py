"""Retention compared with a plain model while messages arrive, time passes, disks fill up and processes die."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq.clock import ManualClock
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from librmq.store.retention import Retention
from tests.budget import examples
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, died, retained, served

HOUR = 3_600_000
FILE = SMALL.commitlog_file_size
BASES = {False: SMALL, True: SMALL_EXT}


class RetentionMachine(RuleBasedStateMachine):
    """Remembers place and store time of each record of the log, and the end of each queue."""

    @initialize(
        ext=st.booleans(),
        max_files=st.sampled_from([None, 1, 3, 6]),
        reserved=st.sampled_from([0, 5, 72]),
        hours=st.sets(st.integers(0, 23), min_size=1, max_size=3),
        offset=st.sampled_from([0, 8, -3.5]),
    )
    def begin(self, ext: bool, max_files: int | None, reserved: int, hours: set[int], offset: float) -> None:
        changes = {
            "max_total_size": None if max_files is None else max_files * FILE,
            "file_reserved_hours": reserved,
            "delete_when": ";".join(f"{hour:02}" for hour in sorted(hours)),
        }
        self.config = replace(BASES[ext], **changes)  # type: ignore[arg-type]
        self.hours, self.zone = hours, timezone(timedelta(hours=offset))
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.records: list[tuple[int, int]] = []  # physical offset, store time
        self.next: dict[str, int] = {}
        self.begin_file = 0
        self.open()

    def open(self) -> None:
        self.store = MessageStore.open(ROOT, self.config, files=self.files, clock=self.clock)
        store = retained(self.store, self.config, self.store.appender.lock, self.store.flush)
        self.retention = Retention(store, timezone=self.zone)
        self.round: tuple[int, int] | None = None  # start of the round, number of files deleted in it

    # --- the model

    @property
    def last_file(self) -> int:
        return self.records[-1][0] // FILE if self.records else 0

    def expired(self, now: int) -> bool:
        last = max((place, stored) for place, stored in self.records if place // FILE == self.begin_file)[1]
        return last + (self.config.file_reserved_hours or 0) * HOUR <= now

    def in_hour(self, now: int) -> bool:
        return (datetime.fromtimestamp(now // 1000, UTC) + self.zone.utcoffset(None)).hour in self.hours

    def model_run(self, now: int) -> int:
        """Move the model's begin past the files that a run deletes; return their number."""
        used, before = self.files.disk_used_ratio, self.begin_file
        if self.config.max_total_size is not None:
            most = self.config.max_total_size // FILE
            while self.begin_file < self.last_file and self.last_file + 1 - self.begin_file > most:
                if self.begin_file - before == 10:
                    break
                self.begin_file += 1
        if used > 0.85 or used > 0.75 or self.in_hour(now):
            if self.round is None or now >= self.round[0] + 10_000:
                self.round = now, 0
            may = self.begin_file < self.last_file and self.round[1] < 10
            if may and (used > 0.85 or self.expired(now)):
                self.begin_file += 1
                self.round = self.round[0], self.round[1] + 1
        return self.begin_file - before

    # --- operations

    @rule(
        count=st.integers(1, 12),
        topic=st.sampled_from("ABG"),
        size=st.sampled_from([10, 900, 2500]),
        step=st.sampled_from([0, 1, HOUR, 30 * HOUR]),
    )
    def append(self, count: int, topic: str, size: int, step: int) -> None:
        for _ in range(count):
            result = self.store.append(Message(topic, bytes(size), keys=f"k{len(self.records)}"))
            assert result.queue_offset == self.next.get(topic, 0)
            self.next[topic] = result.queue_offset + 1
            self.records.append((result.physical_offset, result.store_timestamp_ms))
            self.clock.advance(ms=step)

    @rule(used=st.sampled_from([0.0, 0.5, 0.75, 0.751, 0.85, 0.851, 0.9, 0.901, 1.0]))
    def fill_disk(self, used: float) -> None:
        self.files.disk_used_ratio = used

    @rule(later=st.sampled_from([0, 1, 99, 100, 10_000, HOUR, 24 * HOUR, 80 * HOUR]))
    def run(self, later: int) -> None:
        self.clock.advance(ms=later)
        self.run_now()

    def run_now(self) -> int | None:
        now = self.clock.now_ms()
        before = self.begin_file
        due = self.retention.run_due(now)
        self.model_run(now)
        deleted = [path for path in self.retention.deleted if "/commitlog/" in path]
        assert [int(os.path.basename(path)) for path in deleted] == [
            number * FILE for number in range(before, self.begin_file)
        ]
        assert self.retention.refuses_writes is (self.files.disk_used_ratio > 0.9)
        assert due is None or due > now
        return due

    @rule(times=st.integers(1, 15))
    def run_when_due(self, times: int) -> None:
        """Between two due times the model deletes nothing."""
        for _ in range(times):
            due = self.run_now()
            now = self.clock.now_ms()
            until = due if due is not None else now + 400 * HOUR
            for share in (3, 2, 1.01) if until > now + 100 else ():  # 100 ms is the pause between files
                kept = self.begin_file, self.round
                assert self.model_run(now + max(1, int((until - now) / share)) - 1) == 0
                self.begin_file, self.round = kept
            if due is None:
                assert self.files.disk_used_ratio == 0
                assert self.begin_file == self.last_file
                return
            self.clock.move_to(due)

    @rule(at_most=st.integers(0, 12), forced=st.booleans())
    def expire(self, at_most: int, forced: bool) -> None:
        now, gone = self.clock.now_ms(), 0
        while gone < at_most and self.begin_file < self.last_file and (forced or self.expired(now)):
            self.begin_file += 1
            gone += 1
        self.retention.expire(now, at_most=at_most, forced=forced)

    @rule(share=st.floats(0, 1.2))
    def delete_before(self, share: float) -> None:
        physical_offset = int(share * self.store.log.end)
        self.retention.delete_before(physical_offset)
        self.begin_file = max(self.begin_file, min(physical_offset // FILE, self.last_file))

    @precondition(lambda self: self.records)
    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        used = self.files.disk_used_ratio
        if clean:
            self.store.close()
        else:
            self.store.abandon()
        self.files = died(self.files)
        self.files.disk_used_ratio = used
        self.open()
        # Index files that the checkpoint does not cover are rebuilt; log and queues need no repair.
        assert not [damage for damage in self.store.recovered if "/index" not in damage.file]

    @rule()
    def look(self) -> None:
        """Check derived data. As a rule, it lets retention also meet records that are not in their queues yet."""
        served(self.store)
        for topic, following in self.next.items():
            queue = self.store.queues[topic, 0]
            assert queue.max_offset == following
            for _, entries in queue.blocks():
                assert (entries["physical_offset"] < self.store.log.end).all()

    # --- invariants

    @invariant()
    def agrees(self) -> None:
        if not self.records:
            return
        begin = self.begin_file * FILE
        assert self.store.log.begin == begin
        assert {m.physical_offset for m in self.store} == {place for place, _ in self.records if place >= begin}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.look()
            self.store.close()
            verdict = verify(ROOT, self.config, self.files)
            assert verdict.sound, verdict.damage


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=examples(150), stateful_step_count=25)
