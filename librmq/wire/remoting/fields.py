"""Headers to fields of a frame, and back, by the names and types of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

from librmq.errors import MalformedError

__all__ = ["from_fields", "to_fields"]

H = TypeVar("H")


class _Field(NamedTuple):
    attribute: str
    name: str
    kind: type[Any]
    """int, bool or str."""
    is_optional: bool


_forms: Final[dict[tuple[type[Any], bool], tuple[_Field, ...]]] = {}


def _form_of(header: type[Any], by_letters: bool) -> tuple[_Field, ...]:
    """Return the fields of a header, in their order."""
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
        form.append(_Field(one.name, "abcdefghijklm"[number] if by_letters else name, kind, one.default is not MISSING))
    _forms[header, by_letters] = tuple(form)
    return _forms[header, by_letters]


def to_fields(header: object, *, by_letters: bool = False) -> dict[str, str]:
    """Return a header's fields, without those that are None."""
    return {
        one.name: str(found).lower() if one.kind is bool else str(found)
        for one in _form_of(type(header), by_letters)
        if (found := getattr(header, one.attribute)) is not None
    }


def from_fields(header: type[H], found: Mapping[str, str], *, by_letters: bool = False) -> H:
    """Return the header that fields describe; fields of other names are passed over.

    Raises:
        MalformedError: a field that must be there is not, or one has another type.
    """
    values: dict[str, Any] = {}
    for one in _form_of(header, by_letters):
        text = found.get(one.name)
        if text is not None:
            values[one.attribute] = _READERS[one.kind](text, one.name)
        elif not one.is_optional:
            raise MalformedError(f"the field {one.name} is missing")
    return header(**values)


def _whole(text: str, name: str) -> int:
    if len(text) <= 20 and text.isascii():
        try:
            number = int(text)
        except ValueError:
            pass
        else:
            if -(1 << 63) <= number < 1 << 63:
                return number
    raise MalformedError(f"the field {name} is {text[:40]!r}: expected a whole number")


def _truth(text: str, _: str) -> bool:
    """Return the truth value of a text: the C++ client sends 1 and 0, Java takes all but true as false."""
    return text.lower() in ("true", "1")


_READERS: Final[Mapping[type[Any], Callable[[str, str], Any]]] = {int: _whole, bool: _truth, str: lambda text, _: text}
