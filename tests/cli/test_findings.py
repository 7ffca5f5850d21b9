"""``groups``, ``lag``, ``dead-letters``, ``story`` and ``diagnose`` print the library's answers as rows."""

from __future__ import annotations

import dataclasses
import re
import shutil

import pytest

from librmq import (
    Broker,
    DeadLetter,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    TransactionProducer,
    TransactionState,
    diagnosis,
)
from librmq.runtime import ManualRunner
from tests.cli.stand import Shell, Terminal, files_of

LAG = ["group", "topic", "queue_id", "min_offset", "max_offset", "consumer_offset", "lag", "oldest_timestamp_ms"]
LETTER = [
    "group", "original_topic", "unique_key", "reconsume_times", "store_timestamp_ms", "cause", "physical_offset",
    "resent_at_ms",
]  # fmt: skip
EVENT = ["at_ms", "event", "topic", "queue_id", "queue_offset", "physical_offset", "group"]


def test_lag_is_a_line_a_queue(shell: Shell) -> None:
    rows = shell("lag", "store").rows
    assert rows == [row._asdict() for row in diagnosis.lag("store")]
    assert [list(row) for row in rows] == [LAG] * len(rows)
    assert shell("lag", "store", "--topic", "OrderTopic").rows == [row for row in rows if row["topic"] == "OrderTopic"]
    (group,) = shell("lag", "store", "--by", "group").rows
    assert (group["group"], group["lag"]) == ("CG_order", sum(row["lag"] for row in rows))
    by_topic = shell("lag", "store", "--by", "topic").rows
    assert sum(row["lag"] for row in by_topic) == group["lag"]


def test_messages_that_expire_unread(shell: Shell) -> None:
    answer = shell("expiring", "store", "--reserved", "2s", "--within", "1s")
    assert answer.rows == [row._asdict() for row in diagnosis.expiring("store", reserved_s=2, within_s=1)]
    fields = ["group", "topic", "messages", "bytes", "first_at_ms"]
    assert [list(row) for row in answer.rows] == [fields] * len(answer.rows)
    assert sum(row["group"] is not None for row in answer.rows) == 4  # and topics that no group has read
    assert "from its last message" in answer.said
    assert shell("expiring", "store").rows == []
    assert shell("expiring", "store", "--within", "soon").status == 2


def test_a_group_without_progress_has_an_unknown_lag(shell: Shell) -> None:
    assert shell("group", "create", "store", "billing").status == 0
    lags = {row["group"]: row["lag"] for row in shell("groups", "store").rows}
    assert lags["billing"] is None
    assert lags["CG_order"] is not None


def test_groups_are_those_of_tables_and_topics(shell: Shell) -> None:
    rows = {row["group"]: row for row in shell("groups", "store").rows}
    assert sorted(rows) == ["CG_2", "CG_order", "消费组"]
    assert rows["CG_order"] == {
        "group": "CG_order",
        "topics": ["%RETRY%CG_order", "OrderTopic", "TopicTest", "订单主题"],
        "lag": sum(row["lag"] for row in shell("lag", "store").rows),
        "dead_letters": 0,
        "resent": 0,
    }
    everything = {row["group"] for row in shell("groups", "store", "--all").rows}
    assert everything > set(rows)
    assert {group for group in everything - set(rows) if not group.startswith("CID_")} <= {
        "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP",
    }  # fmt: skip


def test_rates_of_a_store_in_use(shell: Shell) -> None:
    with Broker.open("new", runner=ManualRunner()) as broker:
        broker.create_topic("orders", 2)
        for number in range(6):
            broker.store.append(Message("orders", b"x"), number % 2)
        broker.set_group("billing")
        broker.reset_group("billing", "orders", "begin")
    with MessageStore.open("new"):
        rows = shell("lag", "new", "--every", "100ms", "--limit", 2).rows
    assert [(row["group"], row["topic"], row["lag"], row["consumed_per_s"]) for row in rows] == [
        ("billing", "orders", 6, 0.0)
    ] * 2
    assert all(row["seconds"] >= 0.1 and row["stored_per_s"] == 0 and row["drain_s"] is None for row in rows)


def test_rates_of_an_unused_store_say_what_is_unknown(shell: Shell) -> None:
    answer = shell("lag", "store", "--every", "5s", "--topic", "OrderTopic")
    (row,) = answer.rows
    assert (row["lag"], row["consumed_per_s"], row["drain_s"]) == (75, None, None)
    assert row["stored_per_s"] == pytest.approx(75 / 9, rel=0.2)
    assert "how fast groups consumed then is unknown" in answer.said
    said = shell("lag", "store", "--every", "5s", "--topic", "OrderTopics").said
    assert "topic 'OrderTopics' has no queue; did you mean 'OrderTopic'?" in said
    assert "expected a time" in shell("lag", "store", "--every", "soon").said
    assert "expected no --by origin" in shell("lag", "store", "--every", "5s", "--by", "origin").said


def test_findings_are_rows_worst_first(shell: Shell) -> None:
    answer = shell("diagnose", "store")
    found = diagnosis.diagnose("store")
    assert [row["finding"] for row in answer.rows] == [one.kind for one in found]
    assert all(list(row) == ["finding", "severity", "subject", "what", "evidence", "next"] for row in answer.rows)
    assert answer.status == int(any(one.severity == "error" for one in found))


def test_an_error_among_the_findings_is_status_1(shell: Shell) -> None:
    shell("reset", "store", "--group", "CG_order", "--topic", "OrderTopic", "--to", "end")
    path = shell.folder / "store" / "config" / "consumerOffset.json"
    path.write_text(path.read_text().replace("39", "3999"))
    answer = shell("diagnose", "store")
    assert (answer.status, answer.rows[0]["severity"]) == (1, "error")
    answer = shell("diagnose", "store", "--limit", 1)
    assert (answer.status, len(answer.rows)) == (1, 1)


def test_the_story_of_a_message_is_a_timeline(shell: Shell) -> None:
    rows = shell("story", "store", "UNIQ-same").rows
    assert rows
    assert [list(row)[: len(EVENT)] for row in rows] == [EVENT] * len(rows)
    assert shell("story", "store", "no-such-id", "--fail-empty").status == 3


def test_the_design_is_checked(shell: Shell) -> None:
    answer = shell("diagnose", "store", "--design", "--important", "OrderTopic")
    found = diagnosis.design_check("store", diagnosis.Thresholds(topics=frozenset(["OrderTopic"])))
    assert [(row["finding"], row["severity"], row["subject"]) for row in answer.rows] == [
        (one.kind, one.severity, one.subject) for one in found
    ]
    volumes = {row["topic"]: row["messages"] for row in shell("diagnose", "store", "--volumes").rows}
    assert volumes == {row["topic"]: row["messages"] for row in shell("count", "store").rows}


def test_the_effect_of_a_change(shell: Shell) -> None:
    words = ["whatif", "store", "--group", "CG_order", "--topic", "OrderTopic", "--handler", "20ms"]
    rows = shell(*words, "--inflow", 0, "--threads", 1).rows
    found = diagnosis.what_if(
        dataclasses.replace(diagnosis.consumption_of("store", "CG_order", "OrderTopic", handler_s=0.02), threads=1)
    )
    assert [(row["scenario"], row["drain_s"], row["speed_up"]) for row in rows] == [
        (one.name, one.estimate.drain_s, one.speed_up) for one in found
    ]
    assert (rows[0]["scenario"], rows[0]["lag"], rows[0]["queues"]) == ("as it is", 75, 2)
    assert shell(*words).rows[0]["stored_per_s"] == pytest.approx(75 / 9, rel=0.1)
    assert "expected a time such as" in shell(*words[:-1], "soon").said
    for name, text in (("--clients", "2.5"), ("--threads", "999999999"), ("--batch", "0")):
        answer = shell(*words, name, text)
        assert (answer.status, answer.out) == (2, "")
        assert f"{name}: expected a whole number from 1 to 1024, found '{text}'" in answer.said
    assert "has no progress" in shell("whatif", "store", "--group", "x", "--topic", "y", "--handler", "1s").said


@pytest.mark.slow
def test_a_half_that_was_given_up_is_decided_later(shell: Shell) -> None:
    runner = ManualRunner()
    with Broker.open("tx", runner=runner) as broker:
        producer = TransactionProducer(broker, "P", lambda message: TransactionState.UNKNOWN)
        for number in range(2):
            producer.send_in_transaction(
                Message("orders", b"%d" % number), execute=lambda message, argument: TransactionState.UNKNOWN
            )
        runner.advance(60_000 * 20)
    first, second = shell("pending", "tx", "--kind", "given_up").rows
    before = files_of(shell.folder / "tx")
    words = ["decide", "tx", first["physical_offset"], "--commit"]
    assert shell(*words, "--dry-run").rows[0]["decision"] == "commit"
    assert files_of(shell.folder / "tx") == before
    assert shell(*words).rows[0]["unique_key"] == first["unique_key"]
    assert shell("decide", "tx", second["physical_offset"], "--rollback").status == 0
    assert shell("pending", "tx", "--kind", "given_up").rows == []
    assert [row["body"] for row in shell("show", "tx", "--topic", "orders").rows] == ["0"]
    assert "expected an undecided half" in shell(*words).said
    assert "expected either --commit" in shell("decide", "tx", 1).said


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_fit_the_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    pytest.importorskip("rich")
    from rich.cells import cell_len

    from librmq.cli._table import Table

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    table = Table(stream)
    for command in (["show", "--topic", "OrderTopic"], ["lag"], ["diagnose", "--design"], ["topics"]):
        for row in shell(command[0], "store", *command[1:]).rows:
            table.row(row)
        table.close()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert any("world paid hello" in line for line in lines)


# --- dead letters


@pytest.fixture
def broken(shell: Shell) -> Shell:
    """Return a shell with a store ``kit`` in which a group gave up on three messages."""

    def fail(message: object) -> None:
        raise DeadLetter("no stock")

    runner = ManualRunner()
    with Broker.open("kit", runner=runner) as broker:
        broker.create_topic("orders", 1)
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("orders", fail)
        consumer.start()
        producer = Producer(broker, "p")
        for number in range(3):
            producer.send("orders", b"%d" % number, keys=f"k{number}")
        runner.advance(60_000)
        consumer.shutdown()
    return shell


def test_dead_letters_are_listed_with_their_cause(broken: Shell) -> None:
    rows = broken("dead-letters", "kit").rows
    assert [list(row) for row in rows] == [LETTER] * 3
    assert {(row["group"], row["original_topic"]) for row in rows} == {("g", "orders")}
    assert [row["messages"] for row in broken("dead-letters", "kit", "--causes").rows] == [3]
    assert broken("dead-letters", "kit", "--group", "other").rows == []
    assert broken("dead-letters", "kit", "--id", rows[1]["unique_key"]).rows == [rows[1]]


def test_dead_letters_are_resent_once_tried_dry(broken: Shell) -> None:
    listed = broken("dead-letters", "kit").rows
    before = files_of(broken.folder / "kit")
    words = ["dead-letters", "kit", "--resend", "--group", "g", "--id", listed[0]["unique_key"]]
    assert broken(*words, "--dry-run").rows == [{**listed[0], "resent": False}]
    assert files_of(broken.folder / "kit") == before
    (sent,) = broken(*words).rows
    assert sent == {**listed[0], "resent_at_ms": sent["resent_at_ms"], "resent": True}
    (again,) = broken("show", "kit", "--topic", "%RETRY%g").rows
    assert again["dispatch_uniq_key"] == listed[0]["unique_key"]
    del sent["resent"]
    assert broken("dead-letters", "kit").rows == [sent, *listed[1:]]
    assert len(broken(*words).rows) == 1  # what is named by its id is sent once more
    assert "--group" in broken("dead-letters", "kit", "--resend").said


def test_causes_are_those_of_the_selected_letters(broken: Shell) -> None:
    first, *_ = broken("dead-letters", "kit").rows
    (cause,) = broken("dead-letters", "kit", "--causes").rows
    assert cause["messages"] == 3
    (cause,) = broken("dead-letters", "kit", "--causes", "--id", first["unique_key"]).rows
    assert (cause["messages"], cause["example"]) == (1, first["physical_offset"])
    assert broken("dead-letters", "kit", "--causes", "--cause", "no such cause").rows == []


def test_no_more_dead_letters_are_resent_than_the_limit(broken: Shell) -> None:
    retries = len(broken("show", "kit", "--topic", "%RETRY%g").rows)
    assert len(broken("dead-letters", "kit", "--resend", "--group", "g", "--limit", 2).rows) == 2
    assert len(broken("show", "kit", "--topic", "%RETRY%g").rows) == retries + 2


def test_a_repeated_resend_continues_with_the_unsent_letters(broken: Shell) -> None:
    listed = broken("dead-letters", "kit").rows
    words = ["dead-letters", "kit", "--resend", "--group", "g", "--limit", 2]
    assert [row["physical_offset"] for row in broken(*words).rows] == [row["physical_offset"] for row in listed[:2]]
    (counted,) = broken("stats", "kit").rows
    assert (counted["dead_letters"], counted["resent"]) == (1, 2)
    assert broken("dead-letters", "kit", "--unsent").rows == listed[2:]
    assert [row["physical_offset"] for row in broken(*words).rows] == [listed[2]["physical_offset"]]
    assert [row["resent_at_ms"] is None for row in broken("dead-letters", "kit").rows] == [False] * 3
    answer = broken(*words)
    assert (answer.status, answer.out) == (0, "")
    assert "all 3 dead letters were sent before" in answer.said
    retries = broken("show", "kit", "--topic", "%RETRY%g").rows[-3:]
    assert {row["dispatch_uniq_key"] for row in retries} == {row["unique_key"] for row in listed}


def test_letters_that_were_sent_again_are_no_finding(broken: Shell) -> None:
    assert broken("dead-letters", "kit", "--resend", "--group", "g", "--limit", 2).status == 0
    assert [(row["dead_letters"], row["resent"]) for row in broken("groups", "kit").rows] == [(1, 2)]
    assert [(row["messages"], row["resent"]) for row in broken("dead-letters", "kit", "--causes").rows] == [(1, 2)]
    assert broken("dead-letters", "kit", "--resend", "--group", "g").status == 0
    assert [(row["dead_letters"], row["resent"]) for row in broken("groups", "kit").rows] == [(0, 3)]
    assert [row for row in broken("diagnose", "kit").rows if row["finding"] == "dead-letters"] == []


def test_dead_letters_are_chosen_by_their_time(broken: Shell) -> None:
    listed = broken("dead-letters", "kit").rows
    last = listed[-1]["store_timestamp_ms"]
    assert broken("dead-letters", "kit", "--since", last).rows == [
        row for row in listed if row["store_timestamp_ms"] >= last
    ]
    assert broken("dead-letters", "kit", "--since", last + 1).rows == []


def test_dead_letters_go_to_another_topic_without_their_past(broken: Shell) -> None:
    words = ["replay", "kit", "--group", "g", "--to-topic", "second-try"]
    row = {"topic": "%DLQ%g", "messages": 3, "body_bytes": 3, "unconfirmed": 0, "dry_run": False}
    assert broken(*words, "--dry-run").rows == [{**row, "dry_run": True}]
    assert broken("show", "kit", "--topic", "second-try").rows == []
    assert broken(*words).rows == [row]
    letters = broken("dead-letters", "kit").rows
    copies = broken("show", "kit", "--topic", "second-try").rows
    assert {copy["dispatch_uniq_key"] for copy in copies} == {letter["unique_key"] for letter in letters}
    assert sorted(copy["body"] for copy in copies) == ["0", "1", "2"]
    for copy in copies:
        assert copy["reconsume_times"] == 0
        assert set(copy["properties"]) == {"KEYS", "UNIQ_KEY", "WAIT", "CLUSTER"}
    answer = broken(*words)
    assert (answer.status, answer.out, "--from-start" in answer.said) == (0, "", True)
    assert len(broken("show", "kit", "--topic", "second-try").rows) == 3
    wrong = broken("replay", "kit", "--topic", "orders", "--to-topic", "orders")
    assert (wrong.status, "another topic" in wrong.said) == (2, True)


def test_a_snapshot_has_schedules_and_knows_what_was_skipped_and_sent_again(broken: Shell) -> None:
    assert broken("dead-letters", "kit", "--group", "g", "--resend").rows
    assert broken("reset", "kit", "--group", "g", "--topic", "orders", "--to", "begin").status == 0
    assert broken("skip", "kit", "--group", "g", "--topic", "orders").rows
    with Broker.open(broken.folder / "kit", runner=ManualRunner()) as broker:
        broker.set_schedule("daily", topic="orders", every=86_400)
    assert broken("snapshot", "kit", "copy").status == 0
    for command in ("dead-letters", "schedules", "progress"):
        rows = broken(command, "copy").rows
        assert rows
        assert rows == broken(command, "kit").rows


@pytest.mark.parametrize("by_library", [False, True])
def test_unnoted_letters_of_a_killed_resend_go_once(broken: Shell, by_library: bool) -> None:
    words = ("dead-letters", "kit", "--group", "g", "--resend")
    assert len(broken(*words, "--limit", 2).rows) == 2
    (broken.folder / "kit/librmq/resent.json").unlink()  # as if SIGKILL had come before the note
    if by_library:
        with Broker.open(broken.folder / "kit", runner=ManualRunner()) as broker:
            assert broker.resend_dead_letters("g") == 1
    else:
        answer = broken(*words)
        assert len(answer.rows) == 1
        assert "had sent 2 dead letters without a note" in answer.said
    with Broker.open(broken.folder / "kit", runner=ManualRunner()) as broker:
        copies = [message.body for message in broker.messages("%RETRY%g") if not message.reconsume_times]
        assert len(copies) == len(set(copies)) == 3


@pytest.mark.parametrize("queues", [1, 3])
def test_letters_of_a_message_that_died_again_go_once_more_each(broken: Shell, queues: int) -> None:
    """Both letters and their copies have the same ids; only the first resend is noted."""
    path, runner = broken.folder / "kit", ManualRunner()

    def fail(message: object) -> None:
        raise DeadLetter("still no stock")

    with Broker.open(path, runner=runner) as broker:
        broker.create_topic("%RETRY%g", queues)
        assert broker.resend_dead_letters("g") == 3
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("orders", fail)
        consumer.start()
        runner.advance(60_000)
        consumer.shutdown()
        notes = (path / "librmq/resent.json").read_bytes()
        runner.advance(60_000)
        assert broker.resend_dead_letters("g") == 3
    (path / "librmq/resent.json").write_bytes(notes)  # as if SIGKILL had come before the second note
    with Broker.open(path, runner=runner) as broker:
        assert broker.resend_dead_letters("g") == 0
        copies = [message.body for message in broker.messages("%RETRY%g") if not message.reconsume_times]
        assert len(copies) == 2 * len(set(copies)) == 6


def test_a_half_that_is_still_checked_is_decided_by_force_alone(shell: Shell) -> None:
    runner = ManualRunner()
    with Broker.open("tx", runner=runner) as broker:
        producer = TransactionProducer(broker, "P", lambda message: TransactionState.UNKNOWN)
        producer.send_in_transaction(Message("orders", b"x"), execute=lambda message, arg: TransactionState.UNKNOWN)
    (half,) = shell("pending", "tx", "--kind", "half").rows
    refused = shell("decide", "tx", half["physical_offset"], "--commit")
    assert refused.status != 0
    assert "checks still ask the producer group about this half" in refused.said
    assert "--force" in refused.said
    assert shell("decide", "tx", half["physical_offset"], "--commit", "--force").status == 0
    assert shell("pending", "tx", "--kind", "half").rows == []
    assert [row["body"] for row in shell("show", "tx", "--topic", "orders", "--body", "text").rows] == ["x"]


def test_nothing_to_resend_is_reported(broken: Shell) -> None:
    answer = broken("dead-letters", "kit", "--resend", "--group", "typo")
    assert (answer.status, answer.out) == (0, "")
    assert "nothing is sent" in answer.said
    assert broken("dead-letters", "kit", "--resend", "--causes", "--group", "g").status == 2


def test_diagnose_says_whether_records_were_checked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    log = max((shell.folder / "store" / "commitlog").iterdir())
    log.write_bytes(log.read_bytes().replace(b"OrderTopic", b"OrderTopix", 1))
    assert [row["finding"] for row in shell("diagnose", "store", "--limit", "1").rows] == ["damage"]
    found = {row["finding"]: row for row in shell("diagnose", "store", "--no-verify").rows}
    assert "damage" not in found
    assert "were not compared" in found["not-verified"]["what"]
    monkeypatch.setattr("librmq.diagnosis._checks.AT_ONCE", 3)
    found = {row["finding"]: row for row in shell("diagnose", "store").rows}
    assert (found["not-verified"]["severity"], found["not-verified"]["evidence"]) == ("info", {"limit": 3})
    assert "salvage STORE --into NEW" in shell("verify", "store").said


def test_tables_of_what_if_and_of_several_stories(shell: Shell) -> None:
    of = ("--group", "CG_order", "--topic", "OrderTopic")
    shown = shell("whatif", "store", *of, "--handler", "20ms", "--format", "table").out
    assert all(one in shown for one in ("drained in", "at worst", " ms ", "1.00x"))
    several = shell("story", "store", "key14").rows
    ids = {row["unique_key"] for row in several if row["unique_key"]}
    assert len(ids) > 1
    assert "message" in shell("story", "store", "key14", "--format", "table").out
    assert "message" not in shell("story", "store", min(ids), "--format", "table").out


# --- what is not there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["story", "store", "no-such-key"], "no message has the id or key 'no-such-key'"),
        (["show", "store", "--key", "no-such-key"], "no message has the key 'no-such-key'"),
        (["show", "store", "--id", "0A" * 16], f"no message has the id '{'0A' * 16}'"),
        (
            ["show", "store", "--key", "no-such-key", "--tag", "TagA"],
            "no message has the key 'no-such-key' among those that the other options select",
        ),
    ],
)
def test_an_unknown_message_is_one_line(shell: Shell, words: list[str], said: str) -> None:
    answer = shell(*words)
    assert (answer.status, answer.out, answer.said) == (0, "", f"note: {said}\n")


def test_lag_without_the_brokers_tables_names_the_missing_file(shell: Shell) -> None:
    assert shell("lag", "store").rows
    shutil.rmtree(shell.folder / "store" / "config")
    answer = shell("lag", "store")
    assert (answer.status, answer.out) == (0, "")
    assert answer.said.startswith(
        f"note: the progress of groups is unknown: {shell.folder}/store/config/consumerOffset.json is missing or "
        "empty: copy it"
    )
