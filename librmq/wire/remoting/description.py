"""What a broker says about itself: its state, its settings and its rates.

Mirrors ``prepareRuntimeInfo`` and the settings of ``AdminBrokerProcessor``.
"""

from __future__ import annotations

from librmq.broker import Broker
from librmq.errors import BrokerError, ConfigError, MalformedError
from librmq.protocol import ResponseCode
from librmq.wire.remoting.bodies import write_body
from librmq.wire.remoting.calls import Handlers, RemotingCall
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.codes import RequestCode
from librmq.wire.remoting.frames import VERSION
from librmq.wire.remoting.headers import ConfigVersionHeader, StatsOfHeader
from librmq.wire.remoting.name_server import NameServer
from librmq.wire.remoting.rates import Rates

__all__ = ["Description"]


class Description:
    """Describes one server's broker. Thread-safe."""

    def __init__(self, broker: Broker, names: NameServer, rates: Rates) -> None:
        self._broker = broker
        self._names = names
        self._rates = rates
        self._begin_ms = broker.runner.now_ms()
        self.handlers: Handlers = {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._runtime,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._change,
            RequestCode.VIEW_BROKER_STATS_DATA: self._stats,
        }

    def _runtime(self, call: RemotingCall) -> bytes:
        store, now_ms = self._broker.store, self._broker.runner.now_ms()
        used = f"{store.files.used_ratio(store.path):.2f}"
        minutes, seconds = divmod((now_ms - self._begin_ms) // 1000, 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        first = next(iter(store), None)
        table = {
            "bootTimestamp": self._begin_ms,
            "brokerVersion": VERSION,
            "brokerVersionDesc": "V4_9_4",
            "commitLogDiskRatio": used,
            "commitLogMaxOffset": store.log.end,
            "commitLogMinOffset": store.log.begin,
            "consumeQueueDiskRatio": used,
            "earliestMessageTimeStamp": -1 if first is None else first.store_timestamp_ms,
            "getTransferedTps": self._rates.per_second("get", None, now_ms),
            "pullThreadPoolQueueHeadWaitTimeMills": 0,  # requests wait in no queue
            "pullThreadPoolQueueSize": 0,
            "putTps": self._rates.per_second("put", None, now_ms),
            "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]",
            "sendThreadPoolQueueHeadWaitTimeMills": 0,
            "sendThreadPoolQueueSize": 0,
        }
        return call.answer(body=write_body({"table": {name: str(value) for name, value in table.items()}}))

    def _settings(self, channel: Channel) -> dict[str, str]:
        """Return the settings by their names in 4.9."""
        broker = self._broker
        settings = {
            "autoCreateTopicEnable": broker.config.auto_create_topic,
            "brokerClusterName": broker.cluster_name,
            "brokerIP1": self._names.address(channel).rpartition(":")[0],
            "brokerName": broker.name,
            "defaultTopicQueueNums": broker.config.default_topic_queues,
            "enablePropertyFilter": broker.store.config.enable_property_filter,
            "flushDiskType": "SYNC_FLUSH" if broker.store.config.durability == "sync" else "ASYNC_FLUSH",
            "listenPort": channel.own[1],
            "mapedFileSizeCommitLog": broker.store.config.commitlog_file_size,
            "maxMessageSize": broker.store.config.max_message_size,
            "messageDelayLevel": broker.store.config.message_delay_level,
            "storePathRootDir": broker.store.path,
            "timerWheelEnable": broker.config.timers is not None or broker.config.hops,  # 5.x's: any delay is taken
        }
        return {name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in settings.items()}

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
        known = self._settings(call.channel)
        for line in filter(None, map(str.strip, text.splitlines())):
            name, _, value = (part.strip() for part in line.partition("="))
            if not line.startswith("#") and known.get(name) != value:
                raise ConfigError(
                    f"{name[:80]} can't be changed while the broker is open: its settings are those of the program "
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
