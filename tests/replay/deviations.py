"""What librmq does otherwise on purpose, with the reason: the one table of it."""

from __future__ import annotations

from tests.reference import Row

__all__ = ["breaks_client"]


def breaks_client(answer: Row) -> bool:
    """Whether a listener's result is one that the original's client fails on."""
    return answer.get("ackIndex", 0) < -1
