"""Tag subscriptions: what ``a || b`` and ``*`` ask for, by code at the broker, by text at the consumer.

It mirrors ``FilterAPI.buildSubscriptionData`` of 4.9.4 and the two checks that follow from it. A queue entry
carries only the hash of a tag; two tags may share one, so the consumer looks at the text once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from librmq.errors import FilterSyntaxError
from librmq.java.hashing import string_hash

__all__ = ["ALL_TAGS", "TagFilter", "tags_code"]

ALL_TAGS: Final = "*"

_TRIMMED: Final = "".join(map(chr, range(0x21)))  # what Java's trim takes away


def tags_code(tags: str | None) -> int:
    """Return the 8-byte code of a message's tags in a queue entry: their Java hash, 0 for none."""
    return string_hash(tags) if tags else 0


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A subscription expression: tags between ``||``; ``*``, empty or None takes all messages.

    Blanks around a tag have no meaning.

    As in the broker, only ``*`` itself is all: `` * `` asks for a tag ``*``, and nothing but ``||`` and
    blanks asks for no tag at all. ``||`` alone is a ``FilterSyntaxError``. Immutable and thread-safe.
    """

    expression: str
    tags: frozenset[str] = field(init=False)
    codes: frozenset[int] = field(init=False)
    """The codes of the tags, as signed 32-bit numbers."""

    def __init__(self, expression: str | None = ALL_TAGS) -> None:
        expression = expression or ALL_TAGS
        parts = [] if expression == ALL_TAGS else expression.split("||")
        if parts and not any(parts):
            raise FilterSyntaxError(expression, 0, "expected tags between the ||")
        tags = frozenset(tag for part in parts if (tag := part.strip(_TRIMMED)))
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "codes", frozenset(map(string_hash, tags)))

    @property
    def takes_all(self) -> bool:
        """Return whether the filter selects every message, with a tag or without."""
        return self.expression == ALL_TAGS

    def matches_code(self, code: int | None) -> bool:
        """Check an entry's tags code (None: unknown) as the broker does; false: certainly not selected."""
        if code is None or self.takes_all:
            return True
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 in self.codes

    def matches(self, tags: str | None) -> bool:
        """Check a message's tags exactly, as consumers do; without any it passes only where none is listed."""
        return not self.tags or tags in self.tags
