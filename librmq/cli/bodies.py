"""Bodies of messages as text, JSON, hexadecimal or base64."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Final, Literal

from librmq.cli.rows import message_row
from librmq.errors import BodyCompressionError
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import StoredMessage

BodyForm = Literal["text", "json", "hex", "base64", "none"]

_OF_THE_BODY: Final = ("body_b64", "stored_body_b64")


def shown_row(message: StoredMessage, levels: DelayLevels, form: BodyForm) -> dict[str, Any]:
    """Return the row of a message with its ``body`` in a form; null for one that cannot be decompressed."""
    row = {name: value for name, value in message_row(message, levels).items() if name not in _OF_THE_BODY}
    row["body"] = None if form == "none" else _body_as(message, form)
    return row


def _body_as(message: StoredMessage, form: BodyForm) -> object:
    try:
        body = message.body
    except BodyCompressionError:
        return None
    if form == "hex":
        return body.hex()
    if form == "base64":
        return base64.b64encode(body).decode("ascii")
    text = body.decode(errors="backslashreplace")
    if form == "json":
        try:
            return json.loads(text, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return text
    return text


def _finite(text: str) -> float:
    """Return a number; one beyond the largest float has no JSON form, so that its body stays text."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def _refuse(name: str) -> object:
    raise ValueError(name)
