"""Producers of transactions: consumers see a message if, and only if, a local transaction commits.

::

    half sent, stored ──> local transaction runs ──> committed: the message is delivered
         │                        │                 rolled back: it never is
         └ refused: nothing runs  └ unknown, or the process dies: the broker asks ``check`` later

Mirrors ``TransactionMQProducer`` and ``DefaultMQProducerImpl.sendMessageInTransaction``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, Unpack, cast

from librmq.client.operations import Kind
from librmq.client.producer import Producer, ProducerArguments
from librmq.client.sender import SendResult
from librmq.config import check_arguments
from librmq.errors import ClientError, ConfigError, MessageIllegalError
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.message.ids import parse_offset_message_id
from librmq.message.message import delayed_transaction
from librmq.message.properties import PropertyName
from librmq.override import override
from librmq.protocol import (
    CheckTransaction,
    EndTransaction,
    Request,
    Route,
    SendStatus,
    TransactionState,
)
from librmq.runtime import Work
from librmq.runtime.event_log import EventLog

R = TypeVar("R")
_KINDS: Final[Mapping[TransactionState, Kind]] = {
    TransactionState.COMMIT: "commit",
    TransactionState.ROLLBACK: "rollback",
    TransactionState.UNKNOWN: "undecided",
}
_log = EventLog("librmq.producer")


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """The message of a transaction that the broker asks about."""

    topic: str
    """The topic of the send."""
    half: StoredMessage
    properties: Mapping[str, str]
    """The properties as sent."""

    @property
    def body(self) -> bytes:
        """The body as sent."""
        return self.half.body

    @property
    def tags(self) -> str | None:
        """The tag."""
        return self.half.tags

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys."""
        return self.half.keys

    @property
    def message_id(self) -> str:
        """The unique id, which is also the transaction's id."""
        return self.half.message_id

    @property
    def check_times(self) -> int:
        """Number of this check, counting from 1."""
        return int(self.properties.get(PropertyName.TRANSACTION_CHECK_TIMES, "0"))


Check = Callable[[CheckedMessage], TransactionState | Awaitable[TransactionState | None] | None]
"""Returns the state of a local transaction, or None; for UNKNOWN, None or an exception the broker asks again later. It
can be a coroutine function."""
Execute = Callable[[Message, Any], TransactionState | None]
"""Runs the local transaction and returns its state; None or an exception counts as UNKNOWN."""


class TransactionResult(NamedTuple):
    """Where a half message is stored, and the reported state of its transaction."""

    sent: SendResult
    """The result of sending the half message."""
    state: TransactionState
    """What the local transaction returned, as it was reported to the broker."""

    @property
    def message_id(self) -> str:
        """The unique id."""
        return self.sent.message_id

    @property
    def queue(self) -> MessageQueue:
        """The queue that the message is for."""
        return self.sent.queue

    @property
    def recall_handle(self) -> None:
        """None: no broker recalls a half message."""
        return None


class OpenTransaction:
    """A transaction whose half message is stored; see `TransactionProducer.transaction`."""

    def __init__(self, sent: SendResult) -> None:
        self.sent: Final[SendResult] = sent
        """How the half message was stored."""
        self.state: TransactionState = TransactionState.COMMIT

    def rollback(self) -> None:
        """Roll back at the end of the block even without an exception."""
        self.state = TransactionState.ROLLBACK

    def unknown(self) -> None:
        """Report no state at the end of the block, so that the broker asks."""
        self.state = TransactionState.UNKNOWN


class TransactionProducer(Producer):
    """Sends messages that consumers see only after a local transaction commits. Thread-safe.

    ``check(message)`` returns the state of a transaction whose end did not reach the broker. The broker can ask any
    producer of the group, even after a restart, so read the state from a database, not from memory. The producer joins
    its group when it is created, and answers checks from then on. ``execute`` runs the local transaction of
    `send_in_transaction`. ``check_pool`` runs the checks, if given, instead of the broker's workers. Do not share the
    group with ordinary producers, which can't answer: the broker logs a warning when one joins.
    """

    _answers_checks = True

    def __init__(
        self,
        route: Route,
        group: str,
        check: Check,
        *,
        execute: Execute | None = None,
        check_pool: Executor | None = None,
        **settings: Unpack[ProducerArguments],
    ) -> None:
        super().__init__(route, group, **settings)
        if not callable(check):
            raise ConfigError(f"check: expected a function of a message, found {check!r}")
        check_arguments("check: the function", check, "one message")
        if execute is not None:
            check_arguments("execute: the function", execute, "a message", "arg")
        self._check = check
        self._execute = execute
        self._check_pool = check_pool
        self.start()  # a restarted process can be asked before it sends anything

    def send_in_transaction(
        self, message: Message, arg: object = None, *, execute: Execute | None = None
    ) -> TransactionResult:
        """Store a half message, run ``execute(message, arg)``, and end the transaction with the returned state.

        An exception of ``execute`` is logged and counts as UNKNOWN: the broker will ask. If the half message is not
        stored as requested, ``execute`` does not run and the half message is rolled back. If the end of the transaction
        does not reach the broker, the broker asks.

        Raises:
            ConfigError: ``execute`` is missing, both here and in the constructor.
            MessageIllegalError: The message has a delay, or is refused as by `send`.
            ClientError: The half message could not be sent, for the reasons of `send`; ``execute`` did not run. If it
                was stored anyway, the check will find that nothing was committed.
        """
        run = self._local_transaction(execute)
        half, sent = self._send_half(message)
        state = TransactionState.ROLLBACK
        if sent.status is SendStatus.SEND_OK:
            self._runner.point(f"local transaction {message.topic}")
            with self._logging_failure(sent):
                state = TransactionState.UNKNOWN
                state = _state_of(run(half, arg))
        self._end_transaction(half, sent, state)
        return TransactionResult(sent, state)

    async def send_in_transaction_async(
        self,
        message: Message,
        arg: object = None,
        *,
        execute: Callable[[Message, Any], TransactionState | Awaitable[TransactionState | None] | None] | None = None,
    ) -> TransactionResult:
        """Do as `send_in_transaction` without blocking the event loop.

        ``execute`` is a function or a coroutine function; it runs in the event loop. If it is cancelled, the broker
        asks for the outcome.
        """
        run = self._local_transaction(execute)
        half, sent = await self._runner.offload(lambda: self._send_half(message))
        state = TransactionState.ROLLBACK
        if sent.status is SendStatus.SEND_OK:
            self._runner.point(f"local transaction {message.topic}")
            with self._logging_failure(sent):
                state = TransactionState.UNKNOWN
                result: Any = run(half, arg)
                state = _state_of(await result if inspect.isawaitable(result) else result)
        await self._runner.offload(lambda: self._end_transaction(half, sent, state))
        return TransactionResult(sent, state)

    def _local_transaction(self, execute: Callable[[Message, Any], Any] | None) -> Callable[[Message, Any], Any]:
        run = execute or self._execute
        if run is None:
            raise ConfigError("execute is missing: pass it here or to TransactionProducer")
        return run

    @contextmanager
    def _logging_failure(self, sent: SendResult) -> Iterator[None]:
        """Log an exception of the local transaction; its state stays unknown."""
        try:
            yield
        except Exception:
            _log.exception(
                "group %(group)s: the local transaction of %(message_id)s failed",
                group=self.group,
                message_id=sent.message_id,
            )

    @contextmanager
    def transaction(self, message: Message) -> Iterator[OpenTransaction]:
        """Return a context manager for the local transaction; its end commits, an exception rolls back.

        A process that dies within the block leaves the outcome to the check.

        Raises:
            ClientError: The half message was not stored as requested; the block does not run.
        """
        half, sent = self._send_half(message)
        opened = OpenTransaction(sent)
        if sent.status is not SendStatus.SEND_OK:
            self._end_transaction(half, sent, TransactionState.ROLLBACK)
            raise ClientError(
                f"topic {message.topic!r}: the half message was not stored as requested ({sent.status.value}); "
                "nothing ran: try again"
            )
        self._runner.point(f"local transaction {message.topic}")
        try:
            yield opened
        except Exception:
            self._end_transaction(half, sent, TransactionState.ROLLBACK)
            raise
        self._end_transaction(half, sent, opened.state)

    def _send_half(self, message: Message) -> tuple[Message, SendResult]:
        if not isinstance(message, Message):
            raise MessageIllegalError(f"message: expected Message(topic, body), found {message!r:.80}")
        if message.delay_level > 0 or message._delays is not None:
            raise delayed_transaction(message.topic)
        if message.priority is not None:
            raise MessageIllegalError(
                f"topic {message.topic!r}: a message of a transaction can't have a priority: send it without"
            )
        half = self._prepare(message, None, {})
        half.properties[PropertyName.TRANSACTION_PREPARED] = "true"
        half.properties[PropertyName.PRODUCER_GROUP] = self.group
        with self._watched("send", half.topic, (half,)) as send:
            return half, send.returns(self.sender.send(half, self._timeout_ms, watchers=self.watchers.get("try", ())))

    def _end_transaction(self, half: Message, sent: SendResult, state: TransactionState) -> None:
        _, physical_offset = parse_offset_message_id(sent.offset_id)
        request = EndTransaction(self.group, state, sent.queue_offset, physical_offset, sent.message_id)
        self._send_end(sent.queue.broker_name, request, half, half.topic, sent.offset_id)

    def _send_end(
        self, broker_name: str, request: EndTransaction, half: Message | StoredMessage, topic: str, offset_id: str
    ) -> None:
        is_decided = request.state is not TransactionState.UNKNOWN
        if is_decided:
            self._runner.point(f"end transaction {request.state.name}")
        fields = {"broker_name": broker_name, "offset_id": offset_id, "is_check": request.from_check}
        try:
            with self._watched(_KINDS[request.state], topic, (half,), **fields):
                if is_decided:
                    self._routes.endpoint(broker_name).call(request)
        except ClientError as error:
            _log.warning(
                "group %(group)s: no broker accepted the end of transaction %(message_id)s: %(error)s",
                group=self.group,
                message_id=request.message_id,
                error=error,
            )

    @override
    def answer(self, request: Request[R], /) -> R:
        """Schedule a check that the broker asks for; it runs without the runner's lock."""
        if not isinstance(request, CheckTransaction):
            return super().answer(request)
        half = request.message
        properties = {**half.properties, PropertyName.WAIT: "false"}
        message = CheckedMessage(properties.get(PropertyName.REAL_TOPIC, ""), half, properties)
        if self._check_pool is not None:
            self._check_pool.submit(self._check_in_pool, request, message)
        else:
            self._runner.submit(
                Work(
                    f"{self.group} check {message.topic}",
                    lambda: self._check(message),
                    lambda state, error: self._checked(request, state, error),
                    self.client,
                )
            )
        return cast("R", None)

    def _check_in_pool(self, request: CheckTransaction, message: CheckedMessage) -> None:
        state, error = None, None
        try:
            state = self._check(message)
            if inspect.isawaitable(state):
                raise ConfigError("check: a coroutine function can't run in check_pool")
        except Exception as raised:
            error = raised
        with self._runner.lock:
            self._checked(request, state, error)

    def _checked(self, request: CheckTransaction, state: object, error: Exception | None) -> None:
        half = request.message
        if error is None and state is not None and not isinstance(state, TransactionState):
            error = TypeError(f"expected a TransactionState or None, found {state!r}")
        if error is not None:
            _log.error(
                "group %(group)s: the check of %(message_id)s failed",
                group=self.group,
                message_id=half.message_id,
                exc_info=error,
            )
            return
        state = state if isinstance(state, TransactionState) else TransactionState.UNKNOWN
        end = EndTransaction(
            self.group, state, half.queue_offset, half.physical_offset, half.message_id, from_check=True
        )
        topic = half.properties.get(PropertyName.REAL_TOPIC, half.topic)
        self._send_end(request.broker_name, end, half, topic, half.offset_id)


def _state_of(result: object) -> TransactionState:
    """Return what a local transaction has returned; None means unknown."""
    if result is None:
        return TransactionState.UNKNOWN
    if not isinstance(result, TransactionState):
        raise TypeError(f"expected a TransactionState or None, found {result!r}")
    return result
