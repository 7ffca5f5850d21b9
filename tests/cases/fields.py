"""The fields of a row of input, checked.

A field that is null counts as absent. Functions that read a field raise `InputError` if it is missing, of a wrong kind
or out of range. `message` and `check_separators` raise `MessageIllegalError` for properties that no record can hold.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from librmq.cli._rows import Row
from librmq.errors import InputError, MalformedError, MessageIllegalError
from librmq.message.ids import Host, parse_host
from librmq.message.message import Message
from librmq.message.properties import PropertyName, decode_properties

Fields = Mapping[str, Any]

_INT32: Final = 1 << 31
_INT64: Final = 1 << 63


def whole(row: Fields, name: str, minimum: int, maximum: int, default: int | None = None) -> int:
    """Return a whole number from ``minimum`` to ``maximum``."""
    value = row.get(name)
    if value is None:
        if default is None:
            raise InputError(f"{name} is missing")
        return default
    if type(value) is not int or not minimum <= value <= maximum:
        raise InputError(f"{name}: expected a whole number from {minimum} to {maximum}, found {value!r:.80}")
    return value


def int32(row: Fields, name: str, default: int | None = None) -> int:
    """Return a whole number of 32 bits."""
    return whole(row, name, -_INT32, _INT32 - 1, default)


def int64(row: Fields, name: str, default: int | None = None) -> int:
    """Return a whole number of 64 bits."""
    return whole(row, name, -_INT64, _INT64 - 1, default)


def count(row: Fields, name: str) -> int:
    """Return a whole number of 32 bits that is not negative."""
    return whole(row, name, 0, _INT32 - 1)


def text(row: Fields, name: str) -> str:
    """Return a text that UTF-8 can encode."""
    value = optional_text(row, name)
    if value is None:
        raise InputError(f"{name} is missing")
    return value


def optional_text(row: Fields, name: str) -> str | None:
    """Return a text that UTF-8 can encode, None if the field is absent."""
    value = row.get(name)
    return None if value is None else _checked_text(name, value)


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}: expected text, found {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name}: half of a surrogate pair is not a character") from None
    return value


def truth(row: Fields, name: str) -> bool:
    """Return true or false; false if the field is absent."""
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name}: expected true or false, found {value!r:.80}")
    return bool(value)


def host(row: Fields, name: str) -> Host | None:
    """Return an address with its port, None if the field is absent."""
    value = optional_text(row, name)
    try:
        return None if value is None else parse_host(value)
    except MalformedError as error:
        raise InputError(f"{name}: {error}") from None


def objects(row: Fields, name: str) -> list[Row]:
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        raise InputError(f"{name}: expected a list of objects")
    return value


def properties(row: Fields) -> dict[str, str]:
    """Return the properties in ``props``, in the given order."""
    value = row.get("props")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError("props: expected an object")
    return {_checked_text("props", name): _checked_text(f"props: {name:.80}", text) for name, text in value.items()}


def message(row: Fields, topic: str) -> Message:
    """Return the message of an operation, with text from ``body`` or bytes from ``body_b64``."""
    raw = optional_text(row, "propertiesString")
    values = properties(row) if raw is None else decode_properties(raw)
    for name, property_name in (
        ("tags", PropertyName.TAGS),
        ("keys", PropertyName.KEYS),
        ("uniqKey", PropertyName.UNIQUE_KEY),
    ):
        value = optional_text(row, name)
        if value is not None:
            values[property_name] = value
    if row.get("delayLevel") is not None:
        values[PropertyName.DELAY] = str(int32(row, "delayLevel"))
    result = Message(topic, _body(row), flag=int32(row, "flag", 0))
    if raw is None:
        check_separators(values)
    result.properties = values
    return result


def check_separators(values: Mapping[str, str]) -> None:
    """Refuse properties that a reader would split into others.

    Raises:
        MessageIllegalError: A name or value contains a separator.
    """
    if any("\1" in part or "\2" in part for item in values.items() for part in item):
        raise MessageIllegalError("properties: names and values cannot contain the separators 01 and 02")


def _body(row: Fields) -> bytes:
    if "body" not in row and "body_b64" not in row:
        raise InputError("body is missing")
    plain, encoded = optional_text(row, "body"), optional_text(row, "body_b64")
    if plain is not None and encoded is not None:
        raise InputError("body and body_b64: expected one of the two, found both")
    if encoded is None:
        return b"" if plain is None else plain.encode()
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"body_b64: {error}") from None
