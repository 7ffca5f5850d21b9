"""A store compared with a plain model through appends, reads, searches, closes, kills and recoveries."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq.clock import ManualClock
from librmq.errors import MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.message import record
from librmq.message.delays import DelayLevels
from librmq.message.message import Message
from librmq.message.properties import RESERVED_PROPERTIES
from librmq.message.topics import SystemTopic
from librmq.store import AppendResult, GetStatus, MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, V4, V6, contents, derived, died

LEVELS = DelayLevels.parse(SMALL.message_delay_level)
TOPICS = st.sampled_from(["A", "消息", "%RETRY%g"])
QUEUE_IDS = st.sampled_from([0, 1, 7])
KEYS = ["k1", "k2", "ключ", "Aa", "BB"]  # the last two have the same hash
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=8).filter(
    str.strip
)

messages = st.builds(
    Message,
    TOPICS,
    st.one_of(st.just(b""), st.binary(max_size=60), st.integers(100, 900).map(bytes)),
    tags=st.one_of(st.none(), st.sampled_from(["TagA", "TagB", "标签"])),
    keys=st.one_of(
        st.just(""), st.sampled_from(KEYS), st.lists(st.sampled_from(KEYS), max_size=3), st.just(["k1", "k1", "k2"])
    ),
    properties=st.dictionaries(words.filter(lambda name: name not in RESERVED_PROPERTIES), words, max_size=3),
    delay_level=st.sampled_from([0, 0, 0, 1, 3, 18, 30, -4]),
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
    unique_key=st.one_of(st.none(), st.sampled_from(["U1", "U2", "U3"])),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "born_host": st.sampled_from([V4, V6]),
        "store_host": st.sampled_from([V4, V6]),
        "born_timestamp_ms": st.integers(0, 1 << 62),
        "reconsume_times": st.integers(0, 16),
        "sys_flag": st.sampled_from([0, 4, 8, 12, record.MULTI_TAGS]),
        "prepared_transaction_offset": st.integers(0, 1 << 40),
    },
)


@dataclasses.dataclass
class Stored:
    """What the model knows about a message."""

    message: Message
    topic: str
    queue_id: int
    result: AppendResult
    properties: dict[str, str]
    fields: dict[str, Any]

    @property
    def kind(self) -> int:
        return int(self.fields.get("sys_flag", 0)) & record.TRANSACTION_MASK

    @property
    def in_queue(self) -> bool:
        return self.kind in (0, record.TRANSACTION_COMMIT)

    @property
    def keys(self) -> set[str]:
        if self.kind == record.TRANSACTION_ROLLBACK:
            return set()
        given = {key for key in self.properties.get("KEYS", "").split(" ") if key}
        return given | ({self.properties["UNIQ_KEY"]} if "UNIQ_KEY" in self.properties else set())


class StoreMachine(RuleBasedStateMachine):
    """Keeps a list of all acknowledged messages, and another for each queue."""

    @initialize(ext=st.booleans())
    def begin(self, ext: bool) -> None:
        self.config = SMALL_EXT if ext else SMALL
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.all: list[Stored] = []
        self.queues: dict[tuple[str, int], list[Stored]] = {}
        self.open()

    def open(self, **more: Any) -> None:
        self.store = MessageStore.open(ROOT, self.config, files=self.files, clock=self.clock, **more)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.close()
        verdict = verify(ROOT, self.config, self.files)
        assert verdict.sound, verdict.damage
        before = derived(contents(self.files))
        self.open()
        assert self.store.recovered == []
        self.everything_is_there()
        self.store.close()
        assert derived(contents(self.files)) == before

    # --- writing

    @rule(message=messages, queue_id=QUEUE_IDS, fields=fields, later=st.sampled_from([0, 1, 999, 60_000]))
    def append(self, message: Message, queue_id: int, fields: dict[str, Any], later: int) -> None:
        self.clock.advance(ms=later)
        result = self.store.append(message, queue_id, **fields)
        topic, properties = message.topic, dict(message.properties)
        level = LEVELS.cap(message.delay_level)
        if level > 0 and fields.get("sys_flag", 0) & record.TRANSACTION_MASK in (0, record.TRANSACTION_COMMIT):
            properties |= {"DELAY": str(level), "REAL_TOPIC": topic, "REAL_QID": str(queue_id)}
            topic, queue_id = SystemTopic.SCHEDULE, level - 1
        self.note(Stored(message, topic, queue_id, result, properties, fields))

    @rule(
        batch=st.lists(messages, min_size=1, max_size=5),
        queue_id=QUEUE_IDS,
        fields=fields,
        own=st.sampled_from([{}, {"B": "b"}]),
    )
    def append_batch(self, batch: list[Message], queue_id: int, fields: dict[str, Any], own: dict[str, str]) -> None:
        fields = {
            name: value for name, value in fields.items() if name not in ("sys_flag", "prepared_transaction_offset")
        }
        for message in batch:
            message.topic = batch[0].topic
            message.properties.pop("DELAY", None)
        before = contents(self.files)
        try:
            results = self.store.append_batch(batch, queue_id, properties=own, **fields)
        except MessageIllegalError:  # the batch is too large
            assert sum(len(message.body) for message in batch) > 2000
            assert contents(self.files) == before
            return
        for message, result in zip(batch, results, strict=True):
            self.note(Stored(message, message.topic, queue_id, result, {**message.properties, **own}, fields))

    def note(self, stored: Stored) -> None:
        result, queue = stored.result, self.queues.setdefault((stored.topic, stored.queue_id), [])
        assert result.store_timestamp_ms == self.clock.now_ms()
        if self.all:
            last = self.all[-1].result
            assert result.physical_offset >= last.physical_offset + last.size
        assert result.queue_offset == (len(queue) if stored.in_queue else 0)
        self.all.append(stored)
        if stored.in_queue:
            queue.append(stored)

    @rule(data=st.data(), queue_id=QUEUE_IDS)
    def refused(self, data: st.DataObject, queue_id: int) -> None:
        before = contents(self.files)
        message = data.draw(
            st.sampled_from(
                [
                    Message("x" * 128, b""),
                    Message("a/b", b""),
                    Message("A", bytes(3001)),
                    Message("A", bytes(2990), tags="t" * 1100),
                    Message("A", b"", keys="\ud800"),
                ]
            )
        )
        try:
            self.store.append(message, queue_id)
        except MessageIllegalError:
            assert contents(self.files) == before
        else:
            raise AssertionError("taken")

    # --- reading

    def check_message(self, found: Any, stored: Stored) -> None:
        message, result, given = stored.message, stored.result, stored.fields
        assert found.physical_offset == result.physical_offset
        assert (found.size, found.queue_offset) == (result.size, result.queue_offset)
        assert (found.topic, found.queue_id) == (stored.topic, stored.queue_id)
        assert (found.body, found.flag, found.crc_ok) == (message.body, message.flag, True)
        assert found.properties == stored.properties
        assert found.store_timestamp_ms == result.store_timestamp_ms
        assert found.born_timestamp_ms == given.get("born_timestamp_ms", result.store_timestamp_ms)
        assert found.offset_id == result.offset_id
        assert found.reconsume_times == given.get("reconsume_times", 0)
        assert found.prepared_transaction_offset == given.get("prepared_transaction_offset", 0)
        flags = given.get("sys_flag", 0) | record.host_flags(
            given.get("born_host", ("127.0.0.1", 0)), given.get("store_host", ("127.0.0.1", 0))
        )
        assert found.sys_flag == flags

    @rule(
        topic=st.one_of(TOPICS, st.just(SystemTopic.SCHEDULE)),
        queue_id=st.sampled_from([0, 1, 2, 7, 17]),
        queue_offset=st.integers(-1, 30),
        most=st.integers(1, 40),
    )
    def read(self, topic: str, queue_id: int, queue_offset: int, most: int) -> None:
        queue = self.queues.get((topic, queue_id), [])
        found = self.store.read(topic, queue_id, queue_offset, most)
        if not queue:
            assert (found.status, found.next_offset) == (GetStatus.NO_MESSAGE_IN_QUEUE, 0)
            return
        assert (found.min_offset, found.max_offset) == (0, len(queue))
        if queue_offset < 0:
            assert (found.status, found.next_offset) == (GetStatus.OFFSET_TOO_SMALL, 0)
        elif queue_offset == len(queue):
            assert (found.status, found.next_offset) == (GetStatus.OFFSET_OVERFLOW_ONE, queue_offset)
        elif queue_offset > len(queue):
            assert (found.status, found.next_offset) == (GetStatus.OFFSET_OVERFLOW_BADLY, len(queue))
        else:
            per_file = self.config.consumequeue_file_size // 20
            end = min(queue_offset + min(most, 32), len(queue), queue_offset - queue_offset % per_file + per_file)
            assert (found.status, found.next_offset) == (GetStatus.FOUND, end)
            assert len(found.messages) == end - queue_offset
            for message, stored in zip(found.messages, queue[queue_offset:end], strict=True):
                self.check_message(message, stored)
            assert found.total_size == sum(message.size for message in found.messages)

    @rule(topic=TOPICS, key=st.sampled_from([*KEYS, "U1", "U2", "none"]))
    def find_by_key(self, topic: str, key: str) -> None:
        wanted = [stored for stored in self.all if stored.topic == topic and key in stored.keys]
        found = self.store.find_by_key(topic, key, max_messages=1 << 20)
        assert [message.physical_offset for message in found] == [stored.result.physical_offset for stored in wanted]
        if wanted:
            begin = wanted[len(wanted) // 2].result.store_timestamp_ms
            later = self.store.find_by_key(topic, key, begin_ms=begin + 1000, max_messages=1 << 20)
            assert {message.physical_offset for message in later} <= {
                stored.result.physical_offset for stored in wanted if stored.result.store_timestamp_ms >= begin
            }

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def find_by_id(self, data: st.DataObject) -> None:
        stored = data.draw(st.sampled_from(self.all))
        (message,) = self.store.find_by_id(stored.result.offset_id)
        self.check_message(message, stored)
        at = self.store.message_at(stored.result.physical_offset)
        assert at == message
        unique = data.draw(st.sampled_from(["U1", "U2", "U3"]))
        found = [message.physical_offset for message in self.store.find_by_id(unique)]
        wanted = [one for one in self.all if unique in one.keys and one.properties.get("UNIQ_KEY") == unique]
        # The store knows a topic by its queues, so it may pass over one that has only prepared records.
        known = {topic for (topic, _), queue in self.queues.items() if queue}
        assert found == sorted(found)
        assert {one.result.physical_offset for one in wanted if one.topic in known} <= set(found)
        # A rollback is not indexed; it is found in the log if nothing else has the id.
        assert set(found) <= {
            one.result.physical_offset for one in self.all if one.properties.get("UNIQ_KEY") == unique
        }

    @rule(topic=TOPICS, queue_id=QUEUE_IDS, ms=st.integers(-5000, 300_000))
    def queue_offset_at(self, topic: str, queue_id: int, ms: int) -> None:
        queue = self.queues.get((topic, queue_id), [])
        times = [stored.result.store_timestamp_ms for stored in queue]
        found = self.store.queue_offset_at(topic, queue_id, START_MS + ms)
        if not queue:
            assert found == 0
            return
        # The first file whose last entry is late enough, and the nearest entry in it.
        per_file = self.config.consumequeue_file_size // 20
        files = [range(at, min(at + per_file, len(queue))) for at in range(0, len(queue), per_file)]
        file = next((file for file in files if times[file[-1]] >= START_MS + ms), files[-1])
        assert found in file
        assert abs(times[found] - START_MS - ms) == min(abs(times[at] - START_MS - ms) for at in file)

    # --- closing and dying

    @rule()
    def flush(self) -> None:
        assert self.store.flush() == self.store.log.end

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        before = derived(contents(self.files))
        assert "abort" not in contents(self.files)
        self.open()
        assert self.store.recovered == []
        assert derived(contents(self.files)) == before

    @rule(thorough=st.booleans())
    def die(self, thorough: bool) -> None:
        """The process dies: the files stay, and everything in them counts as acknowledged."""
        self.files = died(self.files)
        assert "abort" in contents(self.files)
        self.open(thorough=thorough)
        self.everything_is_there()

    @rule()
    def recover(self) -> None:
        assert self.store.recover() == []
        self.everything_is_there()

    @rule()
    def verify(self) -> None:
        verdict = self.store.verify()
        assert verdict.sound, verdict.damage

    def everything_is_there(self) -> None:
        found = list(self.store)
        assert len(found) == len(self.all)
        for message, stored in zip(found, self.all, strict=True):
            self.check_message(message, stored)
        assert {name: queue.max_offset for name, queue in self.store.queues.items() if queue.max_offset} == {
            name: len(queue) for name, queue in self.queues.items() if queue
        }

    @invariant()
    def the_log_ends_behind_its_last_record(self) -> None:
        if getattr(self, "all", None):
            last = self.all[-1].result
            assert self.store.log.end == last.physical_offset + last.size


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(100), stateful_step_count=40)
