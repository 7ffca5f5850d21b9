"""Records of traces: written as 4.9's clients write them, and read back."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from librmq.message.traces import (
    EndTransaction,
    Pub,
    SubAfter,
    SubBefore,
    Trace,
    TraceReader,
    TraceRecord,
    encode,
    keys_of,
)

NAMES: Final = st.from_regex(r"[%|a-zA-Z0-9_-]{1,20}", fullmatch=True)
WORDS: Final = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=9)
TEXTS: Final = st.none() | WORDS.filter(lambda word: word != "null")
TIMES: Final = st.integers(0, 2**53)
IDS: Final = st.from_regex(r"[0-9A-F]{32}", fullmatch=True)
STATES: Final = ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW")
RESULTS: Final = ("SUCCESS", "TIME_OUT", "EXCEPTION", "RETURNNULL", "FAILED")


def read(*texts: str) -> list[Trace]:
    reader = TraceReader()
    traces = list(reader.decode("".join(texts).encode(), "10.1.1.1", None, 0, 7))
    assert reader.unreadable == 0
    return traces


def test_the_layout_of_each_record() -> None:
    """The layouts are those of 4.9.4; null is a text, a flag is true or false, the number of a kind counts from 0."""
    records: list[TraceRecord] = [
        Pub(1, "DefaultRegion", "P", "T", "ID", None, "k", "10.0.0.1:10911", 5, 7, 3, "OFFSET", True),
        SubBefore(2, "DefaultRegion", "G", "R", "ID", 3, "k l"),
        SubAfter("R", "ID", 8, False, None, 2, 4, "G"),
        EndTransaction(5, "DefaultRegion", "P", "T", "ID", "t", None, "10.0.0.1:10911", 2, "X", "UNKNOW", True),
    ]
    assert [encode(record).replace("\x01", "|") for record in records] == [
        "Pub|1|DefaultRegion|P|T|ID|null|k|10.0.0.1:10911|5|7|3|OFFSET|true\x02",
        "SubBefore|2|DefaultRegion|G|R|ID|3|k l\x02",
        "SubAfter|R|ID|8|false|null|2|4|G\x02",
        "EndTransaction|5|DefaultRegion|P|T|ID|t|null|10.0.0.1:10911|2|X|UNKNOW|true\x02",
    ]
    assert [keys_of(record) for record in records] == [["ID", "k"], ["ID", "k", "l"], ["ID"], ["ID"]]


@given(TIMES, NAMES, NAMES, IDS, TEXTS, TEXTS, TIMES, st.booleans())
def test_a_send_comes_back(
    at_ms: int, group: str, topic: str, name: str, tags: str | None, keys: str | None, took_ms: int, succeeded: bool
) -> None:
    record = Pub(
        at_ms, "DefaultRegion", group, topic, name, tags, keys, "1.2.3.4:5", 1, took_ms, 0, "F" * 32, succeeded
    )
    (trace,) = read(encode(record))
    assert trace == Trace(
        "sent", at_ms, name, topic, group, "10.1.1.1", succeeded, None, took_ms / 1000, None, keys, None, 7
    )


@given(TIMES, TIMES, NAMES, IDS, IDS, TEXTS, st.integers(0, 99), st.sampled_from(RESULTS))
def test_a_delivery_comes_back(
    at_ms: int, end_ms: int, group: str, request: str, name: str, keys: str | None, retries: int, result: str
) -> None:
    is_consumed = result in ("SUCCESS", "TIME_OUT")
    before = SubBefore(at_ms, "DefaultRegion", group, request, name, retries, keys)
    after = SubAfter(request, name, 12, is_consumed, keys, RESULTS.index(result), end_ms, group)
    assert read(encode(before), encode(after)) == [
        Trace("received", at_ms, name, None, group, "10.1.1.1", None, None, None, retries, keys, request, 7),
        Trace("consumed", end_ms, name, None, group, "10.1.1.1", is_consumed, result, 0.012, None, keys, request, 7),
    ]


@given(TIMES, NAMES, NAMES, IDS, TEXTS, st.sampled_from(STATES), st.booleans())
def test_the_end_of_a_transaction_comes_back(
    at_ms: int, group: str, topic: str, name: str, keys: str | None, state: str, from_check: bool
) -> None:
    record = EndTransaction(
        at_ms, "DefaultRegion", group, topic, name, None, keys, "1.2.3.4:5", 2, name, state, from_check
    )
    assert read(encode(record)) == [
        Trace("ended", at_ms, name, topic, group, "10.1.1.1", None, state, None, None, keys, None, 7)
    ]


def test_a_batch_is_a_trace_for_each_message() -> None:
    record = Pub(1, "DefaultRegion", "P", "T", "A,B", None, None, "1.2.3.4:5", 9, 1, 0, "C,D", True)
    assert [(trace.id, trace.took_s) for trace in read(encode(record))] == [("A", 0.001), ("B", 0.001)]
    assert keys_of(record) == ["A", "B"]
