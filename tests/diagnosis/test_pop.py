"""What POP holds: in flight, acknowledged and to be revived, from the records of 5.x's revive topics."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from librmq.cli import main
from librmq.diagnosis import StoreView, Thresholds, diagnose, pending_messages, pop_holds, report, story
from librmq.diagnosis._pop import REVIVE_GROUP, HeldMessage, PopHolds
from librmq.files._disk import DiskFiles
from librmq.files.interface import file_size
from librmq.message.message import Message
from librmq.message.properties import PropertyName
from librmq.message.record import COMPRESSED
from librmq.message.topics import group_of_retries
from librmq.store import MessageStore
from tests.budget import many, some
from tests.pop_store import REVIVE_TOPIC, PopStore, places
from tests.stores import START_MS
from tests.stores_of_5 import KINDS, add_database, keep_queues_elsewhere


def holds(store: PopStore, now_ms: int | None = None) -> PopHolds:
    """Return what POP holds by the store's files."""
    store.save()
    with StoreView.open("/store", now_ms=now_ms, files=store.store.files) as view:
        return pop_holds(view)


@pytest.fixture
def pop() -> PopStore:
    store = PopStore()
    store.send("orders", 10)
    return store


def test_a_store_without_pop_holds_nothing() -> None:
    store = PopStore()
    store.tables.topics.rows.clear()
    store.send("orders")
    assert holds(store) == PopHolds()


@pytest.mark.parametrize("old", [False, True])
def test_a_message_is_in_flight_then_overdue_then_revived(pop: PopStore, old: bool) -> None:
    pop.receive("G", "orders", [3, 4], old=old)
    for seconds in (0, 58.5, 1.5):  # in the timer topic, in the revive topic, and visible again
        pop.advance(seconds)
        pop.revive()
        assert places(holds(pop).held) == [("G", "orders", 3, 60), ("G", "orders", 4, 60)]
    pop.advance(3)
    pop.revive()
    assert holds(pop) == PopHolds()
    assert pop.store.queue_range("%RETRY%G_orders", 0) == (0, 2)


@pytest.mark.parametrize("batch", [False, True])
def test_acknowledged_messages_are_not_held(pop: PopStore, batch: bool) -> None:
    receive = pop.receive("G", "orders", [0, 2, 5])
    pop.acknowledge(receive, 0, 5, batch=batch)
    pop.receive("H", "orders", [0])
    for seconds in (0, 59, 1, 1):
        pop.advance(seconds)
        assert places(holds(pop).held) == [("G", "orders", 2, 60), ("H", "orders", 0, 60)]
    pop.acknowledge(receive, 2)  # late, but before it is revived
    assert places(holds(pop).held) == [("H", "orders", 0, 60)]


def test_a_changed_invisible_time_replaces_the_first(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0, 1])
    pop.advance(10)
    changed = pop.change(receive, 1, 300)
    assert places(holds(pop).held) == [("G", "orders", 0, 60), ("G", "orders", 1, 310)]
    pop.acknowledge(changed, 1)
    assert places(holds(pop).held) == [("G", "orders", 0, 60)]


def test_a_message_in_a_retry_topic(pop: PopStore) -> None:
    pop.receive("G", "orders", [0], invisible_s=5)
    pop.advance(10)
    pop.revive()
    pop.receive("G", "%RETRY%G_orders", [0], invisible_s=5)
    assert [(one.topic, one.original_topic, one.revived_topic) for one in holds(pop).held] == [
        ("%RETRY%G_orders", "orders", "%RETRY%G_orders")
    ]
    pop.advance(10)
    pop.revive()
    assert holds(pop) == PopHolds()


def test_an_acknowledgement_in_front_of_its_check_point_is_lost(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0])
    pop.clock.advance(ms=61_000)  # the timer is behind, so the acknowledgement overtakes
    pop.acknowledge(receive, 0)
    found = holds(pop)
    assert (places(found.held), found.lone_acknowledgements) == ([("G", "orders", 0, 60)], 1)
    pop.advance(5)
    pop.revive()
    assert pop.store.queue_range("%RETRY%G_orders", 0) == (0, 1)


def test_acknowledgements_that_the_broker_left_alone(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0, 1, 2], invisible_s=5)
    pop.acknowledge(receive, 0, 1, batch=True)
    pop.advance(10)
    pop.revive()
    found = holds(pop)
    assert (found.held, found.unusable, found.lone_acknowledgements) == ([], [], 2)


NAME: dict[str, Any] = {"t": "orders", "c": "G", "q": 0, "so": 0, "pt": START_MS}
POINT = NAME | {"it": 60_000, "n": 2, "d": [0, 1]}


@many
@pytest.mark.parametrize(
    ("tag", "body", "what"),
    [
        ("ck", b"", "JSON"),
        ("ck", b"0-17", "JSON"),
        ("ck", b"[1]", "JSON object"),
        ("ck", b"\xff", "JSON"),
        ("ck", b"[" * 100_000, "JSON"),
        ("ck", b'{"so":' + b"9" * 5_000 + b"}", "JSON"),
        ("cancel", POINT, "tag"),
        ("ck", {}, "c: expected a name, found None"),
        ("ck", POINT | {"t": "a/b"}, "t: "),
        ("ck", POINT | {"c": ["G"]}, "c: "),
        ("ck", POINT | {"c": "\ud800"}, "c: "),
        ("ck", POINT | {"c": "\x1b[2J"}, "c: "),
        ("ck", POINT | {"bn": 7}, "bn: "),
        ("ck", POINT | {"q": -1}, "q: "),
        ("ck", POINT | {"q": True}, "q: "),
        ("ck", POINT | {"so": 1 << 63}, "so: "),
        ("ck", POINT | {"so": (1 << 63) - 1}, "so and d: "),
        ("ck", POINT | {"pt": "1"}, "pt: "),
        ("ck", POINT | {"pt": (1 << 63) - 1}, "pt and it: "),
        ("ck", POINT | {"it": -5}, "it: "),
        ("ck", POINT | {"n": 33}, "n: "),
        ("ck", POINT | {"n": 3}, "d: "),
        ("ck", POINT | {"d": [1, 1]}, "d: "),
        ("ck", POINT | {"d": [0, 0.5]}, "d: "),
        ("ck", POINT | {"d": "01"}, "d: "),
        ("ck", POINT | {"bm": 4}, "bm: "),
        ("ck", POINT | {"bm": -1}, "bm: "),
        ("ack", NAME, "ao: "),
        ("ack", NAME | {"ao": -1}, "ao: "),
        ("bAck", NAME | {"ao": 1}, "aol: "),
        ("bAck", NAME | {"aol": [0, None]}, "aol: "),
    ],
)
def test_records_that_no_broker_writes_are_reported(pop: PopStore, tag: str, body: Any, what: str) -> None:
    pop.receive("G", "orders", [7])
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if len(data) > 2000:
        data = data[:2000]
    place = pop.put(tag, data, START_MS + 5_000)
    for _ in range(2):  # in the timer topic, then in the revive topic
        found = holds(pop)
        assert places(found.held) == [("G", "orders", 7, 60)]
        ((at, why),) = found.unusable
        assert at is not None
        assert at >= place
        assert what in why
        pop.advance(10)
    (finding,) = [one for one in diagnose(StoreView.over(pop.store, pop.tables)) if "pop" in one.kind]
    assert (finding.kind, finding.evidence["records"]) == ("unusable-pop-records", 1)


def test_a_body_that_cannot_be_decompressed_is_reported(pop: PopStore) -> None:
    message = Message(REVIVE_TOPIC, b"no zlib", tags="ck")
    place = pop.store.append(message, sys_flag=COMPRESSED).physical_offset
    assert [one.physical_offset for one in holds(pop).unusable] == [place]
    assert story(StoreView.over(pop.store, pop.tables), "orders0")


def test_fields_that_older_and_newer_brokers_write(pop: PopStore) -> None:
    names = {"ackOffset": 0, "startOffset": 0, "consumerGroup": "G", "topic": "orders", "queueId": 0}
    pop.put("ck", json.dumps(POINT | {"bm": 2, "later": {"x": 1}, "bn": None}).encode(), START_MS + 59_000)
    assert places(holds(pop).held) == [("G", "orders", 0, 60)]
    pop.put("ack", json.dumps(names | {"popTime": START_MS, "brokerName": ""}).encode(), START_MS + 60_000)
    assert holds(pop) == PopHolds()


def record(**fields: Any) -> bytes:
    return json.dumps(POINT | fields).encode()


ACK = json.dumps(NAME | {"ao": 0}).encode()
LATE = START_MS + 59_000


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([("ck", record(), LATE), ("ack", ACK, LATE + 1)], [(1, 60)]),
        ([("ck", record(bn="broker-a"), LATE), ("ack", ACK, LATE + 1)], [(1, 60)]),
        # Another broker's check point has the same name.
        ([("ck", record(bn="a"), LATE), ("ck", record(bn="b"), LATE), ("ack", ACK, LATE + 1)], [(0, 60), (1, 60)]),
        # The timer's progress is old: the record is in the revive topic too.
        ([("ck", record(), 0), ("ack", ACK, 0), ("ck", record(), LATE)], [(1, 60)]),
        # A timer that delivers again makes the broker forget.
        ([("ck", record(), 0), ("ack", ACK, 0), ("ck", record(), 0)], [(0, 60), (1, 60)]),
        # Put again to be revived later, in place of the first.
        ([("ck", record(), 0), ("ck", record(n=1, d=[0], it=90_000, rp="1"), 0)], [(0, 90)]),
        ([("ck", record(), 0), ("ck", record(n=1, d=[0], it=90_000, rp="1"), LATE)], [(0, 90)]),
        # Both will be revived, so the first end counts.
        ([("ck", record(it=90_000), 0), ("ck", record(pt=START_MS - 1), 0)], [(0, 59), (1, 59)]),
        ([("ck", record(pt=START_MS - 1), 0), ("ck", record(it=90_000), 0)], [(0, 59), (1, 59)]),
    ],
)
def test_what_records_mean_together(
    pop: PopStore, records: list[tuple[str, bytes, int]], expected: list[tuple[int, int]]
) -> None:
    for tag, body, deliver_ms in records:
        pop.put(tag, body, deliver_ms)
    assert [row[2:] for row in places(holds(pop).held)] == expected


def test_an_acknowledgement_of_another_message_is_reported(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0])
    pop.acknowledge(receive, 9)
    found = holds(pop)
    assert places(found.held) == [("G", "orders", 0, 60)]
    assert ["queue offset 9 is not in the check point" in one.what for one in found.unusable] == [True]


@pytest.mark.slow
def test_a_broker_agrees_at_every_step() -> None:
    """Play random receives, acknowledgements and changes beside a model that knows only their meaning."""
    for seed in some(range(12)):
        rng, store = random.Random(seed), PopStore()
        model: dict[tuple[str, str, int], tuple[int, Any]] = {}
        store.send("orders", 60)
        following = dict.fromkeys("GH", 0)
        for _ in range(40):
            group, action = rng.choice("GH"), rng.random()
            store.clock.advance(ms=1)  # a receive and a change in one millisecond have the same name
            mine = [held for held in model if held[0] == group]
            if action < 0.4 and following[group] < 55:
                offsets = sorted(rng.sample(range(following[group], following[group] + 5), rng.randint(1, 5)))
                following[group] += 5
                receive = store.receive(group, "orders", offsets, rng.choice([10, 30, 60]))
                due = receive.received_ms + receive.invisible_ms
                model |= {(group, "orders", offset): (due, receive) for offset in offsets}
            elif action < 0.6 and mine:
                held = rng.choice(mine)
                store.acknowledge(model.pop(held)[1], held[2], batch=rng.random() < 0.5)
            elif action < 0.75 and mine:
                held = rng.choice(mine)
                receive = store.change(model[held][1], held[2], rng.choice([10, 100]))
                model[held] = receive.received_ms + receive.invisible_ms, receive
            else:
                store.advance(rng.choice([0.2, 1, 7]))  # so acknowledgements come before the end
                now_ms = store.clock.now_ms()
                for held in [held for held, (due, _) in model.items() if due - now_ms < 8_500]:
                    store.acknowledge(model.pop(held)[1], held[2])
                store.revive()
            expected = sorted((*held, (due - START_MS) // 1000) for held, (due, _) in model.items())
            assert places(holds(store).held) == expected, seed
        store.advance(200)
        store.revive()
        assert pop_holds(StoreView.over(store.store, store.tables)).held == []


# ---- receives in order


def test_a_message_that_was_received_in_order(pop: PopStore) -> None:
    pop.tables.set_consumer_offset("orders", "F", 0, 3)
    pop.receive_in_order("F", "orders", [2, 3, 5, 6], done=[5], changed=f"6:{START_MS + 90_000}")
    for now_s, expected in ((0, [(3, 60), (6, 90)]), (70, [(6, 90)]), (90, [])):
        found = holds(pop, START_MS + 1000 * now_s)
        assert [row[2:] for row in places(found.held)] == expected
        assert found.unusable == []
    view = StoreView.over(pop.store, pop.tables)
    listed = [
        (one.kind, one.topic, one.target_topic, one.unique_key) for one in pending_messages(pop.store, pop.tables)
    ]
    assert listed == [("pop", "orders", "orders", "orders3"), ("pop", "orders", "orders", "orders6")]
    (end,) = [event for event in story(view, "orders3") if event.group == "F"]
    assert (end.event, "invisible until" in end.note) == ("not_passed", True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"table":', "config"),
        (b'{"table":[]}', "table"),
        (b'{"table":{"orders@F":7}}', "object for each queue"),
        (b'{"table":{"orders@F":{0:[]}}}', "object for each queue"),
        (b'{"table":{"orders@F":{0:{}}}}', "popTime"),
        (b'{"table":{"orders@F":{0:{"popTime":1,"o":[-1]}}}}', "o: "),
        (b'{"table":{"orders@F":{0:{"popTime":1,"o":[1],"cm":"x"}}}}', "cm"),
        (b'{"table":{"orders@F":{0:{"popTime":1,"o":[1],"ot":{1:-5}}}}}', "ot: "),
        (b'{"table":{"orders@F":{-1:{"popTime":1,"o":[1]}}}}', "queue id: "),
        (b'{"table":{"orders":{0:{"popTime":1,"o":[1]}}}}', "topic: "),
    ],
)
def test_rows_of_receives_in_order_that_no_broker_writes(pop: PopStore, text: bytes, what: str) -> None:
    pop.store.files.make_folder("/store/config")
    pop.store.files.write("/store/config/consumerOrderInfo.json", text)
    ((place, why),) = holds(pop).unusable
    assert (place, what in why) == (None, True), why


# ---- commands


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a closed store: message 0 acknowledged, 1 in flight, 2 revived, 3 overdue."""
    store = PopStore(str(tmp_path / "store"), DiskFiles())
    sent = store.send("orders", 4)
    assert sent[0].queue_offset == 0
    store.receive("G", "orders", [2], invisible_s=5)
    store.advance(20)
    store.revive()
    store.receive("G", "orders", [3], invisible_s=5)
    receive = store.receive("G", "orders", [0, 1], invisible_s=3600)
    store.acknowledge(receive, 0)
    store.advance(100)
    store.send("orders")
    store.close()
    return tmp_path / "store"


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_pending_lists_what_pop_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "pending", folder)
    assert [(row["kind"], row["topic"], row["target_topic"], row["due_ms"], row["unique_key"]) for row in found] == [
        ("pop", "orders", "%RETRY%G_orders", START_MS + 25_000, "orders3"),
        ("pop", "orders", "%RETRY%G_orders", START_MS + 3_620_000, "orders1"),
    ]
    assert found == rows(capsys, "pending", folder, "--kind", "pop")
    assert rows(capsys, "pending", folder, "--kind", "timer") == []
    with MessageStore.open(folder, read_only=True) as store:
        for row in found:
            message = store.message_at(row["physical_offset"])
            assert message is not None
            assert message.unique_key == row["unique_key"]


def test_lag_and_groups_count_it_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_queue = {(row["topic"], row["lag"], row["in_flight"]) for row in rows(capsys, "lag", folder, "--group", "G")}
    assert of_queue == {("orders", 1, 2), ("%RETRY%G_orders", 1, 0)}
    of_topic = [
        (row["topic"], row["in_flight"]) for row in rows(capsys, "lag", folder, "--by", "topic", "--group", "G")
    ]
    assert of_topic == [("%RETRY%G_orders", 0), ("orders", 2)]
    found = rows(capsys, "groups", folder)
    assert [(row["group"], row["topics"], row["in_flight"]) for row in found] == [
        ("G", ["%RETRY%G_orders", "orders"], 2)
    ]


def test_the_story_of_each_message(folder: Path) -> None:
    events = {
        name: [(event.event, event.group, event.at_ms) for event in story(folder, name)]
        for name in ("orders0", "orders1", "orders2", "orders3")
    }
    at_ms = START_MS + 20_000
    assert events["orders0"] == [("stored", None, START_MS), ("delivered", "G", at_ms), ("passed", "G", at_ms)]
    assert events["orders1"] == [("stored", None, START_MS), ("delivered", "G", at_ms), ("not_passed", "G", None)]
    assert [event[:2] for event in events["orders2"]] == [
        ("stored", None), ("delivered", "G"), ("retried", "G"), ("passed", "G"), ("not_passed", "G"),
    ]  # fmt: skip
    assert events["orders3"][1:] == [("delivered", "G", at_ms), ("not_passed", "G", None)]
    notes = [story(folder, name)[-1].note for name in ("orders1", "orders3")]
    assert ["invisible until" in notes[0], "was to be delivered again" in notes[1]] == [True, True]


def test_the_story_of_a_changed_invisible_time(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0])
    pop.advance(10)
    changed = pop.change(receive, 0, 100)
    view = StoreView.over(pop.store, pop.tables)
    events = story(view, "orders0")
    assert [event.event for event in events] == ["stored", "delivered", "delivered", "not_passed"]
    assert [event.note.partition(",")[0] for event in events[1:3]] == [
        "received by POP",
        "its invisible time was changed",
    ]
    pop.acknowledge(changed, 0)
    events = story(StoreView.over(pop.store, pop.tables), "orders0")
    assert [event.event for event in events] == ["stored", "delivered", "delivered", "passed"]
    assert events[-1].at_ms == START_MS + 10_000


def test_the_story_of_a_message_that_is_revived_after_a_change(pop: PopStore) -> None:
    receive = pop.receive("G", "orders", [0])
    pop.advance(1)
    changed = pop.change(receive, 0, 10)
    pop.put("ck", record(it=20_000, n=1, d=[0], rp="1", pt=changed.received_ms), START_MS + 19_000)
    pop.advance(30)
    pop.revive()
    events = story(StoreView.over(pop.store, pop.tables), "orders0")
    names = ["stored", "delivered", "delivered", "retried", "passed", "not_passed"]
    assert [event.event for event in events] == names
    assert [event.note for event in events if event.event == "passed"] == [
        "it failed, and came again as a retry; its progress is 1"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_queues_in_a_database(folder: Path, kind: str) -> None:
    before, events = pop_holds(folder), story(folder, "orders3")
    keep_queues_elsewhere(folder, kind)
    assert (pop_holds(folder), story(folder, "orders3")) == (before, events)
    assert len(before.held) == 2


def test_a_store_with_its_progress_in_a_database(folder: Path) -> None:
    """What the broker has revived is unknown, so only messages in flight are held."""
    (folder / "config" / "topics.json").unlink()
    add_database(folder / "config" / "consumerOffsets")
    assert places(pop_holds(folder).held) == [("G", "orders", 1, 3620)]


def test_a_store_without_a_table_of_topics(pop: PopStore) -> None:
    """The revive topic, which has no record before a receive ends, is known by those that wait in the timer."""
    pop.receive("G", "orders", [0])
    pop.save()
    for name in ("topics.json", "topics.json.bak"):
        if file_size(pop.store.files, f"/store/config/{name}") is not None:
            pop.store.files.delete(f"/store/config/{name}")
    with StoreView.open("/store", files=pop.store.files) as view:
        assert places(pop_holds(view).held) == [("G", "orders", 0, 60)]


def test_findings_and_report(folder: Path) -> None:
    (finding,) = [one for one in diagnose(folder, Thresholds(stuck_s=60)) if one.kind == "not-revived"]
    assert (finding.severity, finding.subject) == ("warning", "group G, topic orders")
    assert (finding.evidence["messages"], finding.evidence["queue_offset"]) == (1, 3)
    assert [(row.kind, row.topic, row.group, row.messages) for row in report(folder).stores[0].waiting] == [
        ("pop", "orders", "G", 2)
    ]
    (folder / "kvStore").mkdir()
    (folder / "kvStore" / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    assert "unseen-pop-records" in [one.kind for one in diagnose(folder)]


def test_notes_on_records_that_do_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MessageStore.open(folder) as store:
        store.append(Message(REVIVE_TOPIC, b"rubbish", tags="ck"))
        store.append(Message(REVIVE_TOPIC, json.dumps(NAME | {"ao": 1}).encode(), tags="ack"))
    for command in (["pending"], ["lag"], ["groups"]):
        assert main([*command, str(folder)]) == 0
        errors = capsys.readouterr().err
        assert ["1 record of POP" in errors, "1 acknowledgement of POP" in errors] == [True, True], errors


def test_an_earlier_moment(pop: PopStore, tmp_path: Path) -> None:
    receive = pop.receive("G", "orders", [0, 1])
    pop.advance(10)
    pop.send("later")
    pop.acknowledge(receive, 0)
    pop.advance(60)
    pop.revive()
    pop.save()
    for seconds, expected in ((9, [0, 1]), (15, [1]), (65, [])):
        at = datetime.fromtimestamp(START_MS / 1000 + seconds, UTC)
        with MessageStore.open("/store", files=pop.store.files, read_only=True, at=at) as past:
            found = pop_holds(StoreView.over(past))
            assert [one.queue_offset for one in found.held] == expected, seconds
            assert len(list(pending_messages(past, kind="pop"))) == len(expected)


@pytest.mark.parametrize(
    ("topic", "original", "revived"),
    [
        ("orders", "orders", "%RETRY%G_orders"),
        ("%RETRY%G_orders", "orders", "%RETRY%G_orders"),
        ("%RETRY%G+orders", "orders", "%RETRY%G+orders"),
        ("%RETRY%G", "%RETRY%G", "%RETRY%G"),
        ("%RETRY%H_orders", "%RETRY%H_orders", "%RETRY%H_orders"),
    ],
)
def test_the_topics_of_a_held_message(topic: str, original: str, revived: str) -> None:
    held = HeldMessage("G", topic, 0, 0, 0, 0, 0)
    assert (held.original_topic, held.revived_topic) == (original, revived)


@pytest.mark.parametrize(
    ("topic", "group"),
    [
        ("%RETRY%G", "G"),
        ("%RETRY%G_orders", "G"),
        ("%RETRY%G+orders", "G"),
        ("%RETRY%a_b+c_d", "a_b"),
        ("%RETRY%a_b_orders", "a_b"),
        ("%RETRY%a_orders", "a_orders"),
        ("%RETRY%G_none", "G_none"),
        ("%RETRY%", ""),
    ],
)
def test_the_group_of_a_retry_topic(topic: str, group: str) -> None:
    assert group_of_retries(topic, {"G", "a_b", "a", "a_orders"}, {"orders"}) == group


def test_revive_progress_is_the_last_that_is_done(pop: PopStore) -> None:
    pop.receive("G", "orders", [0], invisible_s=2)
    pop.receive("H", "orders", [0], invisible_s=2)
    pop.advance(4)
    assert len(holds(pop).held) == 2
    for done, count in ((0, 1), (1, 0), (99, 0)):
        pop.tables.set_consumer_offset(REVIVE_TOPIC, REVIVE_GROUP, 0, done)
        assert len(holds(pop).held) == count
    assert PropertyName.TIMER_DELIVER_MS in next(pop.store.messages(REVIVE_TOPIC)).properties
