"""However often the disk was full, queues and index hold each record exactly once and in order."""

from __future__ import annotations

import errno
import os
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.config import StoreConfig
from librmq.errors import StoreIOError
from librmq.files.interface import File
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore
from tests.budget import examples

ROOT = "/store"
KEYS = st.sampled_from(["", "a", "a b", "a b c"])
ACTS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 150), KEYS),
    st.tuples(st.just("batch"), st.integers(1, 60), KEYS),
    st.tuples(st.sampled_from(["read", "find", "flush"]), st.just(1), st.just("")),
)


class Filling(MemoryFiles):
    """A disk that can be limited to a few more files and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.room: int | None = None

    def _take(self, call: str, path: str) -> None:
        if self.room is not None:
            if not self.room:
                raise StoreIOError(call, path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            self.room -= 1

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        self._take("create", path)
        return super().create(path, size, keep_descriptor=keep_descriptor)

    def reserve(self, file: File, begin: int, end: int) -> None:
        self._take("allocate", file.path)
        super().reserve(file, begin, end)


def message(number: int, keys: str) -> Message:
    return Message("T", b"x" * (number % 50), keys=keys.split(), unique_key=f"u{number}" if number % 3 else None)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.tuples(ACTS, st.sampled_from([None, None, 0, 0, 1, 2, 5])), min_size=5, max_size=20),
    st.sampled_from([4, 40, 101, 4000]),
)
def test_a_disk_full_now_and_then_costs_no_entry_or_key(
    acts: list[tuple[tuple[str, int, str], int | None]], keys_a_file: int
) -> None:
    """A disk that is full for a while loses no entry and no key."""
    files = Filling()
    config = StoreConfig.tiny(max_index_num=keys_a_file, max_hash_slot_num=50, consumequeue_file_size=320)
    with MessageStore.open(ROOT, config, files=files, background=False) as store:
        number = 0
        taken: list[int] = []
        for (act, count, keys), files.room in acts:
            try:
                if act == "append":
                    for _ in range(count):
                        number += 1
                        taken.append(store.append(message(number, keys), number % 2).physical_offset)
                elif act == "batch":
                    number += count
                    batch = [message(number, keys) for _ in range(count)]
                    taken += [result.physical_offset for result in store.append_batch(batch, number % 2)]
                elif act == "read":
                    store.read("T", 0, 0)
                elif act == "find":
                    store.find_by_key("T", "a")
                else:
                    store.flush()
            except StoreIOError:
                pass
        files.room = None
        assert store.verify().sound
        assert [one.physical_offset for one in store] == taken
        keys_of = [(one.unique_key is not None) + len(one.properties.get("KEYS", "").split()) for one in store]
        expected = [place for place, keys in zip(taken, keys_of, strict=True) for _ in range(keys)]
        entries = [file.entries(1, file.header.index_count)["physical"].tolist() for file in store.index.files]
        assert list(chain.from_iterable(entries)) == expected
