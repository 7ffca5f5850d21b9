"""The same scenarios at a broker that you run and at ``librmq serve``: ``python -m tests.judged --namesrv HOST:9876``.

Clients are librmq's own and the official ones for Python, Node and C++, which are fetched from their registries once.
Those of RocketMQ 5 need the address of the broker's proxy too: ``--proxy HOST:8081``. ``--store FOLDER``, on the
broker's machine, lets librmq read its directory. The scenarios make topics and groups whose names begin with
``judged-``, a topic ``classic`` and a group ``CID-classic``, and delete them again.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import librmq
from librmq.clock import SystemClock
from librmq.errors import ReceiptError
from librmq.message.topics import TopicType
from librmq.protocol import ResponseCode
from librmq.wire.remoting._codec import frame_of
from librmq.wire.remoting._headers import CreateTopicHeader, RequestCode
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


class Place(NamedTuple):
    """Where scenarios run."""

    namesrv: str
    proxy: str | None
    store: str | None
    """The broker's directory, if it is on this machine."""


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

    def __init__(self, route: Any, topic: str, store: str | None) -> None:
        self.route = route
        self.topic = topic
        self.store = store
        self.group = f"{topic}-g"
        self.arrived: list[Any] = []
        self._changed = threading.Condition()

    def send(self, *bodies: str, **fields: Any) -> None:
        with librmq.Producer(self.route, f"{self.topic}-p") as producer:
            for body in bodies:
                producer.send(self.topic, body.encode(), **fields)

    def poll(self, count: int, group: str | None = None) -> list[str]:
        """Return the bodies of the next messages of a group."""
        bodies: list[str] = []
        deadline = _clock.monotonic() + WAIT_S
        with librmq.PullConsumer(self.route, group or self.group, consume_from=librmq.ConsumeFrom.FIRST) as consumer:
            consumer.subscribe(self.topic)
            while len(bodies) < count and _clock.monotonic() < deadline:
                bodies += [message.body.decode() for message in consumer.poll(1)]
        return bodies

    @contextmanager
    def listening(self, fails_first: str | None = None, **fields: Any) -> Iterator[None]:
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
            yield

    def wait(self, count: int) -> list[str]:
        """Return the bodies that arrived when there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, WAIT_S), self.arrived
            return [message.body.decode() for message in self.arrived]


def pull(stand: Stand) -> None:
    stand.send(*map(str, range(20)))
    assert sorted(map(int, stand.poll(20))) == list(range(20))


def progress(stand: Stand) -> None:
    stand.send("1", "2")
    assert sorted(stand.poll(2)) == ["1", "2"]
    stand.send("3")
    assert stand.poll(1) == ["3"]


def batch(stand: Stand) -> None:
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer:
        producer.send_batch([librmq.Message(stand.topic, str(number).encode()) for number in range(5)])
    assert stand.poll(5) == list("01234")


def tags(stand: Stand) -> None:
    for tag in "ab":
        stand.send(tag, tags=tag)
    with stand.listening(tags="b"):
        assert stand.wait(1) == ["b"]


def sql(stand: Stand) -> None:
    for number in range(4):
        stand.send(str(number), properties={"n": str(number)})
    with stand.listening(sql="n > 2"):
        assert stand.wait(1) == ["3"]


def retry(stand: Stand) -> None:
    with stand.listening(fails_first="bad"):
        stand.send("bad", "good")
        assert sorted(stand.wait(3)) == ["bad", "bad", "good"]
    assert stand.arrived[-1].reconsume_times == 1


def orderly(stand: Stand) -> None:
    stand.send(*"123", queue=0)
    with stand.listening(fails_first="2", orderly=True):
        assert stand.wait(4) == ["1", "2", "2", "3"]


def delay(stand: Stand) -> None:
    with stand.listening():
        stand.send("later", delay_level=2)
        stand.send("now")
        assert stand.wait(2) == ["now", "later"]


def transactions(stand: Stand) -> None:
    with librmq.TransactionProducer(
        stand.route, f"{stand.topic}-t", lambda message: librmq.TransactionState.COMMIT
    ) as producer:
        for state in (librmq.TransactionState.ROLLBACK, librmq.TransactionState.COMMIT):
            message = librmq.Message(stand.topic, state.name.encode())
            producer.send_in_transaction(message, state, execute=lambda message, arg: arg)
    assert stand.poll(1) == ["COMMIT"]


def keys(stand: Stand) -> None:
    stand.send("1", keys="k-1")
    deadline = _clock.monotonic() + WAIT_S
    while not (found := stand.route.find_by_key(stand.topic, "k-1")) and _clock.monotonic() < deadline:
        _clock.wait(threading.Event(), 0.1)  # a broker indexes a moment later
    assert [message.body for message in found] == [b"1"]


def dead_letters(stand: Stand) -> None:
    stand.route.set_group(stand.group, retry_max_times=0)
    with stand.listening(fails_first="bad"):
        stand.send("bad")
        stand.wait(1)
        deadline = _clock.monotonic() + WAIT_S
        while not (letters := list(stand.route.dead_letters(stand.group))) and _clock.monotonic() < deadline:
            _clock.wait(threading.Event(), 0.1)
    assert [letter.body for letter in letters] == [b"bad"]


def reset(stand: Stand) -> None:
    stand.send("1", "2")
    assert sorted(stand.poll(2)) == ["1", "2"]
    stand.route.reset_group(stand.group, stand.topic, to="begin")
    assert sorted(stand.poll(2)) == ["1", "2"]


def reset_running(stand: Stand) -> None:
    """The clients of a broker of 5.x learn of it by the next answer to a pull, so something is sent to each queue."""
    with stand.listening():
        for queue in range(4):
            stand.send("1", "2", queue=queue)
        stand.wait(8)
        stand.route.join(timeout=WAIT_S)
        stand.route.reset_group(stand.group, stand.topic, to="begin")
        for queue in range(4):
            stand.send("3", queue=queue)
        assert sorted(stand.wait(20)[8:]) == [*"1111", *"2222", *"3333"]
    assert stand.route.lag(stand.group, stand.topic) == 0


@contextmanager
def receiving(stand: Stand) -> Iterator[Callable[[float], Any]]:
    """Yield a function that receives one message for some seconds; `LeftOut` at a broker without POP."""
    with librmq.SimpleConsumer(stand.route, stand.group) as consumer:
        consumer.subscribe(stand.topic)

        def receive(invisible: float) -> Any:
            deadline = _clock.monotonic() + WAIT_S
            while _clock.monotonic() < deadline:
                if messages := consumer.receive(1, invisible=invisible, wait=1):
                    return consumer, messages[0]
            raise AssertionError("no message came")

        try:
            consumer.receive(1, wait=0)
        except librmq.BrokerError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise LeftOut("the broker has no POP") from error
            raise
        yield receive


def received_too_often(stand: Stand) -> None:
    stand.route.set_group(stand.group, retry_max_times=1)
    with receiving(stand) as receive:
        stand.send("bad")
        for attempt in (1, 2):
            consumer, message = receive(60)
            assert message.attempt == attempt
            consumer.extend(message, 0)
        deadline = _clock.monotonic() + WAIT_S
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
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer, stand.listening():
        waiting = producer.send(stand.topic, b"cancelled", delay=5)
        producer.send(stand.topic, b"kept", delay=5)
        try:
            assert producer.cancel(waiting).cancelled
        except librmq.BrokerError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise LeftOut("the broker has no cancel") from error
            raise
        stand.send("last", delay=5)
        assert sorted(stand.wait(2)) == ["kept", "last"]


def batch_queues(stand: Stand) -> None:
    """A broker of 5.x keeps a batch of such a topic as one record; elsewhere the attribute has no effect."""
    topic = f"{stand.topic}-b"
    for name in stand.route.broker_names():
        header = CreateTopicHeader(topic, "TBW102", 1, 1, 6, attributes="+queue.type=BatchCQ")
        answer = stand.route.broker(name).request(frame_of(RequestCode.UPDATE_AND_CREATE_TOPIC, header))
        assert answer.code == 0, answer.remark
    messages = [
        librmq.Message(topic, str(number).encode(), tags="ab"[number % 2], keys=f"k-{number}") for number in range(5)
    ]
    with librmq.Producer(stand.route, f"{stand.topic}-p") as producer:
        producer.send_batch(messages)
    batches = Stand(stand.route, topic, None)
    assert batches.poll(5) == list("01234")
    stand.route.reset_group(batches.group, topic, to="begin")
    with batches.listening(tags="b"):
        assert batches.wait(2) == ["1", "3"]
    assert [message.keys for message in batches.arrived] == [("k-1",), ("k-3",)]


def folder(stand: Stand) -> None:
    """The broker's directory, while the broker runs."""
    if stand.store is None:
        raise LeftOut("no --store")
    stand.send(*map(str, range(20)), tags="a")
    deadline, bodies = _clock.monotonic() + WAIT_S, list[str]()
    while len(bodies) < 20 and _clock.monotonic() < deadline:
        with librmq.MessageStore.open(stand.store, read_only=True) as store:
            bodies = [message.body.decode() for message in store.topic_messages(stand.topic)]
    assert sorted(map(int, bodies)) == list(range(20))


OWN: Final[dict[str, Callable[[Stand], None]]] = {
    "send and pull": pull,
    "progress of a group": progress,
    "batch": batch,
    "tags": tags,
    "SQL (a broker of 4.9 needs enablePropertyFilter)": sql,
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
    topic = f"judged-{uuid.uuid4().hex[:12]}"
    with librmq.connect(place.namesrv) as route, cleaned(route, topic):
        route.create_topic(topic, 4)
        route.set_group(f"{topic}-g")
        OWN[scenario](Stand(route, topic, place.store))


@contextmanager
def cleaned(route: Any, name: str) -> Iterator[None]:
    """Delete the topics and groups with this name in theirs, those for retries and dead letters too."""
    try:
        yield
    finally:
        for topic in [topic for topic in route.topics() if name in topic]:
            with suppress(librmq.RmqError):
                route.delete_topic(topic)
        for group in [group for group in route.groups() if name in group]:
            with suppress(librmq.RmqError):
                route.delete_group(group, keep_progress=False)


# ---- official clients

TYPES: Final[dict[str, TopicType]] = {
    "order of a message group": "FIFO",
    "delay": "DELAY",
    "transactions": "TRANSACTION",
    "priorities (a broker from 5.4 on)": "PRIORITY",
}


def run_of_5(client: OfficialClient, script: str, scenario: str, place: Place) -> None:
    if place.proxy is None:
        raise LeftOut("no --proxy")
    topic = f"judged-{uuid.uuid4().hex[:12]}"
    with librmq.connect(place.namesrv) as route, cleaned(route, topic):
        route.create_topic(topic, 4, message_type=TYPES.get(scenario, "NORMAL"))
        route.set_group(f"{topic}-readers", is_ordered=TYPES.get(scenario) == "FIFO")
        run_script(client, FOLDER / script, place.proxy, topic, scenario)


def run_classic(client: OfficialClient, place: Place) -> None:
    with librmq.connect(place.namesrv) as route:
        if "classic" in route.topics() or "CID-classic" in route.groups():
            raise LeftOut("the broker has a topic classic or a group CID-classic")
        with cleaned(route, "classic"):
            route.create_topic("classic", 4)
            route.set_group("CID-classic")
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
            *("priorities (a broker from 5.4 on)", "lite message, at another topic"),
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


def outcome(run: Callable[[], None]) -> str:
    """Return "passed", or why not."""
    try:
        run()
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
                yield Place(ready["remoting"], ready.get("grpc"), f"{folder}/store")
            finally:
                process.terminate()


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
                runs = [partial(judge.run, client, name, place) for place in (broker, serve)]
                yield Row(judge.name, name, *places.map(outcome, runs))


def main(words: list[str] | None = None) -> int:
    """Print the table; return 0 if both places agree in each row that ran at both."""
    parser = argparse.ArgumentParser("python -m tests.judged", description=__doc__)
    parser.add_argument("--namesrv", required=True, metavar="HOST:PORT", help="the broker's name server")
    parser.add_argument("--proxy", metavar="HOST:PORT", help="its gRPC proxy, for official clients of RocketMQ 5")
    parser.add_argument("--store", metavar="FOLDER", help="the broker's directory, to be read beside it")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose client or scenario has these words")
    options = parser.parse_args(words)
    cache = Path(tempfile.gettempdir()) / "librmq-judged-clients"
    cache.mkdir(exist_ok=True)
    print(f"| client | scenario | {options.namesrv} | `librmq serve` {librmq.__version__} |\n|---|---|---|---|")
    agree = True
    with serving(options.proxy is not None) as serve:
        for row in rows(Place(options.namesrv, options.proxy, options.store), serve, cache, options.only):
            outcomes = {row.broker.partition(":")[0], row.serve.partition(":")[0]} - {"left out"}
            agree &= len(outcomes) < 2
            print("| " + " | ".join(word.replace("|", "\\|") for word in row) + " |", flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
