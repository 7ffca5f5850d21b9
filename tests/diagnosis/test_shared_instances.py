"""What the instances of a shared store do is known wherever one asks: in the owner, in a peer, by a command."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from librmq import (
    Broker,
    Cluster,
    ConsumeFrom,
    ManualRunner,
    MessageQueue,
    Producer,
    PushConsumer,
    SharedBroker,
    connect,
    share,
)
from librmq.broker import AdministeredRoute
from librmq.cli import main
from librmq.diagnosis import Alarm, Finding, Thresholds, diagnose, held_progress, report, watch
from librmq.errors import MalformedError
from librmq.protocol import DescribeInstance, InstanceState, RouteWrapper
from librmq.wire.remoting._bodies import read_body, write_body
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._running_info import read_running_info, running_info_body
from tests.cli.stand import Shell, Terminal, errors_of
from tests.console.pages import Asked, console
from tests.wire.like_5 import broker_like_5

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a share needs Unix sockets")


class Hanging:
    """A store that two share: in the peer's only consumer both listeners wait, and the other messages for them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "shop"
        self.owner = share(self.path)
        self.peer = share(self.path)
        self.goes_on = threading.Event()
        self.both_wait = threading.Semaphore(0)
        self.owner.create_topic("orders", 1)
        with Producer(self.owner, "shop") as producer:
            for number in range(150):
                producer.send("orders", b"%d" % number, keys=f"o-{number}")
        self.consumer = PushConsumer(self.peer, "billing", consume_from=ConsumeFrom.FIRST, threads=2)
        self.consumer.subscribe("orders", self.wait_for_the_bank)
        self.consumer.start()
        for _ in range(2):
            assert self.both_wait.acquire(timeout=60)

    def wait_for_the_bank(self, message: Any) -> None:
        self.both_wait.release()
        self.goes_on.wait()

    def close(self) -> None:
        self.goes_on.set()
        self.consumer.shutdown()
        self.peer.close()
        self.owner.close()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    made = Hanging(tmp_path)
    yield made
    made.close()


AT_ONCE = Thresholds(stuck_s=-1, normal_lag=10)


def assert_known(findings: list[Finding]) -> None:
    stuck = next(finding for finding in findings if finding.kind == "stuck-message")
    assert stuck.evidence["client_id"]
    assert "wait_for_the_bank" in "".join(stuck.evidence["stack"])
    assert "has had message o-" in stuck.what
    assert stuck.evidence["thread"]
    assert "group-not-running" not in {finding.kind for finding in findings}


def test_owner_and_peer_say_where_a_listener_stands(hanging: Hanging) -> None:
    for place in (hanging.owner, hanging.peer):
        assert_known(diagnose(place, AT_ONCE))
        (held,) = held_progress(place, group="billing")
        assert (held.lag, held.consumed_offset, held.behind is not None) == (150, 0, True)
        assert held.client_id is not None
    assert {name.split("@")[0] for name in hanging.owner.connections("billing").client_ids}  # type: ignore[union-attr]
    (part,) = report([hanging.peer]).stores
    assert part.instances == {"billing": 1}


def test_the_command_says_where_a_listener_stands(hanging: Hanging, shell: Shell) -> None:
    rows = {row["finding"]: row for row in shell("diagnose", hanging.path).rows}
    assert "wait_for_the_bank" in rows["listeners-at-one-place"]["what"]
    assert "group-not-running" not in rows


def test_the_console_of_each_process_says_where_a_listener_stands(hanging: Hanging) -> None:
    for place in (hanging.owner, hanging.peer):
        asked = Asked(console(place))
        rows = asked.table("/group?name=billing", "At work")
        assert sorted(row["message"] for row in rows) == ["o-0", "o-1"]
        assert all("wait_for_the_bank" in row["stands at"] for row in rows)
        (shown,) = [row for row in asked.table("/group?name=billing", "Queues") if row["topic"] == "orders"]
        assert shown["waits for"] == "o-0"
        assert list(shown)[:4] == ["topic", "queue", "lag", "waits for"]


def test_the_page_busy_of_each_process_shows_what_instances_do(hanging: Hanging) -> None:
    for place in (hanging.owner, hanging.peer):
        rows = Asked(console(place)).table("/busy", "At work")
        assert sorted(row["message"] for row in rows) == ["o-0", "o-1"]
        assert all("wait_for_the_bank" in row["stands at"] and row["group"] == "billing" for row in rows)
        (instance,) = Asked(console(place)).table("/busy", "Instances")
        assert (instance["busy"], instance["threads"], instance["state"]) == ("2", "2", "runs")
        assert int(instance["held messages"]) > 2
    hanging.consumer.pause()
    (instance,) = Asked(console(hanging.owner)).table("/busy", "Instances")
    assert instance["state"] == "paused"


def test_top_shows_what_flows_and_what_holds_a_group_back(
    hanging: Hanging, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = shell("top", hanging.path, "--once")
    assert (answer.status, errors_of("top", *answer.rows)) == (0, [])
    group, instance, *listeners = answer.rows
    assert (group["type"], group["group"], group["lag"], group["instances"]) == ("group", "billing", 150, 1)
    assert (group["stored_per_s"], instance["busy"], instance["threads"], instance["state"]) == (None, 2, 2, "runs")
    assert sorted(row["keys"] for row in listeners) == ["o-0", "o-1"]
    for row in listeners:
        assert "wait_for_the_bank" in row["place"]
        assert "billing" in row["thread"]
        assert row["for_s"] >= 0
        assert row["instance"] == instance["instance"]
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["top", str(hanging.path), "--every", "100ms"]) == 130
    _, first, second = screen.getvalue().split(CLEAR)  # a look takes the place of the one before
    assert "unknown" in first.partition("billing")[2].splitlines()[0]
    for shown in (first, second):
        assert shown.count("stands at") == 1
        assert "o-0" in shown
    assert "0.0" in second.partition("billing")[2].splitlines()[0]


CLEAR = "\x1b[H\x1b[J"


class Screen(Terminal):
    """A terminal whose user presses Ctrl-C after two looks."""

    def write(self, text: str) -> int:
        if text == CLEAR and self.getvalue().count(CLEAR) == 2:
            raise KeyboardInterrupt
        return super().write(text)


def test_top_of_a_folder_says_what_is_unknown(tmp_path: Path, shell: Shell) -> None:
    with Broker.open(tmp_path / "shop") as broker:
        broker.create_topic("orders", 1)
        broker.set_group("billing")
        broker.reset_group("billing", "orders", "begin")
    with Broker.open(tmp_path / "shop"):
        answer = shell("top", tmp_path / "shop", "--once")
        assert "no process shares this store" in answer.said
        assert [(row["group"], row["instances"]) for row in answer.rows] == [("billing", None)]
    answer = shell("top", tmp_path / "shop")  # what does not change is shown once
    assert ("no process shares this store" in answer.said, len(answer.rows)) == (True, 1)


def test_a_screen_says_how_many_rows_it_leaves_out(
    tmp_path: Path, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    with Broker.open(tmp_path / "shop") as broker:
        for number in range(14):
            broker.set_group(f"g{number:02}")
    screen = Terminal()
    with redirect_stdout(screen):
        assert main(["top", str(tmp_path / "shop")]) == 0
    assert ("g11" in screen.getvalue(), "g12" in screen.getvalue()) == (True, False)
    assert "note: without 2 more groups" in capsys.readouterr().err
    answer = shell("top", tmp_path / "shop")
    assert (len(answer.rows), "without" in answer.said) == (14, False)


def test_a_cluster_says_by_requests_where_a_listener_stands(shell: Shell) -> None:
    goes_on, both_wait = threading.Event(), threading.Semaphore(0)

    def wait_for_the_bank(message: Any) -> None:
        both_wait.release()
        goes_on.wait()

    with broker_like_5() as (broker, address), connect(address) as route, connect(address) as asking:
        broker.create_topic("orders", 1)
        with Producer(broker, "shop") as producer:
            for number in range(150):
                producer.send("orders", b"%d" % number, keys=f"o-{number}")
        consumer = PushConsumer(route, "billing", consume_from=ConsumeFrom.FIRST, threads=2)
        consumer.subscribe("orders", wait_for_the_bank)
        with consumer:
            for _ in range(2):
                assert both_wait.acquire(timeout=60)
            findings = diagnose(asking, AT_ONCE)
            assert_known(findings)
            (unasked,) = [finding for finding in findings if finding.kind == "not-asked"]
            assert "halves" in unasked.what
            (held,) = held_progress(asking, group="billing")
            assert (held.lag, held.thread is not None, "wait_for_the_bank" in held.place) == (150, True, True)
            rows = {row["finding"]: row for row in shell("diagnose", "--route", address).rows}
            assert "wait_for_the_bank" in rows["listeners-at-one-place"]["what"]
            assert {"not-asked"} <= rows.keys()
            listeners = [row for row in shell("top", "--route", address, "--once").rows if row["type"] == "listener"]
            assert sorted(row["keys"] for row in listeners) == ["o-0", "o-1"]
            told: queue.Queue[Alarm] = queue.Queue()
            with watch(asking, told.put, AT_ONCE, every=0.01):
                alarm = told.get(timeout=60)
                while alarm.finding.kind != "stuck-message":
                    alarm = told.get(timeout=60)
            goes_on.set()
    assert asking.dead


def test_a_cluster_of_two_brokers_names_the_one_with_the_queue(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Cluster.open(tmp_path / "brokers", ["a", "b"], runner=runner) as cluster:
        cluster.create_topic("orders", 2)
        consumers = [PushConsumer(cluster, "billing", instance_name=name) for name in ("one", "two")]
        for consumer, topics in zip(consumers, (["orders"], ["orders", "refunds"]), strict=True):
            for topic in topics:
                consumer.subscribe(topic, lambda message: None)
            consumer.start()
        runner.advance(60_000)
        kinds = {finding.kind: finding for finding in diagnose(cluster)}
        assert "subscriptions-differ" in kinds
        consumers[1].shutdown()
        consumers[0].pause()
        runner.advance(60_000)
        with Producer(cluster, "shop") as producer:
            for number in range(150):
                producer.send("orders", b"%d" % number, queue=MessageQueue("orders", "b", 1))
        runner.advance(60_000)
        kinds = {finding.kind: finding for finding in diagnose(cluster)}
        assert kinds["uneven-lag"].subject == "group billing, topic orders, queue b 1"
        assert kinds.keys() >= {"paused", "not-asked"}
        assert "queues-without-owner" not in kinds
        consumers[0].shutdown()
        assert {finding.kind for finding in diagnose(cluster)} >= {"backlog", "group-not-running"}


class Idle(RouteWrapper, AdministeredRoute):
    """A cluster whose instances hold nothing, and say that nothing runs; those of Java, which say nothing, None."""

    running: int | None = 0

    def instances(self, group: str, *, timeout: Any = 3) -> dict[str, InstanceState | None]:
        states = super().instances(group, timeout=timeout)
        return {
            name: state and replace(state, running=self.running, listeners=(), queues=(), is_paused=False)
            for name, state in states.items()
        }


def test_no_instance_is_called_idle_that_does_not_say_what_it_does(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Cluster.open(tmp_path / "brokers", ["a"], runner=runner) as cluster:
        cluster.create_topic("orders", 1)
        consumer = PushConsumer(cluster, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: None)
        consumer.start()
        runner.advance(60_000)
        consumer.pause()
        with Producer(cluster, "shop") as producer:
            for number in range(150):
                producer.send("orders", b"%d" % number)
        runner.advance(60_000)
        route = Idle(cluster)
        assert "idle-with-backlog" in {finding.kind for finding in diagnose(route)}
        route.running = None
        assert "idle-with-backlog" not in {finding.kind for finding in diagnose(route)}
        consumer.shutdown()


def test_nothing_is_busy_in_a_store_at_rest(tmp_path: Path) -> None:
    with share(tmp_path / "shop") as owner:
        owner.create_topic("orders", 1)
        page = Asked(console(owner)).page("/busy")
        assert "No listener works now." in page
    assert "No process has this store open" in Asked(console(tmp_path / "shop")).page("/busy")


def test_a_watch_in_each_process_tells_of_a_listener_that_stands(hanging: Hanging) -> None:
    for place in (hanging.owner, hanging.peer):
        told: queue.Queue[Alarm] = queue.Queue()
        with watch(place, told.put, AT_ONCE, every=0.01):
            alarm = told.get(timeout=60)
            while alarm.finding.kind != "stuck-message":
                alarm = told.get(timeout=60)
        assert "wait_for_the_bank" in alarm.finding.what


def test_a_peer_without_an_instance(tmp_path: Path) -> None:
    with share(tmp_path / "shop") as owner, share(tmp_path / "shop") as peer:
        for place in (owner, peer):
            place.create_topic("orders", 1)
            place.set_group("billing")
            place.reset_group("billing", "orders", "begin")
        with Producer(peer, "shop") as producer:
            producer.send("orders", b"one")
        kinds: list[set[str]] = [{finding.kind for finding in diagnose(place)} for place in (owner, peer)]
        assert kinds[0] == kinds[1]
        assert "group-not-running" in kinds[0]


def test_the_state_of_an_instance_comes_back_as_it_was(hanging: Hanging) -> None:
    peer: SharedBroker = hanging.peer
    (state,) = peer.instances("billing").values()
    assert state is not None
    body = running_info_body(state, {}, (), False)
    request = DescribeInstance(state.group, state.client_id)
    again = read_running_info(request, Frame(0, body=body))
    assert again == state
    for wrong in (
        "x",
        "{}",
        '{"queues":{},"listeners":[[1]],"running":1}',
        '{"queues":{},"listeners":[],"running":true}',
    ):
        rows = read_body(body, "a state")
        rows["properties"]["librmqState"] = wrong
        with pytest.raises(MalformedError, match="librmqState"):
            read_running_info(request, Frame(0, body=write_body(rows)))
    assert json.loads(read_body(body, "a state")["properties"]["librmqState"])["running"] == 2
