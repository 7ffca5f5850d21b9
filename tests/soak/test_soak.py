"""Soaks: what their clients do, the recordings of their processes as one history, and each fault."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, record_history
from librmq.store import verify
from librmq.testing import check_history
from tests.programs import POSIX
from tests.simulation.promises import had_two_readers
from tests.soak.run import Soak, SoakPlan
from tests.soak.worker import LOADS, Load, Recording, SoakNames

pytestmark = POSIX


def test_the_load_has_all_that_the_checker_judges(tmp_path: Path) -> None:
    """By a moved clock."""
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    names = SoakNames()
    with Broker.temporary(runner=runner) as broker, record_history(broker, tmp_path / "history") as route:
        for load in LOADS:
            broker.create_topic(names.topic(load), 4)
        clients = Load(route, names)
        clients.start()
        for number in range(300):
            clients.send(number)
            runner.advance(10)
            clients.poll(0)
        for _ in range(20):
            runner.advance(10_000)
            clients.poll(0)
        clients.shutdown()
    events = [json.loads(line) for line in (tmp_path / "history").read_bytes().splitlines()]
    drained = [{"event": "drained", "group": group, "at_ms": runner.now_ms()} for group in names.topics]
    assert check_history([*events, *drained]) == []
    kinds = Counter((event["event"], event.get("outcome")) for event in events)
    assert kinds["deliver", "retry"] > 10
    assert kinds["end_transaction", "ok"] == 30
    sends = [event for event in events if event["event"] == "send"]
    assert len(sends) == 360
    assert sum("not_before_ms" in event for event in sends) == sum("half" in event for event in sends) == 30
    assert {event["group"] for event in events if event.get("ordered")} == {"soak_in_order"}


# ---- what the history of several processes leaves open

QUEUE = {"group": "g", "topic": "t", "broker": "b", "queue_id": 0}
SEND = {"event": "send", "process": "p1", "id": "m", "topic": "t", "begin_ms": 0, "end_ms": 0, "outcome": "ok"}
SENT = {**SEND, "broker": "b", "queue_id": 0, "queue_offset": 5}
HALF = {**SEND, "half": True}
GROUP = {"event": "group", "group": "g", "topics": ["t"]}


def mark(event: str, at_ms: int, **fields: Any) -> dict[str, Any]:
    process = {} if event == "commit" else {"process": "p1"}
    return {"event": event, **process, **QUEUE, "at_ms": at_ms, **fields}


def consumed(process: str, at_ms: int) -> dict[str, Any]:
    return {
        "event": "deliver", "process": process, **QUEUE, "id": "m", "queue_offset": 5, "attempt": 0, "begin_ms": at_ms,
        "end_ms": at_ms, "outcome": "ok",
    }  # fmt: skip


def decided(decision: str, outcome: str = "unknown") -> dict[str, Any]:
    return {
        "event": "end_transaction", "process": "p1", "id": "m", "begin_ms": 1, "end_ms": 1, "decision": decision,
        "outcome": outcome,
    }  # fmt: skip


OWNED, SAVED = mark("assign", 0), mark("commit", 5, queue_offset=9)


def taken(at_ms: int) -> dict[str, Any]:
    return mark("assign", at_ms, process="p2")


@pytest.mark.parametrize(
    ("first", "second", "anomalies"),
    [
        # progress of a queue that another instance takes while it is read
        ([OWNED, SAVED], [taken(4), mark("commit", 6, queue_offset=8)], ["progress-back"]),
        # one that reads on where another instance has taken the queue
        ([OWNED, SENT, consumed("p1", 9)], [taken(5), consumed("p2", 6)], []),
        ([OWNED, SENT, consumed("p1", 9), mark("revoke", 4)], [taken(5), consumed("p2", 6)], ["repeat"]),
        # transactions whose end has no answer
        ([GROUP, HALF, decided("commit"), consumed("p1", 5)], [], []),
        ([GROUP, HALF, decided("commit")], [], ["undecided"]),
        ([GROUP, HALF, decided("rollback")], [GROUP], []),
        ([GROUP, HALF, decided("rollback"), consumed("p1", 5)], [], ["aborted"]),
    ],
)  # fmt: skip
def test_the_files_of_processes_are_one_history(
    first: list[dict[str, Any]], second: list[dict[str, Any]], anomalies: list[str], tmp_path: Path
) -> None:
    for name, events in (("worker-1", first), ("worker-2", second)):
        text = "".join(json.dumps(event, separators=(",", ":")) + "  \n" for event in events)
        (tmp_path / f"{name}.jsonl").write_text(text + '{"event":"deli')
    ended = [{"event": "drained", "group": "g", "at_ms": 100}]
    events = [json.loads(line) for line in Recording(str(tmp_path)).lines(ended)]
    assert [anomaly.anomaly for anomaly in check_history(events)] == anomalies


# ---- whole runs


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "is_served"), [("crash", False), ("crash", True), ("kill", True), ("cut", True)])
def test_what_a_fault_does_explains_itself(fault: str, is_served: bool, tmp_path: Path) -> None:
    plan = SoakPlan(
        store=tmp_path / "store", recordings=tmp_path / "recordings", is_served=is_served, seconds=2, rate=200,
        fault=fault, fault_every_s=0.3, loads=["plain", "delayed", "halves"],
    )  # fmt: skip
    soak = Soak(plan)
    events = soak.run()
    for anomaly in check_history(events):
        assert anomaly.anomaly == "progress-back"
        assert had_two_readers(events, *anomaly.events)
    assert soak.faults >= 1
    assert any(event["event"] == "send" and event["outcome"] == "ok" for event in events)
    assert verify(plan.store).sound
