"""Compare a queue and its extension with a list, after random operations and after reopening."""

from __future__ import annotations

import shutil
import tempfile
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, is_ext_address
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.files.rolling import MappingPool
from tests.budget import examples

EXT_FILE_SIZE = 64
FILLER = (0, 0x7FFFFFFF, 0)


class Unit(NamedTuple):
    tags_code: int
    store_timestamp_ms: int
    bitmap: bytes | None


class QueueMachine(RuleBasedStateMachine):
    """The model holds the stored entries, and the content of each entry's extension unit."""

    def __init__(self) -> None:
        super().__init__()
        self.files: Files = MemoryFiles()
        self.folder = "/store"
        self.entries: list[tuple[int, int, int]] = []
        self.units: dict[int, Unit] = {}  # by the address that an entry holds
        self.begin = 0  # queue offset of entries[0]
        self.minimum = 0
        self.log_end = 0
        self.log_begin = 0  # entries of deleted messages can exist without their units

    @initialize(
        on_disk=st.booleans(), per_file=st.sampled_from([3, 5]), limit=st.integers(1, 4), with_ext=st.booleans()
    )
    def start(self, on_disk: bool, per_file: int, limit: int, with_ext: bool) -> None:
        if on_disk:
            self.files = DiskFiles()
            self.folder = tempfile.mkdtemp(prefix="librmq-queue-")
        self.per_file = per_file
        self.limit = limit
        self.with_ext = with_ext
        self.open()

    def teardown(self) -> None:
        if isinstance(self.files, DiskFiles):
            shutil.rmtree(self.folder)

    def open(self) -> None:
        self.queue = ConsumeQueue.open(
            f"{self.folder}/q",
            self.per_file * ENTRY_SIZE,
            files=self.files,
            pool=MappingPool(self.limit),
            ext_folder=f"{self.folder}/e" if self.with_ext else None,
            ext_file_size=EXT_FILE_SIZE,
        )

    @property
    def end(self) -> int:
        return self.begin + len(self.entries)

    def new_entry(self, size: int, tags_code: int) -> tuple[int, int, int]:
        entry = (self.log_end, size, tags_code)
        self.log_end += size
        return entry

    def last_place(self) -> int:
        if not self.entries or self.entries[-1] == FILLER:
            return -1
        return self.entries[-1][0] + self.entries[-1][1]

    def set_end(self, end: int) -> None:
        del self.entries[end - self.begin :]
        self.minimum = min(self.minimum, end)
        if not self.entries and self.begin == 0:
            self.minimum = 0

    # ----------------------------------------------------------------------------------- writing

    @rule(size=st.integers(1, 30), tags_code=st.integers(-(1 << 31), (1 << 63) - 1))
    def append(self, size: int, tags_code: int) -> None:
        entry = self.new_entry(size, tags_code)
        self.queue.append(self.end, *entry)
        self.entries.append(entry)

    @rule(count=st.integers(0, 14), size=st.integers(1, 30))
    def append_many(self, count: int, size: int) -> None:
        new = [self.new_entry(size, n) for n in range(count)]
        self.queue.append_many(self.end, b"".join(ENTRY.pack(*entry) for entry in new))
        self.entries += new

    @precondition(lambda self: self.with_ext)
    @rule(size=st.integers(1, 30), code=st.integers(0, 99), bitmap=st.one_of(st.none(), st.binary(max_size=40)))
    def append_with_unit(self, size: int, code: int, bitmap: bytes | None) -> None:
        assert self.queue.ext is not None
        address = self.queue.ext.put(code, self.log_end, bitmap)
        assert is_ext_address(address)
        assert all(address != entry[2] for entry in self.entries)
        self.units[address] = Unit(code, self.log_end, bitmap or None)
        self.append(size, address)

    @precondition(lambda self: not self.entries and self.begin == 0)
    @rule(first=st.integers(1, 40))
    def start_above_0(self, first: int) -> None:
        entry = self.new_entry(7, 7)
        self.queue.append(first, *entry)
        self.begin = first - first % self.per_file
        self.entries = [FILLER] * (first - self.begin) + [entry]
        self.minimum = first

    # -------------------------------------------------------------------------- cutting, opening

    @rule(back=st.integers(-2, 20))
    def truncate_to(self, back: int) -> None:
        queue_offset = self.end - back
        self.queue.truncate_to(queue_offset)
        if queue_offset < self.end:
            self.set_end(max(queue_offset, self.begin))

    @rule(back=st.integers(0, 200))
    def truncate_after(self, back: int) -> None:
        physical_end = max(0, self.log_end - back)
        kept = self.begin
        for queue_offset, entry in enumerate(self.entries, self.begin):
            if entry == FILLER or entry[0] + entry[1] <= physical_end:
                kept = queue_offset + 1
        assert self.queue.truncate_after(physical_end) == self.end - kept
        self.set_end(kept)
        self.log_end = physical_end
        self.log_begin = min(self.log_begin, physical_end)

    @rule(back=st.integers(-9, 300))
    def trim(self, back: int) -> None:
        log_begin = max(0, self.log_end - back)
        self.queue.trim(log_begin)
        self.log_begin = max(self.log_begin, log_begin)
        there = [
            queue_offset
            for queue_offset, entry in enumerate(self.entries, self.begin)
            if queue_offset >= self.minimum and entry != FILLER and entry[0] >= log_begin
        ]
        last_file = (self.end - 1) - (self.end - 1) % self.per_file if self.entries else self.begin
        self.minimum = there[0] if there else self.end
        first_file = min(self.minimum - self.minimum % self.per_file, last_file)
        if first_file > self.begin:
            del self.entries[: first_file - self.begin]
            self.begin = first_file

    @rule(closed=st.booleans())
    def reopen(self, closed: bool) -> None:
        if closed:
            self.queue.close()
        self.open()
        fillers = sum(entry == FILLER for entry in self.entries)
        self.minimum = self.begin + fillers

    @rule()
    def recover(self) -> None:
        assert self.queue.recover() == 0

    @rule()
    def flush(self) -> None:
        self.queue.flush()

    # ----------------------------------------------------------------------------------- holding

    @invariant()
    def says_what_the_model_says(self) -> None:
        queue = self.queue
        found = queue.min_offset, queue.max_offset, queue.max_physic_offset, queue.stored_begin
        assert found == (self.minimum, self.end, self.last_place(), self.begin)
        assert queue.entries(0).tolist() == self.entries
        assert queue.entries().tolist() == self.entries[self.minimum - self.begin :]

    @invariant()
    def files_hold_entries_and_zeros(self) -> None:
        folder, size = f"{self.folder}/q", self.per_file * ENTRY_SIZE
        found = b"".join(self.files.read(f"{folder}/{entry.name}") for entry in self.files.list(folder))
        packed = b"".join(ENTRY.pack(*entry) for entry in self.entries)
        assert found == packed.ljust(-(-len(packed) // size) * size or size * (self.begin > 0), b"\0")

    @invariant()
    def units_are_there(self) -> None:
        for place, _, tags_code in self.entries[self.minimum - self.begin :]:
            unit = self.queue.ext_unit(tags_code)
            if is_ext_address(tags_code):
                assert unit is not None or place < self.log_begin
                assert unit is None or unit[:3] == self.units[tags_code]
            else:
                assert unit is None

    @rule(at=st.integers(-3, 60), count=st.integers(0, 9))
    def read(self, at: int, count: int) -> None:
        queue_offset = self.begin + at
        file_end = queue_offset - queue_offset % self.per_file + self.per_file
        served = range(queue_offset, min(queue_offset + count, self.end, file_end))
        expected = [self.entries[n - self.begin] for n in served] if queue_offset >= self.minimum else []
        assert self.queue.read(queue_offset, count) == b"".join(ENTRY.pack(*entry) for entry in expected)
        entry = self.queue.entry(queue_offset)
        there = self.minimum <= queue_offset < self.end
        assert entry == (self.entries[queue_offset - self.begin] if there else None)

    @rule(timestamp_ms=st.integers(0, 2000))
    def offset_at(self, timestamp_ms: int) -> None:
        """Use physical offsets as store times: they ascend strictly, so the answer is unique."""
        found = self.queue.queue_offset_at(timestamp_ms, lambda physical_offset, _: physical_offset)
        low, high = self.minimum, self.end
        while low - low % self.per_file + self.per_file < high:
            following = low - low % self.per_file + self.per_file
            if self.entries[following - 1 - self.begin][0] >= timestamp_ms:
                high = following
            else:
                low = following
        times = {n: self.entries[n - self.begin][0] for n in range(low, high)}
        assert found == min(times, key=lambda n: (abs(times[n] - timestamp_ms), n), default=self.minimum)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
