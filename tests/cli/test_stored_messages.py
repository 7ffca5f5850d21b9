"""Rules for new messages do not stop commands that copy stored ones: replay, skip, resend, import."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from librmq import Broker, ManualRunner, Message, MessageStore, StoreConfig
from librmq.message import StoredMessage
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell

ODD = [
    Message.from_parts("orders", b"", 0, {"UNIQ_KEY": "E"}),
    Message.from_parts("orders", random.Random(1).randbytes(5 << 20), 0, {"UNIQ_KEY": "L"}),
    Message.from_parts(
        "orders", b"blank", 0, {"UNIQ_KEY": "B", "a": " ", "b": "x\1y", "KEYS": "k\tl  m", "TAGS": "\t"}
    ),
    Message.from_parts("orders", b"long", 0, {"UNIQ_KEY": "P", "c": "y" * 32_740}),
    Message.from_parts("orders", b"last", 0, {"UNIQ_KEY": "Z"}),
]
"""Messages that a broker or an earlier client can have stored, and that clients refuse to send."""


def store_odd(path: str, topic: str = "orders") -> list[Any]:
    """Store them in the only queue of a topic, as a broker with other limits does; return their parts."""
    with MessageStore.open(path, StoreConfig(max_message_size=16 << 20)) as store:
        for message in ODD:
            store.append(Message.from_parts(topic, message.body, 0, message.properties))
        return parts(store.topic_messages(topic))


def parts(messages: Iterable[StoredMessage], names: Sequence[str] = ("a", "b", "c", "KEYS", "TAGS")) -> list[Any]:
    return [
        (message.unique_key, message.body, {name: message.properties.get(name) for name in names})
        for message in sorted(messages, key=lambda message: message.unique_key or "")
    ]


def test_rules_for_new_messages_do_not_stop_stored_ones(shell: Shell, cluster: Broker, server: RemotingServer) -> None:
    expected = store_odd("full")
    cluster.create_topic("orders", 1)
    for target in (["--route", server.address], ["--to-topic", "again"]):
        words = ["replay", "full", "--topic", "orders", *target]
        for more in (["--dry-run"], []):
            answer = shell(*words, *more)
            assert (answer.status, [row["messages"] for row in answer.rows]) == (0, [len(ODD)])
    assert parts(cluster.messages("orders")) == expected
    with MessageStore.open("full", read_only=True) as store:
        assert parts(store.topic_messages("again")) == expected


def test_what_cannot_be_sent_is_named_by_the_dry_run_too(shell: Shell, cluster: Broker, server: RemotingServer) -> None:
    """No record has room for a unique id, or a topic's name is one that no broker makes."""
    with MessageStore.open("full") as store:
        store.append(Message("orders", b"first"))
        place = store.append(Message.from_parts("orders", b"x", 0, {"c": "y" * 32_760})).physical_offset
        store.append(Message("订单", b"name"))
    for more in (["--dry-run"], []):
        answer = shell("replay", "full", "--topic", "orders", "--route", server.address, *more)
        assert (answer.status, answer.out) == (2, "")
        assert f"of 'orders'/0 at 1, physical offset {place}: " in answer.said
        answer = shell("replay", "full", "--topic", "订单", "--route", server.address, *more)
        assert (answer.status, "may only contain letters" in answer.said) == (2, True)
    assert [message.body for message in cluster.messages("orders")] == [b"first"]
    assert [row["messages"] for row in shell("replay", "full", "--to-topic", "again", "--topic", "订单").rows] == [1]


@pytest.mark.parametrize("option", ["--aside", "--move"])
def test_a_skip_copies_them(shell: Shell, option: str) -> None:
    expected = store_odd("full")
    with Broker.open("full", runner=ManualRunner()) as broker:
        broker.set_group("g")
        broker.reset_group("g", "orders", "begin")
    for more in (["--dry-run"], []):
        answer = shell("skip", "full", "--group", "g", "--topic", "orders", option, "late", *more)
        assert (answer.status, [row["skipped"] for row in answer.rows]) == (0, [len(ODD)])
    with MessageStore.open("full", read_only=True) as store:
        assert parts(store.topic_messages("late")) == expected


def test_dead_letters_among_them_are_sent_again(shell: Shell) -> None:
    expected = store_odd("full", "%DLQ%g")
    for more in (["--dry-run"], []):
        answer = shell("dead-letters", "full", "--resend", "--group", "g", *more)
        assert (answer.status, len(answer.rows)) == (0, len(ODD))
    assert shell("dead-letters", "full", "--unsent").rows == []
    with MessageStore.open("full", read_only=True) as store:
        assert parts(store.topic_messages("%RETRY%g")) == expected


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs the extra arrow")
@pytest.mark.parametrize("name", ["all.jsonl", "all.csv", "all"])
def test_an_export_of_them_is_imported(shell: Shell, name: str) -> None:
    expected = store_odd("full")
    assert shell("export", "full", "-o", name).status == 0
    for more in (["--dry-run"], []):
        answer = shell("import", "new", name, *more)
        assert (answer.status, [row["messages"] for row in answer.rows]) == (0, [len(ODD)])
    with MessageStore.open("new", read_only=True) as store:
        assert parts(store.topic_messages("orders")) == expected


def test_a_dry_run_of_an_import_checks_what_a_record_holds(shell: Shell) -> None:
    rows = [{"topic": "T", "body": "x"}, {"topic": "T", "body": "x", "properties": {"c": "y" * 40_000}}]
    given = "\n".join(map(json.dumps, rows))
    for more in (["--dry-run"], []):
        answer = shell("import", "new", "-", *more, given=given)
        assert (answer.status, "row 2: the properties have 40,002 bytes" in answer.said) == (2, True)
        assert ("--skip 1" in answer.said) == (not more)
