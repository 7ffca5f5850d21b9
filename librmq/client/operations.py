"""Operations of clients, and who watches them: hooks, traces, metrics, spans, and what an application adds by `watch`.

::

    kind                           begins and ends with
    send, reply                    a send with all its tries, or a reply: the result
    try                            one try of a send: the result
    receive                        a poll or a receive: the messages
    process                        a call of a listener: what it returns
    ack, dead_letter               outcomes that a simple consumer sends
    commit, rollback, undecided    the end of a transaction
    pull, throttle, rest,          moments, which have no end; ``result`` says more
    rebalance, predicate, outcome
    take, release, reset           moments of a queue: a consumer reads it, leaves it, or continues elsewhere
    hand_out, settle, give_up      moments of messages: a poll returns them; they are consumed (ok), come again (retry)
                                   or neither yet (open), without ``messages`` those handed out; a dead letter
    keep                           what was consumed of a queue, or of all, is kept as the group's progress

A watcher is a function that is called when an operation begins. It may return a function that is called at the end,
with the result or the error. Without watchers a send asks once whether there are any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, Self, TypeVar, get_args

from librmq.config import check_arguments, check_kind
from librmq.errors import ConfigError
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.protocol import Route
from librmq.runtime import Runner
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock, call_outside

if TYPE_CHECKING:
    from librmq.metrics import Metrics

R = TypeVar("R")
_log = EventLog("librmq.client")

Act = Literal[
    "send", "reply", "try", "receive", "process", "ack", "dead_letter", "commit", "rollback", "undecided"
]  # fmt: skip
Moment = Literal[
    "pull", "throttle", "rest", "rebalance", "predicate", "outcome",
    "take", "release", "reset", "hand_out", "settle", "keep", "give_up",
]  # fmt: skip
Kind = Act | Moment
_COUNTERS: Final[Mapping[Kind, str]] = {
    "pull": "pulls",
    "throttle": "flow_controls",
    "rest": "rests",
    "rebalance": "rebalances",
    "predicate": "predicate_calls",
    "outcome": "consumed",
}
"""The counters of moments."""


class WatchedClient(Protocol):
    """A client as its watchers see it."""

    client_id: str
    route: Route
    runner: Runner


class Operation(NamedTuple):
    """An operation that begins."""

    kind: Kind
    """What it is, of those at the top of the module."""
    client: WatchedClient
    """The client, with its id, route and runner."""
    group: str
    topic: str | None
    """The topic; None for a receive, which can get messages of any subscription."""
    messages: Sequence[Message | StoredMessage] = ()
    """What is sent, processed or acknowledged. The properties of a `Message` may be added to."""
    queue: MessageQueue | None = None
    """The queue, if it is known at the beginning."""
    result: str = ""
    """The result of a moment."""
    number: int = 1
    """How many messages or events it is."""
    broker_name: str | None = None
    """The broker of an outcome or of the end of a transaction."""
    attempt: int = 0
    """Number of the try, counting from 0."""
    size: int = 0
    """The bytes of the bodies as they are sent, perhaps compressed."""
    is_batch: bool = False
    """Whether the caller handles a list of messages."""
    listener: Any = None
    """The listener of the call, and how it is called."""
    outcome: Callable[[object, Any], tuple[int, Exception | None]] | None = None
    """Turns the end of a call into the number of consumed messages, and the failure of the others, if it is known."""
    model: Literal["clustering", "broadcasting"] | None = None
    """How the group of a consumer shares messages."""
    max_times: int | None = None
    """The redeliveries before a message that a listener fails on becomes a dead letter; None without a limit."""
    offset_id: str = ""
    """The broker's id of the half message."""
    is_check: bool = False
    """Whether the transaction ends by a check."""

    @property
    def message(self) -> Message | StoredMessage:
        """The first message."""
        return self.messages[0]


Ended = Callable[[Any, Any], object]
"""Called at the end of an operation with its result or its error."""
Watcher = Callable[[Operation], Ended | None]
"""Called when an operation begins, in the context of its caller. Its exception fails the operation."""
Watchers = Mapping[Kind, Watcher]
"""The watchers of each kind of operation."""


def begin(watchers: Iterable[Watcher], operation: Operation) -> list[Ended]:
    """Tell watchers of an operation; return what to call at its end."""
    watching: list[Ended] = []
    try:
        for watcher in watchers:
            if (ended := watcher(operation)) is not None:
                watching.append(ended)
    except BaseException as error:
        end(watching, None, error)  # for those before the watcher that has failed, the operation has begun
        raise
    return watching


def end(watching: Iterable[Ended], result: object, error: BaseException | None) -> None:
    """Tell the end of an operation."""
    for ended in watching:
        try:
            ended(result, error)
        except Exception:
            # The message is stored or consumed, so an error here must not look like a failure of the operation.
            _log.exception("a watcher has failed at the end of an operation")


class _UnderWay:
    """An operation in a ``with`` block."""

    __slots__ = ("_result", "_watching")

    def __init__(self, watching: Sequence[Ended]) -> None:
        self._watching = watching
        self._result: object = None

    def __enter__(self) -> Self:
        return self

    def returns(self, result: R) -> R:
        """Note the result, and return it."""
        if self._watching:
            self._result = result
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._watching:
            self.end(self._result if error is None else None, error)

    def end(self, result: object, error: BaseException | None) -> None:
        """Tell the end, without a block."""
        end(self._watching, result, error)


_UNWATCHED: Final = _UnderWay(())


class Watched:
    """A producer or a consumer as its watchers see it."""

    client: WatchedClient
    group: str
    watchers: Mapping[Kind, tuple[Watcher, ...]] = MappingProxyType({})
    """Of each kind that is watched, its own watchers and then those of `watch`."""
    _own_watchers: tuple[Watchers, ...] = ()

    def _watch_by(
        self,
        *own: Watchers | None,
        kind: Kind = "process",
        hooks: Iterable[Watcher] = (),
        metrics: Metrics | None = None,
    ) -> None:
        """Add its own watchers, then hooks of one kind, then what counts; from then on `watch` reaches it."""
        hooks = tuple(hooks)
        for hook in hooks:
            check_arguments("hooks: the function", hook, "an Operation")
        watchers = *own, *({kind: hook} for hook in hooks), None if metrics is None else _counting(metrics)
        with _lock:
            self._own_watchers += tuple(filter(None, watchers))
            _all_watched.add(self)
            _update(self)

    def _watched(
        self,
        kind: Kind,
        topic: str | None = None,
        messages: Sequence[Message | StoredMessage] = (),
        **fields: Any,  # noqa: ANN401 (those of `Operation`)
    ) -> _UnderWay:
        """Return a block that is the operation of this kind, whose result `returns` notes."""
        watchers = self.watchers.get(kind)
        if not watchers:
            return _UNWATCHED
        return _UnderWay(begin(watchers, Operation(kind, self.client, self.group, topic, messages, **fields)))

    def _receiving(self, topic: str | None = None) -> _UnderWay:
        if "receive" not in self.watchers:  # each poll asks
            return _UNWATCHED
        return self._watched("receive", topic, is_batch=True, model="clustering")

    def _note(
        self,
        kind: Kind,
        topic: str = "",
        result: str = "",
        number: int = 1,
        *,
        queue: MessageQueue | None = None,
        messages: Sequence[StoredMessage] = (),
    ) -> None:
        watchers = self.watchers.get(kind)
        if watchers and number:
            moment = Operation(kind, self.client, self.group, topic, messages, queue, result, number)
            for watcher in watchers:
                watcher(moment)


# ---- who watches


class _Entry(NamedTuple):
    target: weakref.ref[object] | None
    watchers: Watchers
    key: object


_lock: Final = Lock()
_all_watched: Final[weakref.WeakSet[Watched]] = weakref.WeakSet()
_entries: Final[list[_Entry]] = []


def _update(member: Watched) -> None:
    by_key: dict[object, Watchers] = {}
    for target, watchers, key in _entries:
        if target is None or target() in (member.client, member.client.runner):
            by_key.pop(key, None)
            by_key[key] = watchers
    by_kind: dict[Kind, tuple[Watcher, ...]] = {}
    for watchers in (*member._own_watchers, *by_key.values()):
        for kind, watcher in watchers.items():
            by_kind[kind] = *by_kind.get(kind, ()), watcher
    member.watchers = by_kind


def add_watchers(target: object, watchers: Watchers, key: object) -> Callable[[], None]:
    """Let functions watch like that of `watch`, under locks too. Of several with one key a client has the latest."""
    entry = _Entry(_reference(target), watchers, key)

    def change(*entries: _Entry) -> None:
        with _lock:
            others = (other for other in _entries if other is not entry)
            alive = (other for other in others if other.target is None or other.target() is not None)
            _entries[:] = *alive, *entries
            for member in list(_all_watched):
                _update(member)

    change(entry)
    return change


def watch(target: object, watcher: Watcher) -> Callable[[], None]:
    """Call ``watcher(operation)`` when an operation of a client begins; what it returns, at the end: see `Operation`.

    It is called in the thread of the operation, before that goes on, and so is what it returns; of a moment that comes
    under a lock of librmq, as soon as the lock is released.

    Args:
        target: A producer, a consumer or a `Client`; a route, such as what `Broker.open`, `share` and `connect` return;
            a kit; None for all clients of this process.
        watcher: Returns None, or a function that is called with the result and the error.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: The target is none of these, or the watcher takes no operation.
    """
    check_arguments("watch: the function", watcher, "an Operation")

    def later(operation: Operation) -> None:
        call_outside(partial(watcher, operation))  # a moment can come under a lock

    watchers: Watchers = {**dict.fromkeys(get_args(Act), watcher), **dict.fromkeys(get_args(Moment), later)}
    return add_watchers(target, watchers, later)


def _reference(target: object) -> weakref.ref[object] | None:
    """Return the client, or the runner whose clients, of what a caller named; None for all."""
    if target is None:
        return None
    client = getattr(target, "client", target)
    if hasattr(client, "client_id"):
        return weakref.ref(client)
    if isinstance(runner := getattr(target, "runner", None), Runner):
        return weakref.ref(runner)
    raise ConfigError(f"expected a producer, a consumer, a Client, a route or None, found {target!r:.80}")


def _counting(metrics: Metrics) -> Watchers:
    """Return watchers that count what clients do."""
    from librmq.metrics import METRICS, Metrics, outside  # most clients have none

    check_kind("metrics", metrics, Metrics)
    count = outside(metrics).count

    def count_moment(moment: Operation) -> None:
        name = _COUNTERS[moment.kind]
        values = moment.topic or "", moment.group, moment.result
        count(name, moment.number, **dict(zip(METRICS[name].labels, values, strict=False)))

    def count_try(operation: Operation) -> Ended:
        topic, now_ms = operation.topic or "", operation.client.runner.now_ms
        if operation.attempt:
            count("send_retries", topic=topic)
        begin_ms = now_ms()

        def tried(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the result of a send)
            if result is not None or error is not None:
                count("sends", topic=topic, status="ERROR" if result is None else result.status.value)
                count("send_bytes", operation.size, topic=topic)
                count("send_seconds", (now_ms() - begin_ms) / 1000, topic=topic)

        return tried

    def count_call(call: Operation) -> Ended:
        now, labels = call.client.runner.clock.monotonic, {"topic": call.topic or "", "group": call.group}
        begin_s = now()
        return lambda result, error: count("consume_seconds", now() - begin_s, **labels)

    return {"try": count_try, "process": count_call, **dict.fromkeys(_COUNTERS, count_moment)}


# ---- messages that are kept for a later send

_keepers: Final[list[tuple[weakref.ref[object] | None, Callable[[dict[str, str]], None]]]] = []


def observe_kept(keeper: Callable[[dict[str, str]], None], target: object = None) -> Callable[[], None]:
    """Call a function with the properties of each message that is kept for a later send, in the context of its caller.

    It may add to them, such as the context that the send shall have. Return a function that ends this; the end of a
    client or a route ends it too.
    """
    entry = _reference(target), keeper
    _keepers[:] = [(ref, other) for ref, other in _keepers if ref is None or ref() is not None]
    _keepers.append(entry)

    def stop() -> None:
        if entry in _keepers:
            _keepers.remove(entry)

    return stop


def note_kept(properties: dict[str, str]) -> None:
    """Show the properties of a message that is kept for a later send to all who asked for it, the latest first."""
    for owner, keeper in reversed(_keepers.copy()):
        if owner is None or owner() is not None:
            keeper(properties)
