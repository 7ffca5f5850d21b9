"""A part of a read, which Spark sends from the driver to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from librmq.columns.parts import Part

__all__ = ["PartPartition"]


@dataclass
class PartPartition(InputPartition):
    """One task's work."""

    part: Part

    def __init__(self, part: Part) -> None:
        super().__init__(None)
        self.part = part
