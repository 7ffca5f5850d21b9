"""Commands that change a store: their effect, dry runs that change nothing, and refusals of a store in use."""

from __future__ import annotations

import json

import pytest

from librmq import Broker, Message, MessageStore, Producer, PushConsumer, ReconsumeLater
from librmq.cli._output import JsonLines
from librmq.clock import ManualClock
from librmq.diagnosis import lag
from librmq.message.topics import TOPIC_TYPES
from librmq.runtime import ManualRunner
from librmq.store.format.broker_tables import BrokerTables
from tests.budget import many
from tests.cli.stand import Shell, files_of

ORDERS = ("--group", "CG_order", "--topic", "OrderTopic")

CHANGES = [
    ("topic", "create", "store", "orders", "--queues", "3"),
    ("topic", "grow", "store", "OrderTopic", "--queues", "9"),
    ("topic", "permit", "store", "OrderTopic", "--permission", "r"),
    ("topic", "delete", "store", "OrderTopic"),
    ("group", "create", "store", "billing", "--retries", "5"),
    ("group", "create", "store", "billing", "--ordered", "--no-broadcasts", "--priority-factor", "60"),
    ("group", "copy", "store", "CG_order", "--to", "billing"),
    ("group", "delete", "store", "CG_order"),
    ("reset", "store", *ORDERS, "--to", "end"),
    ("skip", "store", *ORDERS),
]


def tables(shell: Shell) -> BrokerTables:
    return BrokerTables.open(str(shell.folder / "store" / "config"))


def progress(shell: Shell) -> dict[int, int | None]:
    return {row["queue_id"]: row["consumer_offset"] for row in shell("lag", "store", *ORDERS).rows}


@many
@pytest.mark.parametrize("words", CHANGES, ids=lambda words: "-".join(words[:2]))
def test_a_dry_run_prints_the_same_and_changes_no_byte(shell: Shell, words: tuple[str, ...]) -> None:
    before = files_of(shell.folder / "store")
    tried = shell(*words, "--dry-run")
    assert tried.status == 0, tried.said
    assert all(row["dry_run"] for row in tried.rows)
    assert files_of(shell.folder / "store") == before
    done = shell(*words)
    assert done.status == 0, done.said
    assert [row | {"dry_run": None} for row in done.rows] == [row | {"dry_run": None} for row in tried.rows]
    after = files_of(shell.folder / "store")
    assert {name for name in before if after[name] != before[name] and name.startswith("commitlog")} == set()
    assert [name for name in after if name.startswith("config") and after[name] != before.get(name)] != []
    assert shell("verify", "store").status == 0


@many
@pytest.mark.parametrize("words", CHANGES, ids=lambda words: "-".join(words[:2]))
def test_a_change_is_saved_before_it_is_printed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def leave(self: JsonLines, row: object) -> None:
        raise BrokenPipeError

    before = files_of(shell.folder / "store" / "config")
    monkeypatch.setattr(JsonLines, "row", leave)
    assert shell(*words).status == 0
    assert files_of(shell.folder / "store" / "config") != before


@many
@pytest.mark.parametrize("words", CHANGES, ids=lambda words: "-".join(words[:2]))
def test_a_store_in_use_is_refused_with_its_owner(shell: Shell, words: tuple[str, ...]) -> None:
    before = files_of(shell.folder / "store" / "config")
    with MessageStore.open("store"):
        answer = shell(*words)
        assert (answer.status, answer.out) == (2, "")
        assert "process" in answer.said
    assert files_of(shell.folder / "store" / "config") == before


# --- topics and groups


def test_a_topic_is_made_grown_and_deleted(shell: Shell) -> None:
    shell("topic", "create", "store", "orders", "--queues", "3", "--write-queues", 2, "--permission", "r")
    row = tables(shell).topics.rows["orders"]
    assert (row["readQueueNums"], row["writeQueueNums"], row["perm"]) == (3, 2, 4)
    assert "orders" in {one["topic"] for one in shell("topics", "store").rows}
    answer = shell("topic", "grow", "store", "orders", "--queues", "5")
    assert (answer.rows[0]["before"], answer.rows[0]["read_queues"], answer.rows[0]["moved_keys"]) == (3, 5, 0.8)
    with Broker.open("store", runner=ManualRunner()) as broker:
        assert broker.topics()["orders"].read_queues == 5
    assert shell("topic", "permit", "store", "orders", "--permission", "rw").rows[0]["before"] == "r"
    assert tables(shell).topics.rows["orders"]["perm"] == 6
    assert shell("topic", "delete", "store", "orders").status == 0
    assert "orders" not in tables(shell).topics.rows


def test_a_topic_is_made_for_a_type_of_messages(shell: Shell) -> None:
    assert shell("topic", "create", "store", "orders", "--type", "FIFO").rows[0]["message_type"] == "FIFO"
    assert tables(shell).topics.rows["orders"]["attributes"] == {"message.type": "FIFO"}
    for kind in TOPIC_TYPES:
        assert shell("topic", "create", "store", kind, "--type", kind).rows[0]["message_type"] == kind
    shell("topic", "grow", "store", "orders", "--queues", "9")
    with Broker.open("store", runner=ManualRunner()) as broker:
        assert broker.topics()["orders"].message_type == "FIFO"


@many
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "store", "OrderTopic"], "exists"),
        (["create", "store", "no good"], "may only contain"),
        (["create", "store", "TBW102"], "the broker's own"),
        (["create", "store", "a", "--queues", "0"], "expected a whole number from 1"),
        (["grow", "store", "absent", "--queues", "3"], "does not exist: create it by"),
        (["grow", "store", "OrderTopics", "--queues", "3"], "does not exist; did you mean 'OrderTopic'?"),
        (["permit", "store", "OrderTopics", "--permission", "r"], "does not exist; did you mean 'OrderTopic'?"),
        (["grow", "store", "OrderTopic"], "--queues is missing"),
        (["grow", "store", "OrderTopic", "--queues", "1"], "expected more, found 1"),
        (["delete", "store", "absent"], "does not exist"),
        (["delete", "store", "OrderTopic", "--write-queues", "1"], "belongs to create, grow, not to delete"),
        (["shrink", "store", "OrderTopic"], "invalid choice"),
    ],
)
def test_invalid_changes_of_a_topic(shell: Shell, words: list[str], said: str) -> None:
    answer = shell("topic", *words)
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.said


@pytest.mark.parametrize("words", [["copy", "--to", "new", "--no-ordered"], ["delete", "--with-retries"]])
def test_options_of_another_action_are_refused(shell: Shell, words: list[str]) -> None:
    answer = shell("group", words[0], "store", "CG_order", *words[1:])
    assert (answer.status, answer.out) == (2, "")
    assert f"it belongs to {'copy' if words[0] == 'delete' else 'create'}, not to {words[0]}" in answer.said


def test_a_copied_group_continues_where_the_other_stands(shell: Shell) -> None:
    before = shell("lag", "store", "--group", "CG_order").rows
    shell("group", "copy", "store", "CG_order", "--to", "billing")
    copied = shell("lag", "store", "--group", "billing").rows
    kept = [row | {"group": "billing"} for row in before if row["topic"] != "%RETRY%CG_order"]
    assert copied == kept
    assert shell("group", "copy", "store", "CG_order", "--to", "billing").status == 2
    assert shell("group", "delete", "store", "billing").rows[0]["topics"] == sorted({row["topic"] for row in kept})
    assert shell("lag", "store", "--group", "billing").rows == []


def test_a_copied_group_has_the_settings_of_a_later_version_too(shell: Shell) -> None:
    path = shell.folder / "store" / "config" / "subscriptionGroup.json"
    path.write_text(
        path.read_text().replace('"groupName":"CG_order"', '"groupName":"CG_order","consumeTimeoutMinute":7')
    )
    assert shell("group", "copy", "store", "CG_order", "--to", "billing").status == 0
    rows = tables(shell).groups.rows
    assert rows["CG_order"]["consumeTimeoutMinute"] == 7
    assert rows["billing"] == {**rows["CG_order"], "groupName": "billing"}


def test_no_command_makes_topics_of_a_broker_of_another_name(shell: Shell) -> None:
    with Broker.open("named", name="broker-7", cluster_name="shops", runner=ManualRunner()) as broker:
        broker.create_topic("orders", 2)
        before = set(broker.topics())
    assert shell("topic", "create", "named", "bills").status == 0
    with Broker.open("named", name="broker-7", cluster_name="shops", runner=ManualRunner()) as broker:
        assert set(broker.topics()) == before | {"bills"}


# --- progress


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to", "begin"], {0: 0, 1: 0}),
        (["--to", "end"], {0: 39, 1: 36}),
        (["--offset", "20"], {0: 20, 1: 20}),
        (["--offset", "38"], {0: 38, 1: 36}),
        (["--to", "end", "--queue", "1"], {0: None, 1: 36}),
        (["--to", "end", "--queue", "0,0-1"], {0: 39, 1: 36}),
        (["--to", "2000-01-01"], {0: 0, 1: 0}),
        (["--to", "9000-01-01"], {0: 39, 1: 36}),
    ],
)
def test_reset_moves_progress(shell: Shell, words: list[str], expected: dict[int, int]) -> None:
    assert shell("reset", "store", *ORDERS, *words).status == 0
    assert progress(shell) == expected


def test_progress_is_reset_where_a_topic_or_a_group_lost_its_row(shell: Shell) -> None:
    """A queue that a topic had before it shrank, and a group that only its retries show."""
    with Broker.open("lost", runner=ManualRunner()) as broker:
        broker.create_topic("T", 3)
        producer = Producer(broker, "p")
        for queue_id in range(3):
            producer.send("T", b"x", queue=queue_id)
        broker.create_topic("T", 1)
        broker.store.append(Message.from_parts("%RETRY%g", b"x", 0, {}))
    rows = shell("reset", "lost", "--group", "g", "--topic", "T", "--to", "end").rows
    assert [(row["queue_id"], row["after"]) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert "g" in BrokerTables.open(str(shell.folder / "lost" / "config")).groups.rows
    assert shell("group", "delete", "lost", "--group", "g").status == 2
    assert shell("group", "delete", "lost", "g").rows[0]["topics"] == ["T"]
    assert shell("group", "delete", "lost", "g").rows[0]["topics"] == []


def test_skip_keeps_the_newest_and_never_goes_back(shell: Shell) -> None:
    assert "note: queue 1 has no offset" not in shell("reset", "store", *ORDERS, "--queue", "1", "--offset", "30").said
    assert (
        "note: queue 1 has no offset 38: its end 36"
        in shell("reset", "store", *ORDERS, "--offset", "38", "--dry-run").said
    )
    rows = shell("skip", "store", *ORDERS, "--keep", "10").rows
    assert [(row["queue_id"], row["begin"], row["end"], row["skipped"]) for row in rows] == [(0, 0, 29, 29)]
    assert progress(shell) == {0: 29, 1: 30}
    shell("skip", "store", *ORDERS)
    assert progress(shell) == {0: 39, 1: 36}
    assert shell("skip", "store", *ORDERS).rows == []


def test_ages_in_an_unused_store_count_from_its_last_message(shell: Shell) -> None:
    with MessageStore.open("old", clock=(clock := ManualClock(1_700_000_000_000))) as store:
        for _ in range(10):
            store.append(Message("T", b"x"))
            clock.move_to(clock.now_ms() + 3_600_000)
    note = "note: no process uses old: ages count from the last message, at 2023-11-15 07:13:20 UTC\n"
    counted = shell("count", "old", "--since", "3h")
    assert (counted.rows, counted.said) == ([{"topic": "T", "messages": 4, "bytes": 372}], note)
    assert len(shell("show", "old", "--topic", "T", "--since", "90m").rows) == 2
    with Broker.open("old", runner=ManualRunner()) as broker:
        broker.create_topic("T", 1)
        broker.set_group("g")
        broker.reset_group("g", "T", 0)
    words = ["skip", "old", "--group", "g", "--topic", "T", "--older-than", "5h"]
    skips = "4 messages of topic 'T', stored from 2023-11-14 22:13:20 to 2023-11-15 01:13:20 UTC\n"
    assert shell(*words, "--dry-run").said == f"{note}note: group 'g' would skip {skips}"
    answer = shell(*words)
    assert answer.said == f"{note}note: group 'g' skips {skips}"
    assert [(row["begin"], row["end"]) for row in answer.rows] == [(0, 4)]
    with MessageStore.open("old"):  # in use: from now
        assert shell("count", "old", "--since", "3h").rows == []


def test_skipped_messages_can_be_set_aside_and_replayed(shell: Shell) -> None:
    shell("skip", "store", *ORDERS, "--queue", "1", "--keep", "30", "--aside", "later")
    (aside,) = (row for row in shell("topics", "store").rows if row["topic"] == "later")
    assert aside["messages"] == 6
    answer = shell("replay", "store", *ORDERS, "--to", "again")
    assert (answer.rows[0]["skipped"], answer.rows[0]["messages"]) == (6, 6)
    assert [
        row["consumer_offset"] for row in shell("lag", "store", "--group", "again").rows if row["queue_id"] == 1
    ] == [0]
    assert "has skipped nothing" in shell("replay", "store", "--group", "x", "--topic", "y", "--to", "z").said


@many
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reset", "store", *ORDERS], "expected either --to"),
        (["reset", "store", *ORDERS, "--to", "end", "--offset", "3"], "expected either --to"),
        (["reset", "store", *ORDERS, "--offset", "1795802400000"], "a time was meant, give it by --to, as 2026"),
        (["reset", "store", *ORDERS, "--offset", "38", "--queue", "1", "--dry-run"], "a queue offset up to 36"),
        (["reset", "store", *ORDERS, "--to", "soon"], "not a time"),
        (["reset", "store", *ORDERS, "--to", "end", "--queue", "7"], "its queues are 0-1"),
        (["reset", "store", *ORDERS, "--to", "end", "--queue", "²"], "--queue: expected queue ids such as 3"),
        (["reset", "store", *ORDERS, "--to", "end", "--queue", "1-0"], "--queue: expected queue ids such as 3"),
        (["reset", "store", "--group", "CG_ordr", "--topic", "OrderTopic", "--to", "end"], "did you mean 'CG_order'?"),
        (["reset", "store", "--group", "CG_order", "--topic", "OrdrTopic", "--to", "end"], "mean 'OrderTopic'?"),
        (["skip", "store", *ORDERS, "--keep", "1", "--older-than", "1h"], "expected either"),
        (["skip", "store", *ORDERS, "--older-than", "yesterday"], "expected a time such as"),
    ],
)  # fmt: skip
def test_moves_that_make_no_sense_are_refused(shell: Shell, words: list[str], said: str) -> None:
    before = files_of(shell.folder / "store")
    answer = shell(*words)
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.said
    assert {name: data for name, data in files_of(shell.folder / "store").items() if name.startswith("config")} == {
        name: data for name, data in before.items() if name.startswith("config")
    }


def test_a_broker_continues_from_where_reset_put_a_group(shell: Shell) -> None:
    with MessageStore.open("new") as store:
        for number in range(10):
            store.append(Message("T", b"%d" % number))
    (shell.folder / "new" / "config").mkdir(exist_ok=True)
    assert shell("topic", "create", "new", "T", "--queues", 1).status == 0
    assert shell("group", "create", "new", "g").status == 0
    assert shell("reset", "new", "--group", "g", "--topic", "T", "--offset", 7).status == 0
    with Broker.open("new", runner=ManualRunner()) as broker:
        assert broker.consumer_offset("g", "T") == 7
    assert json.loads(shell("lag", "new").out)["lag"] == 3


def test_a_group_keeps_the_settings_that_a_change_does_not_name(shell: Shell) -> None:
    """As with `mqadmin updateSubGroup`; an ordered group is what a FIFO topic needs."""
    (created,) = shell("group", "create", "new", "g", "--ordered", "--retries", "3").rows
    assert (created["ordered"], created["retries"], created["consumes"]) == (True, 3, True)
    (changed,) = shell("group", "create", "new", "g", "--no-consumes", "--no-broadcasts").rows
    wanted = {
        "retries": 3,
        "ordered": True,
        "consumes": False,
        "broadcasts": False,
        "priority_factor": 100,
        "max_process_deaths": 3,
    }
    assert {name: changed[name] for name in wanted} == wanted
    with Broker.open("new", runner=ManualRunner()) as broker:
        settings = broker.group_settings("g")
        assert (settings.is_ordered, settings.retry_max_times, settings.consumes) == (True, 3, False)
    assert shell("group", "create", "new", "g", "--no-ordered").rows[0]["ordered"] is False


@pytest.mark.parametrize("waits_for_its_delay", [False, True])
def test_a_copied_group_names_or_takes_retries(shell: Shell, waits_for_its_delay: bool) -> None:
    """The attempts so far count for the new group, which gets the retry once."""
    runner = ManualRunner()
    with Broker.open(shell.folder / "retries", runner=runner) as broker:
        consumer = PushConsumer(broker, "old")

        def fail(message: object) -> None:
            raise ReconsumeLater

        consumer.subscribe("T", fail)
        consumer.start()
        runner.advance(30_000)
        Producer(broker, "p").send("T", b"1")
        runner.advance(5_000)
        consumer.shutdown()
        runner.advance(0 if waits_for_its_delay else 60_000)
    (row,) = shell("group", "copy", "retries", "old", "--to", "new", "--dry-run").rows
    assert (row["retries_left"], len(row["retries"])) == (1, 1)
    assert "--with-retries" in row["note"]
    (moved,) = shell("group", "copy", "retries", "old", "--to", "new", "--with-retries").rows
    assert (moved["retries_moved"], moved["retries_left"]) == (1, 0)
    assert ("when their delay ends" in moved.get("note", "")) == waits_for_its_delay
    seen: list[tuple[bytes, int, str | None]] = []
    runner = ManualRunner()
    with Broker.open(shell.folder / "retries", runner=runner) as broker:
        consumer = PushConsumer(broker, "new")
        consumer.subscribe("T", lambda one: seen.append((one.body, one.reconsume_times, one.unique_key)))
        consumer.start()
        runner.advance(30_000)
        assert lag(broker, group="old").total == waits_for_its_delay  # as the note says
    assert seen == [(b"1", 1, row["retries"][0])]
    assert shell("group", "copy", "store", "CG_order", "--to", "new").rows[0].get("topics")


def test_a_message_that_waits_is_cancelled(shell: Shell) -> None:
    (row, *_) = [row for row in shell("pending", "store", "--kind", "delay").rows if row["unique_key"]]
    name = row["unique_key"]
    assert shell("cancel", "store", name, "--dry-run").rows[0]["dry_run"]
    assert name in {row["unique_key"] for row in shell("pending", "store").rows}
    for _ in range(2):
        (answer,) = shell("cancel", "store", name).rows
        assert (answer["id"], answer["cancelled"], sorted(answer)) == (name, True, ["cancelled", "id", "why"])
    assert name not in {row["unique_key"] for row in shell("pending", "store").rows}
    assert [row["event"] for row in shell("story", "store", name).rows] == ["delayed", "cancelled"]
    assert shell("verify", "store").status == 0
    (plain, *_) = shell("show", "store", "--topic", "TopicTest", "--limit", "1").rows
    (answer,) = shell("cancel", "store", plain["msg_id"]).rows
    assert (answer["cancelled"], answer["why"][:17]) == (False, "delivered already")
    unknown = shell("cancel", "store", "nonsense")
    assert (unknown.status, unknown.out) == (2, "")
    assert "there is no message with the id 'nonsense'" in unknown.said


@pytest.mark.parametrize("kind", ["topic", "group"])
def test_creating_makes_the_store(shell: Shell, kind: str) -> None:
    made = shell(kind, "create", "fresh", "orders")
    assert (made.status, made.rows[0]["action"]) == (0, "create")
    assert "a new one is made" in made.said
    assert "made" not in shell(kind, "create", "fresh", "jobs").said
    with Broker.open("fresh") as broker:
        assert "orders" in (broker.topics() if kind == "topic" else broker.groups())
    assert shell("diagnose", "fresh").status == 0
    assert shell(kind, "delete", "nowhere", "orders").status == 2
    assert not (shell.folder / "nowhere").exists()
    assert shell(kind, "create", "dry", "orders", "--dry-run").status == 0
    assert not (shell.folder / "dry").exists()
