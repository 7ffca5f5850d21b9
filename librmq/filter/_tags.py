"""Filters by tags, which mirror ``FilterAPI.buildSubscriptionData`` of 4.9.4 and both checks of tags.

A broker compares codes and a consumer texts, because a queue entry has only the hash of a tag, and two tags can share
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from librmq.errors import FilterSyntaxError
from librmq.java.lang import TRIMMED, string_hash

ALL_TAGS: Final = "*"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A subscription expression: tags separated by ``||``; ``*``, empty or None selects all messages.

    Blanks around a tag have no meaning. As in the broker, only a bare ``*`` selects everything: ``" * "`` selects the
    tag ``*``, and ``||`` with blanks selects no tag at all. Immutable and thread-safe.

    Raises:
        FilterSyntaxError: The expression is a lone ``||``.
    """

    expression: str
    """The expression as given, ``*`` for an empty one."""
    tags: frozenset[str] = field(init=False)
    """The selected tags; empty if all messages are."""
    codes: frozenset[int] = field(init=False)
    """The codes of the tags, as signed 32-bit numbers."""

    def __init__(self, expression: str | None = ALL_TAGS) -> None:
        expression = expression or ALL_TAGS
        parts = [] if expression == ALL_TAGS else expression.split("||")
        if parts and not any(parts):
            raise FilterSyntaxError(expression, 0, "expected tags between the ||")
        tags = frozenset(tag for part in parts if (tag := part.strip(TRIMMED)))
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "tags", tags)
        object.__setattr__(self, "codes", frozenset(map(string_hash, tags)))

    @property
    def takes_all(self) -> bool:
        """Return whether the filter selects every message, with a tag or without."""
        return self.expression == ALL_TAGS

    def matches_code(self, code: int | None) -> bool:
        """Check an entry's tags code (None: unknown) as the broker does; false means certainly not selected."""
        if code is None or self.takes_all:
            return True
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 in self.codes

    def matches(self, tags: str | None) -> bool:
        """Check a message's tags exactly, as consumers do; a message without tags passes only if no tag is listed."""
        return not self.tags or tags in self.tags
