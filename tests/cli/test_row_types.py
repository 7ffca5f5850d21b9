"""Each line that a command prints has the type that ``tools/row_types.py`` gives it, and that the page shows."""

from __future__ import annotations

import json
import shlex

import pytest

from librmq.cli._syntax import COMMANDS
from tests import cases
from tests.cli.stand import ROW_TYPES, Shell, errors_of
from tests.reference import COMPACT, unpack

ROWS = ROW_TYPES | cases.ROW_TYPES
WITHOUT_ROWS = {"broker-conf", "completion", "demo", "filter"}
OF_THEIR_OWN_TESTS = {"console", "serve", "spark", "who"}
"""They run longer, or beside other processes."""
EXAMPLES = tuple(
    f"{command.name} {command.example}"
    for command in COMMANDS.values()
    if command.name not in WITHOUT_ROWS | OF_THEIR_OWN_TESTS | {"follow"}
)
MORE = (
    *(f"lag store --by {by}" for by in ("queue", "group", "topic", "origin")),
    *(f"count store --by {by}" for by in ("topic", "queue", "tag", "key", "minute", "hour", "day")),
    "diagnose store --design",
    "diagnose store --volumes",
    "dead-letters held --causes",
    "dead-letters held --group billing",
    "dead-letters held --group billing --resend --dry-run",
    "expiring held --reserved 0s --within 6h",
    "export store -o orders.jsonl --topic OrderTopic",
    "import newer orders.jsonl",
    "group delete store CG_order --dry-run",
    "lag held",
    "pending held",
    "queue held orders 0",
    "skip held --group billing --topic orders --keep 1",
    "replay held --group billing --topic orders --to again",
    "show held --topic orders --body json",
    "story held k3 --topic orders",
    "tail held -n 3",
    "timers timer",
    "topic delete store OrderTopic --dry-run",
    "topic grow store OrderTopic --queues 8 --dry-run",
    "topics held",
    "verify held",
    "whatif held --group billing --topic orders",
)
GIVEN: dict[str, dict[str, object]] = {
    "allocate": {"strategy": "AVG", "cid": "c2", "mqs": [["T", "b", 0], ["T", "b", 1]], "cids": ["c1", "c2"]},
    "ask store": {"type": "offset_by_time", "topic": "OrderTopic", "queue_id": 0, "timestamps": [1795150496611]},
    "ask ./store": {"type": "index_query", "topic": "OrderTopic", "key": "key14"},
    "ask ././store": {"type": "get_message", "topic": "OrderTopic", "queue_id": 0, "offset": 0},
    "bloom": {"f": 20, "n": 32, "strings": ["CG#T"]},
    "check-history -": {"event": "dead_letter", "group": "billing", "id": "order-1", "at_ms": 7},
    "filter": {"expr": "a > 5", "props": {"a": "7.5"}},
    "load new": {"op": "put", "topic": "T", "queueId": 0, "body": "x", "at_ms": 1795200000000},
    "follow new copied --until-end": {},
}


def test_every_command_has_types() -> None:
    assert set(COMMANDS) - set(ROW_TYPES) == WITHOUT_ROWS
    assert set(ROW_TYPES) <= set(COMMANDS)
    assert cases.ROW_TYPES.keys() == cases.COMMANDS.keys()


@pytest.mark.slow
def test_each_line_has_its_type(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shell.folder)
    for name, archive in (("held", "librmq-0.1.0"), ("timer", "rocketmq-5.3.3")):
        unpack(COMPACT / "stores" / f"{archive}.tar.xz", shell.folder / "old")
        (shell.folder / "old" / "store").rename(shell.folder / name)
    wrong, silent = [], set(ROWS) - OF_THEIR_OWN_TESTS
    for line in (*EXAMPLES, *MORE, *GIVEN):
        name, *words = shlex.split(line)
        for row in shell(name, *words, given=json.dumps(GIVEN.get(line, {}))).rows:
            silent.discard(name)
            wrong += [f"{line}: {error}" for error in errors_of(name, row)]
    assert wrong == []
    assert silent <= {"decide", "expiring", "schedules", "traces"}
