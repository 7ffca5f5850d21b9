"""What a process is to a store that several share: its owner, or a peer of the owner.

A command acts through the owner by `connect_to_owner`, and takes nothing over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar, cast

from librmq.broker import AdministeredRoute, Broker, StoreRoute
from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError, RequestNotSentError, RmqError
from librmq.files import DiskFiles, FileLock, Files
from librmq.files.lock import lock_process
from librmq.formatting import moment
from librmq.message.ids import format_host, parse_host
from librmq.override import override
from librmq.protocol import (
    INNER_PRODUCER,
    ConsumerIds,
    Endpoint,
    GroupPage,
    Heartbeat,
    HoldPlace,
    PlaceName,
    Request,
    RouteWrapper,
    SendMessage,
    SendsLater,
)
from librmq.runtime import ThreadRunner
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event
from librmq.store import BrokerTables, MessageStore
from librmq.store.format.directory import CONFIG
from librmq.wire._peer_sends import PeerSends, appends_path
from librmq.wire._unix_sockets import (
    bell_beside,
    checked_credentials,
    connect_to,
    credentials_of,
    delete_place,
    is_stopped,
    listen_as_owner,
    owner_socket,
    process_of_host,
    share_folder,
)
from librmq.wire.remote._administration import connections
from librmq.wire.remote._connection import as_caller
from librmq.wire.remote._dialing import dial_locally
from librmq.wire.remote.remote_route import RemoteRoute
from librmq.wire.remoting._frames import close_in_child
from librmq.wire.remoting._server import RemotingServer

R = TypeVar("R")
_log = EventLog("librmq.wire")
_TIMEOUT_S: Final = 3
"""Time for each answer to a command."""
_STANDS_STILL_MS: Final = 3000
"""Time without an answer after which an owner that runs may stand still."""
_STOPPED_S: Final = 0.2
"""Between two looks whether the owner is stopped."""


def _register(owner: Endpoint, beats: Mapping[str, Heartbeat], gives_up: Callable[[], bool]) -> None:
    """Register clients; an owner that does not answer takes the time of a request for each, unless ``gives_up()``."""
    for beat in beats.values():
        if gives_up():
            return
        with suppress(RmqError):  # the owner has ended too, or the client is leaving
            owner.call(beat)


class SharedEndpoint(Endpoint):
    """The owner as an `Endpoint`. Another object after each reconnection shows clients that it may have lost them."""

    __slots__ = ("ask",)
    has_page = True

    def __init__(self, call: Callable[[Request[Any]], Any]) -> None:
        self.ask: Callable[[Request[Any]], Any] = call

    @override
    def call(self, request: Request[R], /) -> R:
        """Pass a request to the owner."""
        answer: R = self.ask(request)
        return answer


class _PeerEndpoint(SharedEndpoint, SendsLater):
    """The owner in another process, which is reached through a connection."""

    __slots__ = ("_appends", "_callers", "_page")

    def __init__(
        self, call: Callable[[Request[Any]], Any], appends: PeerSends, callers: set[int], page: GroupPage
    ) -> None:
        """Pass requests on by ``call``; ``callers`` gets the threads that append, as the share has to know."""
        super().__init__(call)
        self._appends, self._callers, self._page = appends, callers, page

    @override
    def call(self, request: Request[R], /) -> R:
        """Append a message that is stored as it comes; pass other requests on, and find a place on the shared page."""
        if (
            isinstance(request, SendMessage)
            and request.max_reconsume_times is None  # else it is sent back
            and request.group != INNER_PRODUCER  # else it is a copy, which may have less room for properties
        ):
            if (sent := as_caller(self._callers, self._appends.send, request)) is not None:
                return cast("R", sent)
            if request.is_one_way and self._appends.may_append(request.message):
                # The owner has to answer, because the next message may be appended here, and overtake this one.
                request = cast("Request[R]", replace(request, is_one_way=False))
        answer = super().call(request)
        if isinstance(request, HoldPlace) and isinstance(answer, int):
            answer = cast("R", self._page.at(answer, PlaceName(request.group, request.topic, request.queue_id)))
        return answer


class StoreOwner:
    """The broker of this process, and the server through which the others reach it."""

    def __init__(self, lock: FileLock, broker: Broker, wait_s: float | None, callers: set[int]) -> None:
        """Serve a broker; ``lock`` is the one of the shared folder.

        It waits at most ``wait_s`` for a peer that appends; None: none does by itself. ``callers`` gets the threads
        within a call.
        """
        self.route = broker
        self.name: str = broker.name
        listening, self._files = listen_as_owner(broker.store.path, broker.store.files)
        self._lock = lock
        self.endpoint: SharedEndpoint = SharedEndpoint(partial(as_caller, callers, broker.call))
        self._has_ended = False
        if wait_s is not None:  # before a peer gets an answer, because each looks once for the page
            bell = bell_beside(self._files[0])
            self._files.insert(0, bell)
            broker.share_appends(appends_path(broker.store.path), bell, wait_s)
        address = format_host(parse_host(broker.store.config.store_host))
        self.server: RemotingServer = RemotingServer(broker, listening=listening, advertise=address)

    def endpoint_of(self, name: str) -> SharedEndpoint:
        """Return the broker; `NoRouteError` for another name."""
        self.route.endpoint(name)
        return self.endpoint

    def register(self, beats: dict[str, Heartbeat], gives_up: Callable[[], bool]) -> None:
        """Register the clients of this process, which the former owner knew."""
        _register(self.route, beats, gives_up)

    def close(self) -> None:
        """Hand the store over: end the connections first, so that no request is refused meanwhile.

        After Ctrl-C another call does the rest; until then the store stays this process's, as it does while a peer is
        stopped within an append.
        """
        try:
            if not self._has_ended:  # else another process may own the store, whose socket must stay
                self.server.drain()
                self.server.close()
                delete_place(self._files)  # late: a peer that finds no socket under the lock expects it to be lost
                self.route.close()
        except BrokerUnreachableError:  # a peer is stopped within an append, so the store stays open until another call
            raise
        except Exception:
            self._has_ended = True
            self._lock.release()
            raise
        self._has_ended = True
        self._lock.release()


class StorePeer:
    """A route to the owner, and a connection that ends with it."""

    def __init__(
        self,
        path: str,
        timeout_s: float,
        runner: ThreadRunner | None,
        take_over_stopped_s: float | None = None,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the owner; end one that is stopped, after a time, unless ``gives_up`` answers True before.

        Raises:
            BrokerUnreachableError: There is none, or it does not answer.
        """
        address = owner_socket(path)
        self._path = path
        self._lock_path = _lock_path(path)
        self._take_over_stopped_s = take_over_stopped_s
        self._stopped_since_s: float | None = None
        self.has_ended: Event = Event()
        self.is_silent: bool = False
        """Whether a request had no answer, and the owner was not seen to run since."""
        self.unanswered: dict[str, int] = {}
        """Since when the owner has not answered requests of a kind, in ms since 1970."""
        self._link: tuple[Endpoint, SharedEndpoint] | None = None
        self.appends: PeerSends = PeerSends(path, timeout_s, self.stopped_error)
        """The sends that need no answer of the owner."""
        self._page = GroupPage(DiskFiles(), path, writable=True)
        with ExitStack() as undo:
            try:
                self._sentinel = undo.enter_context(connect_to(address, timeout_s))
            except BrokerUnreachableError as error:
                # The owner may be stopped before it listens, or while others wait already for its answer.
                self.process: int = 0
                self.label: str = path
                with suppress(RmqError):
                    self.process = lock_process(self._lock_path) or 0
                self._fail(error, gives_up)
            close_in_child(self._sentinel)
            self.process = checked_credentials(self._sentinel).process
            self.label = f"{path} (process {self.process})"
            if runner is None:
                runner = own_runner = ThreadRunner()
                undo.callback(own_runner.shutdown)
            at_close = ExitStack()
            try:
                with self._watching():
                    self.route: RemoteRoute = RemoteRoute(
                        (self.label,),
                        runner,
                        dial_locally(partial(self._connect, address, timeout_s), self.label, timeout_s),
                        timeout_s=timeout_s,
                        prepare=lambda addresses: None,
                        at_close=at_close,
                        is_shared=True,
                    )
                self.name: str = self.route.broker_names()[0]
            except (BrokerUnreachableError, IndexError) as error:  # without a broker while it closes
                self._fail(error, gives_up)
            at_close.push(undo.pop_all())

    def _connect(self, address: str, timeout_s: float) -> socket.socket:
        if self.has_ended.is_set():  # another process may listen there by now
            raise RequestNotSentError(f"{self.label} has ended")
        try:
            return connect_to(address, timeout_s)
        except BrokerUnreachableError as error:
            if isinstance(error.__cause__, FileNotFoundError) and not self._is_lock_free():
                raise RequestNotSentError(
                    f"{self._path}: process {self.process} owns the store, and its socket file {address} is missing: "
                    "restart that process"
                ) from error
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                self.has_ended.set()  # it listens no more
            raise RequestNotSentError(str(error)) from error

    def _is_lock_free(self) -> bool:
        """Return whether the owner has ended, as far as its lock says; not if the lock file was deleted too."""
        return os.path.exists(self._lock_path) and lock_process(self._lock_path) is None

    def explained(self, error: Exception, kind: str = "", waited_s: float = 0.0) -> BrokerUnreachableError:
        """Return the error of a request to the owner, which says whether the owner is stopped, or stands still.

        A request of this ``kind`` has waited for its answer.
        """
        self.is_silent = True
        if (stopped := self.stopped_error()) is not None:
            return stopped
        if kind and not isinstance(error, RequestNotSentError):
            now_ms = SystemClock().now_ms()
            is_known = kind in self.unanswered
            since_ms = self.unanswered.setdefault(kind, now_ms - round(1000 * waited_s))
            if now_ms - since_ms >= _STANDS_STILL_MS:
                text = (
                    f"{error}: process {self.process}, which owns the store, is not stopped, and has answered no "
                    f"{kind} since {moment(since_ms)}: if librmq who {self._path} says that it stands still, end it"
                )
                if not is_known:
                    _log.warning("the owner of a share may stand still: %(error)s", error=text, path=self._path)
                return BrokerUnreachableError(text)
        return error if isinstance(error, BrokerUnreachableError) else BrokerUnreachableError(f"{self.label} ended")

    def stopped_error(self) -> BrokerUnreachableError | None:
        """Return the error of a request to an owner that is stopped; None if it runs."""
        if not is_stopped(self.process):
            self.is_silent = False
            return None
        return BrokerUnreachableError(
            f"{self._path}: process {self.process}, which owns the store, is stopped, by Ctrl-Z or a debugger, and "
            f"keeps it, since it would continue to write: let it run again (kill -CONT {self.process}), or let others "
            "end it by librmq.share(…, take_over_stopped=…)"
        )

    def endpoint_of(
        self, name: str, call: Callable[[Endpoint, Request[Any]], Any], callers: set[int]
    ) -> SharedEndpoint:
        """Return the owner, asked through ``call``; ``callers`` gets the threads that append by themselves."""
        link = self.route.endpoint(name)
        known_link = self._link
        if known_link is None or known_link[0] is not link:
            known_link = self._link = link, _PeerEndpoint(partial(call, link), self.appends, callers, self._page)
        return known_link[1]

    def register(self, beats: dict[str, Heartbeat], gives_up: Callable[[], bool]) -> None:
        """Register the clients of this process, which the former owner knew."""
        _register(self.route.endpoint(self.name), beats, gives_up)

    def wait_for_end(self) -> None:
        """Wait until the owner has ended; end one that is stopped, where the settings say so."""
        if self._take_over_stopped_s is not None:
            self._sentinel.settimeout(_STOPPED_S)
        while True:
            try:
                self._sentinel.recv(1)
                break
            except TimeoutError:
                self._is_still_stopped()
            except OSError:
                break
        self.has_ended.set()

    def _is_still_stopped(self) -> bool:
        """Return whether the owner is stopped; end it if each look has found it so for as long as the settings say."""
        if not is_stopped(self.process):
            self._stopped_since_s = None
            return False
        now_s = SystemClock().monotonic()
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        if self._take_over_stopped_s is not None and now_s - self._stopped_since_s >= self._take_over_stopped_s:
            self._end_stopped()
        return True

    def _fail(self, error: Exception, gives_up: Callable[[], bool]) -> NoReturn:
        """Raise the error of a connection that failed; first end an owner that is stopped, where the settings say so.

        Raises:
            BrokerUnreachableError: Always.
        """
        explained = self.explained(error)
        while self._take_over_stopped_s is not None and not gives_up() and self._is_still_stopped():
            SystemClock().wait(self.has_ended, _STOPPED_S)
        if explained is error:
            raise error
        raise explained from error

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """End an owner that is stopped meanwhile, where the settings say so, instead of waiting for its answer."""
        if self._take_over_stopped_s is None:
            yield
            return
        has_answered = Event()

        def watch() -> None:
            while not SystemClock().wait(has_answered, _STOPPED_S):
                self._is_still_stopped()

        watching = threading.Thread(target=watch, name="librmq share stopped", daemon=True)
        watching.start()
        try:
            yield
        finally:
            has_answered.set()
            watching.join()

    def _end_stopped(self) -> None:
        """Kill the owner, by a handle that can't mean a later process of the same number."""
        if sys.platform != "linux":
            return
        with suppress(OSError):  # it has ended, or no handle can be had
            handle = os.pidfd_open(self.process)
            try:
                if is_stopped(self.process) and lock_process(self._lock_path) == self.process:
                    _log.warning(
                        "%(path)s: its owner, process %(pid)d, is stopped, and is ended",
                        path=self._path,
                        pid=self.process,
                    )
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def wake(self) -> None:
        """End `wait_for_end`."""
        with suppress(OSError):
            self._sentinel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        self.wake()
        self.appends.close()
        self.route.close()


def connect_to_owner(path: str | os.PathLike[str], *, timeout_s: float = _TIMEOUT_S) -> RemoteRoute:
    """Return a route to the process that owns the store in a folder; close it after its clients.

    ``timeout_s`` is the time for each answer.

    Raises:
        BrokerUnreachableError: No process that shares the store owns it, or it does not answer.
    """
    return StorePeer(os.path.abspath(os.fspath(path)), timeout_s, None).route


# ---- a store and its owner, as commands and pages see them


class OwnedStore(RouteWrapper, StoreRoute):
    """The files of a store, and the route to the process that owns and shares it. Not thread-safe.

    ::

        what is read       the files, which have the owner's messages, and its tables as they are now
        what is changed    requests to the owner, which tells the clients of all processes
    """

    def __init__(
        self,
        path: str,
        remote: RemoteRoute,
        opened: ExitStack,
        *,
        acting: AdministeredRoute | None = None,
        files: Files | None = None,
    ) -> None:
        """``opened`` closes the store; ``acting`` is a route around ``remote`` that changes less."""
        super().__init__(acting or remote)
        (self.name,) = remote.broker_names()
        self.remote: RemoteRoute = remote
        self._path, self._opened, self._files = path, opened, files

    @cached_property
    @override
    def tables(self) -> BrokerTables:
        """The tables that the owner has at the first use."""
        return self.remote.broker(self.name).tables(os.path.join(self._path, CONFIG))

    @cached_property
    @override
    def store(self) -> MessageStore:
        """The store, opened for reading at the first use: commands that read open it by themselves."""
        return self._opened.enter_context(MessageStore.open(self._path, read_only=True, files=self._files))


# ---- the processes that share a store, as a command sees them

_LOOK_S: Final = 3.0


@contextmanager
def connect_to_sharing(path: str) -> Iterator[RemoteRoute | None]:
    """Connect to the process that owns and shares a store; None if there is no such process.

    Raises:
        BrokerUnreachableError: It is stopped, or does not answer.
    """
    with ExitStack() as opened:
        try:
            route = opened.enter_context(connect_to_owner(path))
        except BrokerUnreachableError:
            if lock_process(_lock_path(path)) is not None:
                raise
            yield None
            return
        yield route


class SharingProcess(NamedTuple):
    """A process that uses a store together with others."""

    role: Literal["owner", "peer"]
    process: int
    since_ms: int | None
    """When it opened the store, or reached the owner; None if the owner does not answer."""
    has_page: bool = False
    """Whether it is an owner whose peers append by themselves."""
    answers: bool = True
    """Whether the steps of an owner go on; else its threads wait for each other, or it is stopped."""

    @property
    def state(self) -> Literal["running", "stopped", "stands still"]:
        """What it does: a signal or a debugger can have stopped it."""
        return "stopped" if is_stopped(self.process) else "running" if self.answers else "stands still"


def sharing_processes(path: str) -> tuple[list[SharingProcess], BrokerUnreachableError | None]:
    """Return the owner of a store, then the processes that reach it, the first that came first; none without an owner.

    The error says why the owner does not answer; its peers are unknown then.
    """
    try:
        with connect_to(owner_socket(path), _LOOK_S) as connected:
            owner = credentials_of(connected).process
    except BrokerUnreachableError:  # also of an owner that is stopped while many wait for it
        holder = lock_process(_lock_path(path))
        if holder is None:
            return [], None
        owner = holder
    has_page = os.path.exists(appends_path(path))
    try:
        with connect_to_sharing(path) as route:
            if route is None:
                return [], None
            broker = route.broker(*route.broker_names())
            started_ms, hosts = connections(broker)
            answers = _goes_on(broker)
    except BrokerUnreachableError as error:
        return [SharingProcess("owner", owner, None, has_page, answers=False)], error
    since = {process: since_ms for host, since_ms in reversed(hosts) if (process := process_of_host(host))}
    peers = sorted((since_ms, process) for process, since_ms in since.items() if process not in (owner, os.getpid()))
    return [
        SharingProcess("owner", owner, started_ms, has_page, answers),
        *(SharingProcess("peer", process, since_ms) for since_ms, process in peers),
    ], None


def _goes_on(owner: Endpoint) -> bool:
    """Return whether an owner answers what it looks up under the lock of its steps."""
    try:
        owner.call(ConsumerIds("who"))
    except BrokerUnreachableError:
        return False
    except RmqError:  # it has no such group
        pass
    return True


def _lock_path(path: str) -> str:
    return os.path.join(share_folder(path), "lock")
