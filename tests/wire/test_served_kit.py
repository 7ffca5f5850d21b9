"""Served kits: clients under a clock that the test moves."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

from librmq.testing.served import ServedKit
from tests.wire.clients import HERE, OfficialClient
from tests.wire.stub import Stub, message

RETRY_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800)


@pytest.fixture
def served(rmq_grpc: ServedKit) -> ServedKit:
    return rmq_grpc


def test_unacknowledged_message_comes_again_as_time_is_moved(served: ServedKit) -> None:
    with Stub(served.address) as stub:
        stub.send(message("t", b"a"))
        assert len(stub.receive("t")[1]) == 1
        served.advance(seconds=9.999)
        assert stub.receive("t")[1] == []
        served.advance(ms=1)
        assert [found.system_properties.delivery_attempt for found in stub.receive("t")[1]] == [2]


def test_timed_message_comes_when_time_is_moved(served: ServedKit) -> None:
    with Stub(served.address) as stub:
        stub.send(message("t", b"later", deliver_ms=served.kit.clock.now_ms() + 3_600_000, message_type=3))
        served.advance(minutes=59)
        assert stub.receive("t")[1] == []
        served.advance(minutes=1, seconds=1)
        assert [found.body for found in stub.receive("t")[1]] == [b"later"]


def test_explored_test_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.rmq_explore\ndef test_it(rmq_grpc): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:asyncio")
    result.stderr.fnmatch_lines(["*a test with rmq_grpc can't be explored*"])


def test_official_client_keeps_up_with_a_moved_clock(python: OfficialClient, tmp_path: Path) -> None:
    """Each retry of a push consumer comes to the millisecond; an open transaction is checked and committed."""
    seen = json.loads(python.run(HERE / "moved_clock.py", home=tmp_path))
    assert seen["attempts"] == [[at, number] for number, at in enumerate(accumulate((0, *RETRY_DELAYS_S)), 1)]
    assert seen["dead"] == ["x"]
    assert (len(seen["checks"]), seen["committed"]) == (1, ["x"])
