"""Text from elsewhere, made safe to show on a terminal: no command, no other order, no half of a character."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["printable", "shown_body"]

UNSAFE: Final = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters, marks that change the direction of what follows, halves of surrogate pairs."""
_UNSAFE: Final = re.compile(f"[{UNSAFE}]")


def printable(text: str) -> str:
    """Return ``text`` with each unsafe character as its escape, as JSON writes it."""
    return _UNSAFE.sub(escape, text)


def escape(found: re.Match[str]) -> str:
    """Return the escape of the one character that was found."""
    return f"\\u{ord(found[0]):04x}"


def shown_body(body: bytes) -> str:
    """Return a body as representations show it: cut if it is long."""
    return repr(body) if len(body) <= 64 else f"{body[:48]!r}… ({len(body):,} bytes)"
