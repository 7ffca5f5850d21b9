"""Requests of ``mqadmin``, the dashboard and exporters.

Mirrors ``AdminBrokerProcessor`` and ``QueryMessageProcessor``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    MalformedError,
    MessageIllegalError,
    RmqError,
)
from librmq.formatting import date_of
from librmq.java.json import ObjectKey
from librmq.message import MessageQueue
from librmq.message.topics import SystemTopic, is_system_topic, validate_client_topic
from librmq.protocol import (
    PERM_READ,
    PERM_WRITE,
    CancelMessage,
    ConsumerOffsetsOf,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeConnections,
    DescribeInstance,
    DescribeProgress,
    DescribeQueues,
    GroupProgress,
    ReadRequest,
    ResponseCode,
    SaveProgress,
    StartGroup,
    UpdateOffset,
)
from librmq.runtime.event_log import EventLog
from librmq.wire.remoting._bodies import group_clients_body, queue_key, read_body, subscription_row, write_body
from librmq.wire.remoting._channels import (
    Channel,
    ClientChannel,
    ClientChannels,
    Handlers,
    RemotingCall,
    refused,
    served,
)
from librmq.wire.remoting._consumer_requests import stored_ms
from librmq.wire.remoting._frames import VERSION, Frame
from librmq.wire.remoting._headers import (
    ClientOfGroupHeader,
    ClientStatusHeader,
    CloneOffsetHeader,
    NameHeader,
    QueueEntriesHeader,
    RefusedSendHeader,
    RequestCode,
    StatsOfHeader,
)
from librmq.wire.remoting._request_codec import OPERATOR_FORMS, frame_of
from librmq.wire.remoting._running_info import Rates, running_info_body

ADMINISTRATIVE: Final = frozenset(
    {
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        *(form.code for kind, form in OPERATOR_FORMS.items() if not issubclass(kind, ReadRequest)),
    }
)
"""Requests that change a broker for other clients, and are refused to clients on other machines."""
_log = EventLog("librmq.wire")
_RELAY_S: Final = 10.0
_MISSING: Final[Mapping[type[Any], ResponseCode]] = {
    DeleteTopic: ResponseCode.TOPIC_NOT_EXIST,
    DeleteGroup: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
}
"""Refusals of deletions where nothing is there, which succeed."""
_MOST_ENTRIES: Final = 10_000
_MAX_INT: Final = (1 << 31) - 1
"""No limit, in settings and counts of Java."""


class AdminRequests:
    """Answers requests of people and tools to one server. Thread-safe."""

    def __init__(self, broker: Broker, sessions: ClientChannels, rates: Rates) -> None:
        self._broker = broker
        self._rates = rates
        self._sessions = sessions
        self._begin_ms = broker.runner.now_ms()
        self.handlers: Handlers = {
            RequestCode.QUERY_CONSUME_QUEUE: self._entries,
            **served(broker.call, *OPERATOR_FORMS, CancelMessage, StartGroup),
            **served(self._change_table, CreateTopic, DeleteTopic, DeleteGroup),
            RequestCode.GET_ALL_TOPIC_CONFIG: self._configs,
            RequestCode.GET_TOPIC_CONFIG: self._topic_config,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._group_config,
            RequestCode.GET_TOPIC_STATS_INFO: self._topic_stats,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: lambda call: call.answer(),  # retention does it
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._configs,
            RequestCode.GET_CONSUME_STATS: self._consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self._all_consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self._time_spans,
            RequestCode.CLONE_GROUP_OFFSET: self._clone,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self._all_offsets,
            RequestCode.GET_ALL_DELAY_OFFSET: self._all_offsets,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self._all_producers,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._client_progress,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._client_progress,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.GET_BROKER_RUNTIME_INFO: self._runtime,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._check_settings,
            RequestCode.VIEW_BROKER_STATS_DATA: self._stats,
        }

    # ---- messages

    def _entries(self, call: RemotingCall) -> bytes:
        header: QueueEntriesHeader = call.header
        queue = self._broker.store.queue(header.topic, header.queue_id)
        if queue is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{header.queue_id}@{header.topic} is not exist!")
        begin, end = self._broker.store.queue_range(header.topic, header.queue_id)
        rows = []
        for offset in range(max(begin, header.index), min(end, header.index + min(header.count, _MOST_ENTRIES))):
            entry = queue.entry(offset)
            if entry is None:
                break
            row = {"physicOffset": entry.physical_offset, "physicSize": entry.size, "tagsCode": entry.tags_code}
            rows.append({"eval": False, **row})
        body: dict[str, Any] = (
            {} if header.consumer_group is None else self._filter(header.consumer_group, header.topic)
        )
        body |= {"maxQueueIndex": end, "minQueueIndex": begin, "queueData": rows}
        return call.answer(body=write_body(body))

    def _filter(self, group: str, topic: str) -> dict[str, Any]:
        """Return a group's subscription to a topic and its registered filter, as they select entries of a queue."""
        connections = self._broker.connections(group)
        subscription = None if connections is None else connections.subscriptions.get(topic)
        if subscription is None:
            return {"filterData": f"{group}@{topic} is not online!"}
        with self._broker.runner.lock:
            row = self._broker.tables.filter_table.rows.get(topic, {}).get("groupFilterData", {}).get(group)
        return {"filterData": json.dumps(row, ensure_ascii=False), "subscriptionData": subscription_row(subscription)}

    # ---- topics

    def _change_table(self, request: CreateTopic | DeleteTopic | DeleteGroup) -> None:
        """Change a topic or a group; as at a broker, a deletion succeeds if nothing is there."""
        try:
            if not isinstance(request, DeleteGroup):
                validate_client_topic(request.topic)
            self._broker.call(request)
        except MessageIllegalError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        except BrokerError as error:
            if error.code != _MISSING.get(type(request)):
                raise

    def _configs(self, call: RemotingCall) -> bytes:
        """Answer with the rows of all topics, or of all groups."""
        tables = self._broker.tables
        name, table = "subscriptionGroupTable", tables.groups
        if call.frame.code == RequestCode.GET_ALL_TOPIC_CONFIG:
            name, table = "topicConfigTable", tables.topics
        with self._broker.runner.lock:
            rows = dict(table.rows)
        version = {"counter": 0, "timestamp": self._begin_ms}
        return call.answer(body=write_body({"dataVersion": version, name: rows}))

    def _topic_config(self, call: RemotingCall) -> bytes:
        header: DescribeQueues = call.header
        with self._broker.runner.lock:
            row = self._broker.tables.topics.rows.get(header.topic)
            if row is None:
                raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {header.topic}")
            return call.answer(body=write_body({"attributes": {}, **row}))

    def _group_config(self, call: RemotingCall) -> bytes:
        header: NameHeader = call.header
        with self._broker.runner.lock:
            row = self._broker.tables.groups.rows.get(header.name)
            if row is None:
                raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
            return call.answer(body=write_body(row))

    def _topic_stats(self, call: RemotingCall) -> bytes:
        request: DescribeQueues = call.header
        table = {
            queue_key(queue): {"lastUpdateTimestamp": last_ms, "maxOffset": end, "minOffset": begin}
            for queue, (begin, end, last_ms) in self._broker.call(request).items()
        }
        return call.answer(body=write_body({"offsetTable": table}))

    def _system_topics(self, call: RemotingCall) -> bytes:
        return call.answer(body=write_body({"topicList": list(filter(is_system_topic, self._broker.topics()))}))

    # ---- groups

    def _consume_stats(self, call: RemotingCall) -> bytes:
        request: DescribeProgress = call.header
        progress = self._broker.progress(request.group, request.topic)
        topics = {queue.topic for queue in progress}
        per_second = math.fsum(self._per_second(request.group, topic) for topic in topics)
        return call.answer(body=write_body({"consumeTps": per_second, "offsetTable": _progress_rows(progress)}))

    def _per_second(self, group: str, topic: str) -> float:
        return self._rates.per_second("get", f"{topic}@{group}", self._broker.runner.now_ms())

    def _all_consume_stats(self, call: RemotingCall) -> bytes:
        groups, behind = [], 0
        for group in self._broker.groups():
            progress = self._broker.progress(group)
            behind += sum(row.lag for row in progress.values())
            topics: dict[str, dict[MessageQueue, GroupProgress]] = {}
            for queue, row in progress.items():
                topics.setdefault(queue.topic, {})[queue] = row
            stats = [
                {"consumeTps": self._per_second(group, topic), "offsetTable": _progress_rows(rows)}
                for topic, rows in topics.items()
            ]
            groups.append({group: stats})
        body = {"brokerAddr": call.channel.broker_address, "consumeStatsList": groups, "totalDiff": behind}
        return call.answer(body=write_body(body))

    def _time_spans(self, call: RemotingCall) -> bytes:
        header: ConsumerOffsetsOf = call.header
        now_ms, rows = self._broker.runner.now_ms(), []
        for queue, progress in self._broker.call(DescribeProgress(header.group, header.topic)).items():
            at = header.topic, queue.queue_id
            begin, consumed, end = progress.min_offset, progress.queue_offset, progress.max_offset
            next_ms = stored_ms(self._broker, *at, consumed)
            times = {
                "consumeTimeStamp": stored_ms(self._broker, *at, consumed - 1 if consumed else begin),
                "maxTimeStamp": stored_ms(self._broker, *at, end - 1),
                "minTimeStamp": stored_ms(self._broker, *at, begin),
            }
            rows.append(
                {
                    **times,
                    **{f"{name}Str": _shown_time(ms) for name, ms in times.items()},
                    "delayTime": now_ms - next_ms if next_ms >= 0 else 0,
                    "messageQueue": dict(queue_key(queue)),
                }
            )
        return call.answer(body=write_body({"consumeTimeSpanSet": rows}))

    def _all_offsets(self, call: RemotingCall) -> bytes:
        """Answer with the progress of all groups, or of the delay levels."""
        asks_for_groups = call.frame.code == RequestCode.GET_ALL_CONSUMER_OFFSET
        with self._broker.runner.lock:
            rows = self._broker.tables.offsets.rows if asks_for_groups else self._broker.delay_offsets
            body = write_body({"offsetTable": rows})
        return call.answer(body=body)

    def _clone(self, call: RemotingCall) -> bytes:
        header: CloneOffsetHeader = call.header
        if header.src_group == header.dest_group:
            raise ConfigError(f"srcGroup and destGroup are both {header.src_group!r}: expected two groups")
        topics = {queue.topic for queue in self._broker.progress(header.src_group, header.topic or None)}
        for topic in sorted(topics):
            for queue_id, offset in self._broker.consumer_offsets(header.src_group, topic).items():
                self._broker.call(UpdateOffset(header.dest_group, topic, queue_id, offset))
        self._broker.call(SaveProgress(header.dest_group))
        return call.answer()

    # ---- clients

    def _consumers(self, call: RemotingCall) -> bytes:
        request: DescribeConnections = call.header
        group = request.group
        members = self._broker.connections(group)
        if members is None:
            raise BrokerError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        return call.answer(body=group_clients_body(members, map(self._connection, members.client_ids)))

    def _connection(self, client_id: str) -> dict[str, Any]:
        session = self._sessions.by_id.get(client_id)
        if session is None:  # a client in the broker's own process
            return {"clientAddr": "", "clientId": client_id, "language": "PYTHON", "version": VERSION}
        return {
            "clientAddr": session.address,
            "clientId": client_id,
            "language": session.language,
            "version": session.version,
        }

    def _producers(self, call: RemotingCall) -> bytes:
        header: NameHeader = call.header
        ids = self._producer_groups().get(header.name)
        if not ids:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the producer group[{header.name}] not exist")
        return call.answer(body=write_body({"connectionSet": [self._connection(client_id) for client_id in ids]}))

    def _producer_groups(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for client in self._broker.clients():
            for group in client.producer_groups:
                groups.setdefault(group, []).append(client.client_id)
        return groups

    def _all_producers(self, call: RemotingCall) -> bytes:
        data = {}
        for group, ids in self._producer_groups().items():
            clients = [session for client_id in ids if (session := self._sessions.by_id.get(client_id)) is not None]
            data[group] = [_producer_row(session) for session in clients]
        return call.answer(body=write_body({"data": data}))

    def _running_info(self, call: RemotingCall) -> bytes | None:
        """Answer for an instance in the broker's own process; forward the request to another."""
        header: ClientOfGroupHeader = call.header
        members = self._broker.connections(header.consumer_group)
        is_remote = self._sessions.by_id.get(header.client_id) is not None
        if is_remote or members is None or header.client_id not in members.client_ids:
            self._relay(call)
            return None
        state = self._broker.call(DescribeInstance(header.consumer_group, header.client_id))
        if state is None:
            raise BrokerUnreachableError(f"client {header.client_id} does not report its state")
        subscriptions = members.subscriptions_by_client.get(header.client_id, members.subscriptions)
        return call.answer(body=running_info_body(state, subscriptions, (), header.jstack_enable))

    def _relay(self, call: RemotingCall) -> None:
        """Forward a request to a client and answer later, so that other requests of the connection do not wait."""
        header: ClientOfGroupHeader = call.header
        session = self._sessions.by_id.get(header.client_id)
        if session is None:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{header.consumer_group}> <{header.client_id}> not online",
            )
        if session.channel is call.channel:
            raise ConfigError(f"client {header.client_id} asks for itself")
        request = frame_of(RequestCode(call.frame.code), header, call.frame.body)

        def relay() -> None:
            try:
                answer = session.channel.request(request, _RELAY_S)
                raw = call.answer(body=answer.body, code=answer.code, remark=answer.remark)
            except RmqError as error:  # no answer, or one that fits into no frame
                raw = refused(call.channel, call.frame, error)
            call.write_later(raw)

        call.channel.run_later(relay)

    def _client_progress(self, call: RemotingCall) -> None:
        """Ask the clients of a group for their progress in memory, and answer later."""
        header: ClientStatusHeader = call.header
        members = self._broker.connections(header.group)
        if members is None:
            remark = f"No Any Consumer online in the consumer group: [{header.group}]"
            raise BrokerError(ResponseCode.SYSTEM_ERROR, remark)
        client_ids = {header.client_addr} if header.client_addr else set(members.client_ids)
        sessions = [
            client
            for client_id in members.client_ids
            if client_id in client_ids and (client := self._sessions.by_id.get(client_id))
        ]

        def ask() -> None:
            table = {}
            fields = {"topic": header.topic, "group": header.group}
            for session in sessions:
                try:
                    request = Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, dict(fields))
                    answer = session.channel.request(request, _RELAY_S)
                    if answer.code == 0:
                        its = read_body(answer.body, "a client's progress").get("messageQueueTable")
                        table[session.client_id] = its or {}
                except RmqError as error:  # the others still answer
                    _log.debug(
                        "client %(client)s did not report its progress: %(error)s",
                        client=session.client_id,
                        error=error,
                    )
            call.write_later(call.answer(body=write_body({"consumerTable": table, "messageQueueTable": {}})))

        call.channel.run_later(ask)

    def _consume_directly(self, call: RemotingCall) -> None:
        header: ClientOfGroupHeader = call.header
        message = self._broker.find_by_id(header.msg_id)
        if message is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no message has the id {header.msg_id}")
        call.frame.body = message.raw
        self._relay(call)

    # ---- state, settings and rates

    def _runtime(self, call: RemotingCall) -> bytes:
        """Answer with those keys of 4.9.4 whose values a broker of librmq has, or without which a tool fails.

        Requests wait in no queue, so the sizes of queues and the waits in them, which ``clusterList`` shows, are 0.
        """
        store, now_ms, rates = self._broker.store, self._broker.runner.now_ms(), self._rates
        used = f"{store.files.used_ratio(store.path):.2f}"
        first = next(iter(store), None)
        puts, gets = rates.days("put", now_ms), rates.days("get", now_ms)
        _, put, size = rates.total("put")
        found_per_second = rates.per_second("get", None, now_ms, of_calls=True)
        missed = rates.per_second("miss", None, now_ms, of_calls=True)
        from librmq import __version__  # the package loads what it exports when it is used

        table = {
            **{f"{name}ThreadPoolQueueSize": 0 for name in ("send", "pull", "query")},
            **{f"{name}ThreadPoolQueueHeadWaitTimeMills": 0 for name in ("send", "pull", "query")},
            # Without one of these, ``rocketmq-exporter`` has no figures of the broker at all; ``clusterList`` shows the
            # third. The values are those of a 4.9 broker at rest without a pool of buffers.
            **{f"{name}ThreadPoolQueueCapacity": 0 for name in ("send", "pull", "query")},
            **dict.fromkeys(("dispatchBehindBytes", "dispatchMaxBuffer", "pageCacheLockTimeMills"), 0),
            "putMessageDistributeTime": "null",
            "remainTransientStoreBufferNumbs": _MAX_INT,
            "startAcceptSendRequestTimeStamp": 0,
            "bootTimestamp": self._begin_ms,
            "brokerVersion": VERSION,
            "brokerVersionDesc": "V4_9_4",
            "commitLogDiskRatio": used,
            f"commitLogDiskRatio_{os.path.join(store.path, 'commitlog')}": used,
            "commitLogMaxOffset": store.log.end,
            "commitLogMinOffset": store.log.begin,
            "consumeQueueDiskRatio": used,
            "librmqVersion": __version__,
            "earliestMessageTimeStamp": -1 if first is None else first.store_timestamp_ms,
            "getFoundTps": found_per_second,
            "getMessageEntireTimeMax": rates.longest_ms("get"),
            "getMissTps": missed,
            "getTotalTps": found_per_second + missed,
            # The second name is that of 5.x, whose `clusterList` reads it.
            **dict.fromkeys(("getTransferedTps", "getTransferredTps"), rates.per_second("get", None, now_ms)),
            "msgGetTotalTodayMorning": gets.today_morning,
            "msgGetTotalTodayNow": gets.now,
            "msgGetTotalYesterdayMorning": gets.yesterday_morning,
            "msgPutTotalTodayMorning": puts.today_morning,
            "msgPutTotalTodayNow": puts.now,
            "msgPutTotalYesterdayMorning": puts.yesterday_morning,
            "putMessageAverageSize": size / max(put, 1),
            "putMessageEntireTimeMax": rates.longest_ms("put"),
            "putMessageFailedTimes": rates.total("failed")[0],
            "putMessageSizeTotal": size,
            "putMessageTimesTotal": put,
            "putTps": rates.per_second("put", None, now_ms),
            "remainHowManyDataToFlush": _human(store.log.unflushed),
            "runtime": _duration(now_ms - self._begin_ms),
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
            "msgTraceTopicName": SystemTopic.TRACE,
            "regionId": RefusedSendHeader().region,
            "rejectTransactionMessage": False,
            "slaveReadEnable": True,
            "startAcceptSendRequestTimeStamp": 0,
            "storePathCommitLog": os.path.join(broker.store.path, "commitlog"),
            "storePathRootDir": broker.store.path,
            "timerWheelEnable": broker.takes_any_delay,  # 5.x's: any delay is taken
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
        version = f'{{"counter":0,"timestamp":{self._begin_ms}}}'
        return call.answer_fields({"version": version}, "\n".join([*lines, ""]).encode())

    def _check_settings(self, call: RemotingCall) -> bytes:
        """Accept settings as they are, and refuse any change: the program that opened the broker owns them."""
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


def _progress_rows(progress: Mapping[MessageQueue, GroupProgress]) -> dict[ObjectKey, dict[str, int]]:
    """Return a group's progress by queue; without progress it counts from 0, as in the statistics of 4.9."""
    return {
        queue_key(queue): {
            "brokerOffset": row.max_offset,
            "consumerOffset": row.queue_offset,
            "lastTimestamp": row.last_timestamp_ms,
        }
        for queue, row in progress.items()
    }


def _shown_time(ms: int) -> str:
    """Return a time as 4.9 shows it, in the machine's time zone; the number where no calendar has the time."""
    date = date_of(ms, is_local=True)
    return str(ms) if date is None else f"{date:%Y-%m-%d#%H:%M:%S}:{ms % 1000:03}"


def _producer_row(session: ClientChannel) -> dict[str, Any]:
    return {
        "clientId": session.client_id,
        "language": session.language,
        "lastUpdateTimestamp": session.beat_ms,
        "remoteIP": f"/{session.address}",
        "version": session.version,
    }


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
