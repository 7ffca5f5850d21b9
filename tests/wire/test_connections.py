"""The connections of a route: how they are opened, rest after a failure, and end."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import librmq
from librmq import BrokerUnreachableError
from librmq.clock import ManualClock
from librmq.errors import RmqError
from librmq.protocol import PullMessage, PullStatus
from librmq.runtime.locks import RLock, is_held_here
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remote import _connection as connection
from librmq.wire.remote._connection import Connection, Ended, EndedTogether, Requested, Transport
from librmq.wire.remote._consumer_requests import LongPulls
from librmq.wire.remote._dialing import Connections, dial_by_tcp
from librmq.wire.remote._remote_broker import RemoteBroker
from librmq.wire.remoting._frames import Frame, FrameSocket, answer_to, encode
from tests.interrupting import at_each_call
from tests.programs import in_child
from tests.wire.fake_servers import FakeServer
from tests.wire.test_connect import until


class Line:
    """A `Transport` that only opens and closes."""

    address = "a test"
    is_open = True
    is_interrupted = was_interrupted = False

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        raise NotImplementedError

    def send(self, frame: Frame, ended: Ended) -> None:
        raise NotImplementedError

    def send_later(self, requests: Sequence[tuple[Frame, Any]], ended: EndedTogether[Any]) -> None:
        raise NotImplementedError

    def send_one_way(self, frame: Frame) -> None:
        raise NotImplementedError

    def send_answer(self, frame: Frame) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_open = False


Dialled = Callable[[str], Transport]


def connections(dialled: Dialled, clock: ManualClock) -> Connections:
    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        return dialled(address)

    return Connections(dial, clock.monotonic, lambda *_: None, lambda *_: None, (1.0, 4.0))


def test_an_address_rests_for_all_clients() -> None:
    """While a host is down, its clients do not wait for a connection one after the other."""
    tried: list[str] = []

    def refuse(address: str) -> Transport:
        tried.append(address)
        raise BrokerUnreachableError(f"{address} is down")

    clock = ManualClock()
    made = connections(refuse, clock)
    for client_id in ("a", "b", "a"):
        with pytest.raises(BrokerUnreachableError, match="h:1 is down"):
            made.get("h:1", client_id)
    assert tried == ["h:1"]
    for seconds, tries in ((1, 2), (1, 2), (1, 3), (3, 3), (1, 4), (3, 4), (1, 5)):  # rests of 1, 2, 4 and 4 s
        clock.advance(seconds=seconds)
        with suppress(BrokerUnreachableError):
            made.get("h:1", f"client {seconds}")
        assert len(tried) == tries


def test_a_client_that_leaves_while_it_dials_is_closed() -> None:
    line = Line()

    def leave(address: str) -> Transport:
        made.drop("a", address)
        return line

    made = connections(leave, ManualClock())
    assert made.get("h:1", "a") is line
    assert not line.is_open


def test_no_lock_is_held_while_a_host_swallows_packets() -> None:
    """Steps of clients ask under the runner's lock. A host that accepts no connection must not stop other hosts."""
    answers, lock, line = threading.Event(), RLock(), Line()

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        if address == "lost:1":
            assert answers.wait(30)
        return line

    held = partial(is_held_here, lock)
    made = Connections(dial, ManualClock().monotonic, lambda *_: None, lambda *_: None, is_hurried=held, patience_s=0)
    with lock:
        for _ in range(3):
            with pytest.raises(BrokerUnreachableError, match="the connection is not open yet"):
                made.get("lost:1", "a")
        until(lambda: _opened(made, "h:1"))
    answers.set()
    assert made.get("lost:1", "a") is line  # without the lock it waits
    with lock:
        assert made.get("lost:1", "a") is line


def _opened(made: Connections, address: str) -> bool:
    with suppress(BrokerUnreachableError):
        return made.get(address).is_open
    return False


def test_a_hurried_caller_gets_the_error_of_its_connection() -> None:
    tried: list[str] = []

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        tried.append(address)
        raise BrokerUnreachableError(f"{address} is down")

    clock = ManualClock()
    made = Connections(
        dial, clock.monotonic, lambda *_: None, lambda *_: None, (1.0, 4.0), is_hurried=lambda: True, patience_s=30
    )
    for _ in range(2):
        with pytest.raises(BrokerUnreachableError, match="h:1 is down"):
            made.get("h:1")
    assert tried == ["h:1"]
    clock.advance(seconds=1)
    with pytest.raises(BrokerUnreachableError, match=r"h:1 is down|the connection is not open yet"):
        made.get("h:1")


def test_short_time_outs_end_a_silent_connection() -> None:
    """A network that has forgotten a connection says nothing; requests with little time notice it together."""
    with FakeServer(lambda frame: None) as server:
        opened = dial_by_tcp(None, None, 0.2, lambda host: (host,))(server.address, lambda *_: None, lambda _: None)
        for is_open in (True, False):
            with pytest.raises(BrokerUnreachableError, match="has not answered"):
                opened.request(Frame(999), 0.1)
            assert opened.is_open == is_open


@pytest.fixture
def _leaves_reading_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lapse of time repair what a caller has omitted."""
    monkeypatch.setattr(connection, "_LEFT_S", 600)


def _left_to_callers(server: FakeServer) -> Connection:
    """Return a connection whose callers read their answers themselves, as after a request without others."""
    opened = dial_by_tcp(None, None, 30, lambda host: (host,))(server.address, lambda *_: None, lambda _: None)
    assert isinstance(opened, Connection)
    while True:  # its thread reads again after a while without callers
        opened.request(Frame(999), 30)
        for _ in range(100):
            if opened.answers.is_left and not opened.answers._reading.locked():
                return opened
            threading.Event().wait(0.0001)


class Keeping:
    """Answers requests with the body ``keep`` when others with the body ``answer`` come, before these."""

    def __init__(self) -> None:
        self.kept: list[Frame] = []

    def __call__(self, frame: Frame) -> Frame | bytes | None:
        if frame.body == b"keep":
            self.kept.append(frame)
            return None
        if frame.body == b"answer":
            kept, self.kept = self.kept, []
            return b"".join(encode(answer_to(waiting)) for waiting in [*kept, frame])
        return answer_to(frame)


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_a_caller_reads_its_own_answer_until_others_wait_too() -> None:
    keeping, by = Keeping(), list[int]()
    with FakeServer(keeping) as server:
        opened = _left_to_callers(server)
        before = opened.answers._own_reads
        for _ in range(3):
            opened.request(Frame(999), 30)
        assert opened.answers._own_reads == before + 3
        reading = threading.Thread(target=opened.request, args=(Frame(999, body=b"keep"), 30))
        reading.start()
        until(opened.answers._waiting.locked)
        opened.send(Frame(999, body=b"keep"), lambda _: by.append(threading.get_ident()))
        until(lambda: len(keeping.kept) == 2)
        assert opened.request(Frame(999), 30).code == 0  # while another caller waits
        assert opened.request(Frame(999, body=b"answer"), 30).code == 0
        reading.join(30)
        assert not reading.is_alive()
        until(lambda: len(by) == 1)
        assert not opened.outstanding
        opened.close()


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_many_callers_get_their_own_answers() -> None:
    wrong: list[bytes] = []

    def ask(opened: Connection, caller: int) -> None:
        for number in range(200):
            body = b"%d %d" % (caller, number)
            if opened.request(Frame(999, body=body), 30).body != body:
                wrong.append(body)

    with FakeServer(lambda frame: answer_to(frame, body=frame.body)) as server:
        opened = _left_to_callers(server)
        callers = [threading.Thread(target=ask, args=(opened, number)) for number in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert not any(caller.is_alive() for caller in callers)
        assert not wrong
        assert not opened.outstanding
        opened.close()


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_a_caller_that_reads_obeys_its_time() -> None:
    keeping = Keeping()
    with FakeServer(keeping) as server:
        opened = _left_to_callers(server)
        with pytest.raises(BrokerUnreachableError, match=r"has not answered within 0\.01 s"):
            opened.request(Frame(999, body=b"keep"), 0.01)
        assert not opened.outstanding
        assert opened.request(Frame(999, body=b"answer"), 30).code == 0
        opened.close()


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_the_end_of_a_connection_reaches_all_callers() -> None:
    with FakeServer(Keeping()) as server:
        opened = _left_to_callers(server)
        errors: list[Exception] = []

        def ask() -> None:
            try:
                opened.request(Frame(999, body=b"keep"), 30)
            except BrokerUnreachableError as error:
                errors.append(error)

        callers = [threading.Thread(target=ask) for _ in range(3)]
        for caller in callers:
            caller.start()
        until(lambda: len(opened.outstanding) == 3)
        server.cut()
        for caller in callers:
            caller.join(30)
        assert len(errors) == 3
        assert all("has ended" in str(error) for error in errors)


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_ctrl_c_leaves_a_connection_with_a_reader() -> None:
    """It comes at each call while a caller reads its answer. The connection works on, or ends for all who wait."""
    rounds = works = 0
    with FakeServer(answer_to) as server:
        made = [_left_to_callers(server)]
        for _ in at_each_call(lambda: made[-1].request(Frame(999), 30)):
            rounds += 1
            opened = made.pop()
            has_ended = threading.Event()
            with suppress(BrokerUnreachableError):
                opened.send(Frame(999), lambda _, has_ended=has_ended: has_ended.set())  # type: ignore[misc]
                assert has_ended.wait(30)
            error: BrokerUnreachableError | None = None
            try:
                opened.request(Frame(999), 30)
            except BrokerUnreachableError as raised:
                error = raised
            works += error is None
            assert opened.is_open == (error is None)
            assert error is None or "was interrupted" in str(error)
            assert not opened._callers
            opened.close()
            made.append(_left_to_callers(server))
        made[-1].close()
    assert rounds > 40
    assert rounds / 3 < works < rounds  # most of them, since little of the time is between taking and passing on


def test_ctrl_c_while_sends_go_out_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of them may be sent."""

    def write_part(stream: FrameSocket, data: bytes) -> None:
        stream._socket.send(data[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(FrameSocket, "write_now", write_part)
    with FakeServer(answer_to) as server:
        opened = _left_to_callers(server)
        with pytest.raises(KeyboardInterrupt):
            opened.send_later([(Frame(999), None)], lambda _: None)
        with pytest.raises(BrokerUnreachableError, match="a write was interrupted"):
            opened.request(Frame(999), 30)


def test_signal_handlers_keep_away_from_what_they_interrupt() -> None:
    """They use another connection, if the one interrupted may hold its lock, or wait for ever."""
    rounds, stuck = 0, list[int]()
    with FakeServer(Keeping()) as server:
        made = [_left_to_callers(server)]

        def use() -> None:
            opened, keep, later = made[-1], Frame(999, body=b"keep"), Frame(999, body=b"keep")
            opened.send(keep, lambda _: None)
            give_up = opened.send_later([(later, None)], lambda _: None)
            assert give_up is None or give_up(later.opaque, 0.1) is not None
            opened.close()

        def handle(*_: object) -> None:
            opened = made[-1]
            if not opened.is_interrupted:
                if opened._lock.acquire(timeout=30):
                    opened._lock.release()
                else:
                    stuck.append(rounds)

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            for _ in at_each_call(use, signal.SIGUSR1):
                assert not made[-1]._callers
                rounds += 1
                made[-1] = _left_to_callers(server)
        finally:
            signal.signal(signal.SIGUSR1, before)
        made[-1].close()
    assert not stuck
    assert rounds > 40


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_an_error_of_a_listener_is_not_one_of_the_socket() -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError("from a listener")

    with FakeServer(lambda frame: encode(Frame(77)) + encode(answer_to(frame))) as server:
        opened = _left_to_callers(server)
        opened.requested = fail
        with pytest.raises(BlockingIOError, match="from a listener"):
            opened.request(Frame(999), 1)
        until(lambda: not opened.is_open)


def test_without_a_thread_for_the_rest_its_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_part(stream: FrameSocket, data: bytes) -> bool:
        stream._unsent = data[stream._socket.send(data[:9]) :]
        return False

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with FakeServer(answer_to) as server:
        opened = _left_to_callers(server)
        outcomes: list[tuple[str, Frame | RmqError]] = []
        monkeypatch.setattr(FrameSocket, "write_now", write_part)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        opened.send_later([(Frame(999), "key")], outcomes.extend)
    assert "no thread can start" in str(outcomes)
    assert not opened.is_open


@pytest.mark.usefixtures("_leaves_reading_for_long")
def test_a_caller_whose_answer_another_thread_has_read_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket of gevent would wait for the next answer, often until the heartbeat half a minute later."""
    wait, receive, late = FrameSocket.wait, FrameSocket.receive, list[bool]()

    def wait_until_read(stream: FrameSocket, timeout_s: float) -> bool:
        if wait(stream, timeout_s):
            before = opened.answers.reads
            opened.answers.is_left = False
            opened.answers.is_needed.set()
            until(lambda: opened.answers.reads > before)
            return True
        return False

    def receive_like_gevent(stream: FrameSocket, size: int, flags: int = 0) -> bytes:
        late.append(bool(flags))
        return receive(stream, size, flags)

    with FakeServer(answer_to) as server:
        opened = _left_to_callers(server)
        monkeypatch.setattr(FrameSocket, "wait", wait_until_read)
        monkeypatch.setattr(FrameSocket, "receive", receive_like_gevent)
        assert opened.request(Frame(999), 30).code == 0
        monkeypatch.undo()
        opened.close()
    assert True not in late


@pytest.mark.parametrize("is_brief", [True, False])
def test_a_socket_that_is_closed_before_a_caller_waits_for_it(is_brief: bool) -> None:
    """Another thread has closed it at the end of the connection, before the caller has an outcome."""
    ours, others = socket.socketpair()
    with others:
        stream = FrameSocket(ours)
        if is_brief:
            stream.look_briefly(0.001)
        stream.close()
        assert stream.wait(30)
        with pytest.raises(OSError, match="Bad file descriptor"):
            stream.receive(1)


def test_only_long_waits_are_left_to_the_limit_of_a_socket() -> None:
    """It is counted in ticks of the system, which are longer than the time of some sends."""

    class Noting(socket.socket):
        looks = 0

        def recv(self, size: int, flags: int = 0) -> bytes:
            self.looks += 1
            return super().recv(size, flags)

    ours, others = socket.socketpair()
    with others, Noting(fileno=ours.detach()) as noting:
        stream = FrameSocket(noting)
        stream.look_briefly(0.001)
        assert not stream.wait(0.005)
        assert noting.looks == 0
        assert not stream.wait(30)
        assert noting.looks == 1


@pytest.mark.parametrize(("timeout_s", "is_long"), [(0.003, False), (0.3, True)])
def test_a_socket_knows_how_long_its_caller_can_wait(
    timeout_s: float, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = list[float](), FrameSocket.wait

    def note(stream: FrameSocket, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(stream, timeout_s)

    with FakeServer(Keeping()) as server:
        opened = _left_to_callers(server)
        monkeypatch.setattr(FrameSocket, "wait", note)
        with pytest.raises(BrokerUnreachableError):
            opened.request(Frame(999, body=b"keep"), timeout_s)
        monkeypatch.undo()
        opened.close()
    assert waits[0] == timeout_s
    assert all((seconds >= 0.01) == is_long for seconds in waits)


def test_a_signal_handler_can_wait_for_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts a caller that waits for bytes, and so the reader's thread reads for the others."""
    monkeypatch.setattr(connection, "_LEFT_S", 1)  # `until` looks ten times
    with FakeServer(Keeping()) as server:
        opened = _left_to_callers(server)
        other = threading.Thread(target=opened.request, args=(Frame(999, body=b"answer"), 30))

        def interrupt() -> None:
            until(opened.answers._waiting.locked)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        def wait(*_: object) -> None:
            other.start()
            other.join(30)

        before = signal.signal(signal.SIGUSR1, wait)
        interrupting = threading.Thread(target=interrupt)
        try:
            interrupting.start()
            assert opened.request(Frame(999, body=b"keep"), 30).code == 0
        finally:
            interrupting.join()
            signal.signal(signal.SIGUSR1, before)
        assert not other.is_alive()
        opened.close()


class Answering(Line):
    """A line whose answers a test gives."""

    def __init__(self) -> None:
        self.asked: list[Ended] = []

    def send(self, frame: Frame, ended: Ended) -> None:
        self.asked.append(ended)


def test_a_pull_after_an_interrupted_one_gets_its_answer() -> None:
    """Ctrl-C comes at each call while a pull is sent."""
    told: list[str] = []
    request = PullMessage("c", "g", "t", 0, 0, notify=lambda: told.append("it is here"))
    made = list[tuple[Answering, LongPulls]]()

    def make() -> None:
        line = Answering()
        made.append((line, LongPulls("b", ManualClock().now_ms, lambda _: line, lambda call: call(), 3)))

    make()
    rounds = 0
    for _ in at_each_call(lambda: made[-1][1].pull(request)):
        line, pulls = made[-1]
        assert pulls.pull(request).status is PullStatus.HELD
        line.asked[-1](Frame(19))
        assert told.pop() == "it is here"
        make()
        rounds += 1
    assert rounds > 5


@pytest.mark.parametrize("code", [19, 20])
def test_pulls_that_are_answered_at_once_are_paced(code: int) -> None:
    """So that its answers, which have nothing, take no more than ten pulls a second."""
    clock = ManualClock()
    later: list[tuple[Callable[[], None], int]] = []
    sent: list[int] = []
    offsets = {"nextBeginOffset": "7", "minOffset": "0", "maxOffset": "7", "suggestWhichBrokerId": "0"}

    class Hasty(Line):
        def send(self, frame: Frame, ended: Ended) -> None:
            sent.append(clock.now_ms())
            ended(Frame(code, offsets))

    calls: list[Callable[[], None]] = []
    pulls = LongPulls(
        "b", clock.now_ms, lambda _: Hasty(), calls.append, 3, lambda call, due_ms: later.append((call, due_ms))
    )

    def pull() -> None:
        assert pulls.pull(PullMessage("c", "g", "t", 0, 7, notify=pull)).status is PullStatus.HELD

    begin_ms = clock.now_ms()
    pull()
    while clock.now_ms() < begin_ms + 10_000:
        while calls:
            calls.pop()()
        call, due_ms = later.pop()
        clock.move_to(due_ms)
        call()
    assert 90 <= len(sent) <= 120


def test_brokers_stay_when_a_name_server_has_just_started() -> None:
    with FakeServer(lambda frame: None) as server, librmq.connect(server.address) as route:
        queues = route.topic_route("orders")
        server.broker = None
        with pytest.raises(BrokerUnreachableError, match="knows no broker yet"):
            route.refresh()
        assert route.broker_names() == ("fake",)
        assert route.topic_route("orders") == queues != ()


def test_connections_end_when_a_broker_moves() -> None:
    with FakeServer(lambda frame: None) as old, FakeServer(lambda frame: None) as server:
        server.broker = old.address
        with librmq.connect(server.address) as route, librmq.Producer(route, "shop"):
            route.refresh()
            until(lambda: old.connections == 1)
            server.broker = server.address
            route.refresh()
            until(lambda: old.connections == 0)


def test_a_flood_of_requests_ends_the_connection() -> None:
    """A broker that asks faster than clients answer would fill the memory."""
    runner, line, waiting = ThreadRunner(), Line(), list[Callable[[], None]]()
    try:
        made = connections(lambda _: line, ManualClock())
        broker = RemoteBroker("b", "h:1", made, runner, waiting.append, lambda _: None, 1, {})
        frame = Frame(40, body=bytes(16 << 20)).one_way()
        for _ in range(40):
            broker.requests.requested("a", line, frame)
        assert (line.is_open, len(waiting)) == (False, 15)
        for call in waiting:
            call()
        broker.requests.requested("a", line, frame)
        assert len(waiting) == 16
    finally:
        runner.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_opens_a_connection_of_its_own() -> None:
    """A thread of the parent opens one at that moment, and does not exist in the child."""
    parent, begun, free = os.getpid(), threading.Event(), threading.Event()

    def dialled(_: str) -> Line:
        if os.getpid() == parent:
            begun.set()
            assert free.wait(60)
        return Line()

    made = connections(dialled, ManualClock())
    opening = threading.Thread(target=made.get, args=("h:1",))
    opening.start()
    assert begun.wait(60)

    def check() -> None:
        signal.alarm(60)  # ends a child that would wait forever
        assert made.get("h:1").is_open

    try:
        in_child(check)
    finally:
        free.set()
        opening.join()
    assert made.get("h:1").is_open
