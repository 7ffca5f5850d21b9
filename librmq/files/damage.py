"""Damage to the files of a store, as a value: `verify` finds it, recovery repairs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Damage:
    """A defect of a file."""

    file: str
    """Path of the file."""
    offset: int
    """Place of the defect in bytes: physical for the log, within the file elsewhere."""
    kind: str
    """One word for programs, as in `CorruptionError`."""
    what: str
    """What is wrong, for people."""
    bytes: int = 0
    """Number of damaged bytes."""
