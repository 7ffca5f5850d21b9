"""Compare ``show`` and ``tail`` with ``dump``: the selected messages, their order and their bodies."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.message.record import MAGIC_AT
from tests.budget import many
from tests.cli.stand import Shell, Terminal
from tests.reference import existing, unpack

Row = dict[str, Any]
Test = Callable[[Row], bool]

FROM, TO = "2026-11-20T04:54:53Z", "2026-11-20T04:54:58Z"
FROM_MS, TO_MS = 1_795_150_493_000, 1_795_150_498_000


def dumped(shell: Shell) -> list[Row]:
    """Return the message rows of ``dump``; another test compares them with a real broker's."""
    return [row for row in shell("dump", "store").rows if row["type"] == "message"]


def body(row: Row) -> bytes:
    return base64.b64decode(row["body_b64"] or "")


def ordinary(row: Row) -> bool:
    return not row["topic"].startswith(("RMQ_SYS", "SCHEDULE"))


SELECTIONS: list[tuple[list[str], Test]] = [
    ([], lambda row: True),
    (["--topic", "OrderTopic"], lambda row: row["topic"] == "OrderTopic"),
    (["--topic", "订单主题", "--queue", "0"], lambda row: row["topic"] == "订单主题"),
    (["--queue", "1"], lambda row: row["queue_id"] == 1),
    (
        ["--topic", "OrderTopic", "--queue", "1", "--offset", "7"],
        lambda row: (row["topic"], row["queue_id"], row["queue_offset"]) == ("OrderTopic", 1, 7),
    ),
    (
        ["--topic", "OrderTopic", "--queue", "1", "--offset", "7-9"],
        lambda row: (row["topic"], row["queue_id"]) == ("OrderTopic", 1) and 7 <= row["queue_offset"] <= 9,
    ),
    (
        ["--topic", "OrderTopic", "--queue", "1", "--offset", "30-"],
        lambda row: (row["topic"], row["queue_id"]) == ("OrderTopic", 1) and row["queue_offset"] >= 30,
    ),
    (["--key", "key14"], lambda row: "key14" in (row["dispatch_keys"] or "").split()),
    (
        ["--topic", "OrderTopic", "--key", "key14"],
        lambda row: row["topic"] == "OrderTopic" and "key14" in (row["dispatch_keys"] or "").split(),
    ),
    (["--id", "7F00000100002A9F00000000000195F7"], lambda row: row["phys"] == 103927),
    (["--id", "UNIQ-same"], lambda row: row["dispatch_uniq_key"] == "UNIQ-same"),
    (["--tag", "TagA || BB"], lambda row: row["properties"].get("TAGS") in ("TagA", "BB")),
    (
        ["--topic", "OrderTopic", "--tag", "a"],
        lambda row: row["topic"] == "OrderTopic" and row["properties"].get("TAGS") == "a",
    ),
    (  # whose entries have times of delivery in place of tags
        ["--topic", "SCHEDULE_TOPIC_XXXX", "--tag", "TagC"],
        lambda row: row["topic"] == "SCHEDULE_TOPIC_XXXX" and row["properties"].get("TAGS") == "TagC",
    ),
    (
        ["--sql", "qty IS NOT NULL AND TAGS IS NULL"],
        lambda row: "qty" in row["properties"] and "TAGS" not in row["properties"],
    ),
    (["--grep", "hello$"], lambda row: body(row).endswith(b"hello")),
    (["--since", FROM, "--until", TO], lambda row: FROM_MS <= row["store_timestamp"] < TO_MS),
    (
        ["--topic", "OrderTopic", "--since", FROM, "--until", TO],
        lambda row: row["topic"] == "OrderTopic" and FROM_MS <= row["store_timestamp"] < TO_MS,
    ),
    (
        ["--key", "Aa", "--since", FROM],
        lambda row: row["store_timestamp"] >= FROM_MS and "Aa" in (row["dispatch_keys"] or "").split(),
    ),
]  # fmt: skip


@many
@pytest.mark.parametrize(("words", "wanted"), SELECTIONS, ids=[" ".join(words) or "all" for words, _ in SELECTIONS])
def test_selected_messages_are_shown_in_log_order(shell: Shell, words: list[str], wanted: Test) -> None:
    expected = [row for row in dumped(shell) if wanted(row)]
    assert expected
    answer = shell("show", "store", *words)
    assert (answer.status, answer.said) == (0, "")
    if "--key" in words:  # the index does not hold the broker's half messages
        expected = [row for row in expected if ordinary(row)]
        assert [row["phys"] for row in answer.rows if ordinary(row)] == [row["phys"] for row in expected]
        return
    assert [row["phys"] for row in answer.rows] == [row["phys"] for row in expected]
    for row, original in zip(answer.rows, expected, strict=True):
        assert row.pop("body") == body(original).decode(errors="backslashreplace")
        assert row == {name: value for name, value in original.items() if not name.endswith("body_b64")}


def test_bodies_are_printed_in_the_form_asked_for(shell: Shell) -> None:
    with MessageStore.open("new") as store:
        for one in (b'{"a": [1, 2]}', b"text", b"\xff\x00", b"", b"[NaN]", b"[1e999]"):
            store.append(Message("T", one))
    shown = {
        form: [row["body"] for row in shell("show", "new", "--body", form).rows]
        for form in ("text", "json", "hex", "base64", "none")
    }
    assert shown == {
        "text": ['{"a": [1, 2]}', "text", "\\xff\x00", "", "[NaN]", "[1e999]"],
        "json": [{"a": [1, 2]}, "text", "\\xff\x00", "", "[NaN]", "[1e999]"],
        "hex": ["7b2261223a205b312c20325d7d", "74657874", "ff00", "", "5b4e614e5d", "5b31653939395d"],
        "base64": ["eyJhIjogWzEsIDJdfQ==", "dGV4dA==", "/wA=", "", "W05hTl0=", "WzFlOTk5XQ=="],
        "none": [None] * 6,
    }


@pytest.mark.parametrize("form", ["csv", "table"])
def test_a_body_of_any_depth_is_printed(shell: Shell, form: str) -> None:
    pytest.importorskip("rich")
    with MessageStore.open("new") as store:
        for depth in range(800, 1000):
            store.append(Message("T", b"[" * depth + b"]" * depth))
    answer = shell("show", "new", "--body", "json", "--format", form)
    assert (answer.status, answer.said) == (0, "")


def test_a_table_shows_times_with_their_zone(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    text = shell("show", "store", "--topic", "OrderTopic", "--limit", 1, "--format", "table").out
    assert "2026-11-20 04:54:52.124Z" in text
    assert "world paid hello" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--offset", "1"], "name the queue too, by --topic and --queue"),
        (["--topic", "T", "--queue", "0", "--offset", "x"], "expected a queue offset such as 100"),
        (["--queue", "-1"], "expected a whole number"),
        (["--grep", "("], "--grep: "),
        (["--sql", "a = 1 rest"], "rest"),
        (["--tag", "||"], "tag"),
        (["--id", "two words"], "malformed id"),
        (["--since", "soon"], "not a time"),
    ],
)
def test_options_that_make_no_sense_are_refused(shell: Shell, words: list[str], said: str) -> None:
    answer = shell("show", "store", *words)
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.said


def test_damage_ends_the_list_with_its_place(shell: Shell) -> None:
    log = shell.folder / "store" / "commitlog" / f"{65536:020d}"
    data = bytearray(log.read_bytes())
    data[38500] ^= 1
    log.write_bytes(data)
    answer = shell("show", "store")
    assert answer.status == 1
    assert answer.rows[-1]["phys"] < 103927
    assert "103927" in answer.said


# --- tail


@many
@pytest.mark.parametrize("count", [1, 10, 60, 1000])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ordinary),
        (["--all"], lambda row: True),
        (["--topic", "OrderTopic"], lambda row: row["topic"] == "OrderTopic"),
        (["--tag", "TagA"], lambda row: ordinary(row) and row["properties"].get("TAGS") == "TagA"),
        (["--grep", "order"], lambda row: ordinary(row) and b"order" in body(row)),
        (["--until", TO], lambda row: ordinary(row) and row["store_timestamp"] < TO_MS),
    ],
)
def test_tail_prints_the_last_messages(shell: Shell, words: list[str], wanted: Test, count: int) -> None:
    in_queues = {row["phys"] for row in dumped(shell) if row["sys_flag"] & 12 in (0, 8)}
    expected = [row["phys"] for row in dumped(shell) if wanted(row) and row["phys"] in in_queues]
    answer = shell("tail", "store", "-n", count, *words)
    assert [row["phys"] for row in answer.rows] == expected[-count:]


def test_tail_reads_only_what_it_prints(shell: Shell) -> None:
    with MessageStore.open("new") as store:
        places = [store.append(Message("T", b"body"), number % 4).physical_offset for number in range(400)]
    (log,) = Path("new/commitlog").iterdir()
    data = bytearray(log.read_bytes())
    data[places[300] + MAGIC_AT] ^= 1
    log.write_bytes(data)
    answer = shell("tail", "new", "-n", 99)
    assert (answer.status, answer.said, [row["phys"] for row in answer.rows]) == (0, "", places[-99:])
    assert shell("tail", "new", "-n", 100).status == 1


def test_tail_follows_new_messages(shell: Shell) -> None:
    done = threading.Event()
    with MessageStore.open("new") as store:
        for number in range(3):
            store.append(Message("T", b"%d" % number))

        def write() -> None:
            number = 3
            while not done.wait(0.01):
                store.append(Message("T", b"%d" % number, tags="odd" if number % 2 else "even"))
                number += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            answer = shell("tail", "new", "-f", "-n", 1, "--limit", 6, "--tag", "odd")
        finally:
            done.set()
            thread.join()
    numbers = [int(row["body"]) for row in answer.rows]
    assert len(numbers) == 6
    assert numbers == list(range(numbers[0], numbers[0] + 12, 2))


@pytest.mark.parametrize("command", ["show", "count", "export"])
def test_a_range_that_is_reversed_is_refused(shell: Shell, command: str) -> None:
    more = ["-o", "out.jsonl"] if command == "export" else []
    answer = shell(command, "store", "--since", "2026-11-20", "--until", "2026-11-19", *more)
    assert answer.status == 2
    assert "--since 2026-11-20 is later than --until 2026-11-19" in answer.said
    if command != "export":
        words = ("--topic", "OrderTopic", "--queue", "0", "--offset", "9-3")
        assert "--offset 9-3: 9 is after 3" in shell(command, "store", *words).said


def test_messages_before_a_time_after_the_clock_stepped_back(shell: Shell) -> None:
    for body, at_ms in ((b"1", 0), (b"late", 60_000), (b"2", 1_000)):
        with MessageStore.open("stepped", clock=ManualClock(1_800_000_000_000 + at_ms), background=False) as store:
            store.append(Message("t", body))
    rows = shell("show", "stepped", "--until", str(1_800_000_000_000 + 30_000)).rows
    assert [row["body"] for row in rows] == ["1", "2"]


@pytest.mark.parametrize(
    "words", ["show", "tail", "count", "count --by tag --sampled", "story key14", "pending", "lag", "progress"]
)
def test_a_topic_that_does_not_exist_is_reported(shell: Shell, words: str) -> None:
    command, *more = words.split()
    answer = shell(command, "store", "--topic", "OrderTopik", *more)
    assert (answer.status, answer.out) == (0, "")
    assert answer.said == "note: topic 'OrderTopik' has no queue; did you mean 'OrderTopic'?\n"
    assert "note" not in shell(command, "store", "--topic", "OrderTopic", *more).said


@pytest.mark.parametrize("command", ["show", "tail", "count"])
def test_a_queue_that_does_not_exist_is_reported(shell: Shell, command: str) -> None:
    answer = shell(command, "store", "--topic", "OrderTopic", "--queue", "9")
    assert (answer.status, answer.out) == (0, "")
    assert answer.said == "note: topic 'OrderTopic' has no queue 9: its queues are 0-1\n"
    assert shell(command, "store", "--topic", "OrderTopic", "--queue", "1").said == ""


def test_offsets_beyond_the_end_are_reported(shell: Shell) -> None:
    words = "show", "store", "--topic", "OrderTopic", "--queue", "1", "--offset"
    answer = shell(*words, "1000000-")
    assert (answer.status, answer.out) == (0, "")
    last = shell(*words, "0-").rows[-1]["queue_offset"]
    assert answer.said == f"note: queue 1 of topic 'OrderTopic' has the offsets 0 to {last}\n"
    assert shell(*words, str(last)).said == ""


def test_names_that_do_not_exist_are_reported(shell: Shell) -> None:
    """Also where they only choose a part of what is printed, or are an error."""
    note = "topic 'OrderTopik' has no queue; did you mean 'OrderTopic'?"
    for words in ([], ["--design"]):
        assert note in shell("diagnose", "store", *words, "--important", "OrderTopik").said
        assert "has no queue" not in shell("diagnose", "store", *words, "--important", "OrderTopic").said
    for words in (["dead-letters"], ["lag"]):
        answer = shell(*words, "store", "--group", "CG_ordre")
        assert answer.said == "note: there is no group 'CG_ordre'; did you mean 'CG_order'?\n"
        assert answer.status == 0
    for group, said in (
        ("CG_ordre", "there is no group 'CG_ordre'; did you mean 'CG_order'?"),
        ("CG_order", "nothing is sent"),
    ):
        lines = shell("replay", "store", "--group", group, "--to-topic", "by-hand", "--dry-run").said.splitlines()
        assert next(line for line in lines if "without --dry-run" not in line).startswith(f"note: {said}")
    for words in (["queue", "store", "OrderTopik", "0"], ["topic", "delete", "store", "OrderTopik"]):
        answer = shell(*words)
        assert answer.status == 2
        assert answer.said.endswith("; did you mean 'OrderTopic'?\n")
    assert shell("lag", "store", "--group", "Zzz").said.endswith("'Zzz'; librmq groups lists the groups\n")
    assert shell("lag", "store", "--topic", "Zzz").said.endswith("has no queue; librmq topics lists the topics\n")
    pytest.importorskip("jinja2")
    answer = shell("report", "store", "--topic", "OrderTopic,OrderTopik", "--group", "CG_ordre", "-o", "page.html")
    assert answer.said.splitlines() == [f"note: {note}", "note: there is no group 'CG_ordre'; did you mean 'CG_order'?"]


def test_a_terminal_shows_that_nothing_was_found(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets no note, because its reader can see that there are no rows."""

    words = ["show", "store", "--grep", "no such body"]
    assert shell(*words).said == ""
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(words) == 0
    assert capsys.readouterr().err == "note: nothing found\n"


def test_times_select_messages_though_the_clock_was_put_back(shell: Shell) -> None:
    """A binary search alone would miss messages around the jump, of which no order of times is left."""
    start_ms, times = 1_795_150_000_000, []
    for begin, count in ((0, 40), (-1000, 30), (2000, 10), (-400, 25)):
        clock = ManualClock(start_ms + 1000 * begin)
        with MessageStore.open("jumps", StoreConfig.tiny(), clock=clock) as store:
            for number in range(count):
                store.append(Message("T", b"x"), number % 2)
                times.append(clock.now_ms())
                clock.move_to(clock.now_ms() + 60_000)
    for since_s in range(-1100, 2600, 900):
        since, until = start_ms + 1000 * since_s, start_ms + 1000 * (since_s + 700)
        rows = shell("show", "jumps", "--topic", "T", "--since", since, "--until", until).rows
        assert [row["store_timestamp"] for row in rows] == [at for at in times if since <= at < until]
        until_only = shell("show", "jumps", "--topic", "T", "--until", until).rows
        assert [row["store_timestamp"] for row in until_only] == [at for at in times if at < until]


@pytest.mark.slow
@pytest.mark.parametrize("archive", ["st-fq.tar.xz", "bcq.tar.xz"])
def test_each_topic_shows_what_its_queues_have(shell: Shell, archive: str) -> None:
    """Entries of a light queue, ``%LMQ%…``, lead to records of other topics, and several to one record of a batch."""
    unpack(existing("store-5.3.3", archive), Path("golden"))
    (store,) = (path.parent for path in Path("golden").glob("**/commitlog"))
    topics = [row for row in shell("topics", store).rows if row["messages"]]
    assert any(row["topic"].startswith("%LMQ%") for row in topics) == (archive == "st-fq.tar.xz")
    for row in topics:
        words = store, "--topic", row["topic"]
        for command in (
            ("show",),
            ("tail", "-n", 1000),
            ("show", "--queue", 0),
            ("show", "--queue", 0, "--offset", "0-"),
        ):
            rows = shell(command[0], *words, *command[1:]).rows
            assert len(rows) == row["messages"] or (row["queues"] > 1 and command[1:2] == ("--queue",)), command
        assert [count["messages"] for count in shell("count", *words, "--grep", "").rows] == [row["messages"]]
        assert len(shell("show", *words, "--queue", 0, "--offset", "0").rows) <= 1
    for row in topics:
        if row["topic"].startswith("%LMQ%"):
            small = shell(
                "extract", store, "--topic", row["topic"], "-o", "small" + row["topic"].replace("%", "-")
            ).rows
            assert [answer["messages"] for answer in small] == [row["messages"]]
