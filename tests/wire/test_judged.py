"""The table that compares a broker with ``librmq serve``; the broker here is librmq's too."""

from __future__ import annotations

import pytest

from librmq import Broker, StoreConfig
from librmq.wire.grpc import GrpcServer
from librmq.wire.remoting import RemotingServer
from tests.judged.__main__ import OWN, main

pytestmark = [pytest.mark.slow, pytest.mark.platform]


def table(broker: Broker, capsys: pytest.CaptureFixture[str], only: str, *, proxy: bool) -> tuple[int, list[list[str]]]:
    with RemotingServer(broker) as server, GrpcServer(broker) as grpc:
        server.resets_by_pull = True
        words = ["--namesrv", server.address, "--store", broker.store.path, "--only", only]
        words += ["--proxy", grpc.address] if proxy else []
        status = main(words)
    lines = capsys.readouterr().out.splitlines()[2:]
    return status, [line.strip("| ").split(" | ") for line in lines]


def test_own_clients_pass_at_both(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.temporary() as broker:
        before = set(broker.topics()), set(broker.groups())
        status, rows = table(broker, capsys, "librmq: ", proxy=False)
        left = set(broker.topics()) - before[0], set(broker.groups()) - before[1]
    assert status == 0
    assert rows == [["librmq", name, "passed", "passed"] for name in OWN]
    assert not any("judged" in name for name in left[0] | left[1])


def test_official_clients_pass_at_both(capsys: pytest.CaptureFixture[str]) -> None:
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, "order of a message group", proxy=True)
    assert status == 0
    assert len(rows) == 2  # Python, Node
    assert all(row[2:] == ["passed"] * 2 or "could not be" in row[2] or "needs Node" in row[2] for row in rows), rows


@pytest.mark.parametrize("scenario", ["priorities", "lite"])
def test_the_newest_kinds_of_messages_pass_at_both(capsys: pytest.CaptureFixture[str], scenario: str) -> None:
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, f"Python 5.1.2: {scenario}", proxy=True)
    assert status == 0
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
    with Broker.temporary() as broker:
        status, rows = table(broker, capsys, "Python 5.1.2: tags", proxy=False)
    assert status == 0
    assert rows[0][2:] == ["left out: no --proxy"] * 2
