r"""The JSON of the broker's config files, written byte for byte as the broker does.

Mirrors fastjson's pretty format of a ``ConfigManager``. It differs from JSON in the keys of maps, which are written
like values: a number without quotes, an object as an object::

    {                                       {
    \t"offsetTable":{                       \t"offsetTable":{{
    \t\t"Topic@group":{0:21,1:20            \t\t\t"brokerName":"broker-a",
    \t\t}                                   \t\t\t"queueId":0,
    \t}                                     \t\t\t"topic":"Topic"
    }                                       \t\t}:4
                                            \t}
                                            }

A text key begins a new line, other keys do not. The brace that closes a non-empty object has a line of its own. A list
of numbers is one line; other lists have a line for each element. The order of keys is kept.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, count, islice, repeat
from operator import contains
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

from librmq.errors import MalformedError
from librmq.runtime import lazy_numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_DEPTH: Final = 64

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# A table of progress is an object of objects of whole numbers, and can have a million of either.
_PAIR: Final = r"-?(?:0|[1-9][0-9]{0,17}+):-?(?:0|[1-9][0-9]{0,17}+)"
_NUMBERS: Final = re.compile(rf"\{{{_PAIR}(?:,{_PAIR})*+[ \t\r\n]*+\}}")
_PART: Final = r'[^"@\\\x00-\x1f\ud800-\udfff]++'
_ROW: Final = rf"""\s*+"{_PART}@{_PART}"\s*+:\s*+\{{{_PAIR}(?:,{_PAIR})*+\s*+\}}\s*+(?:,|(?=\}}))"""
_ROWS: Final = re.compile(rf"(?:{_ROW}){{1,1024}}+".replace(r"\s", r"[ \t\r\n]"))
_TO_SPACES: Final = bytes.maketrans(b":{},", b"    ")
_OTHERWISE: Final = re.compile(r"[0-9]{19}|\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Numbers that can have more than 64 bits, and halves of surrogate pairs: JSON in C takes both."""
_LITERALS: Final = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_string_at: Final = json.JSONDecoder().raw_decode

_ESCAPED: Final = re.compile('[\x00-\x1f"\\\\\x7f-\x9f\u2028\u2029]')
_ESCAPES: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


class ObjectKey(tuple[tuple[str, Any], ...]):
    """An object in the place of a key, as pairs of names and scalar values.

    ``dict(key)`` is the object, ``ObjectKey(fields.items())`` the key.
    """

    __slots__ = ()


class NumberColumns(NamedTuple):
    """Objects of whole numbers by names of two parts, as columns."""

    names: tuple[list[str], list[str]]
    """The distinct first and second parts of the names."""
    parts: tuple[NDArray[Any], NDArray[Any]]
    """The places of each object's parts in ``names``."""
    widths: NDArray[Any]
    """The number of pairs of each object."""
    keys: NDArray[Any]
    """The keys of all pairs."""
    values: NDArray[Any]
    """The values of all pairs."""
    row_names: Sequence[str] = ()
    """The names of all objects, if `of` has read them."""

    @classmethod
    def of(cls, rows: Mapping[str, dict[int, int]], earlier: Self | None = None) -> Self:
        """Return the columns of objects with names such as ``topic@group``; those with other names are left out.

        Other threads may change the objects meanwhile, but not ``rows``. The columns of an ``earlier`` call make it
        quicker while the names are the same.
        """
        row_names = list(rows)
        if earlier is not None and earlier.row_names == row_names:
            names, parts = earlier.names, earlier.parts
        else:
            firsts, seconds = defaultdict[str, int](count().__next__), defaultdict[str, int](count().__next__)
            words = "@".join(rows).split("@") if rows else []
            if len(words) != 2 * len(rows) or "" in words or not all(map(contains, rows, repeat("@"))):
                rows = {name: row for name, row in rows.items() if name.count("@") == 1 and name[0] != "@" != name[-1]}
                return cls.of(rows)
            first, second = (
                np.fromiter(map(places.__getitem__, words[at::2]), np.int64, len(rows))
                for at, places in enumerate((firsts, seconds))
            )
            names, parts = (list(firsts), list(seconds)), (first, second)
        while True:
            widths = np.fromiter(map(len, rows.values()), np.int64, len(rows))
            with suppress(RuntimeError):  # an object has got another key meanwhile
                pairs = chain.from_iterable(map(dict.items, rows.values()))
                numbers = np.fromiter(chain.from_iterable(pairs), np.int64)
                if 2 * widths.sum() == len(numbers):
                    keys, values = numbers[::2].copy(), numbers[1::2].copy()
                    return cls(names, parts, widths, keys, values, row_names)

    def named(self, at: int, names: Collection[str]) -> Self:
        """Return the objects whose first (0) or second (1) part of the name is one of these."""
        places = [place for place, name in enumerate(self.names[at]) if name in names]
        return self if len(places) == len(self.names[at]) else self.chosen(np.isin(self.parts[at], places))

    def chosen(self, is_chosen: NDArray[Any]) -> Self:
        """Return some of the objects."""
        pairs = np.repeat(is_chosen, self.widths)
        parts = self.parts[0][is_chosen], self.parts[1][is_chosen]
        return type(self)(self.names, parts, self.widths[is_chosen], self.keys[pairs], self.values[pairs])

    def rows(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return the objects by the parts of their names; of equal names the last one counts."""
        pairs = zip(self.keys.tolist(), self.values.tolist(), strict=True)
        objects = zip(*(part.tolist() for part in self.parts), self.widths.tolist(), strict=True)
        return {
            (self.names[0][first], self.names[1][second]): dict(islice(pairs, width))
            for first, second, width in objects
        }


class NumberRows:
    """The text of objects of whole numbers with names such as ``topic@group``, read when they are asked for."""

    def __init__(self, blocks: list[str]) -> None:
        self._blocks = blocks  # each has some rows, which are well-formed

    def pairs(self) -> int:
        """Return the number of pairs of all objects, at most, as their colons tell."""
        return sum(block.count(":") for block in self._blocks)

    def get(self, name: str) -> dict[int, int] | None:
        """Return the last object with a name, without reading the others; None without one."""
        quoted = f'"{name}"'
        for block in reversed(self._blocks):
            if (at := block.rfind(quoted)) >= 0:
                at += len(quoted)
                return _numbers_of(block[at : block.index("}", at) + 1])[0]
        return None

    def as_dict(self) -> dict[str, dict[int, int]]:
        """Return the objects by their names."""
        result: dict[str, dict[int, int]] = {}
        for block in self._blocks:
            parts = block.split('"')  # a space, a name, its numbers, the next name …
            result.update(zip(parts[1::2], _numbers_of("".join(parts[2::2])), strict=True))
        return result

    def columns(self) -> NumberColumns:
        """Return the objects as columns, without an object each; several can have one name."""
        firsts, seconds = defaultdict[str, int](count().__next__), defaultdict[str, int](count().__next__)
        columns: list[tuple[NDArray[Any], ...]] = []
        for block in self._blocks:
            parts = block.replace("@", '"').split('"')  # a space, the parts of a name, its numbers, the next name …
            rows = len(parts) // 3
            text = "".join(parts[3::3]).encode()
            numbers = np.fromstring(text.translate(_TO_SPACES), np.int64, sep=" ")
            characters = np.frombuffer(text, np.uint8)
            is_colon, begins = characters == ord(":"), np.flatnonzero(characters == ord("{"))
            counts = np.add.reduceat(is_colon, begins, dtype=np.int64)  # with the colon before the next object
            counts[:-1] -= 1
            columns.append(
                (
                    np.fromiter(map(firsts.__getitem__, parts[1::3]), np.int64, rows),
                    np.fromiter(map(seconds.__getitem__, parts[2::3]), np.int64, rows),
                    counts,
                    numbers[::2],
                    numbers[1::2],
                )
            )
        first, second, widths, keys, values = map(np.concatenate, zip(*columns, strict=True))
        return NumberColumns((list(firsts), list(seconds)), (first, second), widths, keys, values)


def loads(text: str | bytes, *, rows_of: str | None = None) -> Any:  # noqa: ANN401 (JSON has any shape)
    """Parse a config file into dicts, lists, texts, ints, floats, booleans and None.

    Keys are texts, ints for numbers, and `ObjectKey`; of equal keys the last one counts. Objects can be nested 64 deep.

    Args:
        text: The file's content.
        rows_of: A name in the file's object, whose value becomes `NumberRows` if it has such objects alone.

    Raises:
        MalformedError: The text has another form; the error names line and column.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"byte {error.start} is not UTF-8") from None
    # Most files are plain JSON, which the parser in C reads at once. It stops early in a table of progress, whose keys
    # are numbers. So the text is searched for what it takes for something else only after it has read all of it.
    with suppress(ValueError, RecursionError):
        value = _decode(text)
        if not _is_too_deep(value) and _OTHERWISE.search(text) is None:
            return value
    return _Reader(text, rows_of).document()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_decode: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse).decode


def _is_too_deep(value: object) -> bool:
    """Return whether objects and lists are nested deeper than `loads` allows."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


class _Reader:
    """A recursive descent over one text; ``_at`` is the next character."""

    def __init__(self, text: str, rows_of: str | None) -> None:
        self._text = text
        self._rows_of = rows_of
        self._at = 0

    def document(self) -> Any:  # noqa: ANN401 (JSON has any shape)
        self._skip_space()
        value = self._value(0)
        self._skip_space()
        if self._at < len(self._text):
            self._fail("the end")
        return value

    def _value(self, depth: int) -> Any:  # noqa: ANN401 (JSON has any shape)
        character = self._text[self._at : self._at + 1]
        if character == "{":
            return self._object(depth)
        if character == "[":
            return self._list(depth)
        if character == '"':
            return self._string()
        if character in _LITERALS:
            word, value = _LITERALS[character]
            if self._text.startswith(word, self._at):
                self._at += len(word)
                return value
        return self._number()

    def _object(self, depth: int, *, as_rows: bool = False) -> Any:  # noqa: ANN401 (a dict, or `NumberRows`)
        numbers = _NUMBERS.match(self._text, self._at) if depth < _MAX_DEPTH else None
        if numbers is not None:
            self._at = numbers.end()
            return _numbers_of(numbers[0])[0]
        blocks = self._blocks() if depth < _MAX_DEPTH - 1 else []
        rows = NumberRows(blocks)
        if blocks and blocks[-1][-1] != ",":
            self._at += 1  # skips the closing bracket
            return rows if as_rows else rows.as_dict()
        result: dict[Any, Any] = rows.as_dict()

        def entry() -> None:
            key = self._key(depth + 1)
            self._skip_space()
            if not self._text.startswith(":", self._at):
                self._fail("':'")
            self._at += 1
            self._skip_space()
            as_rows = depth == 0 and key == self._rows_of and self._text.startswith("{", self._at)
            result[key] = self._object(depth + 1, as_rows=True) if as_rows else self._value(depth + 1)

        self._elements("}", depth, entry, goes_on=bool(result))
        return result

    def _blocks(self) -> list[str]:
        """Step over the first elements of an object, if they are objects of whole numbers; return their text."""
        blocks: list[str] = []
        at = self._at + 1
        while (rows := _ROWS.match(self._text, at)) is not None:
            blocks.append(rows[0])
            self._at = at = rows.end()
        return blocks

    def _list(self, depth: int) -> list[Any]:
        result: list[Any] = []
        self._elements("]", depth, lambda: result.append(self._value(depth + 1)))
        return result

    def _elements(self, close: str, depth: int, element: Callable[[], None], *, goes_on: bool = False) -> None:
        """Read elements up to the closing bracket, and step behind it; ``goes_on`` means that some were read."""
        if depth >= _MAX_DEPTH:
            self._fail(f"less than {_MAX_DEPTH} levels")
        self._at += not goes_on
        self._skip_space()
        if not goes_on and self._text.startswith(close, self._at):
            self._at += 1
            return
        while True:
            element()
            self._skip_space()
            character = self._text[self._at : self._at + 1]
            if character != "," and character != close:
                self._fail(f"',' or {close!r}")
            self._at += 1
            if character == close:
                return
            self._skip_space()

    def _key(self, depth: int) -> str | int | ObjectKey:
        begin = self._at
        character = self._text[begin : begin + 1]
        if character == '"':
            return self._string()
        if character == "{":
            fields = self._object(depth)
            if all(isinstance(name, str) and not isinstance(value, dict | list) for name, value in fields.items()):
                return ObjectKey(fields.items())
            self._at = begin
            self._fail("an object of plain values as a key")
        number = self._number("a key")
        if isinstance(number, float):
            self._at = begin
            self._fail("a whole number as a key")
        return number

    def _string(self) -> str:
        begin = self._at
        try:
            value, self._at = _string_at(self._text, begin)
            assert isinstance(value, str)
            value.encode()
        except json.JSONDecodeError as error:
            self._at = error.pos
            self._fail("text", actual=error.msg.lower().removesuffix(" at"))
        except UnicodeEncodeError:
            self._at = begin
            self._fail("text", actual="half a surrogate pair in it")
        return value

    def _number(self, expected: str = "a value") -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._fail(expected)
        is_float = match[1] or match[2]
        number = float(match[0]) if is_float or len(match[0]) > 20 else int(match[0])
        if not (math.isfinite(number) if is_float else -(1 << 63) <= number < 1 << 63):
            self._fail("a number of 64 bits")
        self._at = match.end()
        return number

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _fail(self, expected: str, actual: str | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        if actual is None:
            actual = repr(self._text[self._at : self._at + 20]) if self._at < len(self._text) else "the end"
        raise MalformedError(f"line {line}, column {column}: expected {expected}, found {actual}")


def _numbers_of(text: str) -> list[dict[int, int]]:
    """Return the objects of whole numbers in a text, which can have colons before and commas between them."""
    lists = "".join(text.split()).replace(":{", "[").replace("{", "[").replace("}", "]").replace(":", ",")
    return [
        {row[0]: row[1]} if len(row) == 2 else dict(zip(row[::2], row[1::2], strict=True))
        for row in json.loads(f"[{lists.rstrip(',')}]")
    ]


def dumps(value: object) -> str:
    """Return ``value`` as the broker would write it, without a new line at the end.

    Raises:
        MalformedError: The file format has no form for the value.
    """
    parts: list[str] = []
    _write(value, 0, parts)
    return "".join(parts)


class Written(str):
    """A value written by `written`, which `dumps` copies."""

    __slots__ = ()


def written(value: object, depth: int) -> Written:
    """Return the text of ``value`` at a depth of ``depth`` objects, for callers that write it repeatedly."""
    parts: list[str] = []
    _write(value, depth, parts)
    return Written("".join(parts))


def _write(value: object, depth: int, parts: list[str]) -> None:
    if type(value) is Written:
        parts.append(value)
    elif isinstance(value, str):
        parts.append(_quoted(value))
    elif value is None or isinstance(value, bool):
        parts.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        parts.append(repr(value))
    elif depth >= _MAX_DEPTH:
        raise MalformedError(f"expected objects nested at most {_MAX_DEPTH} deep")
    elif isinstance(value, Mapping):
        _write_object(value, depth, parts)
    elif isinstance(value, list | tuple):
        _write_list(value, depth, parts)
    else:
        raise MalformedError(f"expected a value of JSON, found {value!r:.80}")


def _write_object(value: Mapping[Any, Any], depth: int, parts: list[str]) -> None:
    begin = "\n" + "\t" * (depth + 1)
    comma = ""
    parts.append("{")
    for key, element in value.items():
        parts.append(comma)
        comma = ","
        if isinstance(key, str):
            parts += (begin, _quoted(key))
        elif isinstance(key, ObjectKey):
            _write(dict(key), depth + 1, parts)
        elif isinstance(key, int) and not isinstance(key, bool):
            parts.append(repr(key))
        else:
            raise MalformedError(f"expected text, a number or an ObjectKey as a key, found {key!r:.80}")
        parts.append(":")
        kind = type(element)  # an exact comparison of types is faster than `isinstance` for the usual values
        if kind is int:
            parts.append(repr(element))
        elif kind is str:
            parts.append(_quoted(element))
        else:
            _write(element, depth + 1, parts)
    parts.append(begin[:-1] + "}" if value else "}")


def _write_list(value: list[Any] | tuple[Any, ...], depth: int, parts: list[str]) -> None:
    in_one_line = all(isinstance(element, int | float) for element in value)
    begin = "" if in_one_line else "\n" + "\t" * (depth + 1)
    comma = ""
    parts.append("[")
    for element in value:
        parts += (comma, begin)
        comma = ","
        _write(element, depth + 1, parts)
    parts.append(begin[:-1] + "]")


@lru_cache(maxsize=1024)  # the same names come in each row of a table
def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04X}"
