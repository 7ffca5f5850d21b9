"""Converts headers to the fields of a frame and back, by the names and types of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

from librmq.errors import MalformedError

__all__ = ["from_fields", "to_fields"]

H = TypeVar("H")


class _Field(NamedTuple):
    name: str
    attribute: str
    read: Callable[[str, str], Any] | None
    """Converts a string and the field's name to a value; None for a string."""
    default: Any
    """`MISSING` if the field is required."""


_forms: Final[dict[tuple[type[Any], bool], tuple[_Field, ...]]] = {}


def _form_of(header: type[Any], by_letters: bool) -> tuple[_Field, ...]:
    """Return the fields of a header, in order."""
    known = _forms.get((header, by_letters))
    if known is not None:
        return known
    names: Mapping[str, str] = getattr(header, "NAMES", {})
    hints = get_type_hints(header)
    form = []
    for number, one in enumerate(fields(header)):
        first, *others = one.name.split("_")
        name = names.get(one.name) or first + "".join(map(str.capitalize, others))
        hint = hints[one.name]
        kind = next((kind for kind in get_args(hint) if kind is not type(None)), hint)
        form.append(_Field("abcdefghijklm"[number] if by_letters else name, one.name, _READERS[kind], one.default))
    _forms[header, by_letters] = tuple(form)
    return _forms[header, by_letters]


def to_fields(header: object, *, by_letters: bool = False) -> dict[str, str]:
    """Return a header's fields, except those that are None."""
    return {
        one.name: str(found).lower() if found is True or found is False else str(found)
        for one in _form_of(type(header), by_letters)
        if (found := getattr(header, one.attribute)) is not None
    }


def from_fields(header: type[H], found: Mapping[str, str], *, by_letters: bool = False) -> H:
    """Return the header that fields describe; unknown fields are ignored.

    Raises:
        MalformedError: a required field is missing, or a field has the wrong type.
    """
    values: list[Any] = []
    for name, _, read, default in _form_of(header, by_letters):
        text = found.get(name)
        if text is None:
            if default is MISSING:
                raise MalformedError(f"the field {name} is missing")
            values.append(default)
        else:
            values.append(text if read is None else read(text, name))
    return header(*values)


def _whole(text: str, name: str) -> int:
    if len(text) <= 20:
        try:
            number = int(text)
        except ValueError:
            pass
        else:
            if -(1 << 63) <= number < 1 << 63:
                return number
    raise MalformedError(f"the field {name} is {text[:40]!r}: expected a whole number")


def _truth(text: str, _: str) -> bool:
    """Return the truth value of a string: the C++ client sends 1 and 0, and Java takes everything but true as false."""
    return text.lower() in ("true", "1")


_READERS: Final[Mapping[type[Any], Callable[[str, str], Any] | None]] = {int: _whole, bool: _truth, str: None}
