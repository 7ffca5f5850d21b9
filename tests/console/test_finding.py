"""Who looks for something finds it: by one box, at any depth, in lists by cause and key, in words of people."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from librmq import (
    Broker,
    ConsumeFrom,
    ManualRunner,
    Message,
    MessageQueue,
    Producer,
    PushConsumer,
    TransactionProducer,
    TransactionState,
    connect,
)
from librmq.console import _search as search
from librmq.diagnosis import diagnose
from librmq.testing import Kit
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell
from tests.clocks import SlowClock
from tests.console.pages import Asked, cells, console, facts, refuse, shop


def walked(asked: Asked, address: str, column: str = "body") -> list[str]:
    """Return a column of the messages of a search, page after page."""
    found = []
    for _ in range(100):
        found += [row[column] for row in asked.table(address, "Messages")]
        link = re.search('href="([^"]*)">Older</a>', asked.page(address))
        if link is None:
            return found
        address = f"/{html.unescape(link[1])}"
    raise AssertionError("the search has no end")


# ---- the box


def test_one_box_finds_ids_keys_topics_and_groups(broker: Broker, runner: ManualRunner) -> None:
    sent = shop(broker, runner)
    with Producer(broker, "shop") as producer:
        producer.send("returns", b"back", keys="o-3")
    offset_id = next(message.offset_id for message in broker.messages("orders"))
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        for place in (broker, broker.store.path, remote):
            asked = Asked(console(place))
            for words, address in (
                (sent[5], f"message?id={sent[5]}"),
                (offset_id, "message?id="),
                ("o-2", f"message?id={sent[2]}"),
                ("billing", "group?name=billing"),
                ("returns", "topic?name=returns"),
            ):
                response = asked.get(f"/find?q={words}")
                assert (response.status_code, address in response.headers["Location"]) == (303, True), words
            topics = [row["topic"] for row in asked.table("/find?q=o-3", "Messages")]
            assert {"returns", "orders"} <= {*topics}
            assert [row["topics"] for row in asked.table("/find?q=ORDER", "Topics")] == ["orders"]
            assert "No message has this id or key" in asked.page("/find?q=nothing")


def test_a_key_at_a_past_moment(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "shop") as producer:
        first = producer.send("orders", b"one", keys="k")
        at_ms = runner.now_ms() + 1
        runner.advance(1_000)
        producer.send("orders", b"two", keys="k")
    asked = Asked(console(broker))
    response = asked.get(f"/find?q=k&at={at_ms}")
    assert response.headers["Location"] == f"message?id={first.message_id}&at={at_ms}"


# ---- a search


def test_all_messages_are_reached_page_by_page(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.create_topic("orders", 3)
    with Producer(broker, "shop") as producer:
        sent = [f"o-{number:03}" for number in range(120)]
        for key in sent:
            producer.send("orders", key.encode(), keys=key, tags="odd" if int(key[2:]) % 2 else "even")
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        for place in (broker, remote):
            asked = Asked(console(place))
            assert sorted(walked(asked, "/topic?name=orders")) == sent
            monkeypatch.setattr(search, "_LOOKED_AT", 7)
            assert sorted(walked(asked, "/topic?name=orders&tag=odd")) == sent[1::2]
            assert "The search looked at 7 messages, back to " in asked.page("/topic?name=orders&tag=odd")
            monkeypatch.undo()
            assert asked.get("/topic?name=orders&behind=orders").status_code == 400


def test_a_time_is_sought_however_much_has_come_since(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("orders", 2)
    with Producer(broker, "shop") as producer:
        begin_ms = runner.now_ms()
        for minute in range(100):
            producer.send("orders", b"%d" % minute)
            runner.advance(60_000)
    monkeypatch.setattr(search, "_LOOKED_AT", 10)
    span = f"since={begin_ms + 20 * 60_000}&until={begin_ms + 23 * 60_000}"
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        for place in (broker, remote):
            assert sorted(walked(Asked(console(place)), f"/topic?name=orders&{span}")) == ["20", "21", "22"]


def test_a_search_of_two_seconds_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "store", runner=ManualRunner(SlowClock())) as broker:
        broker.create_topic("orders", 1)
        with Producer(broker, "shop") as producer:
            for number in range(12):
                producer.send("orders", b"%d" % number, tags="a" if number < 2 else "b")
        assert walked(Asked(console(broker)), "/topic?name=orders&tag=a") == ["1", "0"]


# ---- the log is history


def test_the_minutes_of_a_topic_and_what_of_them_waits(broker: Broker, runner: ManualRunner) -> None:
    broker.create_topic("orders", 2)
    broker.set_group("mail")
    with Producer(broker, "shop") as producer:
        for minute, amount in enumerate((1, 0, 5)):
            for _ in range(amount):
                producer.send("orders", b"one")
            if not minute:
                broker.reset_group("mail", "orders", "end")
            runner.advance(60_000)
    asked = Asked(console(broker))
    page = asked.page("/topic?name=orders")
    assert "6 messages in the last three hours, at most 5 in a minute." in page
    assert facts(page)["stored"].startswith("5 a minute")
    assert "6 messages in the last three hours, at most 5 in a minute; 5 of them wait" in asked.page("/group?name=mail")
    runner.advance(4 * 3_600_000)
    assert "three hours" not in asked.page("/topic?name=orders")


def test_the_first_overview_takes_from_the_log_what_was_stored(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_ms = runner.now_ms()
    with Producer(broker, "shop") as producer:
        producer.send("mails", b"old")
        runner.advance(61_000)
        for _ in range(120):
            producer.send("orders", b"one")
        runner.advance(1_000)
    for at, per_s in (("", "2"), (f"?at={begin_ms + 1}", "1 a minute"), (f"?at={begin_ms + 61_000}", "2")):
        asked = Asked(console(broker))
        shown = facts(asked.page(f"/{at}"))
        assert shown["stored"].startswith(per_s), (at, shown)
        assert shown["stored"].endswith(" in the last minute")
        assert shown["consumed"].startswith("unknown ")
    rows = Asked(console(broker)).table("/", "Busiest topics")
    assert [(row["topic"], row["stored"]) for row in rows] == [("orders", "2 a second"), ("mails", "none")]
    monkeypatch.setattr("librmq.console._search._QUEUES", 1)
    assert facts(Asked(console(broker)).page("/"))["stored"].startswith("unknown rates come with the second look")


# ---- lists


def fail_by_amount(message: Any) -> None:
    raise ValueError("no stock" if int(message.keys[0][2:]) % 3 else f"no order {message.keys[0]}")


@pytest.fixture
def letters(broker: Broker, runner: ManualRunner) -> Broker:
    broker.create_topic("orders", 1)
    broker.set_group("mail", retry_max_times=0)
    consumer = PushConsumer(broker, "mail", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", fail_by_amount)
    with consumer, Producer(broker, "shop") as producer:
        for number in range(9):
            producer.send("orders", f"coat {number}\nsize 40".encode(), keys=f"o-{number}")
        runner.advance(60_000)
    return broker


def test_letters_are_listed_by_cause_and_key(letters: Broker, shell: Shell) -> None:
    asked = Asked(console(letters, allow_changes=True))
    (numbered, stock) = sorted(asked.table("/group?name=mail", "Dead letters by cause"), key=lambda row: row["letters"])
    assert (numbered["cause"], stock["cause"]) == ("ValueError: no order o-#", "ValueError: no stock")
    (link,) = {
        html.unescape(link)
        for link in re.findall('href="(letters[^"]*cause[^"]*)"', asked.page("/group?name=mail"))
        if "order" in link
    }
    rows = asked.table(f"/{link}", "Dead letters")
    assert [(row["message"], row["cause"], row["topic"], row["body"]) for row in rows] == [
        (f"o-{number}", f"ValueError: no order o-{number}", "orders", f"coat {number} size 40") for number in (6, 3, 0)
    ]
    printed = shell("dead-letters", letters.store.path, "--cause", "no order o-#").rows
    assert len(printed) == 3
    assert [row["message"] for row in asked.table("/letters?group=mail&key=o-7", "Dead letters")] == ["o-7"]
    assert "No letter has this cause or key." in asked.page("/letters?group=mail&cause=unknown")


def test_all_letters_that_match_are_sent_again(letters: Broker) -> None:
    asked = Asked(console(letters, allow_changes=True))
    path = f"/change?what=resend&group=mail&cause={quote('no order o-#')}"
    rows = asked.table(path, "Dead letters that were not sent again")
    assert [(row["message"], row["cause"], row["topic"]) for row in rows] == [
        (f"o-{number}", f"ValueError: no order o-{number}", "orders") for number in (0, 3, 6)
    ]
    (command,) = cells(asked.page(path), "code")
    assert command.endswith("--group mail --resend --cause 'no order o-#'")
    assert asked.submit(path).count(">sent<") == 3
    left = [row["message"] for row in asked.table("/letters?group=mail", "Dead letters") if not row["sent again"]]
    assert left == ["o-8", "o-7", "o-5", "o-4", "o-2", "o-1"]
    assert asked.submit("/change?what=resend&group=mail&key=o-7").count(">sent<") == 1


def test_a_next_step_names_the_button_where_there_is_one(letters: Broker) -> None:
    changing, showing = (Asked(console(letters, allow_changes=allow)).page("/findings") for allow in (True, False))
    assert "from the list behind the name" in changing
    assert "librmq dead-letters STORE" not in changing
    assert "librmq dead-letters STORE" in showing
    by_command = "Where a next step names a command, no page does that."
    assert (by_command in changing, by_command in showing) == (False, True)
    (link, *_) = re.findall('href="(letters[^"]*)"', changing)
    assert Asked(console(letters)).table(f"/{html.unescape(link)}", "Dead letters")


def test_what_is_listed_is_exported(letters: Broker) -> None:
    asked = Asked(console(letters))
    response = asked.get(f"/letters?group=mail&cause={quote('no order')}&export=jsonl")
    assert 'filename="dead-letters-of-mail.jsonl"' in response.headers["Content-Disposition"]
    rows = [json.loads(line) for line in response.text.splitlines()]
    assert [(row["keys"], row["body"], row["original_topic"]) for row in rows] == [
        (f"o-{number}", f"coat {number}\nsize 40", "orders") for number in (6, 3, 0)
    ]
    table = list(csv.DictReader(io.StringIO(asked.get("/topic?name=orders&export=csv").text)))
    assert [row["keys"] for row in table] == [f"o-{number}" for number in range(8, -1, -1)]
    assert asked.get("/topic?name=orders&export=xml").status_code == 400
    hidden = Asked(console(letters, bodies=False))
    assert "coat" not in hidden.get("/letters?group=mail&export=jsonl").text


def test_no_spreadsheet_obeys_an_export(broker: Broker) -> None:
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"=1+1\xff", keys="=HYPERLINK(1)", properties={"note": "\x1b[31m"})
        producer.send("orders", b"=1+1")
    for row in csv.reader(io.StringIO(Asked(console(broker)).get("/topic?name=orders&export=csv").text)):
        assert not any(value.startswith(("=", "+", "-", "@")) or "\x1b" in value for value in row)


def test_what_waits_is_listed_by_kind_topic_and_key(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"a coat", keys="o-1", delay_level=18)
        producer.send("orders", b"a hat", keys="o-2", delay=90_000)
        producer.send("mails", b"a mail", keys="m-1", delay=90_000)
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        remote.runner.clock = runner.clock
        for place in (broker, remote):
            asked = Asked(console(place))
            rows = asked.table("/waiting?topic=orders", "Waiting messages")
            assert [*rows[0]][:2] == ["message", "due"]
            assert [(row["message"], row["kind"], row["body"]) for row in rows] == [
                ("o-1", "delay", "a coat"), ("o-2", "timer", "a hat")
            ]  # fmt: skip
            assert [row["message"] for row in asked.table("/waiting?key=m-", "Waiting messages")] == ["m-1"]
            lines = asked.get("/waiting?kind=timer&export=jsonl").text.splitlines()
            assert {json.loads(line)["stored"]["body"] for line in lines} == {"a hat", "a mail"}


# ---- a message that waits


def ran(page: str, kit: Kit) -> None:
    """Run the test that a message's page offers."""
    program = page.partition("As a test</h2>")[2].partition('<pre tabindex="0">')[2].partition("</pre>")[0]
    names: dict[str, Any] = {}
    exec(html.unescape(program), names)
    names["test_this_message"](kit)


@pytest.mark.parametrize(("level", "delay_s"), [(5, None), (0, 90_000)])
def test_a_delayed_message_says_where_it_goes_and_when(
    broker: Broker, runner: ManualRunner, level: int, delay_s: int | None
) -> None:
    message = Message("orders", b"later", keys="o-1", tags="a", delay_level=level, delay=delay_s)
    with Producer(broker, "shop") as producer:
        sent = producer.send(message)
    asked = Asked(console(broker, allow_changes=True))
    page = asked.page(f"/message?id={sent.message_id}")
    shown = facts(page)
    assert (shown["topic"], "waits in" in shown["due"], "<h1>o-1</h1>" in page) == ("orders", True, True)
    (row,) = asked.table("/waiting", "Waiting messages")
    assert shown["due"].startswith(row["due"])
    (before,) = asked.table(f"/change?what=cancel&id={sent.message_id}", "Message")
    assert (before["message"], before["topic"], before["due"]) == ("o-1", "orders", row["due"])
    with Kit() as kit:
        ran(page, kit)
        assert [message.body for message in kit.broker.messages("orders")] == [b"later"]
    runner.advance(100_000_000)
    assert facts(asked.page(f"/message?id={sent.message_id}"))["was due"] == row["due"]


def test_a_half_says_whose_decision_it_waits_for(broker: Broker, runner: ManualRunner) -> None:
    own = Asked(console(broker)).table("/group?name=CID_RMQ_SYS_TRANS", "Own group of the broker")
    assert own == [{"see": "Waiting"}]
    state = [TransactionState.UNKNOWN]
    producer = TransactionProducer(broker, "shop", lambda message: state[0], execute=lambda message, value: state[0])
    with producer:
        sent = producer.send_in_transaction(Message("orders", b"a coat", keys="o-1"))
        asked = Asked(console(broker))
        page = asked.page(f"/message?id={sent.message_id}")
        assert facts(page)["topic"] == "orders"
        assert facts(page)["waits for"] == "a decision of producer group shop, to commit or to roll back"
        with Kit() as kit:
            ran(page, kit)
            assert [message.body for message in kit.broker.messages("orders")] == [b"a coat"]
        state[0] = TransactionState.COMMIT
        runner.advance(120_000)
        assert facts(asked.page(f"/message?id={sent.message_id}"))["transaction"] == "committed"
        assert "group?name=CID_RMQ_SYS_TRANS" not in asked.page("/topic?name=RMQ_SYS_TRANS_HALF_TOPIC")


# ---- what counts


def test_the_retries_of_a_group_are_those_of_its_instances(broker: Broker) -> None:
    broker.create_topic("orders", 1)
    consumer = PushConsumer(broker, "mail", max_reconsume_times=1)
    consumer.subscribe("orders", refuse)
    with consumer, RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        for place in (broker, remote):
            shown = facts(Asked(console(place)).page("/group?name=mail"))
            assert shown["retries"] == "1 before a dead letter; the group has 16"


def test_the_groups_of_a_topic_have_their_lag(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    broker.set_group("stock")
    broker.reset_group("stock", "orders", "end")
    for place in (broker, broker.store.path):
        rows = {row["group"]: row["lag"] for row in Asked(console(place)).table("/topic?name=orders", "Groups")}
        assert (rows["billing"], rows["stock"]) == ("8", "0")


def test_the_overview_begins_with_what_is_wrong(broker: Broker, runner: ManualRunner) -> None:
    asked = Asked(console(broker))
    assert 'id="verdict"' not in asked.page("/")
    shop(broker, runner)
    runner.advance(60_000)
    (said,) = re.findall('id="verdict">(.*?)</p>', asked.page("/"))
    assert re.fullmatch(
        r"\d warnings. Look first at group billing: 8 messages wait .*, the oldest since 20.*\.", said
    ), said


def test_one_is_not_several(broker: Broker) -> None:
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"one", queue=MessageQueue("orders", broker.name, 0))
    page = Asked(console(broker)).page("/topic?name=orders")
    assert facts(page)["messages"] == "1 in 1 queue"
    assert "1 message in the last three hours" in page
    broker.set_group("billing")
    broker.reset_group("billing", "orders", "begin")
    assert "1 message waits in 1 queue, and" in "".join(finding.what for finding in diagnose(broker))


def test_the_first_look_does_not_decide_how_seldom_a_page_is_renewed(broker: Broker, runner: ManualRunner) -> None:
    clock = runner.clock
    asked = Asked(console(broker))
    looks = iter((40.0, 0.0))

    class Cold:
        """A clock by which the first look takes 40 seconds."""

        def __init__(self) -> None:
            self.end = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(clock, name)

        def monotonic(self) -> float:
            self.end += next(looks, 0.0)
            return self.end

    broker.runner.clock = Cold()
    assert cells(asked.page("/topics"), "p")
    assert 'data-live="5"' in asked.page("/topics")
