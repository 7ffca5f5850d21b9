"""Output of rows as JSON lines and as tables, and messages on standard error."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.cli._output import JsonLines, LimitReached, Output, complain, json_line, open_output, write_page
from librmq.errors import InputError, MissingExtraError
from librmq.formatting import cell_text, printable
from tests.cli.stand import Terminal
from tests.programs import run_program

# Erase the screen, set the title, an 8-bit control code, a right-to-left override, and a lone surrogate.
NASTY = "a\x1b[2Jb\x1b]0;title\x07c\x9b2Jd\u202ee\x7f\r\n\ud800f\u200b"
SAFE = "a\\u001b[2Jb\\u001b]0;title\\u0007c\\u009b2Jd\\u202ee\\u007f\\u000d\\u000a\\ud800f\\u200b"


def test_foreign_text_cannot_control_a_terminal() -> None:
    assert printable(NASTY) == SAFE
    assert printable("订单 Ünïcode 👍🏽") == "订单 Ünïcode 👍🏽"


def test_json_lines_keep_unicode_and_order() -> None:
    stream = io.StringIO()
    output = JsonLines(stream)
    output.row({"topic": "订单", "b": None, "a": [1, True]})
    output.row({"nasty": NASTY})
    first, second = stream.getvalue().splitlines()
    assert first == '{"topic":"订单","b":null,"a":[1,true]}'
    assert second.isascii()
    assert json.loads(second) == {"nasty": NASTY}


@pytest.mark.slow
@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.dictionaries(st.text(), inner)))
def test_json_lines_are_read_back(value: Any) -> None:
    line = json_line({"value": value})
    assert json.loads(line) == {"value": value}
    assert printable(line) == line


@pytest.mark.parametrize("count", [3, 600])
def test_csv_is_read_back(count: int) -> None:
    texts = ["", "=1", "a,b", 'a"b', "\1\2", "\\u0001", "\\\1", NASTY, "订单", "-1", "'x"]
    rows = [{"=n,": text, "flag": True, "no": None, "at": 1.5, "list": [text]} for text in texts] * count
    output = open_output("csv", stream := io.StringIO(newline=""))
    output.lines(json_line(row) for row in rows)
    output.row({"flag": False})
    output.close()
    read = [*csv.reader(io.StringIO(stream.getvalue(), newline=""))]
    assert read[0] == ["'=n,", "flag", "no", "at", "list"]
    assert [[cell_text(row[0]), *row[1:4]] for row in read[1:-1]] == [[row["=n,"], "True", "", "1.5"] for row in rows]
    assert [row[4] for row in read[1:-1]] == [printable(json.dumps(row["list"], ensure_ascii=False)) for row in rows]
    assert read[-1] == ["", "False", "", "", ""]
    assert stream.getvalue().replace("\n", "").isprintable()


def test_csv_refuses_a_column_that_comes_late() -> None:
    output = open_output("csv", stream := io.StringIO())
    with pytest.raises(InputError, match=r"first 500 \('b', 'c'\): use jsonl"):
        output.lines([*['{"a":1}'] * 600, '{"c":1,"a":2,"b":3}'])
    assert stream.getvalue() == "a\n" + "1\n" * 600


def test_parquet_holds_text_of_json_bodies(tmp_path: Path) -> None:
    """JSON can have half a character, or a number of any length."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "rows.parquet")
    output = open_output("parquet", io.StringIO(), path)
    output.row({"text": "é\ud800", "body": {"a\ud800": "\udfff"}})
    output.close()
    assert parquet.read_table(path).to_pylist() == [{"text": "é\\ud800", "body": '{"a\\ud800": "\\udfff"}'}]
    longer = open_output("parquet", io.StringIO(), path)
    longer.row({"body": 1 << 64})
    with pytest.raises(InputError, match="use jsonl"):
        longer.close()


class NamedPair(NamedTuple):
    text: str
    more: Any


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(), st.none() | st.integers() | st.lists(st.text()) | st.just({"a": 1, "b": [2]}))))
def test_named_tuples_are_printed_as_their_rows(pairs: list[tuple[str, Any]]) -> None:
    rows = [NamedPair(*pair) for pair in [*pairs, (NASTY, "%s\x1e,")]]
    by_tuples, one_by_one = io.StringIO(), io.StringIO()
    Output(JsonLines(by_tuples)).rows_of(rows)
    for row in rows:
        JsonLines(one_by_one).row(row._asdict())
    assert by_tuples.getvalue() == one_by_one.getvalue()


# --- which form


ROWS: list[dict[str, Any]] = [
    {"n": 1},
    {"list": ["x", "\x1e", NASTY]},
    {"text": '},"\\u001e",{'},
    {"of": {"c": "\x1e"}},
    {"n": 2},
]


@pytest.mark.parametrize("limit", [None, 1, 2, 5, 9])
def test_many_rows_are_printed_like_single_ones(limit: int | None) -> None:
    stream, expected = io.StringIO(), [json_line(row) for row in ROWS[:limit]]
    output = Output(JsonLines(stream), limit)
    with pytest.raises(LimitReached) if limit in (1, 2, 5) else nullcontext():
        output.rows_of(iter(ROWS))
    assert (stream.getvalue().splitlines(), output.rows) == (expected, len(expected))


def test_lines_before_an_error_are_printed() -> None:
    def lines() -> Iterator[str]:
        yield from (f'{{"number":{number}}}' for number in range(5))
        raise InputError("the sixth")

    stream = io.StringIO()
    output = Output(JsonLines(stream))
    with pytest.raises(InputError, match="the sixth"):
        output.lines(lines())
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == list(range(5))
    assert output.rows == 5


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_no_line_is_read_after_the_last_one_that_is_asked_for(count: int) -> None:
    lines, stream = (f'{{"number":{number},"text":"{"x" * 99}"}}' for number in range(2000)), io.StringIO()
    with pytest.raises(LimitReached):
        Output(JsonLines(stream), limit=count).lines(lines)
    assert len(stream.getvalue().splitlines()) == count
    assert json.loads(next(lines))["number"] == count


def test_programs_get_json_lines_and_people_tables() -> None:
    pytest.importorskip("rich")
    from librmq.cli._table import Table

    assert isinstance(open_output(None, io.StringIO()).writer, JsonLines)
    assert isinstance(open_output("jsonl", Terminal()).writer, JsonLines)
    assert isinstance(open_output(None, Terminal()).writer, Table)
    assert isinstance(open_output("table", io.StringIO()).writer, Table)


def test_without_rich_a_terminal_gets_json_lines_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "librmq.cli._table", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(open_output(None, Terminal()).writer, JsonLines)
    said = capsys.readouterr().err
    assert said.startswith("hint: ")
    assert said.endswith("pip install 'librmq[cli]'\n")
    assert said.count("\n") == 1
    with pytest.raises(MissingExtraError, match="cli"):
        open_output("table", io.StringIO())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_page_that_cannot_be_written() -> None:
    with pytest.raises(InputError, match="/dev/full: No space"):
        write_page("/dev/full", "text")
    assert os.path.exists("/dev/full")


def test_complaints_are_safe_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    complain("bad expression\n  a = \x1b[2J\n      ^")
    assert capsys.readouterr().err == "bad expression\n  a = \\u001b[2J\n      ^\n"


# --- tables


def drawn(*rows: dict[str, Any]) -> str:
    pytest.importorskip("rich")
    from librmq.cli._table import Table

    stream = io.StringIO()
    table = Table(stream)
    for row in rows:
        table.row(row)
    table.flush()
    table.close()
    return stream.getvalue()


def test_a_table_raises_if_its_reader_has_left() -> None:
    pytest.importorskip("rich")
    from librmq.cli._table import Table

    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    table = Table(Left())
    table.row({"type": "stats", "topics": 1})
    with pytest.raises(BrokenPipeError):
        table.close()


MESSAGE = {
    "type": "message",
    "phys": 1234567,
    "size": 210,
    "crc_ok": True,
    "topic": "TopicTest",
    "queue_id": 3,
    "queue_offset": 17,
    "store_timestamp": 1_795_150_492_064,
    "properties": {"TAGS": "TagA", "KEYS": "k1 k2", "UNIQ_KEY": "7F00"},
}


def test_messages_are_shown_in_columns() -> None:
    lines = drawn(MESSAGE, MESSAGE | {"crc_ok": False}).splitlines()
    shown = [line.split() for line in lines if "TopicTest" in line]
    cells = ["1234567", "210", "TopicTest", "3", "17", "2026-11-20", "04:54:52.064Z", "TagA", "k1", "k2", "7F00"]
    assert shown == [[*cells, "right"], [*cells, "WRONG"]]
    assert sum("physical offset" in line for line in lines) == 1


def test_other_rows_begin_another_table() -> None:
    text = drawn(MESSAGE, {"type": "blank", "phys": 5, "size": 6}, MESSAGE)
    assert text.count("tags") == 2
    assert text.count("end of file") == 1


def test_rows_of_a_continuing_list_are_printed_immediately() -> None:
    pytest.importorskip("rich")
    stream = io.StringIO()
    output = open_output("table", stream)
    for number in range(3):
        output.row(MESSAGE | {"topic": f"Topic{number}"})
        output.draw()
        assert f"Topic{number}" in stream.getvalue()
    output.close()
    assert stream.getvalue().count("tags") == 1


@pytest.mark.slow
def test_many_rows_are_drawn_in_parts() -> None:
    text = drawn(*[MESSAGE] * 1001)
    assert text.count("physical offset") == 3
    assert text.count("TopicTest") == 1001


def test_tables_are_safe_to_show() -> None:
    text = drawn(MESSAGE | {"topic": NASTY, "properties": {"TAGS": "[bold red]x[/] :smile:"}})
    assert SAFE in text
    assert "[bold red]x[/] :smile:" in text
    assert not any(character < " " and character != "\n" for character in text)


def test_impossible_times_are_shown_as_numbers() -> None:
    assert str(1 << 62) in drawn(MESSAGE | {"store_timestamp": 1 << 62})


def test_damage_is_shown_as_a_list() -> None:
    one = {"file": "commitlog/00000000000000000000", "offset": 95, "kind": "checksum", "what": "the body is wrong"}
    text = drawn({"type": "verify", "sound": False, "damage": [one, one | {"offset": 96}]})
    assert "false" in text
    assert [line.split()[1] for line in text.splitlines() if "commitlog" in line] == ["95", "96"]


def test_a_store_is_shown_with_its_queues_and_cuts() -> None:
    queue = {"topic": "T", "queue_id": 0, "min_offset": 0, "max_offset": 5, "max_physic_offset": 99}
    cut = {"file": "commitlog/0", "offset": 10, "bytes": 20, "why": "no record"}
    row = {"type": "store", "phase": "after_load", "max_phy_offset": 99, "queues": [queue], "cut": [cut]}
    text = drawn(row | {"topic_queue_table": {"T-0": 5}})
    assert "after_load" in text
    assert "no record" in text
    assert "T-0" not in text


def test_rows_of_any_kind_have_a_column_for_each_field() -> None:
    text = drawn({"op": "put", "status": "PUT_OK", "phys": 5}, {"op": "commit", "response_code": 0})
    shown = [line.split() for line in text.splitlines() if line.strip(" ─")]
    assert shown == [["op", "status", "phys", "response", "code"], ["put", "PUT_OK", "5"], ["commit", "0"]]


def test_long_values_are_cut() -> None:
    text = drawn({"type": "other", "value": "x" * 100_000})
    assert text.count("x") == 200
    assert "…" in text


@pytest.mark.parametrize("columns", [40, 60, 90, 200])
def test_no_column_is_lost_on_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the columns do not fit, each row is printed as a list."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    output = open_output("table", stream)
    row = {"topic": "OrderTopic", "kind": "user", "most_in_one_queue": 1234567, "min_timestamp_ms": 1_795_150_492_064}
    for number in range(2):
        output.row({**row, "queues": number, "unique_key": "7F0000010D3218B4AAC2F67CCC000127"})
    output.close()
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    for name in ("OrderTopic", "user", "1234567", "2026-11-20"):
        assert text.count(name) == 2
    assert ("\n\n" in text.strip()) == (columns < 90)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *rows: Mapping[str, object]) -> str:
    """Return what a terminal of 80 columns shows of the rows."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    output = open_output("table", stream)
    for row in rows:
        output.row(row)
    output.close()
    return stream.getvalue()


def test_a_terminal_of_80_columns_breaks_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "librmq dead-letters STORE --resend --group billing-of-orders-of-european-customers-by-card"
    finding = {
        "severity": "warning",
        "finding": "dead-letters",
        "subject": "group billing-of-orders-of-european-customers-by-card, topic OrderTopicEurope",
        "what": "10 dead letters: DeadLetter: no money.",
        "next": f"Fix the cause, then send them again: {command}",
    }
    text = on_a_terminal(monkeypatch, finding, finding)
    assert [line for line in text.splitlines() if "librmq" in line] == [command, command]
    assert "10 dead letters: DeadLetter: no money." in text


def test_lag_is_a_table_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "group": "billing-of-orders",
        "topic": "OrderTopicEurope",
        "queue_id": 0,
        "min_offset": 0,
        "max_offset": 1_234_567,
        "consumer_offset": 10,
        "lag": 1_234_557,
        "oldest_timestamp_ms": 1_795_150_492_064,
    }
    text = on_a_terminal(monkeypatch, row, row | {"queue_id": 1})
    assert [line.split() for line in text.splitlines() if "billing" in line] == [
        ["billing-of-orders", f"OrderTopicEurope:{queue}", "1234557", "2026-11-20", "04:54:52"] for queue in (0, 1)
    ]


def test_topics_and_events_are_tables_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = {
        "topic": "OrderTopic",
        "kind": "user",
        "queues": 4,
        "messages": 1234567,
        "min_timestamp_ms": 1,
        "max_timestamp_ms": 2,
    }
    event = {
        "at_ms": 1_700_000_007_000,
        "event": "stored",
        "topic": "T",
        "queue_id": 1,
        "queue_offset": 3,
        "physical_offset": 2604,
        "group": None,
    }
    text = on_a_terminal(monkeypatch, topic, topic)
    assert text.count("OrderTopic   user        4    1234567   1970-01-01 00:00   1970-01-01 00:00") == 2
    assert "11-14 22:13:27   stored           T:1:3" in on_a_terminal(monkeypatch, event)


def test_a_table_of_the_disk_has_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("log", "queue", "index", "timer", "other", "allocated")
    disk = {"type": "disk", **dict.fromkeys((f"{kind}_bytes" for kind in kinds), 3 << 30), "used_ratio": 0.753}
    threshold = {"ratio": 0.85, "free_bytes": 50 << 30, "effect": "the oldest log files are deleted"}
    topic = {"topic": "RMQ_SYS_TRANS_OP_HALF_TOPIC", "kind": "op", "messages": 1, "bytes": 139, "unread_bytes": 0}
    text = on_a_terminal(monkeypatch, {**disk, "thresholds": [threshold]}, {"type": "topic", **topic})
    assert text.count("3.0 GiB") == 6
    assert "75.3%" in text
    assert "85%   50 GiB       the oldest log files are deleted" in text
    assert "RMQ_SYS_TRANS_OP_HALF_TOPIC   op            1   139 B   0 B" in text


def test_reasons_and_damage_break_no_name_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    log = f"commitlog/{0:020}"
    command = f"`librmq salvage {'/long/path' * 12} --into NEW` saves them"
    why = "at 8985: the body does not match its checksum; " * 6
    reason = {"opener": "broker", "verdict": "loses", "file": log, "what": why, "next": f"copy it, then {command}"}
    lines = on_a_terminal(monkeypatch, {"type": "reason", **reason}).splitlines()
    assert lines[0] == f"broker  loses  {log}"
    assert lines[-3:-1] == ["copy it, then", command]
    assert " ".join(lines[1:-3]).split() == why.split()  # not cut
    progress = {"source": "file", "at_ms": 1, "group": "CID_RMQ_SYS_TRANS", "topic": "RMQ_SYS_TRANS_HALF_TOPIC"}
    progress |= {"queue_id": 0, "queue_offset": 11, "before": None, "note": "consumerOffset.json"}
    text = on_a_terminal(monkeypatch, progress, progress)
    assert text.count("file     CID_RMQ_SYS_TRANS   RMQ_SYS_TRANS_HALF_TOPIC:0       11") == 2
    old = {"type": "file", "file": f"{0:020}", "end_timestamp_ms": 1, "age_s": 1.0, "delete_at_ms": None}
    text = on_a_terminal(monkeypatch, {**old, "unread_by": ["", "G"], "why": "no age limit; unread by G " * 3})
    assert f"{0:020}   delay levels, G   no age limit" in text
    damage = {"file": log, "offset": 8985, "kind": "record", "what": why}
    assert log in on_a_terminal(monkeypatch, {"type": "verify", "sound": False, "damage": [damage]})


@pytest.mark.parametrize("length", [10, 33, 60])
def test_no_name_of_a_topic_is_broken_on_80_columns(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    row = {"kind": "dead", "queues": 4, "messages": 12, "min_timestamp_ms": 1, "max_timestamp_ms": 2}
    names = ["%DLQ%" + letter * (length - 5) for letter in "ab"]
    text = on_a_terminal(monkeypatch, *({"topic": name, **row} for name in names))
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= 80
    assert "1970-01-01" in text
    assert ("\n\n" in text.strip()) == (length > 33)  # a list of fields each


def test_a_wide_record_is_a_list_in_a_file() -> None:
    """A row of a kind that comes once, such as that of `can-start`; columns of several rows stay side by side."""
    pytest.importorskip("rich")
    record = {f"field_{number}": number for number in range(12)}
    for rows, lines in ([record], 12), ([record, record], 4):
        stream = io.StringIO()
        output = open_output("table", stream)
        for row in rows:
            output.row(row)
        output.close()
        assert len([line for line in stream.getvalue().splitlines() if line.strip()]) == lines


def test_shown_messages_have_their_key_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, MESSAGE | {"body": '{"order": 1, "product": "a coat of wool"}'})
    assert "k1 k2" in text
    assert "TagA" in text
    assert '{"order' in text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_signal_that_another_thread_gets_ends_the_wait() -> None:
    """The main thread runs no handler while it waits, so only the descriptor can tell it."""
    ended = run_program("""
        import os, signal, threading
        from pathlib import Path
        from librmq.cli._output import end_signals

        state = Path(f"/proc/self/task/{os.getpid()}/stat")

        def end_when_main_waits():
            asleep = 0
            while asleep < 100:
                asleep = asleep + 1 if ") S " in state.read_text() else 0
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        with end_signals() as ended:
            threading.Thread(target=end_when_main_waits).start()
            assert ended.wait(30)
            assert not ended.wait(0)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_no_color_means_no_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    from librmq.cli._table import Table

    monkeypatch.setenv("TERM", "xterm-256color")
    row = {"finding": "f", "severity": "error", "subject": "s", "what": "w", "evidence": {}, "next": "n"}
    drawn = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        stream = Terminal()
        table = Table(stream)
        table.row(row)
        table.close()
        drawn[no_color] = stream.getvalue()
    assert "\x1b[" in drawn[""]
    assert "\x1b" not in drawn["1"]
