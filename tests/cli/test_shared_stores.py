"""Commands on a store that a running process shares: they act through it, and its clients see the effects."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import Broker, ConfigError, ManualRunner, Message, TransactionProducer, TransactionState
from librmq.cli._routes import owner_of
from librmq.diagnosis._skips import plan_skip, skip
from librmq.diagnosis.view import StoreView
from librmq.wire._unix_sockets import is_stopped
from tests.cli.stand import Shell
from tests.programs import Process, start_program
from tests.wire.stub import wait_until

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="no Unix domain sockets with credentials")

PROGRAM = """
    import json, sys, librmq
    from librmq.protocol import SendBack
    shared = librmq.share(sys.argv[1])
    shared.create_topic("orders", 2)
    broker = shared.link.route if shared.is_owner else None
    heard, fails = [], [True]
    consumer = librmq.PushConsumer(shared, "billing", consume_from=librmq.ConsumeFrom.FIRST, max_reconsume_times=0)

    @consumer.subscribe("orders")
    def charge(message):
        if fails:
            raise RuntimeError("no money")
        heard.append(message.body.decode())

    producer = librmq.Producer(shared, "shop")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
    consumer.shutdown()
    producer.shutdown()
    shared.close()
"""


class Sharing:
    """A process that shares ``folder``, which evaluates expressions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Process[str] = start_program(PROGRAM, folder)
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, expression: str) -> Any:
        """Return the value of an expression in that process."""
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture
def application(shell: Shell) -> Iterator[Sharing]:
    """A process that shares the folder ``live``: ten messages, and a stopped group that has consumed none."""
    sharing = Sharing(shell.folder / "live")
    try:
        sharing("[producer.send('orders', b'%d' % n, keys=f'k{n}', queue=n % 2).queue_offset for n in range(10)]")
        sharing("broker.set_group('billing')")
        sharing("[broker.reset_group('billing', 'orders', 'begin')] and None")
        yield sharing
    finally:
        sharing.end()


@pytest.mark.slow
def test_topics_change_in_the_process(shell: Shell, application: Sharing) -> None:
    for words, queues in (
        (("create", "live", "bills", "--queues", "3", "--dry-run"), []),
        (("create", "live", "bills", "--queues", "3"), [[3, 3, 6]]),
        (("grow", "live", "bills", "--queues", "5"), [[5, 5, 6]]),
        (("permit", "live", "bills", "--permission", "r"), [[5, 5, 4]]),
        (("delete", "live", "bills"), []),
    ):
        answer = shell("topic", *words)
        assert (answer.status, answer.said) == (0, "")
        route = "[[q.read_queues, q.write_queues, q.permission] for q in shared.topic_route('bills')]"
        assert application(route) == queues
    assert shell("topic", "create", "live", "fifo", "--type", "FIFO").status == 0
    assert application("[q.message_type for q in shared.topic_route('fifo')]") == ["FIFO"]


@pytest.mark.slow
def test_groups_change_in_the_process(shell: Shell, application: Sharing) -> None:
    assert shell("group", "create", "live", "audit", "--retries", "3").status == 0
    assert application("broker.groups()['audit']") == 3
    application("broker.reset_group('billing', 'orders', 2) and None")
    assert shell("group", "copy", "live", "billing", "--to", "payments").rows[0]["topics"] == ["orders"]
    assert application("broker.consumer_offsets('payments', 'orders')") == {"0": 2, "1": 2}
    assert shell("group", "delete", "live", "billing").rows[0]["topics"] == ["orders"]
    assert application("['billing' in broker.groups(), broker.consumer_offsets('billing', 'orders')]") == [False, {}]


@pytest.mark.slow
def test_a_group_takes_its_retries_along(shell: Shell, application: Sharing) -> None:
    application("broker.set_group('billing', retry_max_times=3)")
    application("[broker.call(SendBack('billing', m.physical_offset, 0)) for m in shared.messages('orders')] and None")
    words = ("group", "copy", "live", "billing", "--to", "payments", "--with-retries")
    application("consumer.start() and None")
    assert "its running consumers hold retries" in shell(*words).said
    application("consumer.shutdown() and None")
    assert shell(*words, "--dry-run").rows[0]["retries_moved"] == 10
    assert application("[q.read_queues for q in shared.topic_route('%RETRY%payments')]") == []
    assert shell(*words).rows[0]["retries_moved"] == 10
    retries = "[[m.body.decode(), m.reconsume_times] for m in shared.messages('%RETRY%payments')]"
    assert sorted(application(retries)) == [[str(n), 1] for n in range(10)]
    assert application("broker.consumer_offsets('payments', '%RETRY%payments')") == {"0": 0}


@pytest.mark.slow
def test_a_half_is_decided_in_the_process(shell: Shell) -> None:
    runner = ManualRunner()
    with Broker.open("live", runner=runner) as broker:
        producer = TransactionProducer(broker, "P", lambda message: TransactionState.UNKNOWN)
        for body in (b"kept", b"dropped"):
            producer.send_in_transaction(Message("bills", body), execute=lambda *_: TransactionState.UNKNOWN)
        runner.advance(60_000 * 20)
        producer.send_in_transaction(Message("bills", b"open"), execute=lambda *_: TransactionState.UNKNOWN)
    application = Sharing(shell.folder / "live")
    try:
        (still,) = (str(row["physical_offset"]) for row in shell("pending", "live", "--kind", "half").rows)
        refused = shell("decide", "live", still, "--commit")
        assert refused.status != 0
        assert "checks still ask the producer group about this half" in refused.said
        assert "expected a store that no process uses" in shell("decide", "live", still, "--commit", "--force").said
        first, second = shell("pending", "live", "--kind", "given_up").rows
        words = ("decide", "live", first["physical_offset"], "--commit")
        assert shell(*words, "--dry-run").rows[0]["decision"] == "commit"
        assert application("len(list(shared.messages('bills')))") == 0
        assert shell(*words).rows[0]["unique_key"] == first["unique_key"]
        assert shell("decide", "live", second["physical_offset"], "--rollback").status == 0
        assert shell("pending", "live", "--kind", "given_up").rows == []
        assert application("[m.body.decode() for m in shared.messages('bills')]") == ["kept"]
        assert "expected an undecided half" in shell(*words).said
    finally:
        application.end()


@pytest.mark.slow
def test_a_delay_is_cancelled_in_the_process(shell: Shell, application: Sharing) -> None:
    name = application("producer.send('orders', b'late', delay_level=18).message_id")
    words = ("cancel", "live", name)
    answer = shell(*words, "--dry-run")
    assert (answer.status, answer.said) == (0, "")
    assert (answer.rows[0]["cancelled"], answer.rows[0]["dry_run"]) == (True, True)
    assert [row["unique_key"] for row in shell("pending", "live").rows] == [name]
    assert shell(*words).rows[0]["cancelled"]
    assert shell("pending", "live").rows == []


@pytest.mark.slow
def test_a_running_group_is_reset(shell: Shell, application: Sharing) -> None:
    application("[fails.clear(), consumer.start()] and None")
    wait_until(lambda: application("len(heard)") == 10, "all is heard")
    assert shell("reset", "live", "--group", "billing", "--topic", "orders", "--to", "begin", "--dry-run").status == 0
    assert application("len(heard)") == 10
    answer = shell("reset", "live", "--group", "billing", "--topic", "orders", "--offset", "3", "--queue", "1")
    assert (answer.status, answer.said, [row["after"] for row in answer.rows]) == (0, "", [3])
    wait_until(lambda: application("heard[10:]") == ["7", "9"], "two are heard again")
    far = shell("reset", "live", "--group", "billing", "--topic", "orders", "--offset", "1000", "--queue", "1")
    assert (far.status, "expected a queue offset up to 5" in far.said) == (2, True)


@pytest.mark.slow
def test_a_group_is_moved_forward(shell: Shell, application: Sharing) -> None:
    words = ("skip", "live", "--group", "billing", "--topic", "orders", "--keep", "1", "--aside", "late")
    notes = shell.folder / "live" / "librmq" / "skipped.jsonl"
    assert [row["skipped"] for row in shell(*words, "--dry-run").rows] == [4, 4]
    assert "expected another one" in shell(*words[:-1], "orders", "--dry-run").said
    assert application("[broker.consumer_offsets('billing', 'orders'), 'late' in broker.topics()]") == [
        {"0": 0, "1": 0},
        False,
    ]
    assert not notes.exists()
    answer = shell(*words)
    assert (answer.status, [row["skipped"] for row in answer.rows]) == (0, [4, 4])
    assert application("broker.consumer_offsets('billing', 'orders')") == {"0": 4, "1": 4}
    assert application("sorted(m.body.decode() for m in shared.messages('late'))") == [str(n) for n in range(8)]
    assert notes.exists()
    replay = ("replay", "live", "--group", "billing", "--topic", "orders", "--to", "again")
    assert shell(*replay, "--dry-run").rows[0]["messages"] == 8
    assert application("'again' in broker.groups()") is False
    assert shell(*replay).rows[0]["messages"] == 8
    assert application("broker.consumer_offsets('again', 'orders')") == {"0": 0, "1": 0}
    assert shell("replay", "live", "--topic", "orders", "--to-topic", "copies").rows[0]["messages"] == 10
    assert application("sorted(m.body.decode() for m in shared.messages('copies'))") == [str(n) for n in range(10)]


@pytest.mark.slow
def test_a_group_that_runs_is_not_moved_back(shell: Shell, application: Sharing) -> None:
    with owner_of(str(shell.folder / "live")) as owner:
        assert owner is not None
        with StoreView.open("live", tables=owner.tables) as view:
            plan = plan_skip(view, "billing", "orders", lag_above=2)
        assert {queue.end for queue in plan.queues} == {3}
        application("broker.reset_group('billing', 'orders', 4) and None")  # after the command has connected
        assert owner.consumer_offsets("billing", "orders") == {0: 4, 1: 4}
        with pytest.raises(ConfigError, match="the group is already at 4"):
            skip(owner, plan)
    assert application("broker.consumer_offsets('billing', 'orders')") == {"0": 4, "1": 4}


@pytest.mark.slow
def test_dead_letters_are_sent_again(shell: Shell, application: Sharing) -> None:
    application("[consumer.start()] and None")
    wait_until(lambda: len(application("[m.offset_id for m in broker.dead_letters('billing')]")) == 10, "dead")
    application("fails.clear()")
    answer = shell("dead-letters", "live", "--group", "billing", "--resend", "--dry-run")
    assert (answer.status, len(answer.rows), application("heard")) == (0, 10, [])
    assert {row["resent_at_ms"] for row in shell("dead-letters", "live").rows} == {None}
    answer = shell("dead-letters", "live", "--group", "billing", "--resend", "--limit", "4")
    assert (answer.status, answer.said, len(answer.rows)) == (0, "", 4)
    wait_until(lambda: len(application("heard")) == 4, "four are heard")
    assert len(shell("dead-letters", "live", "--resend", "--group", "billing").rows) == 6
    wait_until(lambda: sorted(application("heard")) == [str(n) for n in range(10)], "all are heard")
    assert application("broker.resend_dead_letters('billing')") == 0


def test_dead_letters_of_an_unlisted_topic_are_sent_once(shell: Shell) -> None:
    with Broker.open("letters") as broker:
        broker.create_topic("orders", 1)
        for number in range(3):
            broker.store.append(Message("%DLQ%billing", b"%d" % number, unique_key=f"U{number}"))
    with librmq.share("letters") as route:  # its table of topics does not list that of the letters
        route.topics()
        resend = ["dead-letters", "letters", "--group", "billing", "--resend"]
        assert [row["unique_key"] for row in shell(*resend).rows] == ["U0", "U1", "U2"]
        notes = Path("letters/librmq/resent.json")
        notes.unlink()  # as if SIGKILL had come before the note
        for words in ([*resend, "--dry-run"], resend):
            assert not notes.exists()
            answer = shell(*words)
            assert (answer.status, answer.out, "were sent before" in answer.said) == (0, "", True)
            assert "had sent 3 dead letters without a note" in answer.said
        assert None not in {row["resent_at_ms"] for row in shell("dead-letters", "letters").rows}
        assert len(list(route.messages("%RETRY%billing"))) == 3


@pytest.mark.slow
def test_reading_commands_have_the_present(shell: Shell, application: Sharing) -> None:
    application("broker.reset_group('billing', 'orders', 4) and None")
    with owner_of("live") as owner:
        assert owner is not None
        assert "store" not in vars(owner)  # is opened once, by the command
        assert owner.store.path == os.path.abspath("live")
    (row,) = shell("lag", "live", "--by", "topic").rows
    assert (row["group"], row["lag"]) == ("billing", 2)
    assert [row["group"] for row in shell("groups", "live").rows] == ["billing"]
    assert shell("diagnose", "live").status == 0
    assert len(shell("tail", "live", "--topic", "orders", "-n", "3").rows) == 3


@pytest.mark.slow
def test_who_names_all_processes(shell: Shell, application: Sharing) -> None:
    with librmq.share("live") as shared:
        assert not shared.is_owner
        answer = shell("who", "live")
        (owner,) = answer.rows
    assert (answer.status, answer.said, owner["role"], owner["state"]) == (0, "", "owner", "running")
    assert owner["pid"] == application.process.pid
    assert "import json, sys, librmq" in owner["program"]
    peer = Sharing(application.folder)
    try:
        rows = shell("who", "live").rows
        assert rows[0]["peers_append"] == (sys.platform == "linux")
        assert [(row["role"], row["pid"]) for row in rows] == [("owner", owner["pid"]), ("peer", peer.process.pid)]
        assert rows[0]["since_ms"] == owner["since_ms"] <= rows[1]["since_ms"]
        peer.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: shell("who", "live").rows[1]["state"] == "stopped", "the peer is stopped")
    finally:
        peer.end()


@pytest.mark.slow
def test_a_stopped_owner(shell: Shell, application: Sharing) -> None:
    application.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(application.process.pid), "the owner is stopped")
    named = f"process {application.process.pid}, which owns the store, is stopped"
    answer = shell("who", "live")
    assert (answer.status, named in answer.said) == (0, True)
    assert [(row["role"], row["pid"], row["state"]) for row in answer.rows] == [
        ("owner", application.process.pid, "stopped")
    ]
    answer = shell("topic", "create", "live", "bills")
    assert (answer.status, named in answer.said) == (2, True)
    answer = shell("lag", "live")
    assert (answer.status, "those of its last save" in answer.said) == (0, True)


def test_an_owner_that_stands_still(shell: Shell) -> None:
    """Its steps wait for ever, though it still says who is connected."""
    with librmq.share("live") as shared:
        assert shell("who", "live").rows[0]["state"] == "running"
        with shared.runner.lock:
            (owner,) = shell("who", "live").rows
        assert (owner["pid"], owner["state"]) == (os.getpid(), "stands still")


def test_an_owner_that_does_not_share(shell: Shell) -> None:
    with Broker.open("alone") as broker:
        broker.create_topic("orders", 2)
        answer = shell("who", "alone")
        assert (answer.status, answer.rows) == (0, [])
        assert (
            f"no process shares alone: this process (pid {os.getpid()}) has it open, and does not share it"
            in answer.said
        )
        answer = shell("topic", "create", "alone", "bills")
        assert (answer.status, f"pid {os.getpid()}" in answer.said) == (2, True)
    answer = shell("who", "alone")
    assert (answer.status, "no process has it open for writing" in answer.said) == (0, True)
