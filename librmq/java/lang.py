"""Java's ``hashCode``, the order of its texts and of a ``HashMap``, its decoding of UTF-8, and its parsing of numbers.

Files on disk depend on them: index slots and tags codes are hashes of strings, and a message's properties are in the
order of a map. Mirrors ``java.lang.String``, ``java.util.HashMap`` and ``IndexFile.indexKeyHashMethod``.

Numbers are parsed from texts as by ``Integer.valueOf``, ``Long.valueOf`` and ``Double.valueOf``. An integer is an
optional ASCII sign and decimal digits of the basic multilingual plane, in the range of its type. For a double, control
characters and spaces around the text are removed. It then has one of these forms:

::

    [sign] NaN | Infinity
    [sign] digits [. digits] [e [sign] digits] [f|d]          ASCII digits, at least one before the exponent
    [sign] 0x hex digits [. hex digits] p [sign] digits [f|d]

Python's ``int`` and ``float`` accept other texts (underscores, other spaces, ``inf``) and refuse some (``5d``,
hexadecimal).
"""

from __future__ import annotations

import array
import codecs
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from librmq.errors import MessageIllegalError
from librmq.runtime import lazy_numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


_MASK = 0xFFFFFFFF
_SIGN = 0x80000000

# A hash is a polynomial in 31, and a character c is 31 * (c // 31) + c % 31. So the hash of an ASCII text is 31 times
# one number in base 31 plus another: two translations and two int() instead of a loop.
_DIGITS = b"0123456789abcdefghijklmnopqrstu"
_QUOTIENTS = bytes(_DIGITS[c // 31] if c < 128 else 0 for c in range(256))
_REMAINDERS = bytes(_DIGITS[c % 31] if c < 128 else 0 for c in range(256))
_CHUNK = 128  # the time of int() grows with the square of the length

_POWERS = tuple(pow(31, n, 1 << 32) for n in range(_CHUNK + 1))
_NAN_BITS = 0x7FF8000000000000
_BIG_ENDIAN_HOST = sys.byteorder == "big"


def string_hash(text: str) -> int:
    """Return Java's ``text.hashCode()``, over UTF-16 units, as a signed 32-bit number."""
    if text.isascii() and 0 < len(text) <= _CHUNK:  # the usual case is inline: a call would cost a fifth of it
        data = text.encode()
        code = 31 * int(data.translate(_QUOTIENTS), 31) + int(data.translate(_REMAINDERS), 31)
    else:
        code = _hash(text)
    return ((code & _MASK) ^ _SIGN) - _SIGN


def hash_append(prefix_hash: int, text: str) -> int:
    """Return the hash of ``prefix + text``, given the hash of ``prefix`` (signed or not), as a signed 32-bit number."""
    if text.isascii() and 0 < len(text) <= _CHUNK:
        data = text.encode()
        code = 31 * int(data.translate(_QUOTIENTS), 31) + int(data.translate(_REMAINDERS), 31)
        code += prefix_hash * _POWERS[len(data)]
    else:
        code = prefix_hash * pow(31, _unit_count(text), 1 << 32) + _hash(text)
    return ((code & _MASK) ^ _SIGN) - _SIGN


def index_key_hash(topic: str, key: str) -> int:
    """Return the hash of a key in an index file: the absolute hash of ``topic#key``, 0 if Java has none."""
    key_hash = abs(string_hash(f"{topic}#{key}"))
    return key_hash if key_hash < _SIGN else 0


def long_hash(value: int) -> int:
    """Return Java's ``Long.hashCode`` of the low 64 bits of ``value``; an ``Integer``'s hash is its value."""
    bits = value & 0xFFFFFFFFFFFFFFFF
    return (((bits ^ bits >> 32) & _MASK) ^ _SIGN) - _SIGN


def number_hash(value: bool | float) -> int | None:
    """Return Java's ``hashCode`` of a ``Boolean``, ``Integer``, ``Long`` or ``Double``; None if no type has the value.

    A whole number of 32 bits is an ``Integer``. A ``Double`` has one hash for every NaN, and two for the two zeros.
    """
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, float):
        return long_hash(_NAN_BITS if value != value else struct.unpack(">q", struct.pack(">d", value))[0])
    if INT_MIN <= value <= INT_MAX:
        return value
    return long_hash(value) if LONG_MIN <= value <= LONG_MAX else None


def _hash(text: str) -> int:
    code = 0
    if text.isascii():
        for at in range(0, len(text), _CHUNK):
            code = hash_append(code, text[at : at + _CHUNK])
        return code & _MASK
    units = array.array("H", text.encode("utf-16-le", "surrogatepass"))
    if _BIG_ENDIAN_HOST:
        units.byteswap()
    for unit in units:
        code = (31 * code + unit) & _MASK
    return code


def _unit_count(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


JAVA_ERRORS: Final = "librmq.java_decode"
"""The handler of errors with which ``bytes.decode`` does the same as `java_decode`."""


def java_decode(raw: bytes) -> str:
    """Decode UTF-8 with U+FFFD for each malformed part, as ``new String(raw, UTF_8)`` does. Never raises.

    Java counts an encoded surrogate as one malformed character, Python as three.
    """
    return raw.decode("utf-8", JAVA_ERRORS)


_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def _replace_malformed(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    surrogate = _ENCODED_SURROGATE.match(error.object, error.start)
    return "\ufffd", surrogate.end() if surrogate else error.end


codecs.register_error(JAVA_ERRORS, _replace_malformed)

_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")


def utf16_order(text: str) -> str:
    """Return a sort key in the order of ``String.compareTo``, in which U+10000 is before U+E000."""
    return text if text.isascii() else _BEYOND_16_BITS.sub(_surrogates, text)


def _surrogates(match: re.Match[str]) -> str:
    code = ord(match[0]) - 0x10000
    return chr(0xD800 + (code >> 10)) + chr(0xDC00 + (code & 0x3FF))


def part_hashes(
    raw: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.signedinteger],
    lengths: npt.NDArray[np.int64],
    prefix_hashes: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return `hash_append` of each part of ``raw`` to its prefix, modulo 2**32; -1 for a part that is not ASCII."""
    hashes = prefix_hashes & _MASK
    for length in sorted({*lengths.tolist()} - {0}):  # numpy.unique would load numpy.ma
        same = np.flatnonzero(lengths == length)
        # In this view every byte begins an item of this length, so one gather takes all parts of the length.
        windows = np.ndarray((len(raw) - length + 1,), f"V{length}", raw, strides=(1,))
        table = windows[begins[same]].view(np.uint8).reshape(-1, length)
        sums = np.einsum("ij,j->i", table.astype(np.uint32), _weights(length))
        hashes[same] = (prefix_hashes[same] * pow(31, length, 1 << 32) + sums) & _MASK
        if table.max() > 127:
            hashes[same[table.max(axis=1) > 127]] = -1
    return hashes


def index_key_hashes(prefix_hashes: npt.ArrayLike, keys: Sequence[str] | Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return `index_key_hash` of many keys at once, from the hashes of their ``topic#`` (one for each, signed or not).

    Byte strings are decoded by `java_decode`.
    """
    prefixes = np.asarray(prefix_hashes, np.int64)
    joined = _joined_ascii(keys)
    lengths = list(map(len, keys))
    one_length = bool(lengths) and lengths.count(lengths[0]) == len(lengths)  # as ids of one kind have
    longest = lengths[0] if one_length else max(lengths, default=0)
    if joined is None or not 0 < longest <= _CHUNK:
        texts = (key if isinstance(key, str) else java_decode(key) for key in keys)
        pairs = zip(prefixes.tolist(), texts, strict=True)
        sums = np.array([hash_append(prefix, key) for prefix, key in pairs], np.int64)
    elif one_length:
        sums = prefixes * _POWERS[longest] + _table_hashes(joined, longest)
    else:  # leading characters 0 do not change a hash
        padded = b"".join([data.rjust(longest, b"\0") for data in _pieces(joined, lengths)])
        sums = prefixes * np.array(_POWERS)[lengths] + _table_hashes(padded, longest)
    return absolute_hashes(sums)


def absolute_hashes(sums: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the hashes of an index file from those of ``topic#key``, which are modulo 2**32."""
    # In 32 bits the least number is its own absolute value, which becomes 0.
    return (np.abs(sums.astype(np.uint32).view(np.int32)) & 0x7FFFFFFF).astype(np.int64)


def _table_hashes(joined: bytes, length: int) -> npt.NDArray[np.int64]:
    """Return `string_hash` modulo 2**32 of many ASCII texts of one length, at most `_CHUNK`."""
    table = np.frombuffer(joined, np.uint8).reshape(-1, length)
    # Floating point is several times as fast, and exact, because no sum comes near 2**53.
    return (table.astype(np.float64) @ _float_weights(length)).astype(np.int64)


def _pieces(joined: bytes, lengths: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for length in lengths:
        yield joined[at : at + length]
        at += length


def _joined_ascii(keys: Sequence[str] | Sequence[bytes]) -> bytes | None:
    """Return all keys joined, None if one of them is not ASCII."""
    if keys and isinstance(keys[0], bytes):
        data = b"".join(keys)  # type: ignore[arg-type]
        return data if data.isascii() else None
    text = "".join(keys)  # type: ignore[arg-type]
    return text.encode() if text.isascii() else None


@lru_cache(maxsize=256)
def _weights(length: int) -> npt.NDArray[np.uint32]:
    """Return 31**(length - 1), …, 31, 1 modulo 2**32."""
    powers = np.full(length, 31, np.uint32)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint32)[::-1].copy()


@lru_cache(maxsize=256)
def _float_weights(length: int) -> npt.NDArray[np.float64]:
    return _weights(length).astype(np.float64)


@lru_cache(maxsize=256)
def hash_map_order(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the order of ``names`` in a ``HashMap`` filled with them, as indices into ``names``.

    The map starts with 16 buckets. It doubles when it holds more than three quarters of their number, and, below 64
    buckets, when a bucket gets a ninth name. A name is in bucket ``(h ^ h >>> 16) & (capacity - 1)``. Names in one
    bucket keep their order of insertion. The latest results are cached.

    A larger map turns a bucket of nine names into a tree with another order. Only names made to collide reach that, and
    readers accept properties in any order, so the tree is not imitated.

    Raises:
        MessageIllegalError: A name occurs twice.
    """
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise MessageIllegalError(f"property {twice!r} occurs twice")
    codes = [string_hash(name) for name in names]
    codes = [code ^ ((code & _MASK) >> 16) for code in codes]
    capacity = 16
    while len(names) > capacity * 3 // 4:
        capacity *= 2
    # Each bucket of a larger map is part of one bucket of the smallest. If none there has nine names, none ever had.
    if capacity < 64 and len(names) > 8 and max(Counter(code & 15 for code in codes).values()) > 8:
        capacity = _capacity_of_crowded(codes)
    return tuple(sorted(range(len(names)), key=[code & (capacity - 1) for code in codes].__getitem__))


def _capacity_of_crowded(codes: Sequence[int]) -> int:
    """Return the number of buckets of a map filled with these hashes, many of them in one bucket."""
    capacity, counts = 16, Counter[int]()
    for number, code in enumerate(codes, 1):
        counts[code & (capacity - 1)] += 1
        is_crowded = counts[code & (capacity - 1)] > 8 and capacity < 64
        for grows in (is_crowded, number > capacity * 3 // 4):
            if grows:
                capacity *= 2
                counts = Counter(other & (capacity - 1) for other in codes[:number])
    return capacity


# ---- numbers

INT_MIN: Final = -(2**31)
INT_MAX: Final = 2**31 - 1
LONG_MIN: Final = -(2**63)
LONG_MAX: Final = 2**63 - 1

# The zeros of all runs of ten decimal digits in the basic multilingual plane. It is a table, not unicodedata, so that
# every version of Python, Arrow and Spark agrees on it. Java reads UTF-16 units, and has no digits beyond the plane.
_ZEROS: Final = (
    "\u0030\u0660\u06f0\u07c0\u0966\u09e6\u0a66\u0ae6\u0b66\u0be6\u0c66\u0ce6\u0d66\u0de6\u0e50\u0ed0\u0f20\u1040"
    "\u1090\u17e0\u1810\u1946\u19d0\u1a80\u1a90\u1b50\u1bb0\u1c40\u1c50\ua620\ua8d0\ua900\ua9d0\ua9f0\uaa50\uabf0"
    "\uff10"
)
DECIMAL_DIGITS: Final = "".join(f"{zero}-{chr(ord(zero) + 9)}" for zero in _ZEROS)
"""All of them, for a class of a regular expression."""

_INTEGER: Final = re.compile(rf"([+-]?)([{DECIMAL_DIGITS}]+)")
OTHER_DIGITS: Final = tuple("".join(chr(ord(zero) + value) for zero in _ZEROS[1:]) for value in range(10))
"""All decimal digits beyond ASCII with each value, from 0 to 9."""
_TO_ASCII: Final = {ord(zero) + value: str(value) for zero in _ZEROS for value in range(10)}

TRIMMED: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's ``trim`` removes."""
_DECIMAL: Final = re.compile(r"[+-]?(?:NaN|Infinity|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEXADECIMAL: Final = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")


def java_int(text: str) -> int | None:
    """Return ``Integer.parseInt(text)``, None if Java throws NumberFormatException."""
    if len(text) < 10 and text.isascii() and text.isdigit():  # most texts need no further look
        return int(text)
    return _parse_integer(text, INT_MIN, INT_MAX)


def java_long(text: str) -> int | None:
    """Return ``Long.parseLong(text)``, None if Java throws NumberFormatException."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, LONG_MIN, LONG_MAX)


def _parse_integer(text: str, smallest: int, largest: int) -> int | None:
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    significant = digits.translate(_TO_ASCII).lstrip("0")
    if len(significant) > 19:  # 64 bits have no more digits, and int() refuses more than 4,300
        return None
    value = int(sign + (significant or "0"))
    return value if smallest <= value <= largest else None


def parse_double(text: str) -> float | None:
    """Return ``Double.valueOf(text)``, None if Java throws NumberFormatException."""
    text = text.strip(TRIMMED)
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        return float(text.rstrip("fFdD") if match.group(1) else text)
    match = _HEXADECIMAL.fullmatch(text)
    if match is None:
        return None
    try:
        return float.fromhex(match.group(1))
    except OverflowError:
        return float("-inf") if text.startswith("-") else float("inf")
