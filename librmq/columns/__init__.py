"""A store as Arrow record batches: what to read is planned in one process, and read there or in workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.columns.options import ReadOptions as ReadOptions
    from librmq.columns.options import Wanted as Wanted
    from librmq.columns.plan import DataLossError as DataLossError
    from librmq.columns.plan import Part as Part
    from librmq.columns.plan import plan as plan
    from librmq.columns.read import CORRUPT as CORRUPT
    from librmq.columns.read import TYPES as TYPES
    from librmq.columns.read import Reading as Reading
    from librmq.columns.read import default_columns as default_columns
    from librmq.columns.read import scan as scan

_MODULES = {
    "options": ("ReadOptions", "Wanted"),
    "plan": ("DataLossError", "Part", "plan"),
    "read": ("CORRUPT", "TYPES", "Reading", "default_columns", "scan"),
}
if not TYPE_CHECKING:  # else a checker would take any name for granted
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
