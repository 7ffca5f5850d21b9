"""Converts headers to the fields of a frame and back, by functions made from their attributes' names and types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from json.encoder import encode_basestring
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

from librmq.errors import MalformedError

H = TypeVar("H")


class _Form(NamedTuple):
    """A header's fields, compiled: a broker spends most of its time here and in the log."""

    read: Callable[[Mapping[str, str]], Any]
    """Returns the header; raises KeyError with the name of a missing field."""
    write: Callable[[Any], dict[str, str]]
    text: Callable[[Any], str]
    """Returns the fields as members of a JSON object, each after a comma."""


SMALL_NUMBERS: Final = {str(number): number for number in range(1024)}
"""Numbers by their texts; a look-up is faster than a check."""
_forms: Final[dict[tuple[type[Any], bool], _Form]] = {}


def _form_of(header: type[Any], by_letters: bool) -> _Form:
    """Return the compiled fields of a header, in the order of its attributes."""
    names: Mapping[str, str] = getattr(header, "NAMES", {})
    hints = get_type_hints(header)
    readers, plain, optional, texts, optional_texts = [], [], [], [], []
    namespace: dict[str, Any] = {"_Header": header, "_whole": _whole, "_truth": _truth, "_quoted": encode_basestring}
    namespace["_small"] = SMALL_NUMBERS
    for number, attribute in enumerate(fields(header)):
        first, *others = attribute.name.split("_")
        title = names.get(attribute.name) or first + "".join(map(str.capitalize, others))
        name = repr("abcdefghijklm"[number] if by_letters else title)
        hint = hints[attribute.name]
        kind = next((kind for kind in get_args(hint) if kind is not type(None)), hint)
        read, text = _READERS[kind], f"get({name})" if attribute.default is not MISSING else f"found[{name}]"
        namespace[f"_{number}"] = attribute.default
        value = _value(read, "text", name)
        if attribute.default is not MISSING:
            readers.append(f"_{number} if (text := {text}) is None else {value}")
        else:
            readers.append(_value(read, text, name))
        string = _WRITTEN[kind].format(f"header.{attribute.name}")
        member = f",{json.dumps(name[1:-1])}:{_MEMBERS[kind].format(f'header.{attribute.name}')}"
        if hint is kind:
            plain.append(f"{name}: {string}")
            texts.append(member)
        else:
            optional.append(f"    if header.{attribute.name} is not None:\n        written[{name}] = {string}\n")
            optional_texts.append(f"    if header.{attribute.name} is not None:\n        text += f'''{member}'''\n")
    source = (
        f"def read(found):\n    get = found.get\n    return _Header({', '.join(readers)})\n"
        f"def write(header):\n    written = {{{', '.join(plain)}}}\n{''.join(optional)}    return written\n"
        f"def text(header):\n    text = f'''{''.join(texts)}'''\n{''.join(optional_texts)}    return text\n"
    )
    exec(compile(source, f"<fields of {header.__name__}>", "exec"), namespace)
    form = _forms[header, by_letters] = _Form(namespace["read"], namespace["write"], namespace["text"])
    return form


def _value(read: str | None, text: str, name: str) -> str:
    """Return the expression for the value of a field. Small numbers are looked up, since most are small."""
    if read is None:
        return text
    value = f"{read}({text}, {name})"
    return f"_small[{text}] if {text} in _small else {value}" if read == "_whole" else value


def to_fields(header: object, *, by_letters: bool = False) -> dict[str, str]:
    """Return a header's fields, except those that are None."""
    kind = type(header)
    return (_forms.get((kind, by_letters)) or _form_of(kind, by_letters)).write(header)


def to_text(header: object) -> str:
    """Return a header's fields, except those that are None, as members of a JSON object, each after a comma."""
    kind = type(header)
    return (_forms.get((kind, False)) or _form_of(kind, False)).text(header)


def from_fields(header: type[H], texts: Mapping[str, str], *, by_letters: bool = False) -> H:
    """Return the header that fields describe; unknown fields are ignored.

    Raises:
        MalformedError: A required field is missing, or a field has the wrong type.
    """
    form = _forms.get((header, by_letters)) or _form_of(header, by_letters)
    try:
        converted: H = form.read(texts)
    except KeyError as error:
        raise MalformedError(f"the field {error.args[0]} is missing") from None
    return converted


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


_READERS: Final[Mapping[type[Any], str | None]] = {int: "_whole", bool: "_truth", str: None}
"""The names of the functions that convert a string."""
_WRITTEN: Final[Mapping[type[Any], str]] = {int: "str({})", bool: "'true' if {} else 'false'", str: "{}"}
_MEMBERS: Final[Mapping[type[Any], str]] = {
    int: '"{{{}}}"',
    bool: """"{{'true' if {} else 'false'}}\"""",
    str: "{{_quoted({})}}",
}
