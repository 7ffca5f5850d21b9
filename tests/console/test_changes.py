"""Changes are shown first, then made, logged, and bear being made twice."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, Cluster, ManualRunner, Message, Producer, StoreConfig, connect, share
from librmq.broker import AdministeredRoute
from librmq.diagnosis import skipped
from librmq.protocol import Request, ResendLetters
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell
from tests.console.pages import OWN, Asked, cells, console, facts, shop
from tests.wrapped_route import WrappedBrokers


def test_a_reset_is_shown_then_made(broker: Broker, runner: ManualRunner, caplog: pytest.LogCaptureFixture) -> None:
    shop(broker, runner)
    asked = Asked(console(broker, allow_changes=True))
    path = "/change?what=reset&group=billing&topic=orders&to=end"
    shown = asked.table(path, "Progress")
    assert [(row["before"], row["after"]) for row in shown] == [("0", "4"), ("0", "4")]
    assert broker.lag("billing") == 8
    with caplog.at_level(logging.WARNING, "librmq.console"):
        done = asked.submit(path)
    assert "Progress now" in done
    assert broker.lag("billing") == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "librmq.console"]
    assert line.startswith("a caller at 127.0.0.1: librmq reset ")


def test_letters_are_sent_again_once(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    asked = Asked(console(broker, allow_changes=True))
    first = broker.dead_letters("mail")[0].message_id
    path = f"/change?what=resend&group=mail&id={first}"
    assert len(asked.table(path, "Dead letters that were not sent again")) == 1
    assert asked.submit(path).count(">sent<") == 1
    assert asked.submit(path).count("was sent before") == 1
    assert asked.submit("/change?what=resend&group=mail").count(">sent<") == 3
    assert "nothing to change" in asked.page("/change?what=resend&group=mail")
    assert len([row for row in asked.table("/letters?group=mail", "Dead letters") if row["sent again"]]) == 4


class Counting(WrappedBrokers, AdministeredRoute):
    """A route that counts the requests which send letters again."""

    def __init__(self, route: AdministeredRoute) -> None:
        super().__init__(route, self._count)
        self.resends = 0

    def _count(self, request: Request[Any], call: Callable[[Any], Any]) -> Any:
        self.resends += isinstance(request, ResendLetters)
        return call(request)


@pytest.mark.parametrize("is_remote", [False, True])
def test_letters_are_sent_again_by_few_requests(broker: Broker, runner: ManualRunner, is_remote: bool) -> None:
    """Each of them can read all letters of the group."""
    shop(broker, runner)
    with RemotingServer(broker) as server, connect(server.address) as remote:
        route = Counting(remote if is_remote else broker)
        folder = None if is_remote else broker.store.path
        asked = Asked(console(route, allow_changes=True, folder=folder))
        assert asked.submit("/change?what=resend&group=mail").count(">sent<") == 4
        assert 1 <= route.resends <= 2


def test_a_letter_that_is_refused_has_its_outcome(tmp_path: Path) -> None:
    config = StoreConfig.tiny(commitlog_file_size=8192, max_message_size=8192)
    with Broker.open(tmp_path, store_config=config) as broker:
        broker.create_topic("%DLQ%mail", 1)
        for number in range(3):
            body = bytes(8192 - 130 if number == 1 else 1)  # it fills a file, and its copy has more properties
            broker.store.append(Message("%DLQ%mail", body, unique_key=f"U{number}"))
        done = Asked(console(broker, allow_changes=True)).submit("/change?what=resend&group=mail")
        assert cells(done, "td")[1::2] == ["sent", cells(done, "td")[3], "sent"]
        assert cells(done, "td")[3].startswith("message U1 of ")


def test_letters_that_are_ticked_are_sent_again(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    asked = Asked(console(broker, allow_changes=True))
    boxes = re.findall(
        r'<input type="checkbox" name="id" value="(\w+)" form="chosen">', asked.page("/letters?group=mail")
    )
    assert boxes == [letter.message_id for letter in reversed(broker.dead_letters("mail"))]
    page = asked.page("/letters?group=mail")
    assert '<form id="chosen" class="filter" method="post" action="change">' in page
    (token,) = re.findall('name="token" value="([^"]*)"', page)
    ticked = {
        "token": token,
        "show": "1",
        "what": "resend",
        "group": "mail",
        "id": [boxes[0], boxes[2], *["x" * 32] * 498],
    }
    shown = asked.request("POST", "/change", data=ticked, headers=OWN)
    assert (shown.status_code, shown.text.count("<tr>")) == (200, 3), shown.text
    ticked["id"] = ["x"] * 600
    assert asked.request("POST", "/change", data=ticked, headers=OWN).status_code == 403
    assert not any(row["sent again"] for row in asked.table("/letters?group=mail", "Dead letters"))
    assert asked.confirm(shown.text).count(">sent<") == 2
    unsent = [row["message"] for row in asked.table("/letters?group=mail", "Dead letters") if not row["sent again"]]
    assert unsent == ["o-5", "o-1"]
    assert 'type="checkbox"' not in Asked(console(broker)).page("/letters?group=mail")


def test_the_newest_letters_are_shown(broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    shop(broker, runner)
    for module in ("_place", "_group_parts"):
        monkeypatch.setattr(f"librmq.console.{module}.LETTERS", 3)
    asked = Asked(console(broker))
    newest = [letter.keys[0] for letter in reversed(broker.dead_letters("mail"))][:3]
    assert [row["message"] for row in asked.table("/letters?group=mail", "Dead letters")] == newest
    assert "Of the newest 3 of 4: librmq dead-letters lists all." in asked.page("/letters?group=mail")
    group = asked.page("/group?name=mail")
    assert (facts(group)["dead letters"], "Of the newest 3 letters." in group) == ("4", True)


def test_the_next_message_of_a_schedule_waits(broker: Broker, runner: ManualRunner) -> None:
    broker.set_schedule("hourly", topic="orders", every=3600)
    (row,) = Asked(console(broker)).table("/waiting?kind=schedule", "Waiting messages")
    assert (row["kind"], row["topic"]) == ("schedule", "orders")
    assert facts(Asked(console(broker)).page("/"))["waiting"] == "1 1 schedule"


def test_the_next_messages_of_a_cluster_are_asked_for(tmp_path: Path, runner: ManualRunner) -> None:
    with Cluster.open(tmp_path / "cluster", ["a", "b"], runner=runner) as cluster:
        cluster.set_schedule("hourly", topic="orders", every=3600)
        asked = Asked(console(cluster))
        (row,) = asked.table("/waiting", "Waiting messages")
        assert (row["kind"], row["topic"]) == ("schedule", "orders")
        assert "schedule" not in [name for name, value in facts(asked.page("/waiting")).items() if value == "unknown"]
        assert facts(asked.page("/"))["waiting"].startswith("at least 1 1 schedule")


def test_a_waiting_message_is_cancelled(broker: Broker, runner: ManualRunner) -> None:
    with Producer(broker, "shop") as producer:
        message_id = producer.send("orders", b"later", delay=60).message_id
    asked = Asked(console(broker, allow_changes=True))
    assert f"what=cancel&amp;id={message_id}" in asked.page("/waiting")
    assert ">cancelled<" in asked.submit(f"/change?what=cancel&id={message_id}")
    runner.advance(120_000)
    assert list(broker.messages("orders")) == []


def test_old_messages_are_skipped(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    runner.advance(3_600_000)
    asked = Asked(console(broker, allow_changes=True))
    path = "/change?what=skip&group=billing&topic=orders&minutes=30"
    assert sum(int(row["messages"]) for row in asked.table(path, "Skipped messages")) == 8
    asked.submit(path)
    assert broker.lag("billing") == 0


def test_the_owner_of_a_share_skips_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with share(tmp_path / "shop") as shared:
        shared.create_topic("orders", 1)
        shared.set_group("mail")
        shared.reset_group("mail", "orders", "begin")
        with Producer(shared, "shop") as producer:
            producer.send("orders", b"one")
        asked = Asked(console(shared, allow_changes=True))
        hour_later_ms = shared.runner.now_ms() + 3_600_000
        monkeypatch.setattr(shared.runner.clock, "now_ms", lambda: hour_later_ms)
        path = "/change?what=skip&group=mail&topic=orders&minutes=30"
        assert [row["messages"] for row in asked.table(path, "Skipped messages")] == ["1"]
        assert "Show the skip" in asked.page("/group?name=mail")
        asked.submit(path)
        assert shared.lag("mail") == 0
        assert [skip.group for skip in skipped(tmp_path / "shop")] == ["mail"]


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_given_up_half_is_decided(tmp_path: Path, decision: str) -> None:
    from librmq import BrokerConfig, TransactionConfig, TransactionProducer, TransactionState

    runner = ManualRunner()
    config = BrokerConfig(transactions=TransactionConfig(timeout_s=1, interval_s=1, check_max=1))
    with Broker.open(tmp_path / "shop", config, runner=runner) as broker:
        broker.create_topic("orders", 1)
        producer = TransactionProducer(broker, "shop", check=lambda _: TransactionState.UNKNOWN)
        with producer:
            producer.send_in_transaction(Message("orders", b"half"), execute=lambda *_: TransactionState.UNKNOWN)
            runner.advance(60_000)
        asked = Asked(console(broker, allow_changes=True))
        (row,) = [row for row in asked.table("/waiting", "Waiting messages") if row["kind"] == "given_up"]
        assert row[""] == "decide"
        (offset,) = re.findall(r"what=half&amp;offset=(\d+)", asked.page("/waiting"))
        first = broker.store.log.begin  # a copy of the half that checks have passed
        refused = asked.get(f"/change?what=half&offset={first}")
        assert (refused.status_code, "expected an undecided half that was given up" in refused.text) == (400, True)
        asked.submit(f"/change?what=half&offset={offset}", {"decision": decision})
        assert asked.get(f"/change?what=half&offset={offset}").status_code == 400
        assert [message.body for message in broker.messages("orders")] == ([b"half"] if decision == "commit" else [])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("what=reset&topic=orders&to=end", [("after", 4), ("after", 4)]),
        ("what=reset&topic=orders&to=2001-09-09T01:46:40", [("after", 0), ("after", 0)]),
        ("what=retries&retries=5", [("retries", 5)]),
    ],
)
def test_the_named_command_does_the_same(
    broker: Broker, runner: ManualRunner, shell: Shell, change: str, expected: list[tuple[str, int]]
) -> None:
    shop(broker, runner)
    page = Asked(console(broker, allow_changes=True)).page(f"/change?group=billing&{change}")
    (command,) = cells(page, "code")
    assert ("to=2001" in change) == ("--to '2001-09-09 01:46:40+00:00'" in command)  # without a zone it is local time
    broker.close()
    answer = shell(*shlex.split(command)[1:])
    assert answer.status == 0
    assert [(name, row[name]) for (name, _), row in zip(expected, answer.rows, strict=True)] == expected


def test_a_change_that_fails_says_why(broker: Broker, runner: ManualRunner) -> None:
    shop(broker, runner)
    asked = Asked(console(broker, allow_changes=True))
    for path, why in (
        ("what=reset&group=billing&topic=nowhere&to=end", "nowhere"),
        ("what=reset&group=billing&topic=orders&to=sometime", "expected a time"),
        ("what=reset&group=billing&topic=orders&to=1795802400000", "if a time was meant"),
        ("what=retries&group=mail&retries=many", "expected a whole number"),
        ("what=explode", "expected one of"),
        ("", "what: missing"),
    ):
        response = asked.get(f"/change?{path}")
        assert (response.status_code, why in response.text) == (400, True), path


def test_a_folder_at_rest_is_only_read(tmp_path: Path, runner: ManualRunner) -> None:
    with Broker.open(tmp_path / "shop", runner=runner) as broker:
        shop(broker, runner)
    asked = Asked(console(tmp_path / "shop", allow_changes=True))
    response = asked.get("/change?what=reset&group=billing&topic=orders&to=end")
    assert response.status_code == 403
    assert "no broker has the store open" in response.text
