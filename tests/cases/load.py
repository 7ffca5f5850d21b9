"""Operations applied to a store, one JSON object a line, each answered with a row.

::

    put, batch                        a message, or several at once
    half, commit, rollback            a transaction: prepared, then ended
    tx_check                          a check pass over the halves that have not ended
    topic, subgroup, consumer_offset  the broker's tables
    filter                            a consumer group's filter on a topic
    persist                           saves these tables
    sleep, wait_dispatch              moves time; does nothing visible
    crash                             abandons the store, like a process that dies

Only ``at_ms`` of a row and ``sleep`` move time. From the first ``at_ms`` on, delayed messages are delivered on the way,
on a grid of 100 ms.

Transactions end as in RocketMQ 4.9: a second end is not refused.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from librmq.cli._output import Output, ProgressBar, complain
from librmq.cli._rows import Row, parse_object, standard_input
from librmq.cli._stores import files_and_config, read_config
from librmq.clock import ManualClock, SystemClock
from librmq.config import StoreConfig, suggest
from librmq.delay import DelayConfig, DelaySchedule
from librmq.errors import InputError, MessageIllegalError, TransactionRefusedError
from librmq.files._disk import DiskFiles
from librmq.filter._registrations import Registrations
from librmq.message import record
from librmq.message.batch import BatchItem, encode_batch
from librmq.message.delays import TimerRefusedError, parse_level
from librmq.message.message import Message, delayed_batch
from librmq.message.properties import PropertyName, encode_properties
from librmq.message.topics import SystemTopic, validate_topic
from librmq.scheduling.half_messages import CHECK_GROUP
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import AppendResult, MessageStore
from librmq.store.engine.saved_state import delete_state
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import TransactionConfig
from tests.bytime import put_timed
from tests.cases import fields
from tests.transactions_of_4 import TransactionsOf4

_BORN_TIMESTAMP_MS: Final = 1_700_000_000_000
_BORN_HOST: Final = ("192.168.1.10", 54321)
_ZLIB_LEVEL: Final = 5
_COMPRESSION_TYPE_BITS: Final = 0x300
_LOOKS: Final = DelayConfig(first_look_s=0, save_every_s=None)
_LAST_MS: Final = 253_402_300_799_999  # the year 9999 ends: index files are named by date

_LONGEST_TIMEOUT_MS: Final = 365 * 86_400_000
_SUCCESS: Final = 0


def load(arguments: argparse.Namespace, output: Output) -> int:
    """Apply the operations on standard input."""
    _, config = files_and_config(arguments, writable=True)
    timer = TimerConfig.from_row(read_config(arguments.config)) if arguments.config else None

    def write(row: dict[str, Any]) -> None:
        output.row(row)
        output.flush()

    def warn(reason: str) -> None:
        complain(f"librmq load: {reason}")

    with ProgressBar("load", 0, quiet=output.is_on_terminal) as bar:
        run(arguments.store, config, bar.track(standard_input(), len), write, warn=warn, timer=timer)
    return 0


def run(
    store_path: str | os.PathLike[str],
    config: StoreConfig | None,
    lines: Iterable[str | bytes],
    write: Callable[[Row], None],
    *,
    warn: Callable[[str], None],
    timer: TimerConfig | None = None,
) -> None:
    """Apply the operations in ``lines`` to the store in ``store_path``, which is made if it does not exist.

    ``write`` gets the row of each operation as soon as it is acknowledged, before the next line is read; ``warn`` gets
    the reasons of refusals. The store is closed cleanly at the end, also after an error; ``crash`` ends the run without
    closing it. Without ``config`` the sizes come from the store's files. ``timer`` has the settings of a timer wheel;
    without it those of a store that has one count. With a wheel, messages can name a delivery time, and are written as
    in 5.x.

    Raises:
        InputError: A line is no valid operation; the error names it.
        CorruptionError: The broker's tables are unreadable.
        StoreError: `MessageStore.open` failed, before the first line was read.
    """
    clock = _OperationClock(SystemClock().now_ms())
    folder, files = os.path.join(store_path, directory.CONFIG), DiskFiles()
    filters = BrokerTables.open(folder, files=files).registrations(clock.now_ms())  # recovery can need bitmaps
    store = MessageStore.open(store_path, config, clock=clock, files=files, filters=filters)
    crashed = False
    try:
        for cut in store.recovered:
            warn(f"opening: {cut.file}: at {cut.offset}: {cut.what}")
        tables = BrokerTables.open(folder, files=files)
        timer = timer or TimerConfig.of_store(store.path, files)
        timers = None if timer is None else Timers(store, dataclasses.replace(timer, save_every_s=None))
        operations = _Operations(store, tables, filters, clock, warn, timers)
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = operations.apply(number, line)
                    crashed = row["op"] == "crash"
                    write(row)
                    if crashed:
                        return
        finally:
            if not crashed:
                operations.persist()
    finally:
        store.close()  # does nothing after a crash


class _OperationClock(ManualClock):
    """A clock that shows the time of the start until the operations name a time."""

    def start_at(self, now_ms: int) -> None:
        self._now_ms = now_ms


@dataclass(frozen=True, slots=True)
class _Half:
    """Place and group of a half message."""

    physical_offset: int
    queue_offset: int
    producer_group: str


class _Operations:
    """The state of one run."""

    def __init__(
        self,
        store: MessageStore,
        tables: BrokerTables,
        filters: Registrations,
        clock: _OperationClock,
        warn: Callable[[str], None],
        timers: Timers | None,
    ) -> None:
        self._store = store
        self._tables = tables
        self._clock = clock
        self._report_refusal = warn
        self._line = 0
        self._stamped = False  # whether a message was put
        self._schedule: DelaySchedule | None = None  # made at the first at_ms, before which nothing is delivered
        self._halves: dict[str, _Half] = {}
        self._transactions = TransactionsOf4(store, tables, make_topic=tables.make_topic)
        self._timers = timers
        self._filters = filters
        self._filters_changed = False
        self._early_filters: list[tuple[str, str, str, str, int]] = []  # registered before the first at_ms
        self._apply: dict[str, Callable[[Row], Row]] = {
            "put": self._append_message,
            "batch": self._batch,
            "half": self._half,
            "commit": self._commit,
            "rollback": self._rollback,
            "topic": self._topic,
            "subgroup": self._group,
            "consumer_offset": self._consumer_offset,
            "filter": self._filter,
            "tx_check": self._tx_check,
            "persist": self._persist,
            "sleep": self._sleep,
            "wait_dispatch": lambda row: {},
            "crash": self._crash,
        }

    def apply(self, number: int, line: str | bytes) -> Row:
        """Apply the operation in a line and return the row that answers it.

        Raises:
            InputError: The line is no valid operation.
        """
        self._line = number
        try:
            row = parse_object(line)
            name = fields.text(row, "op")
            apply = self._apply.get(name)
            if apply is None:
                raise InputError(f"unknown operation {name!r:.80}; {suggest(name, self._apply)}")
            if row.get("at_ms") is not None:
                self._move_to(fields.whole(row, "at_ms", 0, _LAST_MS))
            return {"op": name, **apply(row)}
        except InputError as error:
            raise InputError(f"line {number}: {error}") from None

    def _warn(self, reason: str) -> None:
        self._report_refusal(f"line {self._line}: {reason}")

    # --------------------------------------------------------------------------------------------------- time

    def _move_to(self, now_ms: int) -> None:
        if self._schedule is None:
            # Recorded operations can begin before the start of this run, unless a message already has its time.
            if now_ms < self._clock.now_ms() and self._stamped:
                raise InputError(
                    f"at_ms: expected at least {self._clock.now_ms()}, the time of earlier messages, found {now_ms}"
                )
            self._clock.start_at(now_ms)
            self._schedule = DelaySchedule(self._store, self._tables, now_ms, _LOOKS)
            if self._early_filters:
                self._filters.load({"filterDataByTopic": self._tables.filters}, now_ms)
                for early in self._early_filters:
                    self._filters.register(*early, now_ms)
        elif now_ms < self._clock.now_ms():
            raise InputError(f"at_ms: expected at least {self._clock.now_ms()}, the time now, found {now_ms}")
        self._pass_to(now_ms)

    def _sleep(self, row: Row) -> Row:
        now_ms = self._clock.now_ms() + fields.whole(row, "ms", 0, _LAST_MS)
        if now_ms > _LAST_MS:
            raise InputError("ms: expected a time before the year 10000")
        self._pass_to(now_ms)
        return {}

    def _pass_to(self, now_ms: int) -> None:
        """Let time pass, and deliver each message when it becomes due."""
        clock = self._clock
        due_ms = self._deliver_due()
        while due_ms is not None and due_ms <= now_ms:
            clock.move_to(due_ms)
            due_ms = self._deliver_due()
        clock.move_to(now_ms)

    def _deliver_due(self) -> int | None:
        """Deliver due messages, and return the next due time; None before the operations have named a time."""
        if self._schedule is None:
            return None
        now_ms = self._clock.now_ms()
        steps = [self._schedule.run_due, *([] if self._timers is None else [self._timers.run_due])]
        dues = [due_ms for step in steps if (due_ms := step(now_ms)) is not None]
        return min(dues, default=None)

    # ----------------------------------------------------------------------------------------------- messages

    def _append_message(self, row: Row) -> Row:
        def append() -> list[AppendResult]:
            message = fields.message(row, fields.text(row, "topic"))
            raw = fields.optional_text(row, "propertiesString")
            sys_flag = self._compress(row, message, fields.int32(row, "sysFlag", 0))
            return [self._append(row, message, fields.count(row, "queueId"), sys_flag, raw)]

        return self._append_result(append)

    def _compress(self, row: Row, message: Message, sys_flag: int) -> int:
        """Compress the body if the operation asks for it, and return the flags of the record."""
        bits = _COMPRESSION_TYPE_BITS if fields.truth(row, "compressionTypeBits") else 0
        if not fields.truth(row, "compress") or not message.body:
            return sys_flag
        message.body = zlib.compress(message.body, _ZLIB_LEVEL)
        return sys_flag | record.COMPRESSED | bits

    def _append(self, row: Row, message: Message, queue_id: int, sys_flag: int, raw: str | None = None) -> AppendResult:
        append = self._store.append if self._timers is None else partial(put_timed, self._timers)
        return append(
            message,
            queue_id,
            **_origin(row, sys_flag),
            prepared_transaction_offset=fields.int64(row, "preparedTransactionOffset", 0),
            properties_raw=None if raw is None else raw.encode(),
        )

    def _batch(self, row: Row) -> Row:
        encoded = b""

        def append() -> list[AppendResult]:
            nonlocal encoded
            topic, queue_id = fields.text(row, "topic"), fields.count(row, "queueId")
            added = fields.properties(row)
            origin = _origin(row, fields.int32(row, "sysFlag", 0))
            messages = [fields.message(item, topic) for item in fields.objects(row, "messages")]
            fields.check_separators(added)
            if parse_level(added.get(PropertyName.DELAY)) > 0 or fields.int32(row, "delayLevel", 0) > 0:
                raise delayed_batch(topic)
            encoded = encode_batch(
                BatchItem(message.body, message.flag, encode_properties(message.properties)) for message in messages
            )
            return self._store.append_batch(messages, queue_id, properties=added, **origin)

        answer = self._append_result(append)
        if "phys" not in answer:
            return answer
        return {"batch_body_b64": base64.b64encode(encoded).decode(), **answer}

    def _append_result(self, append: Callable[[], list[AppendResult]]) -> Row:
        """Append, and return the fields with the messages' places, or with the status of a refusal."""
        try:
            results = append()
        except MessageIllegalError as error:
            self._warn(str(error))
            refused_by_wheel = isinstance(error, TimerRefusedError)
            return {"status": "WHEEL_TIMER_MSG_ILLEGAL" if refused_by_wheel else "MESSAGE_ILLEGAL"}
        self._stamped = True
        return {
            "status": "PUT_OK",
            "append_status": "PUT_OK",
            "phys": results[0].physical_offset,
            "wrote_bytes": sum(result.size for result in results),
            "msg_id": ",".join(result.offset_id for result in results),
            "store_timestamp": results[0].store_timestamp_ms,
            "queue_offset": results[0].queue_offset,
            "msg_num": len(results),
        }

    # ------------------------------------------------------------------------------------------- transactions

    def _half(self, row: Row) -> Row:
        name, group = fields.text(row, "id"), fields.text(row, "producerGroup")

        def append() -> list[AppendResult]:
            topic, queue_id = fields.text(row, "topic"), fields.count(row, "queueId")
            message = fields.message(row, topic)
            message.properties |= {PropertyName.TRANSACTION_PREPARED: "true", PropertyName.PRODUCER_GROUP: group}
            sys_flag = self._compress(row, message, fields.int32(row, "sysFlag", 0))
            prepared = fields.int64(row, "preparedTransactionOffset", 0)
            origin = _origin(row, sys_flag)
            return [self._transactions.prepare(message, queue_id, **origin, prepared_transaction_offset=prepared)]

        answer = self._append_result(append)
        if "phys" in answer:
            self._halves[name] = _Half(answer["phys"], answer["queue_offset"], group)
        return {"id": name, **answer}

    def _commit(self, row: Row) -> Row:
        return self._end_transaction(row, self._transactions.commit, None)

    def _rollback(self, row: Row) -> Row:
        return self._end_transaction(row, self._transactions.rollback, "not set any response code")

    def _end_transaction(self, row: Row, end: Callable[[int, int, str], object], remark: str | None) -> Row:
        name = fields.text(row, "id")
        half = self._halves.get(name)
        if half is None:
            raise InputError(f"id: unknown half message {name!r:.80}")
        group = fields.optional_text(row, "producerGroup")
        code = _SUCCESS
        try:
            end(half.physical_offset, half.queue_offset, half.producer_group if group is None else group)
        except TransactionRefusedError as refusal:
            code, remark = refusal.code, str(refusal)
            self._warn(remark)
        return {"id": name, "response_code": code, "remark": remark}

    def _tx_check(self, row: Row) -> Row:
        settings = TransactionConfig(
            timeout_s=fields.whole(row, "timeout_ms", 0, _LONGEST_TIMEOUT_MS) / 1000,
            check_max=fields.whole(row, "check_max", 1, (1 << 31) - 1),
        )
        now_ms = self._clock.now_ms()
        done = self._transactions.check.run_pass(now_ms, settings)
        return {
            "check_back": [
                {
                    "uniq_key": half.unique_key,
                    "queue_offset": half.queue_offset,
                    "commit_log_offset": half.physical_offset,
                    "msg_id": half.offset_id,
                    "check_times": str(check_times),
                }
                for _, half, check_times in done.questions
            ],
            "discarded": [
                {"uniq_key": half.unique_key, "queue_offset": half.queue_offset, "check_times": str(check_times)}
                for half, check_times in done.discarded
            ],
            "at_ms": now_ms,
            "half_consume_offset": self._checked(SystemTopic.HALF),
            "op_consume_offset": self._checked(SystemTopic.OP),
            "half_max_offset": self._max_offset(SystemTopic.HALF),
            "op_max_offset": self._max_offset(SystemTopic.OP),
        }

    def _checked(self, topic: str) -> int:
        progress = self._tables.consumer_offset(topic, CHECK_GROUP, 0)
        return -1 if progress is None else progress

    def _max_offset(self, topic: str) -> int:
        queue = self._store.queue(topic, 0)
        return 0 if queue is None else queue.max_offset

    # ------------------------------------------------------------------------------------ tables and the rest

    def _topic(self, row: Row) -> Row:
        topic = fields.text(row, "topic")
        try:
            validate_topic(topic)
        except MessageIllegalError as error:
            raise InputError(str(error)) from None
        self._tables.set_topic(
            topic,
            read_queues=fields.count(row, "readQueueNums"),
            write_queues=fields.count(row, "writeQueueNums"),
            permission=fields.count(row, "perm"),
        )
        return {}

    def _group(self, row: Row) -> Row:
        self._tables.set_group(fields.text(row, "group"), retry_max_times=fields.int32(row, "retryMaxTimes"))
        return {}

    def _consumer_offset(self, row: Row) -> Row:
        self._tables.set_consumer_offset(
            fields.text(row, "topic"),
            fields.text(row, "group"),
            fields.count(row, "queueId"),
            fields.int64(row, "offset"),
        )
        return {}

    def _filter(self, row: Row) -> Row:
        topic, group = fields.text(row, "topic"), fields.text(row, "group")
        registration = (topic, group, fields.text(row, "expr"), "SQL92", fields.int64(row, "version"))
        is_registered = self._filters.get(topic, group) is not None
        registered = self._filters.register(*registration, self._clock.now_ms())
        if self._schedule is None and (is_registered or registered):
            self._early_filters.append(registration)
        self._filters_changed = True
        return {"registered": registered}

    def persist(self) -> None:
        """Save the broker's tables."""
        now_ms = self._clock.now_ms()
        self._deliver_due()
        if self._schedule is not None:
            self._schedule.save(now_ms)
        if self._timers is not None:
            self._timers.save()
        if self._filters_changed:
            self._tables.set_filters(self._filters.to_document(now_ms)["filterDataByTopic"])
        self._tables.persist(now_ms)

    def _persist(self, row: Row) -> Row:
        self.persist()
        return {}

    def _crash(self, row: Row) -> Row:
        delete_state(self._store.path, self._store.files)  # it names the machine, and equal runs leave equal files
        self._store.abandon()
        return {}


def _origin(row: Row, sys_flag: int) -> dict[str, Any]:
    """Return origin and times of an operation's messages, as keywords of the store."""
    born_host, store_host = fields.host(row, "bornHost") or _BORN_HOST, fields.host(row, "storeHost")
    for host, bit in ((born_host, record.BORN_HOST_V6), (store_host, record.STORE_HOST_V6)):
        if sys_flag & bit and (host is None or ":" not in host[0]):
            raise MessageIllegalError("sysFlag: expected an IPv6 host, as the flag says")
    return {
        "born_timestamp_ms": fields.int64(row, "bornTimestamp", _BORN_TIMESTAMP_MS),
        "born_host": born_host,
        "store_host": store_host,
        "sys_flag": sys_flag,
        "reconsume_times": fields.int32(row, "reconsumeTimes", 0),
    }
