"""``check-history``: files that are one history, its lines, its statuses, and the page."""

from __future__ import annotations

import json
import os
import threading

import pytest

from tests.cli.stand import Shell

GROUP = {"event": "group", "group": "g", "topics": ["t"]}
SEND = {
    "event": "send", "process": "p", "id": "m", "topic": "t", "begin_ms": 0, "end_ms": 1, "outcome": "ok",
    "broker": "a", "queue_id": 0, "queue_offset": 0,
}  # fmt: skip
DELIVER = {
    "event": "deliver", "process": "c", "group": "g", "id": "m", "topic": "t", "broker": "a", "queue_id": 0,
    "queue_offset": 0, "attempt": 0, "begin_ms": 5, "end_ms": 6, "outcome": "ok",
}  # fmt: skip
DRAINED = {"event": "drained", "group": "g", "at_ms": 100}


def text(*events: object) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def test_a_sound_history_has_no_line(shell: Shell) -> None:
    (shell.folder / "h.jsonl").write_text(text(GROUP, SEND, DELIVER, DRAINED))
    assert shell("check-history", "h.jsonl") == (0, "", "")
    assert shell("check-history", "-", given=text(GROUP, SEND, DELIVER, DRAINED)) == (0, "", "")
    answer = shell("check-history", "-")
    assert (answer.status, answer.out, answer.said) == (0, "", "note: the history has no events\n")


def test_files_are_one_history(shell: Shell) -> None:
    (shell.folder / "p.jsonl").write_text(text(GROUP, SEND))
    (shell.folder / "c.jsonl").write_text("\n" + text(DELIVER, DELIVER | {"begin_ms": 9, "end_ms": 9}))
    answer = shell("check-history", "p.jsonl", "c.jsonl")
    (row,) = answer.rows
    what = row.pop("what")
    assert (answer.status, answer.said) == (1, "")
    assert row == {
        "anomaly": "repeat", "at_ms": 9, "id": "m", "group": "g", "topic": "t", "broker": "a", "queue_id": 0,
        "queue_offset": 0, "events": [2, 4, 5],
    }  # fmt: skip
    assert what.startswith("Group g got m again")


def test_each_process_may_describe_its_group(shell: Shell) -> None:
    (shell.folder / "p.jsonl").write_text(text(GROUP, SEND))
    (shell.folder / "c.jsonl").write_text(text(GROUP, DELIVER, DRAINED))
    assert shell("check-history", "p.jsonl", "c.jsonl") == (0, "", "")
    (shell.folder / "c.jsonl").write_text(text(GROUP | {"ordered": True}))
    answer = shell("check-history", "p.jsonl", "c.jsonl")
    assert (answer.status, answer.out) == (2, "")
    assert "c.jsonl: line 1: group: a second one of 'g'" in answer.said


def test_an_incomplete_last_line_is_left_out(shell: Shell) -> None:
    (shell.folder / "p.jsonl").write_text(text(GROUP, SEND) + '{"event": "deliv')
    (shell.folder / "c.jsonl").write_text(text(DELIVER, DRAINED).rstrip())
    answer = shell("check-history", "p.jsonl", "c.jsonl")
    assert (answer.status, answer.out) == (0, "")
    assert answer.said == "note: p.jsonl: line 3 is incomplete, and left out\n"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (text(GROUP, SEND) + "{\n" + text(DELIVER), "h.jsonl: line 3: not JSON"),
        (text(GROUP, SEND | {"end_ms": -1}), "h.jsonl: line 2: send: time runs backwards"),
        (text(GROUP) + "\n" + text(SEND | {"queue_id": None}), "h.jsonl: line 3: send: the outcome is 'ok', but"),
        (text(GROUP, {"event": "wait"}), "h.jsonl: line 2: unknown event 'wait'"),
        (text(GROUP, GROUP), "h.jsonl: line 2: group: a second one of 'g'"),
        (text(GROUP, 1), "h.jsonl: line 2: expected a JSON object"),
        ('{"event": "discard", "id": "m", "at_ms": NaN}\n', "h.jsonl: line 1: not JSON: NaN"),
        ("[" * 100_000 + "\n", "h.jsonl: line 1: not JSON: nested too deep"),
        ('{"event": "\xff"}\n', "h.jsonl: line 1: not JSON: not UTF-8"),
    ],
)
def test_what_is_no_history_is_refused(shell: Shell, given: str, problem: str) -> None:
    (shell.folder / "first.jsonl").write_text(text(DRAINED))
    (shell.folder / "h.jsonl").write_bytes(given.encode("latin-1"))
    answer = shell("check-history", "first.jsonl", "h.jsonl")
    assert (answer.status, answer.out) == (2, "")
    assert f"librmq check-history: {problem}" in answer.said


def test_wrong_arguments_are_reported(shell: Shell) -> None:
    (shell.folder / "h.jsonl").write_text(text(DELIVER))
    for words, problem in (
        (["none.jsonl"], "none.jsonl: No such file"),
        (["store"], "store: Is a directory"),
        (["-", "-"], "-: standard input can be read once"),
        (["h.jsonl", "--out", "no/page.html"], "no/page.html: No such file"),
    ):
        answer = shell("check-history", *words)
        assert (answer.status, problem in answer.said) == (2, True), answer.said


def test_a_history_without_groups_gets_a_note(shell: Shell) -> None:
    answer = shell("check-history", "-", given=text(SEND, DELIVER, DRAINED))
    assert (answer.status, answer.out) == (0, "")
    assert answer.said.startswith("note: no event 'group'")


def test_the_page_shows_the_events_of_each_anomaly(shell: Shell) -> None:
    events = text(
        GROUP, SEND, DELIVER | {"id": "<b>", "queue_offset": 3}, DRAINED, SEND | {"id": "other", "queue_offset": 9}
    )
    answer = shell("check-history", "-", "--out", "page.html", given=events)
    assert (answer.status, [row["anomaly"] for row in answer.rows]) == (1, ["phantom", "lost", "lost"])
    page = (shell.folder / "page.html").read_text()
    assert "<h1>3 anomalies</h1>" in page
    assert page.count("<svg") == 5  # of a delivery, and of two sends and the time at which the group drains
    assert "http" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;, which was never sent." in page
    shell("check-history", "-", "--out", "page.html", given=text(GROUP, SEND, DELIVER))
    assert "Nothing is wrong in this history." in (shell.folder / "page.html").read_text()


def test_the_page_can_not_replace_the_history(shell: Shell) -> None:
    (shell.folder / "h.jsonl").write_text(text(GROUP, SEND, DRAINED))
    answer = shell("check-history", "h.jsonl", "--out", shell.folder / "h.jsonl")
    assert (answer.status, answer.out) == (2, "")
    assert "--out: expected another file than the history" in answer.said
    assert (shell.folder / "h.jsonl").read_text() == text(GROUP, SEND, DRAINED)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_read_once(shell: Shell) -> None:
    pipe = shell.folder / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text(GROUP, SEND, DRAINED),))
    writer.start()
    assert shell("check-history", pipe, "--out", "page.html").status == 1
    writer.join()
    assert "lost" in (shell.folder / "page.html").read_text()


def test_an_unknown_field_is_kept(shell: Shell) -> None:
    effect = {"event": "effect", "name": "charge", "key": "o-1", "process": "p", "at_ms": 5, "begin_ms": "x"}
    answer = shell("check-history", "-", "--out", "page.html", given=text(effect, effect | {"at_ms": 9}))
    assert [row["anomaly"] for row in answer.rows] == ["effect-twice"]


def test_two_halves_of_an_event_are_no_lines(shell: Shell) -> None:
    halves = text(GROUP)[:-1] + "," + text(DRAINED) + '{"event":"crash","process":"p"\n"at_ms":1}\n'
    answer = shell("check-history", "-", given=halves)
    assert answer.status == 2
    assert "standard input: line 1" in answer.said


def test_a_history_in_the_form_of_jepsen(shell: Shell) -> None:
    """Operations of ``jepsen.tests.kafka``: overlapping sends of a process have processes of their own."""
    unknown = SEND | {"id": "n", "begin_ms": 0, "end_ms": 9, "outcome": "unknown"}
    for field in ("broker", "queue_id", "queue_offset"):
        del unknown[field]
    refused = unknown | {"id": "o", "begin_ms": 20, "end_ms": 21, "outcome": "failed"}
    found = DELIVER | {"id": "n", "queue_offset": 1, "begin_ms": 7, "end_ms": 8, "outcome": "retry"}
    again = found | {"stored_in": "%RETRY%g", "attempt": 1, "begin_ms": 17, "end_ms": 18}
    answer = shell(
        "check-history", "--to", "jepsen", "-", given=text(GROUP, SEND, unknown, refused, DELIVER, found, again)
    )
    queue = ':queue "t/a/0"'
    assert answer.out.splitlines() == [
        f'{{:index 0, :time 0, :process 0, :type :invoke, :f :send, :value [[:send 0 0]], {queue}, :id "m"}}',
        f'{{:index 1, :time 0, :process 1, :type :invoke, :f :send, :value [[:send 0 1]], {queue}, :id "n"}}',
        "{:index 2, :time 1000000, :process 0, :type :ok, :f :send, :value [[:send 0 [0 0]]]}",
        "{:index 3, :time 5000000, :process 2, :type :invoke, :f :poll, :value [[:poll]]}",
        "{:index 4, :time 5000000, :process 2, :type :ok, :f :poll, :value [[:poll {0 [[0 0]]}]]}",
        "{:index 5, :time 7000000, :process 2, :type :invoke, :f :poll, :value [[:poll]]}",
        "{:index 6, :time 7000000, :process 2, :type :ok, :f :poll, :value [[:poll {0 [[1 1]]}]]}",
        "{:index 7, :time 9000000, :process 1, :type :info, :f :send, :value [[:send 0 1]]}",
    ]
    assert "that workload knows no retries: 1 of the deliveries" in answer.said
    assert "no queue is known: 1 send" in answer.said
