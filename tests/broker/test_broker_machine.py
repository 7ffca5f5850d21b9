"""A broker that is closed, killed and reopened, compared with a model: progress, locks, members, held pulls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from librmq import protocol
from librmq.broker import Broker
from librmq.config import StoreConfig
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message, MessageQueue
from librmq.runtime import ManualRunner
from tests.budget import examples

HOST = ("127.0.0.1", 1)
CLIENTS = st.sampled_from(["c1", "c2", "c3"])
GROUPS = st.sampled_from(["g1", "g2"])
TOPICS = st.sampled_from(["A", "B"])
QUEUES = st.integers(0, 1)
TAGS = st.sampled_from(["x", "y"])
SWEPT_MS, LOCKED_MS = 5_000, 60_000


class Told:
    """A client that only records the requests it gets from the broker."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.forgotten = 0

    def call(self, request: protocol.Request[Any], /) -> Any:
        if isinstance(request, protocol.ClientRemoved):
            self.forgotten += 1
            return
        assert isinstance(request, protocol.ConsumersChanged)
        self.changed.append(request.group)


@dataclass
class Hold:
    tag: str
    swept_ms: int | None = None
    """When the next sweep ends it, if other messages have arrived."""
    woken: list[int] = field(default_factory=list)


class BrokerMachine(RuleBasedStateMachine):
    broker: Broker

    @initialize()
    def begin(self) -> None:
        self.files = MemoryFiles()
        self.runner = ManualRunner()
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        self.open()

    def open(self) -> None:
        self.members: dict[str, dict[str, dict[str, protocol.Subscription]]] = {}
        self.subscribed: dict[str, dict[str, protocol.Subscription]] = {}
        self.told: dict[str, Told] = {}
        self.expected_told: dict[str, list[str]] = {}
        self.locks: dict[tuple[str, MessageQueue], tuple[str, int]] = {}
        self.held: dict[tuple[str, str, str, int], Hold] = {}
        self.opened_ms = self.now_ms
        self.broker = Broker.open("/b", files=self.files, runner=self.runner, store_config=StoreConfig.tiny())
        for topic in ("A", "B"):
            self.broker.create_topic(topic, 2)

    @property
    def now_ms(self) -> int:
        return self.runner.now_ms()

    # ---- messages and held pulls

    @rule(topic=TOPICS, queue_id=QUEUES, tag=TAGS, body=st.binary(max_size=20))
    def send(self, topic: str, queue_id: int, tag: str, body: bytes) -> None:
        expected = self.sent.setdefault((topic, queue_id), [])
        response = self.broker.call(protocol.SendMessage("p", Message(topic, body, tags=tag), queue_id, 1, HOST))
        assert (response.queue_id, response.queue_offset) == (queue_id, len(expected))
        expected.append(body)
        for key, hold in list(self.held.items()):
            if key[2:] == (topic, queue_id):
                if hold.tag in ("*", tag):
                    assert hold.woken == [self.now_ms]
                    del self.held[key]
                elif hold.swept_ms is None:
                    hold.swept_ms = self.now_ms - (self.now_ms - self.opened_ms) % SWEPT_MS + SWEPT_MS

    @rule(client=CLIENTS, group=GROUPS, topic=TOPICS, queue_id=QUEUES, tag=st.one_of(TAGS, st.just("*")))
    def pull_at_the_end(self, client: str, group: str, topic: str, queue_id: int, tag: str) -> None:
        end = len(self.sent.get((topic, queue_id), []))
        hold = Hold(tag)
        response = self.broker.call(
            protocol.PullMessage(
                client,
                group,
                topic,
                queue_id,
                end,
                subscription=protocol.Subscription(topic, tag),
                notify=lambda: hold.woken.append(self.now_ms),
            )
        )
        assert (response.status, response.next_offset, response.messages) == (protocol.PullStatus.HELD, end, ())
        self.held[client, group, topic, queue_id] = hold

    @rule(client=CLIENTS, group=GROUPS, topic=TOPICS, queue_id=QUEUES)
    def pull_all(self, client: str, group: str, topic: str, queue_id: int) -> None:
        bodies: list[bytes] = []
        while True:
            response = self.broker.call(
                protocol.PullMessage(
                    client, group, topic, queue_id, len(bodies), subscription=protocol.Subscription(topic)
                )
            )
            if response.status is not protocol.PullStatus.FOUND:
                break
            bodies += [message.body for message in response.messages]
        assert bodies == self.sent.get((topic, queue_id), [])

    @rule(ms=st.sampled_from([0, 1, 4_999, 5_000, 15_000, 60_000, 60_001]))
    def advance(self, ms: int) -> None:
        self.runner.advance(ms)
        for key, hold in list(self.held.items()):
            if hold.swept_ms is not None and hold.swept_ms <= self.now_ms:
                assert hold.woken == [hold.swept_ms]
                del self.held[key]

    # ---- progress

    @rule(group=GROUPS, topic=TOPICS, queue_id=QUEUES, queue_offset=st.integers(0, 9), by_pull=st.booleans())
    def update(self, group: str, topic: str, queue_id: int, queue_offset: int, by_pull: bool) -> None:
        if by_pull:
            request = protocol.PullMessage(
                "c9", group, topic, queue_id, 0, subscription=protocol.Subscription(topic), commit_offset=queue_offset
            )
            self.broker.call(request)
            queue_offset = max(queue_offset, self.offsets.get((group, topic, queue_id), 0))
        else:
            self.broker.call(protocol.UpdateOffset(group, topic, queue_id, queue_offset))
        self.offsets[group, topic, queue_id] = queue_offset

    @rule(group=GROUPS, topic=TOPICS, queue_id=QUEUES)
    def query(self, group: str, topic: str, queue_id: int) -> None:
        expected = self.offsets.get((group, topic, queue_id), 0)  # the whole queue counts as in memory
        assert self.broker.call(protocol.QueryOffset(group, topic, queue_id)) == expected
        assert self.broker.call(protocol.MaxOffset(topic, queue_id)) == len(self.sent.get((topic, queue_id), []))

    # ---- members

    @rule(
        client=CLIENTS,
        told=st.dictionaries(
            GROUPS, st.dictionaries(TOPICS, st.tuples(TAGS, st.integers(0, 3)), min_size=1), max_size=2
        ),
    )
    def heartbeat(self, client: str, told: dict[str, dict[str, tuple[str, int]]]) -> None:
        endpoint = self.told.setdefault(client, Told())
        consumers = []
        for group, topics in told.items():
            subscriptions = {topic: protocol.Subscription(topic, tag, "TAG", at) for topic, (tag, at) in topics.items()}
            consumers.append(
                protocol.ConsumerData(
                    group, "push", protocol.MessageModel.CLUSTERING, protocol.ConsumeFrom.LAST, subscriptions
                )
            )
            known = self.subscribed.setdefault(group, {})
            before = set(known)
            for topic, subscription in subscriptions.items():
                if topic not in known or subscription.version > known[topic].version:
                    known[topic] = subscription
            for topic in before - subscriptions.keys():
                del known[topic]
            is_new = client not in self.members.setdefault(group, {})
            self.members[group][client] = subscriptions
            if is_new or set(known) != before:
                self.expect_told(group)
        for group in sorted(self.members.keys() - told.keys()):
            self.leave(client, group)
        self.broker.call(protocol.Heartbeat(client, endpoint, frozenset({"p"}), tuple(consumers)))

    def expect_told(self, group: str) -> None:
        for member in self.members[group]:
            self.expected_told.setdefault(member, []).append(group)

    def leave(self, client: str, group: str) -> None:
        members = self.members.get(group, {})
        if members.pop(client, None) is not None:
            if members:
                self.expect_told(group)
            else:
                del self.members[group], self.subscribed[group]

    @rule(client=CLIENTS, group=GROUPS)
    def unregister(self, client: str, group: str) -> None:
        self.leave(client, group)
        self.held = {key: hold for key, hold in self.held.items() if key[:2] != (client, group)}
        self.broker.call(protocol.Unregister(client, consumer_group=group))

    @rule(client=CLIENTS)
    def channel_closed(self, client: str) -> None:
        is_known = client in [known.client_id for known in self.broker.clients()]
        for group in sorted(self.members):
            self.leave(client, group)
        gone = {key: hold for key, hold in self.held.items() if key[0] == client}
        self.held = {key: hold for key, hold in self.held.items() if key[0] != client}
        woken = [len(hold.woken) for hold in gone.values()]
        told = self.told.setdefault(client, Told())
        forgotten = told.forgotten
        self.broker.call(protocol.ChannelClosed(client))
        assert told.forgotten == forgotten + is_known
        assert [len(hold.woken) for hold in gone.values()] == [before + 1 for before in woken]

    # ---- locks

    @rule(
        client=CLIENTS, group=GROUPS, queues=st.frozensets(st.builds(MessageQueue, TOPICS, st.just("broker-a"), QUEUES))
    )
    def lock(self, client: str, group: str, queues: frozenset[MessageQueue]) -> None:
        expected = set()
        for queue in queues:
            holder, renewed_ms = self.locks.get((group, queue), (client, self.now_ms))
            if holder == client or self.now_ms - renewed_ms > LOCKED_MS:
                self.locks[group, queue] = client, self.now_ms
                expected.add(queue)
        assert self.broker.call(protocol.LockQueues(group, client, queues)) == expected

    @rule(
        client=CLIENTS, group=GROUPS, queues=st.frozensets(st.builds(MessageQueue, TOPICS, st.just("broker-a"), QUEUES))
    )
    def unlock(self, client: str, group: str, queues: frozenset[MessageQueue]) -> None:
        for queue in queues:
            if self.locks.get((group, queue), ("", 0))[0] == client:
                del self.locks[group, queue]
        self.broker.call(protocol.UnlockQueues(group, client, queues))

    # ---- life

    @rule()
    def close_and_open(self) -> None:
        self.broker.close()
        self.reopen()

    @rule()
    def kill_and_open(self) -> None:
        self.broker.abandon()
        self.reopen()

    def reopen(self) -> None:
        """Reopen what was answered, after a kill too; progress beyond the end of its queue is set back."""
        ends = {key: len(self.sent.get(key[1:], [])) for key in self.offsets}
        self.offsets = {key: min(queue_offset, ends[key]) for key, queue_offset in self.offsets.items()}
        self.open()

    @invariant()
    def agrees(self) -> None:
        for group in ("g1", "g2"):
            ids: tuple[str, ...] = self.broker.call(protocol.ConsumerIds(group))
            assert set(ids) == self.members.get(group, {}).keys()
            assert self.broker.call(protocol.GroupSubscriptions(group)) == self.members.get(group, {})
            for topic in ("A", "B"):
                expected = {key[2]: at for key, at in self.offsets.items() if key[:2] == (group, topic)}
                assert self.broker.consumer_offsets(group, topic) == expected
        assert {name: sorted(told.changed) for name, told in self.told.items() if told.changed} == {
            name: sorted(groups) for name, groups in self.expected_told.items()
        }
        for hold in self.held.values():
            assert hold.woken == []

    @invariant()
    def subscriptions_of_groups_agree(self) -> None:
        for group, subscriptions in self.subscribed.items():
            for topic in ("A", "B"):
                request = protocol.PullMessage("c9", group, topic, 0, len(self.sent.get((topic, 0), [])))
                if topic in subscriptions:
                    assert self.broker.call(request).status is protocol.PullStatus.NO_NEW_MESSAGE

    def teardown(self) -> None:
        if hasattr(self, "broker"):
            self.broker.close()


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=examples(40), stateful_step_count=30)
