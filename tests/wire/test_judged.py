"""The table that compares a broker with ``librmq serve``; here the broker is librmq's too, or like one of 5.x."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from librmq import Broker, BrokerError, StoreConfig
from librmq.protocol import ResponseCode
from librmq.wire.grpc import GrpcServer
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import RequestCode
from tests.conftest import SlowBudget
from tests.judged import faults
from tests.judged.__main__ import OWN, Place, main, outcome, run_own
from tests.wire.fake_servers import FakeServer
from tests.wire.like_5 import broker_like_5

pytestmark = [pytest.mark.slow, pytest.mark.platform]


def table(broker: Broker, capsys: pytest.CaptureFixture[str], only: str, *, proxy: bool) -> tuple[int, list[list[str]]]:
    with RemotingServer(broker) as server, GrpcServer(broker) as grpc:
        words = ["--namesrv", server.address, "--store", broker.store.path, "--only", only]
        words += ["--proxy", grpc.address] if proxy else []
        status = main(words)
    return status, rows_of(capsys)


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_own_clients_pass_at_both(capsys: pytest.CaptureFixture[str]) -> None:
    with broker_like_5() as (broker, address):
        before = set(broker.topics()), set(broker.groups())
        status = main(["--namesrv", address, "--store", broker.store.path, "--only", "librmq: "])
        left = set(broker.topics()) - before[0], set(broker.groups()) - before[1]
    assert status == 0
    assert rows_of(capsys) == [["librmq", name, "passed", "passed"] for name in OWN]
    assert not any("judged" in name for name in left[0] | left[1])


def test_each_row_finds_its_fault(capsys: pytest.CaptureFixture[str], slow_budget: SlowBudget) -> None:
    """A row that can't fail would not count, and neither would one that is left out."""
    assert [fault.row for fault in faults.FAULTS] == list(OWN)
    with broker_like_5() as (broker, address):
        words = ["--namesrv", address, "--store", broker.store.path, "--wait", "6"]
        for number in slow_budget.rounds(len(OWN), "rows with their faults", at_least=2, of_list=True):
            row = faults.FAULTS[number].row
            assert faults.main([*words, "--only", row]) == 0
            assert any(name == row and told.startswith("not passed: ") for name, _, told in rows_of(capsys)), row
        assert not any("judged" in name for name in broker.groups())


@pytest.mark.parametrize(
    ("release", "settings", "scenario", "lack"),
    [
        ("4.9.4", {}, "simple consumer, dead letter", "RocketMQ 4.9.4, needs 5.0.0"),
        ("4.9.4", {}, "topic with queues of batches", "RocketMQ 4.9.4, needs 5.0.0"),
        ("5.3.1", {}, "cancel of a delay", "RocketMQ 5.3.1, needs 5.3.2"),
        ("5.3.3", {"timerWheelEnable": "true"}, "cancel of a delay", "needs recallMessageEnable=true"),
        ("5.3.3", {"timerWheelEnable": "true", "recallMessageEnable": "true"}, "cancel of a delay", None),
        ("5.3.3", {}, "priorities", "RocketMQ 5.3.3, needs 5.4.0"),
        ("5.4.0", {}, "priorities", None),
        ("4.9.4", {"enablePropertyFilter": "false"}, "SQL", "needs enablePropertyFilter=true"),
        ("4.8 or earlier", {}, "retry", "RocketMQ 4.8 or earlier, needs 4.9"),
        ("4.9.4", {}, "retry", None),
        (None, {}, "priorities", None),
    ],
)
def test_what_is_left_out_is_a_fact_about_the_broker(
    release: str | None, settings: dict[str, str], scenario: str, lack: str | None
) -> None:
    assert Place("", None, None, release, settings, 1, set()).lacks(scenario) == lack


def test_a_refusal_is_no_reason_to_leave_a_row_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error a row meets: only what is known of the broker before it runs decides."""

    def refused(stand: object) -> None:
        raise BrokerError(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no POP")

    monkeypatch.setitem(OWN, "cancel of a delay", refused)
    with broker_like_5() as (_, address):
        place = Place.ask(address)
        told = outcome("cancel of a delay", place, partial(run_own, "cancel of a delay"))
    assert told.startswith("not passed: BrokerError: no POP")


def test_the_version_of_a_broker_comes_from_its_answers() -> None:
    body = write_body({"table": {}})

    def answer(frame: Frame) -> Frame:
        settings = b"timerWheelEnable=true\n"
        return replace(
            answer_to(frame, body=settings if frame.code == RequestCode.GET_BROKER_CONFIG else body), version=474
        )

    with FakeServer(answer) as server:
        place = Place.ask(server.address)
    assert (place.release, place.settings) == ("5.3.1", {"timerWheelEnable": "true"})


def test_official_clients_pass_at_both(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, "order of a message group", proxy=True)
    assert status != 1
    assert len(rows) == 2  # Python, Node
    assert all(row[2:] == ["passed"] * 2 or "could not be" in row[2] or "needs Node" in row[2] for row in rows), rows


@pytest.mark.parametrize("scenario", ["priorities", "lite"])
def test_the_newest_kinds_of_messages_pass_at_both(capsys: pytest.CaptureFixture[str], scenario: str) -> None:
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, f"Python 5.1.2: {scenario}", proxy=True)
    assert status != 1
    ((_, _, there, here),) = rows
    assert there == here == "passed" or "could not be" in there, rows


def test_a_difference_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.temporary(store_config=StoreConfig(enable_property_filter=False)) as broker:
        status, rows = table(broker, capsys, "SQL", proxy=False)
    assert status == 1
    ((_, _, there, here),) = rows
    assert here == "passed"
    assert there.startswith("not passed: ")


def test_clients_of_5_are_left_out_without_a_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    """A run in which nothing was compared does not end as one in which all is alike."""
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, "Python 5.1.2: tags", proxy=False)
    assert status == 2
    assert rows[0][2:] == ["left out: no --proxy"] * 2
