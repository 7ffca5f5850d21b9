"""Damage to the files of a store, as a value: `verify` finds it, recovery repairs it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Damage"]


@dataclass(frozen=True, slots=True)
class Damage:
    """A defect of ``bytes`` of ``file`` from ``offset`` on (physical for the log, else within the file)."""

    file: str
    offset: int
    kind: str
    what: str
    bytes: int = 0
