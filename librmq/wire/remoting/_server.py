"""The server: a name server and a broker on one port, with one thread per connection.

Mirrors ``NettyRemotingServer``, and ``DefaultRequestProcessor`` of the name server.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from librmq.broker import Broker
from librmq.clock import SystemClock
from librmq.errors import BrokerError, ConfigError, MalformedError, RmqError
from librmq.message.ids import Host, format_host, split_address
from librmq.message.topics import TopicPrefix, is_system_topic
from librmq.override import override
from librmq.protocol import (
    LOCAL_HOST,
    PERM_WRITE,
    ChangeSchedule,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeSchedules,
    DescribeTopics,
    Endpoint,
    GroupsBehind,
    QueueData,
    ResendLetters,
    ResponseCode,
    TakeHandOuts,
)
from librmq.runtime import critical
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire._unix_sockets import checked_credentials, has_ended, host_of_process, process_of_host
from librmq.wire.certificates import server_context
from librmq.wire.remoting._administration import ADMINISTRATIVE, AdminRequests
from librmq.wire.remoting._bodies import MOST_RECORD_BYTES, broker_row, route_body, write_body
from librmq.wire.remoting._channels import (
    Channel,
    ClientChannels,
    Handlers,
    RemotingCall,
    answer_of,
    answering,
    refused,
    served,
)
from librmq.wire.remoting._consumer_requests import ChannelReceives, ConsumerRequests, Pulls
from librmq.wire.remoting._frames import IDLE_S, SEND_S, Frame, FrameReader, close_in_child, limit_time
from librmq.wire.remoting._headers import (
    KvHeader,
    NameHeader,
    RequestCode,
    TopicHeader,
)
from librmq.wire.remoting._running_info import Rates
from librmq.wire.remoting._sends import SENDS, Replies, Sends

# ---- the name server

_MOST_VALUES: Final = 10_000
_OF_UNITS: Final = (
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
)
"""Questions about topics of units, which no broker of librmq has."""


class NameServer:
    """Routes of one broker, and a table of keys and values that lasts as long as the server. Thread-safe."""

    def __init__(self, broker: Broker, creates_retry_topics: bool) -> None:
        """See `RemotingServer` for the last argument."""
        self._broker = broker
        self._creates_retry_topics = creates_retry_topics
        self._lock = Lock()
        self._values: dict[tuple[str, str], str] = {}
        self.handlers: Handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: lambda call: _answer_topics(call, broker.topics()),
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            **dict.fromkeys(_OF_UNITS, lambda call: _answer_topics(call, ())),
            RequestCode.DELETE_TOPIC_IN_NAMESRV: lambda call: call.answer(),  # the broker's answer has deleted it
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: partial(self._permit, "wipeTopicCount"),
            RequestCode.ADD_WRITE_PERM_OF_BROKER: partial(self._permit, "addTopicCount"),
            RequestCode.GET_NAMESRV_CONFIG: self._config,
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_values,
        }

    # ---- routes

    def _route(self, call: RemotingCall) -> bytes:
        header: TopicHeader = call.header
        queues = self._broker.topic_route(header.topic)
        if not queues and self._creates_retry_topics and header.topic.startswith(TopicPrefix.RETRY):
            self._broker.call(CreateTopic(header.topic, 1, 1, unless_exists=True))
            queues = self._broker.topic_route(header.topic)
        if not queues:
            remark = f"No topic route info in name server for the topic: {header.topic}"
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, remark)
        return call.answer(body=route_body([self._broker_row(call.channel)], queues))

    def _broker_row(self, channel: Channel) -> dict[str, Any]:
        broker = self._broker
        return broker_row(broker.name, broker.cluster_name, {0: channel.broker_address})

    def _clusters(self, call: RemotingCall) -> bytes:
        broker = self._broker
        table = {broker.name: self._broker_row(call.channel)}
        clusters = {broker.cluster_name: [broker.name]}
        return call.answer(body=write_body({"brokerAddrTable": table, "clusterAddrTable": clusters}))

    # ---- topics

    def _topics_of_cluster(self, call: RemotingCall) -> bytes:
        header: NameHeader = call.header
        return _answer_topics(call, self._broker.topics() if header.name == self._broker.cluster_name else ())

    def _system_topics(self, call: RemotingCall) -> bytes:
        names = [self._broker.cluster_name, self._broker.name, *filter(is_system_topic, self._broker.topics())]
        return call.answer(body=write_body({"brokerAddr": call.channel.broker_address, "topicList": names}))

    def _permit(self, count_name: str, call: RemotingCall) -> bytes:
        """Allow or forbid writes to all user topics; answer with their number."""
        header: NameHeader = call.header
        is_here, changed = header.name == self._broker.name, 0
        for topic, data in self._broker.call(DescribeTopics()).items() if is_here else ():
            is_writable = call.frame.code == RequestCode.ADD_WRITE_PERM_OF_BROKER
            permission = data.permission | PERM_WRITE if is_writable else data.permission & ~PERM_WRITE
            changed += self._set_permission(topic, data, permission)
        return call.answer_fields({count_name: changed})

    def _set_permission(self, topic: str, data: QueueData, permission: int) -> bool:
        if permission == data.permission:
            return True
        try:
            self._broker.call(CreateTopic(topic, data.read_queues, data.write_queues, permission))
        except RmqError:  # the broker's own
            return False
        return True

    # ---- values

    def _config(self, call: RemotingCall) -> bytes:
        return call.answer(body=f"listenPort={call.channel.own[1]}\n".encode())

    def _put_value(self, call: RemotingCall) -> bytes:
        header: KvHeader = call.header
        with self._lock:
            if len(self._values) >= _MOST_VALUES and (header.namespace, header.key) not in self._values:
                raise BrokerError(ResponseCode.SYSTEM_ERROR, f"there are {_MOST_VALUES:,} values already")
            self._values[header.namespace, header.key] = header.value
        return call.answer()

    def _get_value(self, call: RemotingCall) -> bytes:
        header: KvHeader = call.header
        value = self._values.get((header.namespace, header.key))
        if value is None:
            raise BrokerError(
                ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace} Key: {header.key}"
            )
        return call.answer_fields({"value": value})

    def _delete_value(self, call: RemotingCall) -> bytes:
        header: KvHeader = call.header
        with self._lock:
            self._values.pop((header.namespace, header.key), None)
        return call.answer()

    def _list_values(self, call: RemotingCall) -> bytes:
        header: KvHeader = call.header
        with self._lock:
            values = {key: value for (namespace, key), value in self._values.items() if namespace == header.namespace}
        if not values:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace}")
        return call.answer(body=write_body({"table": values}))


def _answer_topics(call: RemotingCall, topics: Iterable[str]) -> bytes:
    return call.answer(body=write_body({"topicList": list(topics)}))


# ---- budgets of all connections together

CONNECTIONS: Final = 1_000
"""Connections of one server."""
HELD_BYTES: Final = 256 << 20
"""Bytes of frames that are incomplete or being answered, over all connections."""
FRAME_SECONDS: Final = 60
"""Seconds from the first byte of a frame to its last."""
_WARNING_S: Final = 60
"""Between two warnings of clients that made room for others."""


@dataclass(slots=True)
class _Share:
    number: int
    """Connections are numbered in the order in which they come."""
    begin_ms: int
    """When it came."""
    held: int = 0
    """Bytes of frames that are incomplete or being answered."""
    has_asked: bool = False
    """Whether a whole frame has come."""
    is_ending: bool = False
    """Whether it was closed to make room for others."""


class Budgets:
    """The shares of all connections of one server. Thread-safe.

    A connection beyond a limit does not stop the others. Room is made at the expense of the address with the most,
    where addresses differ, and there of the connection that holds the most bytes, or that has never asked anything.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._begin_ms = SystemClock().now_ms()
        self._shares: dict[Channel, _Share] = {}
        self._numbers = itertools.count()
        self._held = 0
        self._ending = 0

    def add_connection(self, channel: Channel) -> Channel | None:
        """Add a connection; return the one to close for it, which is ``channel`` if no other has to make room."""
        with self._lock:
            self._shares[channel] = _Share(next(self._numbers), SystemClock().now_ms())
            if len(self._shares) - self._ending <= CONNECTIONS:
                return None
            counts = Counter(other.peer[0] for other, share in self._shares.items() if not share.is_ending)
            own_count = counts[channel.peer[0]]

            def rank(item: tuple[Channel, _Share]) -> tuple[int, bool, int]:
                other, share = item
                return counts[other.peer[0]], not share.has_asked, share.number if share.has_asked else -share.number

            others = [
                (other, share)
                for other, share in self._shares.items()
                if other is not channel
                and not share.is_ending
                and (not share.has_asked or counts[other.peer[0]] > own_count)
            ]
            excess = max(others, key=rank)[0] if others else channel
            self._end_share(excess)
            return excess

    def set_held(self, channel: Channel, held: int, *, has_asked: bool) -> Channel | None:
        """Set the bytes that a connection holds; return the connection to close because of them."""
        with self._lock:
            share = self._shares.get(channel)
            if share is None or share.is_ending:
                return None
            share.has_asked |= has_asked
            self._held += held - share.held
            share.held = held
            if self._held <= HELD_BYTES:
                return None
            sums: Counter[str] = Counter()
            for other, its in self._shares.items():
                sums[other.peer[0]] += its.held
            largest = max(self._shares, key=lambda other: (sums[other.peer[0]], self._shares[other].held))
            self._end_share(largest)
            return largest

    def remove_connection(self, channel: Channel) -> None:
        with self._lock:
            self._end_share(channel)
            self._ending -= channel in self._shares
            self._shares.pop(channel, None)

    def channels(self) -> list[Channel]:
        with self._lock:
            return list(self._shares)

    def list_connections(self, call: RemotingCall) -> bytes:
        """Answer with the host of each connection, and when it came."""
        with self._lock:
            rows = [{"host": channel.peer[0], "beginMs": share.begin_ms} for channel, share in self._shares.items()]
        return call.answer(body=write_body({"beginMs": self._begin_ms, "connections": rows}))

    def _end_share(self, channel: Channel) -> None:
        share = self._shares.get(channel)
        if share is not None and not share.is_ending:
            share.is_ending = True
            self._ending += 1
            self._held -= share.held
            share.held = 0


# ---- answers to frames that came together

_ANSWERED: Final = 1 << 20
"""Bytes of answers that are collected to be sent together."""
_SENDS: Final = 16
"""Sends that are stored and answered together where none of them waits for the device or a replica."""


class FrameAnswers:
    """The answers of one server. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        sessions: ClientChannels,
        pulls: Pulls,
        receives: ChannelReceives,
        rates: Rates,
        *,
        creates_retry_topics: bool = False,
        allows_admin: bool = False,
        others: Handlers = MappingProxyType({}),
    ) -> None:
        """See `RemotingServer` for two arguments; ``others`` answer more requests, or answer them otherwise."""
        self._allows_admin = allows_admin
        waits = broker.store.config.durability == "sync" or broker.config.replication == "sync"
        self._most_sends = sys.maxsize if waits else _SENDS
        self._sends = Sends(broker, rates)
        parts: list[Any] = [
            NameServer(broker, creates_retry_topics),
            self._sends,
            Replies(broker, sessions, self._sends),
            ConsumerRequests(broker, sessions, pulls, receives, rates),
            AdminRequests(broker, sessions, rates),
        ]
        self._handlers = answering([*(part.handlers for part in parts), others])

    def write(self, channel: Channel, frames: list[Frame]) -> None:
        """Answer frames that came together, by writing to their channel."""
        answers: list[bytes] = []
        size = 0
        for is_send, together in self._parts(frames):
            answered = (
                self._sends.send_all(channel, together)
                if is_send
                else map(partial(self._answer_frame, channel), together)
            )
            for frame, answer in answered:
                if answer is not None and not frame.is_one_way:
                    answers.append(answer)
                    size += len(answer)
                # Small requests may have large answers; and the client continues while the next sends are stored.
                if size > _ANSWERED or (is_send and len(answers) >= self._most_sends):
                    channel.write(b"".join(answers))
                    answers, size = [], 0
        if answers:
            channel.write(b"".join(answers))

    def _parts(self, frames: list[Frame]) -> Iterator[tuple[bool, list[Frame]]]:
        """Yield runs of frames that are answered together, each with whether they are sends."""
        for is_send, run in itertools.groupby(frames, lambda frame: frame.code in SENDS and not frame.is_answer):
            while together := list(itertools.islice(run, self._most_sends if is_send else None)):
                yield is_send, together

    def _answer_frame(self, channel: Channel, frame: Frame) -> tuple[Frame, bytes | None]:
        """Return a frame and the bytes of its answer; None if no answer is expected or if it comes later."""
        if frame.is_answer:
            channel.accept_answer(frame)
            return frame, None
        if frame.code in ADMINISTRATIVE and not self._allows_admin and not _is_local(channel.peer[0]):
            error = BrokerError(
                ResponseCode.NO_PERMISSION, "administration from another machine is off: librmq serve --admin"
            )
            return frame, refused(channel, frame, error)
        return frame, answer_of(self._handlers, channel, frame)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_log = EventLog("librmq.wire")

_RECEIVED: Final = 256 << 10
_COUNTED: Final = 64 << 10
"""Bytes from which on a connection counts in what all of them hold."""
_REST_S: Final = 0.1


class RemotingServer(Closing):
    """Serves one broker to clients of RocketMQ 4.x, ``mqadmin`` and the dashboard. Thread-safe.

    Mirrors ``NettyRemotingServer``.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        listening: socket.socket | int = 0,
        advertise: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
        creates_retry_topics: bool = False,
        allows_admin: bool = False,
        changed: Callable[[str, str, bool], None] | None = None,
        endpoints: Callable[[str], Endpoint] | None = None,
    ) -> None:
        """Start listening and answering.

        Args:
            broker: The broker to serve. Close the server before it. Clients also connect to its ``store_host``: open
                the store with the server's address, as ``librmq serve`` does by `listen`.
            listening: A socket that `listen` or `librmq.wire._unix_sockets.listen_at` has created, or a port on the
                loopback address; 0 takes a free one, which `port` names.
            advertise: ``host:port`` for routes. None uses the address that each client has connected to.
            tls: Certificate chain and private key, in PEM; None serves plain text.
            creates_retry_topics: Whether requesting the route of a group's retry topic creates the topic. Clients ask
                before the heartbeat that creates it, and again up to 30 s later: a test has the first retries earlier.
            allows_admin: Whether clients on other machines may change topics, groups and progress.
            changed: ``changed(client_id, group, is_connected)`` is called as clients come and go; a producer's group is
                empty.
            endpoints: Returns what answers the requests of a connection, by the client's ``host:port``; by default the
                broker. A wrapper can watch or fail them. Then held pulls end by `release_pulls` alone.

        Raises:
            ConfigError: The port is taken, or an argument is invalid.
        """
        if not isinstance(broker, Broker):
            raise ConfigError(f"RemotingServer: expected a Broker, found {broker!r:.80}")
        self._is_local = not isinstance(listening, int) and listening.family not in (socket.AF_INET, socket.AF_INET6)
        if advertise is not None and not self._is_local:
            split_address("advertise", advertise)
        max_size = broker.store.config.max_message_size
        if max_size > MOST_RECORD_BYTES and not self._is_local:
            raise ConfigError(
                f"max_message_size: expected at most {MOST_RECORD_BYTES:,} where a store is served by remoting, found "
                f"{max_size:,}: no frame holds more. Open the store with less (docs/largebody.md)"
            )
        self._advertise = advertise
        self._tls = None if tls is None else server_context(*tls)
        self._listening = listen(port=listening) if isinstance(listening, int) else listening
        close_in_child(self._listening)
        address = self._listening.getsockname()
        self.host: str = str(address) if self._is_local else address[0]
        self.port: int = 0 if self._is_local else address[1]
        self._sessions = ClientChannels(broker, changed or (lambda *_: None))
        rates = Rates()
        self._pulls = Pulls(broker, rates, ends_holds=endpoints is None)
        self._receives = ChannelReceives(broker)
        self._endpoints = endpoints or (lambda _: broker)
        self._lock = Lock()
        self._budgets = Budgets()
        self._answers = FrameAnswers(
            broker,
            self._sessions,
            self._pulls,
            self._receives,
            rates,
            creates_retry_topics=creates_retry_topics,
            allows_admin=allows_admin,
            others=self._of_processes(broker) if self._is_local else {},
        )
        self.refused: int = 0
        """Connections that were closed because they sent no valid frames, or used more than their share."""
        self._accepted = 0
        self._next_warning_s = 0.0
        self._is_open = self._is_accepting = True
        self._has_ended = False
        self._acceptor = threading.Thread(target=self._accept, name="librmq remoting", daemon=True)
        self._acceptor.start()
        _log.info("serving %(broker)s by remoting on %(address)s", broker=broker.name, address=self.address)

    def _of_processes(self, broker: Broker) -> Handlers:
        """Answer processes that share the broker: changes of its tables raise its own errors, not those of 4.x."""
        tables = CreateTopic, DeleteTopic, DeleteGroup, ChangeSchedule, DescribeSchedules
        changes = served(broker.call, *tables, ResendLetters, TakeHandOuts)
        return {
            RequestCode.LIST_CONNECTIONS: self._budgets.list_connections,
            RequestCode.GROUPS_BEHIND: partial(_behind, broker),
            **changes,
        }

    @property
    def address(self) -> str:
        """``host:port`` for clients, or the file of a local socket."""
        return self.host if self._is_local else format_host((self.host, self.port))

    @property
    def clients(self) -> int:
        """Number of clients that have sent a heartbeat and not left."""
        return len(self._sessions)

    @property
    def resets_by_pull(self) -> bool:
        """Whether clients learn of a reset by the next answer to a pull, as at brokers of RocketMQ 5.

        False unless it is set: a group's clients get a request that names their new offsets, as from brokers of 4.x.
        """
        return self._pulls.resets.is_on

    @resets_by_pull.setter
    def resets_by_pull(self, is_on: bool) -> None:
        self._pulls.resets.is_on = is_on

    def release_pulls(self, queue: tuple[str, str, int] | None = None) -> None:
        """Answer held pulls now, of all queues or one, so that clients ask again and report their progress.

        ``queue`` is a group, a topic and a queue id.
        """
        self._pulls.answer_held(queue)

    def drain(self, timeout: float = 1) -> None:
        """Accept no connections and no further requests, and answer those that have come. Call `close` then."""
        self._end_accepting()
        self._join_threads([self._acceptor], timeout)  # so that each connection that has come has its thread
        channels = self._budgets.channels()
        for channel in channels:
            channel.stream.end_reading()
        self._join_threads([channel.reader for channel in channels if channel.reader is not None], timeout)

    @override
    def close(self, timeout: float = 5) -> bool:
        """Stop answering requests, and end all connections. A second call completes one that was interrupted.

        Returns:
            Whether all requests have ended within ``timeout`` seconds. Others are abandoned.
        """
        if self._has_ended:
            return True
        with critical, self._lock:
            self._is_open = False
            channels = self._budgets.channels()
        self._end_accepting()
        self._listening.close()
        for channel in channels:
            channel.close()
        threads = [self._acceptor, *(channel.reader for channel in channels if channel.reader is not None)]
        has_ended = self._join_threads(threads, timeout)
        self._has_ended = True
        if not has_ended:
            _log.warning("requests by remoting on %(address)s did not end, and are abandoned", address=self.address)
        return has_ended

    def _end_accepting(self) -> None:
        self._is_accepting = False  # first, because the acceptor reads it at the error that the shutdown causes
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _join_threads(threads: Iterable[threading.Thread], timeout: float) -> bool:
        """Wait for other threads' ends; return whether all have ended in time."""
        clock = SystemClock()
        deadline = clock.monotonic() + timeout
        # One that is about to start finds its connection ended.
        others = [thread for thread in threads if thread.ident is not None and thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - clock.monotonic()))
        return not any(thread.is_alive() for thread in others)

    @override
    def __repr__(self) -> str:
        return f"<RemotingServer {self.address}{'' if self._is_open else ', closed'}>"

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                connected, peer = self._listening.accept()
            except OSError as error:
                if not self._is_accepting or self._listening.fileno() < 0:
                    return
                _log.debug("a connection from %(client)s was lost: %(error)s", client="a client", error=error)
                SystemClock().wait(threading.Event(), _REST_S)  # no free descriptor, for example
                continue
            try:
                self._begin_connection(connected, self._peer_of(connected, peer))
            except (OSError, RuntimeError) as error:  # the connection has already ended, or no thread is free
                connected.close()
                _log.debug("a connection from %(client)s was lost: %(error)s", client="a client", error=error)

    def _peer_of(self, connected: socket.socket, address: Any) -> Host:  # noqa: ANN401 (of any family)
        """Return the client's address, by which `Budgets` tells clients apart."""
        if not self._is_local:
            return _host(address)
        self._accepted = self._accepted % 0xFFFF + 1
        return host_of_process(checked_credentials(connected).process), self._accepted

    def _begin_connection(self, connected: socket.socket, peer: Host) -> None:
        own_host = LOCAL_HOST
        if not self._is_local:  # the end of a process of this machine never goes unnoticed, however idle it was
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_time(connected, socket.SO_RCVTIMEO, IDLE_S)
            own_host = _host(connected.getsockname())
        limit_time(connected, socket.SO_SNDTIMEO, SEND_S)
        endpoint = self._endpoints(format_host(peer))
        channel = Channel(connected, peer, own_host, endpoint, self._advertise)
        with self._lock:
            if not self._is_open:
                connected.close()
                return
            excess = self._budgets.add_connection(channel)
        if excess is channel:
            self._budgets.remove_connection(channel)
            self.refused += 1
            _log.debug(
                "client %(client)s: refused, because %(count)d clients are connected", client=peer[0], count=CONNECTIONS
            )
            connected.close()
            return
        if excess is not None:
            self._close_for_others(excess, "another client needs its place")
        channel.reader = threading.Thread(
            target=self._serve, args=(channel,), name=f"librmq {format_host(peer)}", daemon=True
        )
        try:
            channel.reader.start()
        except RuntimeError:
            self._budgets.remove_connection(channel)
            raise

    def _serve(self, channel: Channel) -> None:
        """Answer the requests of one connection until it ends."""
        reader = FrameReader()
        clock = SystemClock()
        deadline: float | None = None
        has_asked = False
        try:
            if self._tls is not None:
                channel.begin_tls(self._tls)
            while channel.is_open and (received := channel.stream.receive(_RECEIVED)):
                held = reader.held + len(received)
                if held > _COUNTED:
                    self._count(channel, held, has_asked=has_asked)
                frames: list[Frame] = []
                try:
                    frames += reader.feed(received)
                finally:  # what came before rubbish is answered
                    if frames and not has_asked:
                        has_asked = True
                        # before a client can act on its first answer
                        self._count(channel, held if held > _COUNTED else 0, has_asked=True)
                    self._answers.write(channel, frames)
                if held > _COUNTED:
                    self._count(channel, reader.held, has_asked=has_asked)
                if not reader.held:
                    deadline = None
                elif deadline is None or frames:
                    deadline = clock.monotonic() + FRAME_SECONDS
                elif clock.monotonic() >= deadline:
                    raise MalformedError(f"a frame that was not complete after {FRAME_SECONDS} s")
        except MalformedError as error:
            self.refused += 1
            _log.debug(
                "client %(client)s: closed, since it brings no frames: %(error)s", client=channel.peer[0], error=error
            )
        except OSError as error:
            _log.debug("client %(client)s: its connection has ended: %(error)s", client=channel.peer[0], error=error)
        finally:
            channel.close()
            self._budgets.remove_connection(channel)
            self._pulls.drop_pulls(channel)
            self._receives.drop_receives(channel)
            can_end = self._is_open and self._is_local and bool(channel.client_ids)
            self._sessions.closed(channel, has_ended=can_end and has_ended(process_of_host(channel.peer[0])))
            channel.close_socket()

    def _count(self, channel: Channel, held: int, *, has_asked: bool) -> None:
        excess = self._budgets.set_held(channel, held, has_asked=has_asked)
        if excess is not None:
            self._close_for_others(
                excess, "its unfinished frames are the largest, and all clients together hold too much"
            )

    def _close_for_others(self, channel: Channel, reason: str) -> None:
        self.refused += 1
        channel.close()
        now_s = SystemClock().monotonic()
        if now_s < self._next_warning_s:  # anybody could fill the log by connecting
            _log.debug("client %(client)s: closed too, because %(reason)s", client=channel.peer[0], reason=reason)
            return
        self._next_warning_s = now_s + _WARNING_S
        _log.warning("client %(client)s: closed, because %(reason)s", client=channel.peer[0], reason=reason)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a listening socket, so that its port is known before the store is opened.

    The host ``::`` listens on all addresses of IPv6, and of IPv4 where the system can do both on one port.

    Raises:
        ConfigError: The port is taken, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on {format_host((host, port))}: {error}") from error


def _host(address: Any) -> Host:  # noqa: ANN401
    """Return the host of a socket's address; one of IPv4 is not shown as one of IPv6."""
    host = str(address[0])
    return (host[7:] if host.startswith("::ffff:") and "." in host else host), int(address[1])


def _behind(broker: Broker, call: RemotingCall) -> bytes:
    behind = broker.call(GroupsBehind())
    return call.answer(body=write_body({"behind": list(behind)}))
