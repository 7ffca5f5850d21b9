"""What a broker says about itself: its state, its settings and its rates.

Rates count by minute, hour and day. Nothing runs periodically: the first event in a slot of time notes the totals
before it, and a question subtracts them from the totals now.

Mirrors ``prepareRuntimeInfo`` and the settings of ``AdminBrokerProcessor``, ``BrokerStatsManager`` and ``StatsItem``.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple, get_args

from librmq.broker import Broker
from librmq.errors import BrokerError, ConfigError, MalformedError
from librmq.message.topics import TRACE_TOPIC
from librmq.protocol import PERM_READ, PERM_WRITE, ResponseCode
from librmq.runtime.locks import Lock
from librmq.wire.remoting.bodies import write_body
from librmq.wire.remoting.channels import Channel, Handlers, RemotingCall
from librmq.wire.remoting.frames import VERSION
from librmq.wire.remoting.headers import ConfigVersionHeader, RefusedSendHeader, RequestCode, StatsOfHeader

# ---- rates of what clients have sent, got and sent back

Kind = Literal["put", "get", "back", "latency", "miss", "failed"]
"""``latency`` counts milliseconds of found pulls, ``miss`` pulls without a message, ``failed`` refused messages."""
_MOST_RATES: Final = 10_000
_DAY_MS: Final = 86_400_000


class Window(NamedTuple):
    """A span of time, and the slots in which it moves on, in ms."""

    span_ms: int
    slot_ms: int


MINUTE: Final = Window(60_000, 10_000)
WINDOWS: Final = {"statsDay": Window(86_400_000, 3_600_000), "statsHour": Window(3_600_000, 600_000)}
WINDOWS["statsMinute"] = MINUTE
_NAMES: Final[Mapping[str, tuple[Kind, int]]] = {
    "TOPIC_PUT_NUMS": ("put", 1),
    "TOPIC_PUT_SIZE": ("put", 2),
    "GROUP_GET_NUMS": ("get", 1),
    "GROUP_GET_SIZE": ("get", 2),
    "SNDBCK_PUT_NUMS": ("back", 1),
    "GROUP_GET_LATENCY": ("latency", 1),
    "BROKER_PUT_NUMS": ("put", 1),
    "BROKER_GET_NUMS": ("get", 1),
}


class _Totals(NamedTuple):
    since_ms: int
    counts: tuple[int, int, int]
    """Calls, messages and bytes before that time."""


class _Rate:
    """What one topic or group has moved. Not thread-safe."""

    __slots__ = ("_calls", "_marks", "_messages", "_next_ms", "_size")

    def __init__(self) -> None:
        self._calls = self._messages = self._size = 0
        self._next_ms = 0
        self._marks: dict[Window, deque[_Totals]] = {window: deque() for window in WINDOWS.values()}

    def add(self, now_ms: int, messages: int, size: int, calls: int) -> None:
        if now_ms >= self._next_ms:
            self._mark(now_ms)
        self._calls += calls
        self._messages += messages
        self._size += size

    def _mark(self, now_ms: int) -> None:
        before = self._calls, self._messages, self._size
        for window, marks in self._marks.items():
            begin_ms = now_ms - now_ms % window.slot_ms
            if not marks or marks[-1].since_ms < begin_ms:
                marks.append(_Totals(begin_ms, before))
            while marks[0].since_ms <= now_ms - window.span_ms:
                marks.popleft()
        self._next_ms = now_ms - now_ms % MINUTE.slot_ms + MINUTE.slot_ms

    @property
    def counts(self) -> tuple[int, int, int]:
        """All calls, messages and bytes."""
        return self._calls, self._messages, self._size

    def over(self, window: Window, now_ms: int) -> tuple[int, tuple[int, int, int]]:
        """Return the counted time in ms, and the calls, messages and bytes in it."""
        for since_ms, (calls, messages, size) in self._marks[window]:
            if since_ms > now_ms - window.span_ms:
                counts = self._calls - calls, self._messages - messages, self._size - size
                return max(now_ms - since_ms, window.slot_ms), counts
        return window.slot_ms, (0, 0, 0)


class DayTotals(NamedTuple):
    """Messages before yesterday, before today, and until now."""

    yesterday_morning: int
    today_morning: int
    now: int


class Rates:
    """The rates of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rates: dict[tuple[Kind, str], _Rate] = {}
        self._totals: dict[Kind, _Rate] = {kind: _Rate() for kind in get_args(Kind)}
        self._longest_ms: dict[Kind, int] = {}
        self._mornings = dict.fromkeys(self._totals, (0, 0))
        self._next_morning_ms = 0

    def add(self, kind: Kind, key: str, now_ms: int, messages: int = 1, size: int = 0, calls: int = 1) -> None:
        """Count calls that have moved messages; ``key`` is a topic, ``topic@group`` or ``queue@topic@group``."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            self._totals[kind].add(now_ms, messages, size, calls)
            if kind in ("miss", "failed"):
                return
            rate = self._rates.get((kind, key))
            if rate is None:
                if len(self._rates) >= _MOST_RATES:
                    return
                rate = self._rates[kind, key] = _Rate()
            rate.add(now_ms, messages, size, calls)

    def rows(self, name: str, key: str, now_ms: int) -> dict[str, dict[str, float]] | None:
        """Return a statistic of 4.9 by window; None if nothing was counted."""
        if name not in _NAMES:
            return None
        kind, place = _NAMES[name]
        with self._lock:
            rate = self._totals[kind] if name.startswith("BROKER_") else self._rates.get((kind, key))
            if rate is None or not rate.counts[0]:
                return None
            return {title: _row(window, rate, place, now_ms) for title, window in WINDOWS.items()}

    def per_second(self, kind: Kind, key: str | None, now_ms: int, *, of_calls: bool = False) -> float:
        """Return the messages or calls a second in the last minute, of one key or of all."""
        with self._lock:
            rate = self._totals[kind] if key is None else self._rates.get((kind, key))
            return 0.0 if rate is None else float(_row(MINUTE, rate, 0 if of_calls else 1, now_ms)["tps"])

    def took(self, kind: Kind, ms: int) -> None:
        """Note how long a call has taken."""
        if ms > self._longest_ms.get(kind, 0):
            with self._lock:
                self._longest_ms[kind] = max(ms, self._longest_ms.get(kind, 0))

    def longest_ms(self, kind: Kind) -> int:
        """Return how long the longest call has taken."""
        return self._longest_ms.get(kind, 0)

    def total(self, kind: Kind) -> tuple[int, int, int]:
        """Return the calls, messages and bytes since the server began."""
        with self._lock:
            return self._totals[kind].counts

    def days(self, kind: Kind, now_ms: int) -> DayTotals:
        """Return the messages by day of the machine's time zone."""
        with self._lock:
            if now_ms >= self._next_morning_ms:
                self._begin_day(now_ms)
            return DayTotals(*self._mornings[kind], self._totals[kind].counts[1])

    def _begin_day(self, now_ms: int) -> None:
        is_next_day = now_ms < self._next_morning_ms + _DAY_MS
        for kind, rate in self._totals.items():
            total = rate.counts[1]
            self._mornings[kind] = (self._mornings[kind][1] if is_next_day else total), total
        midnight = datetime.fromtimestamp(now_ms // 1000).replace(hour=0, minute=0, second=0)
        self._next_morning_ms = round(1000 * (midnight + timedelta(days=1)).timestamp())


def _row(window: Window, rate: _Rate, place: int, now_ms: int) -> dict[str, float]:
    span_ms, counts = rate.over(window, now_ms)
    total, calls = counts[place], counts[0]
    return {"avgpt": total / calls if calls else 0.0, "sum": total, "tps": total * 1000 / span_ms}


_MAX_INT: Final = (1 << 31) - 1
"""No limit, in settings and counts of Java."""


class Description:
    """Describes one server's broker. Thread-safe."""

    def __init__(self, broker: Broker, rates: Rates) -> None:
        self._broker = broker
        self._rates = rates
        self._begin_ms = broker.runner.now_ms()
        self.handlers: Handlers = {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._runtime,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._change,
            RequestCode.VIEW_BROKER_STATS_DATA: self._stats,
        }

    def _runtime(self, call: RemotingCall) -> bytes:
        """Answer with the keys of 4.9.4. Requests wait in no queue, so sizes and capacities of queues are 0."""
        store, now_ms, rates = self._broker.store, self._broker.runner.now_ms(), self._rates
        used = f"{store.files.used_ratio(store.path):.2f}"
        first = next(iter(store), None)
        puts, gets = rates.days("put", now_ms), rates.days("get", now_ms)
        _, put, size = rates.total("put")
        found_per_second = rates.per_second("get", None, now_ms, of_calls=True)
        missed = rates.per_second("miss", None, now_ms, of_calls=True)
        table = {
            **{f"{name}ThreadPoolQueueSize": 0 for name in ("send", "pull", "query")},
            **{f"{name}ThreadPoolQueueCapacity": 0 for name in ("send", "pull", "query", "EndTransaction")},
            **{f"{name}ThreadPoolQueueHeadWaitTimeMills": 0 for name in ("send", "pull", "query")},
            "EndTransactionQueueSize": 0,
            "bootTimestamp": self._begin_ms,
            "brokerVersion": VERSION,
            "brokerVersionDesc": "V4_9_4",
            "commitLogDiskRatio": used,
            f"commitLogDiskRatio_{os.path.join(store.path, 'commitlog')}": used,
            "commitLogMaxOffset": store.log.end,
            "commitLogMinOffset": store.log.begin,
            "consumeQueueDiskRatio": used,
            "dispatchBehindBytes": 0,
            "dispatchMaxBuffer": 0,
            "earliestMessageTimeStamp": -1 if first is None else first.store_timestamp_ms,
            "getFoundTps": found_per_second,
            "getMessageEntireTimeMax": rates.longest_ms("get"),
            "getMissTps": missed,
            "getTotalTps": found_per_second + missed,
            "getTransferedTps": rates.per_second("get", None, now_ms),
            "msgGetTotalTodayMorning": gets.today_morning,
            "msgGetTotalTodayNow": gets.now,
            "msgGetTotalYesterdayMorning": gets.yesterday_morning,
            "msgPutTotalTodayMorning": puts.today_morning,
            "msgPutTotalTodayNow": puts.now,
            "msgPutTotalYesterdayMorning": puts.yesterday_morning,
            "pageCacheLockTimeMills": 0,
            "putLatency99": "0.00",
            "putLatency999": "0.00",
            "putMessageAverageSize": size / max(put, 1),
            "putMessageDistributeTime": "null",
            "putMessageEntireTimeMax": rates.longest_ms("put"),
            "putMessageFailedTimes": rates.total("failed")[0],
            "putMessageSizeTotal": size,
            "putMessageTimesTotal": max(put, 1),
            "putTps": rates.per_second("put", None, now_ms),
            "remainHowManyDataToFlush": _human(store.log.unflushed),
            "remainTransientStoreBufferNumbs": _MAX_INT,
            "runtime": _duration(now_ms - self._begin_ms),
            "startAcceptSendRequestTimeStamp": 0,
        }
        with suppress(OSError):  # in memory there is no disk
            disk = shutil.disk_usage(store.path)
            table["commitLogDirCapacity"] = f"Total : {_human(disk.total)}, Free : {_human(disk.free)}."
        return call.answer(body=write_body({"table": {name: str(value) for name, value in sorted(table.items())}}))

    def _settings(self, channel: Channel) -> dict[str, str]:
        """Return the settings by their names in 4.9, among them all that its tools read."""
        broker, config, store = self._broker, self._broker.config, self._broker.store.config
        address = channel.broker_address.rpartition(":")[0]
        settings: dict[str, object] = {
            "accessMessageInMemoryMaxRatio": store.memory_ratio,
            "aclEnable": False,
            "autoCreateSubscriptionGroup": config.auto_create_group,
            "autoCreateTopicEnable": config.auto_create_topic,
            "brokerClusterName": broker.cluster_name,
            "brokerId": 0,
            "brokerIP1": address,
            "brokerIP2": address,
            "brokerName": broker.name,
            "brokerPermission": PERM_READ | PERM_WRITE,
            "brokerRole": f"{config.replication.upper()}_MASTER",
            "clientCallbackExecutorThreads": os.cpu_count() or 1,
            "defaultTopicQueueNums": config.default_topic_queues,
            "deleteWhen": store.delete_when,
            "diskMaxUsedSpaceRatio": store.disk_max_used_ratio,
            "enableCalcFilterBitMap": store.enable_calc_filter_bitmap,
            "enableConsumeQueueExt": store.enable_consumequeue_ext,
            "enablePropertyFilter": store.enable_property_filter,
            "fileReservedTime": _MAX_INT if store.file_reserved_hours is None else store.file_reserved_hours,
            "filterServerNums": 0,
            "flushCommitLogThoroughInterval": round(1000 * store.flush_thorough_interval_s),
            "flushConsumerOffsetInterval": round(1000 * config.save_offsets_every_s),
            "flushConsumeQueueThoroughInterval": round(1000 * store.flush_thorough_interval_consumequeue_s),
            "flushDiskType": f"{store.durability.upper()}_FLUSH",
            "flushIntervalCommitLog": round(1000 * store.flush_interval_s),
            "flushIntervalConsumeQueue": round(1000 * store.flush_interval_consumequeue_s),
            "listenPort": channel.own[1],
            "mapedFileSizeCommitLog": store.commitlog_file_size,
            "mapedFileSizeConsumeQueue": store.consumequeue_file_size,
            "mappedFileSizeCommitLog": store.commitlog_file_size,
            "mappedFileSizeConsumeQueue": store.consumequeue_file_size,
            "mappedFileSizeConsumeQueueExt": store.consumequeue_ext_file_size,
            "maxHashSlotNum": store.max_hash_slot_num,
            "maxIndexNum": store.max_index_num,
            "maxMessageSize": store.max_message_size,
            "maxTransferBytesOnMessageInDisk": store.max_transfer_bytes_on_disk,
            "maxTransferBytesOnMessageInMemory": store.max_transfer_bytes_in_memory,
            "maxTransferCountOnMessageInDisk": store.max_transfer_count_on_disk,
            "maxTransferCountOnMessageInMemory": store.max_transfer_count_in_memory,
            "messageDelayLevel": store.message_delay_level,
            "msgTraceTopicName": TRACE_TOPIC,
            "regionId": RefusedSendHeader().region,
            "rejectTransactionMessage": False,
            "slaveReadEnable": True,
            "startAcceptSendRequestTimeStamp": 0,
            "storePathCommitLog": os.path.join(broker.store.path, "commitlog"),
            "storePathRootDir": broker.store.path,
            "timerWheelEnable": config.timers is not None or config.hops,  # 5.x's: any delay is taken
            "traceOn": RefusedSendHeader().is_traced,
            "traceTopicEnable": False,
            "transactionCheckInterval": round(1000 * config.transactions.interval_s),
            "transactionCheckMax": config.transactions.check_max,
            "transactionTimeOut": round(1000 * config.transactions.timeout_s),
            "useTLS": channel.is_tls,
        }
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}

    def _config(self, call: RemotingCall) -> bytes:
        lines = [f"{name}={value}" for name, value in self._settings(call.channel).items()]
        version = ConfigVersionHeader(f'{{"counter":0,"timestamp":{self._begin_ms}}}')
        return call.answer(version, body="\n".join([*lines, ""]).encode())

    def _change(self, call: RemotingCall) -> bytes:
        """Accept settings as they are, and refuse any change: the program that opened the broker owns them.

        Raises:
            ConfigError: A setting would change.
        """
        try:
            text = call.frame.body.decode()
        except UnicodeDecodeError:
            raise MalformedError("the body of UPDATE_BROKER_CONFIG: expected text") from None
        settings = self._settings(call.channel)
        for line in filter(None, map(str.strip, text.splitlines())):
            name, _, value = (part.strip() for part in line.partition("="))
            if not line.startswith("#") and settings.get(name) != value:
                raise ConfigError(
                    f"{name[:80]} can't be changed while the broker is open: its settings come from the program "
                    "that opened it; name them there, as Broker.open(config=, store_config=)"
                )
        return call.answer()

    def _stats(self, call: RemotingCall) -> bytes:
        header: StatsOfHeader = call.header
        rows = self._rates.rows(header.stats_name, header.stats_key, self._broker.runner.now_ms())
        if rows is None:
            remark = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            raise BrokerError(ResponseCode.SYSTEM_ERROR, remark)
        return call.answer(body=write_body(rows))


def _human(size: int) -> str:
    """Return a number of bytes as 4.9 shows it."""
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, 6)
    return f"{size / 1024**power:.1f} {'KMGTPE'[power - 1]}iB"


def _duration(ms: int) -> str:
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
