"""The outbox: messages are stored in the transaction that they report, and sent until the broker has them.

::

    with session.begin():
        session.execute(...)                             # the business change
        outbox.add(session, Message("orders", b"…"))     # commits with it, or not at all

    OutboxSender(engine, producer).start()               # in any process, any number of them
    await OutboxSender(async_engine, producer).start_async()

A row is sent at least once. If a sender dies between SEND_OK and its mark, another sends the row again with the same
unique id. A sender marks rows together, those of a tenth of a second and at most a hundred. Senders claim rows by
compare-and-set, so no row has two claims at once. Rows of one ``order_key`` are sent one after the other, in the order
of their ids: a claim takes the first rows of a key without a gap, and ends for all of them at the first that is not
sent. That is the order of the transactions if they exclude each other: let each lock the row that the key stands for
before its first `add`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypedDict, Unpack
from weakref import WeakSet

from librmq.client import Producer
from librmq.client.operations import note_kept
from librmq.clock import Clock, default_clock, moves_by_itself
from librmq.config import Config, Seconds, check_now, wrong_kind
from librmq.errors import ClientStateError, ConfigError, MessageIllegalError, RmqError
from librmq.idempotence._autocommit import Autocommit
from librmq.idempotence._drivers import StatementResult, is_temporary_error
from librmq.idempotence._sessions import check_database, link_to
from librmq.idempotence._sqltables import KEY_LIMIT, PURGE_ROWS, check_name, let_writers_in
from librmq.idempotence.stores import LONGEST
from librmq.message import Message, record
from librmq.message.message import priority_with_queue, reserved_topic
from librmq.message.properties import PropertyName
from librmq.message.topics import NOT_FOR_SENDING, validate_client_topic
from librmq.runtime import Background, Runner, critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import BackgroundTurns

_log = EventLog("librmq.outbox")

_BATCH: Final = 100
_FURTHER_PAGE: Final = 1_000
_MARK_AFTER_MS: Final = 100
"""Time after which sent rows are marked together: a sender that dies has sent so many of them in vain."""
_FIRST_DELAY_MS: Final = 1_000
_LAST_DELAY_MS: Final = 60_000
_WARN_AGAIN_MS: Final = 86_400_000
_MOST_PROBLEMS: Final = 10_000
_PURGE_INTERVAL_MS: Final = 60_000
_MAX_BODY: Final = 4 << 20  # A broker would refuse a larger body at each try.
_SENT: Final = frozenset({"SEND_OK", "OK"})


class MessageSender(Protocol):
    """Sends a message, waits for the answer, and raises if none comes."""

    def send(self, message: Message, /) -> Any:
        """Send a message; a result with a ``status`` (or ``send_status``) other than SEND_OK counts as not sent."""


class Outbox:
    """The table ``table`` of messages to send, which `librmq.idempotence._sqltables.upgrade_tables` creates.

    Thread-safe. Each thread uses its own connection.
    """

    def __init__(self, *, table: str = "rmq_outbox", clock: Clock | None = None) -> None:
        self.table: str = check_name(table)
        self._clock = clock

    def add(self, connection: Any, message: Message, *, order_key: str | None = None) -> None:
        """Store ``message`` in the transaction of ``connection``, and give it a unique id if it has none.

        ``connection`` is a SQLAlchemy ``Session`` or ``Connection``, Django's ``connection`` in an atomic block, or a
        DB-API connection. Rows with the same ``order_key`` are sent one after the other. A
        ``delay`` counts from the time at which a sender sends the row, however late that is; name ``deliver_at`` for a
        time that counts from here. A session is flushed first.

        Raises:
            ConfigError: The connection commits each statement, so that the row would not commit with the change; or its
                driver is unknown, and does not show that.
            MessageIllegalError: No broker would accept the message.
        """
        if not isinstance(message, Message):
            raise wrong_kind("message", message, "a Message")
        validate_client_topic(message.topic)
        if message.topic in NOT_FOR_SENDING:
            raise reserved_topic(message.topic)
        if not 0 < len(message.body) <= _MAX_BODY:
            raise MessageIllegalError(
                f"topic {message.topic!r}: expected a body of 1 to {_MAX_BODY} bytes, found {len(message.body)}"
            )
        if order_key is not None and not _is_order_key(order_key):
            raise MessageIllegalError(
                f"order key: expected 1 to {KEY_LIMIT} characters of text, none of them NUL or half a surrogate pair, "
                f"found {order_key!r:.100}"
            )
        if order_key is not None and message.priority is not None:
            raise priority_with_queue(message.topic)
        message.properties.setdefault(PropertyName.UNIQUE_KEY, secrets.token_hex(16).upper())
        if not record.has_room(message.properties):
            raise MessageIllegalError(
                f"topic {message.topic!r}: expected at most {record.MAX_PROPERTIES_SIZE:,} bytes of properties: put "
                "large values into the body"
            )
        link = link_to(connection)
        link.check_no_autocommit()
        if hasattr(connection, "flush"):  # SQLAlchemy's session: its changes lock their rows before this row has its id
            connection.flush()
        properties = message.properties | _delays(message)
        note_kept(properties)
        link.execute(
            f"INSERT INTO {self.table} "
            "(order_key, topic, properties, flag, body, state, owner, attempts, due_timestamp_ms) "
            "VALUES (:order_key, :topic, :properties, :flag, :body, 0, '', 0, :now_ms)",
            order_key=order_key,
            topic=message.topic,
            properties=json.dumps(properties),
            flag=message.flag,
            body=message.body,
            now_ms=(self._clock or default_clock()).now_ms(),
        )
        for sender in list(_by_hand):
            if sender.table == self.table:
                sender.wake()

    async def add_async(self, connection: Any, message: Message, *, order_key: str | None = None) -> None:
        """Do as `add`, in a SQLAlchemy ``AsyncSession``, ``async_scoped_session`` or ``AsyncConnection``."""
        if hasattr(connection, "registry"):
            connection = connection.registry()
        await connection.run_sync(lambda inner: self.add(inner, message, order_key=order_key))


class _Row(NamedTuple):
    """A row to send, as it was read."""

    id: int
    order_key: str | None
    topic: str
    properties: str
    flag: int
    body: bytes
    attempts: int

    def message(self) -> Message:
        properties = json.loads(self.properties)
        delay, deliver_at_ms = properties.pop(_DELAY, None), properties.pop(_DELIVER_AT, None)
        deliver_at = None if deliver_at_ms is None else datetime.fromtimestamp(int(deliver_at_ms) / 1000, UTC)
        message = Message(
            self.topic,
            bytes(self.body),
            flag=self.flag,
            delay=None if delay is None else float(delay),
            deliver_at=deliver_at,
        )
        message.properties.update(properties)
        return message


def _is_order_key(key: object) -> bool:
    """Return whether every database takes a key: PostgreSQL refuses NUL, and half of a surrogate pair is no UTF-8."""
    return isinstance(key, str) and re.fullmatch(rf"[^\0\ud800-\udfff]{{1,{KEY_LIMIT}}}", key) is not None


_DELAY: Final = "\x01delay_s"
"""Names that no property has, because the encoding of properties excludes their first character."""
_DELIVER_AT: Final = "\x01deliver_at_ms"


def _delays(message: Message) -> dict[str, str]:
    """Return the delay of a message as members of its row's properties."""
    if message.delay_s is not None:
        return {_DELAY: repr(message.delay_s)}
    return {} if message.deliver_at_ms is None else {_DELIVER_AT: str(message.deliver_at_ms)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxConfig(Config):
    """Settings of a sender. Durations are seconds, or a `timedelta` as keywords."""

    claim_timeout: Annotated[float, Seconds(0.001, LONGEST)] = 60.0
    """Time after which another sender can send a claimed row; longer than a send takes."""
    poll_interval: Annotated[float, Seconds(0.001, LONGEST)] = 1.0
    """Time between two searches for rows."""
    keep_sent: Annotated[float, Seconds(0.001, LONGEST)] = 3600.0
    """Time for which sent rows are kept."""


class OutboxKeywords(TypedDict, total=False):
    """Keywords of an `OutboxSender`: the settings of `OutboxConfig`, for type checkers."""

    claim_timeout: float | timedelta
    poll_interval: float | timedelta
    keep_sent: float | timedelta


_by_hand: WeakSet[OutboxSender] = WeakSet()
"""Started senders whose clock is moved by hand: `Outbox.add` wakes them."""
_COLUMNS: Final = ", ".join(_Row._fields)
_WAITS: Final = "state + 0 = 0"
"""Of rows that are named by their ids: in this form SQLite does not read all rows of the state instead."""
_DUE: Final = "(due_timestamp_ms <= :now_ms OR (owner = '' AND attempts = 0))"
"""A row that no sender has had yet is due whatever its time is: the clock of its writer may be ahead."""


class OutboxSender:
    """Sends the rows of an outbox, oldest first. A sender belongs to one thread; any number of senders share a table.

    A refused row is tried again after 1 s, 2 s, … up to a minute, without limit. `start` starts a thread that sends;
    without it, call `run_due`. If the clock of the producer's runner is moved by hand, as in a kit, there is no thread:
    moving the clock sends what is due.
    """

    def __init__(
        self,
        database: Any,
        producer: MessageSender,
        *,
        table: str = "rmq_outbox",
        send_ordered: Callable[[Message, str], object] | None = None,
        clock: Clock | None = None,
        **settings: Unpack[OutboxKeywords],
    ) -> None:
        """The database is not used before the first `run_due` or `start`.

        Args:
            database: A SQLAlchemy ``Engine`` or ``AsyncEngine``, or a function that opens a DB-API connection. The
                statements of an ``AsyncEngine`` run in the event loop: use `start_async`, `shutdown_async` and
                `run_due_async`.
            producer: Its ``send(message)`` waits, and raises or returns a result with a status.
            table: The outbox's table.
            send_ordered: Called with message and order key for rows that have one, to choose their queue by it.
            clock: The clock; by default that of the route of a `Producer`, or of the test's kit, or else the machine's.
            **settings: The settings of `OutboxConfig`.

        Raises:
            ConfigError: A setting is refused, an argument has a wrong type, or there is a kit, but not its clock.
        """
        self.config: OutboxConfig = OutboxConfig().with_settings(settings)
        if not callable(getattr(producer, "send", None)):
            raise ConfigError(f"expected a producer with send(message), found {type(producer).__name__}")
        if send_ordered is not None and not callable(send_ordered):
            raise ConfigError(f"send_ordered: expected a function of message and key, found {send_ordered!r:.100}")
        self.table: str = check_name(table)
        check_database(database)
        self.sent: int = 0
        """Rows that this sender has sent and marked."""
        self.failed: int = 0
        """Sends that were refused or raised."""
        self.lost: int = 0
        """Rows that this sender sent after its claim had expired; another may have sent them too."""
        self._statements = Autocommit(database, holds=True)
        self._producer = producer
        self._send_ordered = send_ordered
        self._claim_ms = round(1000 * self.config.claim_timeout)
        self._poll_ms = round(1000 * self.config.poll_interval)
        self._keep_ms = round(1000 * self.config.keep_sent)
        if clock is None and isinstance(producer, Producer):
            clock = producer.client.runner.clock
        self._clock = clock or default_clock()
        self._purge_at_ms = self._next_purge_ms()
        self._background: Background | BackgroundTurns | None = None
        self._search_until_ms = 0
        self._closing = False
        self._is_checked = False
        self._is_out_of_reach = False
        self._problems: dict[int, tuple[str, int]] = {}  # by row: the last one that was logged, and until when it holds

    def run_due(self, now_ms: int) -> int:
        """Send the rows that are due; return the time of the next search, in milliseconds since 1970.

        The failure of a database is logged once, and the next search tries it again.

        Raises:
            ConfigError: The first search found no such table, or `database` did not return a connection.
        """
        check_now(now_ms)
        self._try(self._run_round)
        return max(now_ms, self._clock.now_ms()) + self._poll_ms

    def _try(self, use: Callable[[], None]) -> None:
        """Use the database, and log its failure as a warning, unless it has failed before."""
        try:
            use()
        except RmqError:
            raise
        except Exception as error:
            level = logging.DEBUG if self._is_out_of_reach else logging.WARNING
            self._is_out_of_reach = True
            what = "%(table)s: the database failed, and is tried again: %(error)s"
            _log.log(level, what, table=self.table, error=error)
        finally:
            self._statements.close()

    def _run_round(self) -> None:
        self._check()
        while self._send_some():
            pass
        self._purge()
        if self._is_out_of_reach:
            self._is_out_of_reach = False
            _log.info("%(table)s: the database works again", table=self.table)

    def _check(self) -> None:
        """Select no row of the table, once, to find lasting errors at the start."""
        if self._is_checked:
            return
        try:
            self._execute(f"SELECT {_COLUMNS}, state FROM {self.table} WHERE 1 = 0")
        except RmqError:
            raise
        except Exception as error:
            if is_temporary_error(error):
                raise
            cause = getattr(error, "orig", None) or error  # SQLAlchemy's text repeats the statement
            raise ConfigError(
                f"the outbox's table {self.table} can't be read (librmq.idempotence.upgrade_tables creates it): "
                f"{type(cause).__name__}: {cause}"
            ) from error
        self._is_checked = True

    def start(self) -> OutboxSender:
        """Start a thread that sends, or turns of a runner whose clock is moved by hand; `shutdown` ends it.

        A database that fails now is logged, and tried again.

        Raises:
            ConfigError: There is no such table, or `database` did not return a connection.
        """
        if self._background is None:
            self._try(self._check)
            with critical:  # Ctrl-C waits until `shutdown` can find the thread.
                self._background = self._begin_in_background()
        return self

    def _begin_in_background(self) -> Background | BackgroundTurns:
        """Begin to send by the runner of a producer whose clock is moved by hand, or else by a thread."""
        if isinstance(self._producer, Producer):
            client, runner = self._producer.client, self._producer.client.runner
            if runner.clock is self._clock and not moves_by_itself(self._clock):
                _by_hand.add(self)
                self._search_until_ms = self._clock.now_ms() + self._claim_ms + self._poll_ms
                label = f"{client.client_id} outbox {self.table}"
                return BackgroundTurns(partial(self._run_by_hand, runner), runner, label, client)
        return Background(self._run_in_thread, self._clock, "librmq-outbox")

    def _run_by_hand(self, runner: Runner, now_ms: int) -> int | None:
        """Send rows that are due; return when to look again.

        Only other turns, and the test, change the table. So that hours pass in the time of their events, the table is
        searched at each poll only while a claim or a pause may end, or the database fails, and otherwise with the
        next turn that has a time.
        """
        failed = self.failed
        due = self._run_in_thread(now_ms)
        if due is None or self.failed > failed or self._is_out_of_reach:
            self._search_until_ms = self._clock.now_ms() + _LAST_DELAY_MS + self._poll_ms
        if due is None or due <= self._search_until_ms:
            return due
        other = runner.next_due_ms()
        return None if other is None else max(due, other)

    def _run_in_thread(self, now_ms: int) -> int | None:
        try:
            return self.run_due(now_ms)
        except ConfigError as error:  # The database failed at the start, so its table is checked only now.
            _log.error("the outbox sends nothing until `wake` is called: %(error)s", error=error, table=self.table)
            return None

    async def run_due_async(self, now_ms: int) -> int:
        """Do as `run_due` without blocking the event loop, which runs the statements of an ``AsyncEngine``."""
        self._statements.loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self.run_due, now_ms)

    async def start_async(self) -> OutboxSender:
        """Do as `start` without blocking the event loop."""
        self._statements.loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self.start)

    async def shutdown_async(self) -> bool:
        """Do as `shutdown` without blocking the event loop."""
        return await asyncio.to_thread(self.shutdown)

    def wake(self) -> None:
        """Let the thread look for rows now instead of at its next poll; call this after a commit."""
        if self._background is not None:
            self._search_until_ms = self._clock.now_ms() + self._claim_ms
            self._background.wake()

    def shutdown(self) -> bool:
        """End the thread after its current send, and release rows that it has claimed but not sent.

        Returns:
            True, like a consumer's shutdown after all its work has ended.

        Raises:
            ClientStateError: The event loop of `start_async` runs here: await `shutdown_async`.
        """
        loop = self._statements.loop
        if loop is not None and _running_loop() is loop and self._background is not None:
            raise ClientStateError("shutdown would wait for its own event loop: await shutdown_async")
        with critical:
            background, self._background = self._background, None
            self._closing = True
            if background is not None:
                background.stop()
        return True

    def __enter__(self) -> OutboxSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> OutboxSender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown_async()

    # ---- a round

    def _send_some(self) -> bool:
        owner = secrets.token_hex(12)
        rows, until_ms = self._claim(owner)
        blocked: set[str | None] = set()
        unsent: list[int] = []
        sent: list[int] = []
        mark_at_ms = until_ms
        is_over = False
        try:
            for row in rows:
                is_over = is_over or self._closing or self._clock.now_ms() >= until_ms
                if is_over or row.order_key in blocked:
                    unsent.append(row.id)
                    continue
                problem = self._send(row)
                if problem is None:
                    sent.append(row.id)
                    mark_at_ms = min(mark_at_ms, self._clock.now_ms() + _MARK_AFTER_MS)
                else:
                    self._postpone(row, owner, problem)
                    blocked |= {row.order_key} - {None}
                if self._clock.now_ms() >= mark_at_ms:
                    self._mark(sent, owner)
                    sent, mark_at_ms = [], until_ms
        finally:
            self._mark(sent, owner)
        self._release(unsent, owner)
        return bool(rows) and not is_over

    def _claim(self, owner: str) -> tuple[list[_Row], int]:
        """Claim rows that are due, of each order key the first ones; return them and the end of the claim."""
        now_ms = self._clock.now_ms()
        until_ms = now_ms + self._claim_ms
        after_ms, after_id, size = -1, 0, _BATCH
        while True:
            page = self._execute(
                "SELECT candidate.id, order_key, due_timestamp_ms, "
                f"(SELECT earlier.id FROM {self.table} earlier WHERE earlier.order_key = candidate.order_key "
                "AND earlier.state = 0 AND earlier.id < candidate.id ORDER BY earlier.id DESC LIMIT 1) AS id_before "
                f"FROM {self.table} candidate WHERE state = 0 AND due_timestamp_ms >= :after_ms "
                f"AND (due_timestamp_ms > :after_ms OR candidate.id > :after_id) AND {_DUE} "
                f"ORDER BY candidate.due_timestamp_ms, candidate.id LIMIT {size}",
                now_ms=now_ms,
                after_ms=after_ms,
                after_id=after_id,
            ).rows
            rows = self._claim_first(sorted((row[0], row[1], row[3]) for row in page), owner, now_ms, until_ms)
            if rows or len(page) < size:
                return rows, until_ms
            # All are behind rows that wait, or other senders have them.
            after_ms, after_id, size = page[-1][2], page[-1][0], _FURTHER_PAGE

    def _claim_first(
        self, page: Sequence[tuple[int, str | None, int | None]], owner: str, now_ms: int, until_ms: int
    ) -> list[_Row]:
        """Claim the rows of a page that follow no other one of their key, or one that is claimed here.

        ``page`` has their ids, order keys, and the id of the row before in the same key, in the order of ids.
        """
        previous: dict[int, int | None] = {}
        for number, _, number_before in page:
            if len(previous) < _BATCH and (number_before is None or number_before in previous):
                previous[number] = number_before
        if not previous:
            return []
        # Compare and set: only one of several senders that read a row changes it.
        self._execute(
            f"UPDATE {self.table} SET owner = :owner, due_timestamp_ms = :until_ms "
            f"WHERE id IN ({_listed(previous)}) AND {_WAITS} AND {_DUE}",
            owner=owner,
            until_ms=until_ms,
            now_ms=now_ms,
        )
        claimed = self._execute(
            f"SELECT {_COLUMNS} FROM {self.table} WHERE id IN ({_listed(previous)}) AND owner = :owner AND {_WAITS} "
            "ORDER BY id",
            owner=owner,
        ).rows
        rows: dict[int, _Row] = {}
        unsent: list[int] = []
        for columns in claimed:
            row = _Row(*columns)
            if (number_before := previous[row.id]) is None or number_before in rows:
                rows[row.id] = row
            else:  # Another sender has the row before.
                unsent.append(row.id)
        self._release(unsent, owner)
        return list(rows.values())

    def _release(self, rows: Sequence[int], owner: str) -> None:
        if rows:
            self._execute(
                f"UPDATE {self.table} SET owner = '', due_timestamp_ms = :now_ms "
                f"WHERE id IN ({_listed(rows)}) AND owner = :owner AND {_WAITS}",
                owner=owner,
                now_ms=self._clock.now_ms(),
            )

    def _send(self, row: _Row) -> str | None:
        try:
            message = row.message()
            if row.order_key is not None and self._send_ordered is not None:
                result = self._send_ordered(message, row.order_key)
            else:
                result = self._producer.send(message)
            return _problem(result)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _postpone(self, row: _Row, owner: str, problem: str) -> None:
        now_ms = self._clock.now_ms()
        self.failed += 1
        self._log_problem(row, problem, now_ms)
        self._execute(
            f"UPDATE {self.table} SET owner = '', attempts = attempts + 1, due_timestamp_ms = :due_ms "
            "WHERE id = :id AND state = 0 AND owner = :owner",
            due_ms=now_ms + min(_FIRST_DELAY_MS << min(row.attempts, 10), _LAST_DELAY_MS),
            id=row.id,
            owner=owner,
        )

    def _mark(self, rows: Sequence[int], owner: str) -> None:
        if not rows:
            return
        # The owner stays, so that the mark is known for its own if it is repeated after an answer that was lost.
        marked = self._execute(
            f"UPDATE {self.table} SET state = 1, due_timestamp_ms = :now_ms "
            f"WHERE id IN ({_listed(rows)}) AND {_WAITS} AND owner = :owner",
            now_ms=self._clock.now_ms(),
            owner=owner,
        ).changed
        lost: set[int] = set()
        if marked < len(rows):
            mine = f"SELECT id FROM {self.table} WHERE id IN ({_listed(rows)}) AND state + 0 = 1 AND owner = :owner"
            lost = set(rows) - {int(row[0]) for row in self._execute(mine, owner=owner).rows}
        self.sent += len(rows) - len(lost)
        self.lost += len(lost)
        for row in rows:
            self._problems.pop(row, None)
            if row in lost:
                _log.warning(
                    "%(table)s: row %(row)d was sent after its claim had expired, so it may be sent twice",
                    table=self.table,
                    row=row,
                )

    def _log_problem(self, row: _Row, problem: str, now_ms: int) -> None:
        """Log why a row was not sent: a new cause as a warning, and the same one again once a day."""
        cause = re.sub(r"\d+", "", problem)  # A number, such as how long a send has waited, makes no new cause.
        logged, until_ms = self._problems.get(row.id, ("", 0))
        is_new = cause != logged or now_ms >= until_ms
        if is_new:
            self._problems.pop(row.id, None)
            while len(self._problems) >= _MOST_PROBLEMS:  # The oldest goes, and is logged again when it fails again.
                del self._problems[next(iter(self._problems))]
            self._problems[row.id] = cause, now_ms + _WARN_AGAIN_MS
        _log.log(
            logging.WARNING if is_new else logging.DEBUG,
            "%(table)s: row %(row)d to %(topic)s was not sent, attempt %(attempt)d: %(error)s",
            table=self.table,
            row=row.id,
            topic=row.topic,
            attempt=row.attempts + 1,
            error=problem,
        )

    def _purge(self) -> None:
        """Delete rows that were sent long enough ago, in slices; only once a minute, because it locks rows."""
        if self._clock.now_ms() < self._purge_at_ms:
            return
        self._purge_at_ms = self._next_purge_ms()
        before_ms, size = self._clock.now_ms() - self._keep_ms, PURGE_ROWS
        while size == PURGE_ROWS:
            rows = self._execute(
                f"SELECT id FROM {self.table} WHERE state = 1 AND due_timestamp_ms <= :before_ms LIMIT {PURGE_ROWS}",
                before_ms=before_ms,
            ).rows
            size = len(rows)
            if rows:
                self._execute(f"DELETE FROM {self.table} WHERE id IN ({_listed([row[0] for row in rows])})")
                let_writers_in()

    def _next_purge_ms(self) -> int:
        return self._clock.now_ms() + min(self._keep_ms, _PURGE_INTERVAL_MS)

    def _execute(self, sql: str, **parameters: Any) -> StatementResult:
        return self._statements.execute(sql, parameters)


def _listed(rows: Iterable[int]) -> str:
    return ", ".join(map(str, map(int, rows)))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _problem(result: Any) -> str | None:
    """Return why a producer's result counts as not sent; None if the message was sent."""
    if inspect.isawaitable(result):
        close = getattr(result, "close", None)
        if callable(close):
            close()
        return "send returned an awaitable: a sender needs a producer whose send waits"
    status = getattr(result, "send_status", getattr(result, "status", None))
    if status is None or getattr(status, "name", status) in _SENT:
        return None
    return f"status {getattr(status, 'name', status)}"
