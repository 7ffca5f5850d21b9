"""What consumers do, against recorded runs of real ones: deliveries, progress, the log."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.clientruns import Replay, driven_folders, real_delivery, real_record, record_row, recorded_delivery


@pytest.fixture(scope="module", params=driven_folders())
def replay(request: pytest.FixtureRequest) -> tuple[Path, Replay]:
    folder: Path = request.param
    run = Replay(folder)
    run.run()
    return folder, run


def differences(recorded: Counter[Any], real: Counter[Any]) -> dict[str, list[Any]]:
    """The first few that are missing, and that are too many."""
    both = {"missing": list(recorded - real)[:4], "too many": list(real - recorded)[:4]}
    return {what: found for what, found in both.items() if found}


def by_queue(deliveries: list[Any]) -> dict[Any, list[Any]]:
    queues: dict[Any, list[Any]] = defaultdict(list)
    for delivery in deliveries:
        queues[delivery[:2]].append(delivery)
    return queues


def test_deliveries(replay: tuple[Path, Replay]) -> None:
    _, run = replay
    recorded: dict[Any, list[Any]] = defaultdict(list)
    for row in run.rows:
        if row["kind"] == "deliver":
            messages = [message for message in row["msgs"] if message["msgId"] not in run.broken]
            recorded[row["client"]] += [recorded_delivery(row, message) for message in messages]
    real: dict[Any, list[Any]] = defaultdict(list)
    for client, message, properties, times in run.delivered:
        if message.message_id not in run.broken:
            real[client].append(real_delivery(message, properties, times))
    for client in recorded.keys() | real.keys():
        if client in run.orderly:
            assert by_queue(real[client]) == by_queue(recorded[client])
        assert differences(Counter(recorded[client]), Counter(real[client])) == {}


def test_progress(replay: tuple[Path, Replay]) -> None:
    _, run = replay
    row, table = run.tables[-1]
    delivered = {
        (run.groups[one["client"]], one["mq"]["topic"], one["mq"]["queueId"], message["queueOffset"])
        for one in run.rows
        if one["kind"] == "deliver"
        for message in one["msgs"]
    }
    left_out = {run.groups[client] for client in run.broken_clients}
    for name, offsets in row["table"].items():
        topic, _, group = name.rpartition("@")
        if group in run.groups.values() and group not in left_out:
            assert offsets.keys() == table.get(name, {}).keys(), name
            for queue, recorded in offsets.items():
                # What a filter leaves out is passed at once or within 15 s, by what else happens.
                between = range(*sorted((recorded, table[name][queue])))
                passed = [at for at in between if (group, topic, int(queue), at) in delivered]
                assert not passed, f"{name}/{queue}: {recorded} there, {table[name][queue]} here"


def test_log(replay: tuple[Path, Replay]) -> None:
    folder, run = replay
    rows = [json.loads(line) for line in (folder / "messages.jsonl").read_text("utf-8").splitlines()]
    recorded = Counter(
        record_row(row)
        for row in rows
        if row["kind"] == "message" and row["properties"].get("UNIQ_KEY") not in run.broken
    )
    with run.reopened() as broker:
        real = Counter(
            real_record(message)
            for topic in broker.topics()
            for message in broker.messages(topic)
            if message.unique_key not in run.broken
        )
    assert differences(recorded, real) == {}
