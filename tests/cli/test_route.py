"""Commands that ask a running cluster by ``--route``: the same rows as of the store that it serves."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from librmq import Broker, ManualRunner, Message, Producer, PullConsumer, StoreConfig, connect
from librmq.protocol import PERM_WRITE, UpdateOffset
from librmq.wire.certificates import self_signed
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._frames import answer_to
from tests.budget import many
from tests.cli.stand import Shell
from tests.wire.fake_servers import FakeServer


@pytest.fixture
def served(shell: Shell) -> Iterator[RemotingServer]:
    """A broker over the folder ``served``: a topic, a group that is behind, and a dead letter."""
    with listen() as listening:
        config = StoreConfig(store_host="{}:{}".format(*listening.getsockname()))
        with Broker.open("served", store_config=config) as broker:
            broker.create_topic("orders", 2)
            with Producer(broker, "shop") as producer:
                for number in range(10):
                    tags = "even" if number % 4 < 2 else "odd"
                    producer.send("orders", b"%d" % number, queue=number % 2, keys=[f"k{number}"], tags=tags)
            broker.set_group("billing")
            for queue_id, offset in enumerate((3, 1)):
                broker.call(UpdateOffset("billing", "orders", queue_id, offset))
            broker.create_topic("%DLQ%billing", 1)
            properties = {"RETRY_TOPIC": "orders", "DEAD_LETTER_CAUSE": "bad", "UNIQ_KEY": "u"}
            broker.store.append(Message.from_parts("%DLQ%billing", b"x", 0, properties), reconsume_times=16)
        with Broker.open("served") as broker, RemotingServer(broker, listening=listening) as server:
            yield server


@many
@pytest.mark.parametrize(
    "words",
    [
        ("topics",),
        ("groups",),
        ("lag",),
        ("lag", "--group", "billing", "--by", "topic"),
        ("lag", "--by", "group"),
        ("dead-letters",),
        ("dead-letters", "--group", "billing", "--causes"),
        ("show", "--topic", "orders"),
        ("show", "--topic", "orders", "--queue", "1", "--offset", "1-2"),
        ("show", "--tag", "odd"),
        ("show", "--topic", "orders", "--key", "k3"),
        ("show", "--key", "k3"),
        ("show", "--grep", "[78]"),
        ("show", "--since", "-1h", "--topic", "orders"),
        ("show", "--until", "-1h", "--topic", "orders"),
    ],
)
def test_rows_are_those_of_the_store(shell: Shell, served: RemotingServer, words: tuple[str, ...]) -> None:
    local = shell(words[0], "served", *words[1:])
    remote = shell(words[0], "--route", served.address, *words[1:])
    assert (remote.status, remote.said) == (0, "")
    expected = local.rows
    if words == ("dead-letters",):  # a broker does not say what was sent again, and null would mean: not yet
        expected = [{name: row[name] for name in row if name != "resent_at_ms"} for row in expected]
    elif words[0] in ("dead-letters", "groups"):
        expected = [row | {"resent": None} for row in expected]
    assert remote.rows == expected


def test_a_topic_that_can_not_be_read_is_listed(shell: Shell) -> None:
    with Broker.temporary() as broker, RemotingServer(broker) as server:
        broker.create_topic("orders", 1)
        with Producer(broker, "shop") as producer:
            producer.send("orders", b"x")
            producer.send("orders", b"y")
        broker.create_topic("orders", 1, permission=PERM_WRITE)
        (row,) = shell("topics", "--route", server.address).rows
        assert (row["topic"], row["messages"], row["min_timestamp_ms"]) == ("orders", 2, None)
        assert "is not readable" in shell("show", "--topic", "orders", "--route", server.address).said


def test_a_message_is_found_by_its_ids(shell: Shell, served: RemotingServer) -> None:
    (row,) = shell("show", "served", "--key", "k3").rows
    for words in (("--id", row["msg_id"]), ("--id", row["properties"]["UNIQ_KEY"], "--topic", "orders")):
        assert shell("show", "--route", served.address, *words).rows == [row]


def test_rates_of_a_cluster(shell: Shell, served: RemotingServer) -> None:
    rows = shell("lag", "--route", served.address, "--every", "100ms", "--limit", 2).rows
    assert [(row["group"], row["topic"], row["lag"], row["consumed_per_s"]) for row in rows] == [
        ("billing", "orders", 6, 0.0)
    ] * 2
    assert all(row["seconds"] >= 0.1 and row["stored_per_s"] == 0 and row["drain_s"] is None for row in rows)


@pytest.mark.slow
def test_progress_is_reset_in_the_cluster(shell: Shell, served: RemotingServer) -> None:
    reset = ("--route", served.address, "--group", "billing", "--topic", "orders")
    dry = shell("reset", *reset, "--to", "end", "--dry-run").rows
    assert [row["after"] for row in dry] == [5, 5]
    assert sum(row["lag"] for row in shell("lag", "--route", served.address, "--topic", "orders").rows) == 6
    done = shell("reset", *reset, "--to", "end").rows
    assert [row | {"dry_run": True} for row in done] == dry
    assert sum(row["lag"] for row in shell("lag", "--route", served.address, "--topic", "orders").rows) == 0
    (one,) = shell("reset", *reset, "--offset", "2", "--queue", "1").rows
    assert (one["queue_id"], one["before"], one["after"], one["again"], one["lag"]) == (1, 5, 2, 3, 3)
    far = shell("reset", *reset, "--offset", "1000", "--queue", "1")
    assert (far.status, "expected a queue offset up to 5" in far.said) == (2, True)
    assert [row["after"] for row in shell("reset", *reset, "--to", "begin").rows] == [0, 0]


@pytest.mark.slow
def test_a_time_between_messages_leads_to_the_later_one(shell: Shell) -> None:
    """A broker of RocketMQ answers with the nearest, which is the earlier one here."""
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker, RemotingServer(broker) as server:
        broker.create_topic("orders", 1)
        broker.set_group("billing")
        with Producer(broker, "shop") as producer:
            first = producer.send("orders", b"1").message_id
            runner.advance(10_000)
            producer.send("orders", b"2")
        message = broker.find_by_id(first)
        assert message is not None
        between = str(message.store_timestamp_ms + 1000)
        words = ("reset", "--route", server.address, "--group", "billing", "--topic", "orders", "--to", between)
        for others in ((), ("--dry-run",), ("--queue", "0"), ("--queue", "0", "--dry-run")):
            assert [row["after"] for row in shell(*words, *others).rows] == [1]
        assert [row["after"] for row in shell(*words[:-1], str((1 << 63) - 1)).rows] == [2]


@pytest.mark.parametrize(
    "words",
    [
        ("skip", "--group", "billing", "--topic", "orders"),
        ("decide", "0", "--commit"),
        ("decide", "0", "--rollback", "--force"),
    ],
)
def test_what_needs_a_folder_is_refused_over_a_route(shell: Shell, words: tuple[str, ...]) -> None:
    answer = shell(*words, "--route", "localhost:1")
    assert answer.status == 2
    assert answer.out == ""


@pytest.mark.slow
def test_rows_of_several_brokers_name_theirs(shell: Shell) -> None:
    with ExitStack() as stack:
        names = stack.enter_context(FakeServer(lambda frame: None))
        names.broker = None
        for name in ("broker-b", "broker-a"):
            broker = stack.enter_context(Broker.temporary(name=name))
            broker.create_topic("orders", 1)
            broker.set_group("billing")
            broker.call(UpdateOffset("billing", "orders", 0, 0))
            broker.create_topic("%DLQ%billing", 1)
            broker.store.append(Message.from_parts("%DLQ%billing", b"x", 0, {"RETRY_TOPIC": "orders", "UNIQ_KEY": "u"}))
            with Producer(broker, "shop") as producer:
                producer.send("orders", b"x")
            names.others[name] = stack.enter_context(RemotingServer(broker)).address
        words = ("--route", names.address)
        rows = shell("lag", *words).rows
        assert [(row["broker"], row["topic"], row["lag"]) for row in rows] == [
            ("broker-a", "orders", 1),
            ("broker-b", "orders", 1),
        ]
        assert [(row["group"], row["lag"]) for row in shell("lag", *words, "--by", "group").rows] == [("billing", 2)]
        moved = shell("reset", *words, "--group", "billing", "--topic", "orders", "--to", "end").rows
        assert [(row["broker"], row["after"]) for row in moved] == [("broker-a", 1), ("broker-b", 1)]
        letters = shell("dead-letters", *words).rows
        assert [row["broker"] for row in letters] == ["broker-a", "broker-b"]
        again = ("--group", "billing", "--resend", "--id", "u")
        assert [row["broker"] for row in shell("dead-letters", *words, *again).rows] == ["broker-a", "broker-b"]


@pytest.mark.slow
def test_a_running_group_learns_of_a_whole_topic_only(shell: Shell, served: RemotingServer) -> None:
    words = ("reset", "--route", served.address, "--group", "billing", "--topic", "orders")
    with connect(served.address) as route, PullConsumer(route, "billing") as consumer:
        consumer.subscribe("orders")
        consumer.poll(0)
        refused = shell(*words, "--offset", "2")
        assert refused.status == 2
        assert "a broker moves a running group only in all queues" in refused.said
        assert shell(*words, "--to", "end").status == 0


def test_what_a_broker_leaves_out_is_said(shell: Shell, served: RemotingServer) -> None:
    words = ("show", "--route", served.address, "--topic", "orders", "--key", "often")
    for count, said in ((63, ""), (2, "older ones are left out")):
        with connect(served.address) as route, Producer(route, "shop") as producer:
            for _ in range(count):
                producer.send("orders", b"again", keys="often")
        answer = shell(*words)
        assert (len(answer.rows), said in answer.said, bool(answer.said)) == (64 if said else 63, True, bool(said))


@pytest.mark.slow
def test_what_is_unknown_is_refused(shell: Shell, served: RemotingServer) -> None:
    words = ("reset", "--route", served.address, "--to", "end")
    assert "there is no group 'biling'; did you mean" in shell(*words, "--group", "biling", "--topic", "orders").said
    assert "topic 'order' has no queue; did you" in shell(*words, "--group", "billing", "--topic", "order").said
    assert "has no queue 7" in shell(*words, "--group", "billing", "--topic", "orders", "--queue", "7").said
    assert shell("lag", "--route", served.address, "--group", "biling").said.startswith("note: there is no group")
    assert "did you mean 'orders'" in shell("lag", "--route", served.address, "--topic", "order").said


def test_named_dead_letters_are_sent_again_over_tcp(shell: Shell, served: RemotingServer) -> None:
    words = ("dead-letters", "--route", served.address, "--group", "billing")
    (letter,) = shell(*words).rows
    for more in ((), ("--cause", "bad"), ("--id", "u", "--unsent")):
        refused = shell(*words, "--resend", *more)
        assert (refused.status, refused.out) == (2, "")
        assert "--id" in refused.said or "which notes what was sent again" in refused.said
    assert shell(*words, "--resend", "--id", "u", "--dry-run").rows == [
        {**letter, "resent_at_ms": None, "resent": False}
    ]
    with connect(served.address) as route:
        assert list(route.messages("%RETRY%billing")) == []
        for _ in range(2):  # what is named is sent each time
            (sent,) = shell(*words, "--resend", "--id", "u").rows
            assert sent == {**letter, "resent_at_ms": sent["resent_at_ms"], "resent": True}
        assert [message.unique_key for message in route.messages("%RETRY%billing")] == ["u", "u"]
    assert "no such dead letter" in shell(*words, "--resend", "--id", "v").said


@pytest.mark.parametrize("words", [(), ("served", "--route", "127.0.0.1:1")])
def test_a_store_or_a_route_is_named(shell: Shell, words: tuple[str, ...]) -> None:
    answer = shell("topics", *words)
    assert answer.status == 2
    assert "expected either the folder of a STORE or --route HOST:PORT" in answer.said


@pytest.mark.parametrize(
    "words", [("--keys", "k.yml"), ("--access-key", "a"), ("--secret-key", "s"), ("--tls",), ("--tls-ca", "ca.pem")]
)
@pytest.mark.parametrize("command", ["groups", "replay"])
def test_keys_and_tls_need_a_cluster(shell: Shell, command: str, words: tuple[str, ...]) -> None:
    answer = shell(command, "store", *words)
    assert (answer.status, answer.out) == (2, "")
    assert f"{words[0]} is for a cluster: add --route HOST:PORT" in answer.said


def test_an_unreachable_cluster_is_an_error(shell: Shell) -> None:
    with listen() as closed:
        address = "{}:{}".format(*closed.getsockname())
    answer = shell("topics", "--route", address)
    assert (answer.status, answer.out) == (2, "")
    assert address in answer.said


@pytest.mark.parametrize("way", ["options", "environment", "file", "home"])
def test_keys_sign_the_requests_of_commands(shell: Shell, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    words = []
    (shell.folder / "conf").mkdir()
    (shell.folder / "conf" / "tools.yml").write_text("# of mqadmin\naccessKey: ak\nsecretKey: 'very secret' # 1\n")
    if way == "options":
        words = ["--access-key", "ak", "--secret-key", "very secret"]
    elif way == "environment":
        monkeypatch.setenv("LIBRMQ_ACCESS_KEY", "ak")
        monkeypatch.setenv("LIBRMQ_SECRET_KEY", "very secret")
    elif way == "file":
        words = ["--keys", "conf/tools.yml"]
    else:
        monkeypatch.setenv("ROCKETMQ_HOME", str(shell.folder))
    with FakeServer(lambda frame: answer_to(frame, 13)) as server:
        shell("reset", "--route", server.address, "--group", "g", "--topic", "orders", "--to", "end", *words)
        signed = [frame for frame in server.asked if "Signature" in frame.fields]
    assert signed
    for frame in signed:
        assert frame.fields["AccessKey"] == "ak"
        values = "".join(value for name, value in sorted(frame.fields.items()) if name != "Signature")
        digest = hmac.new(b"very secret", values.encode() + frame.body, hashlib.sha1).digest()
        assert frame.fields["Signature"] == base64.b64encode(digest).decode()


def test_a_file_without_keys_is_refused(shell: Shell) -> None:
    (shell.folder / "keys").write_text("accessKey: ak\n")
    for words in (["--keys", "keys"], ["--keys", "absent"], ["--access-key", "ak"], ["--tls-ca", "absent"]):
        answer = shell("lag", "--route", "127.0.0.1:9", *words)
        assert (answer.status, answer.out) == (2, "")
        assert words[-1] in answer.said or "--secret-key" in answer.said


def test_a_cluster_is_asked_by_tls(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, key = self_signed(["127.0.0.1"])
    (shell.folder / "ca.pem").write_bytes(chain)
    with Broker.temporary() as broker, RemotingServer(broker, tls=(chain, key)) as server:
        broker.create_topic("orders", 1)
        assert shell("topics", "--route", server.address, "--tls-ca", "ca.pem").rows[0]["topic"] == "orders"
        assert shell("topics", "--route", server.address, "--tls").status == 2
        monkeypatch.setenv("LIBRMQ_TLS_CA", "ca.pem")
        assert shell("topics", "--route", server.address).status == 0
