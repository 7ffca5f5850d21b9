"""Soaks: what their clients do, each fault, broken brokers that the verdict finds, and what they leave behind."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, record_history
from librmq.message.properties import PropertyName
from librmq.protocol import EndTransaction, SendMessage, SendTogether, TransactionState
from librmq.store import verify
from librmq.testing import check_history
from tests.programs import POSIX
from tests.simulation.promises import had_two_readers
from tests.soak.run import PREFIX, Soak, SoakPlan, SoakResult
from tests.soak.worker import LOADS, Load, Recording, SoakNames

pytestmark = POSIX
NAMES = SoakNames(f"{PREFIX}test")


def lines(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def anomalies_of(broker: Broker, path: Path, messages: int) -> set[str]:
    """Let the clients of a soak send by a moved clock; return the kinds of anomalies of their history."""
    runner = broker.runner
    assert isinstance(runner, ManualRunner)
    with record_history(broker, path) as route:
        load = Load(route, NAMES)
        load.start()
        for number in range(messages):
            load.send(number)
            runner.advance(10)
            load.poll(0)
        for _ in range(20):
            runner.advance(10_000)
            load.poll(0)
        load.shutdown()
    drained = [{"event": "drained", "group": group, "at_ms": runner.now_ms()} for group in NAMES.topics]
    return {anomaly.anomaly for anomaly in check_history([*lines(path), *drained])}


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(runner=ManualRunner(ManualClock(1_700_000_000_000))) as broker:
        for load in LOADS:
            broker.create_topic(NAMES.topic(load), 4)
        yield broker


def test_the_load_has_all_that_the_checker_judges(broker: Broker, tmp_path: Path) -> None:
    assert anomalies_of(broker, tmp_path / "history", 300) == set()
    events = lines(tmp_path / "history")
    kinds = Counter((event["event"], event.get("outcome")) for event in events)
    assert kinds["deliver", "retry"] > 10
    assert kinds["end_transaction", "ok"] == 30
    sends = [event for event in events if event["event"] == "send"]
    assert len(sends) == 360
    assert sum("not_before_ms" in event for event in sends) == sum("half" in event for event in sends) == 30
    assert {event["group"] for event in events if event.get("ordered")} == {f"{NAMES.base}_in_order"}


# ---- broken brokers


def forgets(request: Any, call: Callable[[Any], Any], number: int) -> Any:
    """Acknowledge a message that is not stored."""
    if isinstance(request, SendMessage) and request.message.body.endswith(b"3"):
        request.message.topic = f"{PREFIX}elsewhere"
        return call(request)._replace(queue_id=1_000, queue_offset=number)
    return call(request)


def hurries(request: Any, call: Callable[[Any], Any], number: int) -> Any:
    """Forget that a message has a delay."""
    if isinstance(request, SendMessage):
        request.message.properties.pop(PropertyName.DELAY, None)
    return call(request)


def commits(request: Any, call: Callable[[Any], Any], number: int) -> Any:
    """Commit what is to be rolled back."""
    if isinstance(request, EndTransaction):
        object.__setattr__(request, "state", TransactionState.COMMIT)
    return call(request)


def break_broker(broker: Broker, how: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, numbers = broker.call, iter(range(1_000_000))

    def call(request: Any) -> Any:
        if isinstance(request, SendTogether):
            return [call(request.sends[0])]
        return how(request, whole, next(numbers))

    monkeypatch.setattr(broker, "call", call)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "anomaly"), [(forgets, "lost"), (hurries, "early"), (commits, "aborted")])
def test_a_broken_broker_is_found(
    broker: Broker, how: Callable[..., Any], anomaly: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_broker(broker, how, monkeypatch)
    assert anomaly in anomalies_of(broker, tmp_path / "history", 100)


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


def soak(plan: SoakPlan, interrupted: Callable[[], bool] = lambda: False) -> tuple[SoakResult, list[Any]]:
    rows: list[Any] = []
    never = threading.Event()
    result = Soak(plan).run(lambda seconds: never.wait(seconds) or interrupted(), rows.append)
    assert not result.left
    return result, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "is_served"),
    [
        ("crash", False),
        pytest.param("crash", True, marks=pytest.mark.slow),
        pytest.param("kill", True, marks=pytest.mark.slow),
        ("cut", True),
    ],
)
def test_what_a_fault_does_explains_itself(
    fault: str, is_served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = SoakPlan(
        store="store", is_served=is_served, seconds=2, rate=200, faults=[fault], fault_every_s=0.3,
        loads=["plain", "delayed", "halves"],
    )  # fmt: skip
    result, rows = soak(plan)
    events = lines(result.history)
    assert result.anomalies == check_history(events)
    for anomaly in result.anomalies:
        assert anomaly.anomaly == "progress-back"
        assert had_two_readers(events, *anomaly.events)
    assert result.counts[fault] >= 1
    assert result.counts["sent"] > 0
    assert [row["type"] for row in rows] == ["progress"] * len(rows)
    assert verify(tmp_path / "store").sound
    assert sorted(path.name for path in tmp_path.iterdir()) == [result.history, "store"]
    with Broker.open("store") as broker:
        assert [name for name in (*broker.topics(), *broker.groups()) if PREFIX in name] == []
