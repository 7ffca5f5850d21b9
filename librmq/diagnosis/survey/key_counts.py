"""Frequent keys, and keys that repeat within a window, in a fixed amount of memory.

Up to some number of messages, all keys are counted. Beyond it, keys are sampled: frequent keys in a sample of the
messages, and repeated keys in all messages of a sample of the keys. Both results are then estimates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from librmq.diagnosis.survey.model import FrequentKey, RepeatedKeys
from librmq.message.record import split_keys

MOST_KEYED: Final = 200_000
_MOST_FREQUENT: Final = 15
MOST_OF_A_TOPIC: Final = 5
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


def share_of(number: Any, shares: int) -> Any:  # noqa: ANN401 (a whole number, or an array of unsigned ones)
    """Return the share of a number among ``shares`` (a power of two): of a key's last eight bytes, or of a place."""
    return (number * _MULTIPLIER & _WORD) >> 32 & shares - 1


def most_frequent(counts: Iterable[tuple[int, str, str]]) -> Iterator[tuple[int, str, str, bool]]:
    """Yield the largest of (count, topic, key), a few of each topic, with whether others of their topic are cut."""
    ordered = sorted(counts, key=lambda row: (-row[0], *row[1:]))
    place: Counter[str] = Counter()
    rows = []
    for row in ordered:
        place[row[1]] += 1
        if place[row[1]] <= MOST_OF_A_TOPIC:
            rows.append(row)
    del rows[_MOST_FREQUENT:]
    listed = Counter(topic for _, topic, _ in rows)
    for count, topic, key in rows:
        yield count, topic, key, place[topic] > listed[topic]


class _Repeats:
    __slots__ = ("keys", "messages", "resent", "shortest_ms")

    def __init__(self) -> None:
        self.messages = 0
        self.resent = 0
        self.keys: set[str] = set()
        self.shortest_ms: int | None = None


class KeyCounts:
    """The keys of a store's messages, in the order of the log."""

    def __init__(self, expected: int, window_s: float) -> None:
        """Prepare for ``expected`` messages; beyond `MOST_KEYED` only a sample is counted."""
        self.shares = 1 << max(0, (expected - 1) // MOST_KEYED).bit_length()
        """The number of shares, a power of two; one of them is counted."""
        self._window_ms = round(window_s * 1000)
        self._frequent: dict[str, Counter[str]] = defaultdict(Counter)
        self._keyed: Counter[str] = Counter()
        self._last: dict[tuple[str, str], tuple[int, str | None]] = {}
        self._repeats: dict[str, _Repeats] = {}

    def count(self, topics: Sequence[str], keys: Sequence[str]) -> None:
        """Count the keys of messages whose places are in one share."""
        keys_by_topic: dict[str, list[str]] = defaultdict(list)
        for topic, text in zip(topics, keys, strict=True):
            if " " in text:
                keys_by_topic[topic] += dict.fromkeys(split_keys(text))
            else:
                keys_by_topic[topic].append(text)
        for topic, keys_of_topic in keys_by_topic.items():
            self._keyed[topic] += len(keys_of_topic)
            self._frequent[topic].update(keys_of_topic)

    def look_back(
        self, topics: Sequence[str], keys: Sequence[str], unique: Sequence[str | None], times_ms: Sequence[int]
    ) -> None:
        """Compare messages whose keys are in one share with earlier ones."""
        last, window_ms = self._last, self._window_ms
        for topic, text, unique_key, at_ms in zip(topics, keys, unique, times_ms, strict=True):
            for key in dict.fromkeys(split_keys(text)) if " " in text else (text,):
                before = last.get((topic, key))
                last[topic, key] = at_ms, unique_key
                if before is not None and at_ms - before[0] <= window_ms:
                    repeats = self._repeats.setdefault(topic, _Repeats())
                    repeats.messages += 1
                    repeats.resent += unique_key is not None and unique_key == before[1]
                    repeats.keys.add(key)
                    after_ms = max(0, at_ms - before[0])
                    repeats.shortest_ms = (
                        after_ms if repeats.shortest_ms is None else min(after_ms, repeats.shortest_ms)
                    )

    def frequent(self, store: str) -> Iterator[FrequentKey]:
        """Yield the most frequent keys of all topics, if several messages have them."""
        counts_of_topics = [
            (count, topic, key)
            for topic, counts in self._frequent.items()
            for key, count in counts.most_common(MOST_OF_A_TOPIC + 1)
            if count > 1
        ]
        for count, topic, key, cut in most_frequent(counts_of_topics):
            share = count / self._keyed[topic]
            yield FrequentKey(store, topic, key, count * self.shares, share, self.shares > 1, cut)

    def repeated(self, store: str) -> Iterator[RepeatedKeys]:
        """Yield the repeated keys of each topic; with a sample, also a row for each topic without any in it."""
        n = self.shares
        for topic in sorted(self._repeats.keys() | (self._keyed.keys() if n > 1 else ())):
            repeats = self._repeats.get(topic) or _Repeats()
            shortest_s = None if repeats.shortest_ms is None else repeats.shortest_ms / 1000
            yield RepeatedKeys(
                store, topic, repeats.messages * n, repeats.resent * n, len(repeats.keys) * n, shortest_s, n > 1
            )
