"""A cluster over two sites keeps its promises, whatever fails in whatever order."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from librmq import select_by_hash
from librmq.client.allocation import allocate_by_site
from librmq.errors import BrokerUnreachableError
from librmq.testing import Kit
from tests.budget import examples
from tests.histories import check_drained

SITES = ("hz", "sh")
BROKERS = [f"{site}-broker-{letter}" for site in SITES for letter in "ab"]
TOPICS = ("orders", "ledger")


class ClusterMachine(RuleBasedStateMachine):
    """Sends, and outages of brokers, links, consumers and sites; at the end the history is compared with the promises.

    ``orders`` go to the nearest brokers and are consumed concurrently. ``ledger`` is sent by key, with order above
    availability, and consumed in order.
    """

    @initialize()
    def begin(self) -> None:
        self.rmq = Kit()
        cluster = self.rmq.cluster(brokers=2, sites=SITES)
        for topic in TOPICS:
            cluster.create_topic(topic, 2)
        for site in SITES:
            for topic in TOPICS:
                consumer = self.rmq.consumer(topic, site=site, orderly=topic == "ledger", strategy=allocate_by_site())
                consumer.subscribe(topic)(lambda message: None)
        self.rmq.run_until_idle()
        self.by_key: dict[str, list[bytes]] = defaultdict(list)
        self.number = 0

    @rule(site=st.sampled_from(SITES), count=st.integers(1, 4))
    def order(self, site: str, count: int) -> None:
        producer = self.rmq.producer("shop", site=site, nearby=True)
        for _ in range(count):
            self.number += 1
            with suppress(BrokerUnreachableError):
                producer.send("orders", b"%d" % self.number)

    @rule(site=st.sampled_from(SITES), key=st.sampled_from("klm"))
    def book(self, site: str, key: str) -> None:
        producer = self.rmq.producer("books", site=site, if_broker_down="refuse")
        self.number += 1
        body = b"%d" % self.number
        try:
            producer.send("ledger", body, keys=key, selector=select_by_hash, arg=key)
        except BrokerUnreachableError:
            return
        self.by_key[key].append(body)

    @rule(seconds=st.sampled_from((1, 20, 60, 200)))
    def wait(self, seconds: int) -> None:
        self.rmq.advance(seconds=seconds)

    @rule(name=st.sampled_from(BROKERS), down=st.sampled_from((0, 20, 180)))
    def crash_broker(self, name: str, down: int) -> None:
        if not next(one for one in self.rmq.brokers() if one.name == name).dead:
            self.rmq.crash_broker(name, down=down)

    @rule(number=st.integers(0, 3))
    def crash_consumer(self, number: int) -> None:
        living = [process for process in self.rmq.processes if not process.is_test and not process.dead]
        if living:
            self.rmq.crash(living[number % len(living)])

    @rule(number=st.integers(0, 3))
    def lose_consumer(self, number: int) -> None:
        living = [process for process in self.rmq.processes if not process.is_test and not process.dead]
        if living:
            self.rmq.lose(living[number % len(living)])

    @precondition(lambda self: not any(broker.dead for broker in self.rmq.brokers()))
    @rule(site=st.sampled_from(SITES), down=st.sampled_from((30, 180)))
    def lose_site(self, site: str, down: int) -> None:
        self.rmq.lose_site(site, down=down)

    @rule(seconds=st.sampled_from((5, 60, 200)))
    def cut_sites(self, seconds: int) -> None:
        self.rmq.faults.cut(*SITES, seconds=seconds)

    @rule()
    def lose_answer(self) -> None:
        self.rmq.faults.lose_answer()

    def teardown(self) -> None:
        if not hasattr(self, "rmq"):
            return
        self.rmq.advance(minutes=10)
        check_drained(self.rmq, *TOPICS)
        delivered = {topic: self.rmq.delivered(topic) for topic in TOPICS}
        order = list(dict.fromkeys(attempt.body for attempt in delivered["ledger"]))
        for bodies in self.by_key.values():  # the history knows only the order in each queue
            assert [body for body in order if body in set(bodies)] == bodies
        self.rmq.close()


ClusterMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
TestCluster = ClusterMachine.TestCase
