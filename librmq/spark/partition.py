"""The partition that Spark sends to a worker: a part that `librmq.columns.planner` has planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from librmq.columns.parts import Part


@dataclass
class PartPartition(InputPartition):
    """The work of one task."""

    part: Part

    def __init__(self, part: Part) -> None:
        super().__init__(None)
        self.part = part
