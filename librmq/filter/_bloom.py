"""Bloom filters: the bits of a consumer group in the bitmaps of messages.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import mmh3

from librmq.errors import ConfigError

_INT_MAX: Final = 2**31 - 1


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
        if not 1 <= self.expected <= _INT_MAX:
            raise ConfigError(f"a bloom filter expects 1 to {_INT_MAX} texts, not {self.expected}")
        rate = self.error_percent / 100.0
        hashes = math.ceil(math.log(rate) / math.log(0.5))
        bits = math.ceil(self.expected * (math.log(1 / rate) / math.log(2)) * (math.log(math.e) / math.log(2)))
        bits = min(bits, _INT_MAX)  # Java's conversion to int saturates, twice
        object.__setattr__(self, "hash_count", hashes)
        object.__setattr__(self, "bit_count", min(8 * math.ceil(bits / 8), _INT_MAX))

    @classmethod
    def of_size(cls, hash_count: int, bit_count: int) -> BloomFilter:
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
            if combined > _INT_MAX:  # negative as an int32: all its bits are flipped
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
