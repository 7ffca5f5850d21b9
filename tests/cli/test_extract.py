"""``extract`` makes a small store of selected messages."""

from __future__ import annotations

import pytest

from tests.cli.stand import Shell


@pytest.mark.parametrize("selection", [("--key", "key14"), ("--topic", "OrderTopic"), ("--sql", "TAGS = 'TagA'"), ()])
def test_the_selected_messages_are_extracted(selection: tuple[str, ...], shell: Shell) -> None:
    chosen = shell("show", "store", *selection).rows
    answer = shell("extract", "store", *selection, "-o", "small")
    assert (answer.status, answer.rows) == (
        0,
        [{"type": "extract", "into": "small", "messages": len(chosen), "bytes": sum(row["size"] for row in chosen)}],
    )
    numbers = {
        "phys": 0,
        "commit_log_offset": 0,
        "queue_offset": 0,
        "msg_id": "",
        "raw_sha1": "",
        "prepared_transaction_offset": 0,
    }
    copied = shell("show", "small").rows
    assert [row | numbers for row in copied] == [row | numbers for row in chosen]
    assert shell("verify", "small").rows[0]["sound"] is True


def test_a_limit_takes_the_first(shell: Shell) -> None:
    first = shell("show", "store", "--topic", "OrderTopic", "--limit", 3).rows
    assert shell("extract", "store", "--topic", "OrderTopic", "--limit", 3, "-o", "small").rows[0]["messages"] == 3
    assert {row["store_timestamp"] for row in shell("show", "small").rows} == {row["store_timestamp"] for row in first}


def test_hidden_bodies_are_printed_as_such(shell: Shell) -> None:
    assert shell("extract", "store", "--key", "key14", "-o", "small", "--redact", "bodies").status == 0
    assert {row["body"].strip("x") for row in shell("show", "small").rows} == {""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--key", "none", "-o", "small"), "expected at least one message to extract, found none"),
        (("-o", "store/small"), "is in the store"),
        (("-o", "store"), "it is not empty"),
        ((), "the following arguments are required: -o/--out"),
    ],
)
def test_an_extract_that_makes_no_sense_is_refused(words: tuple[str, ...], said: str, shell: Shell) -> None:
    answer = shell("extract", "store", *words)
    assert answer.status == 2
    assert said in answer.said
