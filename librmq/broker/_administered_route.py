"""Administration: topics, groups, progress and messages of all brokers of a route, by the same names everywhere.

`Broker.open`, `librmq.share`, `librmq.connect` and `Cluster.open` return routes of this kind. Each call is one request,
or a few, to `Endpoint.call` of each broker. A class overrides a call only where it has the store at hand. Mirrors
``DefaultMQAdminExt``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, ParamSpec, Self, TypeVar

from librmq.broker._topics import (
    check_key,
    check_names,
    check_topic_settings,
    no_such_group,
    no_such_topic,
    refuse_own_topic,
    target_of,
)
from librmq.broker.groups import group_settings
from librmq.config import Seconds, check_reached, to_seconds
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    GroupBehindError,
    MalformedError,
    RmqError,
)
from librmq.formatting import NAMED
from librmq.message import MessageQueue, StoredMessage, dead_letter_topic
from librmq.message.ids import parse_offset_message_id
from librmq.message.topics import (
    MESSAGE_TYPE,
    WAITING_TOPICS,
    TopicType,
    is_system_topic,
    validate_group,
    validate_topic,
)
from librmq.protocol import (
    NOT_SENT_HERE,
    PERM_READ,
    PERM_WRITE,
    CancelMessage,
    CancelResult,
    ChangeSchedule,
    CleanUnusedTopics,
    ConnectedClient,
    ConsumerOffsetsOf,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeClients,
    DescribeConnections,
    DescribeGroups,
    DescribeInstance,
    DescribeProgress,
    DescribeQueues,
    DescribeSchedules,
    DescribeTopics,
    Endpoint,
    GroupConnections,
    GroupProgress,
    GroupsBehind,
    GroupSettings,
    InstanceState,
    MoveGroup,
    PullMessage,
    PullStatus,
    QueryMessages,
    QueueBounds,
    QueueData,
    Request,
    ResponseCode,
    Route,
    SentMessage,
    SetGroup,
    Subscription,
    TopicDescription,
    TopicGroups,
    ViewMessage,
    cancel_request,
)
from librmq.runtime import Runner
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog, counted

if TYPE_CHECKING:
    from librmq.scheduling import Schedule
    from librmq.store import BrokerTables, MessageStore

_log = EventLog("librmq.broker")

P = ParamSpec("P")
R = TypeVar("R")
_JOIN_STEP_S: Final = 0.02
_PULLER: Final = "TOOLS_CONSUMER"
"""The group of ``mqadmin``, which every broker lets read."""
_AT_ONCE: Final = 32
_ASKED_AT_ONCE: Final = 8
_MOST_OF_AN_ID: Final = 32
"""Messages that a broker of RocketMQ returns for an id."""


class AdministeredRoute(Route, Closing):
    """A `Route` whose brokers can be administered, wherever they run. Thread-safe.

    Each call raises `BrokerUnreachableError` if a broker can't be reached or is closed, and `BrokerError` if a broker
    refuses. From a coroutine, run any of them by `run_async`.
    """

    runner: Runner

    @property
    def dead(self) -> bool:
        """Whether no call succeeds any more, because it is closed."""
        return not self.broker_names()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.offload(self.close)  # closing can block

    async def run_async(self, call: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run a call of this route without blocking the event loop: ``await broker.run_async(broker.topics)``."""
        return await self.runner.offload(partial(call, *arguments, **keywords))

    def _check_open(self) -> None:
        if not self.broker_names():
            raise BrokerUnreachableError(f"{self!r}: no broker can be reached")

    def _endpoints(self) -> Iterator[tuple[str, Endpoint]]:
        self._check_open()
        for name in self.broker_names():
            yield name, self.endpoint(name)

    def _ask_all(self, request: Request[R]) -> list[R]:
        return [broker.call(request) for _, broker in self._endpoints()]

    def _ask_those_with(self, request: Request[R], *absent: ResponseCode) -> tuple[list[R], list[BrokerError]]:
        """Return the answers of the brokers, and the refusals by which some say, with these codes, what they lack."""
        answers, refusals = list[R](), list[BrokerError]()
        for _, broker in self._endpoints():
            try:
                answers.append(broker.call(request))
            except BrokerError as error:
                if error.code not in absent:
                    raise
                refusals.append(error)
        return answers, refusals

    # ---- topics

    def topics(self) -> dict[str, TopicDescription]:
        """Return all topics by name, sorted, including the brokers' own."""
        parts: dict[str, list[QueueData]] = {}
        for topic, data in chain.from_iterable(topics.items() for topics in self._ask_all(DescribeTopics())):
            parts.setdefault(topic, []).append(data)
        return {topic: TopicDescription(topic, tuple(parts[topic])) for topic in sorted(parts)}

    def queues(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Return the queues of a topic, sorted, with the bounds of their messages; empty if there is no such topic."""
        check_names(topic=topic)
        parts, _ = self._ask_those_with(DescribeQueues(topic), ResponseCode.TOPIC_NOT_EXIST)
        return dict(sorted(chain.from_iterable(part.items() for part in parts)))

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        *,
        write_queues: int | None = None,
        permission: int = PERM_READ | PERM_WRITE,
        message_type: TopicType | None = None,
        broker_name: str | None = None,
    ) -> None:
        """Create a topic with ``queues`` queues, or change it; stored messages do not move.

        ``message_type`` limits what official clients of 5.x may send. None keeps the topic's type: MIXED for a new
        topic. With ``broker_name`` only that broker of a cluster has the topic.
        """
        write = queues if write_queues is None else write_queues
        request = CreateTopic(topic, queues, write, permission, _of_type(message_type))
        check_topic_settings(request)
        refuse_own_topic(topic)
        self._check_open()
        brokers = self._endpoints() if broker_name is None else [(broker_name, self.endpoint(broker_name))]
        for _, broker in brokers:
            broker.call(request)
        self._topic_changed(topic)

    def _topic_changed(self, topic: str) -> None:
        """Learn the route of a topic that this route has changed, where it is kept."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic; its messages stay in the log until retention deletes them.

        The files of its queues stay until `clean_unused_topics`.
        """
        validate_topic(topic)
        refuse_own_topic(topic)
        self._delete(DeleteTopic(topic), ResponseCode.TOPIC_NOT_EXIST)
        self._topic_changed(topic)

    def _delete(self, request: DeleteTopic | DeleteGroup, absent: ResponseCode) -> None:
        """Delete at all brokers that have the topic or group, and refuse if none has."""
        deletions, refusals = self._ask_those_with(request, absent)
        if not deletions:
            raise refusals[0]

    def clean_unused_topics(self) -> list[tuple[str, int]]:
        """Delete the queue files of topics that no longer exist and have no messages in the log.

        The groups' progress in them is deleted too. Return the queues as topic and queue id; brokers of RocketMQ do not
        name them.
        """
        return list(chain.from_iterable(self._ask_all(CleanUnusedTopics())))

    # ---- groups

    def groups(self) -> dict[str, int]:
        """Return the number of retries of all consumer groups, by name, sorted."""
        return {name: settings.retry_max_times for name, settings in self._all_settings().items()}

    def _all_settings(self) -> dict[str, GroupSettings]:
        # Of a group with other settings at another broker, those of the first broker count.
        parts = reversed(self._ask_all(DescribeGroups()))
        return dict(sorted(dict(chain.from_iterable(part.items() for part in parts)).items()))

    def group_settings(self, group: str) -> GroupSettings:
        """Return the settings of a consumer group, which `set_group` changes.

        Raises:
            BrokerError: There is no such group.
        """
        validate_group(group)
        settings = self._all_settings()
        if group not in settings:
            raise no_such_group(group, settings)
        return settings[group]

    def set_group(
        self,
        group: str,
        *,
        retry_max_times: int | None = None,
        is_ordered: bool | None = None,
        consumes: bool | None = None,
        broadcasts: bool | None = None,
        priority_factor: int | None = None,
        max_process_deaths: int | None = None,
    ) -> None:
        """Create a consumer group, or change the settings that are given. None keeps one as it is.

        With ``is_ordered`` a `SimpleConsumer` of the group gets the messages of each queue in order: no further message
        until the earlier ones are acknowledged or visible again. Without ``consumes`` the broker refuses every pull and
        receive of the group, and without ``broadcasts`` the pulls of its broadcasting instances. ``priority_factor``,
        100 by default, is the percentage of receives that begin with the highest priority in topics of type PRIORITY;
        the others take the queues in turn, so that no priority starves. ``max_process_deaths``, 3 by default, is the
        number of ends of its process, while it ran alone, after which a message becomes a dead letter; 0: never.
        A new group retries 16 times, has no order, consumes and broadcasts.

        Raises:
            BrokerError: A value is wrong, or the broker refuses.
            MessageIllegalError: The name of the group is invalid.
        """
        validate_group(group)
        changes = group_settings(retry_max_times, is_ordered, consumes, broadcasts, priority_factor, max_process_deaths)
        self._ask_all(SetGroup(group, changes))

    def delete_group(self, group: str, *, keep_progress: bool = True) -> None:
        """Delete a consumer group's settings, and its progress unless it is kept; a new instance makes it again.

        So does a pull that an instance has left at a broker of RocketMQ. After the shutdown of one of this route, the
        call waits up to 20 s until the broker holds none.

        Raises:
            BrokerError: There is no such group.
        """
        validate_group(group)
        self._delete(DeleteGroup(group, not keep_progress), ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST)

    def clients(self) -> tuple[ConnectedClient, ...]:
        """Return the clients that the brokers know, by id, with their groups."""
        clients = list(chain.from_iterable(self._ask_all(DescribeClients())))
        return ConnectedClient._by_id(
            ((client.client_id, group) for client in clients for group in client.producer_groups),
            ((client.client_id, group) for client in clients for group in client.consumer_groups),
        )

    def connections(self, group: str) -> GroupConnections | None:
        """Return the running instances of a consumer group and their subscriptions; None if it has none."""
        check_names(group=group)
        parts = [part for part in self._ask_all(DescribeConnections(group)) if part is not None]
        return reduce(GroupConnections.joined, parts) if parts else None

    def instances(self, group: str, *, timeout: float | timedelta = 3) -> dict[str, InstanceState | None]:
        """Return what the running instances of a consumer group report about themselves, by client id.

        The value is None for an instance that does not answer.

        Args:
            group: The consumer group.
            timeout: Seconds in which instances that a broker reaches over a connection answer, some at a time; 0 asks
                none of these.
        """
        check_names(group=group)
        limit_s = to_seconds("timeout", timeout)
        brokers: dict[str, Endpoint] = {}  # an instance knows its queues of all brokers
        for _, broker in self._endpoints():
            members = broker.call(DescribeConnections(group))
            brokers |= dict.fromkeys(() if members is None else members.client_ids, broker)
        states = {client_id: _state(broker, group, client_id, 0) for client_id, broker in brokers.items()}
        silent = [client_id for client_id, state in states.items() if state is None]
        if silent and limit_s:
            pool = ThreadPoolExecutor(_ASKED_AT_ONCE, "librmq-instances")
            clients = {
                pool.submit(_state, brokers[client_id], group, client_id, limit_s): client_id for client_id in silent
            }
            answered = wait(clients, limit_s).done
            pool.shutdown(wait=False, cancel_futures=True)
            states.update((clients[future], future.result()) for future in answered)
        return states

    def groups_of(self, topic: str) -> tuple[str, ...]:
        """Return the groups that consume a topic or have progress in it, sorted."""
        check_names(topic=topic)
        return tuple(sorted(set(chain.from_iterable(self._ask_all(TopicGroups(topic))))))

    # ---- progress

    def consumer_offset(self, group: str, topic: str, queue_id: int = 0) -> int | None:
        """Return a group's stored progress in a queue: the queue offset of its next message, None if there is none."""
        return self.consumer_offsets(group, topic).get(queue_id)

    def consumer_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return a group's stored progress in a topic of one broker, by queue id.

        Raises:
            ConfigError: The group has progress in the topic at several brokers, whose queue ids are the same: ask
                `progress`.
        """
        check_names(group=group, topic=topic)
        offsets: dict[int, int] = {}
        named = ""
        for name, broker in self._endpoints():
            if part := broker.call(ConsumerOffsetsOf(group, topic)):
                if offsets:
                    raise ConfigError(
                        f"topic {topic!r} is at brokers {named} and {name}, whose queues have the same ids: ask "
                        f"progress({group!r}, {topic!r}), which names the broker of each queue"
                    )
                offsets, named = dict(part), name
        return offsets

    def progress(self, group: str, topic: str | None = None) -> dict[MessageQueue, GroupProgress]:
        """Return a group's progress by queue, in one topic or in all that it consumes, sorted."""
        check_names(group=group, topic="" if topic is None else topic)
        parts, _ = self._ask_those_with(DescribeProgress(group, topic or None), ResponseCode.TOPIC_NOT_EXIST)
        return dict(sorted(chain.from_iterable(part.items() for part in parts)))

    def lag(self, group: str, topic: str | None = None) -> int:
        """Return how many messages a group has not consumed, in one topic or in all that it consumes."""
        return sum(queue.lag for queue in self.progress(group, topic).values())

    def reset_group(
        self, group: str, topic: str, to: Literal["begin", "end"] | datetime | int, *, queue_id: int | None = None
    ) -> dict[MessageQueue, int]:
        """Set the progress of a running or stopped group in a topic; return the queue offset of each queue.

        In a queue without an offset ``to`` the group is at the end or beginning, as the result says; a warning names
        these queues.

        Args:
            group: The consumer group.
            topic: The topic.
            to: ``"begin"``, ``"end"``, the first message stored at or after a time (with a time zone), or a queue
                offset.
            queue_id: The only queue to move; None means all.

        Raises:
            ConfigError: ``to`` is none of these, or an offset beyond the end of all these queues; or ``queue_id`` is
                not a whole number.
            BrokerError: The group, the topic or the queue does not exist, or a broker of RocketMQ can't move a running
                group there.
        """
        check_names(group=group, topic=topic)
        request = MoveGroup(group, topic, target_of(to), queue_id)
        if queue_id is not None and type(queue_id) is not int:
            raise ConfigError(f"queue_id: expected a whole number or None, found {queue_id!r:.80}")
        if isinstance(request.to, int) and request.to:
            bounds = self.queues(topic)
            ends = [part.max_offset for queue, part in bounds.items() if queue_id in (None, queue.queue_id)]
            check_reached("to", request.to, topic, ends)
        absent = ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        parts, refusals = self._ask_those_with(request, *absent)
        moved = dict(sorted(chain.from_iterable(part.items() for part in parts)))
        if not moved and refusals:
            if refusals[0].code == ResponseCode.TOPIC_NOT_EXIST:
                raise no_such_topic(topic, self.topics()) from refusals[0]
            raise no_such_group(group, self.groups()) from refusals[0]
        if isinstance(request.to, int) and (other := [queue for queue, at in moved.items() if at != request.to]):
            _log.warning(
                "group %(group)s in %(topic)s: %(count)s without offset %(queue_offset)d, where the group is at the "
                "end or the beginning now: %(queues)s",
                group=group,
                topic=topic,
                count=counted(len(other), "queue"),
                queue_offset=request.to,
                queues=", ".join(f"{queue.broker_name}/{queue.queue_id} at {moved[queue]}" for queue in other[:NAMED]),
            )
        return moved

    def join(self, timeout: float | timedelta = 30) -> None:
        """Wait until all running groups have consumed the stored messages.

        Delayed messages and retries count once they are due. On the loop of coroutine listeners, call
        `join_async` instead.

        Args:
            timeout: Seconds. A manual clock is moved by at most this much.

        Raises:
            GroupBehindError: A group has unconsumed messages at the timeout; the error names the queues.
        """
        clock = self.runner.clock
        deadline = clock.monotonic() + to_seconds("timeout", timeout)
        while True:
            behind = list(chain.from_iterable(self._ask_all(GroupsBehind())))
            if not behind:
                return
            left = deadline - clock.monotonic()
            if left <= 0:
                raise GroupBehindError(f"{self!r}: not consumed in time: {'; '.join(behind[:8])}")
            self.runner.pass_time(min(left, _JOIN_STEP_S))

    async def join_async(self, timeout: float | timedelta = 30) -> None:
        """Wait like `join` without blocking the event loop, on which coroutine listeners can run."""
        await self.run_async(self.join, timeout)

    # ---- messages

    def messages(self, topic: str) -> Iterator[StoredMessage]:
        """Return an iterator over the messages that a topic has now, in the order in which each broker stored them.

        The messages of several brokers are merged by their store times, which are as exact as the brokers' clocks.
        """
        check_names(topic=topic)
        self._check_open()
        return self._messages(topic)

    def _messages(self, topic: str) -> Iterator[StoredMessage]:
        parts: dict[str, list[Iterator[StoredMessage]]] = {}
        for queue, bounds in self.queues(topic).items():
            parts.setdefault(queue.broker_name, []).append(
                self.messages_in(queue, range(bounds.min_offset, bounds.max_offset))
            )
        yield from _by_time(
            heapq.merge(*queues, key=lambda message: message.physical_offset) for queues in parts.values()
        )

    def messages_in(self, queue: MessageQueue, offsets: range) -> Iterator[StoredMessage]:
        """Yield the messages of a queue with these queue offsets, without deleted ones."""
        broker, at = self.endpoint(queue.broker_name), offsets.start
        everything = Subscription(queue.topic, "*")
        while at < offsets.stop:
            count = min(_AT_ONCE, offsets.stop - at)
            answer = broker.call(PullMessage("", _PULLER, queue.topic, queue.queue_id, at, count, everything))
            if answer.status is PullStatus.FOUND:
                yield from (message for message in answer.messages if message.queue_offset < offsets.stop)
            if answer.next_offset <= at:
                return
            at = answer.next_offset

    def find_by_id(self, message_id: str) -> StoredMessage | None:
        """Return the first record with an id, an offset id or a producer's unique id; None if there is none.

        An offset id names its broker by the store host; a cluster searches a unique id in all brokers, by name.

        Raises:
            BrokerUnreachableError: A broker of a cluster that could have the message cannot be asked.
            ConfigError: The id is not text, or several brokers of a cluster have the store host in the id, and a
                message at its offset.
        """
        if not isinstance(message_id, str):
            raise ConfigError(f"message_id: expected the text of an id, found {message_id!r:.80}")
        return self._find_by_id(message_id)

    def _find_by_id(self, message_id: str) -> StoredMessage | None:
        try:
            _, physical_offset = parse_offset_message_id(message_id)
        except MalformedError:
            pass
        else:
            for _, broker in self._endpoints():
                message = broker.call(ViewMessage(physical_offset))
                if message is not None and message.offset_id == message_id.upper():
                    return message
        # A broker need not list the topics in which messages wait.
        topics = [topic for topic in self.topics() if not is_system_topic(topic)]
        messages = [
            message
            for topic in (*topics, *WAITING_TOPICS)
            for _, broker in self._endpoints()
            for message in _messages_of_id(broker, topic, message_id)
        ]
        return min(messages, key=lambda message: (message.store_timestamp_ms, message.physical_offset), default=None)

    def find_by_key(self, topic: str, key: str, *, max_messages: int = 64) -> list[StoredMessage]:
        """Return the last messages of a topic with ``key`` as unique id or among their keys, in order of the log.

        A broker returns at most 64; `librmq.MessageStore.find_by_key` has no such limit. The messages of several
        brokers are merged by their store times, which are as exact as the brokers' clocks.
        """
        check_key(topic, key, max_messages)
        request = QueryMessages(topic, key, max_messages)
        logs = (sorted(answer, key=lambda message: message.physical_offset) for answer in self._ask_all(request))
        messages = list(_by_time(logs))
        return messages[max(0, len(messages) - max_messages) :]

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """Return a consumer group's dead letters, in the order of `messages`."""
        check_names(group=group)
        return list(self.messages(dead_letter_topic(group)))

    def resend_dead_letters(
        self, group: str, letters: Iterable[StoredMessage] | None = None, *, only_unsent: bool = False
    ) -> int:
        """Send dead letters to their group again, with all their retries; return their number.

        Each goes to a retry topic of the group and is delivered immediately; the dead letter itself stays.
        ``librmq/resent.json`` of the store notes it. After a kill, the last letters that were sent have no note; the
        next call for those that were not sent finds their copies, which name them, in the log, and notes them. While
        the broker of a letter cannot be reached, another one sends it without a note; such a call finds its copy there.
        In both cases a letter whose properties leave no room for its name in the copy can be sent twice. A broker of
        RocketMQ notes nowhere which were sent again, so there ``letters`` must name them. A letter that a broker
        refuses does not keep the others: the error comes after them.

        Args:
            group: The consumer group.
            letters: Some of `dead_letters`, which are sent even if they were sent before. None means all that were not
                sent yet.
            only_unsent: Leave out those of ``letters`` that were sent before.

        Raises:
            ConfigError: A message is not a dead letter of the group; or at a broker of RocketMQ, ``letters`` is None or
                ``only_unsent`` is given.
            CorruptionError: The file of the notes is damaged.
            MessageIllegalError: A letter is too long for the broker's settings.
            BrokerError: The group pulls, so it reads no retries; or the broker stores no message, as on a full disk.
        """
        from librmq.broker.retries import resend_letters

        validate_group(group)
        self._check_open()
        sent, refused = resend_letters(self, group, self.messages, letters, only_unsent=only_unsent)
        if refused:
            raise refused[0][1]
        return len(sent)

    def cancel(self, receipt: SentMessage | str) -> CancelResult:
        """Cancel the delivery of a message that waits in a delay level, the timer or the relay.

        The answer says whether it is cancelled, or why not: most often it was delivered already. A second call gets
        the same answer. An id stands for all messages sent with it so far: those that wait are cancelled, and if none
        does, the answer is about the last. It holds after a restart and a kill; a broker of RocketMQ that opens the
        store delivers a message of a delay level anyway. Half messages can't be cancelled.

        Args:
            receipt: What `send` returned, or the message's unique id or offset id.

        Raises:
            MessageIllegalError: It is a batch, whose messages never wait.
            BrokerError: The disk refuses, so the message can be delivered after a restart; or the broker has no cancel.
            TypeError: The argument is not a receipt.
        """
        request = CancelMessage(receipt) if isinstance(receipt, str) else cancel_request(receipt)
        queue = None if isinstance(receipt, str) else receipt.queue
        results = [
            broker.call(request)
            for name, broker in self._endpoints()
            if queue is None or queue.broker_name in ("", name)
        ]
        return min(results, key=lambda result: (not result.cancelled, result == NOT_SENT_HERE))

    # ---- schedules

    def set_schedule(  # noqa: PLR0913 (what a schedule says)
        self,
        name: str,
        *,
        topic: str,
        cron: str | None = None,
        timezone: str = "UTC",
        every: float | timedelta | None = None,
        missed: Literal["once", "skip", "all"] = "once",
        body: bytes | str | None = None,
        properties: Mapping[str, str] | None = None,
        message_type: TopicType | None = None,
        until: datetime | int | None = None,
    ) -> None:
        """Send one message at each due time, over all processes and restarts, until the schedule is deleted.

        The store keeps it, and the process that has it open sends. Saying the same again changes nothing, so each
        start of a program may; another text for the name replaces the schedule, and a log line says so. The unique id
        of a message is made of the name and the due time, which its properties SCHEDULE and SCHEDULE_DUE_MS are.

        Args:
            name: Its name in the store.
            topic: Where the messages go.
            cron: Five fields as cron has them, ``"30 6 * * 1-5"``, or six with seconds first; needs the extra ``cron``.
            timezone: The zone of ``cron``. A time that a change of clocks leaves out is due at the change, and one that
                it repeats is due once.
            every: Seconds or a `timedelta` instead, counted from when the schedule was first set.
            missed: What becomes of due times at which no process had the store open, or the schedule was paused: one
                message for the last of them ("once"), none ("skip"), or one for each ("all").
            body: The body of each message; None: the name.
            properties: Properties of each message.
            message_type: The type that the topic gets, as by `create_topic`; its queues stay.
            until: The last time at which it can be due, with a time zone or in ms since 1970.

        Raises:
            ConfigError: A part is wrong; or the brokers are RocketMQ's or remote, which have no schedules.
            MessageIllegalError: Such a message can't be sent.
            MissingExtraError: The extra ``cron`` is missing.
        """
        from librmq.scheduling.schedules import ScheduleRule

        rule = ScheduleRule.of(
            name, topic=topic, cron=cron, timezone=timezone, every=every, missed=missed, body=body,
            properties=properties, until=until,
        )  # fmt: skip
        broker = self._scheduler()
        if message_type is not None:
            old = broker.call(DescribeTopics()).get(topic)
            row = old or CreateTopic(topic)
            request = CreateTopic(topic, row.read_queues, row.write_queues, row.permission, _of_type(message_type))
            check_topic_settings(request)
            if old is None or old.message_type != message_type:
                broker.call(request)
        broker.call(ChangeSchedule(name, "set", rule.row()))

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedules by name: where each sends, when next, when last, and whether it is paused."""
        return self._scheduler().call(DescribeSchedules())

    def pause_schedule(self, name: str) -> None:
        """Let a schedule send nothing until `resume_schedule`; `BrokerError` if there is none of this name."""
        self._scheduler().call(ChangeSchedule(name, "pause"))

    def resume_schedule(self, name: str) -> None:
        """Let a paused schedule send again; its ``missed`` says what becomes of the due times of the pause."""
        self._scheduler().call(ChangeSchedule(name, "resume"))

    def delete_schedule(self, name: str) -> None:
        """Delete a schedule; `BrokerError` if there is none of this name. Its messages stay."""
        self._scheduler().call(ChangeSchedule(name, "delete"))

    def _scheduler(self) -> Endpoint:
        """Return the broker that keeps schedules: of several, the first by name."""
        self._check_open()
        return self.endpoint(min(self.broker_names()))

    def consume(
        self,
        topic: str,
        *,
        group: str,
        tags: str | None = None,
        sql: str | None = None,
        timeout: float | timedelta = 5,
    ) -> Iterator[StoredMessage]:
        """Iterate over a topic as an instance of a consumer group, until no message arrives for ``timeout`` seconds.

        A message counts as consumed when the loop asks for the next one. If the loop ends early, its last message is
        delivered to the group again. `librmq.PullConsumer` offers more control.

        Raises:
            BrokerError: No message came, and a broker refuses the group, as when it has no rights.
            ConfigError: Both ``tags`` and ``sql`` are given, or ``timeout`` is not a time span of at most a year.
            FilterSyntaxError: The expression does not compile.
            MessageIllegalError: The name of the topic or the group is invalid.
        """
        seconds = to_seconds("timeout", timeout, maximum=Seconds().maximum)
        self._check_open()
        # The only import from a room above: every route offers `consume`, and a consumer needs a route.
        from librmq.consumer import PullConsumer

        consumer = PullConsumer(self, group, poll_timeout=seconds)
        consumer.subscribe(topic, tags=tags, sql=sql)

        def messages() -> Iterator[StoredMessage]:
            with ExitStack() as ended:  # by an exception, if the loop ends early
                ended.push(consumer)  # Ctrl-C can interrupt its shutdown, which no caller could call again
                yield from ended.enter_context(consumer)
                if not self.broker_names():
                    raise BrokerUnreachableError(
                        f"topic {topic!r}, group {group!r}: the broker was closed during the iteration"
                    )

        return messages()


class StoreRoute(AdministeredRoute):
    """A route to one broker, whose store is at hand for reading."""

    if TYPE_CHECKING:  # at run time a property here would keep subclasses from having an attribute
        name: str

        @property
        def store(self) -> MessageStore:
            """The broker's store."""
            ...

        @property
        def tables(self) -> BrokerTables:
            """Topics, groups and progress; for reading."""
            ...

    def call(self, request: Request[R], /) -> R:
        """Answer a request."""
        return self.endpoint(self.name).call(request)


def _of_type(message_type: TopicType | None) -> dict[str, str | None]:
    return {} if message_type is None else {MESSAGE_TYPE: message_type}


def _messages_of_id(broker: Endpoint, topic: str, message_id: str) -> Iterator[StoredMessage]:
    """Yield the messages of a topic with a unique id.

    A broker of RocketMQ answers with the last messages that have the id as a key, so older ones are asked for by time.
    Its index knows whole seconds: of more messages with that key in one second the first stay unknown.
    """
    end_ms = (1 << 63) - 1
    while True:
        messages = broker.call(QueryMessages(topic, message_id, end_ms=end_ms, is_unique=True))
        yield from (message for message in messages if message.unique_key == message_id)
        if len(messages) < _MOST_OF_AN_ID:
            return
        oldest_ms = min(message.store_timestamp_ms for message in messages)
        end_ms = oldest_ms if oldest_ms < end_ms else end_ms - 1000


def _by_time(logs: Iterable[Iterable[StoredMessage]]) -> Iterator[StoredMessage]:
    """Merge the messages of brokers by time; those of one broker keep their order, also if its clock was put back."""
    return heapq.merge(*logs, key=lambda message: message.store_timestamp_ms)


def _state(broker: Endpoint, group: str, client_id: str, timeout_s: float) -> InstanceState | None:
    try:
        return broker.call(DescribeInstance(group, client_id, timeout_s))
    except RmqError:  # it is leaving, does not answer, or is of another kind
        return None
