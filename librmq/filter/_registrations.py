"""Registrations: the filters of consumer groups on topics, which a broker keeps in ``consumerFilter.json``.

It mirrors ``ConsumerFilterManager`` and ``ConsumerFilterData`` of 4.9.4. When a message is stored, the expression of
every group registered on its topic is evaluated, and the bits of the groups that match are set in the message's bitmap.
A pull skips a message whose bitmap lacks the group's bits. The file's content is

::

    {"filterDataByTopic": {topic: {"topic": topic, "groupFilterData": {group: {
        "bloomFilterData": {"bitNum": 112, "bitPos": [22, 7, 106]},     bits of "group#topic"
        "bornTime": ms, "clientVersion": version, "consumerGroup": group, "dead": bool, "deadTime": ms or 0,
        "expression": "price > 5", "expressionType": "SQL92", "topic": topic}}}}}

The bitmap is a bloom filter with the arithmetic of ``BloomFilter``, ``BitsArray`` and ``BloomFilterData`` of
``org.apache.rocketmq.filter.util``::

    k = ceil(log0.5(f / 100))                   hash functions, for an error rate of f percent
    m = ceil(n * log2(100 / f) * log2(e))       bits, for n texts, up to a multiple of 8
    h = first 8 bytes, little-endian, of murmur3_128 (seed 0) of the text in UTF-8; h1 low, h2 high 32 bits
    position i = 1..k:  h1 + i * h2 as int32, ~ if negative, mod m
    bit p: byte p / 8, mask 1 << (p % 8)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

import mmh3

from librmq.errors import ConfigError, FilterSyntaxError
from librmq.java.lang import INT_MAX
from librmq.runtime import calls_later
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import RLock

if TYPE_CHECKING:
    from librmq.filter.filters import Compiled
    from librmq.filter.parser import Dialect

SQL92: Final = "SQL92"
"""Type of a subscription by an SQL92 expression."""
TAG: Final = "TAG"
"""Type of a subscription by tags."""
_DEAD_ON_LOAD_MS: Final = 30 * 1000
"""A group that lived when the file was written counts as dead since this long before the file is read."""
CLEANED_AFTER_MS: Final = 24 * 3600 * 1000

_log = EventLog("librmq.filter")


# ---- the bits of a text


@dataclass(frozen=True, slots=True)
class BloomPositions:
    """The bits of one string in bitmaps of ``bit_count`` bits."""

    positions: tuple[int, ...]
    """Numbers of the bits, from 0."""
    bit_count: int
    """Number of bits of a bitmap."""


@dataclass(frozen=True, slots=True)
class BloomFilter:
    """A Bloom filter with an error rate of ``error_percent`` for ``expected`` strings.

    ``error_percent`` is above 0 and below 100, ``expected`` at least 1. Bitmaps are plain ``bytearray`` and ``bytes``
    of ``bit_count / 8`` bytes. Immutable and thread-safe.

    Raises:
        ConfigError: A setting is out of range.
    """

    error_percent: float
    """Share of wrong hits, in percent."""
    expected: int
    """Number of strings."""
    hash_count: int = field(init=False)
    """Bits that each string sets."""
    bit_count: int = field(init=False)
    """Bits of a bitmap."""

    def __post_init__(self) -> None:
        if not 0 < self.error_percent < 100:
            raise ConfigError(f"a bloom filter's error rate is above 0 and below 100 percent, not {self.error_percent}")
        if not 1 <= self.expected <= INT_MAX:
            raise ConfigError(f"a bloom filter expects 1 to {INT_MAX} texts, not {self.expected}")
        rate = self.error_percent / 100.0
        hashes = math.ceil(math.log(rate) / math.log(0.5))
        bits = math.ceil(self.expected * (math.log(1 / rate) / math.log(2)) * (math.log(math.e) / math.log(2)))
        bits = min(bits, INT_MAX)  # Java's conversion to int saturates, twice
        object.__setattr__(self, "hash_count", hashes)
        object.__setattr__(self, "bit_count", min(8 * math.ceil(bits / 8), INT_MAX))

    @classmethod
    def _of_size(cls, hash_count: int, bit_count: int) -> BloomFilter:
        """Return a filter with these numbers of bits, and the error rate and strings for which they serve."""
        error_percent = max(100 * 0.5**hash_count, 1e-9)
        bloom = cls(error_percent, max(1, int(bit_count * math.log(2) / hash_count)))
        object.__setattr__(bloom, "hash_count", hash_count)
        object.__setattr__(bloom, "bit_count", bit_count)
        return bloom

    def positions(self, text: str) -> tuple[int, ...]:
        """Return the bits that ``text`` sets; it can contain duplicates."""
        data = text.encode("utf-8", "replace")
        hash64 = mmh3.hash64(data, 0, True, signed=False)[0]
        low, high = hash64 & 0xFFFFFFFF, hash64 >> 32
        positions = []
        for i in range(1, self.hash_count + 1):
            combined = (low + i * high) & 0xFFFFFFFF
            if combined > INT_MAX:  # negative as an int32: all its bits are flipped
                combined ^= 0xFFFFFFFF
            positions.append(combined % self.bit_count)
        return tuple(positions)

    def bloom_positions(self, text: str) -> BloomPositions:
        """Return the bits that ``text`` sets, with the length of their bitmap."""
        return BloomPositions(self.positions(text), self.bit_count)

    def fits(self, data: BloomPositions | None) -> bool:
        """Return whether positions were made with the same settings."""
        return data is not None and data.bit_count == self.bit_count and len(data.positions) == self.hash_count

    def bitmap(self, *texts: str) -> bytearray:
        """Return a new bitmap with the bits of ``texts`` set."""
        bitmap = bytearray((self.bit_count + 7) // 8)
        for text in texts:
            self.add(bitmap, self.positions(text))
        return bitmap

    @staticmethod
    def add(bitmap: bytearray, positions: Iterable[int]) -> None:
        """Set bits."""
        for position in positions:
            bitmap[position >> 3] |= 1 << (position & 7)

    @staticmethod
    def hit(bitmap: bytes | bytearray | memoryview, positions: Iterable[int]) -> bool:
        """Return whether all of the bits are set; if not, the string was certainly not added."""
        return all(bitmap[position >> 3] >> (position & 7) & 1 for position in positions)


BROKER_BLOOM: Final = BloomFilter(20, 32)
"""A broker's default: 3 bits of 112."""


# ---- registrations


@dataclass(frozen=True, slots=True)
class Registration:
    """A group's filter on a topic."""

    topic: str
    group: str
    expression: str
    """The expression as the client sent it."""
    expression_type: str
    """``TAG`` or ``SQL92``."""
    born_timestamp_ms: int
    """Time of the registration, in milliseconds since 1970."""
    dead_timestamp_ms: int
    """When its last client left; before ``born_timestamp_ms``, for example 0, while it lives."""
    client_version: int
    """The version of the client's subscription; the largest is the newest."""
    bloom: BloomPositions | None
    """The bits of the group in a message's bitmap; None if a file lacks them."""
    filter: Compiled | None
    """None if the expression comes from a file and does not compile."""

    @property
    def dead(self) -> bool:
        """Whether the group has ended the subscription."""
        return self.dead_timestamp_ms >= self.born_timestamp_ms

    def matches(self, properties: Mapping[str, str] | None) -> bool:
        """Evaluate the filter exactly; if it does not compile, every message passes."""
        return self.filter is None or self.filter.matches(properties)

    def may_match(self, bitmap: bytes | None, store_timestamp_ms: int | None, bloom: BloomFilter) -> bool:
        """Check the bitmap and the store time, without reading the message; false means certainly no match.

        A bitmap of None is unknown. The bitmap of a message stored before the registration does not cover it.
        """
        if self.filter is None or self.bloom is None or not bloom.fits(self.bloom):
            return True
        if bitmap is None or store_timestamp_ms is None or store_timestamp_ms <= self.born_timestamp_ms:
            return True
        if len(bitmap) * 8 != self.bloom.bit_count:
            return True
        return bloom.hit(bitmap, self.bloom.positions)


class Registrations:
    """All groups' filters. Thread-safe: groups can register and unregister while a store computes bitmaps.

    Callers pass all times. ``bloom`` decides the bits, ``dialect`` the grammar of expressions.
    """

    def __init__(self, bloom: BloomFilter = BROKER_BLOOM, dialect: Dialect = "4.9") -> None:
        self.bloom: Final = bloom
        self.dialect: Final[Dialect] = dialect
        # They are replaced as a whole under the lock, so readers without it see one state or the other.
        self._by_topic: Mapping[str, Mapping[str, Registration]] = {}
        self._latest_ms = 0  # store time of the latest message that got a bitmap
        self._lock: Final = RLock()

    @classmethod
    def of_rows(cls, rows: Mapping[str, Any], now_ms: int, bloom: BloomFilter | None = None) -> Self:
        """Return the registrations of a file's ``filterDataByTopic``, by default with the bits that a broker gave them.

        Raises:
            ConfigError: One is malformed.
        """
        registrations = cls(_bloom_of(rows) if bloom is None else bloom)
        if rows:
            registrations.load({"filterDataByTopic": rows}, now_ms)
        return registrations

    def __iter__(self) -> Iterator[Registration]:
        for groups in self._by_topic.values():
            yield from groups.values()

    def get(self, topic: str, group: str) -> Registration | None:
        """Return a group's registration for a topic, if there is one."""
        return self._by_topic.get(topic, {}).get(group)

    def of_topic(self, topic: str) -> tuple[Registration, ...]:
        """Return the registrations of all groups for a topic."""
        return tuple(self._by_topic.get(topic, {}).values())

    def of_group(self, group: str) -> tuple[Registration, ...]:
        """Return the registrations of a group for all topics."""
        return tuple(registration for registration in self if registration.group == group)

    def answers_for(self, registration: Registration) -> bool:
        """Return whether bitmaps cover a registration: false once its group has another expression or none."""
        now = self.get(registration.topic, registration.group)
        return now is not None and (now.expression, now.expression_type, now.born_timestamp_ms) == (
            registration.expression,
            registration.expression_type,
            registration.born_timestamp_ms,
        )

    def register(
        self,
        topic: str,
        group: str,
        expression: str | None,
        expression_type: str | None,
        client_version: int,
        now_ms: int,
    ) -> bool:
        """Register a group's subscription, and return whether it is in force now.

        A subscription by tags needs no registration. An older version changes nothing, nor does the same version while
        the group is alive. An expression that does not compile is refused, and ends the group's former registration.
        """
        if expression_type in (None, "", TAG) or not expression:
            return False
        assert expression_type is not None
        bloom = self.bloom.bloom_positions(f"{group}#{topic}")
        with calls_later(), self._lock:
            old = self.get(topic, group)
            if old is not None and client_version <= old.client_version:
                if client_version < old.client_version or not old.dead:
                    return False
                self._set_registration(replace(old, dead_timestamp_ms=0))
                return True
            if old is not None and (old.expression, old.expression_type, old.bloom) == (
                expression,
                expression_type,
                bloom,
            ):
                dead_timestamp_ms = 0 if old.dead else old.dead_timestamp_ms
                self._set_registration(replace(old, client_version=client_version, dead_timestamp_ms=dead_timestamp_ms))
                return True
            filter_ = self._compile(topic, group, expression, expression_type)
            if filter_ is None:
                if old is not None:
                    self._retain(lambda registration: registration is not old)
                return False
            registration = Registration(
                topic=topic,
                group=group,
                expression=expression,
                expression_type=expression_type,
                born_timestamp_ms=now_ms,
                dead_timestamp_ms=0,
                client_version=client_version,
                bloom=bloom,
                filter=filter_,
            )
            self._set_registration(registration)
            # Bitmaps until here lack the group, also those of messages that were stored during the compilation or
            # before the clock was set back.
            self._set_registration(replace(registration, born_timestamp_ms=max(now_ms, self._latest_ms)))
            return True

    def keep_topics(self, group: str, topics: set[str], now_ms: int) -> None:
        """Keep the filters on ``topics``, which the group's clients name; the group's others are dead now."""
        with self._lock:
            for registration in self.of_group(group):
                if registration.topic not in topics and not registration.dead:
                    dead_ms = max(now_ms, registration.born_timestamp_ms)
                    self._set_registration(replace(registration, dead_timestamp_ms=dead_ms))

    def unregister(self, group: str, now_ms: int) -> None:
        """Release a group's subscription after its last client has left."""
        self.keep_topics(group, set(), now_ms)

    def clean(self, now_ms: int, after_ms: int = CLEANED_AFTER_MS) -> None:
        """Remove registrations that have been dead for ``after_ms``."""
        with self._lock:
            self._retain(lambda entry: not entry.dead or now_ms - entry.dead_timestamp_ms < after_ms)

    def _set_registration(self, registration: Registration) -> None:
        groups = {**self._by_topic.get(registration.topic, {}), registration.group: registration}
        self._by_topic = {**self._by_topic, registration.topic: groups}

    def _retain(self, selected: Callable[[Registration], bool]) -> None:
        by_topic = {
            topic: {group: registration for group, registration in groups.items() if selected(registration)}
            for topic, groups in self._by_topic.items()
        }
        self._by_topic = {topic: groups for topic, groups in by_topic.items() if groups}

    def bitmap(self, topic: str, properties: Mapping[str, str] | None, store_timestamp_ms: int = 0) -> bytes | None:
        """Return the bitmap of a new message, with the bits of all groups that match; None if no group filters."""
        self._latest_ms = max(self._latest_ms, store_timestamp_ms)  # first, for a registration at the same time
        groups = self._by_topic.get(topic)
        if not groups:
            return None
        bitmap = bytearray((self.bloom.bit_count + 7) // 8)
        for registration in groups.values():
            if registration.filter is None or registration.bloom is None or not self.bloom.fits(registration.bloom):
                continue
            if registration.filter.matches(properties):
                self.bloom.add(bitmap, registration.bloom.positions)
        return bytes(bitmap)

    def _compile(self, topic: str, group: str, expression: str, expression_type: str) -> Compiled | None:
        """Return the filter of a group, None after a warning if it does not compile."""
        from librmq.filter.filters import compiled  # loads a grammar

        try:
            if expression_type != SQL92:
                raise FilterSyntaxError(expression, 0, f"expected a filter of type SQL92, found {expression_type!r}")
            return compiled(expression, self.dialect)
        except FilterSyntaxError as error:
            _log.warning(
                "the filter of group %(group)s on topic %(topic)s does not compile: %(error)s",
                group=group,
                topic=topic,
                error=error,
            )
            return None

    # --- consumerFilter.json

    def to_document(self, now_ms: int) -> dict[str, Any]:
        """Return the content of the file, after a ``clean``."""
        self.clean(now_ms)
        return {
            "filterDataByTopic": {
                topic: {
                    "groupFilterData": {name: _to_json(registration) for name, registration in groups.items()},
                    "topic": topic,
                }
                for topic, groups in self._by_topic.items()
            }
        }

    def load(self, document: object, now_ms: int) -> bool:
        """Replace all registrations by the content of the file.

        Return False and change nothing if the file was made with other bloom settings, because its bits would not fit.
        Groups that were alive count as dead from shortly before now; they will register again.

        Raises:
            ConfigError: The file has another structure.
        """
        loaded: dict[str, dict[str, Registration]] = {}
        for topic, entry in _object(
            _object(document, "it").get("filterDataByTopic") or {}, "filterDataByTopic"
        ).items():
            groups = loaded.setdefault(topic, {})
            for group, registration in self._of_topic(topic, entry):
                if not self.bloom.fits(registration.bloom):
                    _log.warning("ignored consumerFilter.json, which was made with other bloom settings")
                    return False
                if registration.dead_timestamp_ms == 0:
                    dead = max(now_ms - _DEAD_ON_LOAD_MS, registration.born_timestamp_ms)
                    registration = replace(registration, dead_timestamp_ms=dead)
                groups[group] = registration
        with self._lock:
            self._by_topic = loaded
        return True

    def _of_topic(self, topic: str, entry: object) -> Iterator[tuple[str, Registration]]:
        """Yield the registrations of a topic without damaged ones, whose groups register again when they subscribe."""
        try:
            groups = _object({} if entry is None else entry, topic).get("groupFilterData") or {}
            for group, data in _object(groups, topic).items():
                try:
                    if data is not None:
                        yield group, self._from_json(_object(data, f"{topic}/{group}"), topic, group)
                except ConfigError as error:
                    _log.warning("left out a filter: %(error)s", error=error)
        except ConfigError as error:
            _log.warning("left out the filters of a topic: %(error)s", error=error)

    def _from_json(self, data: dict[str, Any], topic: str, group: str) -> Registration:
        what = f"{topic}/{group}"
        bloom = None
        if data.get("bloomFilterData") is not None:
            bloom_data = _object(data["bloomFilterData"], f"{what}: bloomFilterData")
            positions = bloom_data.get("bitPos")
            bit_count = _int(bloom_data, "bitNum", what)
            if not isinstance(positions, list) or not all(type(p) is int and 0 <= p < bit_count for p in positions):
                raise ConfigError(f"consumerFilter.json: {what}: bitPos: expected a list of bits below {bit_count}")
            bloom = BloomPositions(tuple(positions), bit_count)
        expression, expression_type = (data.get(name) for name in ("expression", "expressionType"))
        if not isinstance(expression, str) or not isinstance(expression_type, str):
            raise ConfigError(f"consumerFilter.json: {what}: expected strings as expression and expressionType")
        return Registration(
            topic=topic,
            group=group,
            expression=expression,
            expression_type=expression_type,
            born_timestamp_ms=_int(data, "bornTime", what),
            dead_timestamp_ms=_int(data, "deadTime", what),
            client_version=_int(data, "clientVersion", what),
            bloom=bloom,
            filter=self._compile(topic, group, expression, expression_type),
        )


def _to_json(registration: Registration) -> dict[str, Any]:
    bloom = registration.bloom
    return {
        **({"bloomFilterData": {"bitNum": bloom.bit_count, "bitPos": list(bloom.positions)}} if bloom else {}),
        "bornTime": registration.born_timestamp_ms,
        "clientVersion": registration.client_version,
        "consumerGroup": registration.group,
        "dead": registration.dead,
        "deadTime": registration.dead_timestamp_ms,
        "expression": registration.expression,
        "expressionType": registration.expression_type,
        "topic": registration.topic,
    }


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"consumerFilter.json: {what}: expected an object, found {type(value).__name__}")
    return value


def _int(data: dict[str, Any], name: str, what: str) -> int:
    value = data.get(name, 0)
    if type(value) is not int:
        raise ConfigError(f"consumerFilter.json: {what}: {name}: expected an integer, found {value!r}")
    return value


def _bloom_of(filters: Mapping[str, Any]) -> BloomFilter:
    """Return the bloom filter with which a broker wrote the rows of ``consumerFilter.json``, by the first of them."""
    for entry in filters.values():
        groups = entry.get("groupFilterData") if isinstance(entry, dict) else None
        for row in groups.values() if isinstance(groups, dict) else ():
            data = row.get("bloomFilterData") if isinstance(row, dict) else None
            if isinstance(data, dict):
                bit_count, positions = data.get("bitNum"), data.get("bitPos")
                if isinstance(positions, list) and type(bit_count) is int and 0 < bit_count <= INT_MAX and positions:
                    return BloomFilter._of_size(len(positions), bit_count)
    return BROKER_BLOOM
