"""`check_history`: each anomaly and each excuse by hand, and what holds for random histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from librmq.errors import InputError
from librmq.testing import check_history
from librmq.testing.histories.anomalies import KINDS
from tests.budget import step

Row = dict[str, Any]

QUEUE = {"broker": "a", "queue_id": 0}


def send(message: str = "m", offset: int = 0, begin_ms: int = 0, end_ms: int = 1, **fields: Any) -> Row:
    event = {"event": "send", "process": "p", "id": message, "topic": "t", "begin_ms": begin_ms, "end_ms": end_ms}
    place = {} if "half" in fields or "not_before_ms" in fields else {**QUEUE, "queue_offset": offset}
    return event | {"outcome": "ok"} | place | fields


def deliver(message: str = "m", offset: int = 0, begin_ms: int = 5, end_ms: int = 6, **fields: Any) -> Row:
    event = {"event": "deliver", "process": "c", "group": "g", "id": message, "topic": "t", **QUEUE, "attempt": 0}
    return event | {"queue_offset": offset, "begin_ms": begin_ms, "end_ms": end_ms, "outcome": "ok"} | fields


def running(message: str = "m", offset: int = 0, begin_ms: int = 5, **fields: Any) -> Row:
    event = deliver(message, offset, begin_ms, begin_ms, **fields)
    return {name: value for name, value in event.items() if name not in ("end_ms", "outcome")}


def end(decision: str, begin_ms: int = 2, outcome: str = "ok") -> Row:
    times = {"begin_ms": begin_ms, "end_ms": begin_ms + 1}
    return {"event": "end_transaction", "process": "p", "id": "m", "decision": decision, "outcome": outcome, **times}


def commit(offset: int, at_ms: int) -> Row:
    return {"event": "commit", "group": "g", "topic": "t", **QUEUE, "queue_offset": offset, "at_ms": at_ms}


def move(event: str, at_ms: int, **fields: Any) -> Row:
    return {"event": event, "process": "c", "group": "g", "topic": "t", **QUEUE, "at_ms": at_ms} | fields


def reset(at_ms: int, **fields: Any) -> Row:
    return {"event": "reset", "group": "g", "topic": "t", "at_ms": at_ms} | fields


def crash(at_ms: int, **actor: Any) -> Row:
    return {"event": "crash", "at_ms": at_ms, **actor}


def dead(at_ms: int, message: str = "m") -> Row:
    return {"event": "dead_letter", "group": "g", "id": message, "at_ms": at_ms}


def effect(at_ms: int, key: str = "k") -> Row:
    return {"event": "effect", "name": "charge", "key": key, "process": "c", "at_ms": at_ms}


def group(**fields: Any) -> Row:
    return {"event": "group", "group": "g", "topics": ["t"]} | fields


def drained(at_ms: int = 100) -> Row:
    return {"event": "drained", "group": "g", "at_ms": at_ms}


ORDERED = group(ordered=True)
PAIR = (ORDERED, send(), send("n", 1, 2, 3))
AGAIN = deliver(begin_ms=20, end_ms=21)
KEPT = deliver(kept_ms=7)
SOUND: dict[str, list[Row]] = {
    "nothing": [],
    "a group alone": [group(), drained()],
    "sent and delivered": [group(), send(), deliver(), commit(1, 6), drained()],
    "unknown and delivered": [send(outcome="unknown"), deliver()],
    "failed, then sent": [send(outcome="failed"), send(begin_ms=2, end_ms=3), deliver()],
    "a commit that may have decided": [send(half=True), end("commit", outcome="unknown"), deliver()],
    "a commit in the ms of the delivery": [send(half=True), end("commit", 5), deliver()],
    "a rollback after a commit": [send(half=True), end("commit"), end("rollback", 4), deliver()],
    "a resend at its own place": [send(), send(offset=1, begin_ms=2, end_ms=3), deliver(), deliver(offset=1)],
    "delivered in time": [send(not_before_ms=5), deliver()],
    "one send without a time": [send(not_before_ms=50), send(begin_ms=2, end_ms=3), deliver()],
    "sends side by side": [send(offset=1), send("n", 0, 1, 2)],
    "a broker's crash between sends": [send(offset=1), send("n", 0, 4, 5), crash(1, broker="a")],
    "sends of two processes": [send(offset=1), send("n", 0, 4, 5, process="q")],
    "an end at the next begin": [*PAIR, deliver(), deliver("n", 1, 6, 8)],
    "side by side without order": [group(), send(), send("n", 1, 2, 3), deliver(end_ms=9), deliver("n", 1, 6, 8)],
    "dead at the crash of its process": [*PAIR, running(), crash(9, process="c"), deliver("n", 1, 9, 11)],
    "back after an assign": [*PAIR, deliver("n", 1), move("assign", 6), deliver(begin_ms=9, end_ms=10)],
    "back after a reset": [*PAIR, deliver("n", 1), reset(9), deliver(begin_ms=9, end_ms=10)],
    "back after any crash": [*PAIR, deliver("n", 1), crash(7, process="other"), deliver(begin_ms=9, end_ms=10)],
    "back at once": [*PAIR, deliver("n", 1), deliver(begin_ms=6, end_ms=7)],
    "back after a retry": [*PAIR, deliver("n", 1, outcome="retry"), deliver(begin_ms=9, end_ms=10)],
    "attempts in order": [
        group(max_attempts=2),
        send(),
        deliver(outcome="retry"),
        deliver(begin_ms=9, end_ms=9, attempt=1, stored_in="%RETRY%g"),
    ],
    "killed before it was kept": [send(), deliver(), crash(9, process="c"), AGAIN],
    "in work when the queue went to another": [send(), KEPT, move("assign", 6, process="d"), AGAIN],
    "read by two": [
        *(send(), move("assign", 2), move("assign", 3, process="d"), KEPT),
        *(move("revoke", 9), AGAIN | {"process": "d"}),
    ],
    "kept before a reset": [send(), KEPT, reset(9), AGAIN],
    "kept, and taken by a loss of power": [send(), KEPT, commit(1, 7), crash(9, broker="a", since_ms=6), AGAIN],
    "kept behind a message in work at a loss of power": [
        send(),
        KEPT,
        crash(90, broker="a", since_ms=80),
        deliver(begin_ms=95, end_ms=96),
    ],
    "kept, and sent again": [send(), send(offset=1), KEPT, AGAIN | {"queue_offset": 1}],
    "kept, and sent again before a kill": [
        *(send(), send(offset=1), KEPT, running(offset=1), crash(9, process="c"), AGAIN | {"queue_offset": 1})
    ],
    "a retry explains one": [
        send(),
        send(offset=1),
        deliver(outcome="retry"),
        deliver(offset=1),
        deliver(begin_ms=9, end_ms=9, attempt=1),
    ],
    "a resend explains one": [send(), send(offset=1), deliver(), AGAIN],
    "a resend that may be stored": [send(), send(outcome="unknown"), deliver(), AGAIN],
    "again after an assign": [send(), deliver(), move("assign", 20), AGAIN],
    "again after a revoke": [send(), deliver(), move("revoke", 5), AGAIN],
    "again from a queue newly assigned": [
        send(),
        deliver(),
        move("assign", 9, topic="%RETRY%g"),
        AGAIN | {"stored_in": "%RETRY%g"},
    ],
    "again after a crash of a process": [send(), deliver(), crash(20, process="c"), AGAIN],
    "again after a crash of its broker": [send(), deliver(), crash(5, broker="a"), AGAIN],
    "again after a reset": [send(), deliver(), reset(7), AGAIN],
    "again in another group": [send(), deliver(), AGAIN | {"group": "h"}],
    "broadcast": [group(broadcast=True), send(), deliver(), AGAIN | {"process": "d"}],
    "each instance in order": [
        group(ordered=True, broadcast=True),
        *PAIR[1:],
        deliver("n", 1, begin_ms=3, end_ms=9),
        AGAIN | {"process": "d"},
    ],
    "progress after a retry": [send(), deliver(outcome="retry"), commit(1, 6)],
    "progress after a dead letter": [send(), dead(6), commit(1, 6)],
    "progress after a reset": [send(), reset(3), commit(1, 3)],
    "progress past what is not taken": [group(selects=["n"]), send(), commit(1, 3)],
    "progress up to a message": [send(), commit(0, 3)],
    "progress back after a reset": [commit(5, 3), reset(4), commit(2, 4)],
    "progress back after a crash": [commit(5, 3), crash(3, process="x"), commit(2, 4)],
    "progress at one time": [commit(5, 3), commit(2, 3)],
    "two effects": [effect(1), effect(2, "l")],
    "decided": [group(), send(half=True), end("rollback"), drained()],
    "discarded": [group(), send(half=True), {"event": "discard", "id": "m", "at_ms": 50}, drained()],
    "half in another topic": [group(topics=["u"]), send(half=True), drained()],
    "half as it drains": [group(), send(half=True), drained(1)],
    "dead before it drains": [group(), send(), deliver(outcome="retry"), dead(7), drained()],
    "not yet due": [group(), send(not_before_ms=101), drained()],
    "committed later": [group(), send(half=True), end("commit", 99), drained()],
    "excused by a reset": [group(), send(), reset(1), drained()],
    "not selected": [group(selects=[]), send(), drained()],
    "another topic": [group(topics=["u"]), send(), drained()],
    "sent as it drains": [group(), send(), drained(1)],
    "unknown and lost": [group(), send(outcome="unknown"), drained()],
}
WRONG: list[tuple[str, list[Row], str | None, Sequence[int]]] = [
    ("phantom", [deliver(), AGAIN], "m", [1]),
    ("phantom", [dead(5)], "m", [1]),
    ("aborted", [send(outcome="failed"), deliver()], "m", [1, 2]),
    ("aborted", [send(half=True), end("rollback"), deliver()], "m", [1, 2, 3]),
    ("aborted", [send(half=True), deliver(), end("commit", 6)], "m", [1, 2]),
    ("aborted", [send(half=True), end("commit", outcome="failed"), deliver()], "m", [1, 3]),
    ("offset-conflict", [send("n", end_ms=2), send()], "n", [1, 2]),
    ("offset-conflict", [send(), send("n", 1), deliver("n")], "n", [1, 2, 3]),
    (
        "offset-conflict",
        [send(), send("n", 1), deliver("n", 3), deliver(offset=3, begin_ms=9, end_ms=9)],
        "m",
        [1, 2, 3, 4],
    ),
    ("early", [send(not_before_ms=9), send(not_before_ms=6), deliver()], "m", [2, 3]),
    ("early", [send(not_before_ms=6), send(outcome="failed"), deliver()], "m", [1, 3]),
    ("send-order", [send(offset=1), send("n", 0, 2, 3)], "n", [1, 2]),
    ("send-order", [send(offset=1), send("n", 0, 2, 3), crash(1, broker="b")], "n", [1, 2]),
    ("send-order", [send(offset=1), send("n", 0, 2, 3), crash(2, process="p")], "n", [1, 2]),
    ("overlap", [*PAIR, deliver(), deliver("n", 1, 5, 7)], "n", [1, 2, 3, 4, 5]),
    ("overlap", [*PAIR, running(), deliver("n", 1, 50, 51), crash(4, process="c")], "n", [1, 2, 3, 4, 5]),
    ("delivery-order", [*PAIR, deliver("n", 1), deliver(begin_ms=7, end_ms=8)], "m", [1, 2, 3, 4, 5]),
    (
        "delivery-order",
        [*PAIR, deliver("n", 1), move("revoke", 7), deliver(begin_ms=7, end_ms=8)],
        "m",
        [1, 2, 3, 4, 6],
    ),
    (
        "delivery-order",
        [*PAIR, move("assign", 5), deliver("n", 1), deliver(begin_ms=7, end_ms=8)],
        "m",
        [1, 2, 3, 5, 6],
    ),
    ("attempts", [send(), deliver(attempt=1)], "m", [1, 2]),
    ("attempts", [send(), deliver(outcome="retry"), deliver(begin_ms=9, end_ms=9, attempt=2)], "m", [1, 3]),
    ("attempts", [group(max_attempts=1), send(), deliver(outcome="retry"), AGAIN | {"attempt": 1}], "m", [1, 2, 4]),
    ("repeat", [send(), deliver(), AGAIN], "m", [1, 2, 3]),
    ("repeat", [send(), deliver(end_ms=30), AGAIN], "m", [1, 2, 3]),
    ("repeat", [send(), send(outcome="failed"), deliver(), AGAIN], "m", [1, 3, 4]),
    ("repeat", [send(), send(offset=1), deliver(), AGAIN, deliver(begin_ms=30, end_ms=31)], "m", [1, 4, 5]),
    (
        "repeat",
        [send(), deliver(outcome="retry"), deliver(begin_ms=9, end_ms=10, attempt=1), AGAIN | {"attempt": 1}],
        "m",
        [1, 2, 3, 4],
    ),
    ("repeat", [send(), move("assign", 4), deliver(), move("assign", 7, queue_id=1), AGAIN, reset(21)], "m", [1, 3, 5]),
    (
        "repeat",
        [send(), deliver(), crash(9, process="x"), crash(9, broker="b"), reset(9, group="h"), AGAIN],
        "m",
        [1, 2, 6],
    ),
    ("repeat", [group(broadcast=True), send(), deliver(), AGAIN], "m", [2, 3, 4]),
    ("repeat", [send(), KEPT, crash(9, process="c"), crash(9, broker="a"), AGAIN], "m", [1, 2, 5]),
    ("repeat", [send(), KEPT, move("revoke", 8), move("assign", 8, process="d"), AGAIN], "m", [1, 2, 5]),
    ("repeat", [send(), reset(6), KEPT, crash(9, broker="a", since_ms=8), commit(1, 7), AGAIN], "m", [1, 3, 6]),
    (
        "repeat",  # a copy for a retry, of what was not in work
        [send(), KEPT, crash(9, process="c"), AGAIN | {"attempt": 1, "stored_in": "%RETRY%g"}],
        "m",
        [1, 2, 4],
    ),
    (
        "repeat",  # the further send has its own place
        [send(), send(offset=1), KEPT, deliver(offset=1), crash(9, process="c"), AGAIN],
        "m",
        [1, 3, 6],
    ),
    (
        "delivery-order",
        [ORDERED | {"broadcast": True}, *PAIR[1:], deliver("n", 1), deliver(begin_ms=9, end_ms=10)],
        "m",
        [1, 2, 3, 4, 5],
    ),
    ("progress-ahead", [send(), deliver(), commit(1, 5), commit(2, 5)], "m", [1, 3]),
    ("progress-ahead", [send(), deliver(outcome="died"), commit(1, 7)], "m", [1, 3]),
    ("progress-ahead", [send(), commit(1, 5), reset(6)], "m", [1, 2]),
    ("progress-back", [commit(5, 3), reset(2), commit(2, 4)], None, [1, 3]),
    ("effect-twice", [effect(1), effect(1)], None, [1, 2]),
    ("undecided", [group(), send(half=True), end("commit", outcome="unknown"), drained()], "m", [1, 2, 4]),
    ("lost", [group(), send(), drained()], "m", [1, 2, 3]),
    ("lost", [group(), send(), deliver(outcome="retry"), reset(0, topic="u"), drained()], "m", [1, 2, 5]),
    ("lost", [group(), send(half=True), end("commit"), drained()], "m", [1, 2, 3, 4]),
    ("lost", [group(), send(not_before_ms=100), drained()], "m", [1, 2, 3]),
    ("lost", [group(), reset(3), send(begin_ms=4, end_ms=5), drained()], "m", [1, 3, 4]),
]


@pytest.mark.parametrize("name", SOUND)
def test_sound_histories_have_no_anomaly(name: str) -> None:
    assert check_history(SOUND[name]) == []


@pytest.mark.parametrize(("kind", "events", "message", "lines"), WRONG)
def test_each_anomaly_has_one_line(kind: str, events: list[Row], message: str | None, lines: Sequence[int]) -> None:
    (anomaly,) = check_history(events)
    assert (anomaly.anomaly, anomaly.id, list(anomaly.events)) == (kind, message, lines)
    assert anomaly.what.endswith(".")
    assert set(anomaly.row()) >= {"anomaly", "at_ms", "events", "what"}


def test_a_message_has_one_fault() -> None:
    """A message that one kind names is left out of later kinds; progress ahead and attempts only in their group."""
    wrong = [group(), send("n"), deliver(), AGAIN, drained()]
    assert [anomaly.anomaly for anomaly in check_history(wrong)] == ["phantom", "lost"]
    assert [anomaly.id for anomaly in check_history([group(), send(), commit(1, 3), drained()])] == ["m"]
    other = [group(group="h"), drained() | {"group": "h"}]
    kinds = [(a.anomaly, a.group) for a in check_history([group(), send(), commit(1, 3), drained(), *other])]
    assert kinds == [("progress-ahead", "g"), ("lost", "h")]


class RandomHistory:
    """A history of few messages, queues and times, so that anomalies and equal times are frequent."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.span = random.choice((4, 12, 30))
        self.messages = "abcd"[: random.randrange(1, 5)]
        self.topics, self.brokers, self.groups = (random.choice((names[:1], names)) for names in ("tu", "AB", "gh"))
        self.homes = {message: {"topic": random.choice(self.topics)} | self.place() for message in self.messages}
        self.disorder = random.random() * 0.4

    def place(self) -> Row:
        queue = {"broker": self.random.choice(self.brokers), "queue_id": self.random.choice((0, 0, 1))}
        return queue | {"queue_offset": self.random.randrange(6)}

    def events(self) -> list[Row]:
        weights = {
            "send": 3.0, "end_transaction": 1, "discard": 0.2, "deliver": 8, "assign": 0.6, "revoke": 0.3, "commit": 2,
            "dead_letter": 0.4, "reset": 0.4, "crash": 0.5, "effect": 0.8, "drained": 0.8,
        }  # fmt: skip
        if self.random.random() < 0.5:
            weights |= dict.fromkeys(("assign", "revoke", "reset", "crash", "end_transaction"), 0.05)
        sent = [message for message in self.messages if self.random.random() < 0.8]
        kinds = self.random.choices(list(weights), list(weights.values()), k=self.random.randrange(1, 20))
        events = [self.group(name) for name in self.groups if self.random.random() < 0.85]
        events += [self.event("send", message) for message in sent]
        events += [self.event(kind, self.random.choice(self.messages)) for kind in kinds]
        self.random.shuffle(events)
        return events

    def group(self, name: str) -> Row:
        optional: Row = {
            "max_attempts": self.random.randrange(1, 4),
            "selects": [message for message in self.messages if self.random.random() < 0.7],
            "broadcast": True,
        }
        return {
            "event": "group",
            "group": name,
            "topics": list(self.random.choice((self.topics, "t"))),
            "ordered": self.random.random() < 0.5,
        } | {field: value for field, value in optional.items() if self.random.random() < 0.2}

    def event(self, kind: str, message: str) -> Row:
        choice, at_ms = self.random.choice, self.random.randrange(self.span)
        times = {"begin_ms": at_ms, "end_ms": at_ms + choice((0, 0, 1, 2, 5))}
        process, group, queue = {"process": choice("pq")}, {"group": choice(self.groups)}, self.place()
        home = self.homes[message] | (queue if self.random.random() < self.disorder else {})
        name = {"id": message}
        topic = {"topic": choice((*self.topics, "%R"))}
        mark = process | group | topic | {"broker": queue["broker"], "queue_id": queue["queue_id"], "at_ms": at_ms}
        outcome = {"outcome": choice(("ok", "ok", "failed", "unknown"))}
        fields: dict[str, Row] = {
            "send": process | name | home | times | outcome,
            "end_transaction": process
            | name
            | times
            | outcome
            | {"decision": choice(("commit", "commit", "rollback"))},
            "discard": name | {"at_ms": at_ms},
            "deliver": process | group | name | home | times | {"attempt": choice((0, 0, 0, 1, 1, 2))},
            "assign": mark,
            "revoke": mark,
            "commit": group | queue | {"topic": choice(self.topics), "at_ms": at_ms},
            "dead_letter": group | name | {"at_ms": at_ms},
            "reset": group | topic | {"at_ms": at_ms},
            "crash": choice((process, {"broker": queue["broker"]})) | {"at_ms": at_ms},
            "effect": process | {"name": "x", "key": choice("12"), "at_ms": at_ms},
            "drained": group | {"at_ms": at_ms + choice((0, 5, 40))},
        }
        event = {"event": kind} | fields[kind]
        if kind == "send":
            self.hide(event)
        elif kind == "deliver":
            self.retry(event)
        return event

    def hide(self, send: Row) -> None:
        """Make some sends half or delayed, and remove places that are not known."""
        if self.random.random() < 0.25:
            send["half"] = True
        if self.random.random() < 0.2:
            send["not_before_ms"] = self.random.randrange(self.span)
        if send["outcome"] != "ok" or {"half", "not_before_ms"} & set(send):
            for name in ("broker", "queue_id", "queue_offset"):
                del send[name]

    def retry(self, delivery: Row) -> None:
        """Let some deliveries come from a retry topic, and some run for ever."""
        delivery["outcome"] = self.random.choice(("ok", "ok", "retry", "died"))
        if self.random.random() < 0.1:
            del delivery["end_ms"], delivery["outcome"]
        if self.random.random() < 0.15:
            delivery |= {"stored_in": "%R", "queue_offset": self.random.randrange(4)}


def random_history(random: Random) -> list[Row]:
    return RandomHistory(random).events()


def kept_history(random: Random) -> list[Row]:
    """A random history in which some ends are kept, and some crashes are losses of power."""
    events = random_history(random)
    for event in events:
        if event.get("outcome") == "ok" and event["event"] == "deliver" and random.random() < 0.5:
            event["kept_ms"] = event["end_ms"] + random.choice((0, 0, 1, 4))
        elif event["event"] == "crash" and random.random() < 0.3:
            event["since_ms"] = event["at_ms"] - random.randrange(6)
    return events


@settings(max_examples=150 // step(), deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_evidence_is_a_history_with_the_anomaly(random: Random) -> None:
    events = kept_history(random)
    for anomaly in check_history(events):
        evidence = [events[number - 1] for number in anomaly.events]
        halves = {event.get("half", False) for event in evidence if event["event"] == "send"}
        is_broadcast = any(event.get("broadcast") for event in events if event["event"] == "group")
        if anomaly.anomaly != "repeat" or not (is_broadcast or len(halves) > 1):
            assert anomaly[:8] in [again[:8] for again in check_history(evidence)]


FREQUENCY = {
    "phantom": 76, "aborted": 178, "offset-conflict": 25, "early": 27, "send-order": 31, "overlap": 72,
    "delivery-order": 5, "attempts": 276, "repeat": 74, "progress-ahead": 21, "progress-back": 27, "effect-twice": 34,
    "undecided": 2, "lost": 28,
}  # fmt: skip
"""Anomalies of 400 random histories, on which three checkers that were written apart from each other agreed.

They did not yet read each instance of an ordered broadcasting group for itself, which leaves three anomalies out.
"""


def test_random_histories_have_as_many_anomalies_of_each_kind_as_before() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(400):
        kinds.update(anomaly.anomaly for anomaly in check_history(random_history(Random(seed))))
    assert kinds == FREQUENCY
    assert set(kinds) == set(KINDS)


@settings(max_examples=50 // step(), deadline=None)
@given(st.randoms(use_true_random=False))
@example(Random(100_008))  # Anomalies that differ in their sentences alone.
@example(Random(118_155))  # Two messages at one place at one time.
def test_the_order_of_lines_means_nothing(random: Random) -> None:
    events = kept_history(random)
    anomalies = check_history(events)
    random.shuffle(events)
    assert [a._replace(events=()) for a in check_history(events)] == [a._replace(events=()) for a in anomalies]


@pytest.mark.parametrize(("kind", "events", "message", "lines"), WRONG)
def test_the_evidence_alone_shows_it(kind: str, events: list[Row], message: str | None, lines: Sequence[int]) -> None:
    def is_shown(evidence: list[Row]) -> bool:
        return any((a.anomaly, a.id) == (kind, message) for a in check_history(evidence))

    evidence = [events[line - 1] for line in lines]
    assert is_shown(evidence)
    needless = [event for event in evidence if is_shown([other for other in evidence if other is not event])]
    # A delivery beyond the allowed ones, or after a rollback, is wrong too where the events that say so are missing.
    assert all(event["event"] == "group" or event.get("decision") == "rollback" for event in needless)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"event": "sent"}, "line 2: unknown event 'sent'; did you mean 'send'?"),
        ({"id": "m"}, "line 2: the field 'event' is missing"),
        ([], "line 2: expected a JSON object"),
        (deliver(end_ms=4), "line 2: deliver: time runs backwards: end_ms is before begin_ms"),
        (send(begin_ms=2), "line 2: send: time runs backwards"),
        (send() | {"begin_ms": "0"}, "line 2: send: begin_ms: expected a whole number, found '0'"),
        (send(begin_ms=True), "line 2: send: begin_ms: expected a whole number, found True"),
        (send(end_ms=1 << 63), "line 2: send: end_ms: expected a number from -4611686018427387904 to"),
        (send(outcome="good"), "line 2: send: outcome: expected ok or failed or unknown, found 'good'"),
        (send(half=1), "line 2: send: half: expected true or false, found 1"),
        (send(topic=None), "line 2: send: topic: expected a text, found None"),
        (deliver(queue_id=-1), "line 2: deliver: queue_id: expected a number from 0 to 4611686018427387904, found -1"),
        ({"event": "discard", "id": "m"}, "line 2: discard: the field 'at_ms' is missing"),
        (send() | {"broker": None}, "line 2: send: the outcome is 'ok', but the field 'broker' is missing"),
        (running() | {"end_ms": 9}, "line 2: deliver: end_ms and outcome belong together"),
        (deliver(outcome="retry", kept_ms=7), "line 2: deliver: kept_ms: expected the outcome 'ok'"),
        (deliver(kept_ms=5), "line 2: deliver: kept_ms: expected the outcome 'ok', and no time before end_ms"),
        (crash(1), "line 2: crash: expected a process or a broker"),
        (group(), "line 2: group: a second one of 'g'"),
        (group(topics="t"), "line 2: group: topics: expected a list of texts, found 't'"),
    ],
)
def test_what_is_no_event_is_refused(event: Any, problem: str) -> None:
    with pytest.raises(InputError) as raised:
        check_history([group(), event, send()])
    assert str(raised.value).startswith(problem)


def test_unknown_fields_are_ignored() -> None:
    assert check_history([send(trace="x", sharding_key="k"), deliver(host={"name": 1}, end_ms=7)]) == []
