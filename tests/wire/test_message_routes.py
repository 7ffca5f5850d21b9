"""One message by every route: in process, through frames in a test, by `connect`, and by a client of 5.x."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import librmq
from librmq import (
    Broker,
    BrokerConfig,
    BrokerError,
    Message,
    MessageIllegalError,
    Producer,
    SendResult,
    StoreConfig,
    ThreadRunner,
    TimerConfig,
    TransactionProducer,
    split_batch,
)
from librmq.broker import AdministeredRoute
from librmq.clock import SystemClock
from librmq.message.message import StoredMessage
from librmq.protocol import Route, TransactionState
from librmq.testing import Kit
from librmq.testing._served import ServedKit
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._frames import VERSION, Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.wire.fake_servers import FakeServer
from tests.wire.stub import Stub, message

ROUTES = ("kit", "kit over tcp", "connect")
TIMERS = BrokerConfig(timers=TimerConfig())
V5_0_0 = 413
TIMES = ("TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_OUT_MS")
SENT = {"msgId": "7F00000100002A9F0000000000000000", "queueId": "0", "queueOffset": "0"}


class ClockOfKit(SystemClock):
    """The clock of a client whose time of day is the kit's: the server moves times that others compute by theirs."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def now_ms(self) -> int:
        return self._kit.clock.now_ms()


class Opened(NamedTuple):
    """A kit, and the route by which a producer reaches its broker."""

    kit: Kit
    route: Route


@contextmanager
def opened(
    way: str, config: BrokerConfig, files: StoreConfig | None = None, path: Path | None = None
) -> Iterator[Opened]:
    """Open a broker whose clock a test moves, and the route to it."""
    with ExitStack() as rest:
        now_ms = SystemClock().now_ms() // 1000 * 1000
        kit = Kit(path, broker_config=config, store_config=files, now_ms=now_ms, over_tcp=way == "kit over tcp")
        rest.callback(kit.abandon)
        kit.broker.create_topic("t", 4)
        if way != "connect":
            yield Opened(kit, kit.route)
            return
        served = rest.enter_context(ServedKit(kit, None, listen()))
        runner = ThreadRunner(ClockOfKit(kit))
        rest.callback(runner.shutdown)
        yield Opened(kit, rest.enter_context(librmq.connect(served.address, runner=runner)))


def cases(now_ms: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of a send, by what they try."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    return {
        "bytes": {"body": b"\0\1\2\xff"},
        "text": {"body": "größe"},
        "json": {"json": {"id": 1, "name": "ü"}},
        "tags": {"body": b"x", "tags": "created"},
        "keys": {"body": b"x", "keys": ["order-1", "order-2"]},
        "properties": {"body": b"x", "properties": {"region": "süd", "amount": "12.5"}},
        "flag": {"body": b"x", "flag": -7},
        "unique key": {"body": b"x", "unique_key": "id-1"},
        "without waiting": {"body": b"x", "wait_store_ok": False},
        "level": {"body": b"x", "delay_level": 3},
        "level without waiting": {"body": b"x", "delay_level": 3, "wait_store_ok": False},
        "delay of a level": {"body": b"x", "delay": 5},
        "timed delta": {"body": b"x", "delay": timedelta(minutes=1)},
        "delay": {"body": b"x", "delay": 7},
        "delay of half seconds": {"body": b"x", "delay": 12.5},
        "no delay": {"body": b"x", "delay": 0},
        "time": {"body": b"x", "deliver_at": now + timedelta(seconds=90)},
        "time that was": {"body": b"x", "deliver_at": now - timedelta(days=1)},
        "all": {
            "body": b"x",
            "tags": "created",
            "keys": "order-1",
            "properties": {"region": "north"},
            "delay": 3601,
            "flag": 1,
            "unique_key": "id-2",
            "wait_store_ok": False,
        },
        "large": {"body": bytes(range(256)) * 1200},
        "compressed": {"body": b"again and again " * 2000},
        "queue": {"body": b"x", "queue": 2},
        "selector": {"body": b"x", "selector": lambda queues, _, arg: queues[arg], "arg": 3},
    }


def row(stored: StoredMessage, begin_ms: int, names: dict[str, str]) -> tuple[Any, ...]:
    """Return what arrived, without what differs from run to run: ids, times, and the queue of a send in turn."""
    what = names.get(stored.message_id, "")
    is_in_turn = what == "transaction"
    properties = [
        (name, what if name == "UNIQ_KEY" else int(value) - begin_ms if name in TIMES else value)
        for name, value in stored.properties.items()
        if not (is_in_turn and name == "REAL_QID")
    ]
    return (
        stored.body,
        stored.flag,
        stored.sys_flag,
        stored.reconsume_times,
        None if is_in_turn else stored.queue_id,
        properties,
        stored.store_timestamp_ms - begin_ms,
    )


def sent_by(way: str) -> dict[str, list[tuple[Any, ...]]]:
    """Send everything by a route; return what arrived by what was tried."""
    with opened(way, TIMERS) as (kit, route):
        begin_ms = kit.clock.now_ms()
        names: dict[str, str] = {}
        with (
            Producer(route, "shop") as producer,
            TransactionProducer(route, "sales", lambda _: TransactionState.UNKNOWN) as transactions,
        ):
            # What has no answer comes first: the next answer on the connection shows that it has arrived.
            half = Message("t", b"half", tags="a", keys="k", properties={"n": "1"}, flag=3)
            commit = transactions.send_in_transaction(half, execute=lambda *_: TransactionState.COMMIT)
            names[commit.sent.message_id] = "transaction"
            producer.send_oneway("t", b"one-way", queue=1, tags="one", delay=8)
            for name, fields in cases(begin_ms).items():
                place = {} if "selector" in fields else {"queue": 0}
                names[producer.send("t", **(place | fields)).message_id] = name
            batch = [
                Message("t", b"first", tags="a", flag=1, properties={"n": "1"}),
                Message("t", b"second", keys="k", flag=2),
            ]
            for message_id in producer.send_batch(batch, queue=1).message_id.split(","):
                names[message_id] = "batch"
        kit.advance(hours=2)
        arrived: dict[str, list[tuple[Any, ...]]] = {}
        for stored in kit.broker.messages("t"):
            what = names.get(stored.message_id, stored.tags or "")
            arrived.setdefault(what, []).append(row(stored, begin_ms, names))
        return arrived


@pytest.mark.parametrize("way", ROUTES[1:])
def test_each_field_of_a_message_arrives_alike_by_every_route(way: str) -> None:
    expected, found = sent_by("kit"), sent_by(way)
    assert found.keys() == expected.keys() >= cases(0).keys() | {"one", "batch", "transaction"}
    for what, rows in expected.items():
        assert found[what] == rows, what
    late = {what: rows[0][-1] for what, rows in found.items() if rows[0][-1]}
    assert late["delay of a level"] == 5_000
    assert late["timed delta"] == 60_000
    assert 7_000 <= late["delay"] <= 8_000
    assert 90_000 <= late["time"] <= 91_000
    assert 3_601_000 <= late["all"] <= 3_602_000
    assert "time that was" not in late


def test_a_client_of_5_sends_the_same_messages() -> None:
    alike = ("bytes", "text", "tags", "keys", "properties", "unique key", "time", "time that was")
    expected = sent_by("kit")
    with Kit(broker_config=TIMERS, now_ms=SystemClock().now_ms() // 1000 * 1000) as kit:
        kit.broker.create_topic("t", 4)
        begin_ms = kit.clock.now_ms()
        with ServedKit(kit) as served, Stub(served.address) as stub:
            for what in alike:
                fields = cases(begin_ms)[what]
                body = fields["body"]
                system = {"keys": fields.get("keys", ()), "properties": fields.get("properties", {})}
                if "tags" in fields:
                    system["tag"] = fields["tags"]
                if "deliver_at" in fields:
                    system["deliver_ms"] = round(1000 * fields["deliver_at"].timestamp())
                    system["born_ms"] = begin_ms  # by the machine's clock it would be later than by the kit's
                    system["message_type"] = 3
                raw = body.encode() if isinstance(body, str) else body
                sent = stub.send(message("t", raw, fields.get("unique_key", what), **system))
                assert sent.status.code == 20000, what
            kit.advance(hours=2)
        arrived = {fields.message_id: fields for fields in kit.broker.messages("t")}
    for what in alike:
        stored = arrived[cases(0)[what].get("unique_key", what)]
        body, _, sys_flag, times, _, properties, late_ms = expected[what][0]
        assert (stored.body, stored.sys_flag, stored.reconsume_times) == (body, sys_flag, times), what
        assert stored.store_timestamp_ms - begin_ms == late_ms, what
        for name in ("TAGS", "KEYS", "region", "amount"):
            assert stored.properties.get(name) == dict(properties).get(name), what


@pytest.mark.parametrize("way", ROUTES)
def test_any_delay_is_taken_by_default(way: str) -> None:
    with opened(way, BrokerConfig()) as (kit, route), Producer(route, "shop") as producer:
        begin_ms = kit.clock.now_ms()
        producer.send("t", b"x", delay=7)
        producer.send("t", b"y", deliver_at=datetime.fromtimestamp(begin_ms / 1000 + 37, UTC))
        kit.advance(hours=1)
        late_ms = [one.store_timestamp_ms - begin_ms for one in kit.broker.messages("t")]
        assert [ms // 2000 for ms in sorted(late_ms)] == [3, 18]
        with pytest.raises((MessageIllegalError, BrokerError), match="at most 259200 s away"):
            producer.send("t", b"x", delay=4 * 86_400)


@pytest.mark.parametrize("way", ROUTES)
def test_a_delay_that_the_broker_lacks_is_refused(way: str, tmp_path: Path) -> None:
    with Broker.open(tmp_path, store_config=StoreConfig.tiny()) as broker, Producer(broker, "shop") as producer:
        producer.send("first", b"x")
    (tmp_path / "librmq" / "config.json").unlink()  # so that it looks like the folder of a broker
    with opened(way, BrokerConfig(), StoreConfig.tiny(), tmp_path) as (kit, route), Producer(route, "shop") as producer:
        begin_ms = kit.clock.now_ms()
        with pytest.raises(MessageIllegalError, match=r"is to wait 7 s.*(timers=TimerConfig|a broker with a timer)"):
            producer.send("t", b"x", delay=7)
        with pytest.raises(MessageIllegalError, match="is to wait"):
            producer.send("t", b"x", deliver_at=datetime.fromtimestamp(begin_ms / 1000 + 86_400, UTC))
        producer.send("t", b"x", delay=5)
        kit.advance(hours=1)
        assert [one.store_timestamp_ms - begin_ms for one in kit.broker.messages("t")] == [5_000]


@pytest.mark.parametrize("way", ROUTES)
def test_a_relay_takes_any_delay(way: str) -> None:
    with opened(way, BrokerConfig(hops=True)) as (kit, route), Producer(route, "shop") as producer:
        begin_ms = kit.clock.now_ms()
        producer.send("t", b"x", delay=95)
        kit.advance(hours=1)
        (arrived,) = kit.broker.messages("t")
        assert 95_000 <= arrived.store_timestamp_ms - begin_ms <= 96_100


@pytest.mark.parametrize("way", ROUTES)
def test_a_batch_takes_what_split_batch_cuts(way: str) -> None:
    messages = [Message("t", b"x" * 100_000, keys=f"order-{number}") for number in range(60)]
    files = StoreConfig.tiny(commitlog_file_size=16 << 20, max_message_size=4 << 20)
    with opened(way, BrokerConfig(), files) as (kit, route), Producer(route, "shop") as producer:
        stored = [producer.send_batch(part).message_id.count(",") + 1 for part in split_batch(messages)]
        assert (len(stored), sum(stored)) == (2, 60)
        assert sum(1 for _ in kit.broker.messages("t")) == 60


# ---- brokers of RocketMQ, as they describe themselves


class Described:
    """A broker that answers with settings, and keeps the properties of what is sent."""

    def __init__(self, settings: str | None, version: int = VERSION) -> None:
        self.properties: list[dict[str, str]] = []
        self._settings = settings
        self._version = version

    def __call__(self, frame: Frame) -> Frame | None:
        if frame.code == RequestCode.GET_BROKER_CONFIG:
            if self._settings is None:
                return replace(answer_to(frame, 16, "no permission"), version=self._version)
            return replace(answer_to(frame, body=self._settings.encode()), version=self._version)
        if frame.code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_REPLY_MESSAGE_V2):
            pairs = [pair.split("\1") for pair in frame.fields["i"].split("\2") if pair]
            self.properties.append({name: value for name, value in pairs if name not in ("UNIQ_KEY", "WAIT")})
            return answer_to(frame, fields=SENT)
        return None


LEVELS = "messageDelayLevel=1s 2s 5s\nmaxMessageSize=4194304\n"


def test_a_broker_of_4_9_gets_a_level_of_its_own() -> None:
    broker = Described(LEVELS)
    with FakeServer(broker) as server, librmq.connect(server.address) as route, Producer(route, "shop") as producer:
        producer.send("t", b"x", delay=2)
        producer.send_oneway("t", b"x", delay=5)
        producer.send("t", b"x", delay=0)
        lacks = r"broker fake has no timer, .* 1s 2s 5s, is that long"
        with pytest.raises(MessageIllegalError, match=lacks):
            producer.send("t", b"x", delay=10)
        with pytest.raises(MessageIllegalError, match=lacks):
            producer.send("t", b"x", deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
        producer.send("t", b"x")
        assert broker.properties == [{"DELAY": "2"}, {"DELAY": "3"}, {}, {}]
        asked = [frame.code for frame in server.asked].count(RequestCode.GET_BROKER_CONFIG)
    assert asked == 1


def test_a_broker_of_5_gets_the_properties_of_its_timer() -> None:
    broker = Described(LEVELS + "timerWheelEnable=true\n", version=V5_0_0)
    at = datetime(2100, 1, 1, tzinfo=UTC)
    with FakeServer(broker) as server, librmq.connect(server.address) as route, Producer(route, "shop") as producer:
        producer.send("t", b"x", delay=10)
        producer.send("t", b"x", deliver_at=at)
        producer.send("t", b"x", delay=1)
    assert broker.properties == [
        {"TIMER_DELAY_MS": "10000"},
        {"TIMER_DELIVER_MS": str(round(1000 * at.timestamp()))},
        {"TIMER_DELAY_MS": "1000"},
    ], "it recalls no message of a level"


def test_a_broker_that_hides_its_settings_gets_no_delay() -> None:
    broker = Described(None)
    with FakeServer(broker) as server, librmq.connect(server.address) as route, Producer(route, "shop") as producer:
        with pytest.raises(MessageIllegalError, match=r"does not say what it can delay.*no permission.*delay_level="):
            producer.send("t", b"x", delay=5)
        producer.send("t", b"x", delay_level=3)
    assert broker.properties == [{"DELAY": "3"}]


def test_a_broker_of_5_that_hides_its_settings_has_timers() -> None:
    broker = Described(None, version=V5_0_0)
    with FakeServer(broker) as server, librmq.connect(server.address) as route, Producer(route, "shop") as producer:
        producer.send("t", b"x", delay=5)
    assert broker.properties == [{"TIMER_DELAY_MS": "5000"}]


@pytest.mark.parametrize("place", ["broker", "peer", "connect"])
def test_only_awaited_sends_of_a_loop_have_an_order(place: str, tmp_path: Path) -> None:
    """Those that are under way together are each stored once, at the place that the result names, in any order."""
    bodies = [b"%d" % number for number in range(220)]
    with ExitStack() as rest:
        broker: AdministeredRoute = rest.enter_context(
            librmq.share(tmp_path) if place == "peer" else Broker.open(tmp_path)
        )
        broker.create_topic("orders", 1)
        route = rest.enter_context(librmq.share(tmp_path)) if place == "peer" else broker
        if isinstance(broker, Broker) and place == "connect":
            route = rest.enter_context(librmq.connect(rest.enter_context(RemotingServer(broker)).address))
        producer = rest.enter_context(Producer(route, "shop", timeout=60))

        async def send() -> list[SendResult]:
            together = await asyncio.gather(*(producer.send_async("orders", body) for body in bodies[:200]))
            return [*together, *[await producer.send_async("orders", body) for body in bodies[200:]]]

        offsets = [result.queue_offset for result in asyncio.run(send())]
        stored = [message.body for message in broker.messages("orders")]
    assert sorted(offsets[:200]) == [*range(200)]
    assert offsets[200:] == [*range(200, 220)]
    assert [stored[offset] for offset in offsets] == bodies
