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
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

from librmq.errors import MalformedError

_MAX_DEPTH: Final = 64

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# A table of progress is an object of objects of whole numbers, and can have a million of either.
_PAIR: Final = r"-?(?:0|[1-9][0-9]{0,17}):-?(?:0|[1-9][0-9]{0,17})"
_NUMBERS: Final = re.compile(rf"\{{{_PAIR}(?:,{_PAIR})*[ \t\r\n]*\}}")
_ROW: Final = rf"""\s*"[^"\\\x00-\x1f\ud800-\udfff]*"\s*:\s*\{{{_PAIR}(?:,{_PAIR})*\s*\}}\s*,"""
_ROWS: Final = re.compile(rf"(?:{_ROW}){{1,1024}}+".replace(r"\s", r"[ \t\r\n]"))
_LITERALS: Final = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_string_at: Final = json.JSONDecoder().raw_decode

_ESCAPED: Final = re.compile('[\x00-\x1f"\\\\\x7f-\x9f\u2028\u2029]')
_ESCAPES: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


class ObjectKey(tuple[tuple[str, Any], ...]):
    """An object in the place of a key, as pairs of names and scalar values.

    ``dict(key)`` is the object, ``ObjectKey(fields.items())`` the key.
    """

    __slots__ = ()


def loads(text: str | bytes) -> Any:  # noqa: ANN401 (JSON has any shape)
    """Parse a config file into dicts, lists, texts, ints, floats, booleans and None.

    Keys are texts, ints for numbers, and `ObjectKey`; of equal keys the last one counts. Objects can be nested 64 deep.

    Raises:
        MalformedError: The text has another form; the error names line and column.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"byte {error.start} is not UTF-8") from None
    return _Reader(text).document()


class _Reader:
    """A recursive descent over one text; ``_at`` is the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
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

    def _object(self, depth: int) -> dict[Any, Any]:
        numbers = _NUMBERS.match(self._text, self._at) if depth < _MAX_DEPTH else None
        if numbers is not None:
            self._at = numbers.end()
            return _numbers_of(numbers[0])[0]
        result: dict[Any, Any] = self._rows() if depth < _MAX_DEPTH - 1 else {}

        def entry() -> None:
            key = self._key(depth + 1)
            self._skip_space()
            if not self._text.startswith(":", self._at):
                self._fail("':'")
            self._at += 1
            self._skip_space()
            result[key] = self._value(depth + 1)

        self._elements("}", depth, entry, goes_on=bool(result))
        return result

    def _rows(self) -> dict[Any, Any]:
        """Read the first elements of an object, if they are objects of whole numbers, up to the comma behind them."""
        result: dict[Any, Any] = {}
        at = self._at + 1
        while (rows := _ROWS.match(self._text, at)) is not None:
            parts = rows[0].split('"')  # a space, a name, its numbers, the next name …
            result.update(zip(parts[1::2], _numbers_of("".join(parts[2::2])), strict=True))
            self._at = at = rows.end()
        return result

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
        kind = type(element)  # fast path for the usual values
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


@lru_cache(maxsize=1024)  # names repeat
def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04X}"
