"""A guard in front of a listener, which drops messages that were consumed before.

    none ──claim──▶ CONSUMING ──finish──▶ CONSUMED        found CONSUMED: acknowledged
      ▲                 │                     │           found CONSUMING: delivered again later
      ├────release──────┘                     │           expired, either: as none
      └────────────────expiry─────────────────┘

A listener can also record its steps (`DedupListener.step`), so that a retry continues behind the last one that ended. A
step has a record like its message, with the step's name in its key and, until it ends, the message's token and expiry.

A record belongs to one message of one group. A claim holds it for ``consuming_timeout`` under a token of its own.
Finishing and releasing check that token and that time, so an expired holder changes nothing of its successor's.
``docs/dedup.md`` says what this guarantees, and what it cannot.

`MemoryDedupStore` is for one process, `SqliteDedupStore` for those of one machine; `librmq.idempotence._server_stores`
has stores on servers. `librmq.idempotence._transactional_tables` is the strongest form, for effects in a database.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, TypeGuard, Unpack

from librmq.clock import Clock, SystemClock, moves_by_itself
from librmq.config import Config, Seconds, check_arguments
from librmq.consumer import OrderlyResult
from librmq.errors import ConfigError, DedupStoreBusyError, DedupStoreError, StoreClosedError
from librmq.idempotence import Claim, DedupStore, dedup_key, purge_step, unique_id
from librmq.idempotence.stores import KEEP_CONSUMED, LONGEST, run_in_background
from librmq.listener import (
    Delivered,
    ReconsumeLater,
    is_coroutine_function,
    note_consumed,
    refuse_generator,
    returned_failure,
)
from librmq.metrics import Metrics, outside
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Inherited, Lock

__all__ = ["DedupCounts", "DedupListener", "GuardedStep", "deduplicated"]

_log = EventLog("librmq.dedup")


@dataclass
class DedupCounts:
    """Counts of a guard's results."""

    consumed: int = 0
    """Messages that the listener consumed under a claim."""
    duplicates: int = 0
    """Messages that were consumed before, and acknowledged without the listener."""
    busy: int = 0
    """Messages that another consumer held, delivered again later."""
    taken_over: int = 0
    """Claims of holders that did not end in time."""
    released: int = 0
    """Claims given up because the listener failed."""
    lost: int = 0
    """Claims that had expired when the listener ended, so that another consumer can have consumed the message too."""
    unguarded: int = 0
    """Messages consumed without a claim because the store failed."""
    postponed: int = 0
    """Messages delivered again later because the store failed."""
    unmarked: int = 0
    """Claims whose end could not be stored; they expire."""
    steps: int = 0
    """Steps of a listener that were recorded."""
    skipped_steps: int = 0
    """Steps that an earlier run of the listener had recorded."""


class _Request(NamedTuple):
    """A call that a flow requests, of the store or of the listener."""

    call: Callable[[], Any]
    of_store: bool
    operation: tuple[str, tuple[Any, ...]] | None = None
    """Name and arguments of a call of the store."""


_Flow = Generator[_Request, Any, Any]


class _Claimed(NamedTuple):
    """A message for the listener, under a claim or, with an empty ``owner``, without one."""

    key: str
    owner: str
    key_of_step: Callable[[str], str] = str
    expires_at_ms: int = 0


_UNGUARDED: Final = _Claimed("", "")


@dataclass(slots=True, eq=False)
class _Consumption:
    """What a guard's listener is consuming now: a message, or a list of them."""

    guard: DedupListener
    claims: list[_Claimed]
    is_list: bool = False
    is_over: bool = False
    """Whether the listener has ended, so that a renewal would undo its mark."""
    step_names: set[str] = field(default_factory=set)


_consumption: ContextVar[_Consumption | None] = ContextVar("librmq_guarded_message", default=None)


class _Resumed:
    """What is awaited, which knows what it consumes while it runs, and not while it waits.

    Others run in the same context meanwhile, and the garbage collector can end it within one of them.
    """

    def __init__(self, pending: Awaitable[Any], consumption: _Consumption) -> None:
        self._pending = pending
        self._consumption = consumption

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._pending.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        while True:
            token = _consumption.set(self._consumption)
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            finally:
                _consumption.reset(token)
            try:
                value = yield awaited
            except BaseException as error:
                resume = partial(steps.throw, error)
            else:
                resume = partial(next, steps) if value is None else partial(steps.send, value)


_OUTCOMES: Final = {
    "duplicates": "skip",
    "busy": "wait",
    "taken_over": "take over",
    "unguarded": "no store",
    "postponed": "no store",
}
"""Label values in `Metrics` for each count."""
_NOT_ACKNOWLEDGED: Final = "the listener did not acknowledge it"


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupConfig(Config):
    """Settings of a guard. Durations are seconds, or a `timedelta` as keywords."""

    application: str = ""
    """Part of every record's scope, with topic, group and tag."""
    consuming_timeout: Annotated[float, Seconds(0.001, LONGEST)] = 600.0
    """Time after which another consumer can take over an open claim; choose more than the listener ever takes."""
    keep_consumed: Annotated[float, Seconds(0.001, LONGEST)] = KEEP_CONSUMED
    """Time for which a consumed message's record is kept, by default 72 hours."""
    when_store_fails: Literal["consume", "retry"] = "consume"
    """Treatment of messages while the store fails: consume them without a guard, or deliver them again later.

    A store that answers, but was busy at several tries, has them delivered again later in any case.
    """
    renews: bool = False
    """A thread renews the claims of running listeners at each third of `consuming_timeout`.

    A listener that hangs keeps its messages for as long as its process lives. There is no thread with a clock that is
    moved by hand.
    """
    batch: bool = False
    """The listener takes a list of messages."""
    must_return: bool = False
    """Count only True as consumed, as in `librmq.consumer.PushConsumer.subscribe`."""


class DedupKeywords(TypedDict, total=False):
    """Keywords of a `DedupListener`: the settings of `DedupConfig`, and its key, metrics and clock."""

    application: str
    consuming_timeout: float | timedelta
    keep_consumed: float | timedelta
    when_store_fails: Literal["consume", "retry"]
    renews: bool
    batch: bool
    must_return: bool
    key: Callable[[Any], str | None]
    metrics: Metrics | None
    clock: Clock | None


class DedupListener:
    """A listener that calls ``listener`` only for messages that were not consumed before. Thread-safe.

    ``listener`` is concurrent or orderly, sync or async. From a list, a listener of one message gets the messages one
    by one up to the first failure; the consumer learns from the error or the returned index how many are consumed.
    """

    def __init__(
        self, listener: Callable[..., object], store: DedupStore, *, group: str, **settings: Unpack[DedupKeywords]
    ) -> None:
        """It is a listener too: subscribe it in place of ``listener``.

        Args:
            listener: Called for new messages.
            store: Keeps the records. Failures of the store are counted in `counts` and logged.
            group: The consumer group.
            **settings: Those of `DedupConfig`, and three more. ``key`` returns the key of a message, by default its
                unique id (a business key is better), None or "" for no guard. ``metrics`` counts results. ``clock`` is
                by default the store's. Without either a thread purges the store; with one the caller calls
                `purge_step`.

        Raises:
            ConfigError: A setting is unknown, or its value is refused.
        """
        options: dict[str, Any] = dict(settings)
        key, metrics, clock = options.pop("key", unique_id), options.pop("metrics", None), options.pop("clock", None)
        self.config: DedupConfig = DedupConfig().with_settings(options)
        if not group:
            raise ConfigError("group: expected the consumer group's name, found none")
        for name, function in (("listener", listener), ("key", key)):
            if not callable(function):
                raise ConfigError(f"{name}: expected a function of a message, found {function!r:.80}")
        refuse_generator(listener)
        check_arguments("listener: the function", listener, "one message, or a list")
        check_arguments("key: the function", key, "one message")
        self.listener = listener
        self.store = store
        self.counts: DedupCounts = DedupCounts()
        self._group = group
        self._application = self.config.application
        self._key: Callable[[Any], object] = key
        self._consuming_ms = round(1000 * self.config.consuming_timeout)
        self._keep_ms = round(1000 * self.config.keep_consumed)
        self._consumes_unguarded = self.config.when_store_fails == "consume"
        self._batch = self.config.batch
        self._must_return = self.config.must_return
        self._metrics: Metrics | None = None if metrics is None else outside(metrics)
        clock = clock or getattr(store, "clock", None)
        self._clock: Clock = clock or SystemClock()
        self._purges = clock is None
        self._renews = self.config.renews and moves_by_itself(self._clock)
        self._running: set[_Consumption] = set()
        self._is_async = is_coroutine_function(listener)
        self._lock = Lock()
        self._renewing = Lock()
        _guards.add(self)

    def __call__(self, message: Any) -> Any:  # noqa: ANN401 (a message or a list; what the listener returns)
        """Consume a message, or a list of them; a coroutine if the listener is one.

        Raises:
            ReconsumeLater: Another consumer holds the message. Errors of the listener propagate.
        """
        if self._purges:
            run_in_background(self.store, _purge_until_closed, self._clock, "librmq-dedup-purge")
        if self._renews:
            run_in_background(self, DedupListener._renew_running, self._clock, "librmq-dedup-renew")
        if not isinstance(message, (list, tuple)):
            if not self._is_async:
                return self._consume_now(message)
            flow = self._consume(message)
        else:
            flow = self._consume_list(message) if self._batch else self._consume_one_by_one(message)
        return _run_async(flow, in_threads=self.store.blocking) if self._is_async else _run(flow)

    # ---- one message

    def _consume_now(self, message: Delivered) -> object:
        """Consume a message by direct calls, which are faster than a flow; what is unusual goes its way."""
        claim = self._prepare_claim(message)
        if claim.owner:
            try:
                outcome = self.store.claim(
                    claim.key, claim.owner, claim.expires_at_ms - self._consuming_ms, claim.expires_at_ms
                )
            except DedupStoreError as error:
                claim = self._go_without(claim, message.topic, error)
            else:
                if outcome is not Claim.NEW and not self._is_claimed(outcome, claim, message.topic):
                    return True
        try:
            result = self._call_listener(message, _Consumption(self, [claim]))
        except (Exception, asyncio.CancelledError):
            _run(self._release_claim(claim))
            raise
        if not claim.owner or not (result is True or (result is None and not self._must_return)):
            return _run(self._consume_claimed(claim, lambda: result))
        now_ms = self._clock.now_ms()
        try:
            is_stored = self.store.finish(claim.key, claim.owner, now_ms, now_ms + self._keep_ms)
        except DedupStoreError as error:
            self._warn_of_unmarked_claim(claim, "consumed", "marked so", error)
        else:
            if is_stored:
                self._count("consumed")
            else:
                _run(self._warn_of_lost_claim(claim, "consumed"))
        return result

    def _consume(self, message: Delivered) -> _Flow:
        claim = yield from self._claim(message)
        if claim is None:
            return True
        listen = partial(self._call_listener, message, _Consumption(self, [claim]))
        return (yield from self._consume_claimed(claim, listen))

    def _consume_claimed(self, claim: _Claimed, listen: Callable[[], object]) -> _Flow:
        try:
            result = yield _Request(listen, of_store=False)
            if (failure := self._failure_in(result)) is not None:
                raise failure
        except (Exception, asyncio.CancelledError):
            yield from self._release_claim(claim)
            raise
        # Any other exception ends the process, and the claim expires as after a crash.
        if result is OrderlyResult.ROLLBACK:
            yield from self._release_claim(claim)
        else:
            yield from self._finish_claim(claim)
        return result

    def _claim(self, message: Delivered) -> Generator[_Request, Any, _Claimed | None]:
        """Claim a message; return None if it was consumed before."""
        claim = self._prepare_claim(message)
        if not claim.owner:
            return claim
        now_ms = claim.expires_at_ms - self._consuming_ms
        try:
            outcome = yield self._request("claim", claim.key, claim.owner, now_ms, claim.expires_at_ms)
        except DedupStoreError as error:
            return self._go_without(claim, message.topic, error)
        return claim if self._is_claimed(outcome, claim, message.topic) else None

    def _prepare_claim(self, message: Delivered) -> _Claimed:
        """Return a claim that is not in the store yet."""
        business_key = self._key(message)
        if business_key is None or business_key == "":
            return _UNGUARDED
        if not isinstance(business_key, str):
            raise ConfigError(f"key: expected a text or None, found {business_key!r:.100}")
        key_of = partial(dedup_key, self._application, message.topic, self._group, message.tags)
        plain = business_key.replace("\0", "\0\0")  # so that no key is that of a step
        key = key_of(plain)
        owner = secrets.token_hex(12)
        return _Claimed(key, owner, lambda name: key_of(f"{plain}\0{name}"), self._clock.now_ms() + self._consuming_ms)

    def _go_without(self, claim: _Claimed, topic: str, error: DedupStoreError) -> _Claimed:
        """Return no claim, if messages are consumed without one while the store fails."""
        try:
            self._check_goes_without(error)
        except ReconsumeLater:
            self._count("postponed", topic)
            _log.warning(
                "%(key)s: delivered again later, because the dedup store failed: %(error)s", key=claim.key, error=error
            )
            raise
        self._count("unguarded", topic)
        _log.warning(
            "%(key)s: consumed without a guard, because the dedup store failed: %(error)s", key=claim.key, error=error
        )
        return _UNGUARDED

    def _is_claimed(self, outcome: Claim, claim: _Claimed, topic: str) -> bool:
        """Return whether a message is claimed now; False if it was consumed before."""
        if outcome is Claim.CONSUMED:
            self._count("duplicates", topic)
            return False
        if outcome is Claim.CONSUMING:
            self._count("busy", topic)
            raise ReconsumeLater(f"{claim.key}: another consumer is consuming it")
        if outcome is Claim.TAKEN_OVER:
            self._count("taken_over", topic)
            _log.warning("%(key)s: taken over from a consumer that did not end in time", key=claim.key)
        return True

    def _check_goes_without(self, error: DedupStoreError) -> None:
        """Postpone a message unless it may go without a record; a store that is only busy is there at a redelivery."""
        if not self._consumes_unguarded or isinstance(error, DedupStoreBusyError):
            raise ReconsumeLater(f"the dedup store failed: {error}") from error

    def _finish_claim(
        self, claim: _Claimed, counted: str = "consumed", how: str = "consumed", aim: str = "marked so"
    ) -> Generator[_Request, Any, None]:
        now_ms = self._clock.now_ms()
        request = self._request("finish", claim.key, claim.owner, now_ms, now_ms + self._keep_ms)
        yield from self._end_claim(claim, request, counted, how, aim)

    def _release_claim(self, claim: _Claimed, counted: str = "released") -> Generator[_Request, Any, None]:
        request = self._request("release", claim.key, claim.owner, self._clock.now_ms())
        yield from self._end_claim(claim, request, counted, "failed", "released")

    def _end_claim(
        self, claim: _Claimed, request: _Request, counted: str, how: str, aim: str
    ) -> Generator[_Request, Any, None]:
        if not claim.owner:
            return
        try:
            is_stored = yield request
        except DedupStoreError as error:
            self._warn_of_unmarked_claim(claim, how, aim, error)
            return
        if not is_stored:
            yield from self._warn_of_lost_claim(claim, how)
        elif counted:
            self._count(counted)

    def _warn_of_unmarked_claim(self, claim: _Claimed, how: str, aim: str, error: DedupStoreError) -> None:
        self._count("unmarked")
        _log.warning(
            "%(key)s: %(_how)s, but could not be %(_aim)s: %(error)s", key=claim.key, _how=how, _aim=aim, error=error
        )

    def _warn_of_lost_claim(self, claim: _Claimed, how: str) -> Generator[_Request, Any, None]:
        self._count("lost")
        try:
            record = yield self._request("read", claim.key, self._clock.now_ms())
        except DedupStoreError:
            now = "its present state is unknown"
        else:
            if record is None:
                now = "no other consumer has taken it over"
            else:
                now = "another has consumed it too" if record.consumed else "another is consuming it"
        _log.warning(
            "%(key)s: %(_how)s, but later than %(consuming_ms)d ms after its claim: %(_now)s",
            key=claim.key,
            _how=how,
            consuming_ms=self._consuming_ms,
            _now=now,
        )

    def _call_listener(self, argument: object, consumption: _Consumption) -> object:
        """Call the listener, and let `step` and `renew` know what it consumes."""
        token = _consumption.set(consumption)
        if self._renews:
            self._running.add(consumption)
        result: object = None
        try:
            result = self.listener(argument)
        finally:
            _consumption.reset(token)
            if not _is_pending(result):
                self._note_end(consumption)
        return self._await_listener(result, consumption) if _is_pending(result) else result

    async def _await_listener(self, pending: Awaitable[Any], consumption: _Consumption) -> object:
        try:
            return await _Resumed(pending, consumption)
        finally:
            if self._renews and self.store.blocking:
                await asyncio.shield(asyncio.to_thread(self._note_end, consumption))
            else:
                self._note_end(consumption)

    def _note_end(self, consumption: _Consumption) -> None:
        if self._renews:
            with self._renewing:  # A renewal that is on its way arrives before the mark.
                consumption.is_over = True
            self._running.discard(consumption)
        else:
            consumption.is_over = True

    # ---- longer claims

    def renew(self) -> Any:  # noqa: ANN401 (None, or an awaitable of it)
        """Extend the claim of the message, or of the list, that the listener consumes by another ``consuming_timeout``.

        Call it inside the listener, more often than the timeout; in a coroutine ``await`` it. The option ``renews``
        does it by a thread.

        Raises:
            ConfigError: The listener of this guard does not run here.
            ReconsumeLater: Another consumer has taken a message over, or the store failed and the guard has
                ``when_store_fails="retry"``, or it was busy.
        """
        consumption = _consumption.get()
        if consumption is None or consumption.guard is not self or consumption.is_over:
            raise ConfigError("renew: expected a running listener of this guard")
        flow = self._renew(consumption)
        return _run_async(flow, in_threads=self.store.blocking) if self._is_async else _run(flow)

    def _renew(self, consumption: _Consumption) -> _Flow:
        outcomes = yield from self._run_together([self._renew_claim(claim) for claim in consumption.claims])
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                raise outcome
            consumption.claims[number] = outcome

    def _renew_claim(self, claim: _Claimed) -> Generator[_Request, Any, _Claimed]:
        if not claim.owner:
            return claim
        now_ms = self._clock.now_ms()
        renewed = claim._replace(expires_at_ms=now_ms + self._consuming_ms)
        try:
            outcome = yield self._request("claim", claim.key, claim.owner, now_ms, renewed.expires_at_ms)
        except DedupStoreError as error:
            self._check_goes_without(error)
            _log.warning("%(key)s: its claim could not be renewed: %(error)s", key=claim.key, error=error)
            return claim
        if outcome in (Claim.CONSUMING, Claim.CONSUMED):
            raise ReconsumeLater(f"{claim.key}: another consumer has taken it over, because the claim had expired")
        return renewed

    def _renew_running(self, now_ms: int) -> int:
        """Renew the claims of all running listeners; return when to do so again."""
        for consumption in list(self._running):
            with self._renewing:
                if consumption.is_over:
                    continue
                try:
                    _run(self._renew(consumption))
                except ReconsumeLater as error:
                    self._running.discard(consumption)
                    _log.warning("a claim is renewed no more: %(error)s", error=error)
        return now_ms + max(1, self._consuming_ms // 3)

    # ---- steps of the listener

    def step(self, name: str) -> GuardedStep:
        """Return a context manager for a part of the listener's work that is done once for each message.

        ``with guard.step("charge") as first:`` inside the listener; in a coroutine ``async with``. ``first`` is False
        if an earlier run of the listener for the same message has ended the block: then do nothing in it. A block that
        raises is begun again by the next run. If the process dies between the effect and the record at the block's
        end, the next run does the step again. Records are kept as long as a consumed message's. The steps of a message
        without a key are not recorded, and a listener of lists has none.

        Entering raises:
            ConfigError: The listener of this guard does not run here, or it consumes a list; or the name is no text, is
                empty, has a NUL, or was used before for this message.
            ReconsumeLater: The message's claim has expired, or another consumer does the step, or the store failed and
                the guard has ``when_store_fails="retry"``, or it was busy.
        """
        return GuardedStep(self, name)

    def _begin_step(self, name: str) -> Generator[_Request, Any, _Claimed | None]:
        """Claim a step; return None if it was done before."""
        consumption = _consumption.get()
        if consumption is None or consumption.guard is not self or consumption.is_list:
            raise ConfigError(f"step {name!r}: expected a running listener of this guard, for a single message")
        if type(name) is not str or not name or "\0" in name:
            raise ConfigError(f"step: expected a name, which is text without NUL, found {name!r:.80}")
        if name in consumption.step_names:
            raise ConfigError(
                f"step {name!r:.80}: this run of the listener had it already: give each step its own name"
            )
        consumption.step_names.add(name)
        message = consumption.claims[0]
        if not message.owner:
            return _UNGUARDED
        key, now_ms = message.key_of_step(name), self._clock.now_ms()
        if now_ms >= message.expires_at_ms:
            raise ReconsumeLater(f"{key}: step {name!r} would begin after the message's claim has expired")
        try:
            claim = yield self._request("claim", key, message.owner, now_ms, message.expires_at_ms)
        except DedupStoreError as error:
            self._check_goes_without(error)
            _log.warning("%(key)s: step begun without a record: %(error)s", key=key, error=error)
            return _UNGUARDED
        if claim is Claim.CONSUMING:
            raise ReconsumeLater(f"{key}: another consumer does step {name!r}")
        if claim is Claim.CONSUMED:
            self._count("skipped_steps")
            return None
        if claim is Claim.TAKEN_OVER:
            _log.warning(
                "%(key)s: step %(step)s begins again, because an earlier run did not end it", key=key, step=name
            )
        return _Claimed(key, message.owner, expires_at_ms=message.expires_at_ms)

    def _end_step(self, claim: _Claimed, failed: bool) -> _Flow:
        """Record a step, or remove its claim."""
        if failed:
            yield from self._release_claim(claim, "")
        else:
            now_ms = self._clock.now_ms()
            if claim.owner and now_ms >= claim.expires_at_ms:  # renew the claim, unless another consumer has it now
                with suppress(DedupStoreError):
                    yield self._request("claim", claim.key, claim.owner, now_ms, now_ms + self._consuming_ms)
            yield from self._finish_claim(claim, "steps", "done", "recorded")

    # ---- several messages

    def _consume_one_by_one(self, messages: Sequence[Any]) -> _Flow:
        """Consume messages one by one; those before the first failure stay consumed."""
        for index, message in enumerate(messages):
            try:
                result = yield from self._consume(message)
                if result is OrderlyResult.ROLLBACK:
                    return result
            except Exception as error:
                note_consumed(error, index)
                raise
        return True

    def _consume_list(self, messages: Sequence[Any]) -> _Flow:
        """Consume all messages up to the first that cannot be claimed."""
        claims = yield from self._run_together([self._claim(message) for message in messages])
        end = next((at for at, claim in enumerate(claims) if isinstance(claim, Exception)), len(messages))
        claimed: list[tuple[int, Any, _Claimed]] = []
        surplus: list[_Claimed] = []
        for index, outcome in enumerate(claims):
            if isinstance(outcome, _Claimed) and index < end:
                claimed.append((index, messages[index], outcome))
            elif isinstance(outcome, _Claimed):
                surplus.append(outcome)
        refusal = claims[end] if end < len(messages) else None
        if refusal is not None and not isinstance(refusal, ReconsumeLater):
            surplus, claimed = surplus + [claim for _, _, claim in claimed], []
        yield from self._run_together([self._release_claim(claim) for claim in surplus])
        if refusal is not None and not isinstance(refusal, ReconsumeLater):
            raise refusal
        done, failure = len(claimed), None
        result: object = True
        if claimed:
            try:
                messages = [message for _, message, _ in claimed]
                consumption = _Consumption(self, [claim for _, _, claim in claimed], is_list=True)
                result = yield _Request(partial(self._call_listener, messages, consumption), of_store=False)
                done = self._consumed_count(result, len(claimed))
            except (Exception, asyncio.CancelledError) as error:
                failure = error
                done = min(max(0, error.consumed), len(claimed)) if isinstance(error, ReconsumeLater) else 0
        yield from self._run_together(
            [
                self._finish_claim(claim) if number < done else self._release_claim(claim)
                for number, (_, _, claim) in enumerate(claimed)
            ]
        )
        if failure is None and done == len(claimed):
            if refusal is None:
                return True
            note_consumed(refusal, end)
            raise refusal
        consumed = claimed[done][0] if done < len(claimed) else claimed[-1][0] + 1
        if failure is None:
            if result is OrderlyResult.ROLLBACK:
                return result
            failure = ReconsumeLater(_NOT_ACKNOWLEDGED)  # an orderly consumer knows no index
        note_consumed(failure, consumed)
        raise failure

    def _run_together(self, flows: Sequence[Generator[_Request, Any, Any]]) -> Generator[_Request, Any, list[Any]]:
        """Run flows in parallel, join their calls of the store, and return each one's result or error."""
        outcomes: list[Any] = [None] * len(flows)
        requests: dict[int, _Request] = {}

        def go_on(number: int, step: Callable[[], _Request]) -> None:
            try:
                requests[number] = step()
            except StopIteration as end:
                requests.pop(number, None)
                outcomes[number] = end.value
            except Exception as error:
                requests.pop(number, None)
                outcomes[number] = error

        for number, flow in enumerate(flows):
            go_on(number, partial(next, flow))
        while requests:
            turn = list(requests.items())
            answers = yield _Request(partial(self._answers, [request for _, request in turn]), of_store=True)
            for (number, _), answer in zip(turn, answers, strict=True):
                failed = isinstance(answer, Exception)
                go_on(number, partial(flows[number].throw if failed else flows[number].send, answer))
        return outcomes

    def _answers(self, requests: Sequence[_Request]) -> list[Any]:
        """Return the store's answers, in one round trip if possible, with errors in their places."""
        operations = [request.operation for request in requests]
        execute_many = getattr(self.store, "many", None)
        if execute_many is not None and len(requests) > 1:
            try:
                return list(execute_many(operations))
            except DedupStoreError as error:
                return [error] * len(requests)
        answers: list[Any] = []
        for request in requests:
            try:
                answers.append(request.call())
            except DedupStoreError as error:
                answers.append(error)
        return answers

    def _request(self, name: str, *arguments: str | int) -> _Request:
        return _Request(lambda: getattr(self.store, name)(*arguments), of_store=True, operation=(name, arguments))

    def _consumed_count(self, result: object, count: int) -> int:
        """Return how many of ``count`` messages a listener of lists has consumed, by its result."""
        if isinstance(result, int) and not isinstance(result, bool) and returned_failure(result) is None:
            if result < -1:
                raise ValueError(f"the listener returned {result}: expected the index of a message, or -1 for none")
            return min(result + 1, count)
        if (failure := self._failure_in(result)) is not None:
            raise failure
        return 0 if result is OrderlyResult.ROLLBACK else count

    def _failure_in(self, result: object) -> Exception | None:
        """Return the error that a listener's result stands for."""
        if result is OrderlyResult.HOLD:
            return ConfigError("a guard marks each message by itself: its listener can't return HOLD for several")
        if self._must_return and result is not True and not isinstance(result, OrderlyResult):
            return ReconsumeLater(_NOT_ACKNOWLEDGED)
        return returned_failure(result)

    def _count(self, what: str, topic: str = "") -> None:
        with self._lock:
            setattr(self.counts, what, getattr(self.counts, what) + 1)
        if topic and self._metrics is not None:
            self._metrics.count("duplicates", topic=topic, group=self._group, outcome=_OUTCOMES[what])


def _renew_locks(guard: DedupListener) -> None:
    guard._lock, guard._renewing = Lock(), Lock()


_guards: Final[Inherited[DedupListener]] = Inherited(_renew_locks)


def _purge_until_closed(store: DedupStore, now_ms: int) -> int | None:
    try:
        return purge_step(store)(now_ms)
    except StoreClosedError:
        return None


class GuardedStep:
    """A step of a guarded listener, from `DedupListener.step`; a context manager, sync or async, for one use."""

    def __init__(self, guard: DedupListener, name: str) -> None:
        self._guard = guard
        self._name = name
        self._claim: _Claimed | None = None

    def __enter__(self) -> bool:
        """Begin the step; return whether it is to be done."""
        self._claim = _run(self._guard._begin_step(self._name))
        return self._claim is not None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._claim is not None and (kind is None or issubclass(kind, Exception)):
            _run(self._guard._end_step(self._claim, kind is not None))

    async def __aenter__(self) -> bool:
        """Like ``__enter__``; a store that can wait is called in a thread."""
        self._claim = await _run_async(self._guard._begin_step(self._name), in_threads=self._guard.store.blocking)
        return self._claim is not None

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._claim is not None and (kind is None or issubclass(kind, (Exception, asyncio.CancelledError))):
            await _run_async(
                self._guard._end_step(self._claim, kind is not None), in_threads=self._guard.store.blocking
            )


def deduplicated(
    store: DedupStore, *, group: str, **settings: Unpack[DedupKeywords]
) -> Callable[[Callable[..., object]], DedupListener]:
    """Return a decorator that makes a function a `DedupListener` with these arguments.

    For example ``@deduplicated(store, group="billing", key=order_of)``.
    """

    def decorate(listener: Callable[..., object]) -> DedupListener:
        return DedupListener(listener, store, group=group, **settings)

    return decorate


def _is_pending(result: object) -> TypeGuard[Awaitable[Any]]:
    """Return whether a listener's result is to be awaited; the usual results are known without a look at their type."""
    return result is not None and result is not True and inspect.isawaitable(result)


def _run(flow: _Flow) -> Any:  # noqa: ANN401 (what the flow returns)
    """Make the calls that ``flow`` requests; return a coroutine for the rest if the listener returned one."""
    try:
        request = next(flow)
        while True:
            try:
                result = request.call()
            except BaseException as error:
                request = flow.throw(error)
            else:
                if not request.of_store and _is_pending(result):
                    return _run_async(flow, result, in_threads=False)
                request = flow.send(result)
    except StopIteration as end:
        return end.value


async def _run_async(flow: _Flow, pending: Awaitable[Any] | None = None, *, in_threads: bool) -> Any:  # noqa: ANN401 (what the flow returns)
    """Run like `_run`, with a thread for calls of a store that can wait."""
    try:
        request = next(flow) if pending is None else None
        while True:
            try:
                if request is None:
                    assert pending is not None
                    result = await pending
                elif request.of_store:
                    result = await asyncio.to_thread(request.call) if in_threads else request.call()
                else:
                    result = request.call()
                    if inspect.isawaitable(result):
                        result = await result
            except BaseException as error:
                request = flow.throw(error)
            else:
                request = flow.send(result)
    except StopIteration as end:
        return end.value
