"""Tags, bloom bitmaps, registrations, predicates, commands."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.errors import ConfigError, FilterSyntaxError
from librmq.filter import (
    BROKER_BLOOM,
    SQL92,
    TAG,
    BloomFilter,
    Policy,
    Registrations,
    TagFilter,
    WatchedPredicate,
    tags_code,
)


def test_tags_with_one_code_are_distinguished_by_text() -> None:
    tags = TagFilter("Aa || C")
    assert tags_code("Aa") == tags_code("BB")
    assert tags.matches_code(tags_code("BB"))
    assert not tags.matches("BB")
    assert tags.matches("Aa")
    assert not tags.matches(None)
    assert not tags.matches_code(0)
    assert tags.matches_code(None)
    negative = TagFilter("v2-2c4")
    assert negative.matches_code(tags_code("v2-2c4"))
    assert negative.matches_code(tags_code("v2-2c4") & 0xFFFFFFFF)


def test_all_tags() -> None:
    for expression in ("*", "", None):
        assert TagFilter(expression).takes_all
        assert TagFilter(expression).matches_code(17)
        assert TagFilter(expression).matches(None)
    assert not TagFilter(" * ").takes_all
    assert not TagFilter("|| ||").matches_code(0)
    assert tags_code("") == tags_code(None) == 0
    for expression in ("||", "||||"):
        with pytest.raises(FilterSyntaxError):
            TagFilter(expression)


def test_bloom_settings() -> None:
    assert (BROKER_BLOOM.hash_count, BROKER_BLOOM.bit_count) == (3, 112)
    assert len(BROKER_BLOOM.bitmap()) == 14
    for percent, expected in ((0, 1), (100, 1), (-1, 1), (20, 0), (20, 2**31), (float("nan"), 1)):
        with pytest.raises(ConfigError):
            BloomFilter(percent, expected)
    assert BloomFilter(1, 2**31 - 1).bit_count == 2**31 - 1
    bitmap = BROKER_BLOOM.bitmap("a#b")
    assert BROKER_BLOOM.hit(bitmap, BROKER_BLOOM.positions("a#b"))
    assert not BROKER_BLOOM.hit(BROKER_BLOOM.bitmap(), BROKER_BLOOM.positions("a#b"))
    assert BROKER_BLOOM.positions("\ud800") == BROKER_BLOOM.positions("?")


def test_registering() -> None:
    registrations = Registrations()
    assert not registrations.register("T", "G", "TagA", TAG, 1, now_ms=1_000)
    assert not registrations.register("T", "G", "", SQL92, 1, now_ms=1_000)
    assert not registrations.register("T", "G", "a >", SQL92, 1, now_ms=1_000)
    assert not registrations.register("T", "G", "a > 1", "XPATH", 1, now_ms=1_000)
    assert registrations.get("T", "G") is None
    assert registrations.register("T", "G", "a > 1", SQL92, 5, now_ms=1_000)
    assert not registrations.register("T", "G", "a > 2", SQL92, 4, now_ms=2_000)
    assert not registrations.register("T", "G", "a > 2", SQL92, 5, now_ms=2_000)
    (old,) = registrations
    assert (old.expression, old.born_timestamp_ms, old.dead) == ("a > 1", 1_000, False)
    registrations.unregister("G", now_ms=3_000)
    (gone,) = registrations.of_group("G")
    assert (gone.dead, gone.dead_timestamp_ms) == (True, 3_000)
    assert not registrations.register("T", "G", "a > 1", SQL92, 4, now_ms=3_500)
    assert registrations.register("T", "G", "a > 1", SQL92, 5, now_ms=4_000)
    (alive,) = registrations.of_topic("T")
    assert (alive.dead, alive.born_timestamp_ms, alive.dead_timestamp_ms) == (False, 1_000, 0)
    registrations.unregister("G", now_ms=4_500)
    assert registrations.register("T", "G", "a > 1", SQL92, 6, now_ms=5_000)
    (newer,) = registrations
    assert (newer.client_version, newer.born_timestamp_ms, newer.dead) == (6, 1_000, False)
    assert registrations.register("T", "G", "a > 2", SQL92, 7, now_ms=6_000)
    (changed,) = registrations
    assert (changed.expression, changed.born_timestamp_ms) == ("a > 2", 6_000)
    assert not registrations.register("T", "G", "a >", SQL92, 8, now_ms=7_000)
    assert list(registrations) == []


def test_topics_no_longer_named_die_and_are_forgotten() -> None:
    registrations = Registrations()
    for topic in ("T", "U"):
        registrations.register(topic, "G", "a > 1", SQL92, 1, now_ms=1_000)
    registrations.keep_topics("G", {"U"}, now_ms=2_000)
    assert [(one.topic, one.dead) for one in registrations] == [("T", True), ("U", False)]
    registrations.keep_topics("G", {"U"}, now_ms=9_000)
    day = 24 * 3600 * 1000
    registrations.clean(2_000 + day - 1)
    assert len(list(registrations)) == 2
    registrations.clean(2_000 + day)
    assert [one.topic for one in registrations] == ["U"]


def test_bitmaps_never_lose_a_message() -> None:
    registrations = Registrations()
    for number in range(10):
        registrations.register("T", f"G{number}", f"a = {number} OR b > {number}", SQL92, 1, now_ms=1_000)
    assert registrations.bitmap("U", {"a": "1"}) is None
    for message in ({"a": "3"}, {"b": "5", "a": "x"}, {"a": "x", "b": "x"}, {}, None):
        bitmap = registrations.bitmap("T", message)
        assert bitmap is not None
        assert len(bitmap) == 14
        for one in registrations:
            if one.matches(message):
                assert one.may_match(bitmap, 2_000, registrations.bloom)
    (first, *_) = registrations
    empty = bytes(14)
    bloom = registrations.bloom
    assert not first.may_match(empty, 1_001, bloom)
    assert first.may_match(empty, 1_000, bloom)  # stored before the registration
    assert first.may_match(empty, None, bloom)
    assert first.may_match(None, 2_000, bloom)
    assert first.may_match(bytes(8), 2_000, bloom)
    assert first.may_match(empty, 2_000, BloomFilter(20, 64))


def test_the_file() -> None:
    registrations = Registrations()
    registrations.register("T", "G", "a > 1", SQL92, 7, now_ms=100_000)
    document = registrations.to_document(100_000)
    data = document["filterDataByTopic"]["T"]["groupFilterData"]["G"]
    assert data["dead"] is False
    assert data["bloomFilterData"] == {"bitNum": 112, "bitPos": list(BROKER_BLOOM.positions("G#T"))}
    loaded = Registrations()
    assert loaded.load(document, 110_000)
    (one,) = loaded
    assert (one.dead, one.dead_timestamp_ms) == (True, 100_000)  # never before its birth
    assert loaded.load(document, 1_000_000)
    assert [one.dead_timestamp_ms for one in loaded] == [970_000]
    assert one.matches({"a": "2"})
    data["deadTime"] = 99_999  # a death before its birth: it is alive
    assert loaded.load(document, 1_000_000)
    assert [(one.dead, one.dead_timestamp_ms) for one in loaded] == [(False, 99_999)]
    other = Registrations(BloomFilter(20, 64))
    assert not other.load(document, 1)
    assert list(other) == []
    data["expression"] = "a >"
    assert loaded.load(document, 1)
    (broken,) = loaded
    assert broken.filter is None
    assert broken.matches({})
    assert broken.may_match(bytes(14), 10**12, loaded.bloom)
    assert loaded.bitmap("T", {"a": "2"}) == bytes(14)
    assert loaded.load({"filterDataByTopic": {"T": None, "U": {"groupFilterData": {"G": None}}}}, 1)
    assert list(loaded) == []


@pytest.mark.parametrize(
    "change",
    [
        {"bornTime": "1"},
        {"bornTime": True},
        {"expression": None},
        {"expressionType": 5},
        {"bloomFilterData": []},
        {"bloomFilterData": {"bitNum": 112, "bitPos": [112, 1, 1]}},
        {"bloomFilterData": {"bitNum": 112, "bitPos": [-1, 1, 1]}},
        {"bloomFilterData": {"bitNum": 112, "bitPos": "x"}},
    ],
)
def test_a_damaged_filter_is_left_out(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    registrations = Registrations()
    for topic, group in (("T", "G"), ("T", "H"), ("U", "G")):
        registrations.register(topic, group, "a > 1", SQL92, 7, now_ms=100_000)
    document = registrations.to_document(100_000)
    document["filterDataByTopic"]["T"]["groupFilterData"]["G"].update(change)
    assert registrations.load(document, 1)
    assert [(loaded.topic, loaded.group) for loaded in registrations] == [("T", "H"), ("U", "G")]
    assert "left out a filter: consumerFilter.json: T/G: " in caplog.text


def test_a_spoilt_file_is_refused_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    registrations = Registrations()
    registrations.register("T", "G", "a > 1", SQL92, 7, now_ms=100_000)
    spoilt: list[Any] = [[], {"filterDataByTopic": 5}]
    for document in spoilt:
        with pytest.raises(ConfigError, match=r"consumerFilter\.json"):
            registrations.load(document, 1)
    assert [loaded.topic for loaded in registrations] == ["T"]
    assert registrations.load({"filterDataByTopic": {"T": 5, "U": {"groupFilterData": 5}}}, 1)
    assert list(registrations) == []
    assert "left out the filters of a topic: consumerFilter.json: U: expected an object, found int" in caplog.text


def test_a_predicate_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    def predicate(message: str) -> object:
        if message == "bad":
            raise RuntimeError("what a message")
        clock.advance(ms=len(message))
        return "x" in message

    watched = WatchedPredicate(predicate, clock=clock, budget=0.005)
    with caplog.at_level(logging.WARNING, "librmq.filter"):
        assert watched.matches("x") is True
        assert watched.matches("xxxxxxx", "T-0@18") is True
        assert watched.matches("y") is False
        assert watched.matches("bad", "T-0@17") is False
    assert "T-0@17" in caplog.text
    assert "what a message" in caplog.text
    assert "T-0@18" in caplog.text
    counts = watched.counts
    assert (counts.calls, counts.matched, counts.failed, counts.over_budget) == (4, 2, 1, 1)
    assert counts.seconds == pytest.approx(0.009, abs=1e-6)
    assert counts.slowest == pytest.approx(0.007, abs=1e-6)


@pytest.mark.parametrize(
    ("policy", "answer", "expected"),
    [
        (Policy.SKIP, True, False),
        (Policy.DELIVER, False, True),
        (Policy.AS_ANSWERED, True, True),
        (Policy.AS_ANSWERED, False, False),
    ],
)
def test_policies_over_budget(policy: Policy, answer: bool, expected: bool) -> None:
    clock = ManualClock()

    def predicate(message: str) -> bool:
        clock.advance(ms=10)
        return answer

    watched = WatchedPredicate(predicate, clock=clock, budget=0.005, over_budget=policy)
    assert watched.matches("m") is expected
    patient = WatchedPredicate(predicate, clock=clock, budget=0.02, over_budget=policy)
    assert patient.matches("m") is answer
    assert patient.counts.over_budget == 0


def test_a_failure_is_a_failure_however_late() -> None:
    clock = ManualClock()

    def predicate(message: str) -> bool:
        clock.advance(ms=10)
        raise ValueError(message)

    watched = WatchedPredicate(predicate, clock=clock, budget=0.005, over_budget=Policy.DELIVER, on_error=Policy.SKIP)
    assert not watched.matches("m")
    assert (watched.counts.failed, watched.counts.over_budget) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budget": 0}, "budget: expected more than 0 seconds"),
        ({"budget": "1"}, "budget: expected seconds or a timedelta"),
        ({"budget": math.nan}, "budget: expected seconds"),
        ({"on_error": "skip"}, "on_error: expected one of Policy"),
        ({"over_budget": None}, "over_budget: expected one of Policy"),
    ],
)
def test_wrong_settings_of_a_predicate(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WatchedPredicate(bool, **{"budget": timedelta(seconds=1), **wrong})


def test_policies_on_errors() -> None:
    def predicate(message: str) -> bool:
        raise ValueError(message)

    assert not WatchedPredicate(predicate, clock=ManualClock(), budget=1).matches("m")
    delivering = WatchedPredicate(predicate, clock=ManualClock(), budget=1, on_error=Policy.DELIVER)
    assert delivering.matches("m")
    assert (delivering.counts.matched, delivering.counts.failed) == (1, 1)

    def stopped(message: str) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WatchedPredicate(stopped, clock=ManualClock(), budget=1).matches("m")
    with pytest.raises(ConfigError):
        WatchedPredicate(predicate, clock=ManualClock(), budget=0)
    with pytest.raises(ConfigError):
        WatchedPredicate(predicate, clock=ManualClock(), budget=1, on_error=Policy.AS_ANSWERED)

    async def later(message: str) -> bool:
        return False

    for wrong in (5, "a = 1", later):  # a coroutine function returns a coroutine, which is always true
        with pytest.raises(ConfigError, match="expected a plain function"):
            WatchedPredicate(wrong, clock=ManualClock(), budget=1)  # type: ignore[arg-type]
