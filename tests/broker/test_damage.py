"""What consumers and a broker's own parts do at one flipped bit of a closed or a killed store, on disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from librmq import (
    Message,
    MessageQueue,
    MessageStore,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
    StoreConfig,
    TransactionProducer,
    TransactionState,
)
from librmq.broker import Broker
from librmq.cli import main
from librmq.errors import BodyChecksumError, BrokerDamageError, CorruptionError
from librmq.message import StoredMessage, dead_letter_topic, record, retry_topic
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.protocol import ConsumeFrom, MessageModel, QueryOffset
from librmq.runtime import ManualRunner
from librmq.store import verify
from librmq.store.engine import saved_state
from tests.budget import many, some

COUNT = 9
BODIES = [b"coat %d" % number for number in range(COUNT)]


class Shop:
    """A broker on disk with a manual clock; damage is done while it is closed, or was killed."""

    def __init__(self, folder: Path, *, is_killed: bool) -> None:
        self.folder, self.is_killed, self.runner = folder, is_killed, ManualRunner()
        self.broker = self.open()
        self.broker.create_topic("orders", 1)

    def open(self) -> Broker:
        self.broker = Broker.open(self.folder, runner=self.runner)
        return self.broker

    def close(self) -> None:
        if self.is_killed:
            self.broker.store.flush()
            self.broker.abandon()
        else:
            self.broker.close()

    def send(self, bodies: list[bytes] = BODIES, **options: Any) -> None:
        with Producer(self.broker, "shop") as producer:
            for body in bodies:
                producer.send("orders", body, **options)

    def record_of(self, topic: str, queue_offset: int, queue_id: int = 0) -> StoredMessage:
        with MessageStore.open(self.folder, read_only=True) as store:
            return store.read(topic, queue_id, queue_offset, 1).messages[0]

    def flip(self, file: str, bit: int) -> None:
        with (self.folder / file).open("r+b") as opened:
            opened.seek(bit // 8)
            byte = opened.read(1)[0]
            opened.seek(bit // 8)
            opened.write(bytes([byte ^ 1 << bit % 8]))

    def flip_record(self, topic: str, queue_offset: int, at: int, bit: int = 0) -> None:
        """Flip a bit of a record, counted from its byte ``at``."""
        self.flip(f"commitlog/{0:020d}", 8 * (self.record_of(topic, queue_offset).physical_offset + at) + bit)

    def damage(self, queue_offset: int, at: int, bit: int = 0) -> None:
        """Flip a bit of the record of an order while the broker is down."""
        self.close()
        self.flip_record("orders", queue_offset, at, bit)
        self.open()

    def flip_entry(self, topic: str, queue_offset: int, bit: int, queue_id: int = 0) -> None:
        self.flip(f"consumequeue/{topic}/{queue_id}/{0:020d}", 8 * 20 * queue_offset + bit)

    def progress(self, group: str = "g") -> int | None:
        return self.broker.call(QueryOffset(group, "orders", 0))


@pytest.fixture(params=["closed", "killed"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "store", is_killed=request.param == "killed")
    yield shop
    shop.broker.close()


def consumer_of(shop: Shop, seen: list[bytes], **settings: Any) -> PushConsumer:
    consumer = PushConsumer(shop.broker, "g", **settings)
    consumer.subscribe("orders")(lambda message: seen.append(message.body))
    return consumer


# ---- a damaged body


@pytest.fixture
def flushed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop that is opened after a kill without a walk over the log before the last flush, which refuses damage."""
    monkeypatch.setattr(saved_state, "WORTH_A_MARK", 1)
    return shop


@pytest.mark.parametrize("settings", [{}, {"orderly": True}, {"on_damage": timedelta(seconds=5)}], ids=str)
def test_a_push_consumer_passes_a_damaged_message_as_a_dead_letter(flushed: Shop, settings: Any) -> None:
    flushed.send()
    flushed.damage(4, record.BODY_AT + 2)
    seen: list[bytes] = []
    with consumer_of(flushed, seen, **settings):
        waits_ms = 5_000 if "on_damage" in settings else 60_000
        flushed.runner.advance(waits_ms - 2_000)
        assert seen == BODIES[:4]
        assert flushed.broker.dead_letters("g") == []
        flushed.runner.advance(8_000)
        assert seen == BODIES[:4] + BODIES[5:]
    assert flushed.progress() == COUNT
    (letter,) = flushed.broker.dead_letters("g")
    cause = letter.properties.get(PropertyName.DEAD_LETTER_CAUSE, "")
    assert "body checksum" in cause
    assert str(flushed.folder / "commitlog") in cause
    assert letter.body == b"co" + bytes([BODIES[4][2] ^ 1]) + BODIES[4][3:]
    assert letter.properties["RETRY_TOPIC"] == "orders"


def test_a_damaged_message_that_is_too_large_for_a_send_now_is_a_dead_letter(flushed: Shop) -> None:
    flushed.send([bytes(3_000), b"next"])
    flushed.damage(0, record.BODY_AT + 2)
    flushed.close()
    smaller = StoreConfig(max_message_size=1_000)
    flushed.broker = Broker.open(flushed.folder, runner=flushed.runner, store_config=smaller, change_settings=True)
    seen: list[bytes] = []
    with consumer_of(flushed, seen):
        flushed.runner.advance(70_000)
    assert seen == [b"next"]
    assert len(flushed.broker.dead_letters("g")) == 1


def test_a_record_without_a_frame_becomes_an_empty_dead_letter(flushed: Shop) -> None:
    flushed.send()
    flushed.damage(4, 5)
    seen: list[bytes] = []
    with consumer_of(flushed, seen):
        flushed.runner.advance(70_000)
    assert seen == BODIES[:4] + BODIES[5:]
    (letter,) = flushed.broker.dead_letters("g")
    assert letter.body == b""
    assert "magic" in letter.properties.get(PropertyName.DEAD_LETTER_CAUSE, "")


def test_without_a_time_the_queue_waits_for_a_repair(flushed: Shop) -> None:
    flushed.send()
    flushed.damage(4, record.BODY_AT)
    seen: list[bytes] = []
    with consumer_of(flushed, seen, on_damage=None):
        flushed.runner.advance(3_600_000)
    assert seen == BODIES[:4]
    assert flushed.progress() == 4
    assert flushed.broker.dead_letters("g") == []


def test_a_broadcasting_consumer_drops_a_damaged_message(flushed: Shop, tmp_path: Path) -> None:
    flushed.send()
    flushed.damage(4, record.BODY_AT)
    seen: list[bytes] = []
    settings = {"model": MessageModel.BROADCASTING, "consume_from": ConsumeFrom.FIRST}
    with consumer_of(flushed, seen, **settings, offsets_folder=str(tmp_path / "offsets")):
        flushed.runner.advance(90_000)
    assert seen == BODIES[:4] + BODIES[5:]
    assert flushed.broker.dead_letters("g") == []


def test_a_pull_consumer_raises_and_seek_passes(flushed: Shop) -> None:
    flushed.send()
    flushed.damage(4, record.BODY_AT)
    queue = MessageQueue("orders", flushed.broker.name, 0)
    with PullConsumer(flushed.broker, "g", pull_batch_size=32) as consumer:
        consumer.assign([queue])
        assert [message.body for message in consumer.poll(0)] == BODIES[:4]
        for _ in range(2):
            with pytest.raises(BrokerDamageError, match="librmq verify") as raised:
                consumer.poll(0)
            assert isinstance(raised.value, CorruptionError)
            assert raised.value.file.endswith(f"{0:020d}")
            assert raised.value.offset == flushed.broker.store.log.begin + raised.value.offset > 0
        consumer.seek(queue, 5)
        assert [message.body for message in consumer.poll(0)] == BODIES[5:]


def test_an_opening_after_a_kill_refuses_a_damaged_message_that_it_walks_over(tmp_path: Path) -> None:
    killed = Shop(tmp_path / "store", is_killed=True)
    killed.send()
    with pytest.raises(CorruptionError, match=r"body checksum.*sound records"):
        killed.damage(4, record.BODY_AT)


def test_messages_and_commands_end_at_a_damaged_message(flushed: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    flushed.send()
    flushed.close()
    flushed.flip_record("orders", 4, record.BODY_AT)
    for words in (["show", "--topic", "orders"], ["export", "-o", "-", "--format", "jsonl"]):
        assert main([words[0], str(flushed.folder), *words[1:]]) == 1
        assert re.search(r" 668\b.* checksum.*librmq (verify|salvage)", capsys.readouterr().err)
    found = list[bytes]()
    messages = flushed.open().messages("orders")
    with pytest.raises((CorruptionError, BodyChecksumError), match=r"(?=.* 668\b).*body checksum.*librmq verify"):
        found.extend(message.body for message in messages)
    assert found == BODIES[:4]


def test_other_queues_have_their_turns_beside_a_damaged_one(flushed: Shop) -> None:
    flushed.broker.create_topic("orders", 2)
    with Producer(flushed.broker, "shop") as producer:
        for number in range(2 * COUNT):
            producer.send("orders", b"%d" % number, queue=number % 2)
    flushed.damage(0, record.BODY_AT)
    found, errors = list[bytes](), 0
    with PullConsumer(flushed.broker, "g", pull_batch_size=1) as consumer:
        consumer.subscribe("orders")
        while len(found) < COUNT:
            try:
                found += [message.body for message in consumer.poll(0)]
            except BrokerDamageError:
                errors += 1
    assert found == [b"%d" % number for number in range(1, 2 * COUNT, 2)]
    assert 0 < errors < 2 * COUNT


def test_a_simple_consumer_passes_a_damaged_message_as_a_dead_letter(flushed: Shop) -> None:
    flushed.send()
    flushed.damage(4, record.BODY_AT)
    flushed.broker.set_group("g")
    flushed.broker.reset_group("g", "orders", to="begin")
    with SimpleConsumer(flushed.broker, "g") as consumer:
        consumer.subscribe("orders")
        found = consumer.receive(32, wait=0)
        assert [message.body for message in found] == BODIES[:4]
        consumer.ack(*found)
        assert consumer.receive(32, wait=0) == []
        flushed.runner.advance(61_000)
        assert [message.body for message in consumer.receive(32, wait=0)] == BODIES[5:]
    (letter,) = flushed.broker.dead_letters("g")
    assert "body checksum" in letter.properties.get(PropertyName.DEAD_LETTER_CAUSE, "")


def test_a_simple_consumer_without_a_time_raises(flushed: Shop) -> None:
    flushed.send()
    flushed.damage(0, record.BODY_AT)
    flushed.broker.set_group("g")
    flushed.broker.reset_group("g", "orders", to="begin")
    with SimpleConsumer(flushed.broker, "g", on_damage=None) as consumer:
        consumer.subscribe("orders")
        for _ in range(2):
            with pytest.raises(BrokerDamageError):
                consumer.receive(32, wait=0)
            flushed.runner.advance(3_600_000)
    assert flushed.broker.dead_letters("g") == []


def test_each_damaged_message_that_holds_a_group_up_is_logged(flushed: Shop, caplog: pytest.LogCaptureFixture) -> None:
    flushed.send()
    flushed.close()
    places = [flushed.record_of("orders", number).physical_offset for number in (2, 3, 6)]
    for place in places:
        flushed.flip(f"commitlog/{0:020d}", 8 * (place + record.BODY_AT))
    flushed.open()
    flushed.broker.set_group("g")
    flushed.broker.reset_group("g", "orders", to="begin")
    seen: list[bytes] = []
    with SimpleConsumer(flushed.broker, "g", on_damage=timedelta(seconds=5)) as consumer:
        consumer.subscribe("orders")
        for _ in range(30):
            for message in consumer.receive(1, wait=0):
                seen.append(message.body)
                consumer.ack(message)
            flushed.runner.advance(1_000)
    assert seen == [body for number, body in enumerate(BODIES) if number not in (2, 3, 6)]
    said = [one.getMessage() for one in caplog.records if "receiving from orders/0 fails" in one.getMessage()]
    assert len(said) == 3, said


# ---- what a record says of itself


@many
@pytest.mark.parametrize("bit", [0, 7, 13, 30, 47, 62, 63])
@pytest.mark.parametrize("number", [0, 4, COUNT - 1])
def test_a_push_consumer_goes_by_the_place_and_not_by_the_word_of_a_record(shop: Shop, number: int, bit: int) -> None:
    shop.send()
    shop.damage(number, record.QUEUE_OFFSET_AT + 7 - bit // 8, bit % 8)
    seen: list[bytes] = []
    with consumer_of(shop, seen):
        shop.runner.advance(20_000)
    assert seen == BODIES
    assert shop.progress() == COUNT


# ---- the broker's tables


@many
@pytest.mark.parametrize("damaged", [b"Table", b"}"], ids=["key", "end"])
@pytest.mark.parametrize("name", ["consumerOffset", "subscriptionGroup", "topics"])
def test_the_backup_of_a_damaged_table_counts(
    shop: Shop, name: str, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """As the log and `verify` say, because it is a save older; without one no broker starts."""
    shop.send()
    shop.broker.set_group("g")
    for number in range(1, 5):
        shop.broker.create_topic(f"T{number}", 1)
        shop.broker.set_group(f"G{number}")
        shop.broker.reset_group("g", "orders", to=number)
        shop.runner.advance(60_000)
    shop.close()
    table, backup = (shop.folder / f"config/{name}.json{end}" for end in ("", ".bak"))
    text = table.read_bytes()
    at = text.rindex(damaged)
    text = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    table.write_bytes(text)
    said = f"{name}.json is damaged"
    assert any(said in note for note in verify(shop.folder).notes)
    shop.open()
    assert said in caplog.text
    lost = [one for one in ("T4", "G4") if one not in [*shop.broker.topics(), *shop.broker.groups()]]
    # What was in work at a kill knows a group's progress, too.
    assert shop.progress() == (3 if name == "consumerOffset" and not shop.is_killed else 4)
    assert lost == {"topics": ["T4"], "subscriptionGroup": ["G4"]}.get(name, [])
    shop.close()
    kept = backup.read_bytes()
    table.write_bytes(text)
    backup.unlink()
    with pytest.raises(CorruptionError, match=f"{name}.json.*or move {name}.json away"):
        shop.open()
    table.write_bytes(kept)
    shop.open()


# ---- queues of a broker's own


BITS = [0, 6, 20, 37, 50, 63, 64, 70, 90, 95]
"""Of place and size in an entry, most significant byte first."""


@many
@pytest.mark.parametrize("bit", [*BITS, 96, 100, 120, 127, 140, 150, 155])
@pytest.mark.parametrize("number", [0, 4, COUNT - 1])
def test_delayed_messages_come_at_their_time(shop: Shop, number: int, bit: int) -> None:
    """Also where the time in an entry is wrong."""
    for body in BODIES:
        shop.send([body], delay=timedelta(hours=1))
        shop.runner.advance(60_000)
    shop.close()
    level = next(path.name for path in (shop.folder / "consumequeue" / SystemTopic.SCHEDULE).iterdir())
    shop.flip_entry(SystemTopic.SCHEDULE, number, bit, int(level))
    opened_ms = shop.runner.clock.now_ms()
    if number == COUNT - 1 and bit < 96 and not shop.is_killed:
        return  # a queue whose last entry has changed since the close is refused, with the command that helps
    shop.open()
    seen: list[tuple[int, bytes]] = []
    consumer = PushConsumer(shop.broker, "g")
    consumer.subscribe("orders")(lambda message: seen.append((shop.runner.clock.now_ms(), message.body)))
    with consumer:
        shop.runner.advance(2 * 3_600_000)
    assert [body for _, body in seen] == BODIES
    for place, (time_ms, _) in enumerate(seen):
        assert abs(time_ms - (opened_ms + 3_600_000 - (COUNT - place) * 60_000)) < 2_000


def fail(message: object) -> None:
    raise ValueError("no more coats")


@many
@pytest.mark.parametrize("bit", BITS)
def test_dead_letters_and_retries_are_found(shop: Shop, bit: int) -> None:
    shop.send()
    consumer = PushConsumer(shop.broker, "g", max_reconsume_times=1)
    consumer.subscribe("orders")(fail)
    with consumer:
        shop.runner.advance(300_000)
    assert len(shop.broker.dead_letters("g")) == COUNT
    shop.close()
    for topic in (dead_letter_topic("g"), retry_topic("g")):
        shop.flip_entry(topic, 3, bit)
    shop.open()
    assert sorted(letter.body for letter in shop.broker.dead_letters("g")) == BODIES
    assert [message.queue_offset for message in shop.broker.messages(retry_topic("g"))] == list(range(COUNT))


def test_committed_transactions_are_delivered(shop: Shop) -> None:
    """Whatever bit of the entry of a half, or of its record's own offset, is wrong."""
    with TransactionProducer(shop.broker, "shop", check=lambda _: TransactionState.UNKNOWN) as producer:
        for body in BODIES:
            producer.send_in_transaction(Message("orders", body), execute=lambda *_: TransactionState.UNKNOWN)
    shop.close()
    kept = Path(shutil.copytree(shop.folder, f"{shop.folder}-kept"))
    files = [(f"consumequeue/{SystemTopic.HALF}/0/{0:020d}", 8 * 20 * 4 + bit) for bit in BITS]
    place = shop.record_of(SystemTopic.HALF, 4).physical_offset
    for at in (record.QUEUE_OFFSET_AT, record.QUEUE_OFFSET_AT + 3, record.QUEUE_OFFSET_AT + 7):
        files.append((f"commitlog/{0:020d}", 8 * (place + at) + 1))
    for file, bit in some(files):
        shutil.rmtree(shop.folder)
        shutil.copytree(kept, shop.folder)
        shop.flip(file, bit)
        shop.runner = ManualRunner()
        shop.open()
        seen: list[bytes] = []
        with TransactionProducer(shop.broker, "shop", check=lambda _: TransactionState.COMMIT), consumer_of(shop, seen):
            shop.runner.advance(300_000)
        assert sorted(seen) == BODIES, (file, bit)
        shop.broker.close()
