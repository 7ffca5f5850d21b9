"""A store that several processes of one machine and user share, with no server to run.

The first process owns the store. It answers the others by the protocol of 4.x (`RemotingServer`) through a Unix domain
socket, and they are its clients like those of `librmq.connect` (`RemoteRoute`). When the owner ends, the next process
that gets the lock opens the store, and is the owner.

::

    librmq/share/           of the store, 0700
        lock                held by the owner, from before it opens the store to its end
        owner               its socket, 0600
        place               where the path of a socket is too long: the device and inode of the store's folder, and the
                            path of the socket, in the temporary directory; a copy of the store ignores it

    looks for an owner ── connects ──> peer ── the connection ends ──> looks for an owner
              └────────── takes the locks, recovers ──> owner

A command finds the owner by `librmq.wire.share_links.connect_to_owner`, a route to it that takes nothing over;
`librmq.wire._unix_sockets.owner_socket` is the path of the socket.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, cast

from librmq.broker import AdministeredRoute, Broker, BrokerConfig
from librmq.broker.config import Promises, check_settings
from librmq.clock import SystemClock
from librmq.config import StoreConfig, to_seconds
from librmq.errors import (
    BrokerUnreachableError,
    ClientStateError,
    ConfigError,
    LostAnswerError,
    NoRouteError,
    RequestNotSentError,
    RmqError,
    StoreLockedError,
)
from librmq.files import DiskFiles
from librmq.files.interface import SystemCall, fixed_path
from librmq.files.regular import user_name
from librmq.message import StoredMessage
from librmq.metrics import Metrics
from librmq.override import override
from librmq.protocol import (
    CancelReceive,
    ChannelClosed,
    Endpoint,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    QueueData,
    Request,
    ResendLetters,
    Route,
    SendBack,
    SendBatch,
    SendLater,
    SendMessage,
    SendReply,
    Unregister,
    Watchers,
)
from librmq.runtime import StateLog, ThreadRunner, calls_later, critical
from librmq.runtime.closing import opened_in_thread
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Inherited, Lock, is_held_here
from librmq.store import MessageStore
from librmq.store.format.directory import check_kind as check_store
from librmq.store.peer_appends import PeerAppender
from librmq.wire._peer_sends import appends_path
from librmq.wire._unix_sockets import is_stopped, make_share_folder, network_file_system, owner_socket, share_folder
from librmq.wire.remote._client_requests import join, leave
from librmq.wire.remote._connection import as_caller
from librmq.wire.share_links import OwnedStore, SharedEndpoint, StoreOwner, StorePeer, connect_to_owner

if TYPE_CHECKING:
    from librmq.diagnosis import StoreView

R = TypeVar("R")
T = TypeVar("T")
_log = EventLog("librmq.wire")

_AGAIN_S: Final = 0.02
"""Between two looks for an owner."""
_RELEASED_S: Final = 0.5
"""The locks of a process that ends are released within this time."""
_ENDS_S: Final = 1.0
"""Connections of a process that ends are closed within this time, one after the other."""
_MEMBERS_S: Final = 1.0
"""The clients of other processes register with a new owner in this time."""
_FAILED_S: Final = 1.0
"""Between two tries to open a store that can't be opened."""


_STORES: Final = frozenset((SendMessage, SendBatch, SendReply, SendBack, ForwardToDeadLetters, ResendLetters))
"""Requests that an owner may have carried out when it ended, so that only their caller can repeat them."""
_APPENDS: Final = _STORES | {EndTransaction}
"""Requests after which this process may append to the same queues by itself."""


def _check_place(path: str, files: DiskFiles) -> None:
    """Refuse a store that can't be shared, before anything is written.

    Raises:
        ConfigError: The system has no local sockets, or the folder is on another machine.
        NotAStoreError: The folder holds something else.
        CorruptionError: A folder of the store is a link.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "librmq.share: not for Windows yet, because it needs Unix domain sockets with the id of the process at the "
            "other end: let one process serve the store by RemotingServer, and the others use librmq.connect"
        )
    kind = network_file_system(path)
    if kind is not None:
        raise ConfigError(
            f"{path}: on the network file system {kind}, where processes of several machines could each own it: share "
            "a local folder, or run a RocketMQ broker and use librmq.connect"
        )
    check_store(path, files, writable=True)
    _check_owner(path)


def _check_owner(path: str) -> None:
    """Refuse a store of another user, whose processes could neither reach this one nor take the store over."""
    for name in (os.path.relpath(share_folder(path), path), "commitlog"):
        place = os.path.join(path, name)
        with SystemCall("look at", place), suppress(FileNotFoundError):
            user = os.stat(place).st_uid
            if user != os.geteuid():
                raise ConfigError(
                    f"{path}: {name} belongs to user {user_name(user)}, and this process to {user_name(os.geteuid())}: "
                    "only processes of one user share a store; run this one as that user, or let it use librmq.connect "
                    "to a server"
                )


# ---- the broker of all processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What a process opens the store with when it becomes the owner, and how long it waits for others."""

    config: BrokerConfig | None
    name: str
    cluster_name: str
    store_config: StoreConfig | None
    metrics: Metrics | None
    timeout_s: float
    take_over_stopped_s: float | None
    changes: bool
    files: DiskFiles

    @property
    def promises(self) -> Promises:
        """What this process names of the store's promises."""
        return Promises(self.store_config or StoreConfig(), self.config or BrokerConfig())


class SharedBroker(AdministeredRoute):
    """A broker of all processes that share its store: an `Endpoint` and a `Route`, like a `Broker`. Thread-safe.

    Made by `librmq.share`. Close it after its producers and consumers, or use it as a context manager. A forked child
    connects again; producers that the parent made can be used in it, consumers stay with the parent.
    """

    def __init__(self, path: str, settings: _Settings) -> None:
        """Share the store in a folder; see `librmq.share`."""
        self.path = path
        """The store's folder."""
        self.runner: ThreadRunner = ThreadRunner()
        """Runs the work of this process."""
        self._settings = settings
        self._name = settings.name
        self._lock = Lock()
        self.link: StoreOwner | StorePeer | None = None
        self._left: StoreOwner | StorePeer | None = None  # the link that `close` ends
        self._is_closed = False
        self._callers: set[int] = set()  # threads within a call
        self._ending = Lock()  # held by the thread that closes the share
        self._closer: int | None = None
        self._settled = Event()
        self._closing = Event()
        self._watchers = Watchers()
        self._thread: threading.Thread | None = None
        self._beats: dict[str, Heartbeat] = {}  # heartbeats of clients that wait for an owner
        self._topics: dict[str, tuple[QueueData, ...]] = {}  # as the last owner had them
        self._was_peer = False
        self._error: RmqError = BrokerUnreachableError("this process is a forked child")
        self._states = StateLog(_log, f"share {path}")
        self._absent = SharedEndpoint(self._call_next)
        _shared.add(self)

    @property
    def name(self) -> str:
        """The broker's name in routes, which the first owner has given."""
        return self._name

    @property
    def owner(self) -> int | None:
        """The process that owns the store; None while the next one takes over."""
        link = self.link
        return None if link is None else os.getpid() if isinstance(link, StoreOwner) else link.process

    @property
    def is_owner(self) -> bool:
        """Whether this process owns the store."""
        return isinstance(self.link, StoreOwner)

    @contextmanager
    def store_view(self) -> Iterator[StoreView]:
        """View the store, with the progress and the instances that its owner knows, as `librmq.diagnosis` does.

        Raises:
            BrokerUnreachableError: The owner does not answer.
        """
        from librmq.diagnosis import StoreView

        link = self.link
        if isinstance(link, StoreOwner):
            broker = link.route
            yield StoreView(broker.store, "this process", broker=broker, now_ms=broker.runner.now_ms(), route=self)
            return
        with ExitStack() as opened:
            owner = OwnedStore(self.path, opened.enter_context(connect_to_owner(self.path)), opened)
            yield opened.enter_context(StoreView.open(self.path, tables=owner.tables, route=owner))

    @override
    def __repr__(self) -> str:
        state = "closed" if self._closing.is_set() else f"owner: {self.owner}"
        return f"<SharedBroker {self._name!r} in {self.path!r}, {state}>"

    @override
    def __reduce__(self) -> str:
        raise TypeError(f"{self!r} can't be pickled: call librmq.share({self.path!r}) in the other process")

    # ---- looking for an owner, and becoming it

    def attach(self, wait_s: float) -> None:
        """Look for an owner, or become it, and follow what happens to it.

        Raises:
            StoreLockedError: A process that does not share has the store open for writing.
            BrokerUnreachableError: The owner does not answer in time.
            StoreError: The store can't be opened.
        """
        clock = SystemClock()
        begin = clock.monotonic()
        locked_s: float | None = None
        while (error := self._try_to_join(lambda: clock.monotonic() - begin >= wait_s)) is not None:
            now = clock.monotonic()
            if isinstance(error, StoreLockedError):  # an owner that was killed can keep it for a moment
                locked_s = now if locked_s is None else locked_s
                end = locked_s + _RELEASED_S
            else:
                locked_s, end = None, begin + (wait_s if isinstance(error, BrokerUnreachableError) else 0.0)
            if now >= end:
                raise error
            clock.wait(self._closing, _AGAIN_S)
        self._begin_watching()

    def _try_to_join(self, gives_up: Callable[[], bool]) -> RmqError | None:
        """Connect to the owner, or become it; return the error if there is none now."""
        settings = self._settings
        link: StoreOwner | StorePeer
        try:
            link = StorePeer(self.path, settings.timeout_s, self.runner, settings.take_over_stopped_s, gives_up)
            self._check_promises(link)
        except BrokerUnreachableError as unreachable:
            try:
                link = self._own(unreachable)
            except RmqError as error:
                self._error = error
                return error
        try:
            self._settle(link)
        except BaseException:
            with self._lock:
                if self.link is link:
                    self.link = None
                    self._settled.clear()
            link.close()
            raise
        return None

    def _check_promises(self, link: StorePeer) -> None:
        """Refuse to join a store whose promises are others than this process names.

        Raises:
            ConfigError: The error lists the differences.
        """
        if self._was_peer or self._thread is not None:  # it has joined
            return
        try:
            recorded = Promises.read(self.path, self._settings.files)
            recorded.check_peer(self.path, self._settings.promises, self._settings.files, link.process)
        except BaseException:
            link.close()
            raise

    def _promises(self) -> Promises:
        """Return what the store records from now on, at the opening by an owner.

        Raises:
            ConfigError: This process names other settings, and does not say that it changes them.
        """
        recorded, mine = Promises.read(self.path, self._settings.files), self._settings.promises
        # A process that has joined once has agreed to what is recorded, so as a later owner it takes that over its own
        # settings: promises to senders outlive the process that made them.
        if self._was_peer or self._thread is not None:
            return recorded.over(mine)
        if not self._settings.changes:
            recorded.check_shared(self.path, mine)
        return mine.over(recorded)

    def _own(self, unreachable: BrokerUnreachableError) -> StoreOwner:
        """Open the store, and answer the others.

        Raises:
            BrokerUnreachableError: A process that shares the store holds the lock; ``unreachable`` if it is stopped.
            StoreError: The store can't be opened.
        """
        settings = self._settings
        try:
            lock = DiskFiles().lock(os.path.join(share_folder(self.path), "lock"))
        except StoreLockedError as error:
            # Another process is opening the store, or has ended and its lock is about to go. The caller tries again.
            raise BrokerUnreachableError(f"{error}, which does not answer yet: {unreachable}") from error
        with ExitStack() as undo:
            undo.callback(lock.release)
            PeerAppender.end_all(appends_path(self.path), settings.timeout_s)  # those of a former owner
            undo.enter_context(SystemCall("share", self.path))
            promises = self._promises()
            opened = promises.over(settings.promises, opens=True)
            broker = Broker.open(
                self.path,
                opened.broker,
                name=self._name,
                cluster_name=settings.cluster_name,
                store_config=opened.store if opened.store.named else settings.store_config,
                runner=self.runner,
                metrics=settings.metrics,
                files=settings.files,
                change_settings=settings.changes,
            )
            undo.callback(broker.close)
            # Record the promises only now: if the store can't be opened, nothing is promised. A peer of a former owner
            # can have named another value since the look before. Then this process has named it too late.
            recorded = Promises.read(self.path, settings.files)
            recorded.record(self.path, settings.files, promises, replaces=settings.changes)
            # Peers of a former owner join again in a moment. Wait for them before queues are shared out, so that their
            # consumers keep their queues.
            if self._was_peer or os.path.exists(owner_socket(self.path)):
                broker.await_members(_MEMBERS_S)
            owner = StoreOwner(lock, broker, settings.timeout_s if settings.files.has_peers else None, self._callers)
            undo.pop_all()
        return owner

    def _settle(self, link: StoreOwner | StorePeer) -> None:
        """Continue with an owner: register clients there, then let all calls through."""
        # Register clients without a lock first, because each registration waits for the owner's answer. Clients that
        # come meanwhile are few, and are registered below under the lock, so that none is missed.
        beats = self._beats.copy()
        link.register(beats, self._closing.is_set)
        for topic in self._topics:
            with suppress(RmqError):
                if not self._closing.is_set():
                    link.route.topic_route(topic)
        with self.runner.lock:
            with self._lock:
                is_closing = self._closing.is_set()
                if not is_closing:
                    unregistered = {key: beat for key, beat in self._beats.items() if beats.get(key) is not beat}
                    self._beats, self._name, self.link = {}, link.name, link
            if not is_closing:
                link.register(unregistered, self._closing.is_set)
                link.route.watch(self._watchers.notify)
                with self._lock:
                    if self.link is link:  # a call can have noted its end meanwhile; then others must wait
                        self._settled.set()
                self._watchers.notify()
                self._states.works("taking the store over")
                owner = link.process if isinstance(link, StorePeer) else os.getpid()
                _log.info("share %(path)s: process %(pid)d owns the store", path=self.path, pid=owner)
        if is_closing:
            link.close()

    def _begin_watching(self) -> None:
        self._thread = threading.Thread(target=self._watch_owner, name="librmq share", daemon=True)
        self._thread.start()

    def _watch_owner(self) -> None:
        """Wait for the owner's end, and look for the next one, until this process is it."""
        # Close the link to a former owner only when the next one is known: an owner that hands over still answers calls
        # that it has received.
        with ExitStack() as former:
            while not self._closing.is_set():
                link = self.link
                if isinstance(link, StoreOwner):
                    return
                error: Exception | None
                try:
                    if link is not None:
                        former.close()
                        link.wait_for_end()
                        self._note_lost(link)
                        former.callback(link.close)
                        continue
                    error = self._try_to_join(self._closing.is_set)
                except Exception as unexpected:
                    # Go on after any error. Without this thread the process would not find the next owner.
                    error = unexpected
                if isinstance(error, BrokerUnreachableError | StoreLockedError):
                    SystemClock().wait(self._closing, _AGAIN_S)
                elif error is not None:
                    self._states.failing("taking the store over", error)
                    SystemClock().wait(self._closing, _FAILED_S)

    def _note_lost(self, link: StorePeer) -> None:
        """Let calls wait for the next owner."""
        with critical, self._lock:
            if self.link is link and not self._closing.is_set():
                self._beats = link.route.broker(link.name).heartbeats()
                self._topics = link.route.known_topics()
                self._was_peer = True
                self._error = BrokerUnreachableError(f"its owner, process {link.process}, has ended")
                self._settled.clear()
                self.link = None

    def _is_lost(self, link: StorePeer, left_s: float) -> bool:
        """Return whether an owner that could not be reached has ended; look for that within the caller's time."""
        if self.link is not link:
            return True
        if is_held_here(self.runner.lock) or is_stopped(link.process):
            left_s = 0.0
        if not SystemClock().wait(link.has_ended, max(0.0, min(left_s, _ENDS_S))):
            return False
        self._note_lost(link)
        return True

    # ---- requests

    def call(self, request: Request[R], /) -> R:
        """Answer a request by the owner.

        Raises:
            BrokerError: The request is refused; ``code`` says why.
            BrokerUnreachableError: The owner does not answer, or there is none.
        """
        return self.endpoint(self._name).call(request)

    def _call_owner(
        self, link: StorePeer, endpoint: Endpoint, request: Request[Any], until_s: float | None = None
    ) -> object:
        """Pass a request to the owner, and to the next ones as long as it has time, until ``until_s``."""
        return as_caller(self._callers, self._call_owner_or_next, link, endpoint, request, until_s)

    def _call_owner_or_next(
        self, link: StorePeer, endpoint: Endpoint, request: Request[Any], until_s: float | None
    ) -> object:
        if isinstance(request, SendLater):
            request.explain = link.explained
            return self.link is link and (link.appends.send_later(request, endpoint.call) or endpoint.call(request))
        if isinstance(request, CancelReceive):  # what an owner held has ended with it, so there is nothing to wait for
            return endpoint.call(request) if self.link is link else None
        begin_s = SystemClock().monotonic()
        if self.link is not link:
            return self._call_next(request, until_s)
        if link.is_silent and is_held_here(self.runner.lock) and (stopped := link.stopped_error()) is not None:
            # The owner's process is stopped and this thread has the runner's lock. Fail at once: each call that waited
            # its timeout would keep all other threads of the runner from their work.
            raise stopped
        kind = type(request).__name__
        try:
            # A signal waits for the answer, at most as long as the request may take. A caller that it ended before
            # could append its next messages by itself, in front of this one, which the owner still stores.
            with critical if type(request) in _APPENDS else nullcontext():
                answer: object = endpoint.call(request)
            if link.unanswered:
                link.unanswered.pop(kind, None)
            return answer
        except BrokerUnreachableError as error:
            link.is_silent = True
            if until_s is None:
                until_s = begin_s + self._timeout_of(request)
            if not self._is_lost(link, until_s - SystemClock().monotonic()):
                if isinstance(error, RequestNotSentError) and self._may_repeat(link, until_s):
                    return self._call_owner(link, endpoint, request, until_s)
                raise link.explained(error, kind, SystemClock().monotonic() - begin_s) from error
            if type(request) in _STORES and not isinstance(error, RequestNotSentError):
                raise LostAnswerError(f"the owner of the store has ended: {error}") from error
            return self._call_next(request, until_s)

    def _may_repeat(self, link: StorePeer, until_s: float) -> bool:
        """Return whether a request that was not sent can be sent again, as after Ctrl-C has ended the connection."""
        has_time = SystemClock().monotonic() < until_s
        return has_time and not is_held_here(self.runner.lock) and not is_stopped(link.process)

    def _call_next(self, request: Request[Any], until_s: float | None = None) -> object:
        """Wait for the next owner within the time of a request, and pass the request to it."""
        self._watch_in_child()
        # A thread that has the runner's lock must not wait here for the next owner, because the threads that could find
        # it may need the lock.
        if is_held_here(self.runner.lock):
            with critical, self._lock:
                now = self.link
                if now is None and self._note_client(request):
                    return None
            if now is None:
                raise self._absence()
            return self._endpoint_at(now, now.name).call(request)
        clock = SystemClock()
        if until_s is None:
            until_s = clock.monotonic() + self._timeout_of(request)
        link = self._wait_for_owner(max(0.0, until_s - clock.monotonic()))
        send = request.send if isinstance(request, SendReply) else request
        if isinstance(send, SendMessage | SendBatch) and send.timeout_ms is not None:
            send = replace(send, timeout_ms=max(0.0, (until_s - clock.monotonic()) * 1000))
            request = SendReply(cast("SendMessage", send)) if isinstance(request, SendReply) else send
        if isinstance(link, StorePeer):
            return self._call_owner(link, link.route.endpoint(link.name), request, until_s)
        return link.endpoint.call(request)

    def _timeout_of(self, request: Request[Any]) -> float:
        """Return the seconds that a request may take."""
        send = request.send if isinstance(request, SendReply) else request
        if isinstance(send, SendMessage | SendBatch) and send.timeout_ms is not None:
            return max(0.0, send.timeout_ms / 1000)
        return self._settings.timeout_s

    def _note_client(self, request: Request[Any]) -> bool:
        """Note what a client says of itself for the next owner; return False for other requests."""
        if isinstance(request, Heartbeat):
            self._beats[request.client_id] = join(self._beats.get(request.client_id), request)
        elif isinstance(request, Unregister | ChannelClosed):
            beat = self._beats.pop(request.client_id, None)
            if isinstance(request, Unregister) and beat is not None and (left := leave(beat, request)) is not None:
                self._beats[request.client_id] = left
        else:
            return False
        return True

    def _wait_for_owner(self, timeout_s: float) -> StoreOwner | StorePeer:
        self._check_open()
        self._watch_in_child()
        clock = SystemClock()
        until_s = clock.monotonic() + timeout_s
        while (link := self.link) is None:  # again after an owner that has ended before this thread has seen it
            left_s = until_s - clock.monotonic()
            if left_s <= 0 or self._closing.is_set():
                raise self._absence()
            clock.wait(self._settled, left_s)
        return link

    def _absence(self) -> BrokerUnreachableError:
        """Return the error of a call that finds no owner in time."""
        if self._closing.is_set():
            return BrokerUnreachableError(f"{self.path}: this share was closed; make another by librmq.share")
        return BrokerUnreachableError(f"{self.path}: no process has taken the store over yet: {self._error}")

    @override
    def _check_open(self) -> None:
        if self._closing.is_set():
            raise self._absence()

    # ---- route

    def _ask(self, ask: Callable[[Route], T]) -> T:
        """Ask the owner; if it ends meanwhile, the next one."""
        while True:
            link = self._wait_for_owner(self._settings.timeout_s)
            begin_s = SystemClock().monotonic()
            try:
                return as_caller(self._callers, ask, link.route)
            except BrokerUnreachableError as error:
                if isinstance(link, StoreOwner):
                    raise
                if not self._is_lost(link, begin_s + self._settings.timeout_s - SystemClock().monotonic()):
                    raise link.explained(error) from error

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the queues of a topic; empty if there is none.

        Raises:
            BrokerUnreachableError: The owner does not answer, or there is none.
        """
        link = self.link
        if link is None and is_held_here(self.runner.lock):
            return self._topics.get(topic, ())
        return self._ask(lambda route: route.topic_route(topic))

    @override
    def known_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return what is known of a topic's queues, without waiting, so also under the runner's lock."""
        link = self.link
        if link is None:
            return self._topics.get(topic, ())
        return link.route.known_route(topic) if isinstance(link, StorePeer) else link.route.topic_route(topic)

    @override
    def _topic_changed(self, topic: str) -> None:
        link = self.link
        if isinstance(link, StorePeer):
            with suppress(RmqError):  # the next poll learns it
                link.route.refresh()

    @property
    @override
    def is_remote(self) -> bool:
        """True: `topic_route` asks the owner."""
        return True

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the broker's name until the share is closed."""
        return () if self._closing.is_set() else (self._name,)

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the owner, or what waits for the next one.

        Raises:
            NoRouteError: The broker has another name.
        """
        link = self.link
        if link is None:
            if broker_name != self._name:
                raise NoRouteError(f"unknown broker {broker_name!r}; expected {self._name!r}")
            return self._absent
        return self._endpoint_at(link, broker_name)

    def _endpoint_at(self, link: StoreOwner | StorePeer, broker_name: str) -> SharedEndpoint:
        if isinstance(link, StoreOwner):
            return link.endpoint_of(broker_name)
        return link.endpoint_of(broker_name, partial(self._call_owner, link), self._callers)

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed``, under the runner's lock, when topics change, and when the store has another owner.

        Return a function that ends this.

        Raises:
            BrokerUnreachableError: The share is closed.
        """
        self._check_open()
        self._watch_in_child()
        return self._watchers.watch(changed)

    # ---- administration, where the store is at hand

    @override
    def _messages(self, topic: str) -> Iterator[StoredMessage]:
        self._check_open()  # it may have been closed since the call
        link = self.link
        if isinstance(link, StoreOwner):
            yield from link.route.messages(topic)
            return
        with MessageStore.open(self.path, read_only=True) as store:
            yield from store.topic_messages(topic)

    # ---- life

    def _watch_in_child(self) -> None:
        """Look for the owner, at the first use in a forked child."""
        watching = self._thread
        if watching is not None:  # the block below takes long
            return
        with critical, self._lock:  # a signal handler can close the share
            if self._thread is None and not self._closing.is_set():
                self._begin_watching()

    def inherited(self) -> None:
        """Begin as a new process in a forked child, whose copies of the parent's connections are closed."""
        link = self.link
        # The copied lock may be held by a thread of the parent, which does not exist in the child.
        self._lock, self._ending = Lock(), Lock()
        self._closer, self._callers = None, set()
        self._settled, self._thread, self.link = Event(), None, None
        self._watchers, self._beats = Watchers(), {}
        self._absent = SharedEndpoint(self._call_next)
        if isinstance(link, StoreOwner):
            # Producers that the parent made keep its endpoint, whose broker the child must not use: the parent owns the
            # store.
            link.endpoint.ask = self._call_next
        elif link is not None:
            link.appends.after_fork()
        self.runner.restart_after_fork()

    @override
    def close(self) -> None:
        """Leave the store; the owner hands it over to another process. Shut producers and consumers down first.

        A second call completes one that was interrupted; otherwise it does nothing. The handler of a signal that has
        interrupted another call of this share can't wait for the end, which comes after that call.

        Raises:
            ClientStateError: A listener calls it, whose end it would wait for.
        """
        if self.runner.is_within():
            raise ClientStateError(
                f"{self.path}: a listener can't close the share that runs it: set an event there, and let the code "
                "that opened the share close it"
            )
        with critical, self._lock:
            self._closing.set()
            self._left, self.link = self.link or self._left, None
            self._settled.set()
            if isinstance(self._left, StorePeer):
                self._left.appends.end()
        if threading.get_ident() in self._callers or is_held_here(self.runner.lock):
            # The threads that end the share may need what the interrupted call has locked. The process does not end
            # before they have, since this thread is not a daemon.
            threading.Thread(target=self.close, name="librmq share close").start()
            return
        if self._closer == threading.get_ident():  # the handler has interrupted this
            return
        with calls_later(), self._ending:
            self._closer = threading.get_ident()
            try:
                self._end()
            finally:
                self._closer = None

    def _end(self) -> None:
        link = self._left
        if isinstance(link, StorePeer):
            link.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._is_closed:
            return
        if link is not None:
            link.close()
        with self.runner.lock:
            self._watchers.notify()
        self.runner.shutdown()
        self._is_closed = True


_shared: Final[Inherited[SharedBroker]] = Inherited(SharedBroker.inherited)


class ShareKeywords(TypedDict, total=False):
    """Keywords of `share` and `share_async`, for type checkers."""

    name: str
    cluster_name: str
    store_config: StoreConfig | None
    metrics: Metrics | None
    timeout: float | timedelta
    wait: float | timedelta
    take_over_stopped: float | timedelta | None
    follow_links: bool
    change_settings: bool


def share(  # noqa: PLR0913 (what a user may choose)
    path: str | os.PathLike[str],
    config: BrokerConfig | None = None,
    *,
    name: str = "broker-a",
    cluster_name: str = "DefaultCluster",
    store_config: StoreConfig | None = None,
    metrics: Metrics | None = None,
    timeout: float | timedelta = 3,
    wait: float | timedelta = 10,
    take_over_stopped: float | timedelta | None = None,
    follow_links: bool = False,
    change_settings: bool = False,
) -> SharedBroker:
    """Open the store in ``path`` if no process of this machine owns it, else connect to the owner.

    The store records what the first process names of its promises (durability, timers, relay, transactions, limits,
    retention), and every later owner keeps it; a process that names none takes what is recorded. When the owner ends,
    another process takes over, and the clients of all processes continue there.

    Args:
        path: The store's folder, on a local disk.
        config: Settings for its clients.
        name: The broker's name in routes.
        cluster_name: The cluster name in stored messages.
        store_config: Sizes, durability and retention of the store.
        metrics: Counts events of this process.
        timeout: Time for each answer of the owner, in seconds or as a `timedelta`.
        wait: Time for an owner that opens the store, and recovers it, at this moment.
        take_over_stopped: Time after which an owner that is stopped, by Ctrl-Z or a debugger, is ended by SIGKILL so
            that another process can take over; on Linux only. None leaves it alone: then sends end within their time
            limit by an error that names it, until it continues.
        change_settings: Whether the store records what this process names otherwise; only while no other shares it.
        follow_links: Whether folders of the store may be symbolic links, such as a ``commitlog`` on another disk.

    Raises:
        StoreLockedError: A process that does not share has the store open for writing.
        BrokerUnreachableError: The owner does not answer.
        ConfigError: A setting is invalid, contradicts the files or is not what the store has recorded, the folder is on
            a network file system, or the system is Windows.
        CorruptionError: A file of the store or of its configuration is damaged.
        NotAStoreError: The folder holds something else.
    """
    check_settings("librmq.share", path, config, name, cluster_name, metrics, store_config)
    if take_over_stopped is not None and sys.platform != "linux":
        raise ConfigError("take_over_stopped: only Linux tells which process is stopped: leave it out")
    settings = _Settings(
        config=config,
        name=name,
        cluster_name=cluster_name,
        store_config=store_config,
        metrics=metrics,
        timeout_s=to_seconds("timeout", timeout),
        files=DiskFiles(follow_links=follow_links, has_peers=True),
        changes=change_settings,
        take_over_stopped_s=None if take_over_stopped is None else to_seconds("take_over_stopped", take_over_stopped),
    )
    if settings.timeout_s <= 0:
        raise ConfigError(f"timeout: expected more than 0 seconds, found {settings.timeout_s:g}")
    wait_s = to_seconds("wait", wait)
    folder = fixed_path(path, settings.files)
    _check_place(folder, settings.files)
    make_share_folder(folder, settings.files)
    shared = SharedBroker(folder, settings)
    try:
        shared.attach(wait_s)
    except BaseException:
        shared.close()
        raise
    return shared


async def share_async(
    path: str | os.PathLike[str], config: BrokerConfig | None = None, **settings: Unpack[ShareKeywords]
) -> SharedBroker:
    """Share like `share`, with the same settings, without blocking the event loop: a recovery can take long."""
    return await opened_in_thread(partial(share, path, config, **settings))
