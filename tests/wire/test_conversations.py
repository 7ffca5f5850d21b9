"""Recorded conversations with a name server and broker of 4.9.4, repeated with a served broker.

Every request is sent again, at its time by a manual clock, and the answers are compared with the recorded ones: code,
names of the header's fields, and form of the body. `DEVIATIONS` lists what differs on purpose.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple

import pytest

from librmq import Broker, BrokerConfig, ManualClock, ManualRunner, StoreConfig, TransactionConfig
from librmq.errors import MalformedError
from librmq.java import json as java_json
from librmq.message.properties import decode_properties
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._bodies import messages_of
from librmq.wire.remoting._frames import Frame, FrameReader, answer_to, encode
from librmq.wire.remoting._headers import RequestCode
from tests.budget import many
from tests.wire.conversations import Exchange, Side, exchanges, form, frame_bytes, rows

_WAIT_S: Final = 60
_PROBE: Final = 0x7FFF_FFFF
"""Number of a request that no recording has."""
_LEVELS: Final = " ".join(f"{seconds}s" for seconds in range(1, 19))
_BROKERS: Final = {
    "e_transactions": BrokerConfig(transactions=TransactionConfig(timeout_s=2, interval_s=2)),
    "l_errors": BrokerConfig(auto_create_topic=False, auto_create_group=False),
}
"""Settings of the recorded brokers, where they are not the defaults."""
_STORES: Final[Mapping[str, dict[str, Any]]] = {
    "a_producer": {"max_message_size": 2000},
    "a_producer_java": {"max_message_size": 2000},
    "d_sql_off": {"enable_property_filter": False},
    "f_from_disk": {"memory_ratio": 0},
}
PLAYED: Final = (
    *("a_producer", "a_producer_java", "b_push", "b_push_java", "c_orderly", "c_orderly_java", "d_filters"),
    *("d_sql_off", "e_transactions", "f_from_disk", "f_pull", "g_rebalance", "i_admin", "k_namesrv", "l_errors"),
    "m_info",
)
"""All recordings but ``j_acl``, because `librmq serve` has no ACL, and ``l_busy``, ``l_flush`` and ``l_slave``, whose
brokers are overloaded, have a slow disk, or have a slave."""


# ---- what differs on purpose

_SENDS: Final = ("SEND_MESSAGE", "SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE")


class Deviation(NamedTuple):
    """A difference that is meant, and the answers to which it applies."""

    reason: str
    applies: Callable[[str, Exchange, Frame], bool]
    """Called with the recording, the recorded exchange and our answer."""


def _of_steps(recording: str, *begins: str) -> Callable[[str, Exchange, Frame], bool]:
    return lambda played, exchange, answer: played == recording and exchange.step.startswith(begins)


def _codes(exchange: Exchange, answer: Frame) -> tuple[int, int]:
    assert exchange.answer is not None
    return exchange.answer.code, answer.code


def _crosses_heartbeat(recording: str, exchange: Exchange) -> bool:
    """Return whether a heartbeat was sent on the same connection at the same time."""
    return any(
        each.name == "HEART_BEAT" and each.connection == exchange.connection and abs(each.at_ms - exchange.at_ms) < 10
        for each in exchanges(recording)
    )


DEVIATIONS: Final = (
    Deviation(
        "The process that opened the broker owns its settings: a change is refused, and what the changed settings "
        "would refuse is served.",
        lambda recording, exchange, answer: (
            exchange.name == "UPDATE_BROKER_CONFIG"
            or (recording == "l_errors" and exchange.at_ms > 22_700 and exchange.name in ("PULL_MESSAGE", *_SENDS))
        ),
    ),
    Deviation(
        "Name server and broker have one port: it answers the requests of both.",
        _of_steps("l_errors", "raw: code of a name server"),
    ),
    Deviation(
        "The name server has its own broker alone, from the beginning to the end: no other one registers or leaves.",
        lambda recording, exchange, answer: (
            exchange.name in ("REGISTER_BROKER", "UNREGISTER_BROKER", "QUERY_DATA_VERSION", "UPDATE_NAMESRV_CONFIG")
            or (
                recording == "k_namesrv"
                and exchange.name == "GET_ROUTEINFO_BY_TOPIC"
                and 17 in _codes(exchange, answer)
            )
        ),
    ),
    Deviation(
        "A topic is in the routes as soon as it exists, where a name server learns of it a moment later. Two "
        "recordings lack the creation of their topics.",
        lambda recording, exchange, answer: exchange.name == "GET_ROUTEINFO_BY_TOPIC" and exchange.client == "java",
    ),
    Deviation(
        "A pull with an expression that can't be parsed gets 23; 4.9.4 passes over the error and sends all messages.",
        lambda recording, exchange, answer: exchange.name == "PULL_MESSAGE" and _codes(exchange, answer) == (0, 23),
    ),
    Deviation(
        "A heartbeat and a pull that cross: threads of 4.9.4 handle them in any order.",
        lambda recording, exchange, answer: 25 in _codes(exchange, answer) and _crosses_heartbeat(recording, exchange),
    ),
    Deviation(
        "There is no setting that refuses transactions.", _of_steps("l_errors", "transaction where they are refused")
    ),
    Deviation(
        "A consumer whose group does not exist, and is not created on demand, learns so by its heartbeat; 4.9.4 lets "
        "it in and refuses its pulls.",
        _of_steps("l_errors", "push consumer of an unknown group", "pull consumer of an unknown group"),
    ),
    Deviation(
        "A required field that is missing is named; 4.9.4 handles the request without it.",
        lambda recording, exchange, answer: (
            _codes(exchange, answer) == (0, 1) and "is missing" in (answer.remark or "")
        ),
    ),
)


# ---- the player


class _Place(NamedTuple):
    physical_offset: int
    queue_offset: int


class _Connection:
    """A recorded connection, opened to our server; it answers what the server asks as the recorded client did."""

    def __init__(self, port: int, replies: Mapping[int, Side]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
        self._socket.settimeout(None)
        self._replies = replies
        self._answers: dict[int, list[Frame]] = defaultdict(list)
        self._changed = threading.Condition()
        self._is_open = True
        self.requests: list[Frame] = []
        """What the server has asked the client."""
        self.checks: dict[str, _Place] = {}
        """The place in the server's last question about a transaction, by the message's id."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        reader = FrameReader()
        with suppress(OSError, MalformedError):
            while received := self._socket.recv(1 << 16):
                for frame in reader.feed(received):
                    self._take(frame)
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _take(self, frame: Frame) -> None:
        if frame.is_answer:
            with self._changed:
                self._answers[frame.opaque].append(frame)
                self._changed.notify_all()
            return
        self.requests.append(frame)
        if frame.code == RequestCode.CHECK_TRANSACTION_STATE:
            fields = frame.fields
            self.checks[fields["msgId"]] = _Place(int(fields["commitLogOffset"]), int(fields["tranStateTableOffset"]))
        elif not frame.is_one_way:
            reply = self._replies.get(frame.code)
            if reply is None:
                self.send(encode(answer_to(frame)))
            else:
                self.send(frame_bytes({**reply.header, "opaque": frame.opaque}, reply.body))

    def send(self, raw: bytes) -> None:
        with suppress(OSError):
            self._socket.sendall(raw)

    def answer(self, opaque: int, wait_s: float = _WAIT_S) -> Frame | None:
        """Return an answer, or None if none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers[opaque] or not self._is_open, wait_s)
            return self._answers[opaque].pop(0) if self._answers[opaque] else None

    def await_handled(self) -> None:
        """Wait until what was sent is handled: requests of a connection are, one after the other."""
        self.send(encode(Frame(RequestCode.GET_BROKER_CONFIG, opaque=_PROBE)))
        self.answer(_PROBE)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join(_WAIT_S)


class _Player:
    """Sends the requests of one recording."""

    def __init__(self, recording: str, stack: ExitStack) -> None:
        self._exchanges = list(exchanges(recording))
        first = rows(recording)[0]
        self._began_ms = first["began_ms"]
        address = next(iter(re.findall(r"127\.0\.0\.2:13\d\d\d", json.dumps(rows(recording)))), "127.0.0.2:13000")
        self._runner = ManualRunner(ManualClock(self._began_ms))
        store = StoreConfig(
            message_delay_level=_LEVELS, commitlog_file_size=4 << 20, store_host=address, **_STORES.get(recording, {})
        )
        broker = Broker.temporary(_BROKERS.get(recording), store_config=store, runner=self._runner)
        self._server = RemotingServer(stack.enter_context(broker), advertise=address)
        stack.enter_context(self._server)
        self._stack = stack
        self._connections: dict[int, _Connection] = {}
        self._held: list[Exchange] = []
        self._places: dict[_Place, _Place] = {}
        """Our places of messages, by the recorded ones with the queue offset and without."""
        self._halves: dict[str, _Place] = {}
        """Our places of half messages, by their unique ids."""

    def play(self) -> Iterator[tuple[Exchange, Frame]]:
        """Yield the recorded exchanges with our answers."""
        asked = [exchange for exchange in self._exchanges if exchange.is_from_client]
        for exchange, following in zip(asked, [*asked[1:], None], strict=True):
            yield from self._answered(self._began_ms + exchange.at_ms)
            self._advance(self._began_ms + exchange.at_ms)
            self._connection(exchange).send(self._raw(exchange))
            if exchange.is_one_way:
                self._connection(exchange).await_handled()
                self._runner.advance(0)
            elif exchange.answer is not None and exchange.answer_at_ms is not None:
                if (
                    following is not None
                    and exchange.answer_at_ms > following.at_ms
                    and exchange.name == "PULL_MESSAGE"
                ):
                    self._held.append(exchange)
                else:
                    yield from self._answer(exchange)
        yield from self._answered(1 << 62)

    def requests(self) -> Iterator[Frame]:
        """Yield what our server has asked its clients."""
        for connection in self._connections.values():
            yield from connection.requests

    def _connection(self, exchange: Exchange) -> _Connection:
        number = exchange.connection
        if number not in self._connections:
            replies = {
                each.request.code: each.answer
                for each in self._exchanges
                if each.connection == number and not each.is_from_client and each.answer is not None
            }
            self._connections[number] = made = _Connection(self._server.port, replies)
            self._stack.callback(made.close)
        return self._connections[number]

    def _answered(self, at_ms: int) -> Iterator[tuple[Exchange, Frame]]:
        """Yield the held pulls whose recorded answers came until a time."""
        for exchange in list(self._held):
            assert exchange.answer_at_ms is not None
            if self._began_ms + exchange.answer_at_ms <= at_ms:
                self._held.remove(exchange)
                self._advance(self._began_ms + exchange.answer_at_ms)
                yield from self._answer(exchange)

    def _advance(self, to_ms: int) -> None:
        self._runner.advance(max(to_ms - self._runner.now_ms(), 0))

    def _answer(self, exchange: Exchange) -> Iterator[tuple[Exchange, Frame]]:
        connection, opaque = self._connection(exchange), exchange.request.header["opaque"]
        assert exchange.answer_at_ms is not None
        was_held = exchange.name == "PULL_MESSAGE" and exchange.answer_at_ms - exchange.at_ms > 1000
        answer = connection.answer(opaque, 0.2 if was_held else _WAIT_S)
        if answer is None:  # 4.9.4 looks at held pulls every 5 s
            self._runner.advance(6_000)
            answer = connection.answer(opaque)
        assert answer is not None, f"no answer: {exchange}"
        self._note(exchange, answer)
        yield exchange, answer

    def _note(self, exchange: Exchange, answer: Frame) -> None:
        """Note where our messages are."""
        theirs = exchange.answer
        assert theirs is not None
        if exchange.name in _SENDS and theirs.fields.get("msgId") and answer.fields.get("msgId"):
            ids = zip(theirs.fields["msgId"].split(","), answer.fields["msgId"].split(","), strict=True)
            for number, (their_id, our_id) in enumerate(ids):
                place = _Place(int(our_id[16:], 16), int(answer.fields["queueOffset"]) + number)
                self._keep(_Place(int(their_id[16:], 16), int(theirs.fields["queueOffset"]) + number), place)
                properties = exchange.request.fields.get("i", exchange.request.fields.get("properties", ""))
                self._halves[decode_properties(properties).get("UNIQ_KEY", "")] = place
        elif exchange.name == "PULL_MESSAGE" and (theirs.code, answer.code, theirs.is_cut) == (0, 0, False):
            ours = {(found.topic, found.queue_id, found.queue_offset): found for found in messages_of(answer.body)}
            for found in messages_of(theirs.body):
                our = ours.get((found.topic, found.queue_id, found.queue_offset))
                if our is not None:
                    places = (_Place(each.physical_offset, each.queue_offset) for each in (found, our))
                    self._keep(*places)

    def _keep(self, theirs: _Place, ours: _Place) -> None:
        self._places[theirs] = self._places[theirs._replace(queue_offset=-1)] = ours

    def _raw(self, exchange: Exchange) -> bytes:
        """Return a request; one about the place of a message gets that of ours."""
        request = exchange.request
        if request.raw_header is not None:
            return request.raw()
        fields, header = request.fields, dict(request.header)
        if exchange.name in _OF_PLACES:
            self._move(fields)
        if fields:
            header["extFields"] = fields
        return frame_bytes(header, request.body)

    def _move(self, fields: dict[str, str]) -> None:
        """Put our places in the place of the recorded ones."""
        name = "commitLogOffset" if "commitLogOffset" in fields else "offset"
        recorded = _Place(int(fields[name]), int(fields.get("tranStateTableOffset", -1)))
        known = self._places.get(recorded._replace(queue_offset=-1), recorded)
        ours = self._places.get(recorded, known._replace(queue_offset=recorded.queue_offset))
        if fields.get("fromTransactionCheck") == "true":
            checked = [
                one.checks[fields["msgId"]] for one in self._connections.values() if fields["msgId"] in one.checks
            ]
            ours = checked[-1] if checked else self._halves[fields["msgId"]]
        fields[name] = str(ours.physical_offset)
        if recorded.queue_offset >= 0:
            fields["tranStateTableOffset"] = str(ours.queue_offset)


_OF_PLACES: Final = ("VIEW_MESSAGE_BY_ID", "CONSUMER_SEND_MSG_BACK", "END_TRANSACTION")


# ---- comparison


def form_of_body(body: bytes) -> object:
    """Return the form of a body: of its JSON, or whether it has records or text."""
    if not body:
        return "nothing"
    if body[:1] in (b"{", b"["):
        return form(java_json.loads(body))
    try:
        return "records" if messages_of(body) else "nothing"
    except MalformedError:
        return "text"


def fits(theirs: object, ours: object) -> bool:
    """Return whether two forms are equal; what is empty fits any list or table."""
    match theirs, ours:
        case (str(kind), list(their_forms)), (str(our_kind), list(our_forms)):
            return kind == our_kind and all(
                any(fits(their, our) for their in their_forms) for our in our_forms if their_forms
            )
        case dict(), dict():
            return theirs.keys() == ours.keys() and all(fits(theirs[name], ours[name]) for name in theirs)
        case (str(), list(forms)), dict():
            return not forms
        case dict(), (str(), list(forms)):
            return not forms
    return theirs == ours


def is_recorded(frame: Frame, recording: str) -> bool:
    """Return whether the recorded broker has asked a client for the same, in the same form."""
    return any(
        not differences(each.request, frame) and each.is_one_way == frame.is_one_way
        for each in exchanges(recording)
        if not each.is_from_client
    )


def differences(theirs: Side, ours: Frame) -> list[str]:
    found = []
    if theirs.code != ours.code:
        found.append(f"code {ours.code}, expected {theirs.code}: {ours.remark}; {theirs.header.get('remark')}")
    if theirs.fields.keys() != ours.fields.keys():
        found.append(f"fields {sorted(ours.fields)}, expected {sorted(theirs.fields)}")
    if not theirs.is_cut:
        their_form, our_form = form_of_body(theirs.body), form_of_body(ours.body)
        if not fits(their_form, our_form):
            found.append(f"body {our_form}, expected {their_form}")
    return found


@many
@pytest.mark.filterwarnings("ignore::librmq.filter.FilterWarning")
@pytest.mark.parametrize("recording", PLAYED)
def test_answers_are_those_of_a_broker(recording: str) -> None:
    """Codes, names of fields and forms of bodies are equal, except where `DEVIATIONS` gives a reason.

    So are the requests of the server to its clients.
    """
    found: list[str] = []
    compared = 0
    with ExitStack() as stack:
        player = _Player(recording, stack)
        for exchange, answer in player.play():
            assert exchange.answer is not None
            compared += 1
            different = differences(exchange.answer, answer)
            if different and not any(each.applies(recording, exchange, answer) for each in DEVIATIONS):
                found.append(f"{exchange.at_ms} {exchange.client} {exchange.name}, {exchange.step!r}: {different}")
        found += [f"asks a client: {frame}" for frame in player.requests() if not is_recorded(frame, recording)]
    assert compared > 10
    assert not found, "\n".join(found)


def test_all_recorded_codes_are_known() -> None:
    """Those that the server does not have are in the table."""
    unknown = {
        exchange.name
        for recording in PLAYED
        for exchange in exchanges(recording)
        if exchange.name not in RequestCode.__members__
    }
    assert unknown == {"9999", "QUERY_DATA_VERSION", "REGISTER_BROKER", "UNREGISTER_BROKER", "UPDATE_NAMESRV_CONFIG"}
