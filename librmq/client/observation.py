"""Observers of clients: what an instrumentation, such as that of spans, sees of all sends, receives and listeners.

A hook of a producer or a consumer sees a single try or call of that one object. An observer sees whole operations of
all clients of a route, including clients that are created later. Without one, an operation reads one attribute more.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from librmq.message import Message, StoredMessage
from librmq.protocol import Route
from librmq.runtime import Runner
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock

R = TypeVar("R")
_log = EventLog("librmq.client")


class ObservedClient:
    """A client as its observer sees it."""

    client_id: str
    route: Route
    runner: Runner
    observer: Observer | None = None
    """Sees the operations of this client's producers and consumers."""


class Operation(NamedTuple):
    """An operation that begins."""

    kind: Literal["send", "reply", "commit", "rollback", "receive", "process", "ack", "dead_letter"]
    client: ObservedClient
    group: str
    topic: str | None
    """The topic; None for a receive, which can get messages of any subscription."""
    messages: Sequence[Message | StoredMessage] = ()
    """What is sent, processed or acknowledged. The properties of a `Message` may be added to."""
    broker_name: str | None = None
    """The broker of the operation, if it is known at the beginning."""
    queue_id: int | None = None
    """The queue of the messages there, if it is known at the beginning."""
    is_batch: bool = False
    """Whether the caller handles a list of messages."""
    model: Literal["clustering", "broadcasting"] | None = None
    """How the group of a consumer shares messages."""
    max_times: int | None = None
    """The redeliveries before a message that a listener fails on becomes a dead letter; None without a limit."""


Ended = Callable[[object, BaseException | None], None]
"""Called after an operation with its result or its error: a `SendResult`, the received messages, the number of messages
that a listener has consumed."""


class Observer(Protocol):
    """Sees the operations of clients."""

    def is_active(self) -> bool:
        """Return whether there is anything to observe now; asked at the beginning of each operation."""

    def begins(self, operation: Operation) -> Ended:
        """Observe an operation from its beginning, in the context of its caller."""


# ---- which observer a client has

_lock: Final = Lock()
_clients: Final[weakref.WeakSet[ObservedClient]] = weakref.WeakSet()
_observers: list[tuple[weakref.ref[object] | None, Observer]] = []
"""Observers of a client, of all clients of a runner, or of all clients, the latest last."""


def _observer_of(client: ObservedClient) -> Observer | None:
    for target, observer in reversed(_observers):
        observed = None if target is None else target()
        if target is None or observed is client or observed is client.runner:
            return observer
    return None


def note_client(client: ObservedClient) -> None:
    """Give a new client its observer, and let later ones reach it."""
    with _lock:
        _clients.add(client)
        client.observer = _observer_of(client)


def observe_clients(target: ObservedClient | Runner | None, observer: Observer) -> Callable[[], None]:
    """Let an observer see one client, all clients of a runner, or with None all; return a function that ends this.

    Of several observers a client has the one that came last.
    """
    entry: tuple[weakref.ref[object] | None, Observer] = (None if target is None else weakref.ref(target), observer)

    def change(update: Callable[[], None]) -> None:
        with _lock:
            update()
            _observers[:] = [(ref, other) for ref, other in _observers if ref is None or ref() is not None]
            for client in list(_clients):
                client.observer = _observer_of(client)

    def end() -> None:
        change(lambda: _observers.remove(entry) if entry in _observers else None)

    change(lambda: _observers.append(entry))
    return end


# ---- operations


def observed(client: ObservedClient, operation: Callable[[], Operation], action: Callable[[], R]) -> R:
    """Return the result of ``action``, which the client's observer sees as the operation."""
    observer = client.observer
    if observer is None or not observer.is_active():
        return action()
    ended = observer.begins(operation())
    try:
        result = action()
    except BaseException as error:
        note_end(ended, None, error)
        raise
    note_end(ended, result, None)
    return result


async def observed_async(
    client: ObservedClient, operation: Callable[[], Operation], action: Callable[[], Awaitable[R]]
) -> R:
    """Do as `observed` for a coroutine."""
    observer = client.observer
    if observer is None or not observer.is_active():
        return await action()
    ended = observer.begins(operation())
    try:
        result = await action()
    except BaseException as error:
        note_end(ended, None, error)
        raise
    note_end(ended, result, None)
    return result


def note_end(ended: Ended, result: object, error: BaseException | None) -> None:
    """Pass the outcome of an operation to its observer."""
    try:
        ended(result, error)
    except Exception:
        # The message is stored or consumed, so an error here must not look like a failure of the operation.
        _log.exception("an observer has failed after an operation")


# ---- messages that are kept for a later send

_keepers: Final[list[tuple[weakref.ref[object] | None, Callable[[dict[str, str]], None]]]] = []


def observe_kept(keeper: Callable[[dict[str, str]], None], owner: object = None) -> Callable[[], None]:
    """Call a function with the properties of each message that is kept for a later send, in the context of its caller.

    It may add to them, such as the context that the send shall have. Return a function that ends this; the end of an
    ``owner`` ends it too.
    """
    entry = (None if owner is None else weakref.ref(owner), keeper)
    _keepers[:] = [(ref, other) for ref, other in _keepers if ref is None or ref() is not None]
    _keepers.append(entry)

    def end() -> None:
        if entry in _keepers:
            _keepers.remove(entry)

    return end


def note_kept(properties: dict[str, str]) -> None:
    """Show the properties of a message that is kept for a later send to all who asked for it, the latest first."""
    for owner, keeper in reversed(_keepers.copy()):
        if owner is None or owner() is not None:
            keeper(properties)
