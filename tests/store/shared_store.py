"""A store to which peers append by its page, all in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from librmq import Message, MessageStore, StoreConfig
from librmq.files import DiskFiles
from librmq.store.engine._append_page import AppendPage
from librmq.store.engine._shared_appends import PeersRecords
from librmq.store.peer_appends import PeerAppender

CONFIG = StoreConfig.tiny(commitlog_file_size=128 << 10, max_message_size=32 << 10)


@contextmanager
def within_a_write(call: Callable[[], object]) -> Iterator[None]:
    """Call ``call()`` once within the next append of a peer: under the lock, before its record is copied."""
    begin_write, calls = AppendPage.begin_write, [call]

    def begin(page: AppendPage, number: int, room: int) -> None:
        begin_write(page, number, room)
        if calls:
            calls.pop()()

    with mock.patch.object(AppendPage, "begin_write", begin):
        yield


class Shared:
    """A store, and two peers that append to it by its page."""

    def __init__(self, folder: Path, config: StoreConfig = CONFIG) -> None:
        self.path, self.page = str(folder / "store"), str(folder / "appends")
        self.told = threading.Semaphore(0)
        self.arrived: Callable[[PeersRecords], object] = self._count
        self.store = MessageStore.open(self.path, config, files=DiskFiles(has_peers=True))
        self.store.append(Message("orders", b"first"))
        settings = {"cluster_name": "c", "bell": str(folder / "bell"), "held": ["DELAY"]}
        self.appends = self.store.writer.share_appends(self.page, settings, lambda records: self.arrived(records), 3)
        self.appends.offer("orders", 2, lambda: True)
        self.peers = [self.peer(), self.peer()]

    def _count(self, records: PeersRecords) -> None:
        for count, _ in records.values():
            for _ in range(count):
                self.told.release()

    def peer(self, wait_s: float = 20) -> PeerAppender:
        peer = PeerAppender.open(self.path, self.page, wait_s)
        assert peer is not None
        return peer

    def append(self, body: bytes, queue_id: int = 0, *, peer: int = 0) -> None:
        """Append as a peer does, and as the owner where it has to."""
        message = Message("orders", body, keys="k")
        if self.peers[peer].append(message, queue_id) is None:
            self.send(message, queue_id)

    def send(self, message: Message, queue_id: int = 0) -> None:
        """Append as a broker does in the process of the owner."""
        self.store.check_room()
        self.store.append(message, queue_id)

    def direct(self, body: bytes, queue_id: int = 0, *, peer: int = 0) -> None:
        """Append as a peer does by itself, once the owner lets it: it does not after a second without an append."""
        self.direct_message(Message("orders", body, keys="k"), queue_id, peer=peer)

    def direct_message(self, message: Message, queue_id: int = 0, *, peer: int = 0) -> None:
        while self.peers[peer].append(message, queue_id) is None:
            self.send(Message("orders", b"by the owner"), 1)

    def bodies(self, queue_id: int = 0) -> list[bytes]:
        messages = self.store.topic_messages("orders")
        return [message.body for message in messages if message.queue_id == queue_id]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.store.close()
