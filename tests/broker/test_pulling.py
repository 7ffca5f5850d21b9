"""Pulls: their results, held pulls, refusals, and what a broker remembers about them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.errors import BrokerError, ConfigError, CorruptionError, DiskFullError, MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.java import json as java_json
from librmq.message.message import MessageQueue, StoredMessage
from librmq.protocol import (
    ChannelClosed,
    CheckSubscription,
    ConsumerIds,
    ConsumersChanged,
    MaxOffset,
    MessageModel,
    MinOffset,
    PullMessage,
    PullResponse,
    PullStatus,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    ResetGroup,
    ResetOffsets,
    ResponseCode,
    Subscription,
    Unregister,
    UpdateOffset,
    ViewMessage,
)
from librmq.runtime import ManualRunner
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.testing import Kit
from tests.broker.parties import beat, manual, opened, pull, send
from tests.reference import document, existing


class Bell:
    """Records the times of its calls."""

    def __init__(self, runner: ManualRunner) -> None:
        self.runner = runner
        self.rung_ms: list[int] = []

    def __call__(self) -> None:
        self.rung_ms.append(self.runner.now_ms())


def refusal(action: Any, *args: Any, **fields: Any) -> int:
    with pytest.raises(BrokerError) as caught:
        action(*args, **fields)
    return caught.value.code


def test_a_pull_gives_messages_and_where_to_continue(broker: Broker) -> None:
    for at in range(40):
        send(broker, "T", b"%d" % at)
    first = pull(broker, "T")
    assert (first.status, first.next_offset, first.min_offset, first.max_offset) == (PullStatus.FOUND, 32, 0, 40)
    rest = pull(broker, "T", first.next_offset, max_messages=5)
    assert [message.body for message in (*first.messages, *rest.messages)] == [b"%d" % at for at in range(37)]


def test_statuses_of_pulls(broker: Broker) -> None:
    broker.create_topic("T", 2)
    assert pull(broker, "T").status is PullStatus.NO_NEW_MESSAGE
    assert pull(broker, "T", 3).status is PullStatus.OFFSET_ILLEGAL
    send(broker, "T", tags="a")
    assert pull(broker, "T", 1).status is PullStatus.NO_NEW_MESSAGE
    too_far = pull(broker, "T", 2)
    assert (too_far.status, too_far.next_offset) == (PullStatus.OFFSET_ILLEGAL, 1)
    other = pull(broker, "T", subscription=Subscription("T", "b"))
    assert (other.status, other.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 1)


def test_a_moved_offset_is_written_down(broker: Broker) -> None:
    send(broker, "T")
    pull(broker, "T", 9)
    (event,) = broker.messages("OFFSET_MOVED_EVENT")
    assert event.properties_raw == b"KEYS\1g\2DELAY\x010\2TAGS\1g"
    assert json.loads(event.body) == {
        "consumerGroup": "g",
        "messageQueue": {"brokerName": "broker-a", "queueId": 0, "topic": "T"},
        "offsetNew": 1,
        "offsetRequest": 9,
    }


def test_a_full_disk_does_not_hide_where_to_continue(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk, retention deletes old messages, so slow consumers ask for deleted ones."""
    send(broker, "T")

    def refuse(*arguments: Any, **fields: Any) -> Any:
        raise DiskFullError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(MessageStore, "append", refuse)
        moved = pull(broker, "T", 9)
    assert (moved.status, moved.next_offset) == (PullStatus.OFFSET_ILLEGAL, 1)
    assert "could not be stored: the disk is full" in caplog.text


def test_pulls_that_are_refused() -> None:
    with opened() as broker:
        assert refusal(pull, broker, "T") == ResponseCode.TOPIC_NOT_EXIST
        broker.create_topic("T", 2, write_queues=4)
        send(broker, "T", queue_id=3)
        assert refusal(pull, broker, "T", queue_id=2) == ResponseCode.SYSTEM_ERROR
        assert refusal(pull, broker, "T", queue_id=-1) == ResponseCode.SYSTEM_ERROR
        assert refusal(pull, broker, "T", subscription=None) == ResponseCode.SUBSCRIPTION_NOT_EXIST
        beat(broker, Subscription("U"))
        assert refusal(pull, broker, "T", subscription=None) == ResponseCode.SUBSCRIPTION_NOT_EXIST
        wrong = (Subscription("T", "||"), Subscription("T", "a >", "SQL92"), Subscription("T", "a", "REGEX"))
        for subscription in wrong:
            code = refusal(pull, broker, "T", subscription=subscription)
            assert code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
        broker.create_topic("T", 2, permission=2)
        assert refusal(pull, broker, "T") == ResponseCode.NO_PERMISSION
    with opened(auto_create_group=False) as broker:
        assert refusal(pull, broker, "T") == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.mark.rmq(store_config=StoreConfig.tiny(enable_property_filter=False))
def test_sql_can_be_switched_off(broker: Broker) -> None:
    send(broker, "T")
    sql = Subscription("T", "a > 1", "SQL92")
    assert refusal(pull, broker, "T", subscription=sql) == ResponseCode.SYSTEM_ERROR
    beat(broker, sql)
    assert refusal(pull, broker, "T", subscription=None) == ResponseCode.SYSTEM_ERROR


def test_groups_that_may_not() -> None:
    files = MemoryFiles()
    files.make_folder("/b")
    files.make_folder("/b/config")
    rows = {"g": {"groupName": "g", "consumeEnable": False}, "h": {"groupName": "h", "consumeBroadcastEnable": False}}
    files.write("/b/config/subscriptionGroup.json", java_json.dumps({"subscriptionGroupTable": rows}).encode())
    with opened(files) as broker:
        send(broker, "T")
        assert refusal(pull, broker, "T") == ResponseCode.NO_PERMISSION
        beat(broker, Subscription("T"), group="h", model=MessageModel.BROADCASTING)
        assert refusal(broker.call, PullMessage("c1", "h", "T", 0, 0)) == ResponseCode.NO_PERMISSION
        broker.call(Unregister("c1", consumer_group="h"))
        beat(broker, Subscription("T"), group="h")
        assert broker.call(PullMessage("c1", "h", "T", 0, 0)).status is PullStatus.FOUND, "no broadcast"


def test_a_held_pull_is_woken_by_a_message_of_its_queue(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("T", 2)
    bell = Bell(rmq.runner)
    assert pull(broker, "T", notify=bell).status is PullStatus.HELD
    send(broker, "T", queue_id=1)
    assert bell.rung_ms == []
    send(broker, "T")
    send(broker, "T")
    assert bell.rung_ms == [rmq.clock.now_ms()]


# ---- held pulls


@pytest.mark.parametrize(
    ("subscription", "fields"),
    [
        (Subscription("T", "a || b"), {"tags": "b"}),
        (Subscription("T", "AaAa"), {"tags": "BBBB"}),  # has the same hash; consumers compare the tags themselves
        (Subscription("T", "u = 'v'", "SQL92"), {"properties": {"u": "v"}}),
        (Subscription("T", ""), {}),
    ],
)
def test_a_held_pull_is_woken_by_a_matching_message(
    rmq: Kit, broker: Broker, subscription: Subscription, fields: dict[str, Any]
) -> None:
    bell = Bell(rmq.runner)
    broker.create_topic("T")
    pull(broker, "T", notify=bell, subscription=subscription)
    if subscription.expression:
        send(broker, "T", tags="c", properties={"u": "w"})
    assert bell.rung_ms == []
    send(broker, "T", **fields)
    assert len(bell.rung_ms) == 1


def test_a_held_pull_ends_at_the_next_sweep_only_if_others_came(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("T", 2)
    passed, quiet = Bell(rmq.runner), Bell(rmq.runner)
    begin_ms = rmq.clock.now_ms()
    pull(broker, "T", notify=passed, subscription=Subscription("T", "a"))
    pull(broker, "T", queue_id=1, notify=quiet, subscription=Subscription("T", "a"))
    rmq.advance(ms=4_000)
    send(broker, "T", tags="b")
    send(broker, "T", tags="b")
    rmq.advance(ms=3_600_000)
    assert (passed.rung_ms, quiet.rung_ms) == ([begin_ms + 5_000], [])
    assert pull(broker, "T", notify=passed, subscription=Subscription("T", "a")).next_offset == 2


def test_a_later_pull_replaces_an_earlier_one(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("T")
    first, second, other = (Bell(rmq.runner) for _ in range(3))
    pull(broker, "T", notify=first)
    pull(broker, "T", notify=second)
    broker.call(Unregister("c1", consumer_group="h"))
    broker.call(ChannelClosed("c2"))
    send(broker, "T")
    assert (len(first.rung_ms), len(second.rung_ms)) == (0, 1)
    pull(broker, "T", 1, notify=other)
    broker.call(Unregister("c1", consumer_group="g"))
    send(broker, "T")
    assert other.rung_ms == []


def test_a_delivered_message_and_a_dead_letter_wake_too(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("T")
    bell = Bell(rmq.runner)
    pull(broker, "T", notify=bell)
    sent_ms = rmq.clock.now_ms()
    send(broker, "T", delay_level=2)
    rmq.advance(ms=60_000)
    assert bell.rung_ms == [sent_ms + 5_000]


def test_a_pull_that_is_answered_immediately_is_not_held(rmq: Kit, broker: Broker) -> None:
    bell = Bell(rmq.runner)
    send(broker, "T")
    assert pull(broker, "T", 9, notify=bell).status is PullStatus.OFFSET_ILLEGAL
    assert pull(broker, "T", notify=bell).status is PullStatus.FOUND
    assert not pull(broker, "T", stay=True).is_held  # its client gave no call for the next message
    send(broker, "T")
    assert bell.rung_ms == []


def bodies(response: PullResponse) -> list[bytes]:
    return [message.body for message in response.messages]


def test_a_held_pull_continues_after_the_messages_it_found(rmq: Kit, broker: Broker) -> None:
    bell = Bell(rmq.runner)
    for number in range(40):
        send(broker, "T", b"%d" % number)
    first = pull(broker, "T", notify=bell, stay=True)
    assert (len(first.messages), first.is_held) == (32, False)  # more messages follow
    send(broker, "T", b"40")
    assert bell.rung_ms == []
    second = pull(broker, "T", 32, notify=bell, stay=True)
    assert (len(second.messages), second.is_held, second.next_offset) == (9, True, 41)
    send(broker, "T", b"41")
    send(broker, "T", b"42")
    assert len(bell.rung_ms) == 1
    third = pull(broker, "T", 41, notify=bell, stay=True)
    assert (bodies(third), third.is_held) == ([b"41", b"42"], True)


def test_a_message_that_ends_a_hold_is_given_as_any_other(rmq: Kit, broker: Broker) -> None:
    bell = Bell(rmq.runner)
    send(broker, "T", b"0")
    at = pull(broker, "T", notify=bell, stay=True).next_offset
    for number in range(1, 6):
        send(broker, "T", b"%d" % number)
        response = pull(broker, "T", at, notify=bell, stay=True)
        assert (response.status, response.is_held) == (PullStatus.FOUND, True)
        assert (response.next_offset, response.min_offset, response.max_offset) == (at + 1, 0, at + 1)
        assert list(response.messages) == list(broker.store.messages("T", 0, at))
        at = response.next_offset
    assert len(bell.rung_ms) == 5
    send(broker, "T", b"6")
    assert bodies(pull(broker, "T", 2, notify=bell, stay=True)) == [b"2", b"3", b"4", b"5", b"6"]


def test_the_next_pull_filters_the_message_that_ended_a_hold(rmq: Kit, broker: Broker) -> None:
    bell = Bell(rmq.runner)
    send(broker, "T", tags="a")
    held = pull(broker, "T", notify=bell, stay=True, subscription=Subscription("T", "a"))
    assert held.is_held
    send(broker, "T", tags="a")
    assert len(bell.rung_ms) == 1
    other = pull(broker, "T", 1, notify=bell, stay=True, subscription=Subscription("T", "b"))
    assert (other.status, other.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 2)


def test_a_message_that_is_handed_over_stores_the_progress(rmq: Kit, broker: Broker) -> None:
    given, bell = list[bytes](), Bell(rmq.runner)

    def take(raw: bytes, begin: int, end: int) -> int:
        given.append(StoredMessage(raw).body)
        return end

    send(broker, "T", b"0")
    pull(broker, "T", notify=bell, stay=True, take=take)
    send(broker, "T", b"1")
    assert (given, bell.rung_ms) == ([b"1"], [])
    assert broker.call(QueryOffset("g", "T", 0)) == 2


def test_a_client_that_is_forgotten_leaves_nothing(rmq: Kit, broker: Broker) -> None:
    bell = Bell(rmq.runner)
    beat(broker, Subscription("T"))
    send(broker, "T")
    assert pull(broker, "T", notify=bell, stay=True).is_held
    send(broker, "T")
    assert pull(broker, "T", 1, notify=bell, stay=True).is_held
    broker.remove_client("c1")
    assert len(bell.rung_ms) == 2  # a forgotten client may still be alive, and then asks again
    send(broker, "T")
    assert len(bell.rung_ms) == 2


# ---- groups whose instances differ


def test_the_newer_subscription_counts_and_unnamed_topics_go(broker: Broker) -> None:
    for topic in ("A", "B"):
        send(broker, topic, tags="new")
    one = beat(broker, Subscription("A", "old", version=1), Subscription("B", "*", version=1))
    assert pull(broker, "A", subscription=None).status is PullStatus.NO_MATCHED_MESSAGE
    beat(broker, Subscription("A", "new", version=2), client_id="c2")
    assert pull(broker, "A", subscription=None).status is PullStatus.FOUND
    assert refusal(pull, broker, "B", subscription=None) == ResponseCode.SUBSCRIPTION_NOT_EXIST
    beat(broker, Subscription("A", "old", version=1), Subscription("B", "*", version=1), client=one)
    assert pull(broker, "A", subscription=None).status is PullStatus.FOUND
    assert pull(broker, "B", subscription=None).status is PullStatus.FOUND
    assert one.heard == [ConsumersChanged("g")] * 3
    ids: tuple[str, ...] = broker.call(ConsumerIds("g"))
    assert set(ids) == {"c1", "c2"}


def test_a_heartbeat_makes_group_and_retry_topic(broker: Broker) -> None:
    beat(broker, Subscription("T"))
    assert broker.groups()["g"] == 16
    assert broker.topics()["%RETRY%g"].read_queues == 1
    assert [client.client_id for client in broker.clients()] == ["c1"]
    broker.remove_client("c1")
    assert broker.clients() == ()


def test_sql_filters_are_registered_kept_and_die() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    config = StoreConfig.tiny(enable_consumequeue_ext=True)
    sql = Subscription("T", "a > 5", "SQL92", 7)
    with opened(files, runner, store=config) as broker:
        beat(broker, sql)
        for value in ("4", "6"):
            send(broker, "T", value.encode(), properties={"a": value})
        response = pull(broker, "T", subscription=None)
        assert [message.body for message in response.messages] == [b"6"]
        beat(broker, Subscription("U"))
        assert [one.dead for one in broker.store.filters or ()] == [True]
        beat(broker, sql)
        runner.advance(10_000)
        saved = java_json.loads(files.read("/b/config/consumerFilter.json"))
        row = saved["filterDataByTopic"]["T"]["groupFilterData"]["g"]
        assert (row["expression"], row["dead"], row["clientVersion"]) == ("a > 5", False, 7)
        broker.call(Unregister("c1", consumer_group="g"))
    saved = java_json.loads(files.read("/b/config/consumerFilter.json"))
    row = saved["filterDataByTopic"]["T"]["groupFilterData"]["g"]
    assert (row["dead"], row["deadTime"]) == (True, runner.now_ms())
    with opened(files, runner, store=config) as broker:
        beat(broker, Subscription("T", "a >", "SQL92", 8))
        assert refusal(pull, broker, "T", subscription=None) == ResponseCode.FILTER_DATA_NOT_EXIST
        beat(broker, Subscription("T", "a < 5", "SQL92", 9))
        assert [message.body for message in pull(broker, "T", subscription=None).messages] == [b"4"]


def test_bloom_settings_make_the_bits_of_4_9() -> None:
    cases = document(existing("bloom.json"))["filters"]
    tried = [case for case in cases if isinstance(case["f"], int) and case["n"] <= 8192]
    assert (20, 32) in [(case["f"], case["n"]) for case in tried]
    store = StoreConfig.tiny(enable_consumequeue_ext=True, consumequeue_ext_file_size=64 << 10)
    for case in tried:
        files, runner = MemoryFiles(), ManualRunner()
        settings = {"expected_consumers": case["n"], "bloom_error": case["f"]}
        with opened(files, runner, store=store, **settings) as broker:
            beat(broker, Subscription("T", "a > 5", "SQL92", 7))
            for value in ("4", "6"):
                send(broker, "T", properties={"a": value})
            assert len(pull(broker, "T", subscription=None).messages) == 1
            assert broker.store.filters is not None
            bloom = broker.store.filters.bloom
            assert (bloom.hash_count, bloom.bit_count) == (case["k"], case["m"])
            assert all(list(bloom.positions(row["str"])) == row["bits"] for row in case["positions"])
        saved = java_json.loads(files.read("/b/config/consumerFilter.json"))
        data = saved["filterDataByTopic"]["T"]["groupFilterData"]["g"]["bloomFilterData"]
        assert (len(data["bitPos"]), data["bitNum"]) == (case["k"], case["m"])
        read = BrokerTables.open("/b/config", files=files).registrations(runner.now_ms())  # as a diagnosis reads it
        assert [entry.expression for entry in read] == ["a > 5"]
        assert (read.bloom.hash_count, read.bloom.bit_count) == (case["k"], case["m"])
        with opened(files, runner, store=store) as broker:  # with the defaults: other bits, and the same messages
            beat(broker, Subscription("T", "a > 5", "SQL92", 8))
            assert len(pull(broker, "T", subscription=None).messages) == 1


def test_bitmaps_that_fit_into_no_file_are_refused() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    store = StoreConfig.tiny(enable_consumequeue_ext=True)
    with pytest.raises(ConfigError, match="bitmaps of 26800 bits do not fit into extension files of 1024 bytes: lower"):
        opened(files, runner, expected_consumers=8000, store=store)
    for settings in ({"expected_consumers": 0}, {"bloom_error": 0}, {"bloom_error": 100}, {"bloom_error": 2.5}):
        with pytest.raises(ConfigError, match=r"expected_consumers|bloom_error"):
            BrokerConfig(**settings)


# ---- progress


def test_progress_is_saved_five_seconds_after_it_changed() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = opened(files, runner)
    for _ in range(4):
        send(broker, "T", queue_id=1)
    broker.call(UpdateOffset("g", "T", 1, 4))
    runner.advance(4_999)
    assert file_size(files, "/b/config/consumerOffset.json") is None
    runner.advance(1)
    text = files.read("/b/config/consumerOffset.json")
    assert text == b'{\n\t"offsetTable":{\n\t\t"T@g":{1:4\n\t\t}\n\t}\n}'
    broker.call(UpdateOffset("g", "T", 1, 9))
    broker.abandon()
    with opened(files, runner) as again:
        assert (again.consumer_offset("g", "T", 1), again.consumer_offset("g", "T")) == (4, None)
        assert refusal(again.call, UpdateOffset("g", "T", 1, -1)) == ResponseCode.SYSTEM_ERROR


def test_progress_that_was_never_stored() -> None:
    with opened(store=StoreConfig.tiny(memory_ratio=0)) as broker:
        assert broker.call(QueryOffset("g", "T", 0)) == 0
        send(broker, "T")
        assert broker.call(QueryOffset("g", "T", 0)) is None  # counts as being on disk
    with opened() as broker:
        for _ in range(400):
            send(broker, "T", bytes(600))
        assert broker.call(QueryOffset("g", "T", 0)) == 0
        broker.store.flush()
        broker.store.writer.retention.delete_before(broker.store.log.end // 2)
        begin = broker.call(MinOffset("T", 0))
        assert begin > 0
        assert broker.call(QueryOffset("g", "T", 0)) is None
        assert (broker.call(MaxOffset("T", 0)), broker.call(MaxOffset("T", 1))) == (400, 0)
        too_small = pull(broker, "T", 0)
        assert (too_small.status, too_small.next_offset) == (PullStatus.OFFSET_ILLEGAL, begin)


def test_a_running_group_is_reset(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("T", 2)
    times = []
    for _ in range(4):
        send(broker, "T")
        times.append(rmq.clock.now_ms())
        rmq.advance(ms=1_000)
    assert refusal(broker.call, ResetGroup("g", "T", -1)) == ResponseCode.SYSTEM_ERROR  # no progress yet
    for queue_id in (0, 1):
        broker.call(UpdateOffset("g", "T", queue_id, 0))
    assert refusal(broker.call, ResetGroup("g", "T", -1)) == ResponseCode.CONSUMER_NOT_ONLINE
    client = beat(broker, Subscription("T"))
    broker.call(UpdateOffset("g", "T", 0, 2))
    assert refusal(broker.call, ResetGroup("g", "U", -1)) == ResponseCode.SYSTEM_ERROR
    queues = [MessageQueue("T", "broker-a", at) for at in (0, 1)]
    for timestamp_ms, force, expected in (
        (-1, True, 4),
        (times[1], True, 1),
        (times[3], True, 3),
        (times[3] + 999_999, True, 3),
        (times[3], False, 2),
        (times[1], False, 1),
    ):
        offsets = broker.call(ResetGroup("g", "T", timestamp_ms, force))
        assert offsets == {queues[0]: expected, queues[1]: 0}
        assert client.heard[-1] == ResetOffsets("g", "T", offsets)
    assert broker.consumer_offset("g", "T") == 2  # clients store it
    assert broker.call(QueueOffsetAt("T", 0, times[2])) == 2


# ---- topics, files, route


def test_topics_are_made_changed_and_forgotten() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    told: list[int] = []
    broker = opened(files, runner)
    end = broker.watch(lambda: told.append(1))
    broker.create_topic("T", 2, write_queues=3, permission=4)
    broker.create_topic("T", 4)
    assert len(told) == 2
    end()
    broker.create_topic("U")
    broker.delete_topic("U")
    assert len(told) == 2
    assert refusal(broker.delete_topic, "U") == ResponseCode.TOPIC_NOT_EXIST
    for wrong in ({"queues": -1}, {"queues": 1 << 20}, {"permission": 8}):
        assert refusal(broker.create_topic, "V", **wrong) == ResponseCode.SYSTEM_ERROR
    with pytest.raises(MessageIllegalError):
        broker.delete_topic("TBW102")
    with pytest.raises(MessageIllegalError):
        broker.set_group("no group")
    broker.abandon()  # topics are saved immediately
    with opened(files, runner) as again:
        (data,) = again.topic_route("T")
        assert (data.read_queues, data.write_queues, data.permission) == (4, 4, 6)
        assert again.topic_route("U") == again.topic_route("V") == ()
        version = java_json.loads(files.read("/b/config/topics.json"))["dataVersion"]
        assert version == {"counter": 4, "timestamp": runner.now_ms()}


def test_queries(broker: Broker) -> None:
    sent = send(broker, "T", b"x", keys=["k", "l"], unique_key="U1")
    send(broker, "T", b"y", keys=["l"])
    found = broker.call(ViewMessage(sent.physical_offset))
    assert found is not None
    assert found.body == b"x"
    assert broker.call(ViewMessage(1)) is None
    assert broker.call(ViewMessage(1 << 30)) is None
    for key, bodies in (("k", [b"x"]), ("l", [b"x", b"y"]), ("U1", [b"x"]), ("z", [])):
        assert [message.body for message in broker.call(QueryMessages("T", key))] == bodies


@pytest.mark.parametrize(
    "row", [{"perm": "x"}, {"readQueueNums": 1 << 40}, {"writeQueueNums": 1.5}, {"topicSysFlag": True}]
)
def test_a_damaged_configuration_is_reported(row: dict[str, object]) -> None:
    files = MemoryFiles()
    files.make_folder("/b")
    files.make_folder("/b/config")
    files.write("/b/config/topics.json", java_json.dumps({"topicConfigTable": {"T": row}}).encode())
    with pytest.raises(CorruptionError, match=r"topics\.json"):
        opened(files)


def test_a_pull_of_fewer_than_none_is_an_error(broker: Broker) -> None:
    send(broker, "T")
    assert refusal(pull, broker, "T", max_messages=-1) == ResponseCode.SYSTEM_ERROR


def test_a_subscription_is_checked_before_a_start() -> None:
    by_tag, by_sql = Subscription("T", "a || b"), Subscription("T", "a = 1", "SQL92")
    with opened(store=StoreConfig.tiny(enable_property_filter=False)) as broker:
        broker.call(CheckSubscription("c1", "g", by_tag))
        assert refusal(broker.call, CheckSubscription("c1", "g", by_sql)) == ResponseCode.SYSTEM_ERROR
    with opened() as broker:
        broker.call(CheckSubscription("c1", "g", by_sql))
        broken = CheckSubscription("c1", "g", Subscription("T", "a =", "SQL92"))
        assert refusal(broker.call, broken) == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_a_pull_of_a_lost_member_sets_no_progress_back() -> None:
    """A client of 4.9 pulls on with its own progress until it learns that another member has its queue."""
    broker = opened()
    for _ in range(9):
        send(broker, "T")
    beat(broker, Subscription("T"))
    pull(broker, "T", 3, commit_offset=3)
    assert broker.consumer_offset("g", "T") == 3
    manual(broker).advance(121_000)  # c1 has sent no heartbeat for longer than a member may
    beat(broker, Subscription("T"), client_id="c2")
    broker.call(PullMessage("c2", "g", "T", 0, 7, subscription=Subscription("T"), commit_offset=7))
    pull(broker, "T", 5, commit_offset=5)  # c1 again
    assert broker.consumer_offset("g", "T") == 7
    broker.call(UpdateOffset("g", "T", 0, 2))  # on purpose, as after a seek
    assert broker.consumer_offset("g", "T") == 2
    pull(broker, "T", 4, commit_offset=4)
    assert broker.consumer_offset("g", "T") == 4
