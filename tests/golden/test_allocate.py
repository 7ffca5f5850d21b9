"""``allocate`` compared with the answers of RocketMQ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from librmq.client.allocation import own_share
from librmq.message.message import MessageQueue
from tests.conftest import Row, Run
from tests.reference import existing, folders, jsonl

OPTIONAL = ("name", "error_message", "hash_code")
ANSWERS = ("result", "error_type")


@pytest.mark.parametrize("left_out", [OPTIONAL + ANSWERS, ()], ids=["inputs only", "with the answers"])
def test_every_case_is_answered_as_by_rocketmq(run_lines: Run, left_out: tuple[str, ...]) -> None:
    cases = jsonl(existing("allocate.jsonl"))
    status, lines, err = run_lines(
        "allocate", given=[{key: value for key, value in case.items() if key not in left_out} for case in cases]
    )
    assert (status, err) == (0, "")
    assert [json.loads(line) for line in lines] == [
        {key: value for key, value in case.items() if key not in OPTIONAL} for case in cases
    ]


SHARE: Row = {"strategy": "AVG", "cid": "c", "mqs": [["T", "b", 0]], "cids": ["c"]}
FAR: Row = SHARE | {"strategy": "MACHINE_ROOM_NEARBY", "cid": "r-c", "mqs": [["T", "q-b", 0]], "cids": ["r-c", "q-c"]}
ROOMS: Row = SHARE | {"strategy": "MACHINE_ROOM", "consumer_idcs": None}
CHOICE: Row = {"selector": "HASH", "mqs": [["T", "b", 0], ["T", "b", 1]], "arg_type": "String", "arg": "x"}


@pytest.mark.parametrize(
    "row",
    [
        "{",
        {},
        SHARE | CHOICE,
        SHARE | {"strategy": "x" * 70_000},
        {key: value for key, value in SHARE.items() if key != "cid"},
        SHARE | {"mqs": [["T", "b"]]},
        SHARE | {"cids": [None]},
        SHARE | {"strategy": "MACHINE_ROOM_NEARBY", "inner": "MACHINE_ROOM_NEARBY"},
        SHARE | {"strategy": "CONSISTENT_HASH", "virtual_nodes": "10"},
        CHOICE | {"selector": "x" * 70_000},
        CHOICE | {"arg_type": "Integer", "arg": 1 << 31},
        CHOICE | {"arg_type": "Double", "arg": 10**400},
    ],
)
def test_bad_input_ends_with_the_answers_before_it(run_lines: Run, row: Row | str) -> None:
    status, lines, err = run_lines("allocate", given=[SHARE, row, SHARE])
    assert (status, len(lines)) == (2, 1)
    assert err.startswith("librmq allocate: line 2: ")
    assert len(err) < 300


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (CHOICE | {"arg_type": "Double", "arg": "NaN"}, {"result": ["T", "b", 0]}),
        (CHOICE | {"arg_type": "Double", "arg": 2}, {"result": ["T", "b", 0]}),
        (CHOICE | {"mqs": None}, {"error_type": "NullPointerException"}),
        (SHARE | {"strategy": "MACHINE_ROOM_NEARBY", "inner": "AVG"}, {"error_type": "IllegalArgumentException"}),
        # A negative number of nodes is refused before any queue is read, a null list only when it is used.
        (FAR | {"inner": "CONSISTENT_HASH", "virtual_nodes": -1}, {"error_type": "IllegalArgumentException"}),
        (FAR | {"inner": "CONSISTENT_HASH", "virtual_nodes": 0}, {"result": []}),
        (FAR | {"inner": "CONFIG", "config": None}, {"result": []}),
        (FAR | {"inner": "CONFIG", "config": None, "cids": ["r-c"]}, {"error_type": "NullPointerException"}),
        (ROOMS, {"result": []}),
        (ROOMS | {"mqs": [["T", "b", 0], ["T", "room@b", 0]]}, {"error_type": "NullPointerException"}),
        (ROOMS | {"mqs": [["T", "room@b", 0]], "cids": ["other"]}, {"result": []}),
    ],
)
def test_cases_beyond_those_of_rocketmq(run_lines: Run, row: Row, answer: Row) -> None:
    status, lines, err = run_lines("allocate", given=[row])
    assert (status, err) == (0, "")
    assert json.loads(lines[0]) == row | answer


@pytest.mark.parametrize("folder", folders("clients-"))
def test_a_client_owns_the_same_queues_as_a_real_one(folder: Path) -> None:
    """Real clients of 4.9.4 with the default strategy; most folders contain a rebalance."""
    events = folder / "events.jsonl"
    for event in jsonl(events) if events.exists() else ():
        if event["kind"] == "allocate":
            queues, share = (
                [recorded_queue(event["topic"], queue) for queue in event[name]] for name in ("queuesAll", "result")
            )
            assert own_share(event["cid"], queues[::-1], event["cidAll"][::-1]) == share, event


def recorded_queue(topic: str, recorded: int | str) -> MessageQueue:
    """Return a queue in its recorded form: its number, or broker and number if the broker is not the first."""
    broker, _, number = str(recorded).rpartition(":")
    return MessageQueue(topic, broker or "broker-a", int(number))
