"""Writers that append to one log by themselves, from a seed: some die within an append, owners follow one another.

A writer that dies is a fork of this process; the owner and the other writers are in it, so a seed repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Final

from librmq import Message, MessageStore, StoreConfig
from librmq.files import DiskFiles
from librmq.store import verify
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append_page import AppendPage
from librmq.store.engine._shared_appends import PeersRecords
from librmq.store.peer_appends import PeerAppender
from tests.interrupting import killed_at_line

CONFIG: Final = StoreConfig.tiny(commitlog_file_size=16 << 10, max_message_size=4 << 10)
WRITERS: Final = 3
QUEUES: Final = 2
LINES: Final = 120
"""A few more than an append of a writer has, once it has mapped the log's file."""


class WritersWorld:
    """A store with an owner and writers that append by themselves, and what goes wrong."""

    def __init__(self, seed: int | str, folder: Path) -> None:
        """Draw what happens; ``folder`` is empty, and keeps the store."""
        self.seed, self.rng, self.folder = seed, random.Random(f"writers {seed}"), folder
        self.path, self.page = str(folder / "store"), str(folder / "appends")
        self.alone = self.deaths = self._number = 0
        self._sent: list[list[bytes]] = [[] for _ in range(QUEUES)]
        self._unanswered: set[bytes] = set()
        self._told = 0
        self._own()

    # ---- who writes

    def _own(self) -> None:
        """Open the store, as the next owner does."""
        PeerAppender.end_all(self.page, 20)
        (self.folder / "bell").unlink(missing_ok=True)
        self.store = MessageStore.open(self.path, CONFIG, files=DiskFiles(has_peers=True))
        self.appends = self.store.writer.share_appends(
            self.page, {"cluster_name": "c", "bell": str(self.folder / "bell"), "held": []}, self._note_records, 20
        )
        self.appends.offer("orders", QUEUES, lambda: True)
        self._writers = [self._writer() for _ in range(WRITERS)]

    def _note_records(self, records: PeersRecords) -> None:
        self._told += sum(count for count, _ in records.values())

    def _writer(self) -> PeerAppender:
        writer = PeerAppender.open(self.path, self.page, 20)
        assert writer is not None
        return writer

    def _draw(self) -> tuple[Message, int]:
        self._number += 1
        body = b"%d " % self._number + self.rng.randbytes(self.rng.choice((3, 30, 900)))
        return Message("orders", body, keys=f"k{self._number}"), self.rng.randrange(QUEUES)

    # ---- what happens

    def write(self) -> None:
        """Append as a writer, or by the owner where it has to."""
        writer = self.rng.choice(self._writers)
        for _ in range(self.rng.choice((1, 5, 20))):
            message, queue_id = self._draw()
            if writer.append(message, queue_id) is None:
                self._own_append(message, queue_id)
            else:
                self.alone += 1
                self._sent[queue_id].append(message.body)

    def _own_append(self, message: Message, queue_id: int) -> None:
        self.store.check_room()
        self.store.append(message, queue_id)
        self._sent[queue_id].append(message.body)

    def own_append(self) -> None:
        self._own_append(*self._draw())

    def own_batch(self) -> None:
        messages = [self._draw()[0] for _ in range(3)]
        self.store.append_batch(messages, 0)
        self._sent[0] += [message.body for message in messages]

    def die(self) -> None:
        """Let a writer die at a line of an append."""
        (first, first_queue), (message, queue_id) = self._draw(), self._draw()
        line = self.rng.randrange(LINES)
        process = os.fork()
        if not process:
            try:
                writer = self._writer()
                writer.append(first, first_queue)
                killed_at_line(line, lambda: writer.append(message, queue_id))
            except BaseException:
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, -signal.SIGKILL), f"refused: a writer ended by {status}"
        self.deaths += status != 0
        self._unanswered |= {first.body, message.body}  # whether they are stored
        self.rng.choice((self.write, self.own_append, self.read))()

    def read(self) -> None:
        """Read as a consumer of the owner: each message that was acknowledged is there, once, at its number."""
        for queue_id, sent in enumerate(self._sent):
            bodies = [message.body for message in self.store.messages("orders", queue_id)]
            answered = [body for body in bodies if body not in self._unanswered]
            lost = [body[:9] for body in sent if body not in bodies]
            assert not lost, f"lost: {lost} of queue {queue_id}"
            assert answered == sent, f"order: queue {queue_id} has other messages than those that were acknowledged"
            assert len(bodies) == len({*bodies}), f"repeat: a message of queue {queue_id} is stored 2 times"

    def change_owner(self) -> None:
        """Let the owner end, and another one follow; writers of the former one write no more."""
        former, kept = self._writers, f"{self.page}.kept"
        os.link(self.page, kept)
        self.store.close()
        if self.rng.random() < 0.5:  # the page is that of an owner that was killed
            os.rename(kept, self.page)
            page = AppendPage.open(self.page)
            assert page is not None
            page.numbers[page_format.STATE] = page_format.OPEN
            page.close()
        else:
            os.unlink(kept)
        self._own()
        for writer in former:
            message, queue_id = self._draw()
            assert writer.append(message, queue_id) is None, "two owners: a writer of a former one writes"
            writer.close()

    def run(self, steps: int = 60) -> None:
        """Do drawn steps, and judge the store.

        Raises:
            AssertionError: A promise is broken; the folder keeps the store.
        """
        calls = (self.write, self.own_append, self.own_batch, self.die, self.read, self.change_owner)
        try:
            for call in self.rng.choices(calls, (8, 4, 1, 6, 3, 1), k=steps):
                call()
            self.read()
        finally:
            for writer in self._writers:
                writer.close()
            self.store.close()
        assert self._told >= self.alone, f"not told: the owner of {self.alone - self._told} messages"
        verdict = verify(self.path)
        assert verdict.sound, f"damage: {verdict.damage}"
