"""The same scenarios at a broker that you run and at ``librmq serve``: ``python -m tests.judged --namesrv HOST:9876``.

It needs pytest, as the environment of ``./check --quick`` has it. Clients are librmq's own and the official ones for
Python, Node and C++, which are fetched from their registries once. Those of RocketMQ 5 need the address of the broker's
proxy too: ``--proxy HOST:8081``. ``--store FOLDER``, on the broker's machine, lets librmq read its directory. The
scenarios make topics and groups whose names begin with ``judged-``, a topic ``classic`` and a group ``CID-classic``,
and delete them at the end.

What a broker can't do by its version or its settings is left out. An outcome never decides that. `tests.judged.faults`
plants in librmq what each row of its own clients is there to find.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import librmq
from librmq.clock import SystemClock
from librmq.errors import ReceiptError
from librmq.message.properties import PropertyName, encode_properties
from librmq.message.topics import SystemTopic, TopicType
from librmq.protocol import CreateTopic, SendBatch
from librmq.wire.remoting._frames import version_name
from librmq.wire.remoting._headers import RequestCode
from librmq.wire.remoting._request_codec import check, frame_of, send_frame
from tests.wire.clients import (
    HERE,
    NODE_VERSION,
    PYTHON_VERSIONS,
    OfficialClient,
    classic_client,
    node_client,
    python_client,
)

FOLDER: Final = Path(__file__).parent
WAIT_S: Final = 90
"""A broker with its own settings repeats a message after ten seconds, and moves delayed ones each second."""
LEAST_HELD_S: Final = 15
HELD_S: Final = 25
"""A broker ends each pull that it holds within this time, and none before the other."""
CLASSIC_NAMES: Final = ("classic", "CID-classic")
"""Topic and group of a program that is run unchanged."""


class Place(NamedTuple):
    """Where scenarios run."""

    namesrv: str
    proxy: str | None
    store: str | None
    """The broker's directory, if it is on this machine."""
    release: str | None
    """The broker's version, such as ``5.3.3``; None for librmq, which has all that a scenario needs."""
    settings: Mapping[str, str]
    """The broker's settings, by their names in ``broker.conf``."""
    wait_s: float
    """The longest that a scenario waits for something."""
    made: set[str]
    """Names in those of the topics and groups that scenarios have made here."""

    @classmethod
    def ask(cls, namesrv: str, proxy: str | None = None, store: str | None = None, wait_s: float = WAIT_S) -> Place:
        """Return a place with what its broker, or the oldest of several, says of itself."""
        with librmq.connect(namesrv) as route:
            brokers = [route.broker(name) for name in route.broker_names()]
            releases = [
                version_name(broker.request(frame_of(RequestCode.GET_BROKER_RUNTIME_INFO)).version)
                for broker in brokers
                if not broker.is_librmq()
            ]
            answers = [check(broker.request(frame_of(RequestCode.GET_BROKER_CONFIG))) for broker in brokers]
        lines = [line.partition("=") for answer in answers for line in answer.body.decode().splitlines()]
        settings = {name: value for name, _, value in lines}
        release = min(releases, default=None, key=release_number)
        return cls(namesrv, proxy, store, release, settings, wait_s, set())

    def new_name(self) -> str:
        """Return a name that no other topic has."""
        name = f"judged-{uuid.uuid4().hex[:12]}"
        self.made.add(name)
        return name

    def lacks(self, scenario: str) -> str | None:
        """Return what the broker lacks for a scenario."""
        if self.release is None:
            return None
        since = SINCE.get(scenario, "4.9")
        if release_number(self.release) < release_number(since):
            return f"RocketMQ {self.release}, needs {since}"
        off = [name for name in SETTINGS.get(scenario, ()) if self.settings.get(name) != "true"]
        return f"needs {' and '.join(f'{name}=true' for name in off)}" if off else None


SINCE: Final = {
    "simple consumer, dead letter": "5.0.0",
    "simple consumer, late receipts": "5.0.0",
    "topic with queues of batches": "5.0.0",
    "cancel of a delay": "5.3.2",
    "priorities": "5.4.0",
}
"""The release that first has what a scenario needs; those that are missing run at every broker."""
SETTINGS: Final = {"SQL": ("enablePropertyFilter",), "cancel of a delay": ("timerWheelEnable", "recallMessageEnable")}
"""What is off in a broker unless its settings say otherwise."""


def release_number(release: str) -> tuple[int, ...]:
    """Return a release so that it compares; those without a number are the oldest."""
    return tuple(int(part) for part in release.split(".") if part.isdecimal())


class Row(NamedTuple):
    """A scenario of a client, and what became of it at each place."""

    client: str
    scenario: str
    broker: str
    serve: str


class LeftOut(Exception):
    """The scenario can't run; the message says why."""


# ---- librmq's own clients

_clock: Final = SystemClock()


class Stand:
    """A route to a place, with a topic and a group of the scenario's own."""

    def __init__(self, route: Any, topic: str, place: Place) -> None:
        self.route = route
        self.topic = topic
        self.place = place
        self.group = f"{topic}-g"
        self.arrived: list[Any] = []
        self._changed = threading.Condition()

    def deadline(self) -> float:
        """Return the time, by the steady clock, until which something may take."""
        return _clock.monotonic() + self.place.wait_s

    def ended(self) -> list[str]:
        """Return the bodies that arrived, one at least, when the group has consumed all messages."""
        self.wait(1)
        self.route.join(timeout=self.place.wait_s)
        return [message.body.decode() for message in self.arrived]

    def send(self, *bodies: str, **fields: Any) -> None:
        with librmq.Producer(self.route, f"{self.topic}-p") as producer:
            for body in bodies:
                producer.send(self.topic, body.encode(), **fields)

    def poll(self, count: int, group: str | None = None) -> list[str]:
        """Return the bodies of the next messages of a group."""
        bodies: list[str] = []
        deadline = self.deadline()
        with librmq.PullConsumer(self.route, group or self.group, consume_from=librmq.ConsumeFrom.FIRST) as consumer:
            consumer.subscribe(self.topic)
            while len(bodies) < count and _clock.monotonic() < deadline:
                bodies += [message.body.decode() for message in consumer.poll(1)]
        return bodies

    @contextmanager
    def listening(self, fails_first: str | None = None, **fields: Any) -> Iterator[librmq.PushConsumer]:
        """Consume; the listener fails at the first delivery of one body."""
        orderly = fields.pop("orderly", False)

        def listen(message: Any) -> None:
            body = message.body.decode()
            with self._changed:
                is_first = all(other.body != message.body for other in self.arrived)
                self.arrived.append(message)
                self._changed.notify_all()
            if body == fails_first and is_first:
                raise RuntimeError("not yet")

        consumer = librmq.PushConsumer(self.route, self.group, orderly=orderly, consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe(self.topic, listen, **fields)
        with consumer:
            yield consumer

    def wait(self, count: int) -> list[str]:
        """Return the bodies that arrived when there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, self.place.wait_s), self.arrived
            return [message.body.decode() for message in self.arrived]


def pull(stand: Stand) -> None:
    stand.send(*map(str, range(20)))
    assert sorted(map(int, stand.poll(20))) == list(range(20))


def progress(stand: Stand) -> None:
    """All is in one queue, so that what comes again comes first."""
    stand.send("1", "2", queue=0)
    assert stand.poll(2) == ["1", "2"]
    stand.send("3", queue=0)
    assert stand.poll(1) == ["3"]


def batch(stand: Stand) -> None:
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer:
        producer.send_batch([librmq.Message(stand.topic, str(number).encode()) for number in range(5)])
    assert stand.poll(5) == list("01234")


def tags(stand: Stand) -> None:
    for tag in "ab":
        stand.send(tag, tags=tag)
    with stand.listening(tags="b"):
        assert stand.ended() == ["b"]


def sql(stand: Stand) -> None:
    for number in range(4):
        stand.send(str(number), properties={"n": str(number)})
    with stand.listening(sql="n > 2"):
        assert stand.ended() == ["3"]


def retry(stand: Stand) -> None:
    with stand.listening(fails_first="bad"):
        stand.send("bad", "good")
        assert sorted(stand.wait(3)) == ["bad", "bad", "good"]
    assert [message.reconsume_times for message in stand.arrived if message.body == b"bad"] == [0, 1]


def orderly(stand: Stand) -> None:
    stand.send(*"123", queue=0)
    with stand.listening(fails_first="2", orderly=True):
        assert stand.wait(4) == ["1", "2", "2", "3"]


def delay(stand: Stand) -> None:
    """The broker's own times tell, and where it keeps the message that waits: the machine can be slow."""
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer:
        sent = producer.send(stand.topic, b"later", delay_level=2)
    waiting = stand.route.find_by_id(sent.offset_id)
    assert waiting is not None
    assert (waiting.topic, waiting.properties[PropertyName.DELAY]) == (SystemTopic.SCHEDULE, "2")
    with stand.listening():
        assert stand.wait(1) == ["later"]
    (later,) = stand.arrived
    assert later.store_timestamp_ms - waiting.store_timestamp_ms >= 5000


def transactions(stand: Stand) -> None:
    with librmq.TransactionProducer(
        stand.route, f"{stand.topic}-t", lambda message: librmq.TransactionState.COMMIT
    ) as producer:
        for state in (librmq.TransactionState.ROLLBACK, librmq.TransactionState.COMMIT):
            message = librmq.Message(stand.topic, state.name.encode())
            producer.send_in_transaction(message, state, execute=lambda message, arg: arg)
    assert stand.poll(1) == ["COMMIT"]
    assert [message.body for message in stand.route.messages(stand.topic)] == [b"COMMIT"]


def keys(stand: Stand) -> None:
    stand.send("1", keys="k-1")
    deadline = stand.deadline()
    while not (found := stand.route.find_by_key(stand.topic, "k-1")) and _clock.monotonic() < deadline:
        _clock.wait(threading.Event(), 0.1)  # a broker indexes a moment later
    assert [message.body for message in found] == [b"1"]


def dead_letters(stand: Stand) -> None:
    stand.route.set_group(stand.group, retry_max_times=0)
    with stand.listening(fails_first="bad"):
        stand.send("bad")
        stand.wait(1)
        deadline = stand.deadline()
        while not (letters := list(stand.route.dead_letters(stand.group))) and _clock.monotonic() < deadline:
            _clock.wait(threading.Event(), 0.1)
    assert [letter.body for letter in letters] == [b"bad"]


def reset(stand: Stand) -> None:
    stand.send("1", "2")
    assert sorted(stand.poll(2)) == ["1", "2"]
    stand.route.reset_group(stand.group, stand.topic, to="begin")
    assert sorted(stand.poll(2)) == ["1", "2"]


def reset_running(stand: Stand) -> None:
    """The clients of a broker of 5.x learn of it by the next answer to a pull, so something is sent to each queue.

    The subscriptions have changed since the pulls were sent whose answers say it. It is done again if those pulls can
    have ended before the reset.
    """
    sent: list[str] = []
    were_held = False
    with stand.listening() as consumer:
        while not were_held:
            began, before = _clock.monotonic(), len(stand.arrived)
            sent.append(f"{len(sent)}")
            for queue in range(4):
                stand.send(sent[-1], queue=queue)
            stand.wait(before + 4)
            stand.ended()
            consumer.subscribe(f"{stand.topic}-other-{len(sent)}", print)
            stand.route.reset_group(stand.group, stand.topic, to="begin")
            were_held = _clock.monotonic() - began < LEAST_HELD_S
            sent.append(f"{len(sent)}")
            for queue in range(4):
                stand.send(sent[-1], queue=queue)
            assert sorted(stand.wait(before + 4 + 4 * len(sent))[before + 4 :]) == sorted(4 * sent)
    assert stand.route.lag(stand.group, stand.topic) == 0


@contextmanager
def receiving(stand: Stand) -> Iterator[Callable[[float], Any]]:
    """Yield a function that receives one message for some seconds."""
    with librmq.SimpleConsumer(stand.route, stand.group) as consumer:
        consumer.subscribe(stand.topic)

        def receive(invisible: float) -> Any:
            deadline = stand.deadline()
            while _clock.monotonic() < deadline:
                if messages := consumer.receive(1, invisible=invisible, wait=1):
                    return consumer, messages[0]
            raise AssertionError("no message came")

        yield receive


def received_too_often(stand: Stand) -> None:
    stand.route.set_group(stand.group, retry_max_times=1)
    with receiving(stand) as receive:
        stand.send("bad")
        for attempt in (1, 2):
            consumer, message = receive(60)
            assert message.attempt == attempt
            consumer.extend(message, 0)
        deadline = stand.deadline()
        while not (letters := stand.route.dead_letters(stand.group)) and _clock.monotonic() < deadline:
            assert consumer.receive(1, wait=0.2) == []
    assert [letter.body for letter in letters] == [b"bad"]


def is_late(call: Callable[[], object]) -> bool:
    """Return whether a call refuses a receipt whose time is over."""
    try:
        call()
    except ReceiptError:
        return True
    return False


def late_receipt(stand: Stand) -> None:
    with receiving(stand) as receive:
        stand.send("1", "2")
        late = [receive(0.5)[1] for _ in range(2)]
        _clock.wait(threading.Event(), 0.6)
        consumer, again = receive(60)
        assert is_late(partial(consumer.ack, late[0]))
        assert is_late(partial(consumer.extend, late[1], 60))
        consumer.ack(again)
        consumer.ack(receive(60)[1])
        assert consumer.receive(1, wait=1) == []


def cancel(stand: Stand) -> None:
    late = 0
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer, stand.listening():
        for seconds in (5, 10, 30, 60):  # the shortest that ends after its cancel
            waiting = producer.send(stand.topic, b"cancelled", delay=seconds)
            producer.send(stand.topic, b"kept", delay=seconds)
            if (told := producer.cancel(waiting)).cancelled:
                break
            late += 1
        assert told.cancelled, told
        stand.send("last", delay=seconds)
        assert Counter(stand.wait(2 * late + 2)) == Counter(cancelled=late, kept=late + 1, last=1)


def batch_queues(stand: Stand) -> None:
    """A broker of 5.x keeps a batch that has an id, as that of a Java client, as one record of such a topic."""
    topic = f"{stand.topic}-b"
    for name in stand.route.broker_names():
        create = CreateTopic(topic, 1, 1, 6, {"queue.type": "BatchCQ"})
        answer = stand.route.broker(name).request(frame_of(RequestCode.UPDATE_AND_CREATE_TOPIC, create))
        assert answer.code == 0, answer.remark
    messages = [
        librmq.Message(topic, str(number).encode(), tags="ab"[number % 2], keys=f"k-{number}") for number in range(5)
    ]
    frame = send_frame(SendBatch(f"{stand.topic}-p", tuple(messages), 0, _clock.now_ms(), ("127.0.0.1", 0)))
    frame.fields["i"] = encode_properties({PropertyName.UNIQUE_KEY: uuid.uuid4().hex.upper()}).decode()
    check(stand.route.broker(stand.route.broker_names()[0]).request(frame))
    batches = Stand(stand.route, topic, stand.place)
    assert batches.poll(5) == list("01234")
    stand.route.reset_group(batches.group, topic, to="begin")
    with batches.listening():
        assert sorted(batches.wait(5)) == list("01234")
    assert sorted((message.tags, message.keys) for message in batches.arrived) == sorted(
        (message.tags, message.keys) for message in messages
    )


def folder(stand: Stand) -> None:
    """The broker's directory, while the broker runs."""
    if stand.place.store is None:
        raise LeftOut("no --store")
    stand.send(*map(str, range(20)), tags="a")
    deadline, bodies = stand.deadline(), list[str]()
    while len(bodies) < 20 and _clock.monotonic() < deadline:
        with librmq.MessageStore.open(stand.place.store, read_only=True) as store:
            bodies = [message.body.decode() for message in store.topic_messages(stand.topic)]
    assert sorted(map(int, bodies)) == list(range(20))


OWN: Final[dict[str, Callable[[Stand], None]]] = {
    "send and pull": pull,
    "progress of a group": progress,
    "batch": batch,
    "tags": tags,
    "SQL": sql,
    "retry": retry,
    "orderly, with a retry": orderly,
    "delay level": delay,
    "transactions": transactions,
    "messages by key": keys,
    "dead letter": dead_letters,
    "reset of a group": reset,
    "reset of a running group": reset_running,
    "simple consumer, dead letter": received_too_often,
    "simple consumer, late receipts": late_receipt,
    "cancel of a delay": cancel,
    "topic with queues of batches": batch_queues,
    "folder of the broker": folder,
}


def run_own(scenario: str, place: Place) -> None:
    topic = place.new_name()
    with librmq.connect(place.namesrv) as route:
        route.create_topic(topic, 4)
        route.set_group(f"{topic}-g")
        OWN[scenario](Stand(route, topic, place))


@contextmanager
def cleaned(place: Place) -> Iterator[Place]:
    """Delete the topics and groups of a place at the end, those for retries and dead letters too.

    A broker of RocketMQ makes a group again when it ends a pull that it held for it, also for a client that has left.
    """

    def is_own(name: str) -> bool:
        base = name.removeprefix("%RETRY%").removeprefix("%DLQ%")
        return any(base == made or (made in base and made not in CLASSIC_NAMES) for made in place.made)

    try:
        yield place
    finally:
        if place.made and place.release is not None:
            _clock.wait(threading.Event(), HELD_S)
        with librmq.connect(place.namesrv) as route:
            for topic in filter(is_own, route.topics()):
                with suppress(librmq.RmqError):
                    route.delete_topic(topic)
            for group in filter(is_own, route.groups()):
                with suppress(librmq.RmqError):
                    route.delete_group(group, keep_progress=False)


# ---- official clients

TYPES: Final[dict[str, TopicType]] = {
    "order of a message group": "FIFO",
    "delay": "DELAY",
    "transactions": "TRANSACTION",
    "priorities": "PRIORITY",
}


def run_of_5(client: OfficialClient, script: str, scenario: str, place: Place) -> None:
    if place.proxy is None:
        raise LeftOut("no --proxy")
    topic = place.new_name()
    with librmq.connect(place.namesrv) as route:
        route.create_topic(topic, 4, message_type=TYPES.get(scenario, "NORMAL"))
        route.set_group(f"{topic}-readers", is_ordered=TYPES.get(scenario) == "FIFO")
        run_script(client, FOLDER / script, place.proxy, topic, scenario)


def run_classic(client: OfficialClient, place: Place) -> None:
    with librmq.connect(place.namesrv) as route:
        if {*route.topics(), *route.groups()} & set(CLASSIC_NAMES):
            raise LeftOut("the broker has a topic classic or a group CID-classic")
        place.made.update(CLASSIC_NAMES)
        topic, group = CLASSIC_NAMES
        route.create_topic(topic, 4)
        route.set_group(group)
        run_script(client, HERE / "classic_client.py", place.namesrv)


def run_script(client: OfficialClient, *words: object) -> None:
    with tempfile.TemporaryDirectory() as home:
        assert client.run(*words, home=Path(home)).endswith("done\n")


class Judge(NamedTuple):
    """A client and its scenarios."""

    name: str
    scenarios: tuple[str, ...]
    prepare: Callable[[Path], Any]
    run: Callable[[Any, str, Place], None]


JUDGES: Final = (
    Judge("librmq", tuple(OWN), lambda _: None, lambda _, scenario, place: run_own(scenario, place)),
    Judge(
        f"official, Python {PYTHON_VERSIONS[0]}",
        (
            *("send and receive", "tags", "order of a message group", "delay", "transactions"),
            *("priorities", "lite message, at another topic"),
        ),
        lambda cache: python_client(PYTHON_VERSIONS[0], cache),
        lambda client, scenario, place: run_of_5(client, "client_of_5.py", scenario, place),
    ),
    Judge(
        f"official, Node {NODE_VERSION}",
        ("send and receive", "tags", "order of a message group"),
        node_client,
        lambda client, scenario, place: run_of_5(client, "client_of_5.cjs", scenario, place),
    ),
    Judge(
        "official, C++ (by its Python package)",
        ("send, receive, retry",),
        classic_client,
        lambda client, _, place: run_classic(client, place),
    ),
)


# ---- the table


def outcome(scenario: str, place: Place, run: Callable[[Place], None]) -> str:
    """Return "passed", or why not."""
    try:
        if (lack := place.lacks(scenario)) is not None:
            raise LeftOut(lack)
        run(place)
    except LeftOut as reason:
        return f"left out: {reason}"
    except Exception as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return f"not passed: {words:.120}"
    return "passed"


@contextmanager
def serving(needs_proxy: bool) -> Iterator[Place]:
    """Run ``librmq serve`` on a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "librmq", "serve", f"{folder}/store", "--remoting", "0", "--format", "jsonl"]
        if needs_proxy:
            words += ["--grpc", "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                ready = json.loads(process.stdout.readline())
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield Place.ask(ready["remoting"], ready.get("grpc"), f"{folder}/store")
            finally:
                process.terminate()


def judged(judge: Judge, client: Any, scenario: str, place: Place) -> str:
    return outcome(scenario, place, partial(judge.run, client, scenario))


def rows(broker: Place, serve: Place, cache: Path, only: str = "") -> Iterator[Row]:
    """Run all scenarios, or those whose client or name contains ``only``, at both places."""
    for judge in JUDGES:
        wanted = [name for name in judge.scenarios if only in f"{judge.name}: {name}"]
        if not wanted:
            continue
        try:
            client = judge.prepare(cache)
        except pytest.skip.Exception as reason:
            yield from (Row(judge.name, name, *[f"left out: {reason.msg}"] * 2) for name in wanted)
            continue
        with ThreadPoolExecutor(2) as places:
            for name in wanted:
                yield Row(judge.name, name, *places.map(partial(judged, judge, client, name), (broker, serve)))


def main(words: list[str] | None = None) -> int:
    """Print the table; return 0 if both places agree in each row that ran at both, 2 if there is none."""
    parser = argparse.ArgumentParser("python -m tests.judged", description=__doc__)
    parser.add_argument("--namesrv", required=True, metavar="HOST:PORT", help="the broker's name server")
    parser.add_argument("--proxy", metavar="HOST:PORT", help="its gRPC proxy, for official clients of RocketMQ 5")
    parser.add_argument("--store", metavar="FOLDER", help="the broker's directory, to be read beside it")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose client or scenario has these words")
    options = parser.parse_args(words)
    cache = Path(tempfile.gettempdir()) / "librmq-judged-clients"
    cache.mkdir(exist_ok=True)
    print(f"| client | scenario | {options.namesrv} | `librmq serve` {librmq.__version__} |\n|---|---|---|---|")
    counts = Counter[str]()
    with (
        serving(options.proxy is not None) as serve,
        cleaned(Place.ask(options.namesrv, options.proxy, options.store)) as broker,
    ):
        for row in rows(broker, serve, cache, options.only):
            kinds = {row.broker.partition(":")[0], row.serve.partition(":")[0]}
            counts["left out" if "left out" in kinds else "alike" if len(kinds) == 1 else "different"] += 1
            print("| " + " | ".join(word.replace("|", "\\|") for word in row) + " |", flush=True)
    print(f"\n{counts['alike']} alike, {counts['different']} different, {counts['left out']} left out")
    return 1 if counts["different"] else 0 if counts["alike"] else 2


if __name__ == "__main__":
    sys.exit(main())
