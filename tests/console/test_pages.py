"""The pages show the numbers that the commands print, at each place, and nothing that could run."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import lz4.frame
import pytest
import zstandard

from librmq import (
    Broker,
    Cluster,
    ConsumeFrom,
    ManualRunner,
    Message,
    MessageQueue,
    Producer,
    PushConsumer,
    StoreConfig,
    TransactionProducer,
    TransactionState,
    connect,
    share,
)
from librmq.broker import AdministeredRoute
from librmq.console import _pages as pages
from librmq.diagnosis import view as diagnosis_view
from librmq.errors import BrokerUnreachableError
from librmq.files import MemoryFiles
from librmq.java.json import NumberColumns, NumberRows
from librmq.message.record import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZLIB, COMPRESSION_ZSTD, compress_body
from librmq.protocol import ConsumerData, Heartbeat, MessageModel, SendMessage, Subscription, UpdateOffset
from librmq.store import BrokerTables
from librmq.testing import Kit
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell
from tests.clocks import SlowClock
from tests.console.pages import MARKUP, Asked, console, facts, shop
from tests.wire.test_connect import until

ADDRESSES = ("/", "/topics", "/topic?name=orders", "/groups", "/group?name=mail", "/letters?group=mail")


def test_a_folder_shows_what_the_commands_print(tmp_path: Path, shell: Shell) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        sent = shop(broker, runner)
    asked = Asked(console(tmp_path / "store"))
    topics = {row["topic"]: row for row in asked.table("/topics", "Topics")}
    for row in shell("topics", tmp_path / "store").rows:
        shown = topics[row["topic"]]
        assert (shown["kind"], shown["queues"], shown["messages"]) == (
            row["kind"], str(row["queues"]), str(row["messages"])
        )  # fmt: skip
    groups = {row["group"]: row for row in asked.table("/groups", "Groups")}
    for row in shell("groups", tmp_path / "store").rows:
        shown = groups[row["group"]]
        assert (shown["lag"], shown["dead letters"]) == (str(row["lag"]), str(row["dead_letters"]))
    lags = [row for row in shell("lag", tmp_path / "store", "--group", "billing").rows if row["topic"] == "orders"]
    queues = asked.table("/group?name=billing", "Queues")
    assert [(row["queue"], row["lag"], row["end"]) for row in queues if row["topic"] == "orders"] == [
        (str(row["queue_id"]), str(row["lag"]), str(row["max_offset"])) for row in lags
    ]
    events = [row["event"] for row in asked.table(f"/message?id={sent[1]}", "Story")]
    assert events == [row["event"] for row in shell("story", tmp_path / "store", sent[1]).rows]
    letters = asked.table("/group?name=mail", "Dead letters by cause")
    assert [(row["cause"], row["letters"]) for row in letters] == [("ValueError: no order o-#", "4")]
    findings = shell("diagnose", tmp_path / "store").rows
    assert [row["what"] for row in asked.findings("/findings")] == [
        row["what"] for row in findings if row["finding"] != "not-verified"
    ]


def test_the_same_pages_at_each_place(tmp_path: Path, broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    here = Asked(console(broker))
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        there = Asked(console(remote))
        for address, title in (
            ("/groups", "Groups"),
            ("/topic?name=orders", "Queues"),
            ("/letters?group=mail", "Dead letters"),
        ):
            columns = ("group", "lag", "dead letters", "queue", "messages", "message", "cause")
            rows = [
                [{name: row[name] for name in columns if name in row} for row in asked.table(address, title)]
                for asked in (here, there)
            ]
            assert rows[0] == rows[1]


def test_letters_that_were_sent_again_wait_no_more(tmp_path: Path, broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    broker.resend_dead_letters("mail", broker.dead_letters("mail")[:3])
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        for place, dead, resent in ((broker, "1", "3"), (tmp_path / "store", "1", "3"), (remote, "4", "unknown")):
            asked = Asked(console(place))
            for address in ("/", "/groups"):
                rows = {row["group"]: row for row in asked.table(address, "Groups")}
                assert (rows["mail"]["dead letters"], rows["mail"]["sent again"]) == (dead, resent)
            assert facts(asked.page("/group?name=mail"))["dead letters"].startswith(dead)
        beside = diagnosis_view.ClusterView(remote, str(tmp_path / "store"))
        assert diagnosis_view.count_dead_letters(beside, "mail") == (1, 3)
    asked = Asked(console(broker))
    assert [
        (row["letters"], row["sent again"]) for row in asked.table("/group?name=mail", "Dead letters by cause")
    ] == [("1", "3")]
    assert "3 more were sent again" in asked.page("/")
    assert broker.resend_dead_letters("mail") == 1
    assert not [row for row in asked.findings("/findings") if "dead letter" in row["what"]]


def test_what_a_cluster_answers_without_its_log(broker: Broker, runner: ManualRunner) -> None:
    sent = shop(broker, runner)
    with Producer(broker, "shop") as producer:
        late = producer.send("orders", b"later", delay_level=9).message_id
        timed, *cancelled = (producer.send("orders", b"much later", delay=90_000).message_id for _ in range(2))
        assert broker.cancel(cancelled[0]).cancelled
    here = Asked(console(broker))
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        # What waits depends on the time, which the route takes from its own machine's clock.
        remote.runner.clock = broker.runner.clock
        there = Asked(console(remote))
        columns = ("time", "event", "topic", "queue / offset")
        for message_id in (*sent[:2], late, timed):
            stories = [
                [tuple(row[name] for name in columns) for row in asked.table(f"/message?id={message_id}", "Story")]
                for asked in (here, there)
            ]
            assert sorted(stories[0]) == sorted(stories[1])
        assert "need the log" in there.page(f"/message?id={late}")
        rows = [
            [
                (row["kind"], row["topic"], row["due"], row["message"])
                for row in asked.table("/waiting", "Waiting messages")
            ]
            for asked in (here, there)
        ]
        assert rows[0] == rows[1]
        assert [row[0] for row in rows[0]] == ["delay", "timer"]
        assert there.table("/waiting?kind=timer", "Waiting messages")
        assert "Halves, the relay and POP need the log" in there.page("/waiting")
        findings = [(row["about"], row["what"]) for row in there.findings("/findings")]
        assert findings[:2] == [
            ("group billing", "8 messages wait in 2 queues, and the group has no running instance."),
            ("group mail, topic orders", "4 dead letters: ValueError: no order o-#."),
        ]
        assert [(about, "Not asked for" in what) for about, what in findings[2:]] == [("cluster broker-a", True)]
        assert "slider" not in there.page("/")
        assert "machine of the broker" in there.get("/?at=1700000000000").text


def test_a_shared_store_and_a_cluster(tmp_path: Path, runner: ManualRunner) -> None:
    with share(tmp_path / "shared") as shared:
        shared.create_topic("orders", 1)
        with Producer(shared, "shop") as producer:
            message_id = producer.send("orders", b"one").message_id
        asked = Asked(console(shared))
        assert [row["messages"] for row in asked.table("/topic?name=orders", "Queues")] == ["1"]
        assert [row["event"] for row in asked.table(f"/message?id={message_id}", "Story")] == ["stored"]
    with Broker.temporary(name="a", runner=runner) as first, Broker.temporary(name="b", runner=runner) as second:
        cluster = Cluster(first, second)
        cluster.create_topic("orders", 1)
        rows = Asked(console(cluster)).table("/topic?name=orders", "Queues")
        assert [row["queue"] for row in rows] == ["a 0", "b 0"]


def test_a_share_whose_owner_has_ended_is_shown_as_it_was_saved(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    folder = broker.store.path
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        asked, bare = Asked(console(remote, folder=folder)), Asked(console(remote))
        changing = Asked(console(remote, folder=folder, allow_changes=True))
        assert "Show the skip" in changing.page("/group?name=mail")
        addresses = (*ADDRESSES, "/waiting", "/findings")
        assert not any("does not answer" in asked.page(address) for address in addresses)
        broker.close()
        server.close()
        for address in addresses:
            page = asked.page(address)
            assert page.count("this page is that of the folder, as it was last saved") == 1, address
        assert {row["group"]: row["lag"] for row in asked.table("/groups", "Groups")}["billing"] == "8"
        assert bare.get("/topics").status_code == 400
        for address in ("/group?name=mail", "/letters?group=mail", "/waiting"):
            page = changing.page(address)
            assert ("Nothing can be changed until it answers" in page, 'action="change"' in page) == (True, False)


def test_findings_of_a_share_that_has_not_saved_yet_know_its_progress(tmp_path: Path) -> None:
    with share(tmp_path / "shared") as shared:
        shared.create_topic("orders", 1)
        shared.set_group("mail")
        with Producer(shared, "shop") as producer:
            producer.send("orders", b"x")
        shared.reset_group("mail", "orders", "begin")
        asked = Asked(console(shared))
        for page in ("/", "/findings"):
            assert "progress of groups is unknown" not in asked.page(page)


def test_what_a_finding_is_about_leads_to_its_page(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    page = Asked(console(broker)).page("/findings")
    assert '<a href="group?name=billing">group billing</a>' in page
    letters = "letters?group=mail&amp;cause=ValueError%3A+no+order+o-%23"
    assert f'<a href="{letters}">group mail, topic orders</a>' in page


def test_a_rate_that_is_not_there_says_why(tmp_path: Path, runner: ManualRunner) -> None:
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        shop(broker, runner)
        asked = Asked(console(broker))
        assert "rates come with the second look" in asked.page("/")
        runner.advance(10_000)
        page = asked.page("/")
        assert "in the last minute" in page
        assert '<svg class="line"' in page
        assert " style=" not in page  # the page's own header forbids it
        assert "in the last minute" in asked.page("/group?name=mail")
        first = broker.runner.now_ms() - 1_000
        assert "a past moment has no rates" in asked.page(f"/?at={first}")
    assert "no process has the store open" in Asked(console(tmp_path / "store")).page("/")


def test_what_brokers_answer_is_shown_although_the_folder_is_wrong(broker: Broker, tmp_path: Path) -> None:
    broker.create_topic("orders", 1)
    asked = Asked(console(Cluster(broker), folder=str(tmp_path / "nowhere")))
    assert [row["topic"] for row in asked.table("/topics", "Topics")] == ["orders"]
    assert "No past moments: " in asked.page("/topics")
    assert asked.get("/topics?at=1700000000000").status_code == 400


def test_a_topic_says_what_its_log_keeps(tmp_path: Path, runner: ManualRunner) -> None:
    config = StoreConfig(file_reserved_hours=5, max_total_size=1 << 30, keep_unconsumed=False)
    with Broker.open(tmp_path / "store", runner=runner, store_config=config) as broker:
        shop(broker, runner)
        with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
            assert facts(Asked(console(remote)).page("/topic?name=orders"))["kept"].startswith("unknown")
            shown = [Asked(console(place)).page("/topic?name=orders") for place in (broker, tmp_path / "store")]
            shown.append(Asked(console(remote, folder=broker.store.path)).page("/topic?name=orders"))
    assert {facts(page)["kept"] for page in shown} == {"5 hours at most 1.0 GiB of log; unconsumed messages go as well"}


def test_messages_are_found_by_key_tag_sql_and_time(broker: Broker, runner: ManualRunner) -> None:
    begin_ms = runner.now_ms()
    shop(broker, runner)
    asked = Asked(console(broker))

    def keys(form: str) -> list[str]:
        return sorted(row["message"] for row in asked.table(f"/topic?name=orders&{form}", "Messages"))

    assert keys("key=o-3") == ["o-3"]
    assert keys("tag=new") == ["o-0", "o-2", "o-4", "o-6"]
    assert keys("sql=amount+%3E+50") == ["o-6", "o-7"]
    assert keys(f"since={begin_ms + 1}") == []
    assert len(keys(f"until={begin_ms + 1}")) == 8
    wrong = asked.get("/topic?name=orders&sql=amount+%3E")
    assert (wrong.status_code, "amount &gt;" in wrong.text) == (400, True)
    assert asked.get("/topic?name=orders&since=yesterday").status_code == 400
    assert asked.get("/topic?name=nowhere").status_code == 400


def test_many_topics_come_in_parts(broker: Broker) -> None:
    for number in range(120):
        broker.create_topic(f"topic-{number:03}", 1)
    asked = Asked(console(broker))
    assert len(asked.table("/topics", "Topics")) == 100
    assert "topics?from=100" in asked.page("/topics")
    assert len(asked.table("/topics?from=100", "Topics")) == 20
    assert [row["topic"] for row in asked.table("/topics?q=topic-11", "Topics")] == [
        f"topic-{number}" for number in range(110, 120)
    ]


def test_a_message_as_a_test_sends_a_message_like_it(broker: Broker, runner: ManualRunner) -> None:
    sent = shop(broker, runner)
    page = Asked(console(broker)).page(f"/message?id={sent[3]}")
    program = page.partition("As a test</h2>")[2].partition('<pre tabindex="0">')[2].partition("</pre>")[0]
    names: dict[str, object] = {}
    exec(html.unescape(program), names)
    with Kit() as kit:
        names["test_this_message"](kit)  # type: ignore[operator]
        (again,) = kit.broker.messages("orders")
    original = next(message for message in broker.messages("orders") if message.message_id == sent[3])
    assert (again.body, again.keys, again.tags) == (original.body, original.keys, original.tags)
    assert again.properties["amount"] == original.properties["amount"]


def test_a_story_as_it_was(broker: Broker, runner: ManualRunner) -> None:
    begin_ms = runner.now_ms()
    sent = shop(broker, runner)
    asked = Asked(console(broker))
    assert "dead" in [row["event"] for row in asked.table(f"/message?id={sent[1]}", "Story")]
    then = [row["event"] for row in asked.table(f"/message?id={sent[1]}&at={begin_ms + 1000}", "Story")]
    assert "dead" not in then
    assert then[0] == "stored"


def test_a_past_moment_is_what_the_commands_print_of_it(tmp_path: Path, shell: Shell) -> None:
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        then_ms = runner.now_ms()
        sent = shop(broker, runner)
        assert broker.dead_letters("mail")
        then = f"at={then_ms + 1}"
        when = datetime.fromtimestamp((then_ms + 1) / 1000, UTC).isoformat()
        for place in (broker, tmp_path / "store"):
            asked = Asked(console(place, allow_changes=True))
            topics = {row["topic"]: row["messages"] for row in asked.table(f"/topics?{then}", "Topics")}
            printed = shell("topics", tmp_path / "store", "--at", when).rows
            assert topics == {row["topic"]: str(row["messages"]) for row in printed}
            assert topics["orders"] == "8"
            groups = {row["group"]: row["dead letters"] for row in asked.table(f"/groups?{then}", "Groups")}
            assert groups["mail"] == "0"
            assert len(asked.table(f"/topic?name=orders&{then}", "Messages")) == 8
            assert next(row["event"] for row in asked.table(f"/message?id={sent[1]}&{then}", "Story")) == "stored"
            for address in (*ADDRESSES, "/waiting", "/findings", f"/message?id={sent[1]}"):
                page = asked.page(f"{address}{'&' if '?' in address else '?'}{then}")
                assert "As the log was at" in page
                assert "data-live" not in page
                assert "change?" not in page
                assert 'action="change"' not in page
                links = re.findall(r'href="([a-z./]+(?:\?[^"]*)?)"', page)
                links = [link for link in links if link not in ("icon.svg", "console.css")]
                assert [link for link in links if then not in link] == []
                now = re.search(r'href="(\?[^"]*)">Back to now', page)
                assert now is not None
                assert "data-live" in asked.page(address) or address.startswith(("/findings", "/message"))


def test_the_form_of_the_past_reaches_from_the_first_message_to_now() -> None:
    with Kit() as kit:
        asked = Asked(kit.console())
        assert "slider" not in asked.page("/")
        kit.producer().send("orders", b"one")
        first_ms = kit.clock.now_ms()
        kit.advance(hours=1)
        kit.producer().send("orders", b"two")
        page = asked.page("/topic?name=orders&tag=a&page=x")
        bounds = re.search(r'id="slider"[^>]* min="(\d+)" value="(\d+)" max="(\d+)"', page)
        assert bounds is not None
        assert [int(bound) for bound in bounds.groups()] == [first_ms, first_ms + 3_600_000, first_ms + 3_600_000]
        assert '<input type="hidden" name="tag" value="a">' in page
        (message,) = asked.table(f"/topic?name=orders&at={first_ms}", "Messages")
        assert message["body"] == "one"
        for wrong in ("yesterday", first_ms - 1, "0001-01-01"):
            assert asked.get(f"/topics?at={wrong}").status_code == 400


@pytest.mark.parametrize(
    ("at", "status"),
    [
        ("0001-01-01T00:00%2B14:00", 400),
        ("9999-12-31T23:59-14:00", 400),
        ("9999-12-31T23:59:59.9999", 200),
        ("99999999999999", 200),
    ],
)
def test_a_moment_at_the_end_of_the_calendar(broker: Broker, runner: ManualRunner, at: str, status: int) -> None:
    shop(broker, runner)
    assert Asked(console(broker)).get(f"/topics?at={at}").status_code == status


def test_the_overview_says_what_flows_and_what_waits(
    broker: Broker, runner: ManualRunner, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop(broker, runner)
    asked = Asked(console(broker))
    assert facts(asked.page("/"))["consumed"].startswith("unknown")
    with Producer(broker, "shop") as producer:
        for _ in range(2):
            producer.send("orders", b"later", delay_level=18)
        producer.send("orders", b"later", delay=90_000)
    broker.reset_group("billing", "orders", "end")
    runner.advance(4_000)
    shown = facts(asked.page("/"))
    assert (shown["consumed"], shown["waiting"]) == (
        "2 a second in the last minute, while the overview was open", "3 2 delays, 1 timer",
    )  # fmt: skip
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        remote.runner.clock = runner.clock
        assert facts(Asked(console(remote, folder=broker.store.path)).page("/"))["waiting"] == shown["waiting"]
        assert facts(Asked(console(remote)).page("/"))["waiting"].startswith("at least 3 2 delays, 1 timer; ")
    monkeypatch.setattr(pages, "_FEW", 0)
    assert "this store is large: the page Waiting" in facts(asked.page("/"))["waiting"]
    monkeypatch.undo()
    broker.close()
    printed = shell("pending", broker.store.path).rows
    assert facts(Asked(console(broker.store.path)).page("/"))["waiting"].startswith(f"{len(printed)} ")


def test_hidden_bodies_are_on_no_page(broker: Broker) -> None:
    with Producer(broker, "shop") as producer:
        message_id = producer.send("orders", b"a secret body", keys="k").message_id
    asked = Asked(console(broker, bodies=False))
    for address in ("/", "/topic?name=orders", "/topic?name=orders&key=k", f"/message?id={message_id}"):
        assert "a secret body" not in asked.page(address)
    assert "a secret body" in Asked(console(broker)).page("/topic?name=orders")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "&#34;é&#34;"),
        ("größer".encode(), "größer"),
        (b"\x80\x04cos\nsystem\n", "8004636f 730a7379"),
        (b"\xff\x00\x01\x02\x03", "ff000102 03"),
    ],
)
def test_a_body_is_shown_as_what_it_is(broker: Broker, body: bytes, shown: str) -> None:
    with Producer(broker, "shop") as producer:
        message_id = producer.send("orders", body).message_id
    assert shown in Asked(console(broker)).page(f"/message?id={message_id}")


@pytest.mark.parametrize("kind", [COMPRESSED, COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD])
@pytest.mark.parametrize("character", ["é", "\xff"], ids=["text", "bytes"])
def test_the_beginning_of_a_large_body_is_shown_with_all_else(broker: Broker, kind: int, character: str) -> None:
    encoding = "utf-8" if character == "é" else "latin-1"
    body = ("x" + 70_000 * character).encode(encoding)
    compress = {COMPRESSION_LZ4: lz4.frame.compress, COMPRESSION_ZSTD: zstandard.ZstdCompressor().compress}
    message = Message("orders", compress.get(kind, compress_body)(body), keys="o-1", properties={"amount": "1"})
    broker.create_topic("orders", 1)
    broker.call(SendMessage("shop", message, 0, 1, ("127.0.0.1", 1), COMPRESSED | kind))
    asked, address = Asked(console(broker)), "/message?topic=orders&queue=0&offset=0"
    assert [row["event"] for row in asked.table(address, "Story")] == ["stored"]
    assert {"name": "amount", "value": "1"} in asked.table(address, "Properties")
    page = html.unescape(asked.page(address))
    assert f"Only the first {'64 KiB' if character == 'é' else '4.0 KiB'} are shown." in page
    assert ("x" + 32_767 * "é" + "</pre>" if character == "é" else "78ffffff ffffffff") in page
    assert "of 2,048 bytes" in page
    assert asked.table("/topic?name=orders", "Messages")[0]["body"].startswith("xé" if character == "é" else "")


def test_a_body_that_cannot_be_read_hides_nothing_else(broker: Broker) -> None:
    broker.create_topic("orders", 1)
    broker.call(SendMessage("shop", Message("orders", b"not compressed"), 0, 1, ("127.0.0.1", 1), COMPRESSED))
    asked, address = Asked(console(broker)), "/message?topic=orders&queue=0&offset=0"
    assert [row["event"] for row in asked.table(address, "Story")] == ["stored"]
    assert "zlib body: " in asked.page(address)
    assert "As a test" not in asked.page(address)


def test_markup_is_text_on_every_page(broker: Broker, runner: ManualRunner) -> None:
    """Topics and groups have narrow names at a broker; everything else is free."""
    message = Message("orders", MARKUP.encode(), tags=MARKUP, keys="k")
    message.properties.update({"KEYS": MARKUP, "<b>x": MARKUP, "hidden": "\x1b[31m\u202e"})
    with Producer(broker, "shop") as producer:
        message_id = producer.send(message).message_id
    broker.set_group("mail", retry_max_times=0)

    def fail(_: object) -> None:
        raise ValueError(MARKUP)

    consumer = PushConsumer(broker, "mail", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", fail)
    with consumer:
        runner.advance(60_000)
    asked = Asked(console(broker, allow_changes=True))
    given = "%3Cscript%3Ealert"
    pages = ["/topics?q=", "/topic?name=", "/topic?name=orders&key=", "/change?what=", "/nowhere", "/message?id="]
    addresses = [*ADDRESSES, "/findings", "/waiting", "/change?what=resend&group=mail", f"/message?id={message_id}"]
    for address in (*addresses, *(f"{page}{given}" for page in pages)):
        text = asked.get(address).text
        assert "<script>alert" not in text, address
        assert "<b>x" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "&lt;script&gt;alert(1)" in asked.page(f"/message?id={message_id}")


def test_the_kit_shows_its_moved_clock() -> None:
    with Kit() as kit:
        kit.producer().send("orders", b"later", delay=86_400)
        asked = Asked(kit.console())
        assert [row["topic"] for row in asked.table("/waiting", "Waiting messages")] == ["orders"]
        kit.advance(hours=25)
        assert asked.table("/topic?name=orders", "Queues")
        assert "Nothing waits" in asked.page("/waiting")


def test_a_page_that_takes_long_shows_itself_again_later(tmp_path: Path) -> None:
    with Kit() as kit:
        page = Asked(kit.console()).page("/groups")
        assert 'data-live="5"' in page
        assert "takes long" not in page
    with Broker.open(tmp_path / "store", runner=ManualRunner(SlowClock())) as broker:
        page = Asked(console(broker)).page("/groups")
        assert 'data-live="30"' in page
        assert "only every 30 s" in page


def test_findings_of_a_large_store_are_looked_for_on_request(runner: ManualRunner) -> None:
    broker = Broker.open("/store", runner=runner, files=MemoryFiles())
    broker.create_topic("orders", 513)
    with broker, Producer(broker, "shop") as producer:
        for queue_id in range(513):
            producer.send("orders", b"x", queue=MessageQueue("orders", broker.name, queue_id))
        asked = Asked(console(broker))
        assert "on request" in asked.page("/")
        page = asked.page("/findings")
        assert "513 messages in 513 queues" in page
        assert "<table" not in page
        assert 'name="look" value="1"' in page
        assert "Nothing needs attention" in asked.page("/findings?look=1") or asked.findings("/findings?look=1")


def test_progress_of_many_groups_is_read_again_once_it_has_changed(
    tmp_path: Path, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are made once for each change, of a broker in the process and of a folder."""
    monkeypatch.setattr(diagnosis_view, "_FEW", 0)
    monkeypatch.setattr(pages, "_FEW", 0)  # findings read rows
    made: list[str] = []
    of, read = NumberColumns.of, NumberRows.columns

    def of_rows(rows: dict[str, dict[int, int]], earlier: NumberColumns | None) -> NumberColumns:
        made.append("rows")
        return of(rows, earlier)

    def of_file(rows: NumberRows) -> NumberColumns:
        made.append("file")
        return read(rows)

    monkeypatch.setattr(NumberColumns, "of", of_rows)
    monkeypatch.setattr(NumberRows, "columns", of_file)

    def lags(asked: Asked) -> list[tuple[str, str]]:
        rows = [asked.table(page, "Groups") for page in ("/", "/groups", "/")]
        assert all([(row["group"], row["lag"]) for row in looked] == shown(rows[0]) for looked in rows)
        return shown(rows[0])

    def shown(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
        return [(row["group"], row["lag"]) for row in rows]

    folder, asked_folder = tmp_path / "store", Asked(console(tmp_path / "store"))
    with Broker.open(folder, runner=runner) as broker:
        broker.create_topic("orders", 1)
        broker.create_topic("letters", 1)
        with Producer(broker, "shop") as producer:
            for topic in ("orders", "orders", "letters"):
                producer.send(topic, b"x")
        broker.set_group("mail")
        broker.reset_group("mail", "orders", "begin")
        asked = Asked(console(broker))
        assert lags(asked) == [("mail", "2")]
        assert made == ["rows"]
        broker.reset_group("mail", "orders", "end")
        assert lags(asked) == [("mail", "0")]
        broker.reset_group("mail", "letters", "begin")
        assert lags(asked) == [("mail", "1")]
        broker.delete_group("mail", keep_progress=False)
        broker.set_group("bill")
        broker.reset_group("bill", "orders", "begin")
        assert lags(asked) == [("bill", "2")]
        consumer = PushConsumer(broker, "late", consume_from=ConsumeFrom.LAST)
        consumer.subscribe("orders", lambda _: None)
        with consumer:
            assert "late" in dict(lags(asked))
    made.clear()
    assert dict(lags(asked_folder))["bill"] == "2"
    assert made == ["file"]
    with Broker.open(folder, runner=runner) as broker:
        broker.reset_group("bill", "orders", "end")
    assert dict(lags(asked_folder))["bill"] == "0"
    assert made == ["file", "file"]


@pytest.mark.slow
def test_many_groups_are_added_up_as_the_command_does(tmp_path: Path, shell: Shell) -> None:
    """Their progress is read as columns, by which the groups, the lag and the story of a message go."""
    with Broker.open(tmp_path / "store", runner=ManualRunner()) as broker:
        broker.create_topic("orders", 4)
        with Producer(broker, "shop") as producer:
            sent = [
                producer.send("orders", b"x", queue=MessageQueue("orders", broker.name, number % 4)).message_id
                for number in range(8)
            ]
    tables = BrokerTables.open(str(tmp_path / "store" / "config"))
    for number in range(2_600):
        tables.offsets.set(f"orders@g{number}", dict.fromkeys(range(4), number % 3))
    tables.persist(1)
    with Broker.open(tmp_path / "store", runner=ManualRunner()) as broker:
        of_broker = Asked(console(broker)).table("/groups?from=200", "Groups")
    asked = Asked(console(tmp_path / "store"))
    assert asked.table("/groups?from=200", "Groups") == of_broker
    printed = {row["group"]: str(row["lag"]) for row in shell("groups", tmp_path / "store").rows}
    assert len(of_broker) == 100
    assert [row["lag"] for row in of_broker] == [printed[row["group"]] for row in of_broker]
    worst = asked.table("/", "Groups")
    assert {row["lag"] for row in worst} == {"8"}
    assert [row["progress"] for row in asked.table("/group?name=g4", "Queues")] == ["1"] * 4
    ends = [row["event"] for row in asked.table(f"/message?id={sent[0]}", "Story")]
    assert (ends.count("passed"), ends.count("stored")) == (sum(number % 3 > 0 for number in range(2_600)), 1)


def test_names_of_a_foreign_folder_are_text(tmp_path: Path) -> None:
    """The tables of a folder can have names that no broker takes."""
    runner = ManualRunner()
    with Broker.open(tmp_path / "store", runner=runner) as broker:
        shop(broker, runner)
    tables = BrokerTables.open(str(tmp_path / "store" / "config"))
    tables.set_topic(MARKUP, read_queues=1, write_queues=1, permission=6)
    tables.set_group(MARKUP, retry_max_times=1)
    tables.offsets.set(f"orders@{MARKUP}", {0: 1})
    tables.offsets.set(f"{MARKUP}@mail", {0: 1})
    tables.persist(1)
    asked, name = Asked(console(tmp_path / "store")), quote(MARKUP)
    pages = [f"/topic?name={name}", f"/group?name={name}", f"/letters?group={name}", "/group?name=mail"]
    for address in ("/", "/topics", "/groups", "/waiting", "/findings", *pages):
        text = asked.page(address)
        assert "<script>alert" not in text, address
        assert "&lt;script&gt;alert" in text or address == "/waiting", address


def test_a_client_and_its_subscription_are_text(broker: Broker) -> None:
    consumer = PushConsumer(broker, "mail", instance_name=MARKUP)
    consumer.subscribe("orders", lambda message: None, sql="note = '<script>alert(1)</script>'")
    with consumer:
        text = Asked(console(broker)).page("/group?name=mail")
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") >= 2


def test_a_group_shows_its_settings_and_who_has_each_queue(broker: Broker, runner: ManualRunner) -> None:
    broker.create_topic("orders", 2)
    broker.set_group("mail", retry_max_times=3, is_ordered=True)
    consumer = PushConsumer(broker, "mail", consume_from=ConsumeFrom.FIRST, threads=3)
    consumer.subscribe("orders", lambda message: None)
    with consumer, Producer(broker, "shop") as producer:
        runner.advance(1_000)
        for queue_id in range(2):
            producer.send("orders", b"one", queue=MessageQueue("orders", broker.name, queue_id))
        runner.advance(10_000)
        here, address = Asked(console(broker)), "/group?name=mail"
        queues = [row for row in here.table(address, "Queues") if row["topic"] == "orders"]
        (instance,) = here.table(address, "Instances")
        assert [(row["lag"], row["instance"]) for row in queues] == [("0", instance["instance"])] * 2
        assert (instance["threads"], instance["busy"], instance["queues"], instance["lag"]) == ("3", "0", "3", "0")
        settings = {row["setting"]: row["value"] for row in here.table(address, "Settings")}
        assert settings | {"retries": "3", "ordered": "yes", "consumes": "yes", "consume from": "first"} == settings
        with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
            there = Asked(console(remote))
            for title in ("Queues", "Instances"):
                rows = [
                    [row for row in asked.table(address, title) if row.get("topic") != "%RETRY%mail"]
                    for asked in (here, there)
                ]
                waits_for = {row.pop("waits for", "-") for row in rows[0]}
                assert waits_for == {"" if title == "Queues" else "-"}  # what a listener has, a request does not say
                assert rows[0] == rows[1]
            assert {row["setting"]: row["value"] for row in there.table(address, "Settings")} == settings
        broker.set_group("mail", consumes=False)
        assert "no: suspended" in here.page(address)
    broker.close()
    at_rest = Asked(console(broker.store.path)).page(address)
    assert "no: suspended" in at_rest
    assert facts(at_rest)["retries"].startswith("3 ")


def test_what_was_not_asked_for_does_not_read_as_none(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half, a resent letter, a second group, a finding of the log: no request to a broker asks for them."""
    shop(broker, runner)
    broker.resend_dead_letters("mail")
    with TransactionProducer(broker, "till", lambda _: TransactionState.UNKNOWN) as producer:
        producer.send_in_transaction(Message("orders", b"one"), execute=lambda message, _: TransactionState.UNKNOWN)
    here = Asked(console(broker))
    assert facts(here.page("/"))["waiting"].startswith("1 ")
    assert all(row["sent again"] for row in here.table("/letters?group=mail", "Dead letters"))
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        remote.runner.clock = broker.runner.clock
        there = Asked(console(remote))
        assert facts(there.page("/"))["waiting"] == "unknown not asked for: halves, the relay, what POP holds"
        for kind in ("half", "given_up", "pop"):
            for address in ("/waiting", f"/waiting?kind={kind}"):
                page = there.page(address)
                assert (facts(page)[kind], "Nothing waits" in page) == ("unknown not asked for", False)
        page = there.page("/letters?group=mail")
        assert ("sent again<" in page, "do not note which were sent again" in page) == (False, True)
        monkeypatch.setattr(pages, "ROWS", 1)
        shown = facts(there.page("/"))
        assert shown["wait for a group"].endswith("of the first 1 of 2 groups")
        assert "of the first 1 of 2 groups; with those that were sent again" in shown["dead letters"]
        page = there.page("/findings")
        assert "Not asked for: 1 group more," in page
        broker.reset_group("billing", "orders", "end")
        page = there.page("/findings")
        assert ("Nothing needs attention" in page, "Not asked for" in page) == (False, True)


def test_a_share_says_which_letters_were_sent_again(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "store", runner=ManualRunner()) as broker:
        assert isinstance(broker.runner, ManualRunner)
        shop(broker, broker.runner)
        broker.resend_dead_letters("mail")
    with share(tmp_path / "store") as shared:
        letters = Asked(console(shared)).table("/letters?group=mail", "Dead letters")
    assert [bool(row["sent again"]) for row in letters] == [True] * 4


def test_a_folder_without_tables_says_what_is_unknown(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    broker.close()
    folder = Path(broker.store.path)
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (folder / "config" / name).unlink(missing_ok=True)
    asked = Asked(console(folder))
    for address in ("/", "/groups", "/group?name=mail"):
        assert "the progress of groups is unknown" in asked.page(address)
    shutil.rmtree(folder / "config")
    shutil.rmtree(folder / "librmq")
    for name in ("%RETRY%mail", "%DLQ%mail"):
        shutil.rmtree(folder / "consumequeue" / name)
    assert "the progress of no group is known" in Asked(console(folder)).page("/groups")


def test_what_has_no_width_is_seen_and_sent_back_as_it_is(broker: Broker) -> None:
    key = "o-1\u200b"
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"one", keys=key)
    page = Asked(console(broker)).page(f"/topic?name=orders&key={quote(key)}")
    assert ">o-1\\u200b</a></td>" in page
    values = re.findall('name="key" value="([^"]*)"', page)
    assert {html.unescape(value) for value in values} == {key}


def test_a_search_says_what_it_has_not_looked_at(broker: Broker) -> None:
    broker.create_topic("orders", 30)
    with Producer(broker, "shop") as producer:
        for queue_id in range(30):
            producer.send("orders", b"one", keys="k", queue=MessageQueue("orders", broker.name, queue_id))
    asked = Asked(console(broker))
    page = asked.page("/topic?name=orders&tag=none")
    assert "Of 30 queues those 25 with the newest messages were read." in page
    assert "No message here" not in page
    assert "Of 30 queues" not in asked.page("/topic?name=orders")


@contextmanager
def mailing(route: AdministeredRoute) -> Iterator[PushConsumer]:
    """Let an instance of group ``mail``, which is suspended, share the queues of ``orders`` out to itself."""
    consumer = PushConsumer(route, "mail", consume_from=ConsumeFrom.FIRST, threads=3)
    consumer.subscribe("orders", lambda message: None)
    consumer.pause()
    with consumer:
        yield consumer


def test_each_console_of_a_share_shows_the_instances_of_all_processes(tmp_path: Path, shell: Shell) -> None:
    with share(tmp_path / "shared") as owner, share(tmp_path / "shared") as peer, Producer(peer, "shop") as producer:
        owner.create_topic("orders", 2)
        producer.send("orders", b"one")
        with mailing(owner) as first, mailing(peer) as second:
            until(lambda: len(first.progress("orders")) == len(second.progress("orders")) == 1)
            until(lambda: len(first.progress()) + len(second.progress()) == 3)  # and who has the retries
            tables = [
                (asked.table("/group?name=mail", "Instances"), asked.table("/group?name=mail", "Queues"))
                for asked in (Asked(console(owner)), Asked(console(peer)))
            ]
            printed = shell("lag", tmp_path / "shared", "--group", "mail").rows
            ids = {first.client.client_id, second.client.client_id}
    assert tables[0] == tables[1]
    instances, queues = tables[0]
    assert {row["instance"] for row in instances} == ids
    assert [(row["threads"], row["busy"]) for row in instances] == [("3", "0")] * 2
    assert {row["instance"] for row in queues if row["topic"] == "orders"} == ids
    assert [(row["topic"], row["queue"], row["lag"]) for row in queues if row["lag"] != "0"] == [
        (row["topic"], str(row["queue_id"]), str(row["lag"])) for row in printed
    ]
    assert sum(int(row["lag"]) for row in instances) == sum(row["lag"] for row in printed) == 1


def test_a_cluster_shows_which_broker_has_the_queue_of_an_instance(runner: ManualRunner) -> None:
    with Broker.temporary(name="a", runner=runner) as first, Broker.temporary(name="b", runner=runner) as second:
        cluster = Cluster(first, second)
        cluster.create_topic("orders", 1)
        with mailing(cluster) as one, mailing(cluster) as other, Producer(cluster, "shop") as producer:
            producer.send("orders", b"one", queue=MessageQueue("orders", "b", 0))
            runner.advance(60_000)
            owners = {
                queue.broker_name: consumer.client.client_id
                for consumer in (one, other)
                for queue in consumer.progress("orders")
            }
            asked = Asked(console(cluster))
            queues = [row for row in asked.table("/group?name=mail", "Queues") if row["topic"] == "orders"]
            lags = {row["instance"]: row["lag"] for row in asked.table("/group?name=mail", "Instances")}
    assert [(row["queue"], row["instance"]) for row in queues] == [("a 0", owners["a"]), ("b 0", owners["b"])]
    assert lags == {owners["a"]: "0", owners["b"]: "1"}


def test_an_instance_that_does_not_answer_is_shown_as_such(broker: Broker) -> None:
    class Mute:
        def call(self, request: Any, /) -> Any:
            raise BrokerUnreachableError("no answer")

    data = ConsumerData("mail", "push", MessageModel.CLUSTERING, ConsumeFrom.LAST, {"orders": Subscription("orders")})
    broker.create_topic("orders", 1)
    broker.call(Heartbeat("mute", Mute(), frozenset(), (data,)))
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"one")
    broker.reset_group("mail", "orders", "begin")
    asked = Asked(console(broker))
    (instance,) = asked.table("/group?name=mail", "Instances")
    assert (instance["state"], instance["lag"], instance["threads"]) == ("does not answer", "unknown", "unknown")
    assert {row["instance"] for row in asked.table("/group?name=mail", "Queues")} == {"unknown"}


def test_the_story_of_a_message_without_an_id_reads_a_large_log_on_request(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.store.append(Message("orders", b"one"))
    asked = Asked(console(broker))
    address = "/message?topic=orders&queue=0&offset=0"
    assert [row["event"] for row in asked.table(address, "Story")] == ["stored"]
    monkeypatch.setattr("librmq.console._messages._LOG_SIZE", 0)
    page = asked.page(address)
    (link,) = re.findall(r'href="(message[^"]*story=1)"', page)
    assert [row["event"] for row in asked.table(f"/{html.unescape(link)}", "Story")] == ["stored"]


def test_a_story_at_a_share_has_the_progress_of_its_owner(tmp_path: Path) -> None:
    """Not the saved one, which can be seconds older."""
    with share(tmp_path / "shared") as shared:
        shared.create_topic("orders", 1)
        shared.set_group("mail")
        with Producer(shared, "shop") as producer:
            sent = producer.send("orders", b"one").message_id
        asked = Asked(console(shared))
        for offset, end in ((0, "not_passed"), (1, "passed")):
            shared.reset_group("mail", "orders", offset)
            assert [row["event"] for row in asked.table(f"/message?id={sent}", "Story")] == ["stored", end]


def test_a_delivered_message_does_not_wait_until_the_progress_is_saved(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"later", delay_level=1)
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        places = [Asked(console(broker)), Asked(console(remote, folder=broker.store.path))]
        for asked in places:
            assert [row["kind"] for row in asked.table("/waiting", "Waiting messages")] == ["delay"]
        runner.advance(1_100)
        assert broker.tables.delay_offset(1) == 0
        for asked in places:
            assert "Nothing waits" in asked.page("/waiting")


@pytest.mark.slow
def test_much_progress_is_read_in_the_folder(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop(broker, runner)
    runner.advance(10_000)
    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}") as remote:
        asked = Asked(console(remote, folder=broker.store.path))
        for queue, bounds in broker.queues("orders").items():
            broker.call(UpdateOffset("billing", "orders", queue.queue_id, bounds.max_offset))
        for most in (1 << 20, 0):
            monkeypatch.setattr("librmq.console._place._MUCH", most)
            for page in ("/", "/groups"):
                assert {row["group"]: row["lag"] for row in asked.table(page, "Groups")}["billing"] == "0"
                assert ("is read in the folder" in asked.page(page)) == (most == 0)
            assert asked.get("/waiting").status_code == 200
