"""Power cuts while several processes append to one log, each by itself; some of them die within an append."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from librmq.commitlog import CommitLog
from librmq.store import MessageStore, peer_appends
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append_page import AppendPage
from librmq.store.peer_appends import PeerAppender
from tests.budget import examples, many, some
from tests.conftest import SlowBudget
from tests.crash.runs import CrashError, Recorded, Run, check, crash_points
from tests.file_seams import CrashImages, Image
from tests.stores import ROOT, any_message

pytestmark = [
    pytest.mark.usefixtures("mark_each_flush"),
    pytest.mark.skipif(sys.platform != "linux", reason="only there peers append by themselves"),
]

TOPICS = ("TopicA", "TopicB")
FILE = 4 * 4096


class DiedError(Exception):
    """A writer dies here."""


class SharedRun(Run):
    """Does random things to a store with two peers. Their page is on a disk, and no crash image has it."""

    def __init__(self, seed: str, folder: str, before: tuple[Recorded, Image] | None = None) -> None:
        self.folder = folder
        self.peers: list[PeerAppender] = []
        self.whole: dict[int, set[bytes]] = {}
        """Records, by physical offset, that a writer had written when it died before it had committed them."""
        self.alone = 0
        super().__init__(seed, before)

    def open(self, *, thorough: bool = False) -> None:
        if not hasattr(self, "store"):  # peers append where nothing else is promised, and where a file has room
            config = self.recorded.config
            self.recorded.config = replace(
                config,
                enable_consumequeue_ext=False,
                durability="async",
                commitlog_file_size=FILE,
                max_total_size=3 * FILE if config.max_total_size else config.max_total_size,
            )
        super().open(thorough=thorough)
        self.share()

    def share(self) -> None:
        """Let peers append."""
        place = tempfile.mkdtemp(dir=self.folder)
        page, bell = os.path.join(place, "appends"), os.path.join(place, "bell")
        shared = self.store.writer.share_appends(
            page, {"cluster_name": "c", "bell": bell, "held": []}, lambda records: None, 20
        )
        for topic in TOPICS:
            shared.offer(topic, 2, lambda: True)
        self.page = page
        self.peers = [self.peer(), self.peer()]

    def wait_open(self) -> None:
        """Wait until the owner lets peers append, after one that had to ask it."""
        page = AppendPage.open(self.page)
        assert page is not None
        while page.numbers[page_format.WISHED] and page.numbers[page_format.STATE] != page_format.OPEN:
            os.sched_yield()
        page.close()

    def peer(self) -> PeerAppender:
        page = AppendPage.open(self.page)
        assert page is not None
        with (
            mock.patch.object(peer_appends, "SystemClock", return_value=self.clock),
            mock.patch.object(peer_appends, "DiskFiles", return_value=self.files),
        ):
            return PeerAppender(ROOT, page, lambda: None, 20)

    # --- operations

    def peer_append(self) -> None:
        """Append as a peer, and by the owner where it has to."""
        peer = self.rng.choice(self.peers)
        for _ in range(self.rng.choice((1, 1, 3))):
            message, _ = any_message(self.rng, self.rng.choice(TOPICS), delay=False)
            queue_id = self.rng.randrange(2)
            result = peer.append(message, queue_id)
            if result is None:
                self.store.check_room()
                self.store.appender.room_until = sys.maxsize  # files in memory are no disk that gets full
                result = self.store.append(message, queue_id)
                self.wait_open()
            else:
                self.alone += 1
                self.store.queue_range(message.topic, queue_id)  # follows, so that the record can be read
            self.note(result)

    def peer_dies(self) -> None:
        """Let a peer die within an append; another process finds what it has left."""
        peer, self.peers[0] = self.peers[0], self.peer()
        is_whole, thread = self.rng.random() < 0.5, threading.get_ident()
        copy_in, end_write = CommitLog.copy_in, AppendPage.end_write

        def copy_part(log: CommitLog, data: bytes | bytearray, size: int) -> None:
            if threading.get_ident() != thread:
                copy_in(log, data, size)
                return
            begin, part = log.end, size
            if is_whole:
                self.whole.setdefault(begin, set()).add(bytes(data))
            else:  # whole words are there, as a power cut leaves them of a running write
                part = max(0, (begin + self.rng.randrange(size)) // 8 * 8 - begin)
            copy_in(log, data[:part], part)
            raise DiedError

        def leave(page: AppendPage, log: CommitLog) -> None:
            if threading.get_ident() == thread:
                raise DiedError
            end_write(page, log)

        message, _ = any_message(self.rng, self.rng.choice(TOPICS), delay=False)
        with (
            mock.patch.object(CommitLog, "copy_in", copy_part),
            mock.patch.object(AppendPage, "end_write", leave),
            suppress(DiedError),
        ):
            peer.append(message, 0)
        peer.close()

    def close_and_open(self) -> None:
        for peer in self.peers:
            peer.close()
        super().close_and_open()

    STEPS: tuple[tuple[Callable[[Any], None], int], ...] = (
        (peer_append, 24),
        (peer_dies, 5),
        (Run.append, 5),
        (Run.burst, 1),
        (Run.batch, 2),
        (Run.flush, 3),
        (Run.flush_while_others_append, 2),
        (Run.pass_time, 4),
        (Run.expire, 1),
        (close_and_open, 1),
        (Run.recover, 1),
    )

    def step(self, what: Callable[[Run], None]) -> None:
        super().step(what)
        # A whole record of a writer that has died stays where its finder finds it whole.
        for message in self.store:
            self.recorded.records.setdefault(message.physical_offset, bytes(message.raw))


@contextmanager
def run_of(seed: str, steps: int) -> Iterator[SharedRun]:
    """Make a run, and close its store at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = SharedRun(seed, folder)
        try:
            run.run(steps)
            yield run
        finally:
            for peer in run.peers:
                peer.close()
            run.store.close()


def with_whole_record(run: SharedRun, image: Image) -> Recorded:
    """Return what the run promises, if the image ends with a record that was whole when its writer died."""
    recorded = run.recorded
    if not run.whole:
        return recorded
    with MessageStore.open(ROOT, recorded.config, files=image.files(), clock=run.clock) as store:
        last = None
        for message in store:
            last = message
    if last is None or bytes(last.raw) not in run.whole.get(last.physical_offset, ()):
        return recorded
    place = last.physical_offset
    records = {at: raw for at, raw in recorded.records.items() if at < place}
    return replace(recorded, records={**records, place: bytes(last.raw)})


def check_cuts(seed: str, count: int, steps: int = 40) -> int:
    """Check images of power cuts in a run of several writers; return how many records peers have appended."""
    with run_of(seed, steps) as run:
        recorded = run.recorded
        images = CrashImages(recorded.trace, recorded.contents)
        for number, crash_point in enumerate(crash_points(recorded, seed, count)):
            image = images.image(f"{seed}/{number}", crash_point)
            try:
                check(with_whole_record(run, image), image, thoroughly=number % 10 == 0)
            except Exception as error:
                raise CrashError(f"run {seed!r}, {image}\n{type(error).__name__}: {error}") from error
        return run.alone


@many
@pytest.mark.parametrize("number", some(range(10)))
def test_several_writers_survive_any_power_cut(number: int) -> None:
    assert check_cuts(f"writers {number}", examples(60))


@pytest.mark.slow
def test_what_a_dead_writer_left_does_not_come_back_below_the_next_record() -> None:
    assert check_cuts("many writers 120", 100)


@pytest.mark.slow
def test_several_writers_survive_very_many_power_cuts(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(1000, "times 100 images of power cuts with several writers", at_least=2):
        assert check_cuts(f"many writers {number}", 100)
