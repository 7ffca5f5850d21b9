"""A reader of headers that differ from an earlier one in a few values only, in half the time of `read_json`.

The sends of one client differ in topic, queue, born time, properties and the number of the request, its pulls in topic,
queue, offsets, version and number. `KnownHeaders` parses such a header once, keeps a regular expression of it, and
takes only the differing values from the headers that follow.
"""

from __future__ import annotations

import json.decoder
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from librmq.errors import MalformedError
from librmq.wire.remoting._frames import HALF_PAIR, Frame, read_json

NUMBER: Final = r"\d{1,18}"
PLAIN_TEXT: Final = r'[^"\\\x00-\x1f]*'
TEXT: Final = r'[^"]*'

_string: Final[Callable[[str, int], tuple[str, int]]] = json.decoder.scanstring  # type: ignore[attr-defined]
_OPAQUE: Final = r"[1-9]\d{0,8}"
_MAX_SHAPES: Final = 16
_MAX_CONSTANT_LENGTH: Final = 1024


class HeaderPattern(NamedTuple):
    """One kind of request: which fields differ between its headers, and how a request is made from their values."""

    code: int
    values: Mapping[str, str]
    """The differing fields, each as `NUMBER` or `PLAIN_TEXT` (no escapes); the last field can be a `TEXT`."""
    parse: Callable[[Frame], Any]
    """``parse(frame)`` returns the request of a frame, None for a frame that needs the complete reader."""
    fill: Callable[..., Any]
    """``fill(like, body, *values)`` returns the request of a frame; ``like`` is a request with other values."""


@dataclass(slots=True)
class KnownFrame(Frame):
    """A frame whose request is parsed already, so it has no fields."""

    parsed: Any = None
    """What `HeaderPattern.fill` returned."""


class _Shape(NamedTuple):
    """The constant part of some headers, and the places of the values that differ."""

    match: Callable[[str], re.Match[str] | None]
    pattern: HeaderPattern
    names: tuple[str, ...]
    """The names of the groups that ``match`` has: the differing fields, then ``opaque``, the request's number."""
    text: str | None
    """The name of the group that is a `TEXT`, None without one."""
    parsed: Any
    """A request of this shape, from which `HeaderPattern.fill` makes the others."""
    flag: int
    remark: str | None
    language: str
    version: int


class KnownHeaders:
    """Reads the headers of one connection. Not thread-safe."""

    def __init__(self, patterns: Iterable[HeaderPattern]) -> None:
        self._patterns = {f'"code":{pattern.code},': pattern for pattern in patterns}
        self._shapes: list[_Shape] = []  # the last used shape is tried first
        self._misses = 0

    def read(self, header: bytes, body: bytes) -> KnownFrame | None:
        """Return the frame of a JSON header, None if `read_json` has to read it."""
        try:
            text = header.decode()
        except ValueError:
            return None
        for shape in self._shapes:
            match = shape.match(text)
            if match is not None:
                break
        else:
            self._learn(text)
            return None
        if shape is not self._shapes[0]:
            self._shapes.remove(shape)
            self._shapes.insert(0, shape)
        _, pattern, names, text_name, like, flag, remark, language, version = shape
        *values, opaque = match.group(*names)
        if text_name is not None:
            try:
                values[-1], end = _string(text, match.start(text_name))
            except ValueError:
                return None
            # The pattern can stop at an escaped quote, within the value.
            if end != match.end(text_name) + 1 or (not values[-1].isascii() and HALF_PAIR.search(values[-1])):
                return None
        parsed = pattern.fill(like, body, *values)
        return KnownFrame(pattern.code, {}, body, int(opaque), remark, flag, language, version, False, parsed)

    def _learn(self, text: str) -> None:
        """Keep the shape of a header that has one of the patterns."""
        pattern = next((pattern for mark, pattern in self._patterns.items() if mark in text), None)
        if pattern is None or len(self._shapes) >= _MAX_SHAPES:
            return
        self._misses += 1
        # Try again only after 1, 2, 4, 8 … misses: an attempt takes as long as reading a hundred headers, so a client
        # whose headers have no constant part must not pay for one each time.
        if self._misses & (self._misses - 1):
            return
        shape = _shape_of(text, pattern)
        if shape is not None:
            self._shapes.insert(0, shape)
            self._misses = 0


def _shape_of(text: str, pattern: HeaderPattern) -> _Shape | None:
    """Return the shape of a header, None if the differing values have no certain places in it.

    The complete reader decides: it reads two headers with other values in these places. Unless exactly the named fields
    change with them, a text within another value could be taken for a field.
    """
    marks = {**{name: f'"{name}":"' for name in pattern.values}, "opaque": '"opaque":'}
    order = sorted(marks, key=lambda name: text.find(marks[name]))
    constants, at = [], 0
    for name in order:
        begin = text.find(marks[name], at) + len(marks[name])
        constants.append(text[at:begin])
        value = re.compile(pattern.values.get(name, _OPAQUE)).match(text, begin)
        if begin < at + len(marks[name]) or value is None:
            return None
        at = value.end()
    constants.append(text[at:])
    if sum(map(len, constants)) > _MAX_CONSTANT_LENGTH:
        return None
    for first in (13, 23):
        values = {name: str(first + number) for number, name in enumerate(order)}
        like = "".join(map("".join, zip(constants, [*values.values(), ""], strict=True)))
        try:
            frame = read_json(like.encode(), b"")
            parsed = pattern.parse(frame)
        except MalformedError:
            return None
        fields = {**frame.fields, "opaque": str(frame.opaque)}
        if parsed is None or frame.code != pattern.code or frame.is_answer or fields != {**fields, **values}:
            return None
    groups = [f"(?P<{name}>{pattern.values.get(name, _OPAQUE)})" for name in order]
    match = re.compile(
        "".join(map("".join, zip(map(re.escape, constants), [*groups, ""], strict=True))), re.ASCII
    ).fullmatch
    return _Shape(
        match,
        pattern,
        tuple(marks),
        next((name for name, value in pattern.values.items() if value == TEXT), None),
        parsed,
        frame.flag,
        frame.remark,
        frame.language,
        frame.version,
    )
