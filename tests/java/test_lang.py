"""Java's hashes, map order, UTF-8, integers and numbers, compared with slow definitions and recorded values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from librmq.errors import MessageIllegalError
from librmq.java.lang import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    OTHER_DIGITS,
    hash_append,
    hash_map_order,
    index_key_hash,
    index_key_hashes,
    java_decode,
    java_int,
    java_long,
    parse_double,
    part_hashes,
    string_hash,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))


def slow_hash(text: str) -> int:
    code = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        code = (31 * code + int.from_bytes(data[at : at + 2], "big")) % 2**32
    return code - 2**32 if code >= 2**31 else code


@given(ANY_TEXT)
@example("")
@example("\0")
@example("polygenelubricants")
@example("\U0001f600\ud800")
def test_string_hash_is_the_polynomial_over_utf16(text: str) -> None:
    assert string_hash(text) == slow_hash(text)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 257, 5000])
@pytest.mark.parametrize("character", ["\0", "z", "\x7f", "é", "\U0001f600"])
def test_long_texts(length: int, character: str) -> None:
    text = "a" + character * (length - 1)
    assert string_hash(text) == slow_hash(text)
    assert hash_append(string_hash("topic#"), text) == slow_hash("topic#" + text)


@given(ANY_TEXT, ANY_TEXT)
def test_a_hash_can_be_continued(prefix: str, text: str) -> None:
    # Two joined surrogates are one character to Python, but still two code units to Java.
    assert hash_append(string_hash(prefix), text) == slow_hash(prefix + text)
    assert hash_append(string_hash(prefix) % 2**32, text) == slow_hash(prefix + text)


def test_the_one_hash_without_an_absolute_value() -> None:
    assert string_hash("TopicTest#zp1Axdzf") == -(2**31)
    assert index_key_hash("TopicTest", "zp1Axdzf") == 0


@given(st.lists(st.tuples(ANY_TEXT, st.text())))
def test_parts_of_one_text_are_hashed_as_one_by_one(pairs: list[tuple[str, str]]) -> None:
    parts = [text.encode() for _, text in pairs]
    lengths = np.array([len(part) for part in parts], np.int64)
    prefixes = np.array([string_hash(prefix) for prefix, _ in pairs], np.int64)
    hashes = part_hashes(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(lengths) - lengths, lengths, prefixes)
    expected = [slow_hash(prefix + text) % 2**32 if text.isascii() else -1 for prefix, text in pairs]
    assert hashes.tolist() == expected


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT)))
@example([("TopicTest", "zp1Axdzf"), ("", ""), ("T", "k" * 300)])
@example([("TopicTest", "zp1Axdzf"), ("T", "order-10")])
@example([("TopicTest", "zp1Axdzf"), ("T", "k" * 128), ("", "")])
@example([("T", ""), ("U", "")])
def test_many_index_keys_are_the_same_as_one_by_one(pairs: list[tuple[str, str]]) -> None:
    expected = [index_key_hash(topic, key) for topic, key in pairs]
    prefixes = [string_hash(topic + "#") for topic, _ in pairs]
    keys = [key for _, key in pairs]
    assert index_key_hashes(prefixes, keys).tolist() == expected
    assert index_key_hashes([prefix % 2**32 for prefix in prefixes], keys).tolist() == expected
    if not any(map(has_surrogate, keys)):
        assert index_key_hashes(prefixes, [key.encode() for key in keys]).tolist() == expected


# --- HashMap


def spread(name: str) -> int:
    code = slow_hash(name)
    return code ^ ((code % 2**32) >> 16)


@given(st.lists(ANY_TEXT, unique=True, max_size=8))
def test_a_small_map_is_sorted_by_bucket_then_insertion(names: list[str]) -> None:
    by_bucket = sorted(range(len(names)), key=lambda at: spread(names[at]) & 15)
    assert hash_map_order(tuple(names)) == tuple(by_bucket)


@given(st.lists(ANY_TEXT, unique=True, max_size=200))
def test_a_large_map_is_a_permutation_sorted_by_bucket(names: list[str]) -> None:
    order = hash_map_order(tuple(names))
    assert sorted(order) == list(range(len(names)))
    buckets = [spread(names[at]) & 15 for at in order]
    if len(names) <= 12 and max((buckets.count(bucket) for bucket in buckets), default=0) <= 8:
        assert buckets == sorted(buckets)


def test_a_map_doubles_when_three_quarters_are_exceeded() -> None:
    names = [f"k{at}" for at in range(13)]
    assert [spread(names[at]) & 31 for at in hash_map_order(tuple(names))] == sorted(spread(n) & 31 for n in names)
    twelve = names[:12]
    assert [spread(twelve[at]) & 15 for at in hash_map_order(tuple(twelve))] == sorted(spread(n) & 15 for n in twelve)


EQUAL = ["".join(parts) for parts in itertools.product(("Aa", "BB"), repeat=4)]  # sixteen names with one hash
NINE = ["n15", "n26", "n37", "n48", "n1", "n609", "n708", "n719", "n807"]  # in one bucket of 16, but in two of 32


def test_a_ninth_name_in_a_bucket_doubles_the_map_early() -> None:
    assert hash_map_order(tuple(NINE[:8])) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert hash_map_order(tuple(NINE)) == (4, 5, 6, 7, 8, 0, 1, 2, 3)  # recorded from a JDK


def test_names_that_share_every_bucket_keep_their_order() -> None:
    """Java turns such buckets into trees; librmq does not imitate that order."""
    assert hash_map_order(tuple(EQUAL)) == tuple(range(16))
    names = [f"k{at}" for at in range(40)] + EQUAL[::-1] + [f"m{at}" for at in range(150)]
    assert [at - 40 for at in hash_map_order(tuple(names)) if 40 <= at < 56] == list(range(16))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(MessageIllegalError, match="'b' occurs twice"):
        hash_map_order(("a", "b", "c", "b"))


# --- text and numbers


@given(ANY_TEXT)
def test_valid_utf8_is_read_unchanged(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert java_decode(text.encode()) == text


@pytest.mark.parametrize(
    ("raw", "text"),  # recorded from a JDK
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\xe4\xb8", "\ufffd"),
        (b"\xe4\xb8-", "\ufffd-"),
        (b"\xe4-\xad", "\ufffd-\ufffd"),
        (b"\xed\xa0\x80", "\ufffd"),
        (b"\xed\xb8\xad\xed\xa0", "\ufffd\ufffd"),
        (b"\xed\xa0A", "\ufffdA"),
        (b"\xc0\x80", "\ufffd\ufffd"),
        (b"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
    ],
)
def test_malformed_bytes_are_replaced_as_java_does(raw: bytes, text: str) -> None:
    assert java_decode(raw) == text


@given(st.binary())
def test_reading_never_fails(raw: bytes) -> None:
    assert isinstance(java_decode(raw), str)


# Strings that Java accepts as numbers, and strings that it refuses.


INTEGERS = {"7": 7, "+7": 7, "-7": -7, "007": 7, "-0": 0, "0" * 20_000 + "5": 5, "\u0663\u096a": 34}
EDGES = [number for edge in (INT_MIN, INT_MAX, LONG_MIN, LONG_MAX) for number in (edge - 1, edge, edge + 1)]
REFUSED = ["", "+", "--5", "+-5", " 5", "5 ", "1_0", "\u00b2", "\U0001d7d3", "0x5", "5.0", "1" * 20, "1" * 5000]
REFUSED += ["-", "0" * 50_000 + "x"]


@pytest.mark.parametrize("text", [*INTEGERS, *map(str, EDGES), *REFUSED])
def test_integers(text: str) -> None:
    value = INTEGERS.get(text) if text in INTEGERS or text in REFUSED else int(text)
    assert java_int(text) == (value if value is not None and INT_MIN <= value <= INT_MAX else None)
    assert java_long(text) == (value if value is not None and LONG_MIN <= value <= LONG_MAX else None)


def test_digits_of_other_scripts_are_translated() -> None:
    for value, digits in enumerate(OTHER_DIGITS):
        assert {java_int(digit) for digit in digits} == {value}
        assert not any(map(str.isascii, digits))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), ("5f", 5.0), ("-.5D", -0.5), ("1e3", 1000.0), (" 5\t", 5.0), ("0x1.8p1", 3.0), ("-0x1p3f", -8.0),
        ("NaN", math.nan), ("+Infinity", math.inf), ("-Infinity", -math.inf), ("0x1p99999", math.inf),
        ("-0x1p99999", -math.inf), ("1e999", math.inf), ("", None), ("inf", None), ("nan", None), ("1_0", None),
        ("\u00a05", None), ("0x1", None), ("\u0663", None), (".", None), ("5ff", None), ("Infinityf", None),
    ],
)  # fmt: skip
def test_doubles(text: str, value: float | None) -> None:
    found = parse_double(text)
    assert found == value or (value is not None and math.isnan(value) and found is not None and math.isnan(found))
